"""Measures what steps and drafts cost on the machine at hand.

Owns: which sizes are timed, and how. Knows nothing of: requests, the engine's thread.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepdraft.engine.sampler import Row, Sampler
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.types import SamplingParams

ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 24)
SEQUENCES = (1, 2, 4)
CONTEXT = 128

Sample = tuple[int, float, float]
"""Rows or sequences, load, ms."""


def measure_costs(
    runner: Any,
    *,
    rows: tuple[int, ...] = ROWS,
    contexts: tuple[int, ...] = (CONTEXT,),
    repeats: int = 2,
) -> StepCosts:
    """Times a drafting runner that serves nobody. About a second for a small model.

    Steps of each row count after each context (tokens of one sequence, as the load), blocks of
    drafts of 1, 2 and 4 sequences as far as there is room, and a sampled choice. The best of
    `repeats` interleaved runs, as other work on the machine only ever adds; and more rows count as
    no cheaper than fewer.
    """
    timer = _Timer(runner)
    most = min(runner.max_step_rows, max(rows))
    contexts = tuple(sorted({min(n, runner.max_tokens - most - 1) for n in contexts}))
    verify: list[Sample] = []
    draft: list[Sample] = []
    with torch.inference_mode():
        for context in contexts:
            timer.open(context)
            for _ in range(repeats + 1):
                verify += [timer.step(n) for n in rows if n <= most]
                if context == contexts[0]:
                    draft += [timer.draft(n) for n in SEQUENCES if n <= len(timer.sequences)]
            timer.close()
        sampled = min(timer.choice(i) for i in range(repeats + 1))
    return StepCosts(
        verify=CostTable.from_samples(_best(verify)),
        draft=CostTable.from_samples(_best(draft)),
        sampled_row=sampled,
        sampled_draft=sampled,
    )


class _Timer:
    """Sequences of one length, and the ms of things done with them."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.device = torch.device(getattr(runner, "device", "cpu"))
        self.sampler = Sampler(runner.vocab_size, self.device)
        self.context = 0
        self.sequences: list[Any] = []
        self.logits = torch.zeros(1, runner.vocab_size, device=self.device)
        # On one CPU thread its own time is exact however busy the machine is.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self.now = time.thread_time if alone else time.perf_counter

    def open(self, context: int) -> None:
        self.context = context
        ids = [i % self.runner.vocab_size for i in range(context)]
        while len(self.sequences) < max(SEQUENCES) and self.runner.num_free:
            sequence = self.runner.open_sequence()
            self.logits = self.runner.prefill(sequence, ids, final=True).unsqueeze(0)
            self.sequences.append(sequence)

    def close(self) -> None:
        for sequence in self.sequences:
            self.runner.close_sequence(sequence)
        self.sequences.clear()

    def _ms(self, what: Callable[[], object]) -> float:
        begin = self.now()
        what()
        return 1e3 * (self.now() - begin)

    def step(self, num_rows: int) -> Sample:
        sequence = self.sequences[0]
        ids = [1] * num_rows
        ms = self._ms(lambda: self.sampler.tops(self.runner.step([(sequence, ids)])))
        self.runner.commit(sequence, self.context)
        return num_rows, float(self.context), ms

    def draft(self, num_sequences: int) -> Sample:
        sequences = self.sequences[:num_sequences]
        for sequence in sequences:
            # As in use: what the step before confirmed is fed first.
            self.runner.step([(sequence, [1, 1])])

        def draft() -> None:
            for block in self.runner.draft([(s, 1) for s in sequences]):
                for i in range(len(block)):
                    logits_V, _ = block.refine(i, 1)
                    self.sampler.tops(logits_V.unsqueeze(0))

        ms = self._ms(draft)
        for sequence in sequences:
            self.runner.commit(sequence, self.context)
        return num_sequences, 0.0, ms

    def choice(self, position: int) -> float:
        """What a sampled choice takes; the greedy one is part of a step."""
        row = Row(params=SamplingParams(temperature=1.0), position=position)
        logits: Tensor = self.logits
        return self._ms(lambda: self.sampler.sample(logits, [row]))


def _best(samples: list[Sample]) -> list[Sample]:
    """The least ms of each size and load, never falling with the size."""
    best: dict[tuple[float, int], float] = {}
    for size, load, ms in samples:
        best[load, size] = min(ms, best.get((load, size), ms))
    out: list[Sample] = []
    for load, size in sorted(best):
        floor = out[-1][2] if out and out[-1][1] == load else 0.0
        out.append((size, load, max(floor, best[load, size])))
    return out
