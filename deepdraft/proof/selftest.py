"""`deepdraft selftest`: does this machine compute what deepdraft relies on?

Owns: a list of checks that need no checkpoint. Each returns what it measured or raises `Failed`.
Knows nothing of: servers, files.

The central promise is that a row's bits depend on that row alone. It rests on how the installed
BLAS and vector code treat shapes, so it is checked where it is used.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.models import model_class
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.ops import attention, elementwise, index, moe
from deepdraft.proof import oracles
from deepdraft.proof.failed import Failed
from deepdraft.proof.native import probe_text
from deepdraft.proof.tiny import RandomWeights, tiny_args
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.quant import formats

MOST_ROWS = 96
"""Rows of a step that are proven to have the same bits alone and together: every count so far."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    seconds: float


def _rows_alone(name: str, make: Callable[[int], Tensor], f: Callable[[Tensor], Tensor]) -> int:
    """f of some rows equals the same rows of f of all, bitwise, with wild neighbours."""
    total = MOST_ROWS + 3
    x = make(total)
    whole = f(x)
    compared = 0
    for count in range(1, MOST_ROWS + 1):
        for start in (0, 1 + count % 3):
            part = f(x[start : start + count].clone())
            if not torch.equal(part, whole[start : start + count]):
                raise Failed(
                    f"{name}: {count} rows from row {start} differ from the same of {total}"
                )
            compared += 1
    wild = x.clone()
    wild[1::2] = 1e4
    if not torch.equal(f(wild)[0::2], whole[0::2]):
        raise Failed(f"{name}: a row changes with its neighbours' values")
    return compared


