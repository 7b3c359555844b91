"""Tokens of texts and conversations, and back."""

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Client
from .toy import BOS

USER = {"role": "user", "content": "Hi <｜User｜>"}
OFF = {"thinking": {"type": "disabled"}}


def tokens_of(client: Client, **body: Any) -> list[int]:
    response = client.post("/tokenize", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 4096
    return answer["tokens"]


def test_a_text_goes_to_tokens_and_back(client: Client) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = client.post(path, {"prompt": "Grüße", "return_token_strs": True}).json()
        assert answer["tokens"][0] == BOS and answer["token_strs"][1] == "G"
    ids = tokens_of(client, prompt="a<think>b", add_special_tokens=False)
    assert len(ids) == 9, "no control token by accident"
    special = tokens_of(client, prompt="a<think>b", add_special_tokens=False, parse_special=True)
    assert len(special) == 3
    for path in ("/detokenize", "/v1/detokenize"):
        assert client.post(path, {"tokens": special}).json() == {"prompt": "a<think>b"}


def test_a_conversation_counts_as_its_prompt(client: Client) -> None:
    client.toy.say("ok")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in ({}, OFF, {"tools": [tool]}, {"reasoning_effort": "max"}):
        usage = client.post(
            "/v1/chat/completions", {"messages": [USER], "temperature": 0, **fields}
        ).json()["usage"]
        assert len(tokens_of(client, messages=[USER], **fields)) == usage["prompt_tokens"]


def test_input_tokens_of_a_response(client: Client) -> None:
    client.toy.say("ok")
    body = {"input": "Hi", "instructions": "Be brief.", **OFF}
    first = client.post("/v1/responses", body).json()
    counted = client.post("/v1/responses/input_tokens", body).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": first["usage"]["input_tokens"],
    }
    body["previous_response_id"] = first["id"]
    second = client.post("/v1/responses/input_tokens", body).json()["input_tokens"]
    assert second == client.post("/v1/responses", body).json()["usage"]["input_tokens"]
    assert second > counted["input_tokens"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 4_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 4_000_000}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/detokenize", {"tokens": [1, 9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, None),
        ("/v1/responses/input_tokens", {"input": 5}, "input"),
    ],
)
def test_bad_bodies(client: Client, path: str, body: dict[str, Any], param: str | None) -> None:
    response = client.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_unknown_model_and_a_model_without_chat(make_client: Callable[..., Client]) -> None:
    client = make_client()
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert client.post(path, {**body, "model": "other"}).status_code == 404
        assert client.post(path, {**body, "model": "toy"}).status_code == 200
