"""Blocks that end early, by a stop token or a fault: the law and the grammar's place stay."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch

from deepdraft.engine.speculate import Speculation
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.spec.schedule import ThresholdSchedule
from deepdraft.types import GenerateRequest, Rule, SamplingParams, SpeculationParams

from .fake import DraftingRunner
from .test_engine import answer, ask, serving
from .test_speculate import PLAIN, SCHEDULES, SETTINGS, joint_law, runner_of, wish

STOP = 2
STAIRS = StepCosts(
    # The second row pays only together with the third.
    verify=CostTable(rows=(1, 2, 3, 6), ms=((5.0, 9.0, 9.01, 9.02),)),
    draft=CostTable(rows=(1, 4), ms=((0.01, 0.02),)),
)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("schedule", "size", "at"),
    [
        # Survival 0.36 at the second draft: the threshold is 0.25 in a block of three drafts.
        (Speculation(schedule=ThresholdSchedule(threshold=0.5)), 3, 2),
        (Speculation(costs=STAIRS), 2, 1),
    ],
    ids=["threshold", "stairs"],
)
def test_a_drafted_stop_token_does_not_choose_its_own_rows(
    rule: Rule, schedule: Speculation, size: int, at: int
) -> None:
    """A stop token ends its block; whether it is verified must not hang on that."""
    runner = DraftingRunner(lambda p: [], vocab_size=4, strength=0, error=0.0, block_size=size)
    runner.confidence = math.log(0.6 / 0.4)
    exact = Counter[int]()
    for text, p in joint_law(runner, (2, 3), SamplingParams(), at + 1).items():
        if STOP not in text[:at]:
            exact[text[at]] += p  # type: ignore[assignment]
    found = Counter[int]()
    with serving(runner, max_running=1, max_queue=600, speculation=schedule) as engine:
        streams = [
            engine.generate(
                ask(
                    f"{seed}",
                    (2, 3),
                    sampling=SamplingParams(seed=seed),
                    max_new_tokens=8,
                    stop_token_ids=frozenset({STOP}),
                    speculation=SpeculationParams(rule=rule),
                )
            )
            for seed in range(500)
        ]
        for stream in streams:
            ids, _ = answer(stream)
            if len(ids) > at:
                found[ids[at]] += 1
        assert engine.stats()["spec_verified"] > 100
    num, share = found.total(), exact[STOP] / exact.total()
    # Five deviations; a third of its share before, which is more than ten.
    assert abs(found[STOP] - num * share) < 5 * math.sqrt(num * share * (1 - share))


class Panic(BaseException):
    """As a library written in Rust raises it."""


class Counting:
    """Allows one half of the tokens at even places and the other at odd ones. Panics behind a
    token that nobody but the drafter chooses, and when it is led back from there."""

    def __init__(self, poison: int, stuck: bool) -> None:
        self.ids: list[int] = []
        self.poison, self.stuck = poison, stuck
        self.is_finished = False

    def mask(self) -> np.ndarray:
        if self.ids[-1:] == [self.poison]:
            raise Panic("index out of range")
        return np.arange(300) % 2 == len(self.ids) % 2

    def advance(self, token_id: int) -> bool:
        assert token_id % 2 == len(self.ids) % 2
        self.ids.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if self.stuck and self.poison in self.ids:
            raise Panic("no way back")
        del self.ids[len(self.ids) - num_tokens :]


@dataclasses.dataclass
class CountingGrammar:
    poison: int = -1
    stuck: bool = False

    def matcher(self) -> Counting:
        return Counting(self.poison, self.stuck)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_grammar_behind_drafts_that_failed_is_where_it_was(stuck: bool) -> None:
    runner = runner_of()
    params = SETTINGS["sampled"]

    def asked(first: int, **fields: object) -> GenerateRequest:
        return wish(
            str(first), first, **{"sampling": params, "grammar": CountingGrammar(), **fields}
        )

    with serving(runner, max_running=2, speculation=SCHEDULES["all"]) as engine:
        plain = [answer(engine.generate(asked(n, speculation=PLAIN))) for n in (5, 8)]
        runner.spoil_draft = lambda i, logits: logits + 100.0 * (torch.arange(300) == 99)
        grammars = (CountingGrammar(poison=99, stuck=stuck), CountingGrammar())
        streams = [
            engine.generate(asked(n, grammar=grammar))
            for n, grammar in zip((5, 8), grammars, strict=True)
        ]
        bad, good = (answer(stream) for stream in streams)
    assert good == plain[1]
    # A matcher that cannot be led back ends its own request.
    assert bad[1] == "error" if stuck else bad == plain[0]


def test_drafts_outside_the_vocabulary_are_never_stepped() -> None:
    runner = runner_of()
    seen: set[int] = set()
    step = runner.step
    runner.step = lambda batch: (seen.update(*(ids for _, ids in batch)), step(batch))[1]  # type: ignore
    runner.spoil_draft = lambda i, x: torch.cat([x, x + 50.0]) if i else x
    with serving(runner, speculation=SCHEDULES["all"]) as engine:
        greedy = {"sampling": SETTINGS["greedy"]}
        plain = answer(engine.generate(wish("a", speculation=PLAIN, **greedy)))
        assert answer(engine.generate(wish("a", **greedy))) == plain
        assert engine.stats()["spec_verified"] > 10 and max(seen) < 300
