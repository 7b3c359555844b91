"""Decoding on the device: verify, accept, draft, the next step's rows, as one graph.

Owns: what a step's end is made of, the sequences' settings at fixed addresses, the graph, the
reports that the host reads a step late, the masks that it makes. The rule is `coupled`: a draft
stands while it is the target's own pick under the same noise, so the text is that of plain
decoding, token for token.
Knows nothing of: requests, text, stop strings.

Letters: Q sequences of a step, W rows of each, B = W - 1 drafts, R rows (Q W, padded), S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.errors import StateError
from deepdraft.kernels import accept, filters, markov, sample
from deepdraft.kernels.accept import HEAD, Reports, Slots
from deepdraft.kernels.filters import Settings
from deepdraft.models.v41_buffers import RowInputs
from deepdraft.models.v41_draft import DeviceDrafter
from deepdraft.models.v41_step import DeviceStep, Output

REPORTS = 64
"""Reports that the ring holds: how far replays may run ahead of the host, and more."""
MAX_STOPS = 8
RUNNING, STOPPED = 0, 1
"""States of a slot (`ops.accept`): it emits, or it has ended with a stop id or by the host."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one step told of one sequence."""

    slot: int
    token_ids: tuple[int, ...]
    num_accepted: int
    state: int
    left: int


class DeviceSettings:
    """Sampling and limits of every slot, at fixed addresses: temperature float64 [S], seeds int64
    [S], and `accept.Slots`."""

    def __init__(self, slots: int, device: torch.device | str) -> None:
        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.temperature = filled(0.0, torch.float64, slots)
        self.seeds = filled(0, torch.int64, slots)
        self.limits = Slots(
            state=filled(1, torch.int32, slots),
            left=filled(0, torch.int32, slots),
            stops=filled(-1, torch.int32, slots, MAX_STOPS),
            least=filled(0.0, torch.float32, slots),
        )

    def begin(
        self,
        slot: int,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        least: float = 0.0,
    ) -> None:
        """Settings of a sequence that starts to emit. `least`: drafts less likely than this are
        left out."""
        if len(stop_ids) > MAX_STOPS:
            raise StateError(f"the device checks {MAX_STOPS} stop ids at most, got {len(stop_ids)}")
        self.temperature[slot] = temperature
        self.seeds[slot] = seed - (1 << 64) if seed >= 1 << 63 else seed
        self.limits.stops[slot] = -1
        for number, token in enumerate(stop_ids):
            self.limits.stops[slot, number] = token
        self.limits.left[slot] = max_tokens
        self.limits.least[slot] = least
        self.limits.state[slot] = RUNNING

    def end(self, slot: int) -> None:
        """The sequence emits nothing more: from the next step that is launched on."""
        self.limits.state[slot] = STOPPED