def _pad(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As a step does: one row becomes two."""
    return lambda x: f(x.expand(2, *x.shape[1:]))[:1] if x.shape[0] == 1 else f(x)


def check_linear_rows(device: str) -> str:
    """Products x @ w with w [in, out]."""
    compared = 0
    g = torch.Generator().manual_seed(1)
    for width, out in (
        (64, 96),
        (192, 160),
        (96, 320),
        (768, 24),
        (256, 64),
        (192, 4096),
        (384, 960),
    ):
        w = torch.randn(width, out, generator=g).to(device)
        compared += _rows_alone(
            f"x [R, {width}] @ w [{width}, {out}]",
            lambda n, width=width: torch.randn(n, width, generator=g).to(device),
            _pad(lambda x, w=w: torch.mm(x, w)),
        )
    return f"{compared} comparisons"


def check_elementwise_rows(device: str) -> str:
    """Gates, norms, softplus, rotation, residual mixes."""
    g = torch.Generator().manual_seed(2)

    def rand(*shape: int) -> Callable[[int], Tensor]:
        return lambda n: (2 * torch.randn(n, *shape, generator=g)).to(device)

    weight = torch.rand(24, generator=g).to(device)
    compared = 0
    for width in (4, 7, 16, 24):
        compared += _rows_alone(f"sigmoid [{width}]", rand(width), elementwise.sigmoid)
        compared += _rows_alone(f"silu [{width}]", rand(width), elementwise.silu)
        compared += _rows_alone(f"softplus [{width}]", rand(width), elementwise.softplus)
    compared += _rows_alone("rms_norm", rand(24), lambda x: elementwise.rms_norm(x, weight, 1e-20))
    mix = elementwise.HyperMix(
        torch.randn(24, 256, generator=g).to(device) / 16,
        torch.randn(24, generator=g).to(device),
        torch.ones(3, device=device),
        streams=4,
        iters=20,
        eps=1e-6,
    )

    def sublayer(x: Tensor) -> Tensor:
        pre, post, comb = mix(x, 1e-20)
        return elementwise.expand(elementwise.collapse(x, pre), x, post, comb)

    compared += _rows_alone("residual mix", rand(4, 64), _pad(sublayer))
    return f"{compared} comparisons"


def check_attention_rows(device: str) -> str:
    """Attention with a sink and empty places; both precisions."""
    g = torch.Generator().manual_seed(3)
    compared = 0
    sizes = (4, 64, 49), (16, 128, 129)  # the second is worked by several threads where it can be
    for (heads, width, places), f in product(
        sizes, (attention.sink_attention, attention.sink_attention_bf16)
    ):

        def run(x: Tensor, f: Callable = f, heads: int = heads, width: int = width) -> Tensor:
            q, keys = x[:, :heads], x[:, heads:]
            bias = torch.where(keys[..., :1] > -1.0, 0.0, -torch.inf).transpose(1, 2)
            bias = bias.expand(-1, heads, -1).clone()
            bias[..., 0] = 0.5
            return f(q, keys, bias, width**-0.5)

        compared += _rows_alone(
            f.__name__,
            lambda n, own=(heads + places, width): torch.randn(n, *own, generator=g).to(device),
            run,
        )
    return f"{compared} comparisons"


def check_expert_rows(device: str) -> str:
    """Gathered, dense and sorted expert products give the same bits, for any row count."""
    g = torch.Generator().manual_seed(4)
    experts, d, f, k = 13, 64, 32, 3
    w13 = (torch.randn(experts, d, 2 * f, generator=g) / 8).to(device)
    w2 = (torch.randn(experts, f, d, generator=g) / 6).to(device)
    gate = torch.randn(d, experts - 1, generator=g).to(device)
    bias = torch.zeros(experts - 1, device=device)

    def run(x: Tensor) -> Tensor:
        real = x.shape[0]
        if real == 1:
            x = x.expand(2, -1).contiguous()
        picks, weights = moe.route(x, gate, bias, k=k, scale=1.5, temperature=1.0)
        y = moe.expert_products(
            x,
            picks,
            weights,
            w13,
            w2,
            limit=10.0,
            num_rows=real,
            round_up=lambda t: t,
            quantise=lambda t: t,
        )
        return y[:real]

    compared = _rows_alone("experts", lambda n: torch.randn(n, d, generator=g).to(device), run)
    return f"{compared} comparisons"


def check_index_rows(device: str) -> str:
    """A row's index scores do not depend on how many keys stand behind those it can reach."""
    g = torch.Generator().manual_seed(5)
    compared = 0
    for heads, width in ((1, 128), (2, 32), (2, 128), (4, 32), (32, 128)):
        q = torch.randn(96, heads, width, generator=g).to(device)
        w = torch.randn(96, heads, generator=g).to(device)
        keys = torch.randn(1024, width, generator=g).to(device)
        whole = index.index_scores(q, w, keys)
        for rows in (1, 2, 3, 6, 8, 16, 96):
            for n in (64, 128, 320, 1024):
                part = index.index_scores(q[:rows], w[:rows], keys[:n])
                if not torch.equal(part, whole[:rows, :n]):
                    raise Failed(
                        f"index scores of {rows} rows, {heads} heads of {width}, {n} keys differ"
                    )
                compared += 1
    tied = torch.zeros(1, 40, device=device)
    if index.select_top(tied, 5).tolist() != [[0, 1, 2, 3, 4]]:
        raise Failed("equal index scores do not go to the lower entry")
    return f"{compared} comparisons"


def check_quantisers(device: str) -> str:
    """Rounding to the stored formats: idempotent, on the grid, nearest."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(64, 128, generator=g, dtype=torch.float64).to(device)
    for name, bound in (
        ("fake_fp8_group32", 2**-3.9),
        ("fake_mxfp4_group32", 0.5),
        ("fake_fp4_e4m3_group16", 0.5),
    ):
        f = getattr(formats, name)
        y = f(x)
        if not torch.equal(f(y), y):
            raise Failed(f"{name} is not idempotent")
        if not torch.equal(f(x.float()).double(), f(x.float().double())):
            raise Failed(f"{name} differs between float32 and float64")
        worst = ((y - x).abs().amax(-1) / x.abs().amax(-1)).max().item()
        if worst > bound:
            raise Failed(f"{name}: error {worst:.3g} of the largest value, at most {bound:.3g}")
    return "3 formats"


def check_model_steps(device: str, numerics: str) -> str:
    """A tiny model: one shot, steps, odd chunks, batches and roll-back agree bit for bit."""
    args = tiny_args()
    model = DeepseekV41(
        args, RandomWeights(args), list(range(256)), numerics=numerics, device=device
    )
    pool = model.new_pool(4, 256, slack=96)
    g = torch.Generator().manual_seed(7)
    text = torch.randint(3, 256, (170,), generator=g).tolist()
    other = torch.randint(3, 256, (90,), generator=g).tolist()
    one = pool.open()
    whole = model.prefill(one, text, logits="all").logits
    assert whole is not None
    two, three = pool.open(), pool.open()
    model.prefill(three, other)
    model.prefill(two, text[:101])
    at, sizes = 101, (1, 2, 6, 1, 3, 16, 5, 1, 1, 6)
    for i, size in enumerate(sizes):
        wrong = [(t + 7) % 256 for t in text[at : at + 5]]
        if i % 3 == 0:  # a rejected draft
            model.step([(two, wrong)])
            two.truncate(at)
        work = [(two, text[at : at + size])]
        if i % 2:
            work.insert(0, (three, other[i : i + 1 + i % 3]))
        logits = model.step(work).logits
        assert logits is not None
        if not torch.equal(logits[-size:], whole[at : at + size]):
            worst = (logits[-size:] - whole[at : at + size]).abs().max().item()
            raise Failed(f"step of {size} rows at position {at} differs by {worst:.3g}")
        at += size
    return f"{len(sizes)} steps of 1 to 16 rows"


def check_family_steps(device: str, kind: str, numerics: str) -> str:
    """A tiny model of another family: one shot, chunks, single tokens beside another sequence and
    roll-back agree bit for bit."""
    with tempfile.TemporaryDirectory(prefix="deepdraft-selftest-") as root:
        checkpoint = Checkpoint.open(write_tiny(Path(root) / kind, kind, storage="published"))
        model = model_class(checkpoint.args)(
            checkpoint.args, checkpoint, numerics=numerics, device=device
        )
    pool = model.new_pool(3, 144, slack=144)
    text = probe_text(checkpoint.args, 144)
    whole = model.step([(pool.open(), text)]).logits
    two, three = pool.open(), pool.open()
    model.prefill(three, text[7:40])
    at, sizes = 0, (33, 1, 2, 64, 6, 1, 3, 16, 1, 1, 16)
    for i, size in enumerate(sizes):
        if i % 3 == 1:  # a rejected draft
            model.step([(two, text[:5])])
            two.truncate(at)
        work = [(two, text[at : at + size])]
        if i % 2:
            work.insert(0, (three, text[i : i + 1 + i % 3]))
        logits = model.step(work).logits
        if not torch.equal(logits[-size:], whole[at : at + size]):
            worst = (logits[-size:] - whole[at : at + size]).abs().max().item()
            raise Failed(f"step of {size} rows at position {at} differs by {worst:.3g}")
        at += size
    return f"{len(sizes)} steps of 1 to 64 rows"


FAMILY_STEPS = (
    ("llama", "exact"),
    ("llama", "bf16"),
    ("v2", "fp16"),
    ("v3", "exact"),
    ("v3", "quant"),
    ("v32", "quant"),
    ("v4", "exact"),
    ("v4", "quant"),
)

CHECKS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("linear maps: rows", check_linear_rows),
    ("elementwise: rows", check_elementwise_rows),
    ("attention: rows", check_attention_rows),
    ("experts: rows", check_expert_rows),
    ("indexer: rows and ties", check_index_rows),
    ("quantisers", check_quantisers),
    ("verification rules: exact", lambda device: oracles.check_exact()),
    ("verification rules: cut blocks", lambda device: oracles.check_cuts()),
    ("verification rules: sampled", lambda device: oracles.check_sampled()),
    ("verification rules: keys", lambda device: oracles.check_keys()),
    ("verification rules: coupled", lambda device: oracles.check_coupled()),
    ("model steps, exact", lambda device: check_model_steps(device, "exact")),
    ("model steps, qsim", lambda device: check_model_steps(device, "qsim")),
    ("model steps, quant", lambda device: check_model_steps(device, "quant")),
)
FAMILY_CHECKS: tuple[tuple[str, Callable[[str], str]], ...] = tuple(
    (f"{kind} steps, {numerics}", partial(check_family_steps, kind=kind, numerics=numerics))
    for kind, numerics in FAMILY_STEPS
)
"""Of the families that run on a CPU only."""


def run(device: str = "cpu") -> list[Result]:
    """Run every check on a device and return the report."""
    results = []
    checks = (*CHECKS, *FAMILY_CHECKS) if device == "cpu" else CHECKS
    if device == "cuda":
        from deepdraft.proof.selftest_gpu import check_device_step

        checks = (*CHECKS, ("kernels: layers, rows, drafts", check_device_step))
    for name, check in checks:
        start = time.perf_counter()
        try:
            detail, ok = check(device), True
        except Failed as failure:
            detail, ok = str(failure), False
        results.append(Result(name, ok, detail, round(time.perf_counter() - start, 3)))
    return results


def main(device: str = "cpu", as_json: bool = False) -> int:
    """Print the report; 0 only if every check holds."""
    results = run(device)
    machine = {
        "device": device,
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    passed = all(r.ok for r in results)
    if as_json:
        print(json.dumps({"passed": passed, **machine, "checks": [asdict(r) for r in results]}))
    else:
        print(f"selftest on {device}: torch {machine['torch']}, {machine['threads']} thread(s)")
        for r in results:
            print(f"  {'ok  ' if r.ok else 'FAIL'} {r.name}: {r.detail} ({r.seconds:.2f} s)")
        print("all checks hold" if passed else "SOME CHECKS FAIL: do not rely on this machine")
    return 0 if passed else 1
