"""Decoding that runs ahead of the host: requests whose steps the device can end by itself.

Owns: which requests qualify, the loop of each shape, what was launched and not yet read, and the
host's account of a sequence after each report.
Knows nothing of: events, scheduling, the layers.

A step's successor is launched before its report is read, so the device never waits for the host.
What a report says of a request that was ended, parked or moved meanwhile is dropped: the same
tokens would be chosen again, as noise is keyed by position.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepdraft.engine.request import Request
from deepdraft.engine.sampler import Choice as Chosen
from deepdraft.engine.speculate import Outcome
from deepdraft.errors import DeepdraftError, EngineError
from deepdraft.kernels.filters import Settings
from deepdraft.models.v41_loop import MAX_STOPS, RUNNING, DeviceLoop, DeviceSettings, Report
from deepdraft.telemetry import Counters, logger
from deepdraft.types import SamplingParams

if TYPE_CHECKING:
    from deepdraft.engine.gpu_runner import GpuRunner

MOST_ROWS = 16
"""Rows of a loop's step: one sequence has a block's, several share these."""
MOST_SEQUENCES = 4
_NO_TOKEN = 3
_WAIT_S = 60.0
"""A report that does not come within this time does not come at all."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one step gave a request."""

    request: Request
    token_ids: tuple[int, ...]
    num_accepted: int
    num_drafts: int
    ms: float = 0.0
    """Since the step before it was read."""
    error: str | None = None

    @property
    def outcome(self) -> Outcome:
        """As the engine takes the result of a step."""
        choices = tuple(Chosen(token_id=token) for token in self.token_ids)
        return Outcome(choices=choices, num_accepted=self.num_accepted, error=self.error)


def qualifies(request: Request) -> bool:
    """Whether the device can choose this request's tokens as the sampler would."""
    asked = request.source.speculation
    return (
        request.source.sampling.logprobs is None
        and request.rule == "coupled"
        and request.matcher is None
        and asked.num_drafts is None
        and not asked.steps
        and len(request.source.stop_token_ids) <= MAX_STOPS
    )


class Choice(enum.IntEnum):
    """What choosing a token takes."""

    PLAIN = 0
    """Temperature and noise."""
    SETTINGS = 1
    """Penalties, bias or min-p too."""
    CUTS = 2
    """Top-k or top-p, which need the tokens in order."""

    @classmethod
    def of(cls, params: SamplingParams) -> Choice:
        """For one request."""
        if params.top_k or params.top_p < 1.0:
            return cls.CUTS
        penalties = params.presence_penalty or params.frequency_penalty
        if params.min_p or penalties or params.repetition_penalty != 1.0 or params.logit_bias:
            return cls.SETTINGS
        return cls.PLAIN


