"""Rules of chat requests: each refusal names its place, and the good neighbour passes."""

import dataclasses
from typing import Any

import pytest

from deepdraft.errors import RequestError
from deepdraft.text.prompt import (
    Conversation,
    ImagePart,
    Message,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    render_chat,
)
from deepdraft.text.request_rules import check_conversation
from tests.text import cases

HI = Message(role="user", content="Hi")
TOOL = Tool(name="f", parameters={"type": "object"})
FORCED = ToolChoice(mode="required")
IMAGE = (TextPart("look"), ImagePart("data:image/png;base64,AA"))


def calls(*ids: str) -> Message:
    return Message(role="assistant", tool_calls=tuple(ToolCall(i, "f", "{}") for i in ids))


def result(call_id: str | None) -> Message:
    return Message(role="tool", content="r", tool_call_id=call_id)


def prefix(role: Any = "assistant", **fields: Any) -> Message:
    return Message(role=role, content="a", prefix=True, **fields)


def talk(*messages: Message, **fields: Any) -> Conversation:
    return Conversation(messages=messages, **fields)


GOOD = [
    talk(HI),
    talk(Message(role="system", content="")),
    talk(Message(role="user", content="")),
    talk(Message(role="developer", content="d"), HI),
    talk(HI, Message(role="assistant"), HI),
    talk(HI, Message(role="assistant", reasoning="r"), HI),
    talk(HI, Message(role="latest_reminder", content="r")),
    talk(Message(role="assistant", content="first"), HI),
    talk(HI, calls("a"), result("a")),
    talk(HI, calls("a", "b"), result("b"), result("a"), HI),
    talk(HI, calls("a"), result("a"), calls("a"), result("a")),
    talk(HI, calls("a"), Message(role="tool", tool_call_id="a")),
    talk(HI, prefix()),
    talk(HI, prefix(reasoning="r")),
    talk(HI, tools=(TOOL, Tool(name="G_-9"), Tool(name="x" * 128))),
    talk(HI, tools=(Tool(name="f", parameters={}),)),
    talk(HI, tools=(TOOL,), tool_choice=FORCED, thinking=False),
    talk(HI, tools=(TOOL,), tool_choice=FORCED),
    talk(HI, tools=(TOOL,), tool_choice=ToolChoice(mode="function", name="f"), thinking=False),
    talk(HI, tools=(TOOL,), tool_choice=ToolChoice(mode="none")),
    talk(HI, tool_choice=ToolChoice(mode="none")),
    talk(HI, response_format=ResponseFormat(kind="json_object")),
    talk(HI, response_format=ResponseFormat(kind="json_schema", schema=True)),
    talk(HI, response_format=ResponseFormat(kind="regex", regex="a+")),
    talk(HI, effort=1),
    talk(HI, task="title"),
]


@pytest.mark.parametrize("conversation", GOOD)
def test_accepted_and_rendered(conversation: Conversation) -> None:
    check_conversation(conversation)
    assert render_chat(conversation, cases.toy_tokenizer()).token_ids


