"""Drafted text against plain text on the bundled model, and what its runner keeps of a step."""

import dataclasses

import pytest
import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.engine import Engine
from deepdraft.engine.measure import measure_costs
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.errors import ConfigError, StateError
from deepdraft.server.service import bundled_checkpoint
from deepdraft.spec.schedule import FixedSchedule, ThresholdSchedule
from deepdraft.text.conversation import Conversation, Message
from deepdraft.text.prompt import render_chat
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams, TokenGrammar

from .grammars import compiled
from .json_cases import read, valid

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["large", "small"]},
    },
    "required": ["city", "count", "kind"],
    "additionalProperties": False,
}
QUESTIONS = (
    "implement the tetris game. output HTML code directly - no explanation.",
    "What is the capital of France?",
    "Tell me a short story about a fox.",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(bundled_checkpoint())


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    chats = [
        render_chat(
            Conversation(messages=(Message(role="user", content=text),), thinking=False),
            tokenizer,
            "v4.1",
        ).token_ids
        for text in QUESTIONS
    ]
    prose = "In the beginning of the session the members of the committee"
    return [*map(tuple, chats), (0, *tokenizer.encode_text(prose))]


def load(tokenizer: Tokenizer, **options: object) -> Runner:
    checkpoint = Checkpoint.open(bundled_checkpoint())
    return Runner.from_checkpoint(
        checkpoint,
        tokenizer,
        **{"max_context": 512, "num_sequences": 4, "drafter": True, **options},  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def runner(tokenizer: Tokenizer) -> Runner:
    return load(tokenizer)


def texts(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
    *,
    together: bool,
    num: int = 40,
    grammar: TokenGrammar | None = None,
    **speculation: object,
) -> list[list[int]]:
    streams = []
    for i, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=str(i),
            prompt_ids=prompt,
            sampling=params,
            max_new_tokens=num,
            stop_token_ids=frozenset({1}),
            grammar=grammar,
            speculation=SpeculationParams(**speculation),  # type: ignore[arg-type]
        )
        stream = engine.generate(request)
        streams.append(stream if together else iter(list(stream)))
    answers = []
    for stream in streams:
        events = list(stream)
        assert events[-1].finish_reason in ("stop", "length"), events[-1].error
        answers.append([t for e in events for t in e.token_ids])
    return answers


@pytest.mark.parametrize("numerics", ["exact", "quant"])
def test_drafted_is_plain_token_for_token(
    runner: Runner,
    tokenizer: Tokenizer,
    prompts: list[tuple[int, ...]],
    numerics: str,
) -> None:
    """At temperature 0 and, coupled, at 1; alone, and drafted together in one step."""
    model = runner if numerics == "exact" else load(tokenizer, numerics=numerics)
    engine = Engine(
        model, max_running=4, speculation=Speculation(schedule=FixedSchedule(num_drafts=5))
    )
    engine.start()
    try:
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(seed=11, top_p=0.95, frequency_penalty=0.2),
        ):
            plain = texts(engine, prompts, params, together=True, num_drafts=0)
            assert engine.stats().get("spec_verified", 0) == 0 or params.temperature
            assert texts(engine, prompts, params, together=True) == plain
            assert texts(engine, prompts[:2], params, together=False) == plain[:2]
        stats = engine.stats()
    finally:
        engine.close()
    steps = sum(n for name, n in stats.items() if name.startswith("spec_accepted_"))
    assert steps == stats["spec_steps"]
    assert stats["spec_accepted_5"] > 10, "the drafter does not draft"
    assert stats["spec_accepted_0"] > 10, "no draft ever falls"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_is_plain_under_a_grammar(
    runner: Runner, tokenizer: Tokenizer, prompts: list[tuple[int, ...]], temperature: float
) -> None:
    """Answers have the form, and drafts stand in it."""
    grammar = compiled(SCHEMA, tokenizer)
    params, most = SamplingParams(seed=5, temperature=temperature), 100
    schedule = FixedSchedule(num_drafts=5)
    engine = Engine(runner, max_running=4, speculation=Speculation(schedule=schedule))
    engine.start()
    try:
        form = {"together": True, "num": most, "grammar": grammar}
        plain = texts(engine, prompts, params, **form, num_drafts=0)  # type: ignore[arg-type]
        drafted = texts(engine, prompts, params, **form)  # type: ignore[arg-type]
        stats = engine.stats()
    finally:
        engine.close()
    assert drafted == plain
    finished = [ids for ids in plain if len(ids) < most]
    assert len(finished) >= 2
    for ids in finished:
        assert valid(read(tokenizer.decode(ids)), SCHEMA, SCHEMA)
    assert sum(stats.get(f"spec_accepted_{n}", 0) for n in range(1, 6)) > 5
    assert stats["spec_drafts"] > 20


def test_schedules_do_not_change_coupled_text(
    runner: Runner, prompts: list[tuple[int, ...]]
) -> None:
    params = SamplingParams(seed=2, temperature=0.9)
    answers = []
    for speculation in (
        Speculation(costs=measure_costs(runner, rows=(1, 2, 6), repeats=1)),
        Speculation(schedule=ThresholdSchedule()),
    ):
        engine = Engine(runner, max_running=4, speculation=speculation)
        engine.start()
        try:
            answers.append(texts(engine, prompts, params, together=True))
            answers.append(texts(engine, prompts, params, together=True, num_drafts=1))
        finally:
            engine.close()
    assert answers[1:] == answers[:1] * 3


