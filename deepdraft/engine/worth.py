"""What drafting costs and wins in the engine.

Owns: when a step's parts are timed, the gate of several requests, how long their blocks are, what
is learnt from a step. Gates, trust and costs themselves are in `spec`.
Knows nothing of: how drafts are made and judged.

Nothing here sees target results before they are final, and times say only whether the next step
drafts and how many of its drafts are verified (docs/speculation.md).
"""

from collections.abc import Sequence

import torch

from deepdraft.engine.block import Block
from deepdraft.engine.measure import step_clock
from deepdraft.engine.request import crowd_gate
from deepdraft.spec.costs import SHORT, Costs, StepCosts
from deepdraft.spec.live import LiveCosts
from deepdraft.spec.schedule import CostSchedule
from deepdraft.spec.trust import promised

HOPELESS = 0.05
"""A draft less likely to stand than this is worth no row on any machine."""
MARGIN = 1.04
"""What drafting for several requests takes beyond the cost table: the last steps, when those that
drafted well are through and the others wait with fewer."""


class Worth:
    """Whether steps draft and how many drafts they verify, by costs. For one engine's thread."""

    def __init__(
        self,
        costs: StepCosts | LiveCosts,
        *,
        block_size: int,
        shortens: bool,
        means: Sequence[float],
        device: torch.device,
    ) -> None:
        """`costs`: live ones are corrected by what steps take. `shortens`: the drafter makes
        shorter blocks too. `means`: how often draft i stands if those before it did."""
        self._live = isinstance(costs, LiveCosts)
        self.costs = costs if isinstance(costs, LiveCosts) else LiveCosts(costs)
        self.size = block_size
        """Drafts of a block, of the step at hand."""
        self._block_size, self._shortens = block_size, shortens
        self._means = tuple(means)
        self._schedules = {
            False: CostSchedule(table=self.costs.table),
            True: CostSchedule(table=self.costs.sampled),
        }
        # Drafts for several requests take little longer than for one: they draft together or not.
        self._gate = crowd_gate()
        self._stood = promised(self._means) or 1.0
        """Drafts of a request that stood in a step of several, lately."""
        self._tried: set[int] = set()
        """The requests that drafted together last, by number."""
        self._exploring = False
        """This step finds out whether drafts stand again."""
        self._now = step_clock(device)
        self._began = self._proposed = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def proposed(self) -> None:
        """Its drafts are made."""
        self._proposed = self._now()

    def gated(self, wanting: list[Block], numbers: Sequence[int]) -> list[Block]:
        """Those of `wanting` that may draft in a step of the requests with these numbers."""
        gate = self._gate
        if len(numbers) == 1:
            wanting = [block for block in wanting if block.request.gate.wants_draft()]
            if wanting:
                gate = wanting[0].request.gate
        else:
            if 2 * len(self._tried.intersection(numbers)) < len(numbers):
                gate = self._gate = crowd_gate()  # the old one's steps were not about these
            if not wanting or not gate.wants_draft():
                return []
            self._tried = set(numbers)
        self._exploring = gate.on_trial
        self.size = self._size(len(numbers))
        return [] if self._live and self.costs.wants_plain(len(numbers)) else wanting

    def _size(self, num_requests: int) -> int:
        """Drafts of a block. For several requests not many more than stand: there the layers' pass
        costs by the draft. Known from the past, so a legal end of a block."""
        if num_requests == 1 or not self._shortens:
            return self._block_size
        return min(self._block_size, max(SHORT, round(1.4 * self._stood + 0.5)))

    def hopeless(self, block: Block, survival: float) -> bool:
        """No further draft of a block is worth a row on any machine, where this is the chance that
        it stands with all before it."""
        return survival < HOPELESS and not (self._exploring and not block.token_ids)

    def counts(
        self, blocks: Sequence[Block], confidences: Sequence[Sequence[float]], max_rows: int
    ) -> tuple[int, ...]:
        """How many drafts of each block go into the step, all blocks in one choice."""
        schedule, load = self._schedules[_sampled(blocks)], float(len(blocks))
        trusts = [block.request.trust for block in blocks]
        return schedule.allocate(
            [trust.apply(own) for trust, own in zip(trusts, confidences, strict=True)],
            sizes=[block.size for block in blocks],
            max_rows=max_rows,
            load=load,
            rate=len(blocks) / schedule.table.step_ms(len(blocks), load),
            means=[trust.apply(self._means) for trust in trusts],
            explore=self._exploring,
        ).num_drafts

    def learn(
        self,
        blocks: Sequence[Block],
        accepted: Sequence[int],
        confidences: Sequence[Sequence[float]],
    ) -> None:
        """Takes the results of a step to trusts and gate; `confidences` of the verified drafts.

        The gate reckons in the cost table's milliseconds, so that a busy moment of the machine does
        not look like a bad draft. A block's drafts are worth what their confidences promise, as the
        request's drafts up to these have shown. Chance says less: a step that pays on average often
        yields nothing.
        """
        worth = 0.0
        for block, own, num_accepted in zip(blocks, confidences, accepted, strict=True):
            if block.drafted:
                block.request.trust.learn(own, num_accepted)
                worth += promised(block.request.trust.apply(own))
            else:
                block.request.trust.rest()
        num, drafted = len(blocks), sum(block.drafted for block in blocks)
        if not drafted:
            return
        gate, ms = blocks[0].request.gate, self.step_ms(blocks)
        if num > 1:
            gate, ms = self._gate, MARGIN * ms
            self._stood += 0.2 * (sum(accepted) / drafted - self._stood)
        gate.record(1 + worth / num, ms, self._table(blocks).step_ms(num, num))

    def step_ms(self, blocks: Sequence[Block]) -> float:
        """What a step with these blocks takes, drafts included, by the costs."""
        num, rows = len(blocks), sum(len(block.rows) for block in blocks)
        ms = self._table(blocks).step_ms(rows, num)
        drafting = [block for block in blocks if block.drafted]
        if drafting:
            ms += self.costs.draft_ms(len(drafting), self.size, self._block_size)
            ms += _num_sampled(drafting) * self.costs.start.sampled_draft
        return ms

    def _table(self, blocks: Sequence[Block]) -> Costs:
        return self._schedules[_sampled(blocks)].table

    def ended(self, blocks: Sequence[Block]) -> None:
        """The step with these blocks is over, drafts that fell taken back."""
        if not self._live or any(block.error for block in blocks):
            return
        end = self._now()
        drafting = [block for block in blocks if block.drafted]
        begin = self._proposed if drafting else self._began
        rows = sum(len(block.token_ids) + 1 for block in blocks)
        self.costs.saw_step(rows, len(blocks), 1e3 * (end - begin), sampled=_sampled(blocks))
        if drafting:
            self.costs.saw_draft(
                len(drafting),
                self.size,
                self._block_size,
                1e3 * (self._proposed - self._began),
                num_sampled=_num_sampled(drafting),
            )


def _sampled(blocks: Sequence[Block]) -> bool:
    return any(block.request.source.sampling.temperature for block in blocks)


def _num_sampled(blocks: Sequence[Block]) -> int:
    """Drafts that were chosen at a temperature."""
    return sum(block.num_drafted for block in blocks if block.request.source.sampling.temperature)
