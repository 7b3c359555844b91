"""DeepSeek-V4.1: encoder half, decoder half, shared residual streams (technical report section 2).

Owns: the layer schedule, the step, and prefill in its two modes. Arithmetic lives in `ops`,
attention in `csa`, memory in `engram`, the drafter in `dspark`.
Knows nothing of: files, requests, sampling.

A *step* takes rows of one or several sequences at their next positions, writes position-addressed
state and returns logits. Prefill is the same step with more rows. A row's bits do not depend on
the other rows, so any cutting of a text into steps gives the same state and logits, bit for bit.

Letters: R rows, S residual streams, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import ConfigError, StateError
from deepdraft.models.csa import Attention, StepRows
from deepdraft.models.dspark import Drafter
from deepdraft.models.engram import Engram, EngramHash
from deepdraft.models.layers import Numerics, Weights, WeightSource, make_numerics
from deepdraft.models.moe import MoE
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.ops.elementwise import HyperMix, Rotary, collapse, expand, rms_norm
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.shards import WHOLE, Shards

PrefillMode = Literal["full", "encoder"]
Work = Sequence[tuple[SequenceState, Sequence[int]]]
Record = dict[str, dict[str, Tensor]]


@dataclass(slots=True)
class StepOutput:
    """logits [rows asked for, V] float; taps [R, taps * D], the drafter's conditioning, by row."""

    logits: Tensor | None
    taps: Tensor | None
    hidden: Tensor | None = None
    """Collapsed final state before the last norm [rows asked for, D]."""


