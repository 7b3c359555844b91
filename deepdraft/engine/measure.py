"""Measures what steps and drafts cost on the machine at hand.

Owns: which sizes are timed, and how. Knows nothing of: requests, the engine's thread.
"""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from deepdraft.engine.sampler import Row, Sampler
from deepdraft.spec.costs import SHORT, CostTable, StepCosts
from deepdraft.types import SamplingParams

ROWS = (1, 2, 3, 4, 5, 6, 8, 16)
"""Rows of a step of one sequence. Of several, each has 1, 3 and 6."""
ROWS_EACH = (1, 3, 6)
SEQUENCES = (1, 2, 4, 8, 16)
CONTEXT = 256

Sample = tuple[int, float, float]
"""Rows or sequences, load, ms."""


def measure_costs(
    runner: Any, *, rows: tuple[int, ...] = ROWS, context: int = CONTEXT, repeats: int = 2
) -> StepCosts:
    """Times a drafting runner that serves nobody. About two seconds for a small model.

    Steps of one sequence by rows and of several sequences (the load) by rows of each, all of
    `context` tokens; blocks of drafts by sequences; and a sampled choice. As many sequences as
    there is room for. The best of `repeats` interleaved runs, as other work on the machine only
    ever adds; and more rows count as no cheaper than fewer. A server corrects these figures by what
    steps take (`spec.live`).
    """
    timer = _Timer(runner)
    # A short context leaves room for few rows behind a prompt of one token.
    room = runner.max_tokens - 1
    rows = tuple(n for n in rows if n <= min(room, runner.max_step_rows))
    each = tuple(n for n in ROWS_EACH if n <= room)
    verify: list[Sample] = []
    draft: list[Sample] = []
    short: list[float] = []
    with torch.inference_mode():
        timer.open(max(1, min(context, runner.max_tokens - max(*rows, *each) - 1)))
        counts = [n for n in SEQUENCES if n <= len(timer.sequences)]
        for _ in range(repeats + 1):
            # Of one sequence twice: there every ms of the table is weighed, and steps are short.
            verify += [timer.step(1, n) for n in (*rows, *rows)]
            verify += [timer.step(q, q * n) for q in counts[1:] for n in each]
            draft += [timer.draft(n) for n in counts]
            if getattr(runner, "shortens", False) and runner.block_size > SHORT:
                short.append(timer.draft(counts[-1], SHORT)[2])
        timer.close()
        sampled = min(timer.choice(i) for i in range(repeats + 1))
    table = CostTable.from_samples(_best(draft))
    return StepCosts(
        verify=_rectangle(_best(verify)),
        draft=table,
        short_draft=min([1.0, *(ms / table.step_ms(counts[-1]) for ms in short)]),
        sampled_row=sampled,
        sampled_draft=sampled,
    )


def _rectangle(samples: list[Sample]) -> CostTable:
    """Every row count at every load: between the counts measured there linearly, beyond them with
    their last slope. Fewer rows than sequences do not occur; they cost as much as one each."""
    loads: dict[float, list[Sample]] = {}
    for sample in samples:
        loads.setdefault(sample[1], []).append(sample)
    tables = {x: CostTable.from_samples(own) for x, own in loads.items()}
    rows = sorted({n for n, _, _ in samples})
    return CostTable.from_samples(
        (n, x, table.step_ms(n, x)) for x, table in tables.items() for n in rows
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
        self.now = step_clock(self.device)

    def open(self, context: int) -> None:
        self.context = context
        ids = [i % self.runner.vocab_size for i in range(context)]
        first = self.runner.open_sequence()
        self.logits = self.runner.prefill(first, ids, final=True).unsqueeze(0)
        if not hasattr(self.runner, "unpark"):
            self.sequences = [first]
            return
        parked = self.runner.park(first)
        most = min(max(SEQUENCES), self.runner.num_free)
        self.sequences = [self.runner.unpark(parked) for _ in range(most)]

    def close(self) -> None:
        for sequence in self.sequences:
            self.runner.close_sequence(sequence)
        self.sequences.clear()

    def _ms(self, what: Callable[[], object]) -> float:
        begin = self.now()
        what()
        return 1e3 * (self.now() - begin)

    def step(self, num_sequences: int, num_rows: int) -> Sample:
        sequences, each = self.sequences[:num_sequences], num_rows // num_sequences
        batch = [(s, self._ids(each, each * i)) for i, s in enumerate(sequences)]
        ms = self._ms(lambda: self.sampler.tops(self.runner.step(batch)))
        self._back(sequences)
        return num_rows, float(num_sequences), ms

    def _ids(self, num: int, first: int) -> list[int]:
        """Tokens of all sorts: equal ones go to the same few experts, which is cheaper."""
        return [(37 * i + 5) % self.runner.vocab_size for i in range(first, first + num)]

    def draft(self, num_sequences: int, size: int | None = None) -> Sample:
        sequences = self.sequences[:num_sequences]
        # As in use: what the step before confirmed is fed first.
        fed = [1] * min(2, self.runner.max_tokens - self.context)
        self.runner.step([(sequence, fed) for sequence in sequences])

        def draft() -> None:
            batch = list(zip(sequences, self._ids(num_sequences, 0), strict=True))
            blocks = self.runner.draft(batch) if size is None else self.runner.draft(batch, size)
            for i in range(size or self.runner.block_size):
                if hasattr(self.runner, "refine"):
                    logits_QV, _ = self.runner.refine(blocks, i, self._ids(len(blocks), i))
                else:
                    logits_QV = torch.stack([block.refine(i, 1)[0] for block in blocks])
                self.sampler.tops(logits_QV)

        ms = self._ms(draft)
        self._back(sequences)
        return num_sequences, 0.0, ms

    def _back(self, sequences: list[Any]) -> None:
        for sequence in sequences:
            self.runner.commit(sequence, self.context)

    def choice(self, position: int) -> float:
        """What a sampled choice takes; the greedy one is part of a step."""
        row = Row(params=SamplingParams(temperature=1.0), position=position)
        logits: Tensor = self.logits
        return self._ms(lambda: self.sampler.sample(logits, [row]))


def _best(samples: list[Sample]) -> list[Sample]:
    """The least ms of each size and load, never falling with the size: where more seem to take less
    than fewer, all of them take their mean."""
    best: dict[tuple[float, int], float] = {}
    for size, load, ms in samples:
        best[load, size] = min(ms, best.get((load, size), ms))
    out: list[Sample] = []
    for load in sorted({load for load, _ in best}):
        sizes = sorted(size for own, size in best if own == load)
        pools: list[list[float]] = []
        for size in sizes:
            pools.append([best[load, size]])
            while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
                pools[-2:] = [pools[-2] + pools[-1]]
        level = [fmean(pool) for pool in pools for _ in pool]
        out += [(size, load, ms) for size, ms in zip(sizes, level, strict=True)]
    return out


def step_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, for the times of steps. On one CPU thread its own are exact however busy the machine
    is."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter
