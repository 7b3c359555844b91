"""Drafting in the engine over a fake model: the text is plain decoding's, or follows its law."""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from deepdraft.engine.engine import Engine
from deepdraft.engine.sampler import Row, scores
from deepdraft.engine.speculate import Speculation
from deepdraft.errors import RequestError
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.spec.laws import law
from deepdraft.spec.schedule import FixedSchedule, ThresholdSchedule
from deepdraft.types import (
    DecodeStats,
    GenerateRequest,
    Rule,
    SamplingParams,
    SpeculationParams,
    TokenEvent,
)

from .fake import DraftingRunner, FakeSequence
from .test_engine import EOS, answer, ask, serving

PLAIN = SpeculationParams(num_drafts=0)
COSTS = StepCosts(
    verify=CostTable(rows=(1, 6, 24), ms=((7.0, 12.0, 20.0),)),
    draft=CostTable(rows=(1, 4), ms=((2.0, 4.0),)),
    sampled_row=0.2,
    sampled_draft=0.1,
)
SCHEDULES = {
    "cost": Speculation(costs=COSTS),
    "all": Speculation(schedule=FixedSchedule(num_drafts=5)),
    "threshold": Speculation(schedule=ThresholdSchedule(threshold=0.5)),
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, adjusted": SamplingParams(
        temperature=0.0,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((5, 1.0), (9, -3.0)),
    ),
    "sampled": SamplingParams(seed=3),
    "filtered": SamplingParams(seed=4, temperature=0.7, top_p=0.8, top_k=40, min_p=0.02),
    "everything": SamplingParams(
        seed=5,
        temperature=1.3,
        top_p=0.95,
        top_k=10**6,
        presence_penalty=-0.5,
        frequency_penalty=0.2,
        repetition_penalty=0.9,
        logit_bias=((7, 2.0),),
    ),
}


def runner_of(**options: object) -> DraftingRunner:
    """Answers that wander: the script is weak, so noise and penalties matter."""
    return DraftingRunner(lambda p: [20 + k % 3 for k in range(100)], strength=3.0, **options)


def wish(name: str, first: int = 5, **fields: object) -> GenerateRequest:
    return ask(
        name, (first, 6, 7), **{"max_new_tokens": 30, "stop_token_ids": frozenset(), **fields}
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_coupled_gives_plain_decodings_tokens(schedule: str, setting: str) -> None:
    """Alone and among others, at any temperature and with every parameter; log-probs too."""
    params = dataclasses.replace(SETTINGS[setting], logprobs=2)
    runner = runner_of()
    with serving(runner, max_running=3, speculation=SCHEDULES[schedule]) as engine:
        plain, drafted = [], []
        for first in (5, 8, 11):
            request = wish(str(first), first, sampling=params, speculation=PLAIN)
            plain.append(list(engine.generate(request)))
        streams = [engine.generate(wish(str(n), n, sampling=params)) for n in (5, 8, 11)]
        drafted = [list(s) for s in streams]
        accepted = [e[-1].stats.accepted for e in drafted if e[-1].stats]
        before = runner.num_steps
        alone = list(engine.generate(wish("5", 5, sampling=params)))
    for a, b in zip(plain, drafted, strict=True):
        assert flat(a) == flat(b)
    assert flat(alone) == flat(plain[0])
    assert len(flat(plain[0])[0]) == 30
    # By cost few drafts pay here, and when the gate closes hangs on the machine's times.
    assert sum(accepted) > (0 if schedule == "cost" else 20), "the drafts have no effect"
    assert schedule == "cost" or runner.num_steps - before < 29


def flat(events: Sequence[TokenEvent]) -> tuple[list[int], list[object], str | None]:
    ids = [i for e in events for i in e.token_ids]
    return ids, [p for e in events for p in e.logprobs], events[-1].finish_reason


def test_the_model_sees_exactly_the_text() -> None:
    runner = runner_of()
    seen: list[list[int]] = []
    close = runner.close_sequence

    def record(handle: FakeSequence, *, scrub: bool = False) -> None:
        seen.append(list(handle.token_ids))
        close(handle, scrub=scrub)

    runner.close_sequence = record  # type: ignore[method-assign]
    with serving(runner, speculation=SCHEDULES["all"]) as engine:
        ids, _ = answer(engine.generate(wish("a", sampling=SETTINGS["sampled"])))
    # The last step may have gone on behind the limit; nothing of it is kept anywhere.
    assert seen[0][: 3 + len(ids) - 1] == [5, 6, 7, *ids[:-1]]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5, 6, 7])
