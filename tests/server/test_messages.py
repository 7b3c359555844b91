"""The Messages API: streams and whole answers, compared with DeepSeek's own stream and prompts."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepdraft.server import messages_read, messages_schema
from deepdraft.server.chat import read_conversation
from deepdraft.server.messages import resolve_model
from deepdraft.server.messages_read import read_arguments, read_messages
from deepdraft.text.prompt import render_chat

from .conftest import Client
from .dialects import call, calls, events, peer_events, peer_prompt

USER = {"role": "user", "content": "Hi"}
OFF = {"thinking": {"type": "disabled"}}
F = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
G = {"name": "g", "input_schema": {"type": "object"}}
ONE = calls(call("f", ("city", True, "Köln"), ("days", False, "3")))
TWO = calls(call("f", ("a", True, 'x "y"\n z')), call("g"))


def post(client: Client, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"max_tokens": 500, "messages": [USER], "temperature": 0, **fields}
    return client.post(path, body)


def put_together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed message as a client puts it together; checks the order of events."""
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    assert told[-2]["type"] == "message_delta"
    message = told[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["output_tokens"] == 0
    open_at, pings, inputs = None, 0, dict[int, str]()
    for event in told[1:-2]:
        match event["type"]:
            case "ping":
                pings += 1
            case "content_block_start":
                assert open_at is None and event["index"] == len(message["content"])
                open_at = event["index"]
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                assert open_at == event["index"]
                block, delta = message["content"][open_at], event["delta"]
                kind = delta["type"]
                if kind == "input_json_delta":
                    inputs[open_at] = inputs.get(open_at, "") + delta["partial_json"]
                else:
                    key = kind.removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                assert open_at == event["index"]
                open_at = None
            case other:
                raise AssertionError(other)
    assert open_at is None
    assert pings == (1 if message["content"] else 0)
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(read_arguments(text))
    return {**message, **told[-2]["delta"], "usage": told[-2]["usage"]}


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """Without the ids, which differ from request to request."""
    content = [
        {k: v for k, v in block.items() if k not in ("id", "signature")}
        for block in message["content"]
    ]
    return {**message, "id": "", "content": content}


# name: the answer, fields of the request, whether the length limit ends it
ANSWERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "thinking": ("Let me see.</think>It is 4.", {}, False),
    "not thinking": ("It is 4.", OFF, False),
    "unicode": ("Ünï 🎉</think>日本語 🎲 done\n", {}, False),
    "no reasoning": ("</think>a", {}, False),
    "nothing": ("", OFF, False),
    "nothing after thinking": ("hm</think>", {}, False),
    "cut in the reasoning": ("This goes", {"max_tokens": 9}, True),
    "call": (f"hm</think>Looking.\n\n{ONE}", {"tools": [F, G]}, False),
    "calls only": (f"hm</think>{TWO}", {"tools": [F, G]}, False),
    "call out of the reasoning": (f"hm {ONE}", {"tools": [F, G]}, False),
    "markup without tools": (ONE, OFF, False),
    "stop sequence": ("one STOP two", {"stop_sequences": ["STOP", "xx"], **OFF}, False),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_streamed_message_equals_the_whole_one(client: Client, case: str) -> None:
    answer, fields, _ = ANSWERS[case]
    client.toy.say(answer)
    whole = post(client, **fields).json()
    told = events(post(client, stream=True, **fields))
    message = put_together(told)
    assert anonymous(message) == anonymous(whole)
    assert message["id"].startswith("msg_") and whole["id"] != message["id"]
    signatures = {b["signature"] for b in message["content"] if b["type"] == "thinking"}
    assert signatures <= {message["id"]}


def outline(told: list[dict[str, Any]]) -> list[Any]:
    """Events without ids and usage; deltas that follow each other are one."""
    lines: list[Any] = []
    for event in told:
        match event["type"]:
            case "content_block_start":
                block = event["content_block"]
                lines.append(
                    ["start", event["index"], {k: v for k, v in block.items() if k != "id"}]
                )
            case "content_block_delta":
                delta = event["delta"]
                kind = delta["type"]
                if kind == "signature_delta":
                    lines.append([kind, event["index"]])
                    continue
                (text,) = (v for k, v in delta.items() if k != "type")
                if lines[-1][:2] == [kind, event["index"]]:
                    lines[-1][2] += text
                else:
                    lines.append([kind, event["index"], text])
            case "message_delta":
                lines.append(["message_delta", event["delta"]])
            case kind:
                lines.append([kind, event.get("index")])
    return lines


@pytest.mark.parametrize("case", ANSWERS)
def test_events_are_those_of_deepseeks_own_service(client: Client, case: str) -> None:
    answer, fields, cut = ANSWERS[case]
    client.toy.say(answer)
    ours = outline(events(post(client, stream=True, **fields)))
    peer = outline(peer_events("messages", {"messages": [USER], **fields}, answer, cut=cut))
    assert ours == peer


def test_a_call_that_was_cut(client: Client) -> None:
    client.toy.say(f"hm</think>{ONE}")
    tokens = len(client.toy.tokenizer.encode_with_control(f"hm</think>{ONE}"))
    fields: dict[str, Any] = {"tools": [F], "max_tokens": tokens - 30}
    whole = post(client, **fields).json()
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][-1]["input"] == {"city": "Köln"}
    assert anonymous(put_together(events(post(client, stream=True, **fields)))) == anonymous(whole)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": "x', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x", "b": [1, 2', {"a": "x"}),
        ('{"a": "x", "b": [1, 2]', {"a": "x", "b": [1, 2]}),
        ('{"a": 12', {}),
        ('{"a": 12, "b": tru', {"a": 12}),
        ('{"a": 12}', {"a": 12}),
        ('{"a": NaN, "b": 1}', {}),
        ("[1]", {}),
        ('{"a": ' + "[" * 5000, {}),
    ],
)
def test_arguments_that_may_be_cut(text: str, read: dict[str, Any]) -> None:
    assert json.loads(read_arguments(text)) == read


