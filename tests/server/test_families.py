"""Chats in the prompt formats of older families, over the wire."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepdraft.text.control import CALL_MARKS, EOT, OUTPUT_MARKS
from deepdraft.text.conversation import Family

from .conftest import Client
from .toy import CHAT_TOKENS

TOKENS = (*CHAT_TOKENS, EOT, *CALL_MARKS, *OUTPUT_MARKS)
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
V32_CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="tide">\n<｜DSML｜parameter name="a" '
    'string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    "<｜end▁of▁sentence｜>"
)


@pytest.fixture
def serve(make_client: Callable[..., Client]) -> Any:
    def made(family: Family) -> Client:
        return make_client(family=family, special=TOKENS)

    return made


def message(client: Client, **fields: Any) -> dict[str, Any]:
    answer = client.chat(**fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(("family", "call"), [("v3.1", CALL), ("v3", CALL), ("v3.2", V32_CALL)])
def test_calls(serve: Any, family: Family, call: str) -> None:
    client = serve(family)
    client.toy.say("Sure." + call)
    choice = message(client, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Sure."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "tide", "arguments": '{"a": 1}'}
    assert choice["message"]["reasoning_content"] is None  # off where a request is silent
    with_history = [
        {"role": "user", "content": "Hi"},
        choice["message"],
        {"role": "tool", "tool_call_id": made["id"], "content": "4.2"},
    ]
    client.toy.say("4.2 m.<｜end▁of▁sentence｜>")
    assert message(client, messages=with_history, tools=TOOLS)["message"]["content"] == "4.2 m."


def test_reasoning(serve: Any) -> None:
    client = serve("v3.1")
    client.toy.say(lambda prompt: "Hm.</think>Yes." if prompt.endswith("<think>") else "Yes.")
    assert message(client)["message"]["reasoning_content"] is None
    thought = message(client, thinking={"type": "enabled"})["message"]
    assert (thought["reasoning_content"], thought["content"]) == ("Hm.", "Yes.")
    client = serve("r1")
    client.toy.say(lambda prompt: "Hm.\n</think>\n\nYes." if prompt.endswith("<think>\n") else "")
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        thought = message(client, **fields)["message"]
        assert (thought["reasoning_content"], thought["content"]) == ("Hm.", "Yes.")


def seven(name: str = "tide", **more: Any) -> dict[str, Any]:
    """A tool whose arguments can only be {"a": 7}."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 7, "maximum": 7}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


MARKED: tuple[Family, ...] = ("v3.1", "v3", "r1")


@pytest.mark.parametrize("family", MARKED)
def test_forced_calls(serve: Any, family: Family) -> None:
    client = serve(family)
    client.toy.say("Hm.</think>No call at all.<｜end▁of▁sentence｜>")
    tools = [seven(), seven("tides")]
    choice = message(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert [arguments for _, arguments in called(choice)] == [{"a": 7}]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    named = {"type": "function", "function": {"name": "tides"}}
    assert called(message(client, tools=tools, tool_choice=named)) == [("tides", {"a": 7})]


@pytest.mark.parametrize("family", MARKED)
def test_strict_tools(serve: Any, family: Family) -> None:
    client = serve(family)
    head = "Hm.</think>" if family == "r1" else ""
    call = CALL.replace("tide<", "function<").replace(
        '｜tool▁sep｜>{"a": 1}', '｜tool▁sep｜>tide\n```json\n{"a": 1}\n```'
    )
    client.toy.say(head + "Sure." + (CALL if family == "v3.1" else call))
    loose = message(client, tools=[seven()])
    assert called(loose) == [("tide", {"a": 1})]
    strict = message(client, tools=[seven(strict=True)])
    assert called(strict) == [("tide", {"a": 7})]
    assert strict["message"]["content"] == "Sure."
    client.toy.say(head + "Nothing to call.<｜end▁of▁sentence｜>")
    assert message(client, tools=[seven(strict=True)])["message"]["content"] == "Nothing to call."
    # A call without the mark that opens the block would be read as one, too.
    client.toy.say(head + CALL.replace("<｜tool▁calls▁begin｜>", ""))
    assert not called(message(client, tools=[seven(strict=True)], max_tokens=40))


def test_a_form_or_a_call(serve: Any) -> None:
    client = serve("v3.1")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [5]}}}
    client.toy.say("5<｜end▁of▁sentence｜>")
    assert message(client, tools=[seven()], response_format=form)["message"]["content"] == "5"
    client.toy.say(CALL)
    strict = message(client, tools=[seven(strict=True)], response_format=form)
    assert called(strict) == [("tide", {"a": 7})]


def test_a_tokenizer_without_the_marks_has_no_tools(make_client: Callable[..., Client]) -> None:
    client = make_client(family="v3.1", special=[t for t in TOKENS if "tool▁sep" not in t])
    answer = client.chat(tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400 and "tool▁sep" in answer.json()["error"]["message"]


def test_forms_are_enforced_in_every_format(serve: Any) -> None:
    client = serve("v2")
    client.toy.say("no JSON at all<｜end▁of▁sentence｜>")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}}
    assert message(client, response_format=form)["message"]["content"] == "7"


def test_an_answer_of_coder_ends_with_its_own_token(serve: Any) -> None:
    client = serve("coder")
    client.toy.say("x = 1\n<|EOT|>\n### Instruction:")
    choice = message(client)
    assert choice["message"]["content"] == "x = 1\n" and choice["finish_reason"] == "stop"
    answer = client.chat(tools=TOOLS)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_prompts_can_be_counted(serve: Any) -> None:
    client = serve("v2")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    text = client.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert text == "<｜begin▁of▁sentence｜>User: Hi\n\nAssistant:"