def test_the_length_limit_inside_a_block(rule: Rule, num_new: int) -> None:
    runner = DraftingRunner(lambda p: [20] * 50)
    rows: list[int] = []
    step = runner.step
    runner.step = lambda batch: (rows.append(len(batch[0][1])), step(batch))[1]  # type: ignore
    with serving(runner, speculation=SCHEDULES["all"]) as engine:
        request = ask(
            max_new_tokens=num_new,
            sampling=SamplingParams(seed=1),
            speculation=SpeculationParams(rule=rule),
        )
        assert answer(engine.generate(request)) == ([20] * num_new, "length")
    # Never more rows than tokens that may still come; the first token is the prompt's.
    assert rows == ([] if num_new == 1 else [num_new - 1] if num_new < 7 else [6])


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7])
def test_a_stop_token_inside_an_accepted_block(rule: Rule, length: int) -> None:
    script = [20 + i for i in range(length)]
    with serving(DraftingRunner(lambda p: script), speculation=SCHEDULES["all"]) as engine:
        request = ask(sampling=SamplingParams(seed=1), speculation=SpeculationParams(rule=rule))
        assert answer(engine.generate(request)) == ([*script, EOS], "stop")
        # Another id than the end token, one that the drafts run past.
        request = ask(
            stop_token_ids=frozenset({20}),
            speculation=SpeculationParams(rule=rule),
            sampling=SamplingParams(seed=2),
        )
        assert answer(engine.generate(request)) == ([20], "stop")


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_rules_follow_the_plain_law(rule: Rule) -> None:
    """The first three tokens of 800 answers against the exact law, with penalties."""
    params = SamplingParams(presence_penalty=0.7, temperature=0.8, top_p=0.9)
    runner = DraftingRunner(lambda p: [], vocab_size=5, strength=0.0, error=1.5, block_size=4)
    exact = joint_law(runner, (2, 3), params, 3)
    num, found = 800, Counter[tuple[int, ...]]()
    with serving(runner, max_running=8, speculation=SCHEDULES["all"]) as engine:
        for first in range(0, num, 200):
            streams = [
                engine.generate(
                    ask(
                        f"{seed}",
                        (2, 3),
                        sampling=dataclasses.replace(params, seed=seed),
                        max_new_tokens=6,
                        stop_token_ids=frozenset(),
                        speculation=SpeculationParams(rule=rule),
                    )
                )
                for seed in range(first, first + 200)
            ]
            for stream in streams:
                found[tuple(answer(stream)[0][:3])] += 1
        stats = engine.stats()
    assert set(found) <= set(exact), "a text that plain decoding cannot give"
    likely = {text: p for text, p in exact.items() if p * num >= 8}
    chi = sum((found[t] - num * p) ** 2 / (num * p) for t, p in likely.items())
    # Mean k, deviation sqrt(2k): five deviations above.
    assert chi < len(likely) + 5 * math.sqrt(2 * len(likely)), (chi, len(likely))
    assert stats["spec_verified"] > 500
    assert 0 < stats["spec_accepted_0"] < stats["spec_steps"]


