"""Tool calls as grammars: what may be written is read back as arguments that the schema allows."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deepdraft.engine.grammar import Grammar, GrammarSource
from deepdraft.engine.lark import CallSyntax, CallTool, Rules, calls_rule
from deepdraft.errors import RequestError
from deepdraft.text.conversation import Conversation, Family, Message, ParseStart, ToolCall
from deepdraft.text.parse import OutputParser
from deepdraft.text.prompt import render_chat
from deepdraft.text.tokenizer import Tokenizer
from tests.text.cases import published_tokenizer, toy_tokenizer

from .grammars import DEMO, WALKER, Walker, compiler
from .json_cases import NAMES, TEXTS, leaves, objects, read, schemas, valid, values

common = settings(
    deadline=None,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FAMILIES: tuple[Family, ...] = ("v4.1", "v4")


def calls(
    tools: list[CallTool],
    family: Family = "v4.1",
    *,
    many: bool = True,
    tokenizer: Tokenizer = DEMO,
) -> Grammar:
    """Calls from behind the opening tag of the block on."""
    marker = tokenizer.id_of("｜DSML｜")
    assert marker is not None
    rules = Rules()
    syntax = CallSyntax(marker_id=marker, family=family)
    lark = rules.text(calls_rule(rules, syntax, tools, many=many))
    return compiler(tokenizer).compile(GrammarSource(lark=lark))


def parsed(ids: list[int], tokenizer: Tokenizer = DEMO) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in an answer that began inside the block."""
    parser = OutputParser(ParseStart(tool_calls=True, in_tool_calls=True), tokenizer)
    deltas = parser.push(ids) + parser.finish("stop")
    assert all(call.complete for call in parser.tool_calls)
    assert {type(d).__name__ for d in deltas} == {"ToolCallDelta"}
    return [(call.name, read(call.arguments)) for call in parser.tool_calls]


def parameters() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of arguments; a parameter's own schema may refer to the root's definitions."""
    plain = [name for name in NAMES if '"' not in name and "\t" not in name]
    shape = objects(st.one_of(schemas(), leaves(), st.just({"$ref": "#/$defs/leaf"}))).filter(
        lambda s: all(name in plain for name in s["properties"])
    )
    return st.builds(lambda s, leaf: {**_without_defs(s), "$defs": {"leaf": leaf}}, shape, leaves())


def _without_defs(schema: dict[str, Any]) -> dict[str, Any]:
    # One `$defs`, at the root, is what the validator of these tests knows.
    inner = {
        n: {k: v for k, v in s.items() if k != "$defs"} for n, s in schema["properties"].items()
    }
    return {**schema, "properties": inner}


@common
@given(
    schema=parameters(),
    other=parameters(),
    seed=st.integers(0, 2**32),
    family=st.sampled_from(FAMILIES),
)
def test_every_call_validates(
    schema: dict[str, Any], other: dict[str, Any], seed: int, family: Family
) -> None:
    tools = [
        CallTool(name="f", parameters=schema),
        CallTool(name="fo", parameters=other),
        CallTool(name="none", parameters=None),
    ]
    try:
        grammar = calls(tools, family)
    except RequestError as error:
        assume("allows nothing" not in error.message and "Unsatisfiable" not in error.message)
        raise
    for i in range(3):
        out = WALKER.walk(grammar.matcher(), seed + i, most=500, calls=bool(i % 2))
        if out is None:
            continue
        for name, arguments in parsed(out):
            expected = {"f": schema, "fo": other, "none": {"additionalProperties": False}}[name]
            assert valid(arguments, expected, expected), DEMO.decode(out)


def as_written(name: str, arguments: Any, family: Family, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a call in a prompt's history, from behind the block's opening tag on."""
    call = ToolCall("1", name, json.dumps(arguments, ensure_ascii=False))
    chat = Conversation(
        messages=(
            Message(role="user", content="q"),
            Message(role="assistant", content="", tool_calls=(call,)),
        ),
        thinking=False,
    )
    ids = list(render_chat(chat, tokenizer, family).token_ids)
    marker = tokenizer.id_of("｜DSML｜")
    block = " calls>\n" if family == "v4.1" else "tool_calls>\n"
    begin = ids.index(marker) + 1 + len(tokenizer.encode_text(block))
    return ids[begin : ids.index(tokenizer.id_of("<｜end▁of▁sentence｜>"), begin)]


@common
@given(data=st.data(), schema=parameters(), family=st.sampled_from(FAMILIES))
def test_a_call_as_the_model_was_shown_it_may_be_written(
    data: st.DataObject, schema: dict[str, Any], family: Family
) -> None:
    """DeepSeek's own rendering of a call is allowed, token by token, unless a string of it is
    written in the other, equally valid way."""
    arguments = data.draw(values(schema, schema))
    if "additionalProperties" not in schema:
        arguments.pop("other", None)  # only what the tool lists is offered then
    grammar = calls([CallTool(name="f", parameters=schema)], family)
    more = schema.get("additionalProperties", {})
    assume(
        all(
            not isinstance(v, str) or _plain(schema["properties"].get(k, more), schema)
            for k, v in arguments.items()
        )
    )
    matcher = grammar.matcher()
    ids = as_written("f", arguments, family, DEMO)
    for i, token_id in enumerate(ids):
        mask = matcher.mask()
        assert mask is not None
        assert mask[token_id], (DEMO.decode(ids[:i]), DEMO.decode([token_id]))
        assert matcher.advance(token_id)
    assert matcher.is_finished
    # Fractions in the history are rounded by JSON readers; the tests use those that are exact.
    assert parsed(ids) == [("f", read(json.dumps(arguments)))]


