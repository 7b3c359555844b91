"""A V4.1 model that runs on the kernels and is used like the torch reference.

Owns: sequences whose rows are packed records on the device, steps captured by padded row count, the
drafter's calls. A prompt is steps of the same kernels, so a row's bits do not depend on how a text
was cut; or, where it is asked for, encoder prefill by other kernels (`v41_prefill`).
Knows nothing of: requests, sampling, files.

Letters: R rows of a step, B drafts of a block, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import ConfigError, EngineError, StateError
from deepdraft.kernels import gemv, markov
from deepdraft.kernels.runtime import pad_rows, padded_rows, use_programmatic_launch
from deepdraft.models.deepseek_v41 import DeepseekV41, PrefillMode, Record, StepOutput, Work
from deepdraft.models.dspark import DraftStart, Refined
from deepdraft.models.layers import WeightSource, make_numerics
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.models.v41_buffers import DECODER, DRAFTER, ENCODER, DeviceCaches, RowInputs
from deepdraft.models.v41_draft import DeviceDrafter
from deepdraft.models.v41_joins import Joins, RankJoins
from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings
from deepdraft.models.v41_prefill import DevicePrefill
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.models.v41_prefill_share import RowShare
from deepdraft.models.v41_step import DeviceStep, Output
from deepdraft.models.v41_weights import (
    LayerWeights,
    ModelWeights,
    load_weights,
    with_whole_maps,
)

MOST_ROWS = 64
"""Rows of one launch of the step; more are several launches."""


class DevicePool(StatePool):
    """Room for sequences, as `StatePool` keeps account of it, in packed records."""

    def __init__(
        self,
        args: V41Args,
        *,
        num_sequences: int,
        max_tokens: int,
        slack: int,
        device: torch.device | str,
    ) -> None:
        caches = DeviceCaches(
            args, num_sequences=num_sequences, max_tokens=max_tokens, spare=slack, device=device
        )
        self.args, self.caches = args, caches
        self.num_sequences, self.max_tokens, self.slack = num_sequences, max_tokens, slack
        self.dtype = torch.uint8
        self.ring, self.pending_ring = caches.ring, caches.pending_ring
        self.ratios = {s: args.compress_ratios[s] for s in args.kv_source_layer_ids}
        self.entries = {s: caches.entries[r - 1] for s, r in self.ratios.items()}
        self.window = caches.window_rows
        self.main, self.index, self.pending = caches.main, caches.index, caches.pending
        self._free = list(range(num_sequences - 1, -1, -1))
        self._floors: dict[int, list[int]] = {}
        self._told: dict[int, tuple[SequenceState, int]] = {}
        """Per slot: whose tokens the device knows, and how many."""

    @property
    def allocated_bytes(self) -> int:
        """Memory of the whole pool."""
        return self.caches.nbytes

    def open(self) -> SequenceState:
        """A new empty sequence; StateError when all are taken."""
        if not self._free:
            raise StateError(f"all {self.num_sequences} sequences of the state pool are in use")
        return SequenceState(self, self._free.pop())

    def prepare(self, state: SequenceState, first: int, end: int) -> None:
        """Before rows first..end of a sequence run: its floors, and the tokens that the n-gram hash
        looks back to, where the device has not seen them (a sequence that was copied here)."""
        self.set_floors(state)
        owner, known = self._told.get(state.slot, (None, 0))
        if owner is not state or first > known:
            begin = max(0, first - self.args.engram_max_ngram_size + 1)
            ids = torch.tensor(state.token_ids[begin:first], dtype=torch.int32)
            self.caches.tokens[state.slot, begin:first].copy_(ids)
        self._told[state.slot] = state, end

    def note_tokens(self, state: SequenceState) -> None:
        """The device has seen this sequence's tokens by itself (`v41_loop`)."""
        self._told[state.slot] = state, state.num_tokens

    def set_floors(self, state: SequenceState) -> None:
        """Tell the device from where on a sequence's windows exist."""
        values = [0, 0, 0]
        values[ENCODER], values[DECODER] = state.encoder_floor, state.decoder_floor
        values[DRAFTER] = state.drafter_floor
        if self._floors.get(state.slot) != values:
            self._floors[state.slot] = values
            self.caches.floors[state.slot].copy_(torch.tensor(values, dtype=torch.int32))

    def scrub(self, state: SequenceState) -> None:
        """Nothing to do: lists name only places that were written, so what a broken sequence left
        behind is never read."""


@dataclass(slots=True)
class _Captured:
    """The step at one padded row count."""

    inputs: RowInputs
    graph: torch.cuda.CUDAGraph | None = None
    output: Output | None = None


