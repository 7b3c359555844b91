"""Grammars: what is refused, limits, cache."""

import itertools
import time
from typing import Any

import numpy as np
import pytest

from deepdraft.engine import grammar as module
from deepdraft.engine.grammar import (
    GrammarCompiler,
    GrammarError,
)
from deepdraft.engine.json_schema import clean
from deepdraft.errors import RequestError
from deepdraft.text.tokenizer import Tokenizer
from tests.text.cases import toy_spec, toy_tokenizer

from .grammars import (
    DEMO,
    EOS_TEXT,
    accepts,
    choices,
    compiled,
    compiler,
    json_source,
    pattern,
)

# Refusals


REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "not served: if, then"),
    "nested": ({"properties": {"a": {"items": {"not": {}}}}}, "not"),
    "format": ({"type": "string", "format": "uri-reference"}, "uri-reference"),
    "number format": ({"type": "integer", "format": "date"}, "'date' of a number"),
    "overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "remote": ({"$ref": "https://x.invalid/y"}, "only paths within the schema"),
    "anchor": ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "only paths within the schema"),
    "dangling": ({"$ref": "#/$defs/a"}, "does not exist"),
    "inner id": ({"properties": {"a": {"$id": "b"}}}, "$id below the root"),
    "options": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "look-around": ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    "no schema": ([1], "object or a boolean"),
    "no schema within": ({"items": {"items": 3}}, "object or a boolean"),
    "wrong type": ({"type": "float"}, "float"),
    "false": (False, "Unsatisfiable"),
    "empty enum": ({"enum": []}, "Unsatisfiable"),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
    "loop": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "allows nothing"),
    "repeated names": ({"type": "object", "minProperties": 2}, "minProperties is 2"),
    "surrogate": ({"const": "\ud800"}, "lone surrogate"),
    "not JSON": ({"const": float("nan")}, "not JSON"),
    "multiple": ({"type": "integer", "multipleOf": 9999991}, "9999991; at most 10000"),
    "multiples": (
        {"anyOf": [{"type": "integer", "multipleOf": k} for k in (1999, 1997, 1993)]},
        "least common multiple",
    ),
    "tiny multiple": ({"type": "number", "multipleOf": 1.2345678e-5}, "least common multiple"),
    "huge multiple": ({"type": "integer", "multipleOf": 1e300}, "multipleOf"),
    "bound": ({"type": "integer", "minimum": 2**53 + 1}, "cannot be enforced exactly"),
    "huge bound": ({"type": "integer", "maximum": 10**400}, "cannot be enforced exactly"),
    "no multiple": ({"type": "integer", "multipleOf": 0}, "above 0"),
    "properties": (
        {"type": "object", "properties": {f"p{i}": True for i in range(1001)}},
        "1001 properties",
    ),
    "size": ({"enum": ["x" * 300 for _ in range(1000)]}, "bytes; at most"),
    "product": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"k{o}{i}": {"const": i}}} for i in range(10)]}
                for o in range(8)
            ]
        },
        "too large",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused(case: str) -> None:
    schema, message = REFUSED[case]
    begin = time.monotonic()
    with pytest.raises(RequestError) as caught:
        compiled(schema)
    assert message in caught.value.message
    assert len(caught.value.message) < 700 and "\n" not in caught.value.message
    assert time.monotonic() - begin < 20  # not the minutes that the library would take for some


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_deep_schema_is_refused(depth: int) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nested more than"):
        compiled(schema)


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("", "1 to 8192"),
        ("a" * 8193, "8193"),
        ("(", "unclosed group"),
        ("(?<!a)b", "look-around"),
        ("(a)\\1", "backreferences"),
        ("a\\", "backslash"),
        ("a\ud800", "surrogate"),
        ("a{3,2}", "repetition"),
        ("[^\\s\\S]", "allows nothing"),
        ("\\bfoo", "lookaround"),
    ],
)
def test_a_pattern_that_cannot_be_enforced_is_refused(regex: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pattern(regex)


def test_choices_have_limits() -> None:
    for texts, message in (
        ([], "not 0"),
        (["a"] * 4097, "not 4097"),
        (["x" * 70_000], "bytes together"),
        (["\ud800"], "surrogate"),
    ):
        with pytest.raises(RequestError, match=message):
            choices(texts)
    assert accepts(choices([str(i) for i in range(4096)]), "4095")


def test_a_blow_up_in_the_middle_is_an_error_of_the_answer() -> None:
    """A pattern that is small, begins well, and needs too many states later."""
    grammar = compiled(
        {"type": "string", "pattern": "^(a.{0,1000}b.{0,1000}c){0,1000}$", "maxLength": 100_000}
    )
    matcher = grammar.matcher()
    with pytest.raises(GrammarError, match="too complex"):
        for token_id in itertools.cycle(DEMO.encode_text('"' + "abcba" * 40)):
            matcher.mask()
            assert matcher.advance(token_id)
    # It spoils neither this answer, once those tokens are taken back, nor others.
    matcher.rollback(matcher.num_tokens)
    for after in (matcher, grammar.matcher()):
        mask = after.mask()
        assert mask is not None and mask[DEMO.encode_text('"')[0]]


def test_the_limits_are_those_of_one_answer() -> None:
    """What many answers have used up together costs none of them its masks."""
    grammar = pattern(".*a.{200}b")
    rng = np.random.default_rng(0)
    for _ in range(40):
        matcher = grammar.matcher()
        for _ in range(40):
            mask = matcher.mask()
            assert mask is not None
            mask[compiler().eos_token_id] = False
            assert matcher.advance(int(rng.choice(np.flatnonzero(mask))))


def test_huge_repetitions_cost_nothing() -> None:
    begin = time.monotonic()
    matcher = pattern("((a{100}){100}){100}").matcher()
    for _ in range(50):
        mask = matcher.mask()
        assert mask is not None
        assert matcher.advance(int(np.flatnonzero(mask)[0]))
    assert time.monotonic() - begin < 5


# Schemas before they become grammars


def test_keywords_that_ask_for_nothing_go() -> None:
    schema = {
        "$id": "https://x.invalid/a",
        "type": "object",
        "propertyNames": {"type": "string"},
        "properties": {
            "uniqueItems": {"type": "array", "uniqueItems": False},
            "enum": {"type": "integer", "format": "int64"},
            "n": {"type": "number", "format": "double"},
        },
        "default": {"uniqueItems": False},
        "additionalProperties": False,
        "required": ["enum"],
    }
    cleaned = clean(schema)
    assert isinstance(cleaned, dict)
    assert cleaned["properties"]["uniqueItems"] == {"type": "array"}
    assert cleaned["properties"]["n"] == {"type": "number"}
    assert cleaned["default"] == {"uniqueItems": False}
    assert "propertyNames" not in cleaned and "$id" not in cleaned
    grammar = compiled(schema)
    assert accepts(grammar, '{"enum": 9223372036854774784}')
    assert not accepts(grammar, '{"enum": 9223372036854775808}')


def test_integer_formats_keep_narrower_bounds() -> None:
    schema = {"type": ["integer", "null"], "format": "uint8", "minimum": 7}
    assert clean(schema) == {"type": ["integer", "null"], "minimum": 7, "maximum": 255}


# Cache and set-up


def test_grammars_are_cached_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 3)
    tokenizer = toy_tokenizer()
    own = GrammarCompiler(tokenizer, tokenizer.vocab_size, 11)
    sources = [json_source({"const": i}) for i in range(4)]
    first = [own.compile(s) for s in sources[:3]]
    assert own.compile(sources[0]) is first[0]
    own.compile(sources[3])  # the one used longest ago, 1, goes
    assert own.compile(sources[0]) is first[0]
    assert own.compile(sources[2]) is first[2]
    assert own.compile(sources[1]) is not first[1]
    with pytest.raises(RequestError):
        own.compile(json_source({"enum": []}))
    assert len(own._cache) == 3


def test_one_compiler_per_tokenizer() -> None:
    assert compiler() is compiler()
    assert compiler() is not compiler(extra=5)
    assert compiler(toy_tokenizer()) is not compiler()


def test_a_tokenizer_without_the_tokens_has_no_phases() -> None:
    spec = toy_spec()
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] == EOS_TEXT]
    for name in ("</think>", "｜DSML｜"):
        del spec["model"]["vocab"][name]
    bare = Tokenizer(spec, "bare")
    for start in ("after_reasoning", "at_call"):
        with pytest.raises(RequestError, match="lacks the tokens"):
            compiled({"type": "integer"}, bare, start=start)
    compiled({"type": "integer"}, bare)
