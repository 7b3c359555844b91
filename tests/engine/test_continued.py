"""An answer that goes on from tokens which stand already, on the bundled model: it is the answer
that was begun, token for token, whatever the tokens depend on."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deepdraft.config import EngineConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.grammar import GrammarSource, compiler_for
from deepdraft.engine.load import LoadedModel, load_engine
from deepdraft.engine.reuse import open_reuse
from deepdraft.errors import RequestError
from deepdraft.server.service import bundled_checkpoint
from deepdraft.text.conversation import Conversation, Message
from deepdraft.text.prompt import render_chat
from deepdraft.types import CacheUse, GenerateRequest, SamplingParams, TokenGrammar, TokenLogprob

from .fake import FakeRunner

OPTIONS = EngineConfig(max_context=1024, kv_memory=64 << 20)
JSON = 'start: "{" NAME ":" /[0-9]{1,9}/ "," NAME ":" /[a-z ]{1,30}/ "}"\nNAME: /"[a-z]{1,9}"/'


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_engine(bundled_checkpoint(), OPTIONS)


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Iterator[Engine]:
    made = Engine(model.runner, speculation=model.speculation, reuse=open_reuse(model, OPTIONS))
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt(model: LoadedModel) -> tuple[int, ...]:
    text = Conversation(
        messages=(Message(role="user", content="Tell me about rivers and stones. " * 20),),
        thinking=False,
    )
    return tuple(render_chat(text, model.tokenizer, "v4.1").token_ids)


def run(
    engine: Engine, request: GenerateRequest
) -> tuple[list[int], list[TokenLogprob], str, CacheUse | None]:
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for event in engine.generate(request):
        tokens += event.token_ids
        logprobs += event.logprobs
        if event.finish_reason is not None:
            assert event.error is None
            return tokens, logprobs, event.finish_reason, event.cached
    raise AssertionError("no end")


def grammar(model: LoadedModel) -> TokenGrammar:
    compiler = compiler_for(model.tokenizer, model.runner.vocab_size, model.eos_token_id)
    return compiler.compile(GrammarSource(lark=JSON))


CASES = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "seeded": SamplingParams(temperature=1.0, seed=7, top_p=0.95),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.2
    ),
    "grammar": SamplingParams(temperature=1.0, seed=5, logprobs=0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_what_it_would_have_been(
    engine: Engine, model: LoadedModel, prompt: tuple[int, ...], case: str
) -> None:
    request = GenerateRequest(
        request_id="whole",
        prompt_ids=prompt,
        sampling=CASES[case],
        max_new_tokens=40,
        stop_token_ids=frozenset({model.eos_token_id}),
        grammar=grammar(model) if case == "grammar" else None,
        reuse=False,
    )
    tokens, logprobs, reason, _ = run(engine, request)
    assert len(tokens) > 9
    for cut in (1, 2, len(tokens) // 2, len(tokens) - 1):
        rest = replace(request, request_id=f"from {cut}", generated_ids=tuple(tokens[:cut]))
        more, its_logprobs, its_reason, _ = run(engine, rest)
        assert (more, its_reason) == (tokens[cut:], reason), cut
        assert its_logprobs == (logprobs[cut:] if logprobs else [])


def test_a_stored_middle_of_the_answer_is_not_computed_again(
    engine: Engine, prompt: tuple[int, ...]
) -> None:
    """An engine that leaves stores what it has; another that goes on starts from there."""
    request = GenerateRequest(
        request_id="whole",
        prompt_ids=prompt,
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=60,
    )
    tokens, *_ = run(engine, replace(request, reuse=False))
    run(engine, replace(request, request_id="first part", max_new_tokens=40))
    assert engine.reuse is not None
    engine.reuse.cache.flush()
    read = engine.counters.get("prompt_tokens")
    rest = replace(request, request_id="second part", generated_ids=tuple(tokens[:40]))
    more, _, _, cached = run(engine, rest)
    assert more == tokens[40:]
    # More than the prompt is there, but usage counts tokens of the prompt.
    assert cached is not None and cached.num_tokens == len(prompt)
    assert engine.counters.get("prompt_tokens") == read


def test_what_cannot_go_on_is_refused() -> None:
    engine = Engine(FakeRunner())
    engine.start()
    try:
        for ids, stops in (((5, 6), frozenset({6})), ((5,) * 8, frozenset()), ((10**6,), ())):
            with pytest.raises(RequestError):
                engine.generate(
                    GenerateRequest(
                        request_id="r",
                        prompt_ids=(1, 2),
                        max_new_tokens=8,
                        generated_ids=ids,
                        stop_token_ids=frozenset(stops),
                    )
                )
    finally:
        engine.close()


def test_an_answer_that_breaks_its_grammar_ends_with_an_error(
    engine: Engine, model: LoadedModel, prompt: tuple[int, ...]
) -> None:
    request = GenerateRequest(
        request_id="r",
        prompt_ids=prompt,
        grammar=grammar(model),
        generated_ids=(model.tokenizer.encode_text("no")[0],),
    )
    *_, last = engine.generate(request)
    assert last.finish_reason == "error" and "grammar" in (last.error or "")
