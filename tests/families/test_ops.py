"""Operations of the families against plain formulations, and the row rule."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepdraft.arch import Rope, Router
from deepdraft.ops.blocked import BLOCK_KEYS, PAST_BLOCK, blocked_attention, whole_blocks
from deepdraft.ops.elementwise import rotate
from deepdraft.ops.index import MIN_PRODUCT_ROWS
from deepdraft.ops.rope import RopeTable, frequencies
from deepdraft.ops.routing import choose, expert_scores, expert_weights
from deepdraft.quant.blocks import dequantize_fp8_block, quantize_fp8_block


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- attention in blocks -------------------------------------------------------------------


def causal(rows: int, keys: int, padded: int) -> Tensor:
    """The last `rows` of `keys` positions, each seeing what is before it."""
    seen = torch.arange(padded) <= torch.arange(keys - rows, keys)[:, None]
    return torch.where(seen, 0.0, -torch.inf)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 129, 700])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention(keys: int, rows: int) -> None:
    rows, n = min(rows, keys), whole_blocks(keys)
    q, k, v = rand(2, rows, 24), rand(2, n, 24, seed=1) * 3, rand(2, n, 20, seed=2)
    bias = causal(rows, keys, n)
    scores = q.double() @ k.double().transpose(1, 2) + bias
    wanted = scores.softmax(-1) @ v.double()
    got = blocked_attention(q, k, v, bias, 1.0)
    assert got.shape == (2, rows, 20)
    assert float((got - wanted).abs().max()) < 1e-5
    assert n % BLOCK_KEYS == 0 and n - keys < BLOCK_KEYS


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("block", [BLOCK_KEYS, PAST_BLOCK])
@pytest.mark.parametrize("channels", [24, 64, 192, 576])
def test_a_row_of_attention_depends_on_its_keys_alone(channels: int, block: int) -> None:
    """Neither the row count nor keys that only later rows see change a bit."""
    total, rows = 1000, 130
    n = whole_blocks(total, block)
    q = rand(1, rows, channels)
    k, v = rand(1, n, channels, seed=1), rand(1, n, channels, seed=2)

    def run(first: int, last: int, keys: int) -> Tensor:
        size = whole_blocks(keys, block)
        bias = causal(rows, total, size)[first:last]
        missing = max(0, MIN_PRODUCT_ROWS - len(bias))
        bias = torch.cat([bias, bias[-1:].expand(missing, -1)])
        return blocked_attention(q[:, first:last], k[:, :size], v[:, :size], bias, 0.3, block=block)

    whole = run(0, rows, total)
    for first, last in ((0, 1), (0, 2), (1, 4), (5, 12), (7, 24), (40, 73), (129, 130)):
        keys = total - rows + last
        assert torch.equal(run(first, last, keys), whole[:, first:last]), (first, last)
        assert torch.equal(run(first, last, total), whole[:, first:last])


def test_blocks_without_keys_count_for_nothing() -> None:
    q, v = rand(1, 2, 16), rand(1, 320, 16, seed=2)
    k = rand(1, 320, 16, seed=1)
    bias = torch.full((2, 320), -torch.inf)
    bias[:, 70:90] = 0.0
    bias[1, 5] = 0.0
    wanted = (q @ k.transpose(1, 2) + bias).softmax(-1) @ v
    got = blocked_attention(q, k, v, bias, 1.0)
    assert torch.allclose(got, wanted, atol=1e-6) and torch.isfinite(got).all()


# ---- rotary tables -------------------------------------------------------------------------

YARN = Rope(theta=1e4, kind="yarn", factor=40.0, original_max_positions=4096, attention_factor=1.25)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("rope", [Rope(theta=1e4), YARN])
def test_rotation(pairing: str, rope: Rope) -> None:
    dim, start, width = 20, 6, 12
    table = RopeTable(
        rope,
        dim=dim,
        start=start,
        width=width,
        pairing=pairing,  # type: ignore[arg-type]
        dtype=torch.float64,
        device="cpu",
    )
    x = rand(5, dim).double()
    places = torch.tensor([0, 1, 17, 500, 3])
    got = rotate(x, *table.table(places))
    freq = frequencies(rope, width)
    for row, place in enumerate(places.tolist()):
        wanted = x[row].clone()
        for k in range(width // 2):
            a, b = (2 * k, 2 * k + 1) if pairing == "adjacent" else (k, k + width // 2)
            turned = torch.complex(x[row, start + a], x[row, start + b]) * torch.polar(
                torch.tensor(rope.attention_factor, dtype=torch.float64), place * freq[k]
            )
            wanted[start + a], wanted[start + b] = turned.real, turned.imag
        assert torch.allclose(got[row], wanted, atol=1e-12)


def test_frequencies() -> None:
    plain = frequencies(Rope(theta=1e4), 8)
    assert torch.allclose(plain, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))
    linear = frequencies(Rope(theta=1e4, kind="linear", factor=4.0), 8)
    assert torch.equal(linear, plain / 4)
    # Published YaRN test values: theta 160000, factor 16, original context 65536, 64 channels.
    v4 = Rope(theta=160000.0, kind="yarn", factor=16.0, original_max_positions=65536)
    got = frequencies(v4, 64)
    for k, value in (
        (15, 0.003635538583622),
        (16, 0.002265625),
        (20, 2.969777e-4),
        (31, 5.680529e-7),
    ):
        assert math.isclose(float(got[k]), value, rel_tol=1e-6), k


def test_llama3_frequencies() -> None:
    rope = Rope(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    plain = frequencies(Rope(theta=5e5), 128)
    ratio = frequencies(rope, 128) / plain
    turns = 8192 * plain / (2 * math.pi)
    assert torch.allclose(ratio[turns > 4], torch.ones(1).double())
    assert torch.allclose(ratio[turns < 1], torch.full((1,), 1 / 8).double())
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 3
    assert torch.allclose(ratio[between], 1 / 8 + (turns[between] - 1) / 3 * (7 / 8))


# ---- routing -------------------------------------------------------------------------------

ROUTER = Router(
    scoring="sigmoid",
    experts=12,
    picks=4,
    scale=2.5,
    biased=True,
    normalise=True,
    groups=4,
    kept_groups=2,
    group_best=2,
)


def naive_choice(scores: list[float], router: Router) -> set[int]:
    size = router.experts // router.groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.groups)]
    judged = [
        sum(sorted((scores[e] for e in g), reverse=True)[: router.group_best]) for g in groups
    ]
    best = sorted(range(router.groups), key=lambda g: -judged[g])[: router.kept_groups]
    allowed = [e for g in best for e in groups[g]]
    return set(sorted(allowed, key=lambda e: -scores[e])[: router.picks])


@pytest.mark.parametrize(
    "change", [{}, {"group_best": 1}, {"groups": 1, "kept_groups": 1}, {"groups": 6}]
)
def test_choice_of_experts(change: dict) -> None:
    router = replace(ROUTER, **change)
    scores, bias = expert_scores(rand(50, 12), router), rand(12, seed=1) / 4
    picks = choose(scores, bias, router)
    for row in range(50):
        wanted = naive_choice((scores[row] + bias).tolist(), router)
        assert set(picks[row].tolist()) == wanted
    weights = expert_weights(scores, picks, router)
    assert torch.allclose(weights.sum(-1), torch.full((50,), 2.5))
    assert torch.allclose(
        weights[:, 0] / weights[:, 1],
        (scores.gather(1, picks)[:, 0] / scores.gather(1, picks)[:, 1]),
    )
    free = expert_weights(scores, picks, replace(router, normalise=False))
    assert torch.allclose(free, scores.gather(1, picks) * 2.5)


def test_scores() -> None:
    x = rand(7, 12) * 5
    assert torch.allclose(expert_scores(x, ROUTER), torch.sigmoid(x))
    assert torch.allclose(expert_scores(x, replace(ROUTER, scoring="softmax")), x.softmax(-1))
    root = expert_scores(x, replace(ROUTER, scoring="sqrtsoftplus"))
    assert torch.allclose(root, torch.nn.functional.softplus(x).sqrt(), atol=1e-6)


def test_routing_row_by_row() -> None:
    x, bias = rand(33, 12), rand(12, seed=1)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        router = replace(ROUTER, scoring=scoring)

        def run(part: Tensor, router: Router = router) -> Tensor:
            scores = expert_scores(part, router)
            return expert_weights(scores, choose(scores, bias, router), router)

        whole = run(x)
        for start in range(0, 30, 3):
            assert torch.equal(run(x[start : start + 3].clone()), whole[start : start + 3])


# ---- FP8 blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (100, 60), (129, 257), (1, 1)])
def test_fp8_blocks(shape: tuple[int, int]) -> None:
    w = rand(*shape) * torch.linspace(0.01, 30.0, shape[1])
    values, scales = quantize_fp8_block(w)
    assert scales.shape == tuple(-(-n // 128) for n in shape) and scales.dtype == torch.float32
    back = dequantize_fp8_block(values, scales)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert ((back - w).abs() <= (w.abs() / 16).clamp(min=2.0**-10 * spread) * 1.001).all()
    again, same = quantize_fp8_block(back)
    assert torch.allclose(dequantize_fp8_block(again, same), back, rtol=1e-5)
    exponents = (scales.log2().ceil() + 127).to(torch.uint8)
    powers = dequantize_fp8_block(values, exponents)
    assert torch.equal(powers, dequantize_fp8_block(values, torch.exp2(exponents.float() - 127)))
