"""A V4.1 decode step on the device: Engram, all layers and the head, by the kernels alone.

Owns: the order of launches, what is passed between them. Nothing here waits for the device or looks
at a value, so a step can be captured as one graph. `deepdraft.models.deepseek_v41` is its reference
(quant numerics).
Knows nothing of: requests, sampling, graphs.

Letters: R rows (a multiple of 8), S residual streams, D hidden, V vocabulary, H heads, C head
width, M = (2 + S) S mix coefficients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepdraft.arch import LayerRole, V41Args
from deepdraft.kernels import (
    attention,
    cache,
    engram,
    gemv,
    gemv_quant,
    index,
    latents,
    mhc,
    moe,
    routing,
    rows,
)
from deepdraft.kernels.gemv import QuantRows
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs
from deepdraft.models.v41_joins import Joins
from deepdraft.models.v41_weights import (
    AttentionWeights,
    EngramWeights,
    ExpertWeights,
    MixWeights,
    ModelWeights,
)

Skip = frozenset[str]
STAGES = ("engram", "mix", "index", "attention", "attention_out", "shared", "experts")
"""Parts of a layer that a measurement may leave out, one at a time."""


@dataclass(slots=True)
class Places:
    """Addresses and tables of a step's rows (`kernels.rows.place_rows`)."""

    inputs: RowInputs
    plan: Tensor
    lists: Tensor
    angles: Tensor
    selected: dict[int, index.Selected] = field(default_factory=dict)
    blocks: index.Blocks | None = None

    def of(self, name: str) -> Tensor:
        """A row of the plan: int32 [R]."""
        return self.plan[rows.PLAN.index(name)]

    def turn(self, kind: int) -> tuple[Tensor, Tensor]:
        """cos and sin [R, P]: 0 window base, 1 main, 2 main one position before."""
        return self.angles[2 * kind], self.angles[2 * kind + 1]


@dataclass(slots=True)
class Output:
    """logits float32 [R, V]; taps bfloat16 [R, taps * D]."""

    logits: Tensor
    taps: Tensor | None
    places: Places | None = None


@dataclass(slots=True)
class Flow:
    """The residual streams between two sublayers: x [R, S, D] and the last sublayer's output, which
    is written back when the next one starts."""

    x: Tensor
    pre: Tensor | None = None
    """The mix [R, S] that collapses for the next sublayer, where it is not that of `coef`."""
    coef: Tensor | None = None
    y: Tensor | None = None
    shared: Tensor | None = None
    joins: Joins = field(default_factory=Joins)

    def leave(self, coef: Tensor, y: Tensor, shared: Tensor | None = None) -> None:
        """A sublayer's coefficients [R, M] and output [R, D] (or its picks and `shared`)."""
        self.coef, self.y, self.shared, self.pre = coef, y, shared, None

    def finish(self) -> None:
        """Write the output back now: something reads the streams before the next sublayer."""
        if self.y is not None:
            self.x, _, _ = self.joins.boundary(
                self.x, None, y=self.y, shared=self.shared, coef=self.coef
            )
            self.y = self.shared = None

    def enter(
        self, norm: Tensor, eps: float, hidden_out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, QuantRows]:
        """Write the output back and collapse: the streams, the next input [R, D] and its FP8."""
        self.x, u, quant = self.joins.boundary(
            self.x, norm, y=self.y, shared=self.shared, coef=self.coef, pre=self.pre,
            hidden_out=hidden_out, norm_eps=eps,
        )  # fmt: skip
        self.y = self.shared = None
        assert u is not None and quant is not None
        return self.x, u, quant


LANES = ("mix", "side", "memory")


class Lanes:
    """Side streams for work that is not on the way to the next launch: mix coefficients, the shared
    expert, cache writes, what Engram adds. Captured, they are branches of the graph.

    Memory rule: what a side lane reads must live until the lane is joined, and what it makes is
    used after that.
    """

    def __init__(self, device: torch.device, *, on: bool) -> None:
        on = on and device.type == "cuda"
        self._busy: set[str] = set()
        self._streams = {n: torch.cuda.Stream(device) for n in LANES} if on else {}

    @contextlib.contextmanager
    def aside(self, name: str) -> Generator[None]:
        """Launches inside follow what was launched before; nothing follows them until `join`."""
        if not self._streams:
            yield
            return
        lane = self._streams[name]
        self._busy.add(name)
        lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane):
            yield

    def join(self, name: str) -> None:
        """What is launched next follows the lane."""
        if name in self._busy:
            self._busy.remove(name)
            torch.cuda.current_stream().wait_stream(self._streams[name])


