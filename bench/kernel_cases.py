"""What the kernel benches run: published shapes, their slices, and random operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from deepdraft.kernels import (
    attention,
    cache,
    engram,
    filters,
    gemv,
    gemv_quant,
    index,
    latents,
    layout,
    markov,
    mhc,
    moe,
    routing,
    sample,
)


@dataclass
class SassCase:
    """One launch to compile; `weights_per_loop`: weights that one turn of a kernel's loop reads."""

    name: str
    launch: Callable[[], object]
    weights_per_loop: dict[str, int] = field(default_factory=dict)


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def fake_tiled(kind: str, rows: int, cols: int, plan: layout.Plan | None = None) -> layout.Tiled:
    plan = plan or layout.dense_plan(rows, cols)
    b, g = plan.tile, cols // 32
    values = meta(rows // b, g, b, 32, dtype=torch.bfloat16 if kind == "bf16" else torch.uint8)
    scales = None if kind == "bf16" else meta(rows // b, g, b // 32)
    return layout.Tiled(
        kind, rows, cols, plan, values, scales, meta(rows // b * 16, dtype=torch.int32)
    )


def dense_case(name: str, rows: int, cols: int, kind: str = "fp8", plan=None) -> SassCase:
    w = fake_tiled("bf16" if kind == "bf16" else "fp8", rows, cols, plan)
    if kind == "fp8":
        x = gemv.QuantRows(meta(8, cols), meta(cols // 32, 8, dtype=torch.float32))
    else:
        x = meta(8, cols, dtype=torch.bfloat16)
    per_loop = w.plan.tile * w.plan.step * 32
    return SassCase(f"{kind} {name}", lambda: gemv.gemv(x, w), {"gemv_kernel": per_loop})


def expert_case(name: str, hidden: int, width: int, k: int = 6) -> list[SassCase]:
    def fake(rows: int, cols: int) -> layout.Tiled:
        plan = layout.expert_plan(rows, cols)
        b, g = plan.tile, cols // 32
        values = meta(384, rows // (2 * b), g, b, 32)
        scales = meta(384, rows // (2 * b), g, 2, b)
        arrivals = meta(rows // (2 * b) * 64, dtype=torch.int32)
        return layout.Tiled("fp4", rows, cols, plan, values, scales, arrivals)

    w13, w2 = fake(2 * width, hidden), fake(hidden, width)
    x = gemv.QuantRows(meta(8, hidden), meta(hidden // 32, 8, dtype=torch.float32))
    h = gemv.QuantRows(meta(8 * k, width), meta(width // 32, 8 * k, dtype=torch.float32))
    places = (1, 8 * k)
    listed = moe.ExpertList(meta(*places, dtype=torch.int32), meta(*places, 8, dtype=torch.int32))
    weights = meta(8, k, dtype=torch.float32)
    up_loop, down_loop = (2 * w.plan.tile * w.plan.step * 32 for w in (w13, w2))
    return [
        SassCase(
            f"experts up {name}",
            lambda: moe.routed_up(x, listed, weights, w13, limit=10.0),
            {"expert_up_kernel": up_loop},
        ),
        SassCase(
            f"experts down {name}",
            lambda: moe.routed_down(h, listed, w2, picks=k),
            {"expert_down_kernel": down_loop},
        ),
    ]


def sass_cases() -> Iterator[SassCase]:
    yield dense_case("wq_b 32768x1280", 32768, 1280)
    yield dense_case("wo_b 5120x8192", 5120, 8192)
    yield dense_case("wq_b 1/8 4096x1280", 4096, 1280)
    yield dense_case("tile 32", 288, 288)
    yield dense_case("wo_a", 8192, 4096, "fp8xbf16")
    yield dense_case("head", 129280, 5120, "bf16")
    for width in (2304, 1152, 576, 288):
        yield from expert_case(f"5120x{width}", 5120, width)
    picks = meta(8, 6, dtype=torch.int32)
    yield SassCase("expert list", lambda: moe.expert_list(picks))
    h = meta(8, 4608, dtype=torch.bfloat16)
    yield SassCase("shared activation", lambda: moe.swiglu_rows(h, limit=10.0))
    x = meta(8, 4, 5120, dtype=torch.bfloat16)
    fn, base, scale, norm, coef = (
        meta(*s, dtype=torch.float32) for s in ((24, 20480), (24,), (3,), (5120,), (8, 24))
    )
    yield SassCase(
        "mix coefficients",
        lambda: mhc.mix_coefficients(x, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-20),
    )
    y, picked = (meta(8, *s, 5120, dtype=torch.bfloat16) for s in ((), (6,)))
    yield SassCase("boundary attention", lambda: mhc.boundary(x, norm, y=y, coef=coef))
    yield SassCase("boundary experts", lambda: mhc.boundary(x, norm, y=picked, shared=y, coef=coef))
    yield SassCase("norm 1280 of 1792", lambda: norm_1280())
    yield SassCase("quantise 5120", lambda: gemv.quantize_rows(y))
    yield SassCase("write window", lambda: write("window", 512, 1792))
    yield SassCase("write main, pooled", lambda: write("main", 512, 1024, pool=True))
    yield SassCase("write index", lambda: write("index", 128, 128))
    for heads in (64, 32, 8):
        yield SassCase(f"attention {heads} heads", lambda h=heads: attend(h))
    yield SassCase("select 65536", lambda: select(65536))
    yield SassCase(
        "route 384",
        lambda: routing.route(
            floats(8, 384), floats(384), ints(8), k=6, scale=1.5, temperature=1.0
        ),
    )
    logits, live = floats(8, 384), ints(8)
    settings = {"k": 6, "scale": 1.5, "temperature": 1.0}
    yield SassCase(
        "route and list",
        lambda: routing.route_listed(logits, floats(384), live, ints(16), **settings),
    )
    yield SassCase("latents", split)
    grouped, wide = fake_tiled("fp8", 8192, 4096), meta(8, 32768, dtype=torch.bfloat16)
    yield SassCase("wo_a, quantised", lambda: gemv_quant.gemv_quantized(wide, grouped, blocks=8))
    rows = meta(8, 24, dtype=torch.int64)
    table = meta(1000, 256), meta(1000, 8)
    yield SassCase("engram rows", lambda: engram.gather_rows(*table, rows))
    kv = meta(8, 25600, dtype=torch.bfloat16)
    yield SassCase(
        "engram injection", lambda: engram.inject(x, kv, floats(4, 5120), norm_eps=1e-20)
    )
    one = meta(8, dtype=torch.int64)
    temperature = meta(8, dtype=torch.float64)
    yield SassCase("tokens", lambda: sample.pick_tokens(floats(8, 129280), temperature, one, one))
    yield SassCase("tokens under settings", filtered)
    yield SassCase(
        "log-probabilities", lambda: filters.token_logprobs(floats(8, 129280), ints(8), listed=20)
    )
    yield SassCase("markov rounds", drafted)


def split() -> object:
    x, tables = meta(8, 1792, dtype=torch.bfloat16), (floats(8, 32), floats(8, 32))
    return latents.split_latents(
        x, floats(1280), floats(512), *tables, ints(8), meta(1000, 528), norm_eps=1e-20
    )


def filtered() -> object:
    doubles = meta(4, 129280, dtype=torch.float64)
    settings = filters.Settings(
        meta(4, 6, dtype=torch.float64), meta(4, 3, dtype=torch.int64), meta(4, dtype=torch.int64),
        ints(4, 129280), meta(4, 129280), doubles,
    )  # fmt: skip
    picked = filters.pick_filtered(
        floats(8, 129280), ints(8), ints(8), ints(8), settings, width=4, cut=True,
        mask=meta(8, 129280),
    )  # fmt: skip
    return filters.count_tokens(picked, ints(8), ints(8), settings)


def drafted() -> object:
    halves = meta(129280, 256, dtype=torch.bfloat16)
    return markov.markov_rounds(
        floats(8, 129280), halves, fake_tiled("bf16", 129280, 256),
        meta(8, 5120, dtype=torch.bfloat16), floats(5376), ints(1), ints(1), ints(8),
        meta(4, dtype=torch.float64), meta(4, dtype=torch.int64), block=5, width=6,
    )  # fmt: skip


def select(entries: int) -> object:
    """An index layer from queries to lists, both levels."""
    raw = meta(8, 36864, dtype=torch.bfloat16)
    q = index.index_queries(raw, floats(8, 32), floats(8, 32), heads=32, channels=128, start=32768)
    keys, base, reach = meta(entries, 68), ints(8), ints(8)
    common = {"weight_scale": 0.01, "skip": 512}
    scores = index.index_scores(q, floats(8, 32), keys, base, reach, capacity=entries, **common)
    blocks = index.candidate_blocks(scores, reach, block=8, keep=2048, skip=512)
    index.select_top(scores, base, reach, 512, skip=512)
    scores = index.index_scores(
        q, floats(8, 32), keys, base, reach, capacity=16384, blocks=blocks, **common
    )
    return index.select_top(scores, base, reach, 512, skip=512, blocks=blocks)


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def write(kind: str, channels: int, width: int, *, pool: bool = False) -> object:
    x = floats(8, width) if pool else meta(8, width, dtype=torch.bfloat16)
    stored = meta(1000, cache.record_bytes(kind, channels))
    tables = floats(8, 32), floats(8, 32)
    pending = (floats(32, width), ints(8), ints(8)) if pool else None
    return cache.write_entries(
        kind, x, floats(channels), *tables, ints(8), stored, norm_eps=1e-20, pending=pending
    )


def attend(heads: int) -> object:
    q = meta(8, heads * 512, dtype=torch.bfloat16)
    return attention.sparse_attention(
        q, floats(8, 32), floats(8, 32), meta(1000, 528), ints(8, 128), floats(heads),
        scale=512**-0.5, main=meta(1000, 288), main_rows=ints(8, 512),
    )  # fmt: skip


def norm_1280() -> object:
    h = meta(8, 1792, dtype=torch.bfloat16)
    return mhc.norm_rows(h, meta(1280, dtype=torch.float32), 1280, norm_eps=1e-20)
