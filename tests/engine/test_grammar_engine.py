"""Grammars in the engine: every row of a block is masked, drafts too, and faults stay alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.engine.engine import Engine
from deepdraft.engine.grammar import GrammarError
from deepdraft.engine.sampler import Row, Sampler, scores
from deepdraft.engine.speculate import Speculation
from deepdraft.spec.schedule import FixedSchedule
from deepdraft.types import (
    GenerateRequest,
    Rule,
    SamplingParams,
    SpeculationParams,
    TokenEvent,
    TokenGrammar,
)

from .fake import DraftingRunner, FakeRunner
from .grammars import DEMO, choices, compiled
from .json_cases import read, valid

EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "n": {"type": "integer", "minimum": -20, "maximum": 1000},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
PROMPT = (0, 40, 50)


def runner(kind: type[FakeRunner] = DraftingRunner, **options: Any) -> FakeRunner:
    return kind(vocab_size=DEMO.vocab_size, **{"strength": 0.0, "max_step_rows": 64, **options})


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()
        engine._scheduler.check()


def start(engines: list[Engine], model: FakeRunner, **options: Any) -> Engine:
    engine = Engine(model, **options)
    engines.append(engine)
    engine.start()
    return engine


def ask(
    grammar: TokenGrammar | None,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    rule: Rule = "coupled",
    drafts: int | None = None,
    **options: Any,
) -> GenerateRequest:
    sampling = {k: options.pop(k) for k in ("logit_bias", "top_p", "top_k") if k in options}
    return GenerateRequest(
        **{
            "request_id": f"r{seed}",
            "prompt_ids": PROMPT,
            "sampling": SamplingParams(seed=seed, temperature=temperature, **sampling),
            "speculation": SpeculationParams(rule=rule, num_drafts=drafts),
            "max_new_tokens": 300,
            "stop_token_ids": frozenset({EOS}),
            "grammar": grammar,
            **options,
        }
    )


def run(engine: Engine, request: GenerateRequest) -> tuple[list[int], TokenEvent]:
    events = list(engine.generate(request))
    return [i for e in events for i in e.token_ids], events[-1]


@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_the_grammar(engines: list[Engine], rule: Rule, temperature: float) -> None:
    """Whatever the rule, drafted or not; fractions of the drafts fall, and some stand."""
    engine = start(engines, runner(error=0.3))
    grammar = compiled(SCHEMA)
    for seed in range(8):
        ids, last = run(engine, ask(grammar, seed=seed, temperature=temperature, rule=rule))
        assert last.finish_reason == "stop" and ids[-1] != EOS, last
        assert valid(read(DEMO.decode(ids)), SCHEMA, SCHEMA)
    counters = engine.counters.snapshot()
    accepted = sum(counters.get(f"spec_accepted_{n}", 0) for n in range(1, 6))
    assert accepted > 0 and counters["spec_accepted_0"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_is_plain(engines: list[Engine], temperature: float) -> None:
    grammar = compiled(SCHEMA)
    drafting, plain = start(engines, runner(error=0.3)), start(engines, runner(FakeRunner))
    texts = set()
    for seed in range(6):
        request = ask(grammar, seed=seed, temperature=temperature)
        with_drafts, without = run(drafting, request)[0], run(plain, request)[0]
        assert with_drafts == without
        texts.add(tuple(without))
    assert len(texts) == (1 if temperature == 0.0 else 6)


def test_max_tokens_ends_within_the_form(engines: list[Engine]) -> None:
    engine = start(engines, runner())
    grammar = compiled(SCHEMA)
    whole, _ = run(engine, ask(grammar, seed=3))
    for most in range(1, len(whole) + 1):
        ids, last = run(engine, ask(grammar, seed=3, max_new_tokens=most))
        assert ids == whole[:most]
        # The last token completes the form: that is no cut.
        assert last.finish_reason == ("stop" if most == len(whole) else "length")
        matcher = grammar.matcher()
        assert all(matcher.advance(i) for i in ids)


def test_a_form_that_may_end_ends_with_the_end_token(engines: list[Engine]) -> None:
    """`ab` may go on, so the model's own end token ends it; `abc` may not."""
    engine = start(engines, runner())
    grammar = choices(["ab", "abc"])
    seen = {}
    for seed in range(30):
        ids, last = run(engine, ask(grammar, seed=seed))
        assert last.finish_reason == "stop"
        seen[DEMO.decode([i for i in ids if i != EOS])] = ids[-1] == EOS
    assert seen == {"ab": True, "abc": False}


