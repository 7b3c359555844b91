"""Encoder prefill on the device: a prompt in chunks, then the decoder's replay of its last window.

Owns: chunks and their boundaries, a sequence's marks between them, progress and cancelling, what
is kept for the replay. `DeepseekV41` (prefill "encoder") is its reference; a row's bits do not
depend on where chunks begin.
Knows nothing of: kernels, requests, how much memory there is (`v41_prefill_plan`).

Letters: S residual streams, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.errors import StateError
from deepdraft.models.state import SequenceState
from deepdraft.models.v41_buffers import DeviceCaches
from deepdraft.models.v41_prefill_chunk import Chunk, make_chunk
from deepdraft.models.v41_prefill_layers import (
    LIBRARY_ROWS,
    Flow,
    Plans,
    PrefillLayers,
)
from deepdraft.models.v41_prefill_share import RowShare
from deepdraft.models.v41_weights import ModelWeights
from deepdraft.telemetry import logger


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one call: tokens done and asked for, seconds since it began."""

    done: int
    total: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The rate so far; 0 before the first chunk."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At that rate. Later chunks see more and take longer; None before the first chunk."""
        return (self.total - self.done) * self.seconds / self.done if self.done else None


LEAST_WARM = 32
"""Rows of the shortest chunk that is tried before requests come: shorter ones have its tiles."""
Watch = Callable[[Progress], bool]
"""Called between chunks; False: stop here."""


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A captured replay: its inputs, its outputs, and what must live as long as it."""

    chunk: Chunk
    x: Tensor
    pre: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    taps: Tensor | None
    buffers: tuple[object, ...]

    def run(self, chunk: Chunk, x: Tensor, pre: Tensor) -> tuple[Tensor, Tensor | None]:
        """The replay of another sequence's last window."""
        self.chunk.copy_(chunk)
        self.x.copy_(x), self.pre.copy_(pre)
        self.graph.replay()
        return self.logits.clone(), None if self.taps is None else self.taps.clone()


