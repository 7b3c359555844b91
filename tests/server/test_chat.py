"""Chat answers: shapes, thinking, tools, stop strings, usage; streamed and whole."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import Client


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [f for f in response.text.split("\n\n") if f and not f.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    return [json.loads(f.removeprefix("data: ")) for f in frames[:-1]]


def joined(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice put together the way a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": None, "tool_calls": []}
    finish = None
    logprobs: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for chunk in parts:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "a chunk after the finish chunk"
            finish = choice["finish_reason"]
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"name": call["function"]["name"], "arguments": ""}
                    )
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            for key, entries in (choice["logprobs"] or {}).items():
                logprobs[key] += entries or []
    return {**message, "finish_reason": finish, "logprobs": logprobs}


def whole(response: httpx.Response, index: int = 0) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][index]
    message = choice["message"]
    calls = [
        {"name": c["function"]["name"], "arguments": c["function"]["arguments"]}
        for c in message.get("tool_calls", ())
    ]
    return {
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Köln</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
OFF = {"thinking": {"type": "disabled"}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "thinking": ("Let me see.</think>It is 4.", {}),
    "not thinking": ("It is 4.", OFF),
    "unicode": ("Ünï 🎉</think>日本語 🎲 done\n", {}),
    "cut in the reasoning": ("This goes on and on", {"max_tokens": 7}),
    "cut in a character": ("ab🎉", {"max_tokens": 4, **OFF}),
    "call": (f"hm</think>Looking.\n\n{CALL}", {"tools": [WEATHER]}),
    "call cut": (f"hm</think>{CALL}", {"tools": [WEATHER], "max_tokens": 60}),
    "markup without tools": (CALL, OFF),
    "stop": ("stop? no</think>one two STOP three", {"stop": ["STOP", "xx"]}),
    "stop over tokens at the end": ("a ST", {"stop": "STOP", **OFF}),
    "stop at once": ("STOP", {"stop": "STOP", **OFF}),
    "held back before a call": (f"a ST{CALL}", {"stop": "STOP", "tools": [WEATHER], **OFF}),
    "json": (
        'Sure:\n```json\n{"a": 1}\n```\nok',
        {"response_format": {"type": "json_object"}, **OFF},
    ),
    "logprobs": ("Yes.</think>No.", {"logprobs": True, "top_logprobs": 2}),
    "empty": ("", OFF),
}


def test_a_repeated_parameter_keeps_its_last_value(client: Client) -> None:
    parameter = '<｜DSML｜ parameter name="days" string="false">{}</｜DSML｜ parameter>\n'
    client.toy.say(
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
        + parameter.format(3)
        + parameter.format(5)
        + "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    answer = whole(client.chat(tools=[WEATHER], **OFF))
    assert [c["arguments"] for c in answer["tool_calls"]] == ['{"days": 5}']


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_answer_equals_the_whole_one(client: Client, case: str) -> None:
    answer, fields = CASES[case]
    client.toy.say(answer)
    response = client.chat(**fields)
    one = whole(response)
    many = joined(chunks(client.chat(stream=True, **fields)))
    logprobs = many.pop("logprobs")
    assert many == one
    if fields.get("logprobs"):
        assert logprobs == response.json()["choices"][0]["logprobs"]


EXPECTED: dict[str, dict[str, Any]] = {
    "thinking": {"reasoning_content": "Let me see.", "content": "It is 4."},
    "not thinking": {"reasoning_content": None, "content": "It is 4."},
    "unicode": {"reasoning_content": "Ünï 🎉", "content": "日本語 🎲 done\n"},
    "cut in the reasoning": {
        "reasoning_content": "This go",
        "content": "",
        "finish_reason": "length",
    },
    "cut in a character": {"content": "ab", "finish_reason": "length"},
    "call": {
        "content": "Looking.",
        "finish_reason": "tool_calls",
        "tool_calls": [{"name": "weather", "arguments": '{"city": "Köln", "days": 3}'}],
    },
    "call cut": {"finish_reason": "length"},
    "markup without tools": {"content": CALL, "tool_calls": [], "finish_reason": "stop"},
    "stop": {"reasoning_content": "stop? no", "content": "one two ", "finish_reason": "stop"},
    "stop over tokens at the end": {"content": "a ST"},
    "stop at once": {"content": "", "finish_reason": "stop"},
    "held back before a call": {"content": "a ST", "finish_reason": "tool_calls"},
    "empty": {"content": "", "finish_reason": "stop"},
}


@pytest.mark.parametrize("case", EXPECTED)
def test_what_an_answer_holds(client: Client, case: str) -> None:
    answer, fields = CASES[case]
    client.toy.say(answer)
    one = whole(client.chat(**fields))
    expected = {"finish_reason": "stop", **EXPECTED[case]}
    assert {k: one[k] for k in expected} == expected


def test_json_mode_is_json_whatever_the_model_wants(client: Client) -> None:
    answer, fields = CASES["json"]
    client.toy.say(answer)
    content = whole(client.chat(max_tokens=400, **fields))["content"]
    assert content.startswith("{")


def test_the_shape_of_a_stream(client: Client) -> None:
    client.toy.say("r</think>ab")
    parts = chunks(client.chat(stream=True))
    deltas = [c["choices"][0]["delta"] for c in parts]
    assert deltas == [
        {"role": "assistant", "content": None, "reasoning_content": ""},
        {"content": None, "reasoning_content": "r"},
        {"content": "a", "reasoning_content": None},
        {"content": "b", "reasoning_content": None},
        {"content": "", "reasoning_content": None},
    ]
    assert [c["choices"][0]["finish_reason"] for c in parts] == [None] * 4 + ["stop"]
    for chunk in parts:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["system_fingerprint"] == "fp_toy"
        assert chunk["model"] == "toy"
        assert chunk["id"] == parts[0]["id"] and chunk["id"].startswith("chatcmpl-")
        assert "usage" not in chunk
    client.toy.say("ab")
    first = chunks(client.chat(stream=True, **OFF))[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "", "reasoning_content": None}


def test_tool_calls_in_a_stream(client: Client) -> None:
    client.toy.say("</think>" + CALL + "\n")
    parts = chunks(client.chat(stream=True, tools=[WEATHER]))
    deltas = [c["choices"][0]["delta"] for c in parts]
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert calls[0].pop("id").startswith("call_00_")
    assert calls[0] == {
        "index": 0,
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert all(set(c) == {"index", "function"} for c in calls[1:])
    assert all(set(d) == {"tool_calls"} for d in deltas if "tool_calls" in d)
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_usage_comes_always_and_in_streams_on_request(client: Client) -> None:
    client.toy.say("abc</think>de")
    usage = client.chat().json()["usage"]
    assert usage["completion_tokens"] == 3 + 1 + 2 + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["prompt_cache_hit_tokens"] == 0
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] > 0
    parts = chunks(client.chat(stream=True, stream_options={"include_usage": True}))
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == usage
    assert all(c["usage"] is None for c in parts[:-1])


def test_tokens_after_a_stop_string_are_not_counted(client: Client) -> None:
    client.toy.say("one END " + "x" * 500)
    usage = client.chat(stop="END", **OFF).json()["usage"]
    assert usage["completion_tokens"] == len("one END")


def test_the_prompt_is_the_rendered_conversation(client: Client) -> None:
    client.toy.say(lambda prompt: prompt.replace("<", "[").replace("｜", "|"))
    answer = whole(client.chat("What?", thinking=False))
    assert answer["content"] == "[|begin▁of▁sentence|>[|User|>What?[|Assistant|>[/think>"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
    ],
)
def test_every_thinking_switch(client: Client, fields: dict[str, Any], thinks: bool) -> None:
    client.toy.say(lambda p: "r</think>a" if p.endswith("<think>") else "a")
    answer = whole(client.chat(**fields))
    assert answer["reasoning_content"] == ("r" if thinks else None)
    assert answer["content"] == "a"


def test_efforts_reach_the_prompt(client: Client) -> None:
    client.toy.say("</think>")
    lengths = {
        effort: client.chat(reasoning_effort=effort).json()["usage"]["prompt_tokens"]
        for effort in ("low", "max", 7)
    }
    assert lengths["max"] == lengths["low"] + 1 == lengths[7] + 2


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices(client: Client, stream: bool) -> None:
    client.toy.runner.strength = 1.0
    client.toy.say("some text that is long enough")
    fields = {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 8, "stream": stream, **OFF}
    fields["logit_bias"] = {"1": -100}  # no early end
    response = client.chat(**fields)
    if stream:
        texts = [joined(chunks(response), i)["content"] for i in range(3)]
    else:
        texts = [whole(response, i)["content"] for i in range(3)]
        assert response.json()["usage"]["completion_tokens"] == 24
    assert len(set(texts)) == 3
    alone = whole(client.chat(**{**fields, "n": 1, "stream": False}))["content"]
    assert texts[0] == alone


def test_a_seed_repeats_an_answer_and_no_seed_does_not(client: Client) -> None:
    client.toy.runner.strength = 0.0
    fields = {"temperature": 1.0, "max_tokens": 12, **OFF}
    seeded = [whole(client.chat(seed=s, **fields))["content"] for s in (3, 3, 4, -3)]
    assert seeded[0] == seeded[1] and len(set(seeded)) == 3
    assert len({whole(client.chat(**fields))["content"] for _ in range(3)}) == 3


def test_checkpoint_presets_are_defaults(make_client: Callable[..., Client]) -> None:
    client = make_client(defaults={"temperature": 0.0})
    client.toy.runner.strength = 0.0
    answers = {
        whole(client.chat(temperature=None, max_tokens=12, **OFF))["content"] for _ in range(3)
    }
    assert len(answers) == 1
    given = {whole(client.chat(temperature=1, max_tokens=12, **OFF))["content"] for _ in range(3)}
    assert len(given) == 3


def test_logprobs_by_kind_of_text(client: Client) -> None:
    client.toy.runner.strength = 3.0
    client.toy.say("é</think>x")
    choice = client.chat(logprobs=True, top_logprobs=3).json()["choices"][0]
    reasoning, content = (choice["logprobs"][k] for k in ("reasoning_content", "content"))
    assert [e["bytes"] for e in reasoning] == [[0xC3], [0xA9]]
    assert [e["token"] for e in content] == ["</think>", "x"]
    for entry in (*reasoning, *content):
        assert len(entry["top_logprobs"]) == 3
        best = entry["top_logprobs"][0]
        assert entry["logprob"] == best["logprob"] < 0 and entry["token"] == best["token"]
    assert client.chat().json()["choices"][0]["logprobs"] is None


def test_stop_token_ids_and_ignore_eos(client: Client) -> None:
    client.toy.say("abXcd")
    (stop_id,) = client.toy.tokenizer.encode_text("X")
    assert whole(client.chat(stop_token_ids=[stop_id], **OFF))["content"] == "ab"
    answer = client.chat(ignore_eos=True, max_tokens=20, **OFF).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "abXcd"
    assert answer["usage"]["completion_tokens"] == 20


def test_logit_bias_bans_a_token(client: Client) -> None:
    client.toy.say("ab")
    (b,) = client.toy.tokenizer.encode_text("b")
    answer = whole(client.chat(logit_bias={str(b): -100}, max_tokens=2, **OFF))
    assert answer["content"][0] == "a" and answer["content"] != "ab"


def test_max_completion_tokens_wins_over_max_tokens(client: Client) -> None:
    client.toy.say("x" * 100)
    usage = client.chat(max_tokens=9, max_completion_tokens=5, **OFF).json()["usage"]
    assert usage["completion_tokens"] == 5


def test_without_a_limit_the_answer_may_fill_the_context(make_client: Any) -> None:
    client = make_client(max_tokens=40)
    client.toy.say("x" * 500)
    usage = client.chat(**OFF).json()["usage"]
    assert usage["total_tokens"] == 40


def test_a_tool_loop(client: Client) -> None:
    client.toy.say(lambda p: "hm</think>" + ("Sunny." if "tool_result" in p else CALL))
    tools = [WEATHER]
    first = client.chat("weather?", tools=tools).json()["choices"][0]["message"]
    call = first["tool_calls"][0]
    messages = [
        {"role": "user", "content": "weather?"},
        # As clients send it back, without the reasoning.
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sun"},
    ]
    body = {"messages": messages, "tools": tools, "temperature": 0}
    assert whole(client.post("/v1/chat/completions", body))["content"] == "Sunny."


def test_a_required_call_without_thinking(client: Client) -> None:
    opened = CALL.removeprefix("<｜DSML｜ calls>\n")
    client.toy.say(lambda p: opened if p.endswith("<｜DSML｜ calls>\n") else "no")
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = whole(client.chat(tools=[WEATHER], tool_choice=choice, **OFF))
        assert answer["tool_calls"][0]["name"] == "weather"
        assert answer["finish_reason"] == "tool_calls"


def test_a_continued_answer(client: Client) -> None:
    client.toy.say(lambda p: " four." if p.endswith("</think>It is") else "no")
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "It is", "prefix": True},
    ]
    body = {"messages": messages, "temperature": 0, **OFF}
    for path in ("/beta/chat/completions", "/v1/chat/completions", "/chat/completions"):
        assert whole(client.post(path, body))["content"] == " four."


def test_both_spellings_of_reasoning_are_read(client: Client) -> None:
    client.toy.say("</think>")
    lengths = []
    for key in ("reasoning_content", "reasoning"):
        messages = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                key: "deep",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "weather", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        body = {"messages": messages, "tools": [WEATHER], "temperature": 0}
        response = client.post("/v1/chat/completions", body)
        lengths.append(response.json()["usage"]["prompt_tokens"])
    assert lengths[0] == lengths[1]


def test_fields_without_effect_are_named(client: Client) -> None:
    client.toy.say("ok")
    response = client.chat(
        user="me",
        metadata={"a": "b"},
        store=None,
        banana=None,
        n=1,
        **OFF,
    )
    assert response.status_code == 200
    assert response.headers["x-deepdraft-ignored"] == "user, metadata"
    assert "x-deepdraft-ignored" not in client.chat(**OFF).headers
    streamed = client.chat(user="me", stream=True, **OFF)
    assert streamed.headers["x-deepdraft-ignored"] == "user"


def test_unknown_keys_below_the_top_level_are_named(client: Client) -> None:
    client.toy.say("ok")
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    call = {"id": "a", "index": 0, "type": "function", "function": {"name": "f", "more": 1}}
    response = client.chat(
        messages=[
            {"role": "user", "content": [part, part], "name": "bob"},
            {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "b", "evil\r\nx: y": 1, "é": 2},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"any": 1}}}],
        logit_bias={"5": 1},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True},
        **OFF,
    )
    assert response.status_code == 200, response.text
    assert set(response.headers["x-deepdraft-ignored"].split(", ")) == {
        *("messages.name", "messages.content.cache_control", "messages.tool_calls.index"),
        *("messages.tool_calls.function.more", "stream_options.include_obfuscation", "?"),
    }
    assert "x" not in response.headers
    many = {f"k{i}": 1 for i in range(100)}
    response = client.chat(messages=[{"role": "user", "content": "a", **many}], **OFF)
    assert response.headers["x-deepdraft-ignored"].count("messages.k") == 32


def test_names_and_models(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"served_model_names": ("alias",)})
    client.toy.say("ok")
    for path in ("/v1/models", "/models", "/beta/models"):
        listed = client.get(path).json()
        assert [m["id"] for m in listed["data"]] == ["alias", "toy"]
        assert listed["data"][0]["max_model_len"] == 4096
    assert client.get("/v1/models/toy").json()["id"] == "toy"
    assert client.get("/v1/models/other").status_code == 404
    for name, shown in (("alias", "alias"), ("toy", "toy"), (None, "alias")):
        assert client.chat(model=name, **OFF).json()["model"] == shown
