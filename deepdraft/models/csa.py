"""CSA2: window attention plus shared compressed entries that an indexer chooses (notes section 3).

Letters: R rows of a step, W window, K selected entries, N = W + 1 + K places of a row, H heads, C
latent channels, Ci index channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import LayerRole, V41Args
from deepdraft.models.layers import Numerics, Weights
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.ops import index as index_ops
from deepdraft.ops.elementwise import Rotary, rms_norm, rotate, sigmoid

INDEX_PAD = 64
"""Index keys are scored in multiples of this many, so that few shapes occur."""


@dataclass(slots=True)
class Span:
    """Consecutive rows of one sequence in a step: rows [start, end), positions from `first`."""

    state: SequenceState
    start: int
    end: int
    first: int


class Rotation:
    """Tables of one rotary base for the rows of a step."""

    def __init__(self, rotary: Rotary, positions: Tensor, index_width: int) -> None:
        """positions int64 [R]. Index channels turn as the last `index_width` latent channels do."""
        cos, sin = rotary.table(positions)
        self.swap = rotary.swap
        self.rows = cos, sin, self.swap
        self.cos, self.sin = cos.unsqueeze(1), sin.unsqueeze(1)
        self.neg_sin = -self.sin
        skip = self.swap.shape[0] - index_width
        narrow = self.swap[skip:] - skip
        self.index_rows = cos[:, skip:], sin[:, skip:], narrow
        self.index_heads = self.cos[:, :, skip:], self.sin[:, :, skip:], narrow

    def heads(self, x: Tensor) -> Tensor:
        """Rotate [R, H, C]."""
        return rotate(x, self.cos, self.sin, self.swap)

    def back(self, x: Tensor) -> Tensor:
        """Rotate [R, H, C] by minus the position."""
        return rotate(x, self.cos, self.neg_sin, self.swap)


class StepRows:
    """Addresses and tables for the rows of one step, made once and shared by all layers.

    Owns: everything that depends on positions only. Nothing here reads a tensor's value. A single
    row is padded to two (see `Weights.linear`); `num_rows` counts the real ones.
    """

    def __init__(
        self,
        pool: StatePool,
        work: Sequence[tuple[SequenceState, int, int]],
        rotary_window: Rotary,
        rotary_main: Rotary,
        *,
        decoder: bool = True,
        encoder: bool = True,
    ) -> None:
        """work: (state, first position, number of rows) of each sequence."""
        self.pool = pool
        args = pool.args
        device = pool.window.device
        self.spans: list[Span] = []
        positions, slots, encoder_floor, decoder_floor = [], [], [], []
        for state, first, count in work:
            start = len(positions)
            positions.extend(range(first, first + count))
            slots.extend([state.slot] * count)
            encoder_floor.extend([state.encoder_floor] * count)
            decoder_floor.extend([state.decoder_floor] * count)
            self.spans.append(Span(state, start, start + count, first))
        self.num_rows = len(positions)
        if self.num_rows == 1:
            for column in (positions, slots, encoder_floor, decoder_floor):
                column.append(column[0])
            self.spans[-1].end += 1
        self.padded = len(positions)
        self.positions = np.asarray(positions, dtype=np.int64)
        self.slots = np.asarray(slots, dtype=np.int64)

        def device_tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        ring, window = pool.ring, args.sliding_window
        # Window keys by position, oldest first; then the sink's zero key in the pool's last row.
        look_back = self.positions[:, None] - np.arange(window - 1, -1, -1)
        address = self.slots[:, None] * ring + look_back % ring
        zero_row = np.full((self.padded, 1), pool.window.shape[1] - 1)
        self.window_address = device_tensor(np.concatenate([address, zero_row], 1).reshape(-1))
        self.window_write = device_tensor(self.slots * ring + self.positions % ring)
        self.encoder_bias = self._window_bias(look_back, encoder_floor, device)
        same = encoder_floor == decoder_floor
        self.decoder_bias = (
            self.encoder_bias if same else self._window_bias(look_back, decoder_floor, device)
        )
        pair = pool.pending_ring
        self.pending_write = device_tensor(self.slots * pair + self.positions % pair)
        self.pending_before = device_tensor(self.slots * pair + (self.positions - 1) % pair)
        self.reach: dict[int, Tensor] = {}
        self.base = device_tensor(self.slots)
        for ratio in set(pool.ratios.values()):
            self.reach[ratio] = device_tensor((self.positions + 1) // ratio)
        position_t = device_tensor(self.positions)
        ci = args.index_head_dim
        self.rotate_window = Rotation(rotary_window, position_t, ci)
        self.rotate_main = Rotation(rotary_main, position_t, ci)
        self.rotate_pair = Rotation(rotary_main, position_t - 1, ci) if 2 in self.reach else None
        self.selection: dict[int, Selection] = {}
        self.kept_blocks: Tensor | None = None
        self._by_span: tuple[Tensor, Tensor] | None = None

    def _window_bias(
        self, look_back: np.ndarray, floors: list[int], device: torch.device
    ) -> Tensor:
        """0 where the window has a key, -inf elsewhere; 0 for the sink: [R, 1, W + 1]."""
        allowed = look_back >= np.maximum(np.asarray(floors), 0)[:, None]
        bias = np.where(allowed, 0.0, -np.inf)
        bias = np.concatenate([bias, np.zeros((self.padded, 1))], 1)[:, None]
        return torch.from_numpy(bias).to(device=device, dtype=self.pool.dtype)

    def entry_write(self, source: int, skip_below: list[int]) -> Tensor:
        """Rows of the main pool that this step's entries go to; the pool's last row where a row
        completes no entry, or one below `skip_below` of its sequence (already there)."""
        ratio, size = self.pool.ratios[source], self.pool.entries[source]
        entry, rest = np.divmod(self.positions + 1, ratio)
        rows = self.slots * size + entry - 1
        trash = self.pool.main[source].shape[0] - 1
        counted = rest == 0
        for span, floor in zip(self.spans, skip_below, strict=True):
            counted[span.start : span.end] &= self.positions[span.start : span.end] >= floor
        return torch.from_numpy(np.where(counted, rows, trash)).to(self.base.device)

    def by_span(self) -> tuple[Tensor, Tensor]:
        """Row numbers [Q, M] of each span, filled up with its last one, and the place of every row
        in them, int64 [R]."""
        if self._by_span is None:
            most = max(span.end - span.start for span in self.spans)
            offset = np.arange(most)
            ends = np.asarray([span.end - 1 for span in self.spans])
            starts = np.asarray([span.start for span in self.spans])
            places = np.minimum(starts[:, None] + offset, ends[:, None])
            counts = ends + 1 - starts
            number = np.repeat(np.arange(len(starts)), counts)
            back = number * most + np.arange(self.padded) - starts[number]
            device = self.base.device
            self._by_span = (
                torch.from_numpy(places).to(device),
                torch.from_numpy(back).to(device),
            )
        return self._by_span

    def longest_reach(self, ratio: int) -> int:
        """Entries that the furthest row of the step may see."""
        return int((self.positions.max() + 1) // ratio)


@dataclass(slots=True)
class Selection:
    """The published set of one index source: where the entries lie and which places are empty."""

    entries: Tensor
    """int64 [R, K], ascending, -1 in empty places."""
    address: Tensor
    """int64 [R, N]: rows of the pool's `keys` for the first layer's window and sink, then for the
    entries (any entry in empty places)."""
    bias: Tensor
    """[R, 1, K]: 0, or -inf in empty places."""
    joined: dict[bool, Tensor] = field(default_factory=dict)
    """Window and selection bias side by side, by `decoder`."""


class Compressor:
    """Makes main KV entries and index keys from the hidden states of their owner layer."""

    def __init__(
        self, args: V41Args, weights: Weights, prefix: str, layer: int, num: Numerics
    ) -> None:
        self.layer, self.ratio, self.num, self.eps = (
            layer,
            args.compress_ratios[layer],
            num,
            args.rms_norm_eps,
        )
        self.width = args.head_dim
        self.index_width = args.index_head_dim
        self.norm = weights.vector(f"{prefix}.compressor.norm.weight")
        self.wk = weights.linear(f"{prefix}.indexer.wk.weight")
        self.k_norm = weights.vector(f"{prefix}.indexer.k_norm.weight")

    def latents(self, raw: Tensor, rows: StepRows) -> Tensor:
        """raw [R, C or 2C] (value, and gate at ratio 2) -> un-rotated latents [R, C].

        At ratio 2 a row pools itself with the token before it; only rows that complete a pair give
        an entry that counts.
        """
        if self.ratio == 1:
            return rms_norm(self.num.act(raw), self.norm, self.eps)
        pending = rows.pool.pending[self.layer]
        pending.index_copy_(0, rows.pending_write, raw)
        before = pending.index_select(0, rows.pending_before)
        c = self.width
        share = sigmoid(raw[:, c:] - before[:, c:])  # softmax over the pair, per channel
        pooled = torch.lerp(before[:, :c], raw[:, :c], share)
        return rms_norm(self.num.act(pooled), self.norm, self.eps)

    def write(self, raw: Tensor, rows: StepRows, skip_below: list[int]) -> Tensor:
        """Store this step's entries and index keys; returns the latents (for the golden replay)."""
        num = self.num
        z = num.act(self.latents(raw, rows))
        turn = rows.rotate_main if self.ratio == 1 else rows.rotate_pair
        assert turn is not None
        # Index keys come from the latent before rotation and rounding.
        key = num.act(rms_norm(num.act(torch.mm(z, self.wk)), self.k_norm, self.eps))
        key = num.act(rotate(key, *turn.index_rows))
        entry = num.main_kv(num.act(rotate(z, *turn.rows)))
        where = rows.entry_write(self.layer, skip_below)
        rows.pool.index[self.layer].index_copy_(0, where, num.index(key))
        rows.pool.main[self.layer].index_copy_(0, where, entry)
        return z


