"""Every kind of bad request: its status, its message, and that the server serves on."""

import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepdraft.types import GenerateRequest

from .conftest import Client
from .test_chat import whole

USER = {"role": "user", "content": "Hi"}
OFF = {"thinking": {"type": "disabled"}}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One client for all bad requests: each test ends with a good one."""
    from .toy import Toy

    toy = Toy(tmp_path_factory.mktemp("toy"), server={"max_body_bytes": 20_000})
    toy.say("good")
    toy.service.start()
    assert toy.service.wait(30)
    yield Client(toy)
    toy.service.close()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str) and isinstance(error["message"], str)
    return error


def still_serves(client: Client) -> None:
    assert whole(client.chat(**OFF))["content"] == "good"


# fields of a chat body, the expected param, a part of the message
FIELDS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "empty messages": ({"messages": []}, "messages", "messages is empty"),
    "messages no list": ({"messages": "Hi"}, "messages", "expected `array`, got `str`"),
    "content a number": (
        {"messages": [USER, {"role": "user", "content": 5}]},
        "messages[1].content",
        "got `int`",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
    "unknown role": (
        {"messages": [{"role": "function", "content": "a"}]},
        "messages[0].role",
        "invalid enum value 'function'",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0]",
        "reads text only",
    ),
    "image beside text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
        "messages[0].content[1]",
        "reads text only",
    ),
    "audio": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
        "invalid value 'input_audio'",
    ),
    "calls without results": (
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, USER]},
        "messages[1].tool_calls",
        "'c1'",
    ),
    "result without a call": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "c1", "content": "x"}]},
        "messages[1].tool_call_id",
        "must answer a call",
    ),
    "lone surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, None, ""),
    "temperature text": ({"temperature": "hot"}, "temperature", "got `str`"),
    "temperature true": ({"temperature": True}, "temperature", "got `bool`"),
    "temperature high": ({"temperature": 2.5}, "temperature", "from 0 to 2"),
    "temperature low": ({"temperature": -0.1}, "temperature", "from 0 to 2"),
    "top_p 0": ({"top_p": 0}, "top_p", "above 0"),
    "top_p high": ({"top_p": 1.1}, "top_p", "at most 1"),
    "top_k": ({"top_k": -2}, "top_k", "at least 1"),
    "min_p": ({"min_p": 2}, "min_p", "from 0 to 1"),
    "penalty": ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    "repetition": ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
    "n 0": ({"n": 0}, "n", "from 1 to 16"),
    "n 17": ({"n": 17}, "n", "from 1 to 16"),
    "n 1.5": ({"n": 1.5}, "n", "got `float`"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "max_completion_tokens": ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
    "max_tokens over context": ({"max_tokens": 4096}, "max_tokens", "context is 4096"),
    "17 stops": ({"stop": [str(i) for i in range(17)]}, "stop", "at most 16"),
    "empty stop": ({"stop": ["a", ""]}, "stop", "empty string"),
    "stop number": ({"stop": [1]}, "stop[0]", "got `int`"),
    "stop id": ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    "seed": ({"seed": 1 << 64}, "seed", "64-bit"),
    "stream_options": ({"stream_options": {}}, "stream_options", "needs stream"),
    "bias key": ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is no token id"),
    "bias key other digits": ({"logit_bias": {"\u0665": 1}}, "logit_bias", "no token id"),
    "bias id": ({"logit_bias": {"99999": 1}}, "logit_bias", "no token id"),
    "bias value": ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
    "thinking": ({"thinking": {"type": "x"}}, "thinking.type", "'x'"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
    "tool name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "'a b'",
    ),
    "tool twice": ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "declared twice"),
    "tool type": (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        "tools[0].type",
        "'custom'",
    ),
    "forced call without tools": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "prefix in the middle": (
        {"messages": [USER, {"role": "assistant", "content": "a", "prefix": True}, USER]},
        "messages[1].prefix",
        "only the last message",
    ),
    "format": ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    "format without schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    "audio output": ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    "grammar": ({"guided_grammar": "start: /a/"}, "guided_grammar", "structured_outputs"),
    "min_tokens": ({"min_tokens": 3}, "min_tokens", "leave it out"),
    "unknown field": ({"banana": 0}, "banana", "no field of this request; leave it out"),
    "misspelt field": ({"temprature": 0.5}, "temprature", "did you mean temperature?"),
    "field of completions": ({"prompt": "a"}, "prompt", "no field"),
    "evil field": ({"a\r\nset-cookie: b": False}, "'a\\r\\nset-cookie: b'", "no field"),
    "continue": ({"continue_final_message": True}, "continue_final_message", '"prefix": true'),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_bad_chat_field_is_400_and_names_its_place(shared: Client, case: str) -> None:
    fields, param, message = FIELDS[case]
    body = {"messages": [USER], "temperature": 0, **OFF, **fields}
    # json.dumps, not httpx: a lone surrogate can only travel as an escape.
    response = shared.request("POST", "/v1/chat/completions", content=json.dumps(body))
    error = error_of(response, 400)
    assert error["param"] == param
    assert message in error["message"]
    still_serves(shared)


def test_a_missing_field_is_named(shared: Client) -> None:
    error = error_of(shared.post("/v1/chat/completions", {}), 400)
    assert "`messages`" in error["message"]
    still_serves(shared)


BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "no json": (b"hello", "not valid JSON"),
    "cut": (b'{"messages": [{"role": "us', "not valid JSON"),
    "trailing": (b'{"messages": []} x', "not valid JSON"),
    "nan": (b'{"messages": [], "temperature": NaN}', "byte"),
    "a list": (b"[]", "expected `object`, got `array`"),
    "a text": (b'"x"', "got `str`"),
    "latin-1": (
        '{"messages": [{"role": "user", "content": "Grüße"}]}'.encode("latin-1"),
        "not valid UTF-8: byte 45 is 0xfc",
    ),
    "bad utf-8 in an unknown field": (b'{"x": "\xff", "messages": []}', "not valid UTF-8: byte 7"),
    "deep": (b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply"),
    "deep in an ignored field": (b'{"user": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too"),
    "deep in an unknown field": (b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}", "x is no field"),
    "huge number": (b'{"messages": [], "temperature": 1e999}', "out of range"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body_is_400(shared: Client, case: str, path: str) -> None:
    body, message = BODIES[case]
    error = error_of(shared.request("POST", path, content=body), 400)
    if path == "/v1/chat/completions":
        assert message in error["message"]
    still_serves(shared)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_413(shared: Client, declared: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 30_000}]}).encode()

    async def parts() -> Any:
        yield body

    content = body if declared else parts()
    error = error_of(shared.request("POST", "/v1/chat/completions", content=content), 413)
    assert "20000 bytes" in error["message"] and error["code"] == "body_too_large"
    still_serves(shared)


def test_a_compressed_body_is_415(shared: Client) -> None:
    content = gzip.compress(b'{"messages": [{"role": "user", "content": "Hi"}]}')
    for encoding in ("gzip", "br, gzip"):
        response = shared.request(
            "POST",
            "/v1/chat/completions",
            content=content,
            headers={"content-encoding": encoding},
        )
        assert encoding in error_of(response, 415)["message"]
    still_serves(shared)


def test_a_byte_order_mark_is_no_part_of_the_text(shared: Client) -> None:
    content = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"content-encoding": "identity"}
    response = shared.request("POST", "/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200, response.text


def test_an_unknown_model_is_404_and_lists_the_known_ones(shared: Client) -> None:
    for response in (shared.chat(model="gpt-9"), shared.complete(model="gpt-9")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert "toy" in error["message"]
    still_serves(shared)


def test_unknown_paths_and_methods(shared: Client) -> None:
    assert error_of(shared.get("/v2/chat"), 404)["code"] == "not_found"
    response = shared.get("/v1/chat/completions")
    error_of(response, 405)
    assert "POST" in response.headers["allow"]


def test_a_prompt_longer_than_the_context(shared: Client) -> None:
    for response, field in (
        (shared.chat("x" * 5000), "messages"),
        (shared.complete("x" * 5000), "prompt"),
    ):
        error = error_of(response, 400)
        assert error["param"] == field
        assert error["code"] == "context_length_exceeded"
        assert re.search(r"prompt has \d+ tokens.*context is 4096", error["message"])
    still_serves(shared)


def test_a_prompt_that_cannot_fit_is_not_encoded(
    make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of text took half a minute and 2 GB to be told that they are too long."""
    client = make_client()
    encoded: list[int] = []
    encode = client.toy.tokenizer._encode

    def counted(encoder: Any, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(encoder, text)

    monkeypatch.setattr(client.toy.tokenizer, "_encode", counted)
    many = [{"role": role, "content": "x" * 4000} for role in ("user", "assistant")] * 500
    for response in (
        client.chat("x" * 4_000_000),
        client.chat(messages=many),
        client.complete("x" * 4_000_000),
        client.complete("x" * 4_000_000, parse_special=True),
        client.complete("x", suffix="y" * 4_000_000),
    ):
        assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert sum(encoded) < 20_000


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 15_000},
        {"reasoning_effort": "e" * 15_000},
        {"reasoning_effort": {"a": "e" * 15_000}},
        {"task": "t" * 15_000},
        {"logit_bias": {"b" * 15_000: 1}},
        {"thinking": {"type": "x" * 15_000}},
        {"messages": [{"role": "r" * 15_000, "content": "a"}]},
        {"messages": [USER, {"role": "tool", "tool_call_id": "i" * 15_000, "content": "x"}]},
        {"tool_choice": {"type": "function", "function": {"name": "f" * 15_000}}},
        {"tools": [{"type": "function", "function": {"name": "f" * 15_000}}]},
    ],
)
def test_errors_do_not_send_megabytes_back(fields: dict[str, Any], shared: Client) -> None:
    response = shared.chat(**fields)
    assert 400 <= response.status_code < 500
    assert len(response.content) < 4000


COMPLETIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({"prompt": []}, "prompt", "empty"),
    "empty text": ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
    "mixed": ({"prompt": ["a", 5]}, "prompt", "mixes"),
    "bad id": ({"prompt": [99999]}, "prompt", "99999"),
    "negative id": ({"prompt": [-1]}, "prompt", "-1"),
    "object": ({"prompt": {"a": 1}}, "prompt", "got `object`"),
    "true": ({"prompt": [True]}, "prompt[0]", "got `bool`"),
    "many": ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
    "best_of": ({"best_of": 4}, "best_of", "equals n"),
    "logprobs": ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    "echo logprobs": ({"logprobs": 1, "echo": True}, "echo", "prompt's tokens"),
    "suffix echo": ({"suffix": "a", "echo": True}, "suffix", "echo"),
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_a_bad_completions_field_is_400(shared: Client, case: str) -> None:
    fields, param, message = COMPLETIONS[case]
    error = error_of(shared.complete(**{"prompt": "Hi", **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]
    still_serves(shared)


def test_an_engine_fault_is_500_without_its_insides(client: Client) -> None:
    client.toy.say("good")

    def fault(sequences: Any) -> None:
        raise RuntimeError("/secret/path")

    client.toy.runner.step_fault = fault
    error = error_of(client.chat(**OFF), 500)
    assert error["type"] == "server_error" and "secret" not in json.dumps(error)
    frames = client.chat(stream=True, **OFF).text.split("\n\n")
    assert json.loads(frames[-3].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert frames[-2] == "data: [DONE]"
    client.toy.runner.step_fault = lambda sequences: None
    still_serves(client)


def test_nan_logits_are_an_error_and_never_text(client: Client) -> None:
    client.toy.say("good")

    def spoil(sequence: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if sequence.num_tokens > sequence.num_prompt + 1 else logits

    client.toy.runner.spoil = spoil
    error = error_of(client.chat(**OFF), 500)
    assert "NaN" in error["message"]
    text = client.chat(stream=True, **OFF).text
    contents = re.findall(r'"content":"(.*?)"', text)
    assert "".join(contents) == "go" and "NaN" in text
    client.toy.runner.spoil = lambda s, logits: logits
    still_serves(client)


def test_an_unexpected_fault_of_the_server_is_500(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepdraft.server import chat

    def broken(*args: Any) -> None:
        raise KeyError("insides")

    monkeypatch.setattr(chat, "read_conversation", broken)
    error = error_of(client.chat(**OFF), 500)
    assert "insides" not in error["message"]
    monkeypatch.undo()
    client.toy.say("good")
    still_serves(client)


def test_a_full_queue_is_503_with_retry_after(make_client: Callable[..., Client]) -> None:
    client = make_client(engine={"max_queue": 1, "max_running": 1})
    client.toy.say("good")
    engine, _ = client.toy.service.ready()
    gate = threading.Event()
    client.toy.runner.prefill_fault = lambda sequence, ids: gate.wait(30)
    held = [GenerateRequest(request_id=f"held-{i}", prompt_ids=(3,)) for i in range(2)]
    engine.submit(held, [lambda event: None] * 2)
    response = client.chat(**OFF)
    error = error_of(response, 503)
    assert error["code"] == "overloaded" and int(response.headers["retry-after"]) >= 1
    gate.set()
    engine.cancel("held-0", "held-1")
    while engine.stats()["running"] + engine.stats()["waiting"]:
        time.sleep(0.01)
    still_serves(client)


def test_more_answers_than_ever_fit_is_no_matter_of_trying_again(
    make_client: Callable[..., Client],
) -> None:
    client = make_client(engine={"max_queue": 1, "max_running": 1})
    client.toy.say("good")
    for response in (client.chat(n=3, **OFF), client.complete(["a", "b", "c"])):
        assert (
            "asks for 3 answers; this server takes at most 2" in error_of(response, 400)["message"]
        )
    still_serves(client)
