"""Drafts for the next step, and what of them stands.

Owns: which requests draft, how drafts are chosen and cut, the target's laws behind each of them,
verification, and what is learnt from it. Rules, noise and schedules are in `spec`.
Knows nothing of: sequences' states, events, the queue. The engine steps, commits and reports.

A *block* is one request's part of a step: its last token, then its drafts. Row i of its logits is
the target's after the first i drafts, and `rows[i]` holds what the request asks for there, with
these drafts counted: the drafter chooses under the same row that the target is judged under.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepdraft.engine.protocol import DraftingRunner, DraftRows
from deepdraft.engine.request import Request, crowd_gate, new_gate
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
from deepdraft.errors import DeepdraftError, EngineError
from deepdraft.spec.calibrate import Calibration
from deepdraft.spec.costs import SHORT, StepCosts
from deepdraft.spec.laws import is_law, law
from deepdraft.spec.noise import KeyedDice
from deepdraft.spec.protocol import Proposal, Verdict
from deepdraft.spec.protocol import Row as Law
from deepdraft.spec.schedule import CostSchedule, FixedSchedule, Schedule, ThresholdSchedule
from deepdraft.spec.verify import verify
from deepdraft.telemetry import logger
from deepdraft.types import Origin, Rule, StepTrace

FATAL = (KeyboardInterrupt, SystemExit)
"""What ends the engine. Any other BaseException is the panic of a library written in Rust, and ends
the request that it belongs to."""
HOPELESS = 0.05
"""A draft less likely to stand than this is worth no row on any machine; by cost, drafting ends."""
MARGIN = 1.04
"""What drafting for several requests takes beyond the cost table: Python for each draft and row,
and the last steps, when those that drafted well are through and the others wait with fewer."""
MAX_STEP_ROWS = 96
"""Rows of one step; up to so many are proven to have the same bits alone and together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine speculates. `costs`: None where nothing was measured."""

    rule: Rule = "coupled"
    schedule: ThresholdSchedule | FixedSchedule | None = None
    """None: by cost, where costs are known, else every draft."""
    costs: StepCosts | None = None
    calibrations: Mapping[Rule, Calibration] = field(default_factory=dict)


class Block:
    """One request's part of the next step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.start = request.next_position
        self.token_ids: list[int] = []
        self.laws: list[Law] | None = None if request.rule == "coupled" else []
        self.raw: list[float] = []
        self.drafted = False
        """The drafter ran for it."""
        self.size = 0
        """Drafts that it was to have, as known before any was made."""
        self.num_drafted = 0
        """Drafts before the schedule cut them."""
        self.promised = 1.0
        """Tokens that the confidences of the verified drafts promise, the certain one included."""
        self.error: BaseException | None = None
        """Why the request can have no further token."""
        self._walked = 0
        """Drafts that the grammar's matcher was led through."""
        params = request.source.sampling
        self._counts = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        mask = None
        if request.matcher is not None:
            try:
                mask = request.matcher.mask()
            except DeepdraftError as error:
                self.error = error
        self.rows = [
            Row(
                params=params,
                position=self.start,
                output_counts=request.output_counts,
                prompt_ids=request.source.prompt_ids,
                mask=mask,
            )
        ]

    def extend(self, token_id: int, raw: float, law_V: Law | None) -> None:
        """Adds a draft, and the row of the place behind it.

        Raises, and adds nothing, where the grammar has nothing to say behind it.
        """
        mask = self._walk(token_id)
        self.token_ids.append(token_id)
        self.raw.append(raw)
        if self.laws is not None and law_V is not None:
            self.laws.append(law_V)
        last = self.rows[-1]
        counts = last.output_counts
        if self._counts:
            counts = Counter(counts)
            counts[token_id] += 1
        self.rows.append(
            Row(
                params=last.params,
                position=last.position + 1,
                output_counts=counts,
                prompt_ids=last.prompt_ids,
                mask=mask,
            )
        )

    def _walk(self, token_id: int) -> np.ndarray | None:
        matcher = self.request.matcher
        if matcher is None:
            return None
        if not matcher.advance(token_id):
            raise EngineError(f"token {token_id} was drafted although the grammar forbids it")
        self._walked += 1
        return matcher.mask()

    @property
    def complete(self) -> bool:
        """The drafts complete what the grammar asks for."""
        matcher = self.request.matcher
        return matcher is not None and matcher.is_finished

    def walk_back(self) -> None:
        """Leads the grammar's matcher back to before the drafts."""
        walked, self._walked = self._walked, 0
        if self.request.matcher is None or not walked:
            return
        try:
            self.request.matcher.rollback(walked)
        except FATAL:
            raise
        except BaseException as error:
            self.error = error
            self.cut(0)

    def cut(self, num_drafts: int) -> None:
        """Keeps the first drafts. Raw confidences stay: what was cut is part of the record."""
        del self.token_ids[num_drafts:]
        if self.laws is not None:
            del self.laws[num_drafts:]
        del self.rows[num_drafts + 1 :]

    @property
    def step_ids(self) -> list[int]:
        """What the model is to see: the last token, then the drafts."""
        return [self.request.output_ids[-1], *self.token_ids]


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
        self._size = self.block_size
        self.observer: Observer | None = None
        self._greedy: Schedule
        self._sampled: Schedule
        self._greedy = self._sampled = options.schedule or FixedSchedule(num_drafts=self.block_size)
        self._by_cost = options.schedule is None and options.costs is not None
        # Drafts for several requests take little longer than for one: they draft together or not.
        self._gate = crowd_gate()
        survivals: list[float] = list(accumulate(self._means(), mul))
        self._stood = sum(survivals) or 1.0
        """Drafts of a request that stood in a step of several, lately."""
        self._tried: set[int] = set()
        """The requests that drafted together last, by number."""
        if self._by_cost and options.costs is not None:
            means = self._means()
            self._greedy = CostSchedule(table=options.costs.verify, means=means)
            self._sampled = CostSchedule(table=options.costs.sampled(), means=means)

    def _means(self) -> tuple[float, ...]:
        return (self.options.calibrations.get(self.options.rule) or Calibration()).means

    def settle(self, request: Request) -> None:
        """Chooses a new request's rule, and its gate. At temperature 0 all rules give the same
        text, and coupled needs no laws."""
        asked = request.source.speculation.rule or self.options.rule
        greedy = request.source.sampling.temperature == 0.0
        request.rule = "coupled" if greedy else asked
        request.gate = new_gate(greedy=greedy)

    # ---- drafting --------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request]) -> list[Block]:
        """A block for each request, with the drafts that this step is to verify.

        Never raises: a drafter that fails costs the drafts.
        """
        blocks = [Block(request) for request in requests]
        wanting = [b for b in blocks if b.error is None and self._most_drafts(b.request)]
        if self._by_cost:
            wanting = self._gated(wanting, [request.number for request in requests])
        if wanting:
            self._size = self._block(len(requests))
            self._fill(self._begin(wanting))
            for block in wanting:
                block.num_drafted = len(block.token_ids)
            self._schedule(blocks)
        return blocks

    def _gated(self, wanting: list[Block], numbers: Sequence[int]) -> list[Block]:
        """Those of `wanting` that may draft in a step of these requests."""
        if len(numbers) == 1:
            return [block for block in wanting if block.request.gate.wants_draft()]
        if 2 * len(self._tried.intersection(numbers)) < len(numbers):
            self._gate = crowd_gate()  # what the old one has seen was not about these
        if not wanting or not self._gate.wants_draft():
            return []
        self._tried = set(numbers)
        return wanting

    def _block(self, num_requests: int) -> int:
        """Drafts of a block. For several requests not many more than stand: there the layers' pass
        costs by the draft. Known from the past, so a legal end of a block."""
        if num_requests == 1 or not self._by_cost or not getattr(self._runner, "shortens", False):
            return self.block_size
        return min(self.block_size, max(SHORT, round(1.4 * self._stood + 0.5)))

    def _most_drafts(self, request: Request) -> int:
        asked = request.source.speculation.num_drafts
        most = self.block_size if asked is None else min(asked, self.block_size)
        # The step appends one token more than it accepts.
        return min(most, request.num_left - 1)

    def _begin(self, blocks: Sequence[Block]) -> list[tuple[Block, DraftRows]]:
        batch = [(b.request.handle, b.request.output_ids[-1]) for b in blocks]
        try:
            if self._size == self.block_size:
                return list(zip(blocks, self._runner.draft(batch), strict=True))
            return list(zip(blocks, self._runner.draft(batch, self._size), strict=True))
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
        if self._by_cost:
            # A confidence knows the drafts before its own only: a legal end of the block.
            filling.survival *= self._confidences(block, raw)[len(block.raw)]
            if filling.survival < HOPELESS:
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

    def _schedule(self, blocks: Sequence[Block]) -> None:
        """Cuts every block's drafts to what is worth verifying, all requests in one choice."""
        sampled = any(b.request.source.sampling.temperature for b in blocks)
        schedule = self._sampled if sampled else self._greedy
        confidences = [self._confidences(block) for block in blocks]
        sizes = [block.size for block in blocks]
        most = max(MAX_STEP_ROWS, len(blocks))
        if isinstance(schedule, CostSchedule):
            load = float(len(blocks))
            allocation = schedule.allocate(
                confidences,
                sizes=sizes,
                max_rows=most,
                load=load,
                rate=len(blocks) / schedule.table.step_ms(len(blocks), load),
                spent_ms=self._draft_ms(blocks),
            )
        else:
            allocation = schedule.allocate(confidences, sizes=sizes, max_rows=most)
        for block, own, num in zip(blocks, confidences, allocation.num_drafts, strict=True):
            block.cut(num)
            survivals: list[float] = list(accumulate(own[:num], mul))
            block.promised = 1.0 + sum(survivals)

    def _confidences(self, block: Block, *more: float) -> tuple[float, ...]:
        calibration = self.options.calibrations.get(block.request.rule) or Calibration()
        return calibration.apply([*block.raw, *more])

    def _draft_ms(self, blocks: Sequence[Block]) -> float:
        costs = self.options.costs
        drafting = [b for b in blocks if b.drafted]
        if costs is None or not drafting:
            return 0.0
        sampled = sum(b.num_drafted for b in drafting if b.request.source.sampling.temperature)
        ms = costs.draft_ms(len(drafting), self._size, self.block_size)
        return ms + sampled * costs.sampled_draft

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
        """Takes the results of a step to the record and the gate of each request.

        `ms`: the whole step as measured. The gate reckons in the cost table's milliseconds, so that
        a busy moment of the machine does not look like a bad draft.
        """
        for block, num_accepted in zip(blocks, accepted, strict=True):
            record = block.request.record
            record.ms += ms
            record.drafted_steps += block.drafted
            record.drafts += block.num_drafted
            record.verified += len(block.token_ids)
            record.histogram[num_accepted] += 1
        drafted = [block for block in blocks if block.drafted]
        if not self._by_cost or self.options.costs is None or not drafted:
            return
        sampled = any(b.request.source.sampling.temperature for b in blocks)
        table = self.options.costs.sampled() if sampled else self.options.costs.verify
        num, verified = len(blocks), sum(len(b.token_ids) for b in blocks)
        plain_ms = table.step_ms(num, num)
        step_ms = table.step_ms(num + verified, num) + self._draft_ms(blocks)
        gate = blocks[0].request.gate
        if num > 1:
            gate, step_ms = self._gate, MARGIN * step_ms
            self._stood += 0.2 * (sum(accepted) / len(drafted) - self._stood)
        gate.record(
            1 + sum(accepted) / num,
            step_ms,
            plain_ms,
            expected=1 + sum(b.promised - 1 for b in drafted) / num,
        )