def test_filters_come_behind_the_mask() -> None:
    """top-k and top-p choose among what is allowed: the best tokens of all are forbidden here."""
    logits = torch.arange(DEMO.vocab_size, dtype=torch.float32)
    mask = compiled({"type": "integer"}).matcher().mask()
    assert mask is not None
    allowed = [i for i in range(DEMO.vocab_size) if mask[i]]
    params = SamplingParams(top_k=1, top_p=0.5)
    row = Row(params=params, position=3, mask=mask)
    kept = scores(logits, row)
    assert torch.isfinite(kept).nonzero().flatten().tolist() == [max(allowed)]
    sampler = Sampler(DEMO.vocab_size)
    greedy = Row(params=SamplingParams(temperature=0.0), position=3, mask=mask)
    tops = sampler.tops(logits.unsqueeze(0))
    assert sampler.choose(logits, greedy, tops[0]).token_id == max(allowed)


def test_a_bias_cannot_break_the_form(engines: list[Engine]) -> None:
    engine = start(engines, runner())
    bias = tuple((i, 100.0) for i in [*DEMO.encode_text("hello world"), EOS])
    ids, last = run(engine, ask(compiled(SCHEMA), logit_bias=bias, max_new_tokens=300))
    if last.finish_reason == "stop":
        assert valid(read(DEMO.decode(ids)), SCHEMA, SCHEMA)
    matcher = compiled(SCHEMA).matcher()
    assert all(matcher.advance(i) for i in ids)


def test_requests_with_and_without_a_grammar_run_together(engines: list[Engine]) -> None:
    engine = start(engines, runner(), max_running=4)
    grammar = compiled(SCHEMA)
    alone = {
        seed: run(engine, ask(grammar if seed % 2 else None, seed=seed))[0] for seed in range(6)
    }
    streams = {
        seed: engine.generate(ask(grammar if seed % 2 else None, seed=seed)) for seed in range(6)
    }
    for seed, events in streams.items():
        assert [i for e in events for i in e.token_ids] == alone[seed]


class Trap:
    """A grammar that fails at the mask behind `after` tokens."""

    def __init__(self, after: int, error: Exception) -> None:
        self.after, self.error = after, error
        self.num_tokens = 0
        self.is_finished = False

    def matcher(self) -> "Trap":
        return Trap(self.after, self.error)

    def mask(self) -> None:
        if self.num_tokens >= self.after:
            raise self.error

    def advance(self, token_id: int) -> bool:
        self.num_tokens += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens


@pytest.mark.parametrize("drafts", [0, None])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_grammar_that_fails_ends_its_request_alone(
    engines: list[Engine], after: int, drafts: int | None
) -> None:
    model = runner()
    engine = start(engines, model, max_running=2)
    other = engine.generate(ask(compiled(SCHEMA), seed=1))
    trap = Trap(after, GrammarError("the grammar is too complex"))
    ids, last = run(engine, ask(trap, seed=2, drafts=drafts))
    assert len(ids) == after
    assert last.finish_reason == "error" and last.at_fault
    assert last.error == f"the grammar is too complex (position {after} of the answer)"
    assert [e.finish_reason for e in other][-1] == "stop"
    ids, last = run(engine, ask(None, seed=3, max_new_tokens=4))
    assert len(ids) == 4 and not last.at_fault
    assert model.open_handles == set()


def test_a_grammar_that_cannot_begin_ends_its_request(engines: list[Engine]) -> None:
    class Broken:
        def matcher(self) -> Any:
            raise GrammarError("no state")

    engine = start(engines, runner())
    _, last = run(engine, ask(Broken()))
    assert last.finish_reason == "error" and "no state" in (last.error or "")
    assert run(engine, ask(None, max_new_tokens=2))[1].finish_reason == "length"


def test_bad_logits_are_the_models_fault(engines: list[Engine]) -> None:
    model = runner()

    def spoil(handle: Any, logits: Tensor) -> Tensor:
        return logits * float("nan") if handle.num_tokens > 12 else logits

    model.spoil = spoil
    engine = start(engines, model)
    _, last = run(engine, ask(compiled(SCHEMA)))
    assert last.finish_reason == "error" and "NaN" in (last.error or "") and not last.at_fault


def test_a_failing_drafter_costs_the_drafts_only(engines: list[Engine]) -> None:
    model = runner()
    expected = run(start(engines, model), ask(compiled(SCHEMA), seed=5))[0]
    failing = runner()

    def fault(ahead: Any, i: int) -> None:
        if i == 2:
            raise RuntimeError("no drafts")

    failing.refine_fault = fault  # type: ignore[attr-defined]
    assert run(start(engines, failing), ask(compiled(SCHEMA), seed=5))[0] == expected


def test_drafts_that_are_cut_leave_the_matcher_in_place(engines: list[Engine]) -> None:
    cut = Speculation(schedule=FixedSchedule(num_drafts=2))
    expected = run(start(engines, runner()), ask(compiled(SCHEMA), seed=6))[0]
    assert (
        run(start(engines, runner(), speculation=cut), ask(compiled(SCHEMA), seed=6))[0] == expected
    )
