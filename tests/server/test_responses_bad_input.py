"""Every kind of bad Responses request: status, error shape, and that the server serves on."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Client
from .test_bad_input import error_of
from .toy import Toy

USER = {"role": "user", "content": "Hi"}
OFF = {"reasoning": {"effort": "none"}}
F = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FC = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
FO = {"type": "function_call_output", "call_id": "c1", "output": "R"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One client for all bad requests: each test ends with a good one."""
    toy = Toy(tmp_path_factory.mktemp("toy"), server={"max_body_bytes": 20_000})
    toy.say("good")
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()


def still_serves(client: Client) -> None:
    answer = client.post("/v1/responses", {"input": "Hi", "temperature": 0, **OFF}).json()
    assert answer["output"][0]["content"][0]["text"] == "good"


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [USER, {"role": "user", "content": [fields]}]}


# fields of a body, the expected param, a part of the message
FIELDS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no input": ({"input": None}, "input", "input is empty"),
    "empty input": ({"input": []}, "input", "input is empty"),
    "input number": ({"input": 5}, "input", "got `int`"),
    "item number": ({"input": [5]}, "input[0]", "got `int`"),
    "item without role": ({"input": [{"content": "a"}]}, "input[0]", "`role`"),
    "unknown field": ({"made_up": 1}, "made_up", "no field of this request"),
    "unknown role": (
        {"input": [USER, {"role": "tool", "content": "a"}]},
        "input[1].role",
        "'tool'",
    ),
    "unknown item": ({"input": [USER, {"type": "compaction"}]}, "input[1].type", "'compaction'"),
    "item reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "ref"),
    "unknown part": (part(type="input_audio"), "input[1].content[0].type", "'input_audio'"),
    "file": (part(type="input_file", file_id="f"), "input[1].content[0].type", "'input_file'"),
    "image": (
        part(type="input_image", image_url="data:image/png;base64,AAAA"),
        "input[1].content[0]",
        "reads text only",
    ),
    "image of a file": (
        part(type="input_image", file_id="f"),
        "input[1].content[0]",
        "uploaded files",
    ),
    "result without a call": ({"input": [USER, FO]}, "input[1].call_id", "output item must answer"),
    "call without a result": (
        {"input": [USER, FC, USER]},
        "input[1].function_call",
        "no function_call_output item right after it answers 'c1'",
    ),
    "call without a name": ({"input": [{**FC, "name": 5}, FO]}, "input[0].name", "got `int`"),
    "result of another call": (
        {"input": [USER, FC, {**FO, "call_id": "c9"}]},
        "input[2].call_id",
        "'c9'",
    ),
    "lone surrogate": ({"input": "\ud800"}, None, ""),
    "lone surrogate in an item": (
        {"input": [{"role": "user", "content": "\ud800"}]},
        None,
        "",
    ),
    "instructions": ({"instructions": ["a"]}, "instructions", "got `array`"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    "over the context": ({"max_output_tokens": 4096}, "max_output_tokens", "context is 4096"),
    "temperature": ({"temperature": 3}, "temperature", "from 0 to 2"),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    "effort": ({"reasoning": {"effort": "x"}}, "reasoning.effort", "'x'"),
    "thinking": ({"thinking": {"type": "x"}}, "thinking.type", "'x'"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
    "format without schema": (
        {"text": {"format": {"type": "json_schema", "name": "s"}}},
        "text.format.schema",
        "must be a JSON schema",
    ),
    "tool without type": ({"tools": [{"name": "f"}]}, "tools[0]", "`type`"),
    "tool number": ({"tools": [5]}, "tools[0]", "got `int`"),
    "tool of a service": ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search'"),
    "tool name": ({"tools": [F, {**F, "name": "a b"}]}, "tools[1].name", "'a b'"),
    "tool twice": ({"tools": [F, F]}, "tools[1].name", "declared twice"),
    "custom tool with a grammar": (
        {"tools": [{"type": "custom", "name": "sql", "format": {"type": "grammar"}}]},
        "tools[0].format",
        "free text",
    ),
    "custom tool in a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "a"}]}]},
        "tools[0].tools[0].type",
        "functions only",
    ),
    "name in a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{**F, "name": "a::b"}]}]},
        "tools[0].name",
        "'n::a::b'",
    ),
    "choice": ({"tools": [F], "tool_choice": "any"}, "tool_choice", "'any'"),
    "choice of no tool": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "choice of a service": (
        {"tools": [F], "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "'web_search'",
    ),
    "choice of another tool": (
        {"tools": [F], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "'g'",
    ),
    "choice among others": (
        {
            "tools": [F],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
        },
        "tool_choice.tools",
        "'g'",
    ),
    "choice among nameless": (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "tools": [{}]}},
        "tool_choice.tools",
        "objects with a name",
    ),
    "unknown response": ({"previous_response_id": "resp_x"}, "previous_response_id", "not kept"),
    "background": ({"background": True}, "background", "use stream"),
    "conversation": ({"conversation": "c"}, "conversation", "previous_response_id"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", "templates"),
    "metadata": ({"metadata": {"a": 1}}, "metadata[...]", "got `int`"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_bad_field_is_400_and_names_its_place(shared: Client, case: str) -> None:
    fields, param, message = FIELDS[case]
    body = {"input": "Hi", "temperature": 0, **OFF, **fields}
    # json.dumps, not httpx: a lone surrogate can only travel as an escape.
    response = shared.request("POST", "/v1/responses", content=json.dumps(body))
    error = error_of(response, 400)
    assert error["param"] == param
    assert message in error["message"]
    still_serves(shared)


def test_other_errors(shared: Client) -> None:
    def post(**fields: Any) -> Any:
        return shared.post("/v1/responses", {"input": "Hi", **fields})

    assert error_of(post(model="gpt-9"), 404)["code"] == "model_not_found"
    error_of(shared.get("/v1/responses"), 405)
    for content in (b"", b"{", b"[]", b'{"input": ' + b"[" * 9000, b'{"x": "\xff"}'):
        error_of(shared.request("POST", "/v1/responses", content=content), 400)
    nested = b'{"input": [' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"]}"
    error_of(shared.request("POST", "/v1/responses", content=nested), 400)
    error_of(post(input="x" * 30_000), 413)
    assert error_of(post(input="x" * 9_000), 400)["code"] == "context_length_exceeded"
    still_serves(shared)


def test_an_overload_is_503(make_client: Callable[..., Client]) -> None:
    client = make_client()
    client.toy.service.begin_drain()
    response = client.post("/v1/responses", {"input": "Hi"})
    assert error_of(response, 503)["code"] == "overloaded"
    assert int(response.headers["retry-after"]) >= 1


def test_an_engine_fault_whole_and_in_a_stream(client: Client) -> None:
    client.toy.say("good")

    def fault(sequences: Any) -> None:
        if sequences[0].num_tokens > sequences[0].num_prompt + 1:
            raise RuntimeError("/secret/path")

    client.toy.runner.step_fault = fault
    body = {"input": "Hi", "temperature": 0, **OFF}
    assert "secret" not in error_of(client.post("/v1/responses", body), 500)["message"]
    text = client.post("/v1/responses", {**body, "stream": True}).text
    frames = [f for f in text.split("\n\n") if f]
    events = [json.loads(f.split("\n")[1].removeprefix("data: ")) for f in frames]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert frames[-1].startswith("event: response.failed\n")
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert response["usage"] is None and "secret" not in text
    (item,) = response["output"]
    told = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert item["status"] == "incomplete" and item["content"][0]["text"] == told != ""
    # A failed response is not kept.
    assert client.get(f"/v1/responses/{response['id']}").status_code == 404
    client.toy.runner.step_fault = lambda sequences: None
    still_serves(client)