class Ahead:
    """The device loops of one runner. Only the engine's thread calls it."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self._settings = DeviceSettings(runner.num_sequences, runner.device)
        self._filters: Settings | None = None
        self._loops: dict[tuple[int, int, Choice], DeviceLoop] = {}
        self._loop: DeviceLoop | None = None
        self._batch: list[tuple[Request, Any]] = []
        self._launched = 0
        self._last = 0.0
        self._broken = False

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether these requests can be decoded together here."""
        fits = 1 <= len(requests) <= MOST_SEQUENCES and not self._broken
        return fits and all(map(qualifies, requests))

    def decode(self, requests: Sequence[Request], counters: Counters) -> list[Emitted] | None:
        """Tokens for these requests, or for those under way before; None where there are none and
        the host is to do the step. A device that fails ends the requests with an error, and the
        host does all steps from then on."""
        takes = self.takes(requests)
        if not takes and self._loop is None:
            return None
        try:
            emitted = self.step(requests) if takes else self.stop()
        except Exception as error:
            logger.error("decoding on the device failed", exc_info=error)
            self._broken, self._loop, self._launched = True, None, 0
            text = error.message if isinstance(error, DeepdraftError) else type(error).__name__
            for request in requests:
                request.tainted = True
            message = f"decoding on the GPU failed: {text}"
            return [Emitted(r, (), 0, 0, error=message) for r in requests]
        _count(emitted, counters)
        return emitted

    def step(self, requests: Sequence[Request]) -> list[Emitted]:
        """Tokens of one step for requests that `takes` allows.

        Where they are others than last time, what is under way is read first; the result may then
        belong to those of before. Raises EngineError where the device does not answer.
        """
        if self._loop is not None and not self._same(requests):
            return self.stop()
        if self._loop is None:
            self._begin(requests)
        assert self._loop is not None
        while self._launched < 2:
            self._loop.launch()
            self._launched += 1
        return self._read()

    def stop(self) -> list[Emitted]:
        """Reads what is under way and launches nothing more."""
        emitted: list[Emitted] = []
        while self._launched:
            emitted += self._read()
        self._loop, self._batch = None, []
        return emitted

    # ---- inside ----------------------------------------------------------------------------

    def _same(self, requests: Sequence[Request]) -> bool:
        now = [(id(r), id(r.handle)) for r in requests]
        return now == [(id(r), id(handle)) for r, handle in self._batch]

    def _begin(self, requests: Sequence[Request]) -> None:
        runner, count = self._runner, len(requests)
        width = min(runner.block_size + 1, MOST_ROWS // count)
        choice = max(Choice.of(r.source.sampling) for r in requests)
        loop = self._loop_of(count, width, choice)
        runner.feed_pending(*(r.handle for r in requests))
        loop.set_slots([r.handle.slot for r in requests])
        for number, request in enumerate(requests):
            handle, params = request.handle, request.source.sampling
            assert handle.num_tokens == request.next_position - 1, "the model has not seen it all"
            runner.pool.prepare(handle, handle.num_tokens, handle.num_tokens)
            self._settings.begin(
                handle.slot,
                max_tokens=request.num_left,
                temperature=params.temperature,
                seed=params.seed,
                stop_ids=sorted(request.source.stop_token_ids),
            )
            if choice is not Choice.PLAIN:
                self._set_filters(handle.slot, request)
            loop.begin(number, request.output_ids[-1], handle.num_tokens)
        loop.skip_reports()
        self._loop, self._launched, self._last = loop, 0, time.perf_counter()
        self._batch = [(r, r.handle) for r in requests]

    def _loop_of(self, sequences: int, width: int, choice: Choice) -> DeviceLoop:
        key = sequences, width, choice
        if key not in self._loops:
            more: dict[str, Any] = {}
            if choice is not Choice.PLAIN:
                more = {"filters": self._settings_of_all(), "cut": choice is Choice.CUTS}
            self._loops[key] = self._runner.model.make_loop(
                self._settings, sequences=sequences, width=width, **more
            )
        return self._loops[key]

    def _settings_of_all(self) -> Settings:
        if self._filters is None:
            runner = self._runner
            self._filters = Settings.empty(runner.num_sequences, runner.vocab_size, runner.device)
        return self._filters

    def _set_filters(self, slot: int, request: Request) -> None:
        params, filters = request.source.sampling, self._settings_of_all()
        filters.set(
            slot,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            seed=params.seed,
            bias=dict(params.logit_bias),
            prompt=list(request.source.prompt_ids),
        )
        counts = filters.counts
        tokens = torch.tensor(list(request.output_counts), device=counts.device)
        numbers = torch.tensor(list(request.output_counts.values()), dtype=counts.dtype)
        counts[slot, tokens] = numbers.to(counts.device)

    def _read(self) -> list[Emitted]:
        assert self._loop is not None
        self._wait(self._loop)
        self._launched -= 1
        now = time.perf_counter()
        ms, self._last = 1e3 * (now - self._last), now
        emitted = []
        for (request, handle), report in zip(self._batch, self._loop.read(), strict=True):
            if request.finished is None and request.handle is handle:
                emitted.append(self._account(request, handle, report, ms))
        return [e for e in emitted if e.token_ids or e.error is not None]

    def _wait(self, loop: DeviceLoop) -> None:
        until = time.monotonic() + _WAIT_S
        while not loop.num_waiting:
            if time.monotonic() > until:
                self._runner.model.synchronize()  # raises what went wrong on the device
                raise EngineError(f"the GPU gave no report within {_WAIT_S:.0f} s")
            time.sleep(1e-5)

    def _account(self, request: Request, handle: Any, report: Report, ms: float) -> Emitted:
        """The sequence is what the device has seen: all but the last emitted token."""
        ids = report.token_ids
        width = self._loop.width if self._loop is not None else 1
        if ids:
            handle.token_ids.extend([request.output_ids[-1], *ids[:-1]])
            handle.decoder_tokens = handle.num_tokens
            handle.written = max(handle.written, handle.num_tokens + width)
            if self._runner.block_size and width > 1:
                handle.drafter_tokens = handle.num_tokens
            self._runner.pool.note_tokens(handle)
        error = None
        if report.state == _NO_TOKEN:
            error = "no token can be chosen: the largest logit is not finite"
        elif report.state != RUNNING and not ids:
            error = "the device ended this sequence before its time"
        request.record.add(ms, drafts=width - 1, accepted=report.num_accepted)
        return Emitted(request, ids, report.num_accepted, width - 1, ms, error)


def _count(emitted: Sequence[Emitted], counters: Counters) -> None:
    """The engine's counters of a decode step."""
    drafts = sum(e.num_drafts for e in emitted)
    counters.add("decode_steps", bool(emitted))
    counters.add("decode_rows", len(emitted) + drafts)
    counters.add("spec_steps", len(emitted))
    counters.add("spec_drafted_steps", sum(e.num_drafts > 0 for e in emitted))
    counters.add("spec_drafts", drafts)
    counters.add("spec_verified", drafts)
    for e in emitted:
        counters.add(f"spec_accepted_{e.num_accepted}")