def joint_law(
    runner: DraftingRunner, prompt: tuple[int, ...], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    texts = {(): 1.0}
    for k in range(length):
        longer = {}
        for text, p in texts.items():
            handle = FakeSequence()
            handle.token_ids, handle.num_prompt = [*prompt, *text], len(prompt)
            row = Row(
                params=params,
                position=len(prompt) + k,
                output_counts=Counter(text),
                prompt_ids=prompt,
            )
            for token, share in enumerate(law(scores(runner.clean_logits(handle), row))):
                if share:
                    longer[(*text, token)] = p * share
        texts = longer
    return texts


def test_temperature_0_is_the_same_under_every_rule() -> None:
    with serving(runner_of(), speculation=SCHEDULES["all"]) as engine:
        answers = [
            answer(engine.generate(wish("a", speculation=SpeculationParams(rule=rule))))
            for rule in ("token", "block", "coupled", None)
        ]
        assert answers == [answer(engine.generate(wish("a", speculation=PLAIN)))] * 4


def test_what_a_request_asks_for_is_done() -> None:
    def stats(**fields: object) -> DecodeStats:
        request = wish("a", sampling=SETTINGS["sampled"], speculation=SpeculationParams(**fields))
        last = list(engine.generate(request))[-1].stats
        assert last is not None
        return last

    options = dataclasses.replace(SCHEDULES["all"], rule="token")
    with serving(runner_of(), speculation=options) as engine:
        assert stats().rule == "token"
        assert stats(rule="block").rule == "block"
        assert stats(rule="coupled").rule == "coupled"
        plain = stats(num_drafts=0)
        assert (plain.steps, plain.drafts, plain.average_accept_length) == (29, 0, 1.0)
        few = stats(num_drafts=2)
        assert few.drafts <= 2 * few.steps and len(few.histogram) <= 3
        many = stats(num_drafts=99)
        assert max(n for n, count in enumerate(many.histogram) if count) <= 5


@pytest.mark.parametrize("setting", ["greedy", "sampled"])
def test_cancel_between_draft_and_verification(setting: str) -> None:
    runner = runner_of()
    engine_of: list[Engine] = []

    def cancel(sequences: list[FakeSequence]) -> None:
        if any(s.token_ids[0] == 13 and s.num_tokens > 12 for s in sequences):
            engine_of[0].cancel("bad")

    params = SETTINGS[setting]
    with serving(runner, max_running=2, speculation=SCHEDULES["all"]) as engine:
        engine_of.append(engine)
        plain = answer(engine.generate(wish("good", sampling=params, speculation=PLAIN)))
        whole, _ = answer(engine.generate(wish("x", 13, sampling=params, speculation=PLAIN)))
        runner.draft_fault = cancel
        streams = [
            engine.generate(wish(n, first, sampling=params))
            for n, first in (("bad", 13), ("good", 5))
        ]
        ids, reason = answer(streams[0])
        assert reason == "abort" and 9 < len(ids) < 30 and ids == whole[: len(ids)]
        assert answer(streams[1]) == plain
        assert answer(engine.generate(wish("good", sampling=params))) == plain


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_nan_logits_inside_a_block(rule: Rule) -> None:
    """The tokens before it come, then an error; the neighbour and the next request go on."""
    runner = DraftingRunner(lambda p: [20 + i for i in range(40)])

    def spoil(sequence: FakeSequence, logits: torch.Tensor) -> torch.Tensor:
        bad = sequence.token_ids[0] == 13 and sequence.num_tokens == 9
        return logits * float("nan") if bad else logits

    runner.spoil = spoil
    fields = {"sampling": SamplingParams(seed=1), "max_new_tokens": 20}
    speculation = SpeculationParams(rule=rule)
    with serving(runner, max_running=2, speculation=SCHEDULES["all"]) as engine:
        streams = [
            engine.generate(ask(str(n), (n, 6, 7), speculation=speculation, **fields))
            for n in (13, 5)
        ]
        events = list(streams[0])
        assert [i for e in events for i in e.token_ids] == [20, 21, 22, 23, 24, 25]
        assert events[-1].error == "the model's logits at position 9 have NaN"
        good = ([20 + i for i in range(20)], "length")
        assert answer(streams[1]) == good
        assert answer(engine.generate(ask("next", (5, 6, 7), **fields))) == good
    assert [s.token_ids[0] for s in runner.scrubbed] == [13]


def test_nan_behind_a_draft_that_falls_is_no_error() -> None:
    runner = DraftingRunner(lambda p: [20 + i for i in range(40)])
    # The drafter believes in token 99; the model breaks only behind it.
    runner.spoil_draft = lambda i, logits: logits + 100.0 * (torch.arange(300) == 99)
    runner.spoil = lambda s, logits: logits * (float("nan") if s.token_ids[-1] == 99 else 1.0)
    with serving(runner, speculation=SCHEDULES["all"]) as engine:
        assert answer(engine.generate(ask(max_new_tokens=20)))[0] == [20 + i for i in range(20)]
        assert engine.stats()["spec_verified"] > 50
    assert len(runner.scrubbed) == 1, "its memory has held NaN"


FAULTS: dict[str, Callable[[DraftingRunner], None]] = {}


def fault(name: str) -> Callable[[Callable[[DraftingRunner], None]], None]:
    return lambda plant: FAULTS.update({name: plant})


def boom(*_: object) -> None:
    raise RuntimeError("no draft")


@fault("the drafter raises")
def _(runner: DraftingRunner) -> None:
    runner.draft_fault = boom


@fault("the drafter is cold for a sequence")
def _(runner: DraftingRunner) -> None:
    runner.refused = lambda s: s.token_ids[0] == 8


@fault("it raises within a block")
def _(runner: DraftingRunner) -> None:
    runner.refine_fault = lambda s, i: boom() if i == 2 else None


@fault("it cannot go on with several blocks at once")
def _(runner: DraftingRunner) -> None:
    runner.refine = lambda *arguments: boom()  # type: ignore[attr-defined]


@fault("its logits are NaN")
def _(runner: DraftingRunner) -> None:
    runner.spoil_draft = lambda i, x: x * float("nan") if i == 1 else x


@fault("its logits are all impossible")
def _(runner: DraftingRunner) -> None:
    runner.spoil_draft = lambda i, x: torch.full_like(x, -math.inf)


@fault("its confidences are NaN")
def _(runner: DraftingRunner) -> None:
    runner.confidence = math.nan


@fault("its confidences lie")
def _(runner: DraftingRunner) -> None:
    runner.confidence, runner.error = 50.0, 30.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("schedule", ["cost", "all"])
def test_a_broken_drafter_costs_speed_only(name: str, schedule: str) -> None:
    runner = runner_of()
    params = SETTINGS["sampled"]
    with serving(runner, max_running=3, speculation=SCHEDULES[schedule]) as engine:
        plain = [
            answer(engine.generate(wish(str(n), n, sampling=params, speculation=PLAIN)))
            for n in (5, 8, 11)
        ]
        FAULTS[name](runner)
        streams = [engine.generate(wish(str(n), n, sampling=params)) for n in (5, 8, 11)]
        assert [answer(s) for s in streams] == plain
        for rule in ("token", "block"):
            request = wish("r", sampling=params, speculation=SpeculationParams(rule=rule))
            ids, reason = answer(engine.generate(request))
            assert reason == "length" and len(ids) == 30
        if name == "the drafter is cold for a sequence":
            assert engine.stats()["spec_verified"] > 20, "the others keep their drafts"


def test_a_failed_joint_step_is_taken_again_alone() -> None:
    runner = runner_of()

    def step_fault(sequences: list[FakeSequence]) -> None:
        if len(sequences) > 1 or sequences[0].token_ids[0] == 13:
            raise RuntimeError

    params = SETTINGS["sampled"]
    with serving(runner, max_running=2, speculation=SCHEDULES["all"]) as engine:
        plain = answer(engine.generate(wish("good", sampling=params, speculation=PLAIN)))
        runner.step_fault = step_fault
        streams = [engine.generate(wish(str(n), n, sampling=params)) for n in (13, 5)]
        assert answer(streams[0])[1] == "error"
        assert answer(streams[1]) == plain


def test_scores_that_allow_nothing_are_an_error_of_that_request() -> None:
    runner = DraftingRunner(lambda p: [20] * 40)
    runner.spoil = lambda s, x: x * 0 - math.inf if s.num_tokens == 6 else x
    for rule in ("token", "block", "coupled"):
        with serving(runner, speculation=SCHEDULES["all"]) as engine:
            request = ask(sampling=SamplingParams(seed=1), speculation=SpeculationParams(rule=rule))
            events = list(engine.generate(request))
            assert [i for e in events for i in e.token_ids] == [20, 20, 20]
            assert "position 6" in (events[-1].error or "")


def test_a_bias_against_everything_changes_nothing() -> None:
    everything = tuple((i, -100.0) for i in range(300))
    with serving(runner_of(), speculation=SCHEDULES["all"]) as engine:
        plain = answer(engine.generate(wish("a", sampling=SETTINGS["sampled"])))
        banned = dataclasses.replace(SETTINGS["sampled"], logit_bias=everything)
        assert answer(engine.generate(wish("a", sampling=banned))) == plain


def test_the_end_of_a_request_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    runner = DraftingRunner(lambda p: [20] * 100)
    with (
        caplog.at_level(logging.INFO, "deepdraft"),
        serving(runner, speculation=SCHEDULES["all"]) as engine,
    ):
        stats = list(engine.generate(ask(max_new_tokens=26)))[-1].stats
        totals = engine.stats()
    assert stats is not None
    # One token from the prompt, then four full blocks of 6, then a last token.
    assert stats.histogram == (1, 0, 0, 0, 0, 4)
    assert (stats.steps, stats.drafted_steps, stats.drafts, stats.accepted) == (5, 4, 20, 20)
    assert stats.average_accept_length == 5.0 and stats.cut == 0
    assert stats.average_iteration_ms > 0
    assert totals["spec_accepted_5"] == 4 and totals["decode_rows"] == 25
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request_end")]
    assert len(lines) == 1
    for part in (
        '"request_id": "r"',
        '"average_accept_length": 5.0',
        '"average_iteration_ms": ',
        '"accepted_drafts_histogram": [1, 0, 0, 0, 0, 4]',
        '"drafts_cut_by_confidence": 0',
    ):
        assert part in lines[0]


def test_low_confidence_cuts_drafts() -> None:
    runner = DraftingRunner(lambda p: [20] * 100)
    runner.confidence = -4.0
    with serving(runner, speculation=SCHEDULES["threshold"]) as engine:
        stats = list(engine.generate(ask(max_new_tokens=20)))[-1].stats
        assert stats is not None
        assert stats.verified == 0 and stats.cut == stats.drafts > 50
        assert stats.average_accept_length == 1.0


def test_drafting_that_does_not_pay_pauses() -> None:
    """A hopeless drafter, sure of itself: the gate closes after a few steps, longer each time."""
    runner = runner_of(error=40.0, max_tokens=2000)
    with serving(runner, speculation=SCHEDULES["cost"]) as engine:
        request = wish("a", max_new_tokens=600, sampling=SETTINGS["sampled"])
        stats = list(engine.generate(request))[-1].stats
    assert stats is not None
    assert 4 <= stats.drafted_steps < 0.1 * stats.steps


def test_the_observer_sees_every_block() -> None:
    seen: list[tuple[int, int]] = []
    with serving(runner_of(), speculation=SCHEDULES["all"]) as engine:
        engine.speculator.observer = lambda block, proposal, target, verdict: seen.append(
            (len(proposal), verdict.num_accepted)
        )
        request = wish(
            "a",
            sampling=SETTINGS["sampled"],
            speculation=SpeculationParams(rule="block"),
        )
        stats = list(engine.generate(request))[-1].stats
    assert stats is not None
    # The prompt's own token comes first, as a block without drafts.
    assert len(seen) == stats.steps + 1 and seen[0] == (0, 0)
    assert sum(n for n, _ in seen) == stats.verified
    assert np.array_equal(np.bincount([a for _, a in seen[1:]]), np.array(stats.histogram))


def test_by_cost_hopeless_drafts_are_not_even_made() -> None:
    """But for one in every trial: a drafter that underrates itself would never be found out."""
    runner = DraftingRunner(lambda p: [20] * 100)
    runner.confidence = -6.0
    made: list[int] = []
    runner.refine_fault = lambda s, i: made.append(i)
    with serving(runner, speculation=SCHEDULES["cost"]) as engine:
        stats = list(engine.generate(ask(max_new_tokens=60)))[-1].stats
    assert stats is not None and stats.drafts == stats.verified == stats.drafted_steps - 1
    # Confidences are asked for up to the first hopeless draft; that is a trial, so the gate pauses.
    assert 2 <= made.count(0) == stats.drafted_steps <= 12 and made.count(1) == stats.drafts
    assert set(made) == {0, 1}


@pytest.mark.parametrize("temperature", [-1.0, -1e-300, math.inf, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    """A negative one would choose the least likely tokens."""
    with serving(runner_of(), speculation=SCHEDULES["all"]) as engine:
        with pytest.raises(RequestError, match="it must be a number of at least 0") as caught:
            engine.generate(wish("a", sampling=SamplingParams(temperature=temperature)))
        assert caught.value.param == "temperature"
        assert answer(engine.generate(wish("a")))[1] == "length"


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_the_ends_of_temperature_and_seed(temperature: float, seed: int) -> None:
    """Plain decoding's tokens; the smallest temperatures give the greedy ones."""
    params = SamplingParams(temperature=temperature, seed=seed, top_k=10**9)
    with serving(runner_of(), speculation=SCHEDULES["all"]) as engine:
        plain = answer(engine.generate(wish("a", sampling=params, speculation=PLAIN)))
        assert answer(engine.generate(wish("a", sampling=params))) == plain
        greedy = answer(engine.generate(wish("a", sampling=SETTINGS["greedy"])))
        assert (greedy == plain) == (temperature < 1)
        if temperature < 1:
            block = wish("a", sampling=params, speculation=SpeculationParams(rule="block"))
            assert answer(engine.generate(block)) == plain
