"""Grammars: what the masks allow, phases, roll-back."""

import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deepdraft.engine.grammar import (
    GrammarSource,
    Matcher,
    Start,
    compiler_for,
)
from deepdraft.engine.lark import Rules
from deepdraft.errors import RequestError
from deepdraft.text.tokenizer import Tokenizer
from tests.text.cases import published_tokenizer, toy_tokenizer

from .grammars import DEMO, WALKER, accepts, choices, compiled, compiler, json_source, pattern
from .json_cases import read, schemas, valid, values

common = settings(
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# What is allowed


@common
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_answer_validates(schema: dict[str, Any], seed: int) -> None:
    try:
        grammar = compiled(schema)
    except RequestError as error:
        assume("allows nothing" not in error.message and "Unsatisfiable" not in error.message)
        raise
    for i in range(3):
        out = WALKER.walk(grammar.matcher(), seed + i)
        if out is not None:
            text = DEMO.decode(out)
            assert valid(read(text), schema, schema), text


@common
@given(data=st.data(), schema=schemas(), tight=st.booleans())
def test_every_valid_value_may_be_written(
    data: st.DataObject, schema: dict[str, Any], tight: bool
) -> None:
    value = data.draw(values(schema, schema))
    text = json.dumps(value, ensure_ascii=False, indent=None if tight else 2)
    # The validator and the generator of these tests agree, too.
    assert valid(read(text), schema, schema)
    assert accepts(compiled(schema), text)


def test_walks_end() -> None:
    """The walks above prove something: most of them come to an end, and they differ."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = compiled(schema)
    texts = [WALKER.walk(grammar.matcher(), seed) for seed in range(40)]
    assert sum(out is not None for out in texts) >= 30
    assert len({tuple(out) for out in texts if out}) >= 25


@pytest.mark.parametrize("extra", [0, 37])
def test_masks_are_exact(extra: int) -> None:
    """A token is allowed exactly if what was written stays a beginning of a choice."""
    tokenizer = toy_tokenizer()
    texts = ["in", "inv</a>", "inv cé\n\n", "", "日", "in\\n", '"in"', "\x00"]
    grammar = choices(texts, tokenizer, extra)
    eos = grammar.compiler.eos_token_id
    wanted = [text.encode() for text in texts]
    seen = 0

    def explore(matcher: Matcher, done: bytes) -> None:
        nonlocal seen
        seen += 1
        mask = matcher.mask()
        assert mask is not None and mask.shape == (tokenizer.vocab_size + extra,)
        for token_id in range(tokenizer.vocab_size + extra):
            text = tokenizer.token_bytes(token_id)
            control = token_id in tokenizer.control_ids
            after = done + text
            allowed = bool(text) and not control and any(w.startswith(after) for w in wanted)
            if token_id == eos:
                allowed = done in wanted
            assert mask[token_id] == allowed, (done, text)
            twin = matcher.clone()
            assert twin.advance(token_id) == allowed
            if allowed and token_id != eos:
                assert twin.is_finished == (after in wanted and wanted_ends(after))
                explore(twin, after)

    def wanted_ends(text: bytes) -> bool:
        return not any(w != text and w.startswith(text) for w in wanted)

    explore(grammar.matcher(), b"")
    assert seen > 30


@pytest.mark.parametrize("tokenizer", [DEMO, published_tokenizer()], ids=["demo", "published"])
def test_no_control_token_is_ever_a_part_of_text(tokenizer: Tokenizer) -> None:
    matcher = compiled({"type": "object"}, tokenizer).matcher()
    for token_id in tokenizer.encode_text('{"'):
        assert matcher.advance(token_id)
    mask = matcher.mask()
    assert mask is not None and mask.sum() > tokenizer.vocab_size // 2
    assert not mask[sorted(tokenizer.control_ids)].any()


@common
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=6), min_size=1),
    other=st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
)
def test_choices_are_taken_literally(texts: list[str], other: str) -> None:
    grammar = choices(texts)
    assert all(accepts(grammar, text) for text in texts)
    assert accepts(grammar, other) == (other in texts)


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("[a-c]+", ["a", "abc"], ["", "abd", "a\n"]),
        ("^a|b$", ["a", "b"], ["ab", "xb", "ax"]),
        ("a\\$", ["a$"], ["a", "a\\"]),
        ("x\\\\$", ["x\\"], ["x", "x$"]),
        ("\\d{2}", ["12"], ["١٢", "1"]),
        ("\\w", ["a", "_"], ["ä", "-"]),
        ("(é|🎉){2}", ["é🎉"], ["é"]),
        ('a/b\n"c"', ['a/b\n"c"'], ["a/b"]),
        ("(?i)yes", ["YES", "yes"], ["no"]),
        ("^$", [""], ["a"]),
        (".*", ["", "ab"], ["a\nb"]),
    ],
)
def test_patterns(regex: str, good: list[str], bad: list[str]) -> None:
    grammar = pattern(regex)
    assert [t for t in good if not accepts(grammar, t)] == []
    assert [t for t in bad if accepts(grammar, t)] == []


def test_an_answer_ends_exactly_where_nothing_may_follow() -> None:
    matcher = choices(["a", "ab", "abc"]).matcher()
    for letter, finished in (("a", False), ("b", False), ("c", True)):
        assert matcher.advance(DEMO.encode_text(letter)[0])
        assert matcher.is_finished is finished
        mask = matcher.mask()
        assert mask is not None and mask[compiler().eos_token_id]
        assert (int(mask.sum()) == 1) is finished


def test_white_space_is_bounded() -> None:
    """A model that only wants to write white space is made to go on."""
    matcher = compiled({"type": "array", "items": {"type": "integer"}, "minItems": 2}).matcher()
    blank = np.array([DEMO.token_bytes(i).strip() == b"" for i in range(DEMO.vocab_size)])
    blank[sorted(DEMO.control_ids)] = False
    num_blank, out = 0, []
    while not matcher.is_finished and len(out) < 400:
        mask = matcher.mask()
        assert mask is not None
        spaces = np.flatnonzero(mask & blank)
        digits = np.flatnonzero(mask & WALKER.closers)
        rest = digits if len(digits) else np.flatnonzero(mask)
        token_id = int(spaces[-1] if len(spaces) else rest[-1])
        num_blank += len(spaces) > 0
        assert matcher.advance(token_id)
        out.append(token_id)
        if b"]" in DEMO.token_bytes(token_id):
            break
    assert len(out) < 400 and num_blank >= 2
    assert isinstance(json.loads(DEMO.decode(out)), list)


def test_property_names_have_one_spelling() -> None:
    """An escape cannot smuggle in a property under another one's rules."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert accepts(compiled(schema), '{"a": 1, "b": "x"}')
    assert not accepts(compiled(schema), '{"\\u0061": "x"}')
    assert not accepts(compiled(schema), '{"a": "x"}')
    assert not accepts(compiled({"type": "string"}), '"\\ud800"')


# Phases


def test_reasoning_is_free_but_for_its_end() -> None:
    grammar = compiled({"type": "integer"}, start="after_reasoning")
    matcher = grammar.matcher()
    eos, think_end = compiler().eos_token_id, DEMO.id_of("</think>")
    marker = DEMO.id_of("｜DSML｜")
    assert think_end is not None and marker is not None
    for token_id in [*DEMO.encode_text('{"a": "</think>"} <'), DEMO.id_of("<think>")]:
        mask = matcher.mask()
        assert mask is not None and token_id is not None
        assert sorted(np.flatnonzero(~mask)) == sorted([eos, marker])
        assert matcher.advance(token_id)
        assert not matcher.is_finished
    for banned in (eos, marker):
        assert not matcher.advance(banned)
    assert matcher.advance(think_end)
    mask = matcher.mask()
    assert mask is not None and not mask[[eos, think_end, marker]].any()
    assert {DEMO.token_bytes(int(i))[:1] for i in np.flatnonzero(mask)} <= set(
        bytes([b]) for b in b"-0123456789"
    )
    matcher.rollback(1)
    mask = matcher.mask()
    assert mask is not None and mask[think_end]


def test_every_end_token_ends_a_form_and_no_reasoning() -> None:
    eos = compiler().eos_token_id
    more = DEMO.encode_text("7")[0]  # an end, whatever else it could spell
    several = compiler_for(DEMO, DEMO.vocab_size, eos, frozenset({more}))
    free = several.compile(json_source({"type": "integer"}, "after_reasoning")).matcher()
    assert not free.advance(more) and not free.advance(eos)
    for end in (more, eos):
        matcher = several.compile(json_source({"type": "integer"})).matcher()
        mask = matcher.mask()
        assert mask is not None and not mask[[more, eos]].any() and not matcher.advance(end)
        assert matcher.advance(DEMO.encode_text("5")[0])
        mask = matcher.mask()
        assert mask is not None and mask[[more, eos]].all()
        assert matcher.advance(end) and matcher.is_finished
        mask = matcher.mask()
        assert mask is not None and sorted(np.flatnonzero(mask)) == sorted([more, eos])
        matcher.rollback(1)
        assert not matcher.is_finished and matcher.advance(end)


def test_calls_begin_at_the_marker_behind_a_bracket() -> None:
    marker, eos = DEMO.id_of("｜DSML｜"), compiler().eos_token_id
    assert marker is not None
    rules = Rules()
    source = GrammarSource(lark=rules.text('" calls>"'), start="at_call")
    matcher = compiler().compile(source).matcher()
    bracket = DEMO.encode_text("<")[-1]
    for token_id in (marker, *DEMO.encode_text("a < b"), marker, marker):
        assert matcher.mask() is None
        assert matcher.advance(token_id)
    assert matcher.advance(bracket) and matcher.advance(marker)
    mask = matcher.mask()
    assert mask is not None and not mask[eos]
    for token_id in DEMO.encode_text(" calls>"):
        assert matcher.advance(token_id)
    assert matcher.is_finished
    free_end = compiler().compile(source).matcher()
    assert free_end.advance(eos) and not free_end.is_finished


def test_a_prefix_counts_as_written() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    grammar = compiled({**schema, "additionalProperties": False}, prefix='{"a": ')
    matcher = grammar.matcher()
    mask = matcher.mask()
    assert mask is not None and mask[DEMO.encode_text("1")[0]]
    assert accepts(grammar, "2}")
    assert not accepts(grammar, '{"a": 2}')
    with pytest.raises(RequestError, match="no beginning"):
        compiled(schema, prefix="Sure: {")


# State


@common
@given(schema=schemas(), seed=st.integers(0, 2**32), data=st.data())
def test_roll_back_and_clones_leave_no_trace(
    schema: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    start: Start = data.draw(st.sampled_from(("at_once", "after_reasoning")))
    try:
        grammar = compiled(schema, start=start)
    except RequestError:
        assume(False)
        raise
    rng = np.random.default_rng(seed)
    eos = compiler().eos_token_id
    matcher, taken = grammar.matcher(), list[int]()

    def masks_like_new() -> None:
        fresh = grammar.matcher()
        for token_id in taken:
            assert fresh.advance(token_id)
        a, b = matcher.mask(), fresh.mask()
        assert np.array_equal(a, b) and matcher.is_finished == fresh.is_finished  # type: ignore[arg-type]

    for step in range(40):
        action = data.draw(st.sampled_from(("on", "on", "on", "back", "clone")))
        if action == "on" and (not taken or taken[-1] != eos):
            mask = matcher.mask()
            assert mask is not None
            ids = np.flatnonzero(mask)
            token_id = int(rng.choice(ids))
            if start == "after_reasoning" and step == 5 and matcher.num_tokens < 6:
                think_end = DEMO.id_of("</think>")
                assert think_end is not None
                token_id = think_end if mask[think_end] else token_id
            forbidden = np.flatnonzero(~mask)
            if len(forbidden):
                assert not matcher.advance(int(rng.choice(forbidden)))
            assert matcher.advance(token_id)
            taken.append(token_id)
            if token_id == eos:
                assert matcher.is_finished and not matcher.advance(token_id)
        elif action in ("back", "on"):
            back = data.draw(st.integers(0, min(6, len(taken))))
            matcher.rollback(back)
            del taken[len(taken) - back :]
        else:
            twin = matcher.clone()
            assert twin.num_tokens == len(taken)
            matcher.rollback(min(3, len(taken)))
            matcher = twin
        assert matcher.num_tokens == len(taken)
        masks_like_new()


def test_many_answers_share_a_grammar() -> None:
    """Matchers of one grammar, made and used on several threads, do not disturb each other."""
    grammar = compiled({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 5})
    expected = [WALKER.walk(grammar.matcher(), seed) for seed in range(16)]
    got: dict[int, list[int] | None] = {}

    def work(part: int) -> None:
        for seed in range(part, 16, 4):
            got[seed] = WALKER.walk(grammar.matcher(), seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[seed] for seed in range(16)] == expected