class DeviceLoop:
    """One step of `sequences` sequences of `width` rows each, again and again."""

    def __init__(
        self,
        step: DeviceStep,
        settings: DeviceSettings,
        *,
        sequences: int,
        width: int,
        drafter: DeviceDrafter | None,
        depth: int = REPORTS,
        masked: bool = False,
        filters: Settings | None = None,
        cut: bool = False,
    ) -> None:
        """`drafter` None: plain decoding, one row of each sequence is used. `masked`: the host has
        a say in every row's token; the step is then two graphs, with `set_mask` between them.
        `filters`: tokens are chosen under these settings, of every slot; `cut`: some have top-k or
        top-p."""
        assert not (masked and filters), "masks go with plain choice only"
        self.filters, self.cut = filters, cut
        self.step, self.settings, self.drafter = step, settings, drafter
        self.sequences, self.width = sequences, width
        device = step.weights.device
        pinned = device.type == "cuda"
        self.inputs = RowInputs(sequences * width, device)
        self.draft_inputs = RowInputs(max(1, sequences * (width - 1)), device)
        shape = (depth, sequences, HEAD + width)
        self.reports = Reports(
            ring=torch.zeros(shape, dtype=torch.int32, pin_memory=pinned),
            written=torch.zeros(1, dtype=torch.int64, pin_memory=pinned),
            step=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.bias: Tensor | None = None
        if masked:
            size = (len(self.inputs), step.args.vocab_size)
            self.bias = torch.zeros(size, dtype=torch.float32, device=device)
            self._staged = torch.zeros(size, dtype=torch.float32, pin_memory=pinned)
        self._out: Output | None = None
        self._end: torch.cuda.CUDAGraph | None = None
        self._read = 0

    def set_slots(self, slots: Sequence[int]) -> None:
        """Which slot each sequence of the step is."""
        w = self.width
        for inputs, each in ((self.inputs, w), (self.draft_inputs, w - 1)):
            for number, slot in enumerate(slots):
                inputs.slots[number * each : (number + 1) * each] = slot
        self.inputs.positions.fill_(-1)

    def begin(self, number: int, token_id: int, position: int) -> None:
        """The next step of the step's sequence `number` starts with this token, without drafts."""
        at = number * self.width
        self.inputs.ids[at] = token_id
        self.inputs.positions[at : at + self.width] = -1
        self.inputs.positions[at] = position

    # ---- the device's part -----------------------------------------------------------------

    def run(self) -> None:
        """The whole step, launch by launch."""
        self._out = self.step.run(self.inputs)
        self.finish(self._out)

    def finish(self, out: Output) -> None:
        """From logits to the next step's rows."""
        inputs, settings = self.inputs, self.settings
        picks = self._choose(out.logits)
        args = self.step.args
        done = accept.accept(
            picks, inputs.ids, inputs.positions, inputs.slots, settings.limits, self.reports,
            sequences=self.sequences, noise=args.dspark_noise_token_id,
        )  # fmt: skip
        if self.filters is not None:
            filters.count_tokens(picks, done.confirmed, inputs.slots, self.filters)
        drafts = raw = None
        if self.drafter is not None and self.width > 1:
            assert out.taps is not None and out.places is not None
            dest = torch.where(done.confirmed >= 0, out.places.of("window"), -1)
            self.drafter.feed(out.taps, *out.places.turn(0), dest)
            count, block = done.draft_ids.shape[0], self.width - 1
            self.draft_inputs.ids[:count] = done.draft_ids
            self.draft_inputs.positions[:count] = done.draft_positions
            begun = self.drafter.run(self.draft_inputs, block)
            w = self.drafter.drafter
            found = markov.markov_rounds(
                begun.base, w.markov_embed, w.markov_head, begun.hidden, w.confidence,
                done.last, done.place, inputs.slots, settings.temperature, settings.seeds,
                block=block, width=self.width,
            )  # fmt: skip
            drafts, raw = found.tokens, found.raw
        accept.next_rows(
            done, settings.limits, inputs.slots, inputs.ids, inputs.positions, drafts=drafts,
            raw=raw,
        )  # fmt: skip

    def _choose(self, logits: Tensor) -> Tensor:
        """The token behind every row: int32, -1 where there is none."""
        inputs, settings = self.inputs, self.settings
        if self.filters is None:
            return sample.pick_rows(
                logits, inputs.positions, inputs.slots, settings.temperature, settings.seeds,
                bias=self.bias,
            )  # fmt: skip
        count = self.sequences * self.width
        return filters.pick_filtered(
            logits, inputs.ids[:count], inputs.positions[:count], inputs.slots[:count],
            self.filters, width=self.width, cut=self.cut,
        )  # fmt: skip

    def capture(self) -> None:
        """Compile by a run without live rows, then capture."""
        self.inputs.positions.fill_(-1)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if self.bias is None:
                self.run()
            else:
                self._out = self.step.run(self.inputs)
        if self.bias is not None:
            assert self._out is not None
            self._end = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._end, pool=self.graph.pool()):
                self.finish(self._out)
        # The captured run did nothing, the one before wrote a report of nothing.
        self._read = int(self.reports.step)

    def launch(self) -> None:
        """Start the next step; does not wait for it."""
        self.launch_layers()
        if self.bias is not None:
            self.launch_end()

    def launch_layers(self) -> None:
        """Start the next step, of a masked loop its layers only: the drafts it verifies are known
        since the last step, so the host makes the masks meanwhile."""
        if self.graph is not None:
            self.graph.replay()
        elif self.bias is None:
            self.run()
        else:
            self._out = self.step.run(self.inputs)

    def launch_end(self) -> None:
        """A masked loop: choose, accept and draft, under the masks set so far."""
        if self._end is not None:
            self._end.replay()
        else:
            assert self._out is not None, "launch_layers comes first"
            self.finish(self._out)

    def set_mask(self, row: int, allowed: Tensor | None) -> None:
        """Which tokens may stand behind a row of the step: bool [V] on the host, None: all."""
        assert self.bias is not None, "this loop was made without masks"
        staged = self._staged[row]
        staged.zero_()
        if allowed is not None:
            staged.masked_fill_(~allowed, -torch.inf)
        self.bias[row].copy_(staged, non_blocking=True)

    # ---- the host's part -------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Reports written and not read."""
        return int(self.reports.written) - self._read

    def skip_reports(self) -> None:
        """Take all reports written so far as read."""
        self._read = int(self.reports.written)

    def read(self) -> list[Report]:
        """The oldest unread step's report of every sequence. There must be one."""
        assert self.num_waiting > 0, "no report is there"
        depth = self.reports.ring.shape[0]
        if self.num_waiting > depth:
            raise StateError(f"the host fell {self.num_waiting} steps behind a ring of {depth}")
        rows = self.reports.ring[self._read % depth].tolist()
        self._read += 1
        reports = []
        for slot, emitted, accepted, state, left, *tokens in rows:
            reports.append(Report(slot, tuple(tokens[:emitted]), accepted, state, left))
        return reports
