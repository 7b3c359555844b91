"""A row's bits depend on that row alone: row i of a batch equals row i by itself.

For 1 to 96 rows, starting at even and odd places of the batch, with other rows' values changed. As
in a step, a lone row comes with its copy.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepdraft.models.layers import make_numerics
from deepdraft.ops import attention, elementwise, index, moe

TOTAL = 96
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 96)
Op = Callable[[Tensor], Tensor]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def alone(f: Op) -> Op:
    """Pads a lone row as a step does."""
    return lambda x: f(x.expand(2, *x.shape[1:]).contiguous())[:1] if len(x) == 1 else f(x)


def linear() -> Op:
    w = rand(96, 320)
    return lambda x: torch.mm(x, w)


def narrow_linear() -> Op:
    w = rand(96, 24)
    return lambda x: torch.mm(x, w)


def grouped() -> Op:
    w = rand(4, 24, 16)
    return lambda x: torch.bmm(x.view(-1, 4, 24).transpose(0, 1), w).transpose(0, 1)


def norm() -> Op:
    w = rand(96)
    return lambda x: elementwise.rms_norm(x, w, 1e-20)


def rotation() -> Op:
    rotary = elementwise.Rotary(
        dim=24, rope_dim=16, theta=1e4, yarn=None, dtype=torch.float32, device="cpu"
    )

    def f(x: Tensor) -> Tensor:
        cos, sin = rotary.table(x[:, 0].abs().mul(100).long())
        return elementwise.rotate(x.view(-1, 4, 24), cos[:, None], sin[:, None], rotary.swap)

    return f


def residual() -> Op:
    mix = elementwise.HyperMix(rand(24, 96) / 10, rand(24), rand(3), streams=4, iters=20, eps=1e-6)

    def f(x: Tensor) -> Tensor:
        streams = x.view(-1, 4, 24)
        pre, post, comb = mix(streams, 1e-20)
        return elementwise.expand(elementwise.collapse(streams, pre), streams, post, comb)

    return f


def attend(which: Callable[..., Tensor]) -> Op:
    def f(x: Tensor) -> Tensor:
        q = x.view(-1, 3, 32)
        keys = torch.cat([x.view(-1, 3, 32), (x * 0.7).view(-1, 3, 32)], 1)
        bias = torch.where(keys[:, None, :, 0] > -0.5, 0.0, -torch.inf).repeat(1, 3, 1)
        bias[:, :, 2] = 0.25
        return which(q, keys, bias, 0.2)

    return f


def index_rows() -> Op:
    keys = rand(128, 24)

    def f(x: Tensor) -> Tensor:
        reach = x[:, 1].abs().mul(40).long().clamp(max=128)
        scores = index.index_scores(x.view(-1, 4, 24), x[:, :4].contiguous(), keys)
        scores = index.mask_unreachable(scores, reach)
        kept = index.candidate_blocks(scores, reach, block=4, keep=6)
        inside = index.restrict_to_blocks(scores, kept, block=4)
        chosen = [index.select_top(s, 16).float() for s in (scores, inside)]
        return torch.cat([scores, inside, *chosen], 1)

    return f


def experts(count: int) -> Op:
    gate, bias = rand(96, count), rand(count) / 10
    w13, w2 = rand(count + 1, 96, 64) / 10, rand(count + 1, 32, 96) / 6

    def f(x: Tensor, lone: bool = False) -> Tensor:
        picks, weights = moe.route(x, gate, bias, k=2, scale=1.5, temperature=1.0)
        shared = torch.full((len(x), 1), count)
        return moe.expert_products(
            x,
            torch.cat([picks, shared], 1),
            torch.cat([weights, torch.ones(len(x), 1)], 1),
            w13,
            w2,
            limit=2.0,
            num_rows=1 if lone else len(x),
            round_up=lambda t: t,
            quantise=lambda t: t,
        )

    def either(x: Tensor) -> Tensor:
        return f(x.expand(2, -1).contiguous(), lone=True)[:1] if len(x) == 1 else f(x)

    return either


def quantiser(name: str) -> Op:
    f = getattr(make_numerics("quant"), name)
    return lambda x: f(x)


OPS: dict[str, Callable[[], Op]] = {
    "linear": lambda: alone(linear()),
    "narrow linear": lambda: alone(narrow_linear()),
    "grouped linear": lambda: alone(grouped()),
    "rms norm": norm,
    "rotation": rotation,
    "residual mix": lambda: alone(residual()),
    "sigmoid": lambda: elementwise.sigmoid,
    "silu": lambda: elementwise.silu,
    "softplus": lambda: elementwise.softplus,
    "sigmoid, 7 wide": lambda: lambda x: elementwise.sigmoid(x[:, :7].contiguous()),
    "softplus, 7 wide": lambda: lambda x: elementwise.softplus(x[:, :7].contiguous()),
    "attention": lambda: attend(attention.sink_attention),
    "attention, bf16": lambda: attend(attention.sink_attention_bf16),
    "index": lambda: alone(index_rows()),
    "experts, mostly gathered": lambda: experts(200),
    "experts, mostly dense": lambda: experts(8),
    "fp8": lambda: quantiser("fp8"),
    "main kv": lambda: quantiser("main_kv"),
    "index keys": lambda: quantiser("index"),
    "bf16": lambda: quantiser("act"),
}


@pytest.mark.parametrize("name", OPS)
def test_a_row_alone_and_in_a_batch(name: str) -> None:
    f = OPS[name]()
    x = rand(TOTAL + 3, 96, seed=9)
    whole = f(x.clone())
    for count in COUNTS:
        for start in (0, 1, 3) if count < TOTAL else (0, 1):
            part = f(x[start : start + count].clone())
            assert torch.equal(part, whole[start : start + count]), (count, start)
    wild = x.clone()
    wild[0::2] = wild[0::2] * 300 + 7
    assert torch.equal(f(wild)[1::2], whole[1::2])
    twice = f(torch.cat([x[:5], x[:5]]))
    assert torch.equal(twice[:5], twice[5:])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("form", ["exact", "bf16", "chunked"])
def test_attention_of_fewer_rows_than_threads(form: str, threads: int) -> None:
    """Of sizes that several threads share (16 heads over 128 places)."""
    x = rand(9, 16 + 128, 128, seed=10)
    sink = rand(16, seed=11)

    def f(x: torch.Tensor) -> torch.Tensor:
        q, keys = x[:, :16], x[:, 16:]
        if form == "chunked":
            valid = torch.ones(x.shape[0], 128, dtype=torch.bool)
            return attention.chunked_sink_attention(q, keys, valid, sink, 0.3)
        bias = sink.view(-1, 1).expand(x.shape[0], 16, 128).contiguous()
        attend = attention.sink_attention if form == "exact" else attention.sink_attention_bf16
        return attend(q, keys, bias, 0.3)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = f(x)
        for count in range(1, 9):
            assert torch.equal(f(x[:count].clone()), whole[:count]), count
    finally:
        torch.set_num_threads(before)