def test_a_number_of_any_size_passes(client: Client) -> None:
    client.toy.say(calls(call("f", ("n", False, "123456789012345678901234567890"))))
    answer = post(client, tools=[F], **OFF)
    assert answer.json()["content"][0]["input"] == {"n": 123456789012345678901234567890}


# Requests


def our_prompt(client: Client, body: dict[str, Any]) -> str:
    fields, _ = messages_schema.read(json.dumps({"messages": [USER], **body}).encode())
    conversation = read_conversation(read_messages(fields).chat, "v4.1")
    return render_chat(conversation, client.toy.tokenizer).text


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "R"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x", "n": [1, {"b": None}]}}
USE2 = {"type": "tool_use", "id": "t2", "name": "g", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "r", "signature": "s"}
TEXT = {"type": "text", "text": "look"}

PROMPTS: dict[str, dict[str, Any]] = {
    "text": {},
    "system": {"system": "Be brief."},
    "empty system": {"system": "", **OFF},
    "system blocks": {
        "system": [
            {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "B"},
        ]
    },
    "system as a message": {"system": "A", "messages": [{"role": "system", "content": "B"}, USER]},
    "two users": {"messages": [USER, USER]},
    "history": {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
    "ends with an answer": {"messages": [USER, {"role": "assistant", "content": "a"}]},
    "loop": {
        "tools": [F, G],
        "messages": [
            USER,
            {"role": "assistant", "content": [THOUGHT, TEXT, USE, USE2]},
            {
                "role": "user",
                "content": [
                    {**RESULT, "tool_use_id": "t2", "is_error": True},
                    {**RESULT, "content": [TEXT, {"type": "text", "text": "more"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    },
    "empty result": {
        "tools": [F],
        "messages": [
            USER,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    },
    "thoughts between texts": {
        "tools": [F],
        "messages": [
            USER,
            {"role": "assistant", "content": [THOUGHT, TEXT, {**THOUGHT, "thinking": "q"}, TEXT]},
            USER,
        ],
    },
    "thoughts without tools": {
        "messages": [USER, {"role": "assistant", "content": [THOUGHT, TEXT]}, USER]
    },
    "no tools wanted": {"tools": [F], "tool_choice": {"type": "none"}},
    "one tool wanted": {"tools": [F, G], "tool_choice": {"type": "tool", "name": "f"}, **OFF},
    "effort": {"output_config": {"effort": "low"}},
    "most effort": {"output_config": {"effort": "max"}},
    "budget": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "adaptive": {"thinking": {"type": "adaptive"}},
    "control tokens spelled": {"messages": [{"role": "user", "content": "<｜User｜></think>"}]},
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_are_those_of_deepseeks_own_service(client: Client, case: str) -> None:
    body = PROMPTS[case]
    assert our_prompt(client, body) == peer_prompt("messages", {"messages": [USER], **body})


def test_where_we_take_more_than_the_official_service(client: Client) -> None:
    def asked(blocks: list[Any]) -> str:
        turn = [{"role": "assistant", "content": [USE, TEXT]}, {"role": "user", "content": blocks}]
        return our_prompt(client, {"tools": [F], "messages": [USER, *turn]})

    # Text in front of a result, or behind a call: as if it stood where it belongs.
    ordered = our_prompt(
        client,
        {
            "tools": [F],
            "messages": [
                USER,
                {"role": "assistant", "content": [TEXT, USE]},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "now"}]},
            ],
        },
    )
    assert asked([{"type": "text", "text": "now"}, RESULT]) == ordered
    assert our_prompt(client, {"tools": [{**F, "type": "custom"}]}) == our_prompt(
        client, {"tools": [F]}
    )
    redacted = {"type": "redacted_thinking", "data": "x"}
    for content in ([redacted, TEXT], [TEXT]):
        history = [USER, {"role": "assistant", "content": content}, USER]
        assert "x" not in our_prompt(client, {"messages": history}).split("reasoning)")[1]
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    asked_of = {"role": "user", "content": [document, {"type": "text", "text": "?"}]}
    assert "<｜User｜>T\n\nbody\n\n?<｜Assistant｜>" in our_prompt(client, {"messages": [asked_of]})


def test_any_tool_is_a_forced_call(client: Client) -> None:
    client.toy.say(f"It is fine.{ONE}")
    answer = post(client, tools=[F], tool_choice={"type": "any"}, **OFF).json()
    assert answer["stop_reason"] == "tool_use"
    assert [b["type"] for b in answer["content"]] == ["tool_use"]


def test_what_changes_nothing_is_named(client: Client) -> None:
    client.toy.say("ok")
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}
    response = post(
        client,
        system=[billing, TEXT],
        metadata={"user_id": "u"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        thinking={"type": "disabled", "budget_tokens": 10, "display": "omitted"},
        tools=[F],
        messages=[
            USER,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "is_error": True}]},
        ],
    )
    assert response.status_code == 200, response.text
    assert set(response.headers["x-deepdraft-ignored"].split(", ")) == {
        *("metadata", "service_tier", "mcp_servers"),
        *("system.x-anthropic-billing-header", "messages.content.is_error"),
        *("thinking.budget_tokens", "thinking.display"),
    }
    assert response.headers["request-id"] == response.json()["id"]


def test_unknown_keys_below_the_top_level_are_named(client: Client) -> None:
    client.toy.say("ok")
    cached = {**TEXT, "cache_control": {"type": "ephemeral"}}
    response = post(
        client,
        system=[{**TEXT, "citations": None, "a\nb": 1}],
        tools=[{**F, "eager_input_streaming": True}],
        messages=[
            {"role": "user", "content": [cached, cached], "name": "me"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": [cached]}]},
        ],
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-deepdraft-ignored"].split(", ") == [
        *("messages.content.cache_control", "messages.name"),
        *("messages.content.content.cache_control", "?", "tools.eager_input_streaming"),
    ]


def test_the_billing_line_of_a_client_stays_out_of_the_prompt(client: Client) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}
    assert our_prompt(client, {"system": [billing, TEXT]}) == our_prompt(client, {"system": [TEXT]})
    assert "billing" in our_prompt(client, {"messages": [{"role": "user", "content": [billing]}]})
    assert messages_read._BILLING in billing["text"]


# Limits, names, usage


def test_the_limit_is_an_upper_bound(make_client: Callable[..., Client]) -> None:
    client = make_client(max_tokens=64)
    client.toy.say("x" * 200)
    for wanted in (1000, None):
        answer = post(client, max_tokens=wanted, **OFF).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 64
    answer = post(client, max_tokens=3, **OFF).json()
    assert (answer["stop_reason"], answer["content"][0]["text"]) == ("max_tokens", "xxx")


def test_usage_and_its_count_beforehand(client: Client) -> None:
    client.toy.say("abc</think>de")
    fields: dict[str, Any] = {"system": "S", "tools": [F]}
    usage = post(client, **fields).json()["usage"]
    assert usage["output_tokens"] == 3 + 1 + 2 + 1
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}
    counted = post(client, "/v1/messages/count_tokens", **fields)
    assert counted.json() == {"input_tokens": usage["input_tokens"]}
    # Longer than the context, where an answer would be refused.
    long = [{"role": "user", "content": "x" * 9000}]
    assert post(client, messages=long).status_code == 400
    counted = post(client, "/anthropic/v1/messages/count_tokens", messages=long)
    assert counted.json()["input_tokens"] > 9000


def test_cached_tokens_are_counted_apart(client: Client) -> None:
    from deepdraft.server.messages import messages_job
    from deepdraft.types import CacheUse, TokenEvent

    _, view = client.toy.service.ready()
    body, _ = messages_schema.read(json.dumps({"messages": [USER], "stream": True}).encode())
    job = messages_job(body, "toy", view)
    (start, *_) = job.push(
        TokenEvent(
            request_id=job.requests[0].request_id,
            token_ids=(20,),
            cached=CacheUse(num_tokens=5, source="host", provenance="exact"),
        )
    )
    usage = start["message"]["usage"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] == job.num_prompt - 5
    assert usage["cache_creation_input_tokens"] == 0


def test_model_names(client: Client) -> None:
    _, view = client.toy.service.ready()
    for name in (None, "toy", "toy[1m]", "claude-opus-4-5", "claude-haiku-4-5[1m]"):
        assert resolve_model(name, view) == "toy"
    client.toy.say("ok")
    answer = post(client, model="claude-sonnet-4-5", **OFF).json()
    assert (answer["model"], answer["content"][0]["text"]) == ("toy", "ok")


def test_every_path_answers(client: Client) -> None:
    client.toy.say("ok")
    for prefix in ("/v1", "", "/beta", "/anthropic/v1", "/anthropic"):
        assert post(client, f"{prefix}/messages?beta=true", **OFF).status_code == 200
        assert post(client, f"{prefix}/messages/count_tokens").status_code == 200