Observer = Callable[[str, Tensor], None]
"""Sees named results of a step (tests)."""


def run_mix(x: Tensor, w: MixWeights, args: V41Args, skip: Skip = frozenset()) -> Tensor:
    """Mix coefficients [R, M] of one sublayer."""
    if "mix" in skip:
        return w.base.expand(x.shape[0], -1).contiguous()
    return mhc.mix_coefficients(
        x, w.fn, w.base, w.scale, iters=args.hc_sinkhorn_iters, eps=args.hc_eps,
        norm_eps=args.rms_norm_eps,
    )  # fmt: skip


def attention_out(o: Tensor, w: AttentionWeights, joins: Joins, skip: Skip = frozenset()) -> Tensor:
    """Head outputs [R, H, C] through the grouped map: bfloat16 [R, D]."""
    if "attention_out" in skip:
        return o.flatten(1)[:, : w.wo_b.rows].contiguous()
    return joins.part(gemv_quant.gemv_quantized(o.flatten(1), w.wo_a, blocks=w.groups), w.wo_b)


def run_experts(
    v: Tensor,
    v_quant: QuantRows,
    positions: Tensor,
    w: ExpertWeights,
    args: V41Args,
    lanes: Lanes,
    forced: Tensor | None = None,
    skip: Skip = frozenset(),
) -> tuple[Tensor, Tensor]:
    """v [R, D] -> picked outputs bfloat16 [R, K, D] and the shared expert's [R, D], of one of
    several ranks its part.

    forced int32 [R, K]: these experts instead of the router's choice (measurements).
    """
    limit = args.swiglu_limit
    shared_out = v
    if "shared" not in skip:
        with lanes.aside("side"):
            shared = moe.swiglu_rows(gemv.gemv(v_quant, w.shared13), limit=limit)
            shared_out = gemv.gemv(shared, w.shared2)
    _, weights, listed = routing.route_rows(
        v, w.gate, w.bias, positions, k=w.picks, scale=args.routed_scaling_factor,
        temperature=args.gate_temp, forced=forced,
    )  # fmt: skip
    if "experts" in skip:
        y = v.new_zeros(v.shape[0], w.picks, v.shape[1])
    else:
        up = moe.routed_up(v_quant, listed, weights, w.w13, limit=limit)
        y = moe.routed_down(up, listed, w.w2, picks=w.picks)
    if "shared" not in skip:
        lanes.join("side")
    return y, shared_out


class Memory:
    """What Engram layers add: known from the tokens alone, so each layer's product is made beside
    the layers before it."""

    def __init__(self, step: DeviceStep, places: Places, *, on: bool) -> None:
        self._step, self._ahead = step, iter([])
        tables = step.weights.hash
        if tables is None or not on:
            return
        with step.lanes.aside("memory"):
            found = rows.engram_rows(
                step.caches.tokens, places.inputs.positions, places.inputs.slots, tables.token_map,
                tables.factors, tables.primes, tables.offsets, tables.sizes, pad=tables.pad,
            )  # fmt: skip
            found = step.joins.table_rows(found)
        layers = [w.engram for w in step.weights.layers if w.engram is not None]
        self._ahead = iter(list(zip(layers, found, strict=True)))
        self._start()

    def _start(self) -> None:
        """The next Engram layer's product: [R, (S + 1) D], of one of several ranks its part."""
        self._part: Tensor | None = None
        for w, table_rows in self._ahead:
            with self._step.lanes.aside("memory"):
                found = engram.gather_rows(w.values, w.scales, table_rows)
                self._part = self._step.joins.part(found, w.wkv)
            break

    def inject(self, x: Tensor, w: EngramWeights) -> Tensor:
        """The streams x [R, S, D] with this Engram layer's memory."""
        step = self._step
        step.lanes.join("memory")
        assert self._part is not None
        kv = step.joins.whole(self._part)
        x = engram.inject(x, kv, w.gate, norm_eps=step.args.rms_norm_eps)
        self._start()
        return x