class DeviceV41(DeepseekV41):
    """`DeepseekV41` on the kernels (quant numerics)."""

    def __init__(
        self,
        args: V41Args,
        source: WeightSource,
        token_map: list[int] | None,
        *,
        device: torch.device | str = "cuda",
        drafter: bool = True,
        tables_on_host: bool = True,
        graphs: bool = True,
        joins: Joins | None = None,
        prefill_chunk: int = 0,
        prefill_plans: Plans | None = None,
        whole: WeightSource | None = None,
    ) -> None:
        """As `DeepseekV41`. `graphs`: steps are captured (on a GPU). `joins`: of a rank of several,
        whose parts of the weights `source` gives. `prefill_chunk`: rows of a chunk of encoder
        prefill, which may be set until a pool is made; 0: it is refused. `whole`: for encoder
        prefill of a rank, a source of the maps that a step has in parts; `share_prefill` follows
        then."""
        self.joins = joins or Joins()
        self.args = args
        self.device = device
        self.num = make_numerics("quant")
        wholes: list[LayerWeights] = []

        def keep_whole(number: int, layer: LayerWeights) -> None:
            if whole is not None:
                wholes.append(with_whole_maps(layer, number, whole, args))

        self.weights: ModelWeights = load_weights(
            args, source, token_map, device=device, drafter=drafter, tables_on_host=tables_on_host,
            behind=keep_whole,
        )  # fmt: skip
        self._prefill_weights = self.weights
        if wholes:
            self._prefill_weights = replace(self.weights, layers=tuple(wholes))
        drafts = self.weights.drafter is not None
        self.drafter = DraftModel(self) if drafts else None  # type: ignore[assignment]
        self._graphs = graphs and self.weights.device.type == "cuda"
        # Same bits, a tenth less time (bench/results/c-step.json, c-tp2-step.json).
        use_programmatic_launch(self._graphs)
        self._step: DeviceStep | None = None
        self._captured: dict[int, _Captured] = {}
        self._prefill: DevicePrefill | None = None
        self.prefill_chunk, self._prefill_plans = prefill_chunk, prefill_plans
        self._share: RowShare | None = None

    def share_prefill(self, share: RowShare, chunk: int) -> None:
        """Prompts are chunks of so many rows of all ranks, from the next pool on."""
        self._share, self.prefill_chunk = share, chunk

    def new_pool(self, num_sequences: int, max_tokens: int, slack: int = 16) -> DevicePool:
        """State for this many sequences. The model works on the pool made last: captured steps
        hold its addresses."""
        if self.prefill_chunk and self._share is None and isinstance(self.joins, RankJoins):
            raise ConfigError("ranks share the rows of a chunk: share_prefill comes first")
        pool = DevicePool(
            self.args,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            slack=slack,
            device=self.device,
        )
        self._step = DeviceStep(self.weights, pool.caches, joins=self.joins)
        self._captured.clear()
        if self.prefill_chunk:
            self._prefill = DevicePrefill(
                self._prefill_weights, pool.caches, chunk=self.prefill_chunk,
                plans=self._prefill_plans, share=self._share,
            )  # fmt: skip
        if isinstance(self.drafter, DraftModel):
            self.drafter.bind(pool)
        return pool

    @torch.inference_mode()
    def step(self, work: Work, *, logits: str = "all", record: Record | None = None) -> StepOutput:
        """As `DeepseekV41.step`, without records of what happens inside."""
        if record is not None:
            raise ConfigError("a device step keeps no record; ask the torch model for one")
        plan = self._check(work)
        items = [
            (state, first, list(new))
            for (state, first, _), (_, new) in zip(plan, work, strict=True)
        ]
        scores: list[Tensor] = []
        taps: list[Tensor] = []
        for piece in _pieces(items):
            out, count = self._launch(piece)
            scores.append(out.logits[:count].clone())
            if out.taps is not None:
                taps.append(out.taps[:count].clone())
        for state, _, new in items:
            state.token_ids.extend(new)
            state.decoder_tokens = state.num_tokens
            state.written = max(state.written, state.num_tokens)
        result = StepOutput(None, torch.cat(taps) if taps else None)
        if logits != "none":
            result.logits = torch.cat(scores)
            if logits == "last":
                ends, at = [], -1
                for _, _, new in items:
                    at += len(new)
                    ends.append(at)
                result.logits = result.logits[ends]
        return result

    def _launch(self, piece: list[tuple[SequenceState, int, list[int]]]) -> tuple[Output, int]:
        pool = piece[0][0].pool
        assert isinstance(pool, DevicePool)
        if self._step is None or self._step.caches is not pool.caches:
            raise StateError("this model runs on the pool that it made last")
        for state, first, new in piece:
            pool.prepare(state, first, first + len(new))
        count = sum(len(new) for _, _, new in piece)
        captured = self._at(padded_rows(count))
        captured.inputs.set([(state.slot, first, new) for state, first, new in piece])
        if captured.graph is not None:
            captured.graph.replay()
        else:
            captured.output = self._step.run(captured.inputs)
        assert captured.output is not None
        return captured.output, count

    def _at(self, rows: int) -> _Captured:
        """The step of this many (padded) rows, captured when it is used first."""
        if rows in self._captured:
            return self._captured[rows]
        assert self._step is not None
        made = _Captured(RowInputs(rows, self.device))
        if self._graphs:
            with enough_memory():
                self._step.run(made.inputs)  # compiles; no row is live
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made.output = self._step.run(made.inputs)
            made.graph = graph
        self._captured[rows] = made
        return made

    def make_loop(
        self, settings: DeviceSettings, *, sequences: int, width: int, **choice: Any
    ) -> DeviceLoop:
        """Decoding on the device for so many sequences, `width` rows each, captured on a GPU. It
        works on the pool made last. `choice`: of `DeviceLoop`."""
        if self._step is None:
            raise StateError("a loop needs sequences: make a pool first")
        drafter = None
        if width > 1:
            assert isinstance(self.drafter, DraftModel)
            drafter = self.drafter.device_drafter
        loop = DeviceLoop(
            self._step, settings, sequences=sequences, width=width, drafter=drafter, **choice
        )
        if self._graphs:
            with enough_memory():
                loop.capture()
        return loop

    def synchronize(self) -> None:
        """Wait for the device; raises what went wrong on it."""
        if self.weights.device.type == "cuda":
            torch.cuda.synchronize()

    def _prefill_of(self, state: SequenceState) -> DevicePrefill:
        if self._prefill is None:
            raise ConfigError(
                "this model was loaded without encoder prefill, which replays need too; "
                "set prefill to encoder"
            )
        if self._prefill.layers.caches is not state.pool.caches:  # type: ignore[attr-defined]
            raise StateError("this model runs on the pool that it made last")
        return self._prefill

    @torch.inference_mode()
    def warm_prefill(self) -> None:
        """Compile the kernels of chunks and take the memory that they need."""
        if self._prefill is not None:
            with enough_memory("the memory of prompts was taken"):
                self._prefill.warm()
            self.synchronize()

    def _encode(self, state: SequenceState, ids: list[int]) -> None:
        prefill, pool = self._prefill_of(state), state.pool
        assert isinstance(pool, DevicePool)
        start = state.num_tokens if state.replay_from is None else state.replay_from
        pool.prepare(state, start, state.num_tokens + len(ids))
        with enough_memory("a prompt was read"):
            prefill.encode(state, ids)

    def _replay_decoder(
        self, state: SequenceState, mode: PrefillMode, logits: str, feed: bool
    ) -> StepOutput:
        before = state.drafter_tokens
        with enough_memory("a prompt was read"):
            scores, taps, start = self._prefill_of(state).replay(state, all_rows=logits == "all")
        if feed and taps is not None:
            if start > before:
                state.drafter_floor = start
            self.feed_drafter(state, taps, start)
        return StepOutput(None if logits == "none" else scores, taps)

    def rebuild_windows(self, state: SequenceState, *, feed_drafter: bool = False) -> None:
        """Not there yet: a snapshot cannot be continued on a GPU."""
        raise ConfigError("windows cannot be rebuilt on a GPU yet; switch the KV cache off")


