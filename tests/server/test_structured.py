"""Structured output through the server: every field that asks for a form, calls, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest

from deepdraft.config import Config
from deepdraft.engine import grammar
from deepdraft.engine.load import load_engine
from deepdraft.server.service import Service, bundled_checkpoint

from .conftest import Client
from .test_bad_input import error_of
from .test_chat import OFF, chunks, joined, whole
from .toy import Toy

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GOOD = '{"city": "Köln", "days": 3}'
PLACE = {
    "type": "function",
    "function": {"name": "place", "parameters": SCHEMA},
}
STRICT = {"type": "function", "function": {**PLACE["function"], "strict": True}}
OTHER = {"type": "function", "function": {"name": "other"}}
CALL = (
    '<｜DSML｜ invoke name="place">\n'
    '<｜DSML｜ parameter name="city" string="true">Köln</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
)
BLOCK = f"<｜DSML｜ calls>\n{CALL}</｜DSML｜ calls>"
BAD_CALL = CALL.replace(">3<", '>"many"<').replace('"city"', '"town"')


def schema_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    spec = {"name": "s", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": spec}}


# Forms of the content

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, GOOD),
    "json_schema": (schema_format(SCHEMA), GOOD),
    "json_schema strict": (schema_format(SCHEMA, True), GOOD),
    "json_schema loose": (schema_format(SCHEMA, False), GOOD),
    "json_schema of a list": (schema_format({"type": "array", "maxItems": 1}), "[null]"),
    "regex": ({"response_format": {"type": "regex", "regex": "[a-c]{3}\\d"}}, "abc7"),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, GOOD),
    "structured json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GOOD),
    "structured regex": ({"structured_outputs": {"regex": "ü+"}}, "üüü"),
    "structured choice": ({"structured_outputs": {"choice": ["ja", "nein 🎉"]}}, "nein 🎉"),
    "structured object": ({"structured_outputs": {"json_object": True}}, GOOD),
    "guided_json": ({"guided_json": SCHEMA}, GOOD),
    "guided_regex": ({"guided_regex": "x|y"}, "y"),
    "guided_choice": ({"guided_choice": ["x", "yes"]}, "yes"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_of_the_right_form_comes_as_the_model_writes_it(
    shared: Client, case: str, thinking: bool
) -> None:
    fields, answer = FORMS[case]
    switch = {} if thinking else OFF
    shared.toy.say(f"I think {{so}}.</think>{answer}" if thinking else answer)
    response = shared.chat(**fields, **switch)
    message = whole(response)
    assert message["content"] == answer
    assert message["reasoning_content"] == ("I think {so}." if thinking else None)
    assert message["finish_reason"] == "stop"
    assert "x-deepdraft-ignored" not in response.headers
    streamed = joined(chunks(shared.chat(stream=True, **fields, **switch)))
    assert (streamed["content"], streamed["finish_reason"]) == (answer, "stop")


@pytest.mark.parametrize("case", FORMS)
def test_completions_take_forms_too(shared: Client, case: str) -> None:
    fields, answer = FORMS[case]
    shared.toy.say(answer)
    choice = shared.complete(**fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (answer, "stop")
    shared.toy.say(f"Sure! {answer}")
    choice = shared.complete(max_tokens=60, **fields).json()["choices"][0]
    assert not choice["text"].startswith("S")


def test_a_model_that_wants_something_else_is_kept_to_the_form(shared: Client) -> None:
    shared.toy.say("Sure, here it is: [1, 2]")
    fields = {"structured_outputs": {"choice": ["red", "green"]}, "temperature": 1}
    for seed in range(6):
        assert whole(shared.chat(seed=seed, **fields, **OFF))["content"] in ("red", "green")


def test_neither_the_end_nor_a_call_comes_before_the_end_of_thinking(shared: Client) -> None:
    """The model wants to stop while it thinks, or to call at once: it must go on to the form."""
    shared.toy.say("")
    message = whole(shared.chat(max_tokens=30, **schema_format({"const": 1})))
    assert message["finish_reason"] in ("stop", "length")
    assert message["content"] == ("1" if message["finish_reason"] == "stop" else "")
    shared.toy.say("r<｜DSML｜ calls>\n")
    message = whole(shared.chat(max_tokens=30, tools=[PLACE], tool_choice="required"))
    assert message["reasoning_content"].startswith("r<")


def test_json_is_not_looked_for_within_the_form(shared: Client) -> None:
    """A string that looks like a fence passes, and nothing is held back."""
    answer = '{"a": "```json\\n{}\\n``` x"}'
    shared.toy.say(answer)
    fields = {"response_format": {"type": "json_object"}, **OFF}
    assert whole(shared.chat(**fields))["content"] == answer
    parts = chunks(shared.chat(stream=True, **fields))
    assert len([p for p in parts if p["choices"][0]["delta"].get("content")]) == len(answer)


def test_a_continued_message_counts_as_a_part_of_the_form(shared: Client) -> None:
    def ask(prefix: str) -> Any:
        messages = [
            {"role": "user", "content": "json please"},
            {"role": "assistant", "content": prefix, "prefix": True},
        ]
        body = {"messages": messages, "temperature": 0, **schema_format(SCHEMA), **OFF}
        return shared.post("/v1/chat/completions", body)

    shared.toy.say(GOOD[10:])
    assert whole(ask(GOOD[:10]))["content"] == GOOD[10:]
    error = error_of(ask("Sure: {"), 400)
    assert "no beginning of what" in error["message"]


def test_every_answer_of_several_has_the_form(shared: Client) -> None:
    shared.toy.say("")
    response = shared.chat(n=4, temperature=1, seed=3, **schema_format({"enum": [1, 22]}), **OFF)
    assert {whole(response, i)["content"] for i in range(4)} <= {"1", "22"}


# Calls


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_is_forced(shared: Client, thinking: bool, choice: str) -> None:
    tool_choice: Any = choice
    if choice == "named":
        tool_choice = {"type": "function", "function": {"name": "place"}}
    fields = {"tools": [OTHER, PLACE], "tool_choice": tool_choice}
    wanted = f"\n\n{BLOCK}" if thinking else BLOCK.removeprefix("<｜DSML｜ calls>\n")
    shared.toy.say(f"r</think>{wanted}" if thinking else wanted)
    switch = {} if thinking else OFF
    for message in (
        whole(shared.chat(**fields, **switch)),
        joined(chunks(shared.chat(stream=True, **fields, **switch))),
    ):
        (call,) = message["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == (
            "place",
            {"city": "Köln", "days": 3},
        )
        assert message["content"] == "" and message["finish_reason"] == "tool_calls"
        assert message["reasoning_content"] == ("r" if thinking else None)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_does_not_want_to_call_must(shared: Client, temperature: float) -> None:
    """It wants to chat, then to call without what is required. The toy model's texts never end by
    themselves, so only what ended is looked at."""
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2]}, "m": {"const": "x"}},
                "required": ["n"],
            },
        },
    }
    for answer in ("Hello there", BAD_CALL):
        shared.toy.say(answer)
        for seed in range(4):
            fields = {"tools": [tool, OTHER], "parallel_tool_calls": False, "seed": seed}
            message = whole(
                shared.chat(
                    tool_choice={"type": "function", "function": {"name": "f"}},
                    max_tokens=400,
                    **{**fields, "temperature": temperature},
                    **OFF,
                )
            )
            (call,) = message["tool_calls"]
            assert message["finish_reason"] == "tool_calls" and call["name"] == "f"
            arguments = json.loads(call["arguments"])
            assert arguments["n"] in (1, 2) and arguments.get("m", "x") == "x"


def test_a_strict_tool_is_enforced_where_the_model_calls(shared: Client) -> None:
    shared.toy.say(f"Let me <see>.\n\n<｜DSML｜ calls>\n{BAD_CALL}</｜DSML｜ calls>")
    message = whole(shared.chat(tools=[STRICT, OTHER], max_tokens=900, **OFF))
    assert message["content"] == "Let me <see>."
    calls = message["tool_calls"]
    assert calls and calls[0]["name"] == "place"
    assert calls[0]["arguments"].startswith('{"city": "')
    shared.toy.say("No call < here.")
    message = whole(shared.chat(tools=[STRICT], **OFF))
    assert (message["content"], message["finish_reason"]) == ("No call < here.", "stop")
    # The same tool, not strict: what the model writes comes as it is.
    shared.toy.say(f"<｜DSML｜ calls>\n{BAD_CALL}</｜DSML｜ calls>")
    message = whole(shared.chat(tools=[PLACE], **OFF))
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"town": "Köln", "days": "many"}


def test_a_strict_tool_is_held_to_what_its_completion_drops(shared: Client) -> None:
    days = {"type": "integer", "enum": [5, 6], "title": "Days"}
    parameters = {"type": "object", "title": "Place", "properties": {"days": days}}
    function = {"name": "place", "strict": True, "parameters": parameters}
    tool = {"type": "function", "function": function}
    call = CALL.replace(CALL.splitlines(keepends=True)[1], "")
    shared.toy.say(f"<｜DSML｜ calls>\n{call}</｜DSML｜ calls>")
    (made,) = whole(shared.chat(tools=[tool], **OFF))["tool_calls"]
    assert json.loads(made["arguments"])["days"] in (5, 6)
    days["uniqueItems"], days["type"] = True, "array"
    assert shared.chat(tools=[tool], **OFF).status_code == 400


def test_a_strict_tool_is_enforced_where_the_model_calls_while_it_thinks(shared: Client) -> None:
    shared.toy.say(f"hm <｜DSML｜ calls>\n{CALL}{CALL}</｜DSML｜ calls>")
    message = whole(shared.chat(tools=[STRICT]))
    assert message["reasoning_content"] == "hm "
    assert [c["name"] for c in message["tool_calls"]] == ["place", "place"]


def test_one_call_only(shared: Client) -> None:
    shared.toy.say(f"<｜DSML｜ calls>\n{CALL}{CALL}</｜DSML｜ calls>")
    for fields, number in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        response = shared.chat(tools=[PLACE], **fields, **OFF)
        assert len(whole(response)["tool_calls"]) == number
        assert "x-deepdraft-ignored" not in response.headers


def test_a_form_and_tools(shared: Client) -> None:
    """The answer has the form, or it is calls; with free text in neither."""
    fields = {"tools": [PLACE], **schema_format(SCHEMA)}
    shared.toy.say(f"r</think>{GOOD}")
    assert whole(shared.chat(**fields))["content"] == GOOD
    for gap in ("", "\n\n"):
        shared.toy.say(f"r</think>{gap}{BLOCK}")
        message = whole(shared.chat(**fields))
        assert message["content"] == "" and len(message["tool_calls"]) == 1
    shared.toy.say(f"r</think>Sure. {GOOD}")
    assert not whole(shared.chat(max_tokens=40, **fields))["content"].startswith("Sure")
    shared.toy.say(f"r</think>{GOOD}")
    message = whole(shared.chat(tool_choice="none", **fields))
    assert message["content"] == GOOD


def test_a_tool_that_cannot_be_enforced(shared: Client) -> None:
    parameters = {"type": "object", "anyOf": [{"required": ["a"]}]}
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    call = (
        '<｜DSML｜ invoke name="odd">\n'
        '<｜DSML｜ parameter name="a" string="false">[1, {"b": null}]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    shared.toy.say(call)
    response = shared.chat(tools=[odd], tool_choice="required", **OFF)
    (made,) = whole(response)["tool_calls"]
    assert json.loads(made["arguments"]) == {"a": [1, {"b": None}]}
    assert response.headers["x-deepdraft-ignored"] == "tools.function.parameters"


# Refusals


LOOSE = {"not": {"type": "string"}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "schema": (schema_format(LOOSE), "response_format.json_schema.schema", "not served: not"),
    "strict schema": (
        schema_format(LOOSE, True),
        "response_format.json_schema.schema",
        "not served: not",
    ),
    "structured schema": (
        {"structured_outputs": {"json": LOOSE}},
        "structured_outputs.json",
        "not",
    ),
    "guided schema": ({"guided_json": LOOSE}, "guided_json", "not"),
    "no JSON": ({"guided_json": '{"a"'}, "guided_json", "not valid JSON"),
    "pattern": (
        {"response_format": {"type": "regex", "regex": "(?=a)b"}},
        "response_format.regex",
        "look-around",
    ),
    "choices": ({"guided_choice": []}, "guided_choice", "not 0"),
    "nothing": ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "allows nothing"),
    "two forms": (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "both ask for a form",
    ),
    "two in one": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "both ask for a form",
    ),
    "grammar": (
        {"structured_outputs": {"grammar": "root ::= x"}},
        "structured_outputs.grammar",
        "use json, regex",
    ),
    "tag": (
        {"structured_outputs": {"structural_tag": {}}},
        "structured_outputs.structural_tag",
        "refused",
    ),
    "white space": (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "refused",
    ),
    "unknown": ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown field"),
    "ebnf": ({"ebnf": "root ::= x"}, "ebnf", "use response_format"),
    "no end": (
        {"guided_regex": "a+", "ignore_eos": True},
        "ignore_eos",
        "cannot be combined with guided_regex",
    ),
    "strict tool": (
        {
            "tools": [
                OTHER,
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "string", "pattern": "(?=a)b"}},
                            "required": ["a"],
                            "additionalProperties": False,
                        },
                    },
                },
            ]
        },
        "tools[1].function.parameters",
        "look-around",
    ),
    "no end of calls": (
        {"tools": [PLACE], "tool_choice": "required", "ignore_eos": True},
        "ignore_eos",
        "tool_choice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_enforced_is_refused(shared: Client, case: str) -> None:
    fields, param, message = REFUSED[case]
    for thinking in ({}, OFF):
        error = error_of(shared.chat(**fields, **thinking), 400)
        assert error["param"] == param
        assert message in error["message"]
    if "tools" not in fields:
        assert error_of(shared.complete(**fields), 400)["param"] == param


def test_a_schema_that_need_not_be_strict_is_named_where_it_is_not_enforced(
    shared: Client,
) -> None:
    shared.toy.say('{"a": [1]}')
    response = shared.chat(**schema_format(LOOSE, False), **OFF)
    assert whole(response)["content"] == '{"a": [1]}'
    assert response.headers["x-deepdraft-ignored"] == "response_format.json_schema.schema"


def test_a_grammar_that_blows_up_is_the_requests_fault(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small, accepted, and too complex once the answer is under way: 400, in a stream a frame."""
    limits = llguidance.LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(grammar, "_LIMITS", limits)
    fields = {"guided_regex": "(?s:.*)a(?s:.){60}b"}
    shared.toy.say("abcab" * 400)
    error = error_of(shared.chat(max_tokens=2000, **fields, **OFF), 400)
    assert "too complex" in error["message"] and "of the answer" in error["message"]
    response = shared.chat(stream=True, max_tokens=2000, **fields, **OFF)
    frames = response.text.split("\n\n")
    assert "too complex" in frames[-3] and frames[-2] == "data: [DONE]"
    shared.toy.say("ok")
    assert whole(shared.chat(**OFF))["content"] == "ok"