class DevicePrefill:
    """Prompts of the sequences of one pool."""

    def __init__(
        self,
        weights: ModelWeights,
        caches: DeviceCaches,
        *,
        chunk: int,
        plans: Plans | None = None,
        share: RowShare | None = None,
    ) -> None:
        """`chunk`: most rows that run at once (of all ranks that `share` them), a multiple of 8."""
        if chunk < 8 or chunk % 8:
            raise StateError(f"a chunk has a multiple of 8 rows, got {chunk}")
        if share is not None and share.rows < chunk:
            raise StateError(f"ranks share {share.rows} rows at most, a chunk has {chunk}")
        self.chunk, self.args = chunk, weights.args
        self.layers = PrefillLayers(weights, caches, plans=plans, share=share)
        self.share = self.layers.share
        self._tried = False
        self._replayed: _Replayed | None = None

    def warm(self) -> None:
        """Chunks without a row, of all sizes that have tiles of their own: kernels are compiled,
        and the device memory that chunks need is taken. Ranks that share rows take chunks of real
        ones, whose places no sequence uses yet."""
        caches, source, rows = self.layers.caches, self.args.decoder_start, self.chunk
        share = self.share
        while rows >= min(self.chunk, LEAST_WARM):
            ids = [] if share.size == 1 else [0] * min(rows, caches.max_tokens)
            chunk = make_chunk(
                caches, ids, slot=0, first=0, floors=(0, 0), write_from=0,
                part=share.part(0, len(ids)),
                rows_at_least=max(rows // share.size, share.rows_each(0, len(ids))),
            )  # fmt: skip
            flow, table_rows = self.layers.start(chunk)
            self.layers.run(chunk, flow, range(source), table_rows=table_rows)
            self.layers.write_entries(chunk, flow, source)
            rows //= 2
        if self.chunk >= min(LIBRARY_ROWS):
            self.layers.prove_library()

    def encode(self, state: SequenceState, ids: list[int], *, watch: Watch | None = None) -> int:
        """Encoder layers, and the decoder's global KV, on new tokens; returns how many were taken:
        all, or those of the chunks before `watch` said stop. The state is whole after every chunk.

        After `keep_global` the tokens from `replay_from` on run again; they rebuild window rows
        only, their global KV is there.
        """
        known, begin, clock = state.num_tokens, time.perf_counter(), 0.0
        start = known if state.replay_from is None else state.replay_from
        text = [*state.token_ids, *ids]
        source, end = self.args.decoder_start, start
        self._tell_before(state, start)
        for at in range(start, len(text), self.chunk):
            end = min(at + self.chunk, len(text))
            chunk = make_chunk(
                self.layers.caches, text[at:end], slot=state.slot, first=at,
                floors=(state.encoder_floor, state.decoder_floor), write_from=known,
                part=self.share.part(at, end - at),
                rows_at_least=self.share.rows_each(at, end - at),
            )  # fmt: skip
            flow, table_rows = self.layers.start(chunk)
            self.layers.run(chunk, flow, range(source), table_rows=table_rows)
            self.layers.write_entries(chunk, flow, source)
            self._keep_tail(state, flow, chunk)
            if end >= known:
                state.token_ids.extend(text[state.num_tokens : end])
                state.written = max(state.written, end)
                state.replay_from = None
            clock = time.perf_counter() - begin
            done = max(0, end - known)
            if watch is not None and not watch(Progress(done, len(ids), clock)):
                break
        if state.replay_from is not None:
            # Stopped while the windows were being replayed: the next call does it again.
            state.tail = None
        return max(0, end - known)

    def _tell_before(self, state: SequenceState, start: int) -> None:
        """Tokens before `start` that the n-gram hash looks back to. The device has not seen those
        of a sequence that was copied, or brought, to this slot."""
        if not self.args.engram_layer_ids or not start:
            return
        begin = max(0, start - self.args.engram_max_ngram_size + 1)
        ids = torch.tensor(state.token_ids[begin:start], dtype=torch.int32)
        self.layers.caches.tokens[state.slot, begin:start].copy_(ids)

    def replay(self, state: SequenceState, *, all_rows: bool) -> tuple[Tensor, Tensor | None, int]:
        """Decoder layers on the tokens they have not seen, at most the last window of them.

        Returns logits float32 [1 or rows, V] of the last row or of `all_rows`, taps bfloat16
        [rows, *] and the first row's position.
        """
        args, n = self.args, state.num_tokens
        if state.tail is None or state.decoder_tokens == n:
            raise StateError("prefill needs at least one token")
        x, pre = state.tail
        held = min(n - state.decoder_tokens, x.shape[0])
        start = n - held
        if start > state.decoder_tokens or state.decoder_tokens == 0:
            # Not contiguous with rows the decoder wrote before: its windows begin here.
            state.decoder_floor = start
            if start and state.origin == "exact":
                state.origin = "decoder-replayed"
        layers = self.layers
        chunk = make_chunk(
            layers.caches, state.token_ids[start:], slot=state.slot, first=start,
            floors=(state.encoder_floor, state.decoder_floor), write_from=n,
            part=self.share.part(start, held), rows_at_least=self.share.rows_each(start, held),
        )  # fmt: skip
        own = slice(chunk.offset, chunk.offset + chunk.count)
        x, pre = (_padded(t[-held:][own], chunk.rows) for t in (x, pre))
        whole = held == args.sliding_window and not all_rows and self.share.size == 1
        if whole and self._replayed is not None:
            logits, taps = self._replayed.run(chunk, x, pre)
        else:
            logits, taps = self._decode(chunk, x, pre, all_rows=all_rows)
            if whole and x.is_cuda and not self._tried:
                self._tried = True
                self._replayed = self._capture(chunk, x, pre)
            taps = None if taps is None else self.share.whole(taps, chunk)
        state.decoder_tokens = n
        state.tail = None
        return logits, None if taps is None else taps[:held], start

    def _decode(
        self, chunk: Chunk, x: Tensor, pre: Tensor, *, all_rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The decoder's layers: logits of the last row or of all, taps of this rank's."""
        args, layers, taps = self.args, self.layers, None
        flow = Flow(x, pre=pre)
        if layers.num_taps:
            taps = x.new_empty(chunk.rows, layers.num_taps * args.hidden_size)
        layers.run(
            chunk, flow, range(args.decoder_start, args.num_hidden_layers), write=False, taps=taps
        )
        return layers.logits(flow, chunk, all_rows=all_rows), taps

    def _capture(self, chunk: Chunk, x: Tensor, pre: Tensor) -> _Replayed | None:
        """The replay of a whole window as one graph: it is hundreds of short launches, which the
        host would take longer for than the device. None where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                logits, taps = self._decode(chunk, x, pre, all_rows=False)
        except RuntimeError:
            logger.warning("the decoder's replay is not captured and stays slow", exc_info=True)
            return None
        return _Replayed(chunk, x, pre, graph, logits, taps, self.layers.buffers)

    def _keep_tail(self, state: SequenceState, flow: Flow, chunk: Chunk) -> None:
        """The streams that enter the decoder, of the last window: [n, S, D] and their mix."""
        assert flow.coef is not None
        window, streams = self.args.sliding_window, self.args.hc_mult
        x = self.share.last(flow.x, chunk, window)
        pre = self.share.last(flow.coef[:, :streams], chunk, window)
        if state.tail is not None and len(x) < window:
            x = torch.cat((state.tail[0], x))[-window:]
            pre = torch.cat((state.tail[1], pre))[-window:]
        state.tail = x.clone(), pre.clone()


def _padded(x: Tensor, rows: int) -> Tensor:
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out
