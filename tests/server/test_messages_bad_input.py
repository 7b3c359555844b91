"""Every kind of bad Messages request: status, error shape, and that the server serves on."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Client
from .toy import Toy

USER = {"role": "user", "content": "Hi"}
OFF = {"thinking": {"type": "disabled"}}
F = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "R"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One client for all bad requests: each test ends with a good one."""
    toy = Toy(tmp_path_factory.mktemp("toy"), server={"max_body_bytes": 20_000})
    toy.say("good")
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    return body["error"]["message"]


def still_serves(client: Client) -> None:
    body = {"max_tokens": 9, "messages": [USER], "temperature": 0, **OFF}
    answer = client.post("/v1/messages", body)
    assert answer.json()["content"] == [{"type": "text", "text": "good"}]


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}]}


# fields of a body, a part of the message
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages is empty"),
    "messages no list": ({"messages": "Hi"}, "messages: expected `array`, got `str`"),
    "unknown field": ({"made_up": 1}, "made_up"),
    "unknown role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "`content`"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    "empty content": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is"),
    "unknown block": (turn("user", {"type": "search_result"}), "messages[1].content[0].type"),
    "server tool block": (
        turn("assistant", {"type": "server_tool_use", "id": "a", "name": "b", "input": {}}),
        "messages[1].content[0].type",
    ),
    "block without text": (turn("user", {"type": "text"}), "messages[1].content[0]"),
    "image": (turn("user", {"type": "image", "source": PNG}), "messages[1].content[0] is an image"),
    "image of a file": (
        turn("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}),
        "messages[1].content[0].source: uploaded files",
    ),
    "document of bytes": (
        turn("user", {"type": "document", "source": {**PNG, "media_type": "application/pdf"}}),
        "messages[1].content[0].source: only documents given as text",
    ),
    "citations": (
        turn(
            "user",
            {
                "type": "document",
                "source": {"type": "text", "data": "a"},
                "citations": {"enabled": True},
            },
        ),
        "messages[1].content[0].citations is refused",
    ),
    "call of a user": (turn("user", USE), "messages[1].content[0]: a block of type tool_use"),
    "result of an assistant": (turn("assistant", RESULT), "a block of type tool_result"),
    "thought of a user": (turn("user", {"type": "thinking", "thinking": "a"}), "type thinking"),
    "input no object": (turn("assistant", {**USE, "input": [1]}), "content[0].input must be"),
    "result without a call": (turn("user", RESULT), "messages[1].content[0]: a tool_result block"),
    "call without a result": (turn("assistant", USE), "messages[1].tool_use: no tool_result block"),
    "result of another call": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{**RESULT, "tool_use_id": "t9"}]},
            ]
        },
        "messages[2].content[0].tool_use_id is 't9'",
    ),
    "lone surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    "system number": ({"system": 5}, "system: "),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens is 0"),
    "max_tokens text": ({"max_tokens": "many"}, "max_tokens: expected `int | null`"),
    "temperature": ({"temperature": 3}, "temperature is 3"),
    "top_p": ({"top_p": 0}, "top_p is 0"),
    "17 stops": ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 entries"),
    "empty stop": ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
    "stop a text": ({"stop_sequences": "a"}, "stop_sequences: expected"),
    "thinking": ({"thinking": {"type": "x"}}, "thinking.type is 'x'"),
    "effort": ({"output_config": {"effort": "x"}, "thinking": None}, "output_config.effort is 'x'"),
    "format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    "tool name": ({"tools": [{**F, "name": "a b"}]}, "tools[0].name is 'a b'"),
    "tool twice": ({"tools": [F, F]}, "tools[1].name: 'f' is declared twice"),
    "tool without schema": ({"tools": [{"name": "f"}]}, "tools[0] has no input_schema"),
    "server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type 'web_search_20250305' is refused",
    ),
    "choice": ({"tools": [F], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    "choice of no tool": ({"tool_choice": {"type": "any"}}, "has no tools"),
    "choice of another tool": (
        {"tools": [F], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice names 'g'",
    ),
    "container": ({"container": "c"}, "container is refused"),
    "mcp": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is refused"),
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("case", FIELDS)
def test_a_bad_field_is_400_and_named(shared: Client, case: str, path: str) -> None:
    fields, message = FIELDS[case]
    body = {"max_tokens": 9, "messages": [USER], "temperature": 0, **OFF, **fields}
    # json.dumps, not httpx: a lone surrogate can only travel as an escape.
    response = shared.request("POST", path, content=json.dumps(body))
    counts = path.endswith("count_tokens")
    if counts and set(fields) <= {"max_tokens", "temperature", "top_p", "stop_sequences"}:
        # These do not change the prompt.
        assert response.status_code in (200, 400)
    else:
        assert message in error_of(response, 400, "invalid_request_error")
    still_serves(shared)


def test_other_errors_have_the_same_shape(shared: Client) -> None:
    def post(**fields: Any) -> Any:
        return shared.post("/v1/messages", {"max_tokens": 9, "messages": [USER], **fields})

    assert "toy" in error_of(post(model="gpt-9"), 404, "not_found_error")
    error_of(shared.get("/anthropic/v1/nothing"), 404, "not_found_error")
    error_of(shared.get("/v1/messages"), 405, "invalid_request_error")
    for content in (b"", b"{", b"[]", b'{"messages": ' + b"[" * 9000, b'{"x": "\xff"}'):
        response = shared.request("POST", "/v1/messages", content=content)
        error_of(response, 400, "invalid_request_error")
    big = [{"role": "user", "content": "x" * 30_000}]
    assert "20000 bytes" in error_of(post(messages=big), 413, "request_too_large")
    long = [{"role": "user", "content": "x" * 9_000}]
    assert "context is 4096" in error_of(post(messages=long), 400, "invalid_request_error")
    still_serves(shared)


def test_a_full_queue_is_an_overload(make_client: Callable[..., Client]) -> None:
    client = make_client(engine={"max_queue": 1, "max_running": 1})
    client.toy.say("good")
    client.toy.service.begin_drain()
    response = client.post("/v1/messages", {"max_tokens": 9, "messages": [USER]})
    error_of(response, 503, "overloaded_error")
    assert int(response.headers["retry-after"]) >= 1


def test_an_engine_fault_whole_and_in_a_stream(client: Client) -> None:
    client.toy.say("good")

    def fault(sequences: Any) -> None:
        if sequences[0].num_tokens > sequences[0].num_prompt + 1:
            raise RuntimeError("/secret/path")

    client.toy.runner.step_fault = fault
    body = {"max_tokens": 9, "messages": [USER], "temperature": 0, **OFF}
    message = error_of(client.post("/v1/messages", body), 500, "api_error")
    assert "secret" not in message
    text = client.post("/v1/messages", {**body, "stream": True}).text
    frames = [f for f in text.split("\n\n") if f]
    assert frames[0].startswith("event: message_start\n")
    first, second = frames[-1].split("\n")
    assert first == "event: error"
    error = json.loads(second.removeprefix("data: "))
    assert error["type"] == "error" and error["error"]["type"] == "api_error"
    assert error["request_id"].startswith("msg_") and "secret" not in text
    client.toy.runner.step_fault = lambda sequences: None
    still_serves(client)