def test_a_late_feed_leaves_the_same_rings_as_an_early_one(
    runner: Runner, prompts: list[tuple[int, ...]]
) -> None:
    """Steps with drafts taken back, told to the drafter step by step or all at the end."""
    model = runner.model
    late, early = runner.open_sequence(), runner.open_sequence()
    token = 7
    for sequence in (late, early):
        runner.prefill(sequence, prompts[1], final=True)
    length = len(prompts[1])
    for kept, rows in ((1, 1), (3, 6), (1, 2), (6, 6), (2, 4)) * 8:
        ids = [(token + i) % 4096 for i in range(rows)]
        for sequence in (late, early):
            runner.step([(sequence, ids)])
            runner.commit(sequence, length + kept)
        runner.draft([(early, 9)])
        length += kept
    assert late.drafter_tokens < early.drafter_tokens == length
    drafts = [runner.draft([(s, 9)])[0] for s in (late, early)]
    both = runner.draft([(late, 9), (early, 9)])
    for i in range(5):
        expected, raw = drafts[0].refine(i, 30 + i)
        for draft in (drafts[1], *both):
            logits_V, confidence = draft.refine(i, 30 + i)
            assert torch.equal(logits_V, expected) and confidence == raw
        # The same drafts beside others, behind other tokens.
        logits_QV, confidences = runner.refine([both[0], *drafts, both[1]], i, [5, 30 + i, 7, 9])
        assert torch.equal(logits_QV[1], expected) and confidences[1] == raw
    assert late.drafter_tokens == length
    assert model.drafter is not None
    for sequence in (late, early):
        runner.close_sequence(sequence)
    assert not runner._taps


def test_a_cold_drafter_warms_up(runner: Runner, prompts: list[tuple[int, ...]]) -> None:
    sequence = runner.open_sequence()
    runner.model.prefill(sequence, prompts[0], feed_drafter=False)
    with pytest.raises(StateError, match="the drafter was fed 0 of"):
        runner.draft([(sequence, 9)])
    runner.step([(sequence, [9])])
    assert len(runner.draft([(sequence, 9)])[0]) == 5
    assert sequence.drafter_floor == len(prompts[0])
    runner.close_sequence(sequence)


def test_a_broken_sequence_leaves_nothing_behind(
    runner: Runner, prompts: list[tuple[int, ...]]
) -> None:
    """NaN in every row of a sequence: an error for it; the next one in its place is unaffected."""
    pool = runner.pool
    engine = Engine(runner, max_running=1, speculation=Speculation())
    engine.start()
    greedy = SamplingParams(temperature=0.0)
    request = GenerateRequest(
        request_id="x", prompt_ids=prompts[3], sampling=greedy, max_new_tokens=30
    )
    try:
        plain = [t for e in engine.generate(request) for t in e.token_ids]
        stream = engine.generate(dataclasses.replace(request, max_new_tokens=400))
        next(stream)
        for rows in (pool.window, *pool.main.values(), *pool.index.values()):
            rows[..., :-1, :] = float("nan")
        for rows in pool.pending.values():
            rows.fill_(float("nan"))
        last = list(stream)[-1]
        assert last.finish_reason == "error" and "NaN" in (last.error or "")
        pool_is_clean = [t for e in engine.generate(request) for t in e.token_ids]
    finally:
        engine.close()
        for rows in (pool.window, *pool.main.values(), *pool.index.values()):
            rows.zero_()
        for rows in pool.pending.values():
            rows.zero_()
    assert pool_is_clean == plain


def test_the_number_of_drafts_is_checked(tokenizer: Tokenizer, runner: Runner) -> None:
    assert runner.block_size == 5
    model = runner.model
    assert Runner(model, max_context=64, num_drafts=7).block_size == 7
    assert Runner(model, max_context=64, num_drafts=0).block_size == 0
    with pytest.raises(ConfigError, match=r"drafts must lie in 0..15, got 16"):
        Runner(model, max_context=64, num_drafts=16)
    with pytest.raises(ConfigError, match="loaded without a drafter"):
        load(tokenizer, drafter=False, num_drafts=3)
    with pytest.raises(StateError, match="no drafter here"):
        Runner(model, max_context=64, num_drafts=0).draft([])


@pytest.mark.parametrize("max_context", [2, 17])
def test_costs_are_measured_in_a_short_context(
    runner: Runner, prompts: list[tuple[int, ...]], max_context: int
) -> None:
    """A context without room for the largest step measured; answers go up to its last place."""
    short = Runner(runner.model, max_context=max_context, num_sequences=2)
    costs = measure_costs(short, repeats=0)
    assert max(costs.verify.rows) <= max(2 * max_context, 16) and short.num_free == 2
    engine = Engine(short, max_running=2, speculation=Speculation(costs=costs))
    engine.start()
    try:
        params, num = SamplingParams(seed=3), max_context - 1
        starts = [prompt[:1] for prompt in prompts[:2]]
        plain = texts(engine, starts, params, together=True, num=num, num_drafts=0)
        assert texts(engine, starts, params, together=True, num=num) == plain
        assert max(map(len, plain)) == num
    finally:
        engine.close()
