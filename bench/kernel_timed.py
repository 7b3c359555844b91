"""Timed launches and row checks of every kernel, at published sizes and their slices.

Owns: operands (random, on the device), what one launch reads, which outputs belong to which row.
Weights exist in several copies, so that each launch of a timed graph reads fresh memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from deepdraft.kernels import (
    attention,
    cache,
    engram,
    gemv,
    index,
    layout,
    mhc,
    moe,
    routing,
    sample,
)
from deepdraft.kernels.runtime import padded_rows


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; PUBLISHED, or TINY for a dry run in the interpreter."""

    hidden: int = 5120
    width: int = 2304
    q_lora: int = 1280
    heads: int = 64
    head_dim: int = 512
    pairs: int = 32
    o_lora: int = 1024
    o_groups: int = 8
    vocab: int = 129280
    experts: int = 384
    picks: int = 6
    window: int = 128
    topk: int = 512
    index_heads: int = 32
    index_dim: int = 128
    streams: int = 4
    keep: int = 2048
    engram_rows: int = 24
    engram_dim: int = 256
    contexts: tuple[int, ...] = (16384, 262144, 1048576)
    slices: tuple[int, ...] = (1, 2, 4, 8)
    fresh: int = 700_000_000
    """Bytes that one round of a timed graph reads at least: over ten times the L2."""


PUBLISHED = Sizes()
TINY = Sizes(
    hidden=64, width=64, q_lora=64, heads=4, head_dim=64, pairs=8, o_lora=32, o_groups=2, vocab=96,
    experts=6, picks=2, window=16, topk=16, index_heads=2, index_dim=32, keep=4, engram_rows=2,
    engram_dim=32, contexts=(96,), slices=(1, 2), fresh=1,
)  # fmt: skip


@dataclass
class Timed:
    """`launch(i)` runs copy i of `copies`; `bytes`: what it reads from memory."""

    name: str
    bytes: int
    launch: Callable[[int], object]
    copies: int = 1


@dataclass
class Rows:
    """`run(rows)` gives the outputs of these rows, each [len(rows), ...], of 16 in all."""

    name: str
    run: Callable[[Sequence[int]], tuple[Tensor, ...]]


