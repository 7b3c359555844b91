"""The layers of a V4.1 model on a chunk of one prompt: many rows, the kernels of `prefill_*`.

Owns: the order of launches of a layer, the chunk's window. `models.v41_step` is the same for the
few rows of a decode step; both read the same weights and caches, and rows have bits of their own in
each of the two.
Knows nothing of: sequences' marks, chunks' sizes, requests.

Letters: R rows of a chunk (a multiple of 8; the last ones may be empty), S residual streams, D
hidden, W window, C head width, P rotary pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import LayerRole
from deepdraft.kernels import (
    cache,
    engram,
    index,
    latents,
    mhc,
    moe,
    prefill_attention,
    prefill_experts,
    prefill_gemm,
    prefill_index,
    prefill_streams,
    prefill_unpacked,
    routing,
    rows,
)
from deepdraft.kernels.prefill_experts import few_picks
from deepdraft.kernels.prefill_streams import Entered, Mix
from deepdraft.models.v41_buffers import DeviceCaches
from deepdraft.models.v41_prefill_chunk import MAIN_TURN, PAIR_TURN, WINDOW_TURN, Chunk
from deepdraft.models.v41_prefill_plan import EXPERTS_AT_ONCE, PLAIN_ROWS, plain_values
from deepdraft.models.v41_prefill_share import RowShare
from deepdraft.models.v41_weights import (
    AttentionWeights,
    ExpertWeights,
    MixWeights,
    ModelWeights,
    Weight,
)

_SELECT_ROWS = 16
"""Rows whose scores are held at once where a second level restricts them (the decoder's replay)."""
LIBRARY_ROWS = 8192, 4096, 2048, 1024
"""Rows of a product that torch's library makes (`PrefillLayers.prove_library`)."""


@dataclass(frozen=True, slots=True)
class Plans:
    """Tiles of the kernels; smaller ones for tests."""

    gemm: prefill_gemm.GemmPlan = prefill_gemm.PLAN
    experts: prefill_experts.ExpertPlan = prefill_experts.PLAN
    index: prefill_index.IndexPlan = prefill_index.PLAN
    attention: prefill_attention.AttentionPlan = prefill_attention.PLAN
    streams: prefill_streams.StreamPlan = prefill_streams.PLAN
    plain: prefill_unpacked.PlainPlan = prefill_unpacked.PLAN
    plain_rows: int = PLAIN_ROWS
    """Rows from which dense matrices, entries and keys are unpacked first."""
    plain_picks: int = 160
    """Picks of an expert, on average, from which experts are unpacked first."""
    experts_at_once: int = EXPERTS_AT_ONCE
    """That are unpacked together, at most."""


@dataclass(slots=True)
class Flow:
    """The residual streams between two sublayers: x [R, S, D] and the last sublayer's output with
    its coefficients, which is written back when the next one starts. `pre` [R, S]: the mix that
    collapses where it is not that of `coef`."""

    x: Tensor
    pre: Tensor | None = None
    coef: Tensor | None = None
    y: Tensor | None = None
    shared: Tensor | None = None


class PrefillLayers:
    """A model's layers over the caches of one pool, for chunks of prompts."""

    def __init__(
        self,
        weights: ModelWeights,
        caches: DeviceCaches,
        *,
        plans: Plans | None = None,
        share: RowShare | None = None,
    ) -> None:
        """`share`: of the ranks that share the rows; `weights` are then cut as `PrefillCuts`."""
        self.weights, self.caches, self.args = weights, caches, weights.args
        self.share = share or RowShare()
        self.plans = plans or Plans()
        self._mixes: list[tuple[Mix, Mix]] = []
        self.first_mix = torch.zeros(self.args.hc_mult, device=weights.device)
        self.first_mix[0] = 1.0
        self.num_taps = sum(role.tap for role in self.args.roles) if weights.drafter else 0
        self._window: Tensor | None = None
        self._unpacked: Tensor | None = None
        self._entries: tuple[Tensor, Tensor] | None = None
        self._proven: set[tuple[int, int, int]] = set()
        self._held: prefill_index.Candidates | None = None

    @property
    def buffers(self) -> tuple[object, ...]:
        """Those that are made anew when a longer chunk comes."""
        return self._window, self._held

    # ---- what a chunk runs -----------------------------------------------------------------

    def start(self, chunk: Chunk) -> tuple[Flow, Tensor]:
        """Embedded rows, and the rows of every Engram table int64 [layers, T, *], of the rows of
        all ranks."""
        x = rows.embed(chunk.ids, self.weights.embed, self.args.hc_mult)
        flow = Flow(x, pre=self.first_mix.expand(chunk.rows, -1).contiguous())
        tables = self.weights.hash
        if tables is None:
            return flow, chunk.positions.new_empty(0, dtype=torch.int64)
        positions = self.share.positions(chunk, chunk.positions)
        slots = torch.full_like(positions, chunk.slot)
        found = rows.engram_rows(
            self.caches.tokens, positions, slots, tables.token_map, tables.factors,
            tables.primes, tables.offsets, tables.sizes, pad=tables.pad,
        )  # fmt: skip
        return flow, found

    def run(
        self,
        chunk: Chunk,
        flow: Flow,
        layers: range,
        *,
        table_rows: Tensor | None = None,
        write: bool = True,
        taps: Tensor | None = None,
    ) -> None:
        """These layers on the chunk; the last one's output waits in `flow`. `write`: the layers
        that own entries store them. taps bfloat16 [R, taps * D] receives the drafter's input."""
        args, taken = self.args, 0
        if not self._mixes:
            # On first use: a pool that is only made to be measured needs none.
            self._mixes = [(_mix(w.mix_attn), _mix(w.mix_ffn)) for w in self.weights.layers]
        for layer in layers:
            w, role = self.weights.layers[layer], args.roles[layer]
            if w.engram is not None:
                assert table_rows is not None
                number = args.engram_layer_ids.index(layer)
                found = self.share.own_tables(table_rows[number], number)
                self._inject(layer, flow, found, chunk)
            mix_attn, mix_ffn = self._mixes[layer]
            entered = self._enter(flow, w.attn_norm, mix_attn)
            if role.tap and taps is not None:
                rows.tap(flow.x, taps, taken)
                taken += 1
            flow.y = self._attention(layer, role, w.attention, entered, chunk, write)
            entered = self._enter(flow, w.ffn_norm, mix_ffn)
            flow.y, flow.shared = self._experts(w.experts, entered, chunk)

    def write_entries(self, chunk: Chunk, flow: Flow, layer: int) -> None:
        """Only the entries and index keys of a layer, from the streams that enter it; `flow.y` is
        written back, and `flow` stays the layer's input."""
        w = self.weights.layers[layer]
        coef = flow.coef
        u = self._enter(flow, w.attn_norm, None).u
        flow.coef = coef
        attention = w.attention
        assert attention.raw is not None
        raw = self._gemm(u, attention.raw, dtype=torch.float32)
        self._write_entry(layer, self.args.roles[layer], attention, raw, chunk)

    def logits(self, flow: Flow, chunk: Chunk, *, all_rows: bool) -> Tensor:
        """Of the last row of the whole chunk, or of all, float32 [*, V]."""
        u = self._enter(flow, self.weights.norm, None).u
        u = self.share.whole(u, chunk) if all_rows else self.share.last(u, chunk, 1)
        return self.share.columns(
            self._gemm(u.contiguous(), self.weights.head, dtype=torch.float32)
        )

    # ---- pieces ----------------------------------------------------------------------------

    def _gemm(self, x: Tensor, w: Weight, **options: Any) -> Tensor:
        plans = self.plans
        if x.shape[0] < plans.plain_rows:
            return prefill_gemm.gemm(x, w, plan=plans.gemm, **options)
        unpacked = prefill_unpacked.unpack_dense(w, self._space(x.device))
        rows, first = x.shape[0], 0
        y = torch.empty(rows, w.rows, dtype=options.get("dtype", x.dtype), device=x.device)
        for some in LIBRARY_ROWS if not options else ():
            while rows - first >= some and (w.rows, w.cols, some) in self._proven:
                at = slice(first, first + some)
                torch.mm(x[at], unpacked[: w.rows].t(), out=y[at])
                first += some
        if first < rows:
            prefill_unpacked.plain_gemm(
                x[first:], unpacked, w.rows, out=y[first:], plan=plans.plain, **options
            )
        return y

    def prove_library(self) -> dict[str, bool]:
        """Which products torch's own library makes with the same bits as ours, from random
        operands: it makes those from now on, in two thirds of the time. It picks a kernel by the
        shape, so it only gets the numbers of rows that were proven, and ours makes the rest."""
        found: dict[str, bool] = {}
        if not self.first_mix.is_cuda:
            return found
        weights: list[Weight] = []
        for layer in self.weights.layers[: self.args.decoder_start]:
            weights += [layer.attention.w_in, layer.attention.w_query, layer.attention.wo_b]
            weights += [layer.experts.shared13, layer.experts.shared2]
            weights += [] if layer.engram is None else [layer.engram.wkv]
        for (outputs, cols), w in {(w.rows, w.cols): w for w in weights}.items():
            unpacked = prefill_unpacked.unpack_dense(w, self._space(self.first_mix.device))
            for count in LIBRARY_ROWS:
                x = torch.randn(count, cols, dtype=torch.bfloat16, device=self.first_mix.device)
                ours = prefill_unpacked.plain_gemm(x, unpacked, outputs, plan=self.plans.plain)
                same = torch.equal(x @ unpacked[:outputs].t(), ours)
                found[f"{outputs} x {cols}, {count} rows"] = same
                if same:
                    self._proven.add((outputs, cols, count))
        return found

    def _space(self, device: torch.device) -> Tensor:
        """Room for unpacked weights."""
        if self._unpacked is None:
            size = plain_values(self.args, self.plans.experts_at_once)
            self._unpacked = torch.empty(size, dtype=torch.bfloat16, device=device)
        return self._unpacked

    def _enter(self, flow: Flow, norm: Tensor, mix: Mix | None) -> Entered:
        """Write the output back and collapse; `flow` then holds the streams and the next
        coefficients."""
        args = self.args
        entered = prefill_streams.enter(
            flow.x, norm, y=flow.y, shared=flow.shared, coef=flow.coef, pre=flow.pre, mix=mix,
            iters=args.hc_sinkhorn_iters, eps=args.hc_eps, norm_eps=args.rms_norm_eps,
            plan=self.plans.streams,
        )  # fmt: skip
        flow.x, flow.coef = entered.x, entered.coef
        flow.y = flow.shared = flow.pre = None
        return entered

    def _inject(self, layer: int, flow: Flow, table_rows: Tensor, chunk: Chunk) -> None:
        memory = self.weights.layers[layer].engram
        assert memory is not None
        if flow.y is not None:
            flow.x = mhc.boundary(flow.x, None, y=flow.y, shared=flow.shared, coef=flow.coef)[0]
            flow.y = flow.shared = None
        found = prefill_gemm.values(engram.gather_rows(memory.values, memory.scales, table_rows))
        kv = self._gemm(self.share.table_values(found, chunk), memory.wkv)
        flow.x = engram.inject(flow.x, kv, memory.gate, norm_eps=self.args.rms_norm_eps)

    def _attention(
        self,
        layer: int,
        role: LayerRole,
        w: AttentionWeights,
        entered: Entered,
        chunk: Chunk,
        write: bool,
    ) -> Tensor:
        args, caches = self.args, self.caches
        turn = chunk.turns[MAIN_TURN if role.ratio else WINDOW_TURN]
        raw = None
        if w.raw is not None:
            raw = self._gemm(entered.u, w.raw, dtype=torch.float32)
            if role.owns_kv and write:
                self._write_entry(layer, role, w, raw, chunk)
        window = self._chunk_window(layer, chunk)
        c = latents.split_latents(
            self._gemm(entered.quantised, w.w_in), w.q_norm, w.kv_norm, *turn, chunk.window_dest,
            window, norm_eps=args.rms_norm_eps,
        )  # fmt: skip
        before, (kept, ring_rows) = args.sliding_window - 1, chunk.kept
        end = before + chunk.total
        self.share.fill_window(window, before, chunk)
        caches.window[layer].index_copy_(0, ring_rows, window[end - kept : end])
        window = window[chunk.offset : chunk.offset + before + chunk.rows]
        query = self._gemm(prefill_gemm.values(c), w.w_query)
        main, keys, chosen, counts, first_main = None, None, None, None, 0
        if role.ratio:
            main, keys = caches.main[role.kv_source], caches.index[role.kv_source]
            # The decoder's rows are few in every chunk.
            always = not role.decoder and prefill_attention.takes_values(
                query.device, w.sink.shape[0], args.head_dim, turn[0].shape[1], before + 1,
                self.plans.attention,
            )  # fmt: skip
            if always or chunk.rows >= self.plans.plain_rows:
                main, keys = self._entry_values(role, chunk)
                first_main = chunk.slot * caches.entries[role.ratio - 1]
            if role.runs_indexer:
                assert raw is not None
                chunk.selected[layer] = self._select(layer, role, query, raw, keys, chunk)
            selected = chunk.selected[role.index_source]
            chosen, counts = selected.address, selected.counts
        o = prefill_attention.attend_rows(
            query, *turn, prefill_attention.window_values(window),
            chunk.window_first[role.decoder], w.sink, places=args.sliding_window,
            scale=args.head_dim**-0.5, main=main, main_rows=chosen, counts=counts,
            first_main=first_main, plan=self.plans.attention,
        )  # fmt: skip
        t = self._gemm(o.flatten(1), w.wo_a, blocks=w.groups, quantize=True)
        return self._gemm(t, w.wo_b)

    def _entry_values(self, role: LayerRole, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """All main entries and index keys that the chunk's rows may see, as bf16."""
        source, caches, args = role.kv_source, self.caches, self.args
        if source not in chunk.values:
            size = caches.entries[role.ratio - 1]
            if self._entries is None or self._entries[0].shape[0] < size:
                space = {"dtype": torch.bfloat16, "device": chunk.positions.device}
                self._entries = (
                    torch.empty(size, args.head_dim, **space),
                    torch.empty(size, args.index_head_dim, **space),
                )
            # One at least, though no row sees it: empty places of a list read the first one.
            count = max(1, chunk.end // role.ratio)
            some = slice(chunk.slot * size, chunk.slot * size + count)
            main, keys = self._entries
            # They take the place of the source's before.
            chunk.values = {
                source: (
                    prefill_attention.main_values(caches.main[source][some], main),
                    prefill_index.key_values(caches.index[source][some], keys),
                )
            }
        return chunk.values[source]

    def _chunk_window(self, layer: int, chunk: Chunk) -> Tensor:
        """Records uint8 [W - 1 + R, bytes]: those before the chunk from the ring, room for its
        own. One buffer for all layers."""
        ring = self.caches.window[layer]
        before = self.args.sliding_window - 1
        need = before + max(chunk.offset + chunk.rows, chunk.total)
        if self._window is None or self._window.shape[0] < need:
            self._window = self.share.window(need, ring)
        window = self._window[:need]
        torch.index_select(ring, 0, chunk.ring_before, out=window[:before])
        return window

    def _write_entry(
        self, layer: int, role: LayerRole, w: AttentionWeights, raw: Tensor, chunk: Chunk
    ) -> None:
        assert w.entry is not None
        caches, eps = self.caches, self.args.rms_norm_eps
        pending = None
        if role.ratio == 2:
            # Nothing is kept by the kernel: rows that are further apart than the ring is long
            # would share a place of it.
            pending = caches.pending[layer], chunk.before, torch.full_like(chunk.before, -1)
        turn = chunk.turns[MAIN_TURN if role.ratio == 1 else PAIR_TURN]
        dest = chunk.entry[role.ratio]
        latent = cache.write_entries(
            "main", raw, w.entry.norm, *turn, dest, caches.main[layer], norm_eps=eps,
            pending=pending, latent=True,
        )  # fmt: skip
        assert latent is not None
        key = self._gemm(latent, w.entry.wk)
        cache.write_entries(
            "index", key, w.entry.k_norm, *turn, dest, caches.index[layer], norm_eps=eps
        )
        whole_first, size = chunk.first - chunk.offset, caches.entries[role.ratio - 1]
        made = slice(whole_first // role.ratio, (whole_first + chunk.total) // role.ratio)
        own = slice(chunk.slot * size, (chunk.slot + 1) * size)
        entries = (caches.main[layer][own][made], caches.index[layer][own][made])
        self.share.fill_entries(*entries, chunk, ratio=role.ratio)
        if role.ratio == 2:
            kept, ring_rows = chunk.pending
            width = caches.pending[layer].shape[1]
            new = self.share.last(raw[:, :width], chunk, kept)
            caches.pending[layer].index_copy_(0, ring_rows, new)

    def _select(
        self, layer: int, role: LayerRole, query: Tensor, raw: Tensor, keys: Tensor, chunk: Chunk
    ) -> index.Selected:
        args = self.args
        heads, width = args.index_n_heads, args.index_head_dim
        queries = index.index_queries(
            query, *chunk.turns[MAIN_TURN], heads=heads, channels=width,
            start=query.shape[1] - heads * width,
        )  # fmt: skip
        weights: dict[str, Any] = {
            "weight_scale": width**-0.5 * heads**-0.5,
            "weight_start": raw.shape[1] - heads,
        }
        if layer >= args.candidate_source_layer_id:
            return self._select_restricted(role, queries, raw, chunk, weights)
        plan = self.plans.index
        if prefill_index.reads_records(query.device, heads, width):
            keys = self.caches.index[role.kv_source]
        elif self._held is None or self._held.keys.shape[0] < chunk.rows:
            self._held = prefill_index.Candidates.of(
                chunk.rows, args.index_topk, query.device, plan
            )
        return prefill_index.stream_top(
            queries, raw, keys, chunk.base[role.ratio],
            chunk.reach[role.ratio], args.index_topk, skip=args.index_topk, held=self._held,
            plan=plan, **weights,
        )  # fmt: skip

    def _select_restricted(
        self, role: LayerRole, queries: Tensor, raw: Tensor, chunk: Chunk, weights: dict[str, Any]
    ) -> index.Selected:
        """Both levels by the decode step's kernels, few rows at a time: the decoder runs on the
        last window of a prompt only."""
        args, caches = self.args, self.caches
        block, keep, k = args.candidate_block_size, args.candidate_topk_blocks, args.index_topk
        skip = min(k, keep * block)
        found: list[index.Selected] = []
        if role.publishes_candidates:
            chunk.blocks.clear()
        for number, first in enumerate(range(0, chunk.rows, _SELECT_ROWS)):
            some = slice(first, first + _SELECT_ROWS)
            base, reach = chunk.base[role.ratio][some], chunk.reach[role.ratio][some]
            blocks = chunk.blocks[number] if role.restricted else None
            entries = caches.entries[role.ratio - 1]
            best = None
            if blocks is None:
                best = index.best_space(
                    len(reach), entries, *queries.shape[1:], device=queries.device
                )
            scores = index.index_scores(
                queries[some], raw[some], caches.index[role.kv_source], base, reach,
                capacity=entries if blocks is None else keep * block, skip=skip, blocks=blocks,
                best=best, **weights,
            )  # fmt: skip
            if role.publishes_candidates:
                chunk.blocks.append(
                    index.candidate_blocks(
                        scores, reach, block=block, keep=keep, skip=skip, best=best
                    )
                )
            found.append(
                index.select_top(scores, base, reach, k, skip=skip, blocks=blocks, best=best)
            )
        parts = zip(*((s.entries, s.address, s.counts) for s in found), strict=True)
        return index.Selected(*(torch.cat(part) for part in parts))

    def _experts(self, w: ExpertWeights, entered: Entered, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Outputs bfloat16 [R, *, D] by pick (where ranks share rows: by rank), and the shared
        expert's [R, D]."""
        args, limit, v, share = self.args, self.args.swiglu_limit, entered.quantised, self.share
        share.send_inputs(v, chunk)
        logits = self._gemm(entered.u, w.gate, dtype=torch.float32)
        picks, weights = routing.route(
            logits, w.bias, chunk.positions, k=w.picks, scale=args.routed_scaling_factor,
            temperature=args.gate_temp,
        )  # fmt: skip
        share.send_picks(picks, weights, chunk)
        hidden = moe.swiglu_rows(self._gemm(v, w.shared13), limit=limit)
        shared = self._gemm(prefill_gemm.values(hidden), w.shared2)
        picked = self._routed(w, *share.routed(v, picks, weights, chunk))
        return share.sums(picked, chunk), shared

    def _routed(self, w: ExpertWeights, v: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        """Picked outputs bfloat16 [R, K, D]."""
        limit, plans, experts = self.args.swiglu_limit, self.plans, w.gate.rows
        (rows, each), (hidden, width) = picks.shape, (w.w2.rows, w.w2.cols)
        if picks.numel() < plans.plain_picks * experts:
            plan = few_picks(plans.experts, picks.numel() / experts)
            found = prefill_experts.sort_picks(picks, experts, tall=plan.tall)
            h = prefill_experts.sorted_up(v, found, weights, w.w13, limit=limit, plan=plan)
            return prefill_experts.sorted_down(h, found, w.w2, rows=rows, plan=plan)
        found = prefill_experts.sort_picks(picks, experts, tall=plans.plain.tall)
        h = torch.empty(rows * each, width, dtype=torch.bfloat16, device=v.device)
        y = torch.empty(rows * each, hidden, dtype=torch.bfloat16, device=v.device)
        space = self._space(v.device)
        shared: dict[str, Any] = {"picks": each, "plan": plans.plain}
        at = found.order, found.tiles, found.ends
        for first in range(0, experts, plans.experts_at_once):
            count = min(plans.experts_at_once, experts - first)
            up = prefill_unpacked.unpack_experts(w.w13, first, count, space, together=True)
            prefill_unpacked.plain_experts(
                v, up, first, *at, h, weights=weights, limit=limit, **shared
            )
            down = prefill_unpacked.unpack_experts(w.w2, first, count, space, together=False)
            prefill_unpacked.plain_experts(h, down, first, *at, y, **shared)
        return y.view(rows, each, hidden)


def _mix(w: MixWeights) -> Mix:
    return Mix.of(w.fn, w.base, w.scale)
