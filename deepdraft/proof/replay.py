"""Recorded drafts of one stream again, under the cost schedule as the engine runs it.

Owns: the loop of gate, schedule, trust and costs over recorded blocks. Knows nothing of: engines,
files, prompts.
"""

from collections.abc import Iterable
from typing import Protocol

from deepdraft.spec.calibrate import Calibration, Observation
from deepdraft.spec.costs import StepCosts
from deepdraft.spec.gate import DraftGate
from deepdraft.spec.live import LiveCosts
from deepdraft.spec.schedule import CostSchedule
from deepdraft.spec.trust import Trust, promised


class Machine(Protocol):
    """What the parts of a step really take, ms."""

    def step_ms(self, num_rows: int) -> float:
        """A step, its drafts aside."""
        ...

    def draft_ms(self, num_drafts: int) -> float:
        """A block of drafts."""
        ...


class AsTold:
    """A machine that takes what a table of costs says."""

    def __init__(self, costs: StepCosts, *, sampled: bool = False) -> None:
        self.costs, self.sampled = costs, sampled
        self._table = costs.sampled() if sampled else costs.verify

    def step_ms(self, num_rows: int) -> float:
        """See `Machine`."""
        return self._table.step_ms(num_rows)

    def draft_ms(self, num_drafts: int) -> float:
        """See `Machine`."""
        return self.costs.draft.step_ms(1) + self.sampled * num_drafts * self.costs.sampled_draft


def replay_fixed(
    blocks: Iterable[Observation], machine: Machine, num_drafts: int
) -> tuple[float, float]:
    """Tokens and ms of blocks cut to a fixed count; without drafts none is paid for."""
    tokens = total = 0.0
    for seen in blocks:
        count = min(num_drafts, len(seen.raw))
        tokens += 1 + min(count, seen.num_accepted)
        total += machine.step_ms(1 + count)
        total += machine.draft_ms(len(seen.raw)) if num_drafts else 0.0
    return tokens, total


def replay(
    blocks: Iterable[Observation],
    machine: Machine,
    costs: LiveCosts,
    calibration: Calibration,
    *,
    sampled: bool = False,
    live: bool = False,
) -> tuple[float, float]:
    """Tokens and ms of one request's blocks as the engine would have chosen.

    The drafts and what came of them are the recorded ones; `machine` says what the steps took, and
    `costs`, which several requests share, what the engine believes of them; `live`: it learns.
    """
    table = costs.sampled if sampled else costs.table
    schedule, gate, trust = CostSchedule(table=table), DraftGate(), Trust()
    tokens = total = 0.0
    for seen in blocks:
        count, size, drafted_ms = 0, len(seen.raw), 0.0
        drafts = bool(size) and gate.wants_draft() and not (live and costs.wants_plain(1))
        plain_ms = table.step_ms(1, 1.0)
        own: tuple[float, ...] = ()
        if drafts:
            drafted_ms = machine.draft_ms(size)
            own = calibration.apply(seen.raw)
            count = schedule.allocate(
                [trust.apply(own)],
                load=1.0,
                rate=1.0 / plain_ms,
                means=[trust.apply(calibration.means)],
                explore=gate.on_trial,
            ).num_drafts[0]
        ms = machine.step_ms(1 + count)
        gained = min(count, seen.num_accepted)
        tokens += 1 + gained
        total += drafted_ms + ms
        if drafts:
            trust.learn(own[:count], gained)
            told = costs.draft_ms(1, size, size) + table.step_ms(1 + count, 1.0)
            told += sampled * size * costs.start.sampled_draft
            gate.record(1.0 + promised(trust.apply(own[:count])), told, plain_ms)
        else:
            trust.rest()
        if live:
            costs.saw_step(1 + count, 1, ms, sampled=sampled)
            if drafts:
                costs.saw_draft(1, size, size, drafted_ms, num_sampled=sampled * size)
    return tokens, total