class Operands:
    """Random tensors on one device."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.generator = torch.Generator(device).manual_seed(0)

    def floats(self, *shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator) * spread

    def halves(self, *shape: int, spread: float = 1.0) -> Tensor:
        return self.floats(*shape, spread=spread).bfloat16()

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=dtype, device=self.device, generator=self.generator
        )

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return self.integers(low, high, *shape, dtype=torch.uint8)

    def codes(self, *shape: int) -> Tensor:
        """E4M3 codes without NaN."""
        return self.bytes(*shape).bitwise_and_(0xF7)

    def scale_bytes(self, *shape: int) -> Tensor:
        """E8M0 bytes around 2**-8."""
        return self.bytes(*shape, low=117, high=122)

    def positions(self, rows: int) -> tuple[Tensor, Tensor]:
        angle = self.floats(rows, self.sizes.pairs, spread=3.0)
        return angle.cos(), angle.sin()

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def dense(self, kind: str, rows: int, cols: int, plan: layout.Plan, copies: int) -> list:
        """Copies of one matrix, tiled."""
        full = -(-rows // plan.tile) * plan.tile
        groups = cols // 32
        shape = (copies, full // plan.tile, groups, plan.tile, 32)
        if kind == "bf16":
            values, scales = self.halves(*shape, spread=cols**-0.5), None
        else:
            values = self.codes(*shape)
            scales = self.scale_bytes(copies, full // plan.tile, groups, plan.tile // 32)
        arrivals = torch.zeros(full // plan.tile * 16, dtype=torch.int32, device=self.device)
        return [
            layout.Tiled(
                kind, rows, cols, plan, values[i], None if scales is None else scales[i], arrivals
            )
            for i in range(copies)
        ]

    def experts(self, rows: int, cols: int, plan: layout.Plan, count: int) -> layout.Tiled:
        tiles, groups = rows // (2 * plan.tile), cols // 32
        values = self.bytes(count, tiles, groups, plan.tile, 32)
        scales = self.scale_bytes(count, tiles, groups, 2, plan.tile)
        arrivals = torch.zeros(tiles * 1024, dtype=torch.int32, device=self.device)
        return layout.Tiled("fp4", rows, cols, plan, values, scales, arrivals)

    def quantised(self, rows: int, cols: int) -> gemv.QuantRows:
        return gemv.quantize_rows(self.halves(rows, cols))


class MetaOperands(Operands):
    """The same shapes without storage: for compiling."""

    def __init__(self, sizes: Sizes) -> None:
        self.device, self.sizes = "meta", sizes

    def floats(self, *shape: int, spread: float = 1.0) -> Tensor:
        return torch.empty(*shape, device="meta")

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


def copies_of(size: int, fresh: int) -> int:
    return min(64, max(1, -(-fresh // size)))


# ---- timed ---------------------------------------------------------------------------------


def dense_shapes(s: Sizes, part: int) -> Iterator[tuple[str, str, int, int, int]]:
    """(name, kind, rows, cols, blocks) of the dense maps of one of `part` slices."""
    yield "wq_b", "fp8", s.heads * s.head_dim // part, s.q_lora, 1
    group_cols = s.heads * s.head_dim // s.o_groups
    blocks = max(1, s.o_groups // part)
    yield "wo_a", "fp8xbf16", s.o_lora * blocks, group_cols, blocks
    yield "wo_b", "fp8", s.hidden, s.o_lora * blocks, 1
    yield "shared w1+w3", "fp8", 2 * s.width // part, s.hidden, 1
    yield "shared w2", "fp8", s.hidden, s.width // part, 1
    yield "head", "bf16", s.vocab // part, s.hidden, 1
    if part == 1:
        yield "wq_a+wkv", "fp8", s.q_lora + s.head_dim, s.hidden, 1
        yield "router", "bf16", s.experts, s.hidden, 1
        yield "compressor", "bf16", 2 * s.head_dim + s.index_heads, s.hidden, 1
        kv = (s.streams + 1) * s.hidden
        yield "engram wkv", "fp8", kv, s.engram_rows * s.engram_dim, 1
        yield "main_proj", "fp8", s.hidden, 3 * s.hidden, 1


def dense_timed(
    o: Operands, shape: tuple[str, str, int, int, int], label: str, plan: layout.Plan | None = None
) -> Timed:
    name, kind, rows, cols, blocks = shape
    stored = "bf16" if kind == "bf16" else "fp8"
    full = -(-rows // 32) * 32
    plan = plan or layout.dense_plan(full, cols, blocks)
    size = full * cols * (2 if stored == "bf16" else 1)
    copies = copies_of(size, o.sizes.fresh)
    weights = o.dense(stored, rows, cols, plan, copies)
    x = o.halves(8, cols * blocks) if kind != "fp8" else o.quantised(8, cols)
    dtype = torch.float32 if kind == "bf16" else torch.bfloat16
    return Timed(
        f"{name} {label}".strip(),
        weights[0].nbytes,
        lambda i: gemv.gemv(x, weights[i], blocks=blocks, dtype=dtype),
        copies,
    )


def pick_sets(o: Operands, rows: int, distinct: int, count: int) -> list[Tensor]:
    """Picks int32 [8, K] whose first rows name exactly `distinct` experts, others every time."""
    k = o.sizes.picks
    sets = []
    for number in range(max(1, count // distinct)):
        order = torch.arange(rows * k, device=o.device) % distinct + number * distinct
        picks = torch.full((8, k), -1, dtype=torch.int32, device=o.device)
        picks[:rows] = order.view(rows, k).int()
        sets.append(picks)
    return sets


EXPERT_LOADS = ((1, 6), (2, 12), (6, 22), (6, 35), (8, 46))
"""(rows, distinct experts): kernels.md 1.1, both columns."""


def expert_timed(
    o: Operands,
    width: int,
    loads: Sequence[tuple[int, int]],
    up_plan: layout.Plan | None = None,
    down_plan: layout.Plan | None = None,
) -> Iterator[Timed]:
    s = o.sizes
    up_plan = up_plan or layout.expert_plan(2 * width, s.hidden)
    down_plan = down_plan or layout.expert_plan(s.hidden, width)
    each = 3 * width * s.hidden * 17 // 32
    count = min(s.experts, max(96, -(-s.fresh // each)))
    w13 = o.experts(2 * width, s.hidden, up_plan, count)
    w2 = o.experts(s.hidden, width, down_plan, count)
    x = o.quantised(8, s.hidden)
    weights = torch.full((8, s.picks), 0.25, device=o.device)
    for rows, distinct in loads:
        distinct = min(distinct, count, rows * s.picks)
        lists = [moe.expert_list(p) for p in pick_sets(o, rows, distinct, count)]
        h = moe.routed_up(x, lists[0], weights, w13, limit=10.0)
        label = f"{width} r={rows} D={distinct}"
        yield Timed(
            f"experts up {label}",
            distinct * w13.nbytes // count,
            lambda i, lists=lists: moe.routed_up(x, lists[i], weights, w13, limit=10.0),
            len(lists),
        )
        yield Timed(
            f"experts down {label}",
            distinct * w2.nbytes // count,
            lambda i, lists=lists, h=h: moe.routed_down(h, lists[i], w2, picks=s.picks),
            len(lists),
        )


def attention_timed(
    o: Operands, rows: int, heads: int, plan: attention.AttentionPlan = attention.PLAN
) -> Timed:
    s = o.sizes
    c = s.head_dim
    entries = 4 * s.topk
    window = torch.cat((o.codes(256, c), o.bytes(256, c // 32, low=120, high=128)), 1)
    main = torch.cat((o.bytes(entries, c // 2), o.codes(entries, c // 16) & 0x7F), 1)
    q, (cos, sin) = o.halves(rows, heads * c, spread=0.1), o.positions(rows)
    window_rows = o.ints([list(range(s.window))] * rows)
    order = torch.rand(rows, entries, device=o.device).argsort(1)[:, : s.topk]
    main_rows = order.sort(1).values.int().contiguous()
    sink = o.floats(heads)
    return Timed(
        f"attention r={rows} heads={heads}",
        rows * (s.window * window.shape[1] + s.topk * main.shape[1]),
        lambda i: attention.sparse_attention(
            q, cos, sin, window.contiguous(), window_rows, sink,
            scale=c**-0.5, main=main.contiguous(), main_rows=main_rows, plan=plan,
        ),
    )  # fmt: skip


def index_timed(o: Operands, rows: int, context: int) -> Iterator[Timed]:
    s = o.sizes
    record = s.index_dim // 2 + s.index_dim // 32
    copies = max(1, min(16, s.fresh // (context * record)))
    keys = o.bytes(copies * context, record)
    keys[:, s.index_dim // 2 :] = 124
    q = o.halves(rows, s.index_heads, s.index_dim)
    weights, reach = o.floats(rows, s.index_heads), o.ints([context] * rows)
    bases = [o.ints([i * context] * rows) for i in range(copies)]
    sizes = {"weight_scale": 0.02, "skip": s.topk}
    block, keep = 8, min(s.keep, context // 8)

    def score(i: int, blocks: index.Blocks | None = None) -> Tensor:
        capacity = context if blocks is None else keep * block
        return index.index_scores(
            q, weights, keys, bases[i], reach, capacity=capacity, blocks=blocks, **sizes
        )

    scores = score(0)
    label = f"r={rows} N={context}"
    yield Timed(f"index scores {label}", context * record, score, copies)
    yield Timed(
        f"select top {label}",
        4 * rows * context,
        lambda i: index.select_top(scores, bases[0], reach, s.topk, skip=s.topk),
    )
    yield Timed(
        f"candidate blocks {label}",
        4 * rows * context,
        lambda i: index.candidate_blocks(scores, reach, block=block, keep=keep, skip=s.topk),
    )
    blocks = index.candidate_blocks(scores, reach, block=block, keep=keep, skip=s.topk)
    yield Timed(
        f"scores in blocks {label}",
        rows * keep * block * record,
        lambda i: score(i, blocks),
        copies,
    )


def small_timed(o: Operands, rows: int) -> Iterator[Timed]:
    """Kernels whose time is latency, not bytes."""
    s = o.sizes
    pad = padded_rows(rows)
    x, y = o.halves(pad, s.streams, s.hidden), o.halves(pad, s.hidden)
    m = (2 + s.streams) * s.streams
    fn, base, scale = o.floats(m, s.streams * s.hidden, spread=0.01), o.floats(m), o.floats(3)
    norm, coef = torch.ones(s.hidden, device=o.device), o.floats(pad, m).sigmoid()
    picked = o.halves(pad, s.picks, s.hidden)
    mix = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-20}
    label = f"r={rows}"
    yield Timed(f"quantise {label}", y.nbytes, lambda i: gemv.quantize_rows(y))
    yield Timed(
        f"mix coefficients {label}",
        fn.nbytes + x.nbytes,
        lambda i: mhc.mix_coefficients(x, fn, base, scale, **mix),
    )
    yield Timed(
        f"boundary attention {label}", 2 * x.nbytes, lambda i: mhc.boundary(x, norm, y=y, coef=coef)
    )
    yield Timed(
        f"boundary experts {label}",
        2 * x.nbytes + picked.nbytes,
        lambda i: mhc.boundary(x, norm, y=picked, shared=y, coef=coef),
    )
    h, q_norm = o.halves(pad, s.q_lora + s.head_dim), torch.ones(s.q_lora, device=o.device)
    yield Timed(
        f"query norm {label}",
        h.nbytes,
        lambda i: mhc.norm_rows(h, q_norm, s.q_lora, norm_eps=1e-20),
    )
    cos, sin = o.positions(pad)
    kv_norm = torch.ones(s.head_dim, device=o.device)
    dest = torch.arange(pad, dtype=torch.int32, device=o.device)
    for kind in ("window", "main"):
        stored = o.bytes(pad, cache.record_bytes(kind, s.head_dim))
        yield Timed(
            f"write {kind} {label}",
            h.nbytes,
            lambda i, kind=kind, stored=stored: cache.write_entries(
                kind, h, kv_norm, cos, sin, dest, stored, norm_eps=1e-20
            ),
        )
    logits, bias = o.floats(pad, s.experts), o.floats(s.experts, spread=0.01)
    yield Timed(
        f"route {label}",
        logits.nbytes,
        lambda i: routing.route(logits, bias, dest, k=s.picks, scale=1.5, temperature=1.0),
    )
    picks, _ = routing.route(logits, bias, dest, k=s.picks, scale=1.5, temperature=1.0)
    yield Timed(f"expert list {label}", picks.nbytes, lambda i: moe.expert_list(picks))
    up = o.halves(pad, 2 * s.width)
    yield Timed(f"shared activation {label}", up.nbytes, lambda i: moe.swiglu_rows(up, limit=10.0))
    table = o.codes(4096, s.engram_dim), o.bytes(4096, s.engram_dim // 32, low=120, high=126)
    rows_of = o.integers(0, 4096, pad, s.engram_rows, dtype=torch.int64)
    yield Timed(
        f"engram rows {label}",
        pad * s.engram_rows * (s.engram_dim + s.engram_dim // 32),
        lambda i: engram.gather_rows(*table, rows_of),
    )
    kv, gate = o.halves(pad, (s.streams + 1) * s.hidden), o.floats(s.streams, s.hidden)
    yield Timed(
        f"engram injection {label}", kv.nbytes, lambda i: engram.inject(x, kv, gate, norm_eps=1e-20)
    )
    scores = o.floats(pad, s.vocab)
    one = torch.ones(pad, dtype=torch.float64, device=o.device)
    seeds = torch.arange(pad, device=o.device)
    yield Timed(
        f"tokens {label}", scores.nbytes, lambda i: sample.pick_tokens(scores, one, seeds, seeds)
    )


Cases = Callable[[], Iterator[Timed]]


ATTENTION_PLANS = tuple(
    attention.AttentionPlan(*p)
    for p in ((16, 64, 4, 3), (16, 64, 4, 2), (32, 64, 4, 3), (16, 128, 4, 2), (64, 64, 4, 3),
              (16, 64, 2, 3), (32, 64, 8, 3))
)  # fmt: skip


def timed_groups(o: Operands, plans: dict[str, layout.Plan]) -> Iterator[tuple[str, Cases]]:
    """(name, its cases); a group whose operands cannot be made does not stop the others. `plans`:
    of weights by the names of `tune_cases`, in place of the defaults; then only those."""
    s = o.sizes

    def dense(part: int) -> Iterator[Timed]:
        for shape in dense_shapes(s, part):
            plan = plans.get(f"{shape[0]} 1/{part}")
            if plan is not None or not plans:
                yield dense_timed(o, shape, "" if part == 1 else f"1/{part}", plan)

    def experts(width: int) -> Iterator[Timed]:
        both = plans.get(f"experts up {width}"), plans.get(f"experts down {width}")
        if all(both) or not plans:
            yield from expert_timed(o, width, EXPERT_LOADS, *both)

    def attend(rows: int, heads: int) -> Iterator[Timed]:
        yield attention_timed(o, rows, heads)

    def attention_plans() -> Iterator[Timed]:
        for plan in ATTENTION_PLANS:
            case = attention_timed(o, 6, s.heads, plan)
            yield replace(case, name=f"{case.name} {plan}")

    for part in s.slices:
        yield f"weights experts 1/{part}", partial(experts, s.width // part)
        yield f"weights dense 1/{part}", partial(dense, part)
        yield (
            f"attention 1/{part}",
            lambda part=part: iter((attention_timed(o, 6, s.heads // part),)),
        )
    for rows in (1, 8):
        yield f"attention {rows}", lambda rows=rows: iter((attention_timed(o, rows, s.heads),))
    for rows in (1, 6, 16):
        yield f"small {rows}", partial(small_timed, o, rows)
    for context in s.contexts:
        yield f"index {context}", partial(index_timed, o, 6, context)


# ---- rows ----------------------------------------------------------------------------------


class Batch:
    """Operands of 16 rows; `take` picks some and fills up to a multiple of 8 with poison."""

    def __init__(self, o: Operands) -> None:
        self.o = o

    def take(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        out = x.new_empty(padded_rows(len(rows)), *x.shape[1:])
        out.fill_(float("nan") if x.is_floating_point() else 0)
        out[: len(rows)] = x[list(rows)]
        return out


def row_cases(o: Operands) -> Iterator[Rows]:
    s, b = o.sizes, Batch(o)
    for name, kind, n, k, blocks in dense_shapes(s, 1):
        stored = "bf16" if kind == "bf16" else "fp8"
        plan = layout.dense_plan(-(-n // 32) * 32, k, blocks)
        w = o.dense(stored, n, k, plan, 1)[0]
        x = o.halves(16, k * blocks)

        def dense(rows, x=x, w=w, kind=kind, blocks=blocks):
            values = b.take(x, rows)
            if kind == "fp8":
                values = gemv.quantize_rows(values)
            return (gemv.gemv(values, w, blocks=blocks, dtype=torch.float32),)

        yield Rows(name, dense)
    yield Rows("experts", expert_rows(o, b))
    x, y = o.halves(16, s.streams, s.hidden), o.halves(16, s.hidden)
    m = (2 + s.streams) * s.streams
    fn, base = o.floats(m, s.streams * s.hidden, spread=0.01), o.floats(m)
    scale, norm = o.floats(3), torch.ones(s.hidden, device=o.device)

    def boundary(rows):
        own, back = b.take(x, rows), b.take(y, rows)
        coef = mhc.mix_coefficients(own, fn, base, scale, iters=20, eps=1e-6, norm_eps=1e-20)
        out, u, q = mhc.boundary(own, norm, y=back, coef=coef, norm_eps=1e-20)
        return coef, out, u, q.codes, q.scales.t()

    yield Rows("mix and boundary", boundary)
    yield Rows("attention", attention_rows(o, b))
    yield Rows("indexer", index_rows(o, b))
    logits = o.floats(16, s.vocab)
    seeds = torch.arange(16, device=o.device)
    one = torch.ones(16, dtype=torch.float64, device=o.device)
    yield Rows(
        "tokens",
        lambda rows: (
            sample.pick_tokens(
                b.take(logits, rows), b.take(one, rows), b.take(seeds, rows), b.take(seeds, rows)
            ),
        ),
    )
    kv, gate = o.halves(16, (s.streams + 1) * s.hidden), o.floats(s.streams, s.hidden)
    yield Rows(
        "engram injection",
        lambda rows: (engram.inject(b.take(x, rows), b.take(kv, rows), gate, norm_eps=1e-20),),
    )


def expert_rows(o: Operands, b: Batch) -> Callable[[Sequence[int]], tuple[Tensor, ...]]:
    s = o.sizes
    count = min(32, s.experts)
    w13 = o.experts(2 * s.width, s.hidden, layout.expert_plan(2 * s.width, s.hidden), count)
    w2 = o.experts(s.hidden, s.width, layout.expert_plan(s.hidden, s.width), count)
    plan = layout.dense_plan(-(-count // 32) * 32, s.hidden)
    gate, bias = o.dense("bf16", count, s.hidden, plan, 1)[0], torch.zeros(count, device=o.device)
    x, positions = o.halves(16, s.hidden), o.ints(list(range(16)))

    def run(rows):
        at = b.take(positions, rows)
        at[len(rows) :] = -1
        v = b.take(x, rows)
        settings = {"k": s.picks, "scale": 1.5, "temperature": 1.0}
        picks, weights, listed = routing.route_rows(v, gate, bias, at, **settings)
        h = moe.routed_up(gemv.quantize_rows(v), listed, weights, w13, limit=10.0)
        y = moe.routed_down(h, listed, w2, picks=s.picks)
        return picks, weights, y

    return run


def attention_rows(o: Operands, b: Batch) -> Callable[[Sequence[int]], tuple[Tensor, ...]]:
    s, c = o.sizes, o.sizes.head_dim
    kv, entry = o.halves(16, c), o.halves(16, c)
    q = o.halves(16, s.heads * c, spread=0.1)
    cos, sin = o.positions(16)
    window = torch.zeros(64, cache.record_bytes("window", c), dtype=torch.uint8, device=o.device)
    main = torch.zeros(64, cache.record_bytes("main", c), dtype=torch.uint8, device=o.device)
    norm, sink = torch.ones(c, device=o.device), o.floats(s.heads)
    everyone = torch.arange(16, dtype=torch.int32, device=o.device)
    # Every row attends to the records of all 16, so these are written first and read as stored.
    for kind, x, stored in (("window", kv, window), ("main", entry, main)):
        cache.write_entries(kind, x, norm, cos, sin, everyone, stored, norm_eps=1e-20)
    places = torch.full((16, s.window), -1, dtype=torch.int32, device=o.device)
    places[:, -16:] = everyone
    chosen = torch.full((16, s.topk), -1, dtype=torch.int32, device=o.device)
    chosen[:, :16] = everyone

    def run(rows):
        again = torch.zeros_like(window)
        dest = b.take(everyone, rows)
        dest[len(rows) :] = -1
        args = b.take(kv, rows), norm, b.take(cos, rows), b.take(sin, rows), dest
        cache.write_entries("window", *args, again, norm_eps=1e-20)
        out = attention.sparse_attention(
            b.take(q, rows), b.take(cos, rows), b.take(sin, rows), window, b.take(places, rows),
            sink, scale=c**-0.5, main=main, main_rows=b.take(chosen, rows),
        )  # fmt: skip
        return again[list(rows)], out

    return run


def index_rows(o: Operands, b: Batch) -> Callable[[Sequence[int]], tuple[Tensor, ...]]:
    s = o.sizes
    context = s.contexts[0]
    record = s.index_dim // 2 + s.index_dim // 32
    keys = o.bytes(context + 16, record)
    keys[:, s.index_dim // 2 :] = 124
    q, (cos, sin) = o.halves(16, s.index_heads * s.index_dim), o.positions(16)
    weights = o.floats(16, s.index_heads)
    base = o.ints(list(range(16)))
    reach = o.ints([context - 3 * i for i in range(16)])
    keep, k = min(s.keep, context // 8), min(s.topk, context // 8)

    def run(rows):
        at, far = b.take(base, rows), b.take(reach, rows)
        queries = index.index_queries(
            b.take(q, rows), b.take(cos, rows), b.take(sin, rows),
            heads=s.index_heads, channels=s.index_dim,
        )  # fmt: skip
        operands = queries, b.take(weights, rows), keys, at, far
        scores = index.index_scores(*operands, capacity=context, weight_scale=0.02)
        top = index.select_top(scores, at, far, k, skip=0)
        blocks = index.candidate_blocks(scores, far, block=8, keep=keep, skip=0)
        inside = index.index_scores(*operands, capacity=keep * 8, weight_scale=0.02, blocks=blocks)
        second = index.select_top(inside, at, far, k, skip=0, blocks=blocks)
        return top.address, blocks.numbers, second.entries

    return run