class Block:
    """One backbone layer: its role, attention, experts and residual mixes."""

    def __init__(self, args: V41Args, weights: Weights, layer: int, num: Numerics) -> None:
        prefix = f"layers.{layer}"
        self.role = args.roles[layer]
        self.layer, self.num, self.eps = layer, num, args.rms_norm_eps
        self.engram = Engram(args, weights, f"{prefix}.engram", num) if self.role.engram else None
        self.attn_norm = weights.vector(f"{prefix}.attn_norm.weight")
        self.ffn_norm = weights.vector(f"{prefix}.ffn_norm.weight")
        self.attention = Attention(
            args, weights, f"{prefix}.attn", window_row=layer, layer=layer, role=self.role, num=num
        )
        self.moe = MoE(
            weights,
            f"{prefix}.ffn",
            experts=args.n_routed_experts,
            k=args.num_experts_per_tok,
            args=args,
            num=num,
        )
        self.mix_attn = hyper_mix(args, weights, f"{prefix}.hc_attn")
        self.mix_ffn = hyper_mix(args, weights, f"{prefix}.hc_ffn")

    def attn_in(self, x: Tensor, p: Tensor) -> Tensor:
        """The attention's input [R, D]: streams collapsed by the carried mix, normed."""
        num = self.num
        return num.act(rms_norm(num.act(collapse(x, p)), self.attn_norm, self.eps))

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        rows: StepRows,
        *,
        write_from: list[int] | None,
        record: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Streams X [R, S, D] and mix p [R, 1, S] through the block (notes 2.4).

        `write_from`: per sequence, the first position whose global KV this step writes; None:
        none.
        """
        num = self.num
        u = self.attn_in(x, p)
        raw = self.attention.raw(u)
        latent = None
        if self.role.owns_kv and write_from is not None:
            assert raw is not None
            latent = self.attention.write_global(raw, rows, write_from)
        pre_a, post_a, comb_a = self.mix_attn(x, self.eps)
        y = self.attention(u, rows, raw=raw, record=record)
        mid = num.act(expand(y, x, post_a, comb_a))
        pre_f, post_f, comb_f = self.mix_ffn(mid, self.eps)
        v = num.act(rms_norm(num.act(collapse(mid, pre_a)), self.ffn_norm, self.eps))
        z = self.moe(v, rows.num_rows, record)
        out = num.act(expand(z, mid, post_f, comb_f))
        if record is not None:
            record.update(stream_in=x, premix_in=p, stream_mid=mid, stream_out=out)
            record.update(attn_in=u, attn_out=y, ffn_in=v, ffn_out=z)
            record.update(attn_pre=pre_a, attn_post=post_a, attn_comb=comb_a)
            record.update(ffn_pre=pre_f, ffn_post=post_f, ffn_comb=comb_f)
            if latent is not None:
                record["latent"] = latent
        return out, pre_f


def hyper_mix(args: V41Args, weights: Weights, prefix: str) -> HyperMix:
    """The residual-mix coefficients named `prefix`_fn, _base, _scale."""
    return HyperMix(
        weights.vector(f"{prefix}_fn"),
        weights.vector(f"{prefix}_base"),
        weights.vector(f"{prefix}_scale"),
        streams=args.hc_mult,
        iters=args.hc_sinkhorn_iters,
        eps=args.hc_eps,
    )


class DeepseekV41:
    """The text model. All methods run without gradients; one thread at a time."""

    def __init__(
        self,
        args: V41Args,
        source: WeightSource,
        token_map: list[int] | None,
        *,
        numerics: str | Numerics = "exact",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        drafter: bool = True,
        shards: Shards = WHOLE,
    ) -> None:
        """`token_map`: compressed id of each token (deepdraft.text.engram_token_map); needed where
        the model has Engram layers. `numerics`: a name, computed in `dtype`, or ready made.
        `drafter`: load the DSpark layers too. `shards`: this rank's share; `source` gives its
        parts, and all ranks make the same calls."""
        if args.engram_layer_ids and token_map is None:
            raise ConfigError("this model has Engram layers and needs the tokenizer's token map")
        self.args, self.device = args, device
        if isinstance(numerics, str):
            numerics = make_numerics(numerics, dtype)
        self.num = num = numerics
        dtype = num.dtype
        weights, own = Weights(source, dtype, device, shards), shards.local(args)
        self.embed = weights.vector("embed.weight")
        self.blocks = [Block(own, weights, i, num) for i in range(args.num_hidden_layers)]
        self.norm = weights.vector("norm.weight")
        self.head = weights.linear("head.weight")
        self.join_head = weights.join("head.weight")
        self.hash = (
            EngramHash(args, engram_tables(args), token_map)
            if args.engram_layer_ids and token_map is not None
            else None
        )
        yarn = (
            args.rope_factor,
            args.rope_beta_fast,
            args.rope_beta_slow,
            args.rope_original_max_positions,
        )
        shape = {"dim": args.head_dim, "rope_dim": args.qk_rope_head_dim}
        where = {"dtype": dtype, "device": device}
        self.rotary_window = Rotary(**shape, theta=args.rope_theta, yarn=None, **where)
        self.rotary_main = Rotary(**shape, theta=args.compress_rope_theta, yarn=yarn, **where)
        first = torch.zeros(1, 1, args.hc_mult, dtype=dtype, device=device)
        first[..., 0] = 1.0
        self.first_mix = first
        self.drafter = (
            Drafter(own, weights, num, self.rotary_window, self.embed, self.head, first)
            if drafter and args.num_nextn_predict_layers
            else None
        )

    def new_pool(self, num_sequences: int, max_tokens: int, slack: int = 16) -> StatePool:
        """State for this many sequences; a step takes up to `slack` rows of each."""
        return StatePool(
            self.args,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            slack=slack,
            dtype=self.num.dtype,
            device=self.device,
        )

    # ---- rows ------------------------------------------------------------------------------

    def _rows(self, work: Sequence[tuple[SequenceState, int, int]]) -> StepRows:
        return StepRows(work[0][0].pool, work, self.rotary_window, self.rotary_main)

    def _embed(self, token_ids: Sequence[int], padded: int) -> tuple[Tensor, Tensor]:
        """Streams and first mix: every stream starts as the token's embedding (notes 2.1)."""
        ids = list(token_ids) + list(token_ids[-1:]) * (padded - len(token_ids))
        e = self.embed.index_select(0, torch.tensor(ids, device=self.device))
        x = e.unsqueeze(1).expand(-1, self.args.hc_mult, -1).contiguous()
        return self.num.act(x), self.first_mix.expand(padded, -1, -1)

    def _engram_rows(self, rows: StepRows, texts: Sequence[Sequence[int]]) -> Tensor | None:
        """Table rows of every Engram layer: int64 [layers, R, G * H].

        texts: per span, the ids of its whole sequence up to the span's last row.
        """
        if self.hash is None:
            return None
        depth = self.hash.depth
        history = np.full((rows.padded, depth), -1, dtype=np.int64)
        for span, text in zip(rows.spans, texts, strict=True):
            first = max(0, span.first - depth + 1)
            ids = np.asarray(text[first:], dtype=np.int64)
            for back in range(depth):
                places = rows.positions[span.start : span.end] - first - back
                history[span.start : span.end, back] = np.where(
                    places >= 0, ids[np.maximum(places, 0)], -1
                )
        return torch.from_numpy(self.hash.rows(history))

    def _run(
        self,
        x: Tensor,
        p: Tensor,
        rows: StepRows,
        layers: range,
        engram_rows: Tensor | None,
        write_from: list[int] | None,
        record: Record | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        taps = []
        memories = self.args.engram_layer_ids
        for layer in layers:
            block = self.blocks[layer]
            note = record.setdefault(f"L{layer}", {}) if record is not None else None
            if block.engram is not None:
                assert engram_rows is not None
                table_rows = engram_rows[memories.index(layer)]
                x = block.engram(x, table_rows, note)
                if note is not None:
                    note["rows"] = table_rows
            if block.role.tap and self.drafter is not None:
                taps.append(self.num.act(x.mean(1)))
            x, p = block(x, p, rows, write_from=write_from, record=note)
        return x, p, taps

    def _logits(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        num = self.num
        h = num.act(collapse(x, p))
        normed = num.act(rms_norm(h, self.norm, self.args.rms_norm_eps))
        return self.join_head(normed @ self.head), h

    # ---- step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(
        self,
        work: Work,
        *,
        logits: Literal["all", "last", "none"] = "all",
        record: Record | None = None,
    ) -> StepOutput:
        """Run the next tokens of each sequence through all layers and append them.

        work: (state, token ids) per sequence, each sequence once, at most `slack` ids each, all of
        one pool. `logits`: of all rows, of each sequence's last row, or of none. The drafter's
        rings are not touched: `feed_drafter` takes the confirmed rows of `taps`.
        """
        plan = self._check(work)
        rows = self._rows(plan)
        ids = [i for _, new in work for i in new]
        x, p = self._embed(ids, rows.padded)
        texts = [[*state.token_ids, *new] for state, new in work] if self.hash else []
        engram_rows = self._engram_rows(rows, texts)
        layers = range(self.args.num_hidden_layers)
        starts = [first for _, first, _ in plan]
        x, p, taps = self._run(x, p, rows, layers, engram_rows, starts, record)
        for state, new in work:
            state.token_ids.extend(new)
            state.decoder_tokens = state.num_tokens
            state.written = max(state.written, state.num_tokens)
        n = rows.num_rows
        out = StepOutput(None, torch.cat(taps, 1)[:n] if taps else None)
        if logits == "last" and len(work) < n:
            ends = [span.end - 1 for span in rows.spans]
            pick = torch.tensor(ends if len(ends) > 1 else ends * 2, device=self.device)
            x, p, n = x.index_select(0, pick), p.index_select(0, pick), len(work)
        if logits != "none":
            scores, hidden = self._logits(x, p)
            out.logits, out.hidden = scores[:n], hidden[:n]
        return out

    def _check(self, work: Work) -> list[tuple[SequenceState, int, int]]:
        """Refuse what a step cannot do, before anything is written."""
        plan = []
        for state, new in work:
            n, pool = state.num_tokens, state.pool
            if not new or len(new) > pool.slack:
                raise StateError(
                    f"a step takes 1 to {pool.slack} tokens a sequence, got {len(new)}"
                )
            self._check_room(state, new)
            if state.replay_from is not None or state.decoder_tokens < n:
                raise StateError("this sequence waits for prefill (windows or decoder behind)")
            plan.append((state, n, len(new)))
        if not plan or len({id(s) for s, _, _ in plan}) < len(plan):
            raise StateError("a step takes at least one sequence, and each only once")
        if len({id(s.pool) for s, _, _ in plan}) > 1:
            raise StateError("the sequences of a step must lie in one pool")
        return plan

    def _check_room(self, state: SequenceState, ids: Sequence[int]) -> None:
        """Refuse ids that are no tokens and texts that are too long."""
        if state.num_tokens + len(ids) > state.pool.max_tokens:
            raise StateError(
                f"{state.num_tokens} + {len(ids)} tokens do not fit a sequence of at most "
                f"{state.pool.max_tokens}"
            )
        if ids and (min(ids) < 0 or max(ids) >= self.args.vocab_size):
            raise StateError(
                f"token ids must lie in 0..{self.args.vocab_size - 1}, got {min(ids)}..{max(ids)}"
            )

    @torch.inference_mode()
    def feed_drafter(self, state: SequenceState, taps: Tensor, first: int) -> None:
        """Write confirmed positions first, first + 1, ... into the drafter's rings.

        taps [n, taps * D] as returned by `step` or `prefill`; only the last ring's worth is kept.
        """
        if self.drafter is None:
            raise ConfigError("this model was loaded without its drafter")
        self.drafter.feed(state, taps, first)

    # ---- prefill ---------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self,
        state: SequenceState,
        token_ids: Sequence[int],
        *,
        mode: PrefillMode = "full",
        final: bool = True,
        logits: Literal["all", "last", "none"] = "last",
        feed_drafter: bool = False,
    ) -> StepOutput:
        """Append a chunk of a prompt of any length.

        full: all layers on all tokens; the same bits as steps of any size. encoder: layers before
        the decoder on all tokens, the rest on the last window when `final` (notes 3.9; approximate
        by design). After `keep_global` either mode first replays the encoder's window, and the
        decoder's window starts where the replay does. Returns logits after the last token (or all
        rows the decoder ran on) when `final`.
        """
        ids = list(token_ids)
        waits = state.replay_from is not None or state.decoder_tokens < state.num_tokens
        if not ids and not waits:
            raise StateError("prefill needs at least one token")
        self._check_room(state, ids)
        if mode == "full" and not waits:
            return self._prefill_full(state, ids, final, logits, feed_drafter)
        self._encode(state, ids)
        if not final:
            return StepOutput(None, None)
        return self._replay_decoder(state, mode, logits, feed_drafter)

    def _prefill_full(
        self, state: SequenceState, ids: list[int], final: bool, logits: str, feed: bool
    ) -> StepOutput:
        out = StepOutput(None, None)
        parts, taps = [], []
        for at in range(0, len(ids), state.pool.slack):
            piece = ids[at : at + state.pool.slack]
            last = at + len(piece) == len(ids)
            wanted = logits if logits != "last" or (last and final) else "none"
            first = state.num_tokens
            out = self.step([(state, piece)], logits=wanted)  # type: ignore[arg-type]
            if feed and out.taps is not None:
                self.feed_drafter(state, out.taps, first)
            if logits == "all":
                parts.append(out.logits)
                taps.append(out.taps)
        if logits == "all":
            out.logits = torch.cat(parts)
            out.taps = torch.cat(taps) if taps[0] is not None else None
        return out

    @torch.inference_mode()
    def rebuild_windows(self, state: SequenceState, *, feed_drafter: bool = False) -> None:
        """All layers again on the tokens from `replay_from` on, for their window rows only.

        The sequence's global KV is there and is read, not written. A layer's window reaches W - 1
        positions into the layer below, so the last window of all L layers, and the drafter's, are
        those of an uninterrupted run when `replay_from` is 0 or at least L (W - 1) + 1 tokens back.
        """
        start, known = state.replay_from, state.num_tokens
        if start is None:
            raise StateError("the windows of this sequence are there: nothing to rebuild")
        state.encoder_floor = state.decoder_floor = start
        state.drafter_tokens = state.drafter_floor = start
        layers = range(self.args.num_hidden_layers)
        for at in range(start, known, state.pool.slack):
            end = min(at + state.pool.slack, known)
            rows = self._rows([(state, at, end - at)])
            x, p = self._embed(state.token_ids[at:end], rows.padded)
            engram_rows = self._engram_rows(rows, [state.token_ids[:end]])
            _, _, taps = self._run(x, p, rows, layers, engram_rows, [known])
            if feed_drafter and taps:
                self.feed_drafter(state, torch.cat(taps, 1)[: end - at], at)
        state.decoder_tokens = known
        state.written = max(state.written, known)
        state.replay_from, state.tail = None, None

    def _encode(self, state: SequenceState, ids: list[int]) -> None:
        """Encoder layers, and the decoder's global KV, on new tokens; keeps the last window's
        output.

        After `keep_global` the tokens from `replay_from` on run again; they rebuild window rows
        only, their global KV is there.
        """
        pool, args = state.pool, self.args
        known = state.num_tokens
        start = known if state.replay_from is None else state.replay_from
        text = [*state.token_ids, *ids]
        if start == len(text):
            return
        source = args.decoder_start
        tails = [] if state.tail is None else [state.tail]
        for at in range(start, len(text), pool.slack):
            end = min(at + pool.slack, len(text))
            rows = self._rows([(state, at, end - at)])
            x, p = self._embed(text[at:end], rows.padded)
            engram_rows = self._engram_rows(rows, [text[:end]])
            x, p, _ = self._run(x, p, rows, range(source), engram_rows, [known])
            block = self.blocks[source]
            raw = block.attention.raw(block.attn_in(x, p))
            assert raw is not None
            block.attention.write_global(raw, rows, [known])
            tails.append((x[: end - at], p[: end - at]))
        x = torch.cat([t[0] for t in tails])[-args.sliding_window :]
        p = torch.cat([t[1] for t in tails])[-args.sliding_window :]
        state.token_ids[:] = text
        state.tail = (x, p)
        state.written = max(state.written, len(text))
        state.replay_from = None

    def _replay_decoder(
        self, state: SequenceState, mode: PrefillMode, logits: str, feed: bool
    ) -> StepOutput:
        """Decoder layers on the tokens they have not seen, at most the last window of them."""
        pool, args, n = state.pool, self.args, state.num_tokens
        assert state.tail is not None
        x_all, p_all = state.tail
        behind = n - state.decoder_tokens
        if not behind:
            raise StateError("prefill needs at least one token")
        held = min(behind, x_all.shape[0])
        start = n - held
        if start > state.decoder_tokens or state.decoder_tokens == 0:
            # Not contiguous with rows the decoder wrote before: its windows begin here.
            state.decoder_floor = start
            if start and state.origin == "exact":
                state.origin = "decoder-replayed"
        if feed and start > state.drafter_tokens:
            state.drafter_floor = start
        outs: list[Tensor] = []
        taps_all: list[Tensor] = []
        layers = range(args.decoder_start, args.num_hidden_layers)
        x_all, p_all = x_all[-held:], p_all[-held:]
        hidden = None
        for at in range(start, n, pool.slack):
            end = min(at + pool.slack, n)
            rows = self._rows([(state, at, end - at)])
            x, p = x_all[at - start : end - start], p_all[at - start : end - start]
            if rows.padded > end - at:
                x, p = x.expand(rows.padded, -1, -1), p.expand(rows.padded, -1, -1)
            x, p, taps = self._run(x, p, rows, layers, None, None)
            if taps:
                taps_all.append(torch.cat(taps, 1)[: end - at])
            if logits == "all" or (logits == "last" and end == n):
                scores, hidden = self._logits(
                    x[-2:] if logits == "last" else x, p[-2:] if logits == "last" else p
                )
                outs.append(scores[: end - at] if logits == "all" else scores[-1:])
        state.decoder_tokens = n
        state.tail = None
        taps_cat = torch.cat(taps_all) if taps_all else None
        if feed and taps_cat is not None:
            self.feed_drafter(state, taps_cat, start)
        return StepOutput(torch.cat(outs) if outs else None, taps_cat, hidden)
