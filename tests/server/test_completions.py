"""Plain completions: prompts of every kind, echo, log-probabilities, streams."""

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Client
from .test_chat import chunks
from .toy import BOS


def texts(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [c["text"] for c in response.json()["choices"]]


def test_a_completion(client: Client) -> None:
    client.toy.say(" world")
    body = client.complete("Hello").json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["system_fingerprint"] == "fp_toy"
    assert body["choices"] == [
        {"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == len("Hello") + 1
    assert body["usage"]["completion_tokens"] == len(" world") + 1


def test_a_stream_equals_the_whole(client: Client) -> None:
    client.toy.say("Grüße 🎲 STOP x")
    for fields in ({}, {"stop": "STOP"}, {"echo": True}, {"max_tokens": 9}, {"logprobs": 2}):
        one = client.complete("Hi", **fields).json()["choices"][0]
        parts = chunks(client.complete("Hi", stream=True, **fields))
        assert all(c["object"] == "text_completion" for c in parts)
        assert "".join(c["choices"][0]["text"] for c in parts) == one["text"]
        assert parts[-1]["choices"][0]["finish_reason"] == one["finish_reason"]
        if "logprobs" in fields:
            for key, values in one["logprobs"].items():
                joined = [v for c in parts for v in c["choices"][0]["logprobs"][key]]
                assert joined == values


def test_usage_in_a_stream(client: Client) -> None:
    client.toy.say("ab")
    parts = chunks(client.complete(stream=True, stream_options={"include_usage": True}))
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == client.complete().json()["usage"]


def test_prompts_of_every_kind(client: Client) -> None:
    client.toy.say(lambda prompt: prompt.removeprefix("<｜begin▁of▁sentence｜>") + "!")
    ids = client.toy.tokenizer.encode_text("ab")
    assert texts(client.complete("ab")) == ["ab!"]
    assert texts(client.complete(["ab", "c"])) == ["ab!", "c!"]
    assert texts(client.complete(ids)) == ["ab!"]
    assert texts(client.complete([ids, ids[:1]])) == ["ab!", "a!"]
    assert texts(client.complete(["ab", "c"], n=2)) == ["ab!", "ab!", "c!", "c!"]
    assert texts(client.complete(["ab", "c"], echo=True)) == ["abab!", "cc!"]
    assert texts(client.complete([ids[0]], echo=True)) == ["aa!"]


def test_text_never_becomes_a_control_token_unless_asked(client: Client) -> None:
    seen: list[list[int]] = []

    def script(prompt: Any) -> list[int]:
        seen.append(list(prompt))
        return []

    client.toy.runner.script = script
    client.complete("<think>")
    think = client.toy.tokenizer.id_of("<think>")
    assert seen[-1] == [BOS, *client.toy.tokenizer.encode_text("<think>")]
    client.complete("<think>", parse_special=True)
    assert seen[-1] == [BOS, think]
    client.complete("a", add_special_tokens=False)
    assert seen[-1] == client.toy.tokenizer.encode_text("a")
    client.complete("<｜begin▁of▁sentence｜>a", parse_special=True)
    assert seen[-1] == [BOS, *client.toy.tokenizer.encode_text("a")]


def test_a_suffix_fills_the_middle(client: Client) -> None:
    client.toy.say(lambda p: "mid" if p.endswith("<｜fim▁end｜>") and "<｜fim▁hole｜>" in p else "")
    assert texts(client.complete("head", suffix="tail")) == ["mid"]
    response = client.complete(["head"], suffix="tail")
    assert response.status_code == 400 and response.json()["error"]["param"] == "suffix"


def test_logprobs_have_offsets(client: Client) -> None:
    client.toy.say("héx")
    choice = client.complete("Hi", logprobs=2).json()["choices"][0]
    record = choice["logprobs"]
    assert len(record["tokens"]) == 4 == len(record["token_logprobs"])
    assert record["tokens"][0] == "h" and record["tokens"][-1] == "x"
    assert record["text_offset"][:2] == [0, 1]
    assert all(len(top) <= 2 for top in record["top_logprobs"])
    assert record["top_logprobs"][0]["h"] == record["token_logprobs"][0]


@pytest.mark.parametrize("special", [("<s>", "</s>")])
def test_a_tokenizer_without_chat_tokens_completes_but_does_not_chat(
    make_client: Callable[..., Client], special: tuple[str, ...]
) -> None:
    client = make_client(special=special)
    client.toy.say("ok")
    response = client.chat()
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "<｜User｜>" in message and "<think>" in message and "/v1/completions" in message
    assert texts(client.complete("Hi")) == ["ok"]