@contextlib.contextmanager
def enough_memory(when: str = "a step was captured") -> Generator[None]:
    """EngineError, which says what to do, in place of torch's own where memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        reason = str(error).partition(". ")[0][:200]
        raise EngineError(
            f"the GPU's memory ran out while {when} ({reason}): lower max_context, max_running or "
            "state_memory"
        ) from error


def _pieces(
    items: list[tuple[SequenceState, int, list[int]]],
) -> list[list[tuple[SequenceState, int, list[int]]]]:
    """The rows of a step in launches of at most MOST_ROWS."""
    pieces: list[list[tuple[SequenceState, int, list[int]]]] = [[]]
    room = MOST_ROWS
    for state, first, new in items:
        at = 0
        while at < len(new):
            if room == 0:
                pieces.append([])
                room = MOST_ROWS
            part = new[at : at + room]
            pieces[-1].append((state, first + at, part))
            at += len(part)
            room -= len(part)
    return pieces


class DraftModel:
    """The drafter's calls of `engine.runner`, on the model's pool."""

    def __init__(self, model: DeviceV41) -> None:
        self.args, self.device, self.weights = model.args, model.weights.device, model.weights
        self._joins = model.joins
        self._pool: DevicePool | None = None
        self._drafter: DeviceDrafter | None = None

    def bind(self, pool: DevicePool) -> None:
        """Work on the rings of this pool."""
        self._pool = pool
        self._drafter = DeviceDrafter(self.weights, pool.caches, joins=self._joins)

    @property
    def pool(self) -> DevicePool:
        """The pool whose rings are used."""
        if self._pool is None:
            raise StateError("the drafter has no sequences before the model has a pool")
        return self._pool

    @property
    def device_drafter(self) -> DeviceDrafter:
        """The drafter's launches."""
        assert self.pool is not None and self._drafter is not None
        return self._drafter

    def feed(self, state: SequenceState, taps: Tensor, first: int) -> None:
        """Ring keys for confirmed positions first..; rows beyond a ring are skipped."""
        self.feed_all([(state, taps, first)])

    @torch.inference_mode()
    def feed_all(self, work: Sequence[tuple[SequenceState, Tensor, int]]) -> None:
        """`feed` for several sequences: (state, taps [n, taps * D], first)."""
        kept, positions, dest = [], [], []
        for state, taps, first in work:
            n = taps.shape[0]
            if not n:
                continue
            if first + n > state.num_tokens:
                raise StateError(
                    f"drafter rows up to position {first + n - 1}, but only {state.num_tokens} "
                    "tokens are confirmed"
                )
            skip = max(0, n - self.pool.ring)  # these would be overwritten at once
            kept.append(taps[skip:])
            places = range(first + skip, first + n)
            positions.extend(places)
            dest.extend(state.slot * self.pool.ring + p % self.pool.ring for p in places)
        if not positions:
            return
        taps = pad_rows(torch.cat(kept).to(torch.bfloat16))
        missing = taps.shape[0] - len(positions)
        where = torch.tensor(positions + [0] * missing, device=self.device)
        rows = torch.tensor(dest + [-1] * missing, dtype=torch.int32, device=self.device)
        turns = self.pool.caches.turns.index_select(0, where)
        cos, sin = turns[:, 0].contiguous(), turns[:, 1].contiguous()
        parts = (part.split(MOST_ROWS) for part in (taps, cos, sin, rows))
        for part in zip(*parts, strict=True):
            self.device_drafter.feed(*part)
        for state, fed, first in work:
            if not fed.shape[0]:
                continue
            if first > state.drafter_tokens:
                state.drafter_floor = first  # a gap: what lies below cannot be reached
            state.drafter_tokens = first + fed.shape[0]

    @torch.inference_mode()
    def start(
        self, work: Sequence[tuple[SequenceState, int]], block_size: int | None = None
    ) -> list[DraftStart]:
        """The layers' pass over one block of each sequence (see `dspark.Drafter.start`)."""
        size = self.args.dspark_block_size if block_size is None else block_size
        noise = self.args.dspark_noise_token_id
        inputs = RowInputs(size * len(work), self.device)
        rows = []
        for state, token_id in work:
            if state.drafter_tokens != state.num_tokens:
                raise StateError(
                    f"the drafter was fed {state.drafter_tokens} of {state.num_tokens} tokens"
                )
            rows.append((state.slot, state.num_tokens, [token_id] + [noise] * (size - 1)))
            self.pool.set_floors(state)
        inputs.set(rows)
        begun = self.device_drafter.run(inputs, size)
        return [
            DraftStart(
                state.num_tokens + 1,
                begun.base[i * size : (i + 1) * size],
                begun.hidden[i * size : (i + 1) * size],
            )
            for i, (state, _) in enumerate(work)
        ]

    @torch.inference_mode()
    def refine(self, starts: Sequence[DraftStart], b: int, previous: Sequence[int]) -> Refined:
        """Draft b of several blocks, given the token before it in each."""
        w = self.device_drafter.drafter
        tokens = torch.tensor(list(previous), dtype=torch.int32, device=self.device)
        e = markov.embed_rows(tokens, w.markov_embed)
        bias = gemv.gemv(pad_rows(e), w.markov_head, dtype=torch.float32)[: len(starts)]
        logits = torch.stack([start.base_logits[b] for start in starts]) + bias
        hidden = torch.stack([start.hidden[b] for start in starts])
        both = torch.cat([hidden.float(), e.float()], 1)
        return Refined(logits, (both * w.confidence).sum(1))