def _plain(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Strings of this schema stand in a call as they are."""
    if "$ref" in schema:
        schema = root["$defs"]["leaf"]
    if "anyOf" in schema:
        return all(_plain(option, root) for option in schema["anyOf"])
    return "pattern" not in schema and "format" not in schema


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "tokenizer", [DEMO, toy_tokenizer(), published_tokenizer()], ids=["demo", "toy", "published"]
)
def test_tokenizers_and_families(family: Family, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "when": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [CallTool(name="weather", parameters=schema), CallTool(name="stop", parameters=None)]
    grammar = calls(tools, family, tokenizer=tokenizer)
    for arguments in (
        {"city": 'Köln </b> "x"', "days": 3},
        {"city": "", "days": 3, "when": None, "tags": []},
        {"city": "<", "days": 1, "when": "now\n", "tags": ["a", "b"]},
    ):
        ids = as_written("weather", arguments, family, tokenizer)
        matcher = grammar.matcher()
        assert all(matcher.advance(i) for i in ids) and matcher.is_finished
        assert parsed(ids, tokenizer) == [("weather", arguments)]
    ids = as_written("stop", {}, family, tokenizer)
    matcher = grammar.matcher()
    assert all(matcher.advance(i) for i in ids) and matcher.is_finished
    for arguments in ({"city": "x"}, {"city": "x", "days": 10}, {"days": 3, "city": "x"}):
        matcher = grammar.matcher()
        assert not all(
            [matcher.advance(i) for i in as_written("weather", arguments, family, tokenizer)]
        )
    walker = Walker(tokenizer)
    seen = set[str]()
    for seed in range(30):
        out = walker.walk(grammar.matcher(), seed, most=200, calls=True)
        seen |= {name for name, _ in parsed(out, tokenizer)} if out is not None else set()
        if seen == {"weather", "stop"}:
            return
    raise AssertionError(seen)


def test_one_call_or_many() -> None:
    tool = CallTool(name="f", parameters=None)
    one = as_written("f", {}, "v4.1", DEMO)
    end = DEMO.encode_with_control("</｜DSML｜ calls>")
    call = one[: -len(end)]
    for many, number, allowed in ((True, 2, True), (False, 2, False), (False, 1, True)):
        matcher = calls([tool], many=many).matcher()
        assert all([matcher.advance(i) for i in call * number + end]) is allowed
    matcher = calls([tool]).matcher()
    assert not all([matcher.advance(i) for i in end])  # no call at all


def test_arguments_that_are_not_enforced_are_well_formed() -> None:
    grammar = calls([CallTool(name="f", parameters={"not": {}}, enforced=False)])
    num_parameters = 0
    for seed in range(30):
        out = WALKER.walk(grammar.matcher(), seed, most=600, calls=True)
        if out is not None:
            for name, arguments in parsed(out):
                assert name == "f" and isinstance(arguments, dict)
                num_parameters += len(arguments)
    assert num_parameters > 5


@common
@given(text=TEXTS)
def test_raw_text_ends_at_its_tag_only(text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    ids = as_written("f", {"a": text}, "v4.1", DEMO)
    matcher = calls([CallTool(name="f", parameters=schema)]).matcher()
    assert all(matcher.advance(i) for i in ids) and matcher.is_finished
    assert parsed(ids) == [("f", {"a": text})]


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}}, False),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {"b": {}}}, False),
        (None, False),
    ],
)
def test_parameters_that_are_not_listed(schema: dict[str, Any] | None, allowed: bool) -> None:
    matcher = calls([CallTool(name="f", parameters=schema)]).matcher()
    assert all([matcher.advance(i) for i in as_written("f", {"a": 1}, "v4.1", DEMO)]) is allowed
    matcher = calls([CallTool(name="f", parameters=schema)]).matcher()
    assert all([matcher.advance(i) for i in as_written("f", {}, "v4.1", DEMO)])


def test_further_parameters_do_not_take_a_listed_name() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    }
    grammar = calls([CallTool(name="f", parameters=schema)])
    for arguments, allowed in (
        ({"a": 1, "b": True}, True),
        ({"b": True, "ab": False}, True),
        ({"b": 1}, False),
        ({"a": True}, False),
        ({}, True),
    ):
        matcher = grammar.matcher()
        ids = as_written("f", arguments, "v4.1", DEMO)
        assert all([matcher.advance(i) for i in ids]) is allowed, arguments


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf cannot be enforced for the arguments"),
        ({"patternProperties": {"a": {}}}, "patternProperties"),
        ({"minProperties": 1}, "minProperties"),
        ({"$ref": "#/$defs/x"}, "names nothing"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "names nothing"),
        ({"properties": {'a" string="true': {}}}, "cannot have the name"),
        ({"properties": {"a": {"not": {}}}}, "not served: not"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "Unsatisfiable"),
        ({"properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
        ({"properties": [1]}, "properties must be an object"),
        ({"required": "a"}, "required a list"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "array"}}}, "are an object"),
        ({"type": "object", "x-guidance": {}}, "x-guidance"),
    ],
)
def test_arguments_that_cannot_be_enforced_are_refused(
    schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        calls([CallTool(name="f", parameters=schema)])


def test_masks_of_calls_leave_no_control_token_but_the_marker() -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    grammar = calls([CallTool(name="f", parameters=schema)])
    marker = DEMO.id_of("｜DSML｜")
    others = np.array(sorted(DEMO.control_ids - {marker}))
    matcher = grammar.matcher()
    for token_id in as_written("f", {"a": "x </ y"}, "v4.1", DEMO):
        mask = matcher.mask()
        assert mask is not None and not mask[others].any()
        assert matcher.advance(token_id)