class Indexer:
    """Chooses the entries that a layer and its followers attend to."""

    def __init__(self, args: V41Args, role: LayerRole, layer: int, num: Numerics) -> None:
        self.args, self.role, self.layer, self.num = args, role, layer, num
        self.heads, self.width = args.index_n_heads, args.index_head_dim
        self.weight_scale = self.width**-0.5 * self.heads**-0.5
        self.ratio = role.ratio
        two_level = layer >= args.candidate_source_layer_id
        reach = args.candidate_topk_blocks * args.candidate_block_size
        self.take_all = min(args.index_topk, reach) if two_level else args.index_topk
        """Up to this many reachable entries every one is selected, whatever the scores."""

    def select(
        self, queries: Tensor, head_weights: Tensor, rows: StepRows, record: dict | None
    ) -> Selection:
        """queries [R, Hi * Ci] before rotation, head_weights [R, Hi] -> the set of each row."""
        args, num = self.args, self.num
        reach = rows.reach[self.ratio]
        if rows.longest_reach(self.ratio) <= self.take_all and record is None:
            return self._publish(index_ops.select_all(reach, args.index_topk), rows)
        q = queries.view(-1, self.heads, self.width)
        q = num.index(num.act(rotate(q, *rows.rotate_main.index_heads)))
        w = num.act(head_weights * self.weight_scale)
        scores = self._scores(q, w, rows)
        if self.role.publishes_candidates:
            rows.kept_blocks = index_ops.candidate_blocks(
                scores, reach, block=args.candidate_block_size, keep=args.candidate_topk_blocks
            )
        elif self.role.restricted:
            assert rows.kept_blocks is not None
            scores = index_ops.restrict_to_blocks(
                scores, rows.kept_blocks, block=args.candidate_block_size
            )
        if record is not None:
            record.update(index_q=q, index_w=w, scores=scores)
            if rows.kept_blocks is not None:
                record.update(kept=rows.kept_blocks)
        return self._publish(index_ops.select_top(scores, args.index_topk), rows)

    def _scores(self, q: Tensor, w: Tensor, rows: StepRows) -> Tensor:
        """Scores of every row over its own sequence's entries, -inf where it does not reach."""
        pool, source, spans = rows.pool, self.role.kv_source, rows.spans
        if len(spans) == 1:
            scores = index_ops.index_scores(q, w, self._keys(pool, spans[0]))
        else:
            places, back = rows.by_span()
            slots = torch.tensor([span.state.slot for span in spans], device=q.device)
            keys = pool.index[source][:-1].view(pool.num_sequences, -1, self.width)
            keys = keys[:, : self._padded(pool, rows.longest_reach(self.ratio))]
            own = keys.index_select(0, slots)
            scores = index_ops.index_scores_together(q, w, own, places, back)
        return index_ops.mask_unreachable(scores, rows.reach[self.ratio])

    def _padded(self, pool: StatePool, reach: int) -> int:
        """How many entries are scored where the last row sees `reach`."""
        size = pool.entries[self.role.kv_source]
        return max(1, min(size, -(-reach // INDEX_PAD) * INDEX_PAD))

    def _keys(self, pool: StatePool, span: Span) -> Tensor:
        """Index keys of one sequence, as many as its last row may see, padded: [N, Ci]."""
        wanted = self._padded(pool, (span.first + span.end - span.start) // self.ratio)
        base = span.state.slot * pool.entries[self.role.kv_source]
        return pool.index[self.role.kv_source][base : base + wanted]

    def _publish(self, entries: Tensor, rows: StepRows) -> Selection:
        pool, source = rows.pool, self.role.kv_source
        first = rows.base * pool.entries[source] + pool.main_start[source]
        main = entries.clamp(min=0) + first.unsqueeze(1)
        address = torch.cat([rows.window_address.view(rows.padded, -1), main], 1)
        bias = torch.zeros(entries.shape, dtype=self.num.dtype, device=entries.device)
        bias = bias.masked_fill_(entries < 0, -torch.inf).unsqueeze(1)
        return Selection(entries, address, bias)


class Attention:
    """One layer's attention: queries, window KV, the published set, grouped output."""

    def __init__(
        self,
        args: V41Args,
        weights: Weights,
        prefix: str,
        *,
        window_row: int,
        layer: int,
        role: LayerRole | None,
        num: Numerics,
    ) -> None:
        """`window_row`: this layer's place in the window pool. `role` None: a drafter layer."""
        self.args, self.num, self.layer, self.role = args, num, layer, role
        self.window_row = window_row
        self.heads, self.width = args.num_attention_heads, args.head_dim
        self.scale = self.width**-0.5
        self.eps = args.rms_norm_eps
        self.w_in = weights.linear(f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight")
        self.q_norm = weights.vector(f"{prefix}.q_norm.weight")
        self.kv_norm = weights.vector(f"{prefix}.kv_norm.weight")
        self.wo_a = weights.grouped(f"{prefix}.wo_a.weight", args.o_groups)
        self.wo_b = weights.linear(f"{prefix}.wo_b.weight")
        self.join = weights.join(f"{prefix}.wo_b.weight")
        self.compressor = self.indexer = None
        raw: list[str] = []
        query = [f"{prefix}.wq_b.weight"]
        if role is not None and role.owns_kv:
            self.compressor = Compressor(args, weights, prefix, layer, num)
            raw.append(f"{prefix}.compressor.wkv.weight")
            if role.ratio == 2:
                raw.append(f"{prefix}.compressor.wgate.weight")
        self.raw_width = len(raw) * self.width
        if role is not None and role.runs_indexer:
            self.indexer = Indexer(args, role, layer, num)
            raw.append(f"{prefix}.indexer.weights_proj.weight")
            query.append(f"{prefix}.indexer.wq_b.weight")
        self.w_raw = weights.linear(*raw) if raw else None
        self.w_query = weights.linear(*query)
        places = args.sliding_window + 1 + (args.index_topk if role and role.ratio else 0)
        self.sink = torch.zeros(self.heads, places, dtype=num.dtype, device=weights.device)
        self.sink[:, args.sliding_window] = weights.vector(f"{prefix}.attn_sink")
        self.own_window = torch.zeros(places, dtype=torch.int64, device=weights.device)
        self.own_window[: args.sliding_window + 1] = window_row
        """Windows of other layers before this one's, at the places of the window; else 0."""

    def raw(self, u: Tensor) -> Tensor | None:
        """Projections of the unquantised input: compressor value and gate, index head weights."""
        return None if self.w_raw is None else torch.mm(u, self.w_raw)

    def write_global(self, raw: Tensor, rows: StepRows, skip_below: list[int]) -> Tensor:
        """Store the main KV and index keys that this step's rows complete."""
        assert self.compressor is not None
        return self.compressor.write(raw[:, : self.raw_width], rows, skip_below)

    def latents(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [R, D] -> query latent [R, q_lora], unrotated queries [R, *], window key [R, C]."""
        num, rank = self.num, self.q_norm.shape[0]
        h = num.act(torch.mm(num.fp8(u), self.w_in))
        c = num.act(rms_norm(h[:, :rank], self.q_norm, self.eps))
        kv = num.act(rms_norm(h[:, rank:], self.kv_norm, self.eps))
        return c, num.act(torch.mm(num.fp8(c), self.w_query)), kv

    def __call__(
        self,
        u: Tensor,
        rows: StepRows,
        *,
        raw: Tensor | None,
        record: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """u [R, D], normed -> the sublayer's output [R, D]."""
        num, role = self.num, self.role
        assert role is not None
        c, query, kv = self.latents(u)
        turn = rows.rotate_main if role.ratio else rows.rotate_window
        h, d = self.heads, self.width
        q_and_kv = torch.cat([query[:, : h * d], kv], 1).view(-1, h + 1, d)
        q_and_kv = num.act(turn.heads(q_and_kv))
        window = rows.pool.window[self.window_row]
        window.index_copy_(0, rows.window_write, num.window_kv(q_and_kv[:, h]))
        bias = rows.decoder_bias if role.decoder else rows.encoder_bias
        if role.ratio:
            if self.indexer is not None:
                assert raw is not None
                note: dict | None = None if record is None else {}
                rows.selection[self.layer] = self.indexer.select(
                    query[:, h * d :], num.act(raw[:, self.raw_width :]), rows, note
                )
                if record is not None and note is not None:
                    record.update(note)
            chosen = rows.selection[role.index_source]
            # One gather of window and entries: to join them afterwards would copy all of it.
            address = chosen.address + self.own_window * rows.pool.window_rows
            keys = rows.pool.keys.index_select(0, address.view(-1))
            if role.decoder not in chosen.joined:
                chosen.joined[role.decoder] = torch.cat([bias, chosen.bias], 2)
            bias = chosen.joined[role.decoder]
        else:
            keys = window.index_select(0, rows.window_address)
        keys = keys.view(rows.padded, -1, d)
        o = num.attention(q_and_kv[:, :h], keys, bias + self.sink, self.scale)
        o = num.act(turn.back(num.act(o)))
        if record is not None:
            record.update(q_latent=c, attn_o=o)
            if role.ratio:
                record["topk"] = rows.selection[role.index_source].entries
        return self.output(o)

    def output(self, o: Tensor) -> Tensor:
        """Head outputs [R, H, C] -> [R, D] through the grouped map (notes 3.8)."""
        num = self.num
        groups = o.reshape(o.shape[0], self.args.o_groups, -1).transpose(0, 1)
        t = num.act(torch.bmm(groups, self.wo_a)).transpose(0, 1).reshape(o.shape[0], -1)
        return num.act(self.join(torch.mm(num.fp8(t), self.wo_b)))
