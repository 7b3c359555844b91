"""Drafts for the next step, and what of them stands.

Owns: which requests draft, how drafts are chosen and cut, the target's laws behind each of them,
verification, and what is learnt from it. Rules, noise and schedules are in `spec`.
Knows nothing of: sequences' states, events, the queue. The engine steps, commits and reports.

A *block* is one request's part of a step: its last token, then its drafts. Row i of its logits is
the target's after the first i drafts, and `rows[i]` holds what the request asks for there, with
these drafts counted: the drafter chooses under the same row that the target is judged under.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepdraft.engine.block import FATAL, Block
from deepdraft.engine.protocol import DraftingRunner, DraftRows
from deepdraft.engine.request import Request
from deepdraft.engine.sampler import (
    Choice,
    Row,
    Sampler,
    Top,
    logprobs,
    nothing_allowed,
    probabilities,
    scores,
    unusable,
)
from deepdraft.engine.worth import Worth
from deepdraft.spec.calibrate import Calibration
from deepdraft.spec.costs import StepCosts
from deepdraft.spec.laws import is_law, law
from deepdraft.spec.live import LiveCosts
from deepdraft.spec.noise import KeyedDice
from deepdraft.spec.protocol import Proposal, Verdict
from deepdraft.spec.protocol import Row as Law
from deepdraft.spec.schedule import FixedSchedule, Schedule, ThresholdSchedule
from deepdraft.spec.verify import verify
from deepdraft.telemetry import logger
from deepdraft.types import Origin, Rule, StepTrace

MAX_STEP_ROWS = 96
"""Rows of one step; up to so many are proven to have the same bits alone and together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine speculates. `costs`: None where nothing was measured. Live ones are corrected
    by what steps take; with others a run that is repeated makes the same choices."""

    rule: Rule = "coupled"
    schedule: ThresholdSchedule | FixedSchedule | None = None
    """None: by cost, where costs are known, else every draft."""
    costs: StepCosts | LiveCosts | None = None
    calibrations: Mapping[Rule, Calibration] = field(default_factory=dict)


@dataclass(slots=True)
class _Filling:
    """A block while it is drafted."""

    block: Block
    drafts: DraftRows
    most: int
    """Drafts at most."""
    previous: int
    """The token before the next draft."""
    survival: float = 1.0
    """The chance that all of them stand."""


class BlockTarget:
    """The target behind the drafts of one block (`spec.protocol.Target`)."""

    def __init__(self, sampler: Sampler, rows: Sequence[Row], logits_RV: Tensor, tops: list[Top]):
        self._sampler, self._rows, self._logits, self._tops = sampler, rows, logits_RV, tops
        self.error: str | None = None
        """Why there was no law or pick."""

    def pick(self, i: int) -> int | None:
        """Plain decoding's choice after i drafts."""
        choice = self._sampler.choose(self._logits[i], self._rows[i], self._tops[i])
        self.error = choice.error
        return None if choice.error is not None else choice.token_id

    def law(self, i: int) -> Law:
        """The law that plain decoding draws from after i drafts; NaN where there is none."""
        row = self._rows[i]
        self.error = unusable(row, self._tops[i])
        if self.error is None:
            law_V = law(scores(self._logits[i], row), greedy=row.params.temperature == 0.0)
            if is_law(law_V):
                return law_V
            self.error = nothing_allowed(row)
        return np.full(self._sampler.vocab_size, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a block appends, and why there is no more if that is an error."""

    choices: tuple[Choice, ...]
    num_accepted: int
    error: str | None = None
    last: Origin = "plain"
    """How the token behind the accepted drafts came."""
    expected: tuple[float, ...] = ()
    """The confidences of the drafts verified."""
    probabilities: tuple[float, ...] = ()
    """Of the choices in the model's own law, for a request that asks for `steps`."""


Observer = Callable[[Block, Proposal, BlockTarget, Verdict], None]
"""Sees every verified block (measurements and tests)."""


class Speculator:
    """Drafting and verification for one engine. Only the engine's thread calls it."""

    def __init__(self, runner: Any, sampler: Sampler, options: Speculation) -> None:
        self._runner: DraftingRunner = runner
        self._sampler = sampler
        self.options = options
        self.block_size: int = getattr(runner, "block_size", 0)
        self.observer: Observer | None = None
        self.worth: Worth | None = None
        """None: not by cost."""
        self._schedule: Schedule = options.schedule or FixedSchedule(num_drafts=self.block_size)
        if options.schedule is None and options.costs is not None:
            self.worth = Worth(
                options.costs,
                block_size=self.block_size,
                shortens=getattr(runner, "shortens", False),
                means=(options.calibrations.get(options.rule) or Calibration()).means,
                device=torch.device(getattr(runner, "device", "cpu")),
            )

    def settle(self, request: Request) -> None:
        """Chooses a new request's rule. At temperature 0 all rules give the same text, and coupled
        needs no laws."""
        asked = request.source.speculation.rule or self.options.rule
        greedy = request.source.sampling.temperature == 0.0
        request.rule = "coupled" if greedy else asked

    # ---- drafting --------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request]) -> list[Block]:
        """A block for each request, with the drafts that this step is to verify.

        Never raises: a drafter that fails costs the drafts.
        """
        if self.worth is not None:
            self.worth.begin()
        blocks = [Block(request) for request in requests]
        wanting = [b for b in blocks if b.error is None and self._most_drafts(b.request)]
        if self.worth is not None:
            wanting = self.worth.gated(wanting, [request.number for request in requests])
        if wanting:
            self._fill(self._begin(wanting))
            for block in wanting:
                block.num_drafted = len(block.token_ids)
            self._cut(blocks)
        if self.worth is not None:
            self.worth.proposed()
        return blocks

    def _most_drafts(self, request: Request) -> int:
        asked = request.source.speculation.num_drafts
        most = self.block_size if asked is None else min(asked, self.block_size)
        # The step appends one token more than it accepts.
        return min(most, request.num_left - 1)

    def _begin(self, blocks: Sequence[Block]) -> list[tuple[Block, DraftRows]]:
        batch = [(b.request.handle, b.request.output_ids[-1]) for b in blocks]
        size = self.block_size if self.worth is None else self.worth.size
        try:
            if size == self.block_size:
                return list(zip(blocks, self._runner.draft(batch), strict=True))
            return list(zip(blocks, self._runner.draft(batch, size), strict=True))
        except Exception as error:
            if len(blocks) > 1:
                return [pair for block in blocks for pair in self._begin([block])]
            logger.warning("no drafts for %s: %s", blocks[0].request.request_id, error)
            return []

    def _fill(self, pairs: Sequence[tuple[Block, DraftRows]]) -> None:
        """Drafts position by position, all blocks at once."""
        live = []
        for block, drafts in pairs:
            block.drafted = len(drafts) > 0  # the text itself may have nothing to propose
            block.size = min(len(drafts), self._most_drafts(block.request))
            live.append(_Filling(block, drafts, block.size, block.request.output_ids[-1]))
        position = 0
        try:
            while live := [filling for filling in live if position < filling.most]:
                self._fill_position(live, position)
                position += 1
        finally:
            # Whatever happened: a matcher left behind drafts would judge the wrong place.
            for block, _ in pairs:
                block.walk_back()

    def _fill_position(self, live: Sequence[_Filling], position: int) -> None:
        refined = self._refine(live, position)
        if not refined:
            return
        tops = self._sampler.tops(torch.stack([logits_V for _, logits_V, _ in refined]))
        for (filling, logits_V, raw), top in zip(refined, tops, strict=True):
            try:
                more = self._extend(filling, logits_V, raw, top)
            except FATAL:
                raise
            except BaseException:
                # What was drafted before stands: each draft is complete with its law.
                logger.warning("drafting failed at %d", filling.block.start, exc_info=True)
                more = False
            if not more:
                filling.most = 0

    def _refine(self, live: Sequence[_Filling], i: int) -> list[tuple[_Filling, Tensor, float]]:
        """Logits [V] and raw confidence of draft i of each block; ends those that fail."""
        together = getattr(self._runner, "refine", None)
        if together is not None:
            try:
                logits_QV, raw = together([f.drafts for f in live], i, [f.previous for f in live])
                return self._usable(list(zip(live, logits_QV, raw, strict=True)))
            except Exception:
                logger.warning("drafts of %d blocks failed together", len(live), exc_info=True)
        refined = []
        for filling in live:
            try:
                refined.append((filling, *filling.drafts.refine(i, filling.previous)))
            except Exception:
                logger.warning("drafting failed at %d", filling.block.start, exc_info=True)
                filling.most = 0
        return self._usable(refined)

    def _usable(
        self, refined: Sequence[tuple[_Filling, Tensor, float]]
    ) -> list[tuple[_Filling, Tensor, float]]:
        """Ends the blocks whose logits are not the vocabulary's: the model cannot take the rest."""
        good = []
        for one in refined:
            if one[1].shape == (self._sampler.vocab_size,):
                good.append(one)
            else:
                logger.warning("a draft's logits have the shape %s", tuple(one[1].shape))
                one[0].most = 0
        return good

    def _extend(self, filling: _Filling, logits_V: Tensor, raw: float, top: Top) -> bool:
        """Adds a draft to its block; whether there may be another. May raise: nothing is added."""
        block = filling.block
        request = block.request
        if self.worth is not None:
            # A confidence knows the drafts before its own only: a legal end of the block.
            own = self._confidences(block, raw)[len(block.raw) :]
            filling.survival *= request.trust.apply(own)[0]
            if self.worth.hopeless(block, filling.survival):
                return False
        row = block.rows[-1]
        if not math.isfinite(top[0]):
            return False
        law_V = None
        if block.laws is None:
            choice = self._sampler.choose(logits_V, row, top)
            if choice.error is not None:
                return False
            token_id = choice.token_id
        else:
            law_V = law(scores(logits_V, row))
            if not is_law(law_V):
                return False
            dice = KeyedDice(request.source.sampling.seed, block.start)
            token_id = dice.draft(row.position, law_V)
        block.extend(token_id, raw, law_V)
        filling.previous = token_id
        # Known from drafts that stay, so a legal end of the block.
        return token_id not in request.source.stop_token_ids and not block.complete

    def _cut(self, blocks: Sequence[Block]) -> None:
        """Cuts every block's drafts to what is worth verifying, all requests in one choice."""
        confidences = [self._confidences(block) for block in blocks]
        most = max(MAX_STEP_ROWS, len(blocks))
        if self.worth is not None:
            counts = self.worth.counts(blocks, confidences, most)
        else:
            sizes = [block.size for block in blocks]
            counts = self._schedule.allocate(confidences, sizes=sizes, max_rows=most).num_drafts
        for block, num in zip(blocks, counts, strict=True):
            block.cut(num)

    def _confidences(self, block: Block, *more: float) -> tuple[float, ...]:
        calibration = self.options.calibrations.get(block.request.rule) or Calibration()
        return calibration.apply([*block.raw, *more])

    # ---- verification ----------------------------------------------------------------------

    def judge(self, block: Block, logits_RV: Tensor) -> Outcome:
        """What the block appends to its request. logits [drafts + 1, V]."""
        request = block.request
        if block.error is not None:
            raise block.error
        tops = self._sampler.tops(logits_RV)
        if not all(math.isfinite(value) for value, _ in tops):
            # Perhaps behind a draft that falls, yet the sequence's memory has held it.
            request.tainted = True
        target = BlockTarget(self._sampler, block.rows, logits_RV, tops)
        last: Origin = "plain"
        expected: tuple[float, ...] = ()
        if block.token_ids or self.observer is not None:
            proposal = Proposal(
                start=block.start,
                token_ids=tuple(block.token_ids),
                laws=block.laws,
                confidences=(expected := self._confidences(block)[: len(block.token_ids)]),
            )
            dice = KeyedDice(request.source.sampling.seed, block.start)
            rule: Rule = request.rule if block.token_ids else "coupled"
            verdict = verify(rule, proposal, target, dice)
            if self.observer is not None:
                self.observer(block, proposal, target, verdict)
            token_ids, num_accepted = verdict.tokens(proposal), verdict.num_accepted
            missing = verdict.next_token is None
            if block.token_ids and verdict.why != "target":
                last = "bonus" if verdict.why == "bonus" else "corrected"
        else:
            # Without drafts a step is plain, and so is its noise.
            token_id = target.pick(0)
            token_ids, num_accepted = (() if token_id is None else (token_id,)), 0
            missing = token_id is None
        num_top = request.source.sampling.logprobs
        choices = tuple(
            Choice(
                token_id=token_id,
                logprob=None if num_top is None else logprobs(logits_RV[i], token_id, num_top),
            )
            for i, token_id in enumerate(token_ids)
        )
        return Outcome(
            choices=choices,
            num_accepted=num_accepted,
            error=target.error if missing else None,
            last=last,
            expected=expected,
            probabilities=(
                probabilities(logits_RV, token_ids) if request.source.speculation.steps else ()
            ),
        )

    def trace(
        self, block: Block, outcome: Outcome, num_taken: int, *, ms: float, draft_ms: float
    ) -> StepTrace:
        """How a step went that gave `num_taken` tokens. `index`: as the request's record has it."""
        accepted, expected = outcome.num_accepted, outcome.expected
        fell = block.token_ids[accepted:] if outcome.last == "corrected" else []
        return StepTrace(
            index=sum(block.request.record.histogram.values()),
            rows=len(block.rows),
            drafted=block.num_drafted,
            accepted=accepted,
            ms=ms,
            draft_ms=draft_ms,
            origins=tuple("accepted" if i < accepted else outcome.last for i in range(num_taken)),
            confidences=tuple(expected[i] if i < accepted else None for i in range(num_taken)),
            probabilities=outcome.probabilities[:num_taken],
            rejected=fell[0] if fell else None,
            rejected_confidence=expected[accepted] if fell else None,
        )

    def commit(self, block: Block, num_accepted: int) -> None:
        """Takes back the drafts that fell."""
        self._runner.commit(block.request.handle, block.start + num_accepted)

    def learn(self, blocks: Sequence[Block], accepted: Sequence[int], ms: float) -> None:
        """Takes the results of a step to the record of each request, and to what drafts are worth.
        `ms`: the whole step as measured."""
        for block, num_accepted in zip(blocks, accepted, strict=True):
            record = block.request.record
            record.ms += ms
            record.drafted_steps += block.drafted
            record.drafts += block.num_drafted
            record.verified += len(block.token_ids)
            record.histogram[num_accepted] += 1
        if self.worth is not None:
            calibrated = [self._confidences(block)[: len(block.token_ids)] for block in blocks]
            self.worth.learn(blocks, accepted, calibrated)

    def ended(self, blocks: Sequence[Block]) -> None:
        """The step with these blocks is over, drafts that fell taken back."""
        if self.worth is not None:
            self.worth.ended(blocks)