# The bundled model


@pytest.fixture(scope="module")
def demo() -> Iterator[Client]:
    service = Service(
        lambda: load_engine(bundled_checkpoint(), Config().engine, name="demo"), Config()
    )
    service.start()
    assert service.wait(120) and service.state == "ready", service.failure

    class Holder:
        pass

    holder: Any = Holder()
    holder.service = service
    yield Client(holder)
    service.close()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("thinking", [True, False])
def test_the_bundled_model_writes_valid_json(
    demo: Client, temperature: float, thinking: bool
) -> None:
    for seed in range(3):
        response = demo.chat(
            "Describe a person as JSON.",
            temperature=temperature,
            seed=seed,
            max_tokens=700,
            **schema_format(PERSON),
            **({} if thinking else OFF),
        )
        message = whole(response)
        if thinking and message["finish_reason"] == "length":
            assert message["content"] == ""  # it thought to the end
            continue
        assert message["finish_reason"] == "stop"
        person = json.loads(message["content"])
        assert list(person) == ["name", "age", "tags"]
        assert len(person["name"]) <= 20 and 0 <= person["age"] <= 120
        assert len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "b"}


def test_the_bundled_model_calls_when_it_must(demo: Client) -> None:
    tool = {"type": "function", "function": {"name": "describe", "parameters": PERSON}}
    for thinking in ({}, OFF):
        message = whole(
            demo.chat(
                "Describe a person.",
                tools=[tool],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=700,
                seed=1,
                **{"temperature": 1},
                **thinking,
            )
        )
        if thinking:
            (call,) = message["tool_calls"]
            assert call["name"] == "describe"
            assert set(json.loads(call["arguments"])) == {"name", "age", "tags"}
        else:
            assert message["finish_reason"] in ("tool_calls", "length")