BAD: list[tuple[Conversation, str, str]] = [
    (talk(), "messages", "empty"),
    (talk(HI, Message(role="function", content="x")), "messages[1].role", "function"),  # pyrefly: ignore
    (talk(Message(role="user")), "messages[0].content", "no content"),
    (talk(HI, Message(role="system")), "messages[1].content", "no content"),
    (
        talk(dataclasses.replace(HI, tool_calls=calls("a").tool_calls)),
        "messages[0].tool_calls",
        "only",
    ),
    # Images
    (talk(Message(role="user", content=IMAGE)), "messages[0].content[1]", "text only"),
    (talk(HI, Message(role="tool", content=IMAGE)), "messages[1].content[1]", "text only"),
    # Calls and results
    (talk(HI, result("a")), "messages[1].tool_call_id", "must answer a call"),
    (talk(HI, calls("a"), result("a"), HI, result("a")), "messages[4].tool_call_id", "must answer"),
    (talk(HI, calls("a"), result("a"), result("a")), "messages[3].tool_call_id", "must answer"),
    (talk(HI, calls("a", "b"), result("a"), result("a")), "messages[3].tool_call_id", "'b'"),
    (talk(HI, calls("a"), result("x")), "messages[2].tool_call_id", "'x'"),
    (talk(HI, calls("a"), result(None)), "messages[2].tool_call_id", "None"),
    (talk(HI, calls("a")), "messages[1].tool_calls", "'a'"),
    (talk(HI, calls("a", "b"), result("b"), HI), "messages[1].tool_calls", "'a'"),
    (talk(HI, calls("a"), HI, result("a")), "messages[1].tool_calls", "'a'"),
    (talk(HI, calls("a", "a"), result("a")), "messages[1].tool_calls[1].id", "differ"),
    (
        talk(HI, Message(role="assistant", tool_calls=(ToolCall("a", "", "{}"),)), result("a")),
        "messages[1].tool_calls[0].function.name",
        "no function name",
    ),
    # Prefix
    (talk(HI, prefix(), HI), "messages[1].prefix", "last message"),
    (talk(prefix("user")), "messages[0].prefix", "assistant"),
    (talk(HI, prefix(), tools=(TOOL,)), "messages[1].prefix", "tools"),
    # Tools
    (talk(HI, tools=(Tool(name="a b"),)), "tools[0].function.name", "'a b'"),
    (talk(HI, tools=(TOOL, Tool(name="a\n"))), "tools[1].function.name", "letters"),
    (talk(HI, tools=(Tool(name=""),)), "tools[0].function.name", "letters"),
    (talk(HI, tools=(Tool(name="é"),)), "tools[0].function.name", "letters"),
    (talk(HI, tools=(Tool(name="x" * 129),)), "tools[0].function.name", "129"),
    (talk(HI, tools=(TOOL, TOOL)), "tools[1].function.name", "twice"),
    (
        talk(HI, tools=(Tool(name="f", parameters={"type": "array"}),)),
        "tools[0].function.parameters.type",
        "array",
    ),
    (
        talk(HI, tools=(Tool(name="f", parameters=[1]),)),  # pyrefly: ignore
        "tools[0].function.parameters",
        "object",
    ),
    (talk(HI, tool_choice=FORCED, thinking=False), "tool_choice", "no tools"),
    (
        talk(HI, tools=(TOOL,), tool_choice=ToolChoice(mode="function", name="g"), thinking=False),
        "tool_choice",
        "'g'",
    ),
    # Formats, effort, tasks
    (
        talk(HI, response_format=ResponseFormat(kind="json_schema")),
        "response_format.json_schema.schema",
        "JSON schema",
    ),
    (
        talk(HI, response_format=ResponseFormat(kind="regex", regex="")),
        "response_format.regex",
        "empty",
    ),
    (
        talk(HI, response_format=ResponseFormat(kind="regex", regex="a" * 8193)),
        "response_format.regex",
        "8193",
    ),
    (talk(HI, effort=0), "reasoning_effort", "0"),
    (talk(HI, task="dance"), "task", "dance"),
    (talk(HI, Message(role="assistant", content="a"), task="title"), "task", "user"),
    (talk(HI, tools=(TOOL,), tool_choice=FORCED, thinking=False, task="title"), "task", "forced"),
]


@pytest.mark.parametrize(("conversation", "param", "words"), BAD)
def test_refused(conversation: Conversation, param: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        check_conversation(conversation)
    assert error.value.param == param
    assert words in error.value.message
    assert error.value.http_status == 400


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_images_where_the_model_takes_them(role: Any) -> None:
    check_conversation(talk(Message(role=role, content=IMAGE)), images=True)


def test_images_where_none_can_stand() -> None:
    for role in ("assistant", "latest_reminder"):
        with pytest.raises(RequestError, match="cannot stand") as error:
            check_conversation(talk(HI, Message(role=role, content=IMAGE)), images=True)
        assert error.value.param == "messages[1].content[1]"


def test_missing_reasoning_of_the_current_round_only() -> None:
    turn = (calls("a"), result("a"))
    with pytest.raises(RequestError, match="sent back") as error:
        check_conversation(talk(HI, *turn), missing_reasoning="reject")
    assert error.value.param == "messages[1].reasoning_content"
    check_conversation(talk(HI, *turn))
    check_conversation(talk(HI, *turn, HI), missing_reasoning="reject")
    check_conversation(talk(HI, *turn, thinking=False), missing_reasoning="reject")
    sent = dataclasses.replace(turn[0], reasoning="")
    check_conversation(talk(HI, sent, turn[1]), missing_reasoning="reject")