class DeviceStep:
    """The backbone and its head over the caches of `caches`."""

    def __init__(
        self,
        weights: ModelWeights,
        caches: DeviceCaches,
        *,
        side_lanes: bool = True,
        joins: Joins | None = None,
    ) -> None:
        """`joins`: where several ranks run the model, each with its part of `weights`."""
        self.weights, self.caches = weights, caches
        self.joins = joins or Joins()
        self.lanes = Lanes(weights.device, on=side_lanes)
        self.args = args = weights.args
        self.first_mix = torch.zeros(1, args.hc_mult, dtype=torch.float32, device=weights.device)
        self.first_mix[0, 0] = 1.0
        self.num_taps = sum(role.tap for role in args.roles) if weights.drafter is not None else 0
        self.forced: list[Tensor] | None = None
        """Experts of each layer in place of the router's choice, int32 [R, K] (measurements)."""
        self.observer: Observer | None = None

    def run(self, inputs: RowInputs, skip: Skip = frozenset()) -> Output:
        """All layers and the head on these rows; writes their state."""
        args, weights = self.args, self.weights
        places = self.place(inputs)
        self.joins.begin(inputs.positions)
        memory = Memory(self, places, on="engram" not in skip)
        x = rows.embed(inputs.ids, weights.embed, args.hc_mult)
        count = x.shape[0]
        flow = Flow(x, pre=self.first_mix.expand(count, -1).contiguous(), joins=self.joins)
        taps = x.new_empty(count, self.num_taps * args.hidden_size) if self.num_taps else None
        number = 0
        for layer, w in enumerate(weights.layers):
            if w.engram is not None and "engram" not in skip:
                flow.finish()
                flow.x = memory.inject(flow.x, w.engram)
            tap = None
            if args.roles[layer].tap and taps is not None:
                tap = taps, number
                number += 1
            self.run_block(layer, flow, places, skip, tap)
        _, h, _ = flow.enter(weights.norm, args.rms_norm_eps)
        logits = self.joins.logits(h, weights.head)
        self.joins.finish()
        return Output(logits, taps, places)

    def run_block(
        self,
        layer: int,
        flow: Flow,
        places: Places,
        skip: Skip = frozenset(),
        tap: tuple[Tensor, int] | None = None,
    ) -> None:
        """One layer: attention, then experts; what it adds last waits in `flow`. `tap`: where the
        streams it starts from are kept (`rows.tap`)."""
        args, w = self.args, self.weights.layers[layer]
        eps = args.rms_norm_eps
        _, u, u_quant = flow.enter(w.attn_norm, eps)
        self._note(f"L{layer}.stream_in", flow.x)
        self._note(f"L{layer}.attn_in", u)
        with self.lanes.aside("mix"):
            coef = run_mix(flow.x, w.mix_attn, args, skip)
            if tap is not None:
                rows.tap(flow.x, *tap)
        y = self._attention(layer, args.roles[layer], w.attention, u, u_quant, places, skip)
        self.lanes.join("mix")
        flow.leave(coef, y)
        self._note(f"L{layer}.attn_out", y)
        _, v, v_quant = flow.enter(w.ffn_norm, eps)
        self._note(f"L{layer}.ffn_in", v)
        with self.lanes.aside("mix"):
            coef = run_mix(flow.x, w.mix_ffn, args, skip)
        forced = None if self.forced is None else self.forced[layer]
        made = run_experts(
            v, v_quant, places.inputs.positions, w.experts, args, self.lanes, forced, skip,
        )  # fmt: skip
        self.lanes.join("mix")
        flow.leave(coef, *made)

    def place(self, inputs: RowInputs) -> Places:
        """Addresses of the rows; their ids join the sequences' tokens."""
        c = self.caches
        plan, lists, angles = rows.place_rows(
            inputs.ids, inputs.positions, inputs.slots, c.floors, c.tokens, c.turns,
            window=self.args.sliding_window, ring=c.ring, pending=c.pending_ring, entries=c.entries,
        )  # fmt: skip
        return Places(inputs, plan, lists, angles)

    # ---- pieces ----------------------------------------------------------------------------

    def _note(self, name: str, value: Tensor) -> None:
        if self.observer is not None:
            self.observer(name, value)

    def _attention(
        self,
        layer: int,
        role: LayerRole,
        w: AttentionWeights,
        u: Tensor,
        u_quant: QuantRows,
        places: Places,
        skip: Skip,
    ) -> Tensor:
        args, caches, eps = self.args, self.caches, self.args.rms_norm_eps
        turn = places.turn(1 if role.ratio else 0)
        window = caches.window[layer]
        raw = None
        if w.raw is not None:
            with self.lanes.aside("side"):
                raw = gemv.gemv(u, w.raw, dtype=torch.float32)
                if role.owns_kv:
                    self._write_entry(layer, role, w, raw, places)
        c_quant = latents.split_latents(
            gemv.gemv(u_quant, w.w_in), w.q_norm, w.kv_norm, *turn, places.of("window"), window,
            norm_eps=eps,
        )  # fmt: skip
        self._note(f"L{layer}.attn_c", c_quant.codes)
        query = gemv.gemv(c_quant, w.w_query)
        self._note(f"L{layer}.attn_q", query)
        if w.raw is not None:
            self.lanes.join("side")
        main = chosen = None
        if role.ratio:
            if role.runs_indexer and ("index" not in skip or not places.selected):
                assert raw is not None
                places.selected[layer] = self._select(layer, role, w, query, raw, places)
            # A measurement without the index goes on with the first selection.
            source = role.index_source
            kept = places.selected.get(source) or next(iter(places.selected.values()))
            main, chosen = caches.main[role.kv_source], kept.address
        if "attention" in skip:
            heads = query[:, : w.sink.shape[0] * args.head_dim]
            o = heads.unflatten(1, (w.sink.shape[0], -1)).contiguous()
            return attention_out(o, w, self.joins, skip)
        # Here and not where they are needed: the boundary then follows one launch alone and can be
        # launched before that one has ended.
        self.lanes.join("mix")
        o = attention.sparse_attention(
            query, *turn, window, places.lists[int(role.decoder)], w.sink,
            scale=args.head_dim**-0.5, main=main, main_rows=chosen,
        )  # fmt: skip
        self._note(f"L{layer}.attn_o", o)
        return attention_out(o, w, self.joins, skip)

    def _write_entry(
        self, layer: int, role: LayerRole, w: AttentionWeights, raw: Tensor, places: Places
    ) -> None:
        assert w.entry is not None
        caches, eps = self.caches, self.args.rms_norm_eps
        pending = None
        if role.ratio == 2:
            pending = caches.pending[layer], places.of("before"), places.of("keep")
        turn = places.turn(1 if role.ratio == 1 else 2)
        dest = places.of(f"entry{role.ratio}")
        latent = cache.write_entries(
            "main", raw, w.entry.norm, *turn, dest, caches.main[layer], norm_eps=eps,
            pending=pending, latent=True,
        )  # fmt: skip
        assert latent is not None
        key = gemv.gemv(latent, w.entry.wk)
        cache.write_entries(
            "index", key, w.entry.k_norm, *turn, dest, caches.index[layer], norm_eps=eps
        )

    def _select(
        self, layer: int, role: LayerRole, w: AttentionWeights, query: Tensor, raw: Tensor,
        places: Places,
    ) -> index.Selected:  # fmt: skip
        args, caches = self.args, self.caches
        heads, width = args.index_n_heads, args.index_head_dim
        queries = index.index_queries(
            query, *places.turn(1), heads=heads, channels=width,
            start=query.shape[1] - heads * width,
        )  # fmt: skip
        base, reach = places.of(f"base{role.ratio}"), places.of(f"reach{role.ratio}")
        block, keep = args.candidate_block_size, args.candidate_topk_blocks
        # Up to this many reachable entries every one is selected, whatever the scores.
        two_level = layer >= args.candidate_source_layer_id
        skip = min(args.index_topk, keep * block) if two_level else args.index_topk
        blocks = places.blocks if role.restricted else None
        entries = caches.entries[role.ratio - 1]
        best = None
        if blocks is None:
            best = index.best_space(len(queries), entries, heads, width, queries.device)
        scores = index.index_scores(
            queries, raw, caches.index[role.kv_source], base, reach,
            capacity=entries if blocks is None else keep * block,
            weight_scale=width**-0.5 * heads**-0.5, weight_start=raw.shape[1] - heads, skip=skip,
            blocks=blocks, best=best,
        )  # fmt: skip
        if role.publishes_candidates:
            places.blocks = index.candidate_blocks(
                scores, reach, block=block, keep=keep, skip=skip, best=best
            )
        return index.select_top(
            scores, base, reach, args.index_topk, skip=skip, blocks=blocks, best=best
        )
