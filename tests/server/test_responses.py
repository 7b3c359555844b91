"""The Responses API: streams and whole answers, compared with DeepSeek's own stream and prompts."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.server import responses_schema
from deepdraft.server.chat import read_conversation
from deepdraft.server.responses_read import read_responses
from deepdraft.server.responses_store import ResponseStore
from deepdraft.server.responses_tools import RawInput
from deepdraft.text.calls import CallWriter
from deepdraft.text.prompt import render_chat

from .conftest import Client
from .dialects import call, calls, events, peer_events, peer_prompt

USER = {"role": "user", "content": "Hi"}
OFF = {"reasoning": {"effort": "none"}}
OBJECT = {"type": "object", "properties": {}}
F = {"type": "function", "name": "f", "description": "d", "parameters": OBJECT}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "patches",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
SPACE = {
    "type": "namespace",
    "name": "mcp",
    "description": "A service.",
    "tools": [{"type": "function", "name": "g", "description": "Does g.", "parameters": OBJECT}],
}
CODEX = [F, PATCH, SPACE, {"type": "web_search"}, {"type": "local_shell"}]
FC = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "x"}'}
FO = {"type": "function_call_output", "call_id": "c1", "output": "R"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content}


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    """A toy with room for the long description of the patch tool."""
    return make_client(max_tokens=20_000)


def post(client: Client, path: str = "/v1/responses", **fields: Any) -> Any:
    return client.post(path, {"input": "Hi", "temperature": 0, **fields})


def put_together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The finished response; checks that the events before it say the same, in order."""
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    assert [e["type"] for e in told[:2]] == ["response.created", "response.in_progress"]
    for event in told[:2]:
        assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
        assert event["response"]["usage"] is None
    final = told[-1]["response"]
    assert told[-1]["type"] == f"response.{final['status']}"
    items: list[dict[str, Any]] = []
    text, item_open = "", False
    for event in told[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not item_open and event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text, item_open = "", True
            continue
        assert item_open and event["output_index"] == len(items) - 1
        if kind == "response.output_item.done":
            item_open = False
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith(".done") and kind != "response.content_part.done":
            (whole,) = (event[k] for k in ("text", "arguments", "input") if k in event)
            assert whole == text
    assert not item_open
    assert items == final["output"]
    return final


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times, which differ from request to request."""
    output = [
        {k: v for k, v in item.items() if k not in ("id", "call_id", "encrypted_content")}
        for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


TWO = calls(
    call("f", ("city", True, "Köln"), ("days", False, "3")),
    call("apply_patch", ("input", True, '*** Begin "x"\n+y\\n\n')),
    call("mcp::g"),
)
# name: the answer, fields of the request, whether the length limit ends it
ANSWERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "thinking": ("Let me see.</think>It is 4.", {}, False),
    "not thinking": ("It is 4.", OFF, False),
    "unicode": ("Ünï 🎉</think>日本語 🎲 done\n", {}, False),
    "no reasoning": ("</think>a", {}, False),
    "nothing": ("", OFF, False),
    "cut in the reasoning": ("This goes", {"max_output_tokens": 9}, True),
    "cut in the text": ("It is", {"max_output_tokens": 5, **OFF}, True),
    "calls": (f"hm</think>Looking.\n\n{TWO}", {"tools": CODEX}, False),
    "calls only": (f"hm</think>{TWO}", {"tools": CODEX}, False),
    "call out of the reasoning": (f"hm {TWO}", {"tools": CODEX}, False),
    "markup without tools": (TWO, OFF, False),
    "settings": (
        "ok",
        {
            "instructions": "Be brief.",
            "metadata": {"k": "v"},
            "top_p": 0.5,
            "parallel_tool_calls": True,
            **OFF,
        },
        False,
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_streamed_response_equals_the_whole_one(client: Client, case: str) -> None:
    answer, fields, _ = ANSWERS[case]
    client.toy.say(answer)
    whole = post(client, **fields).json()
    response = put_together(events(post(client, stream=True, **fields)))
    assert anonymous(response) == anonymous(whole)
    for key in ("instructions", "metadata", "top_p"):
        if key in fields:
            assert whole[key] == fields[key]


def outline(told: list[dict[str, Any]]) -> list[Any]:
    """Events without ids; deltas that follow each other are one."""
    lines: list[Any] = []
    for event in told:
        shown: dict[str, Any] = {"type": event["type"]}
        for key in ("output_index", "content_index", "part", "text", "arguments", "input"):
            if key in event:
                shown[key] = event[key]
        if "item" in event:
            unnamed = ("id", "call_id", "encrypted_content")
            shown["item"] = {k: v for k, v in event["item"].items() if k not in unnamed}
        if "response" in event:
            response = event["response"]
            shown["status"] = response["status"]
            shown["incomplete_details"] = response["incomplete_details"]
        if "delta" in event:
            if lines[-1]["type"] == event["type"]:
                lines[-1]["delta"] += event["delta"]
                continue
            shown["delta"] = event["delta"]
        lines.append(shown)
    return lines


@pytest.mark.parametrize("case", ANSWERS)
def test_events_are_those_of_deepseeks_own_service(client: Client, case: str) -> None:
    answer, fields, cut = ANSWERS[case]
    client.toy.say(answer)
    ours = outline(events(post(client, stream=True, **fields)))
    peer = outline(peer_events("responses", {"input": "Hi", **fields}, answer, cut=cut))
    assert ours == peer


def test_a_call_that_was_cut(client: Client) -> None:
    answer = calls(call("f", ("city", True, "Köln")), call("apply_patch", ("input", True, "+abc")))
    client.toy.say(answer)
    tokens = len(client.toy.tokenizer.encode_with_control(answer))
    tail = len(client.toy.tokenizer.encode_with_control(answer[answer.index("bc</") :]))
    fields: dict[str, Any] = {"tools": [F, PATCH], "max_output_tokens": tokens - tail, **OFF}
    whole = post(client, **fields).json()
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    first, second = whole["output"]
    assert (first["status"], json.loads(first["arguments"])) == ("completed", {"city": "Köln"})
    assert (second["status"], second["input"]) == ("incomplete", "+a")
    assert anonymous(put_together(events(post(client, stream=True, **fields)))) == anonymous(whole)


def test_other_custom_tools_get_their_text_as_well(client: Client) -> None:
    client.toy.say(calls(call("sql", ("input", True, "select 'a'\n"))))
    tool = {"type": "custom", "name": "sql", "description": "Runs SQL.", "format": {"type": "text"}}
    (item,) = post(client, tools=[tool], **OFF).json()["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "sql",
        "select 'a'\n",
    )
    # Not what was asked for, but not lost either.
    client.toy.say(calls(call("sql", ("query", True, "x"))))
    fields: dict[str, Any] = {"tools": [tool], **OFF}
    (item,) = post(client, **fields).json()["output"]
    assert json.loads(item["input"]) == {"query": "x"}
    told = put_together(events(post(client, stream=True, **fields)))
    assert told["output"][0]["input"] == item["input"]


@given(st.text(), st.lists(st.integers(1, 5)), st.lists(st.integers(1, 5)))
def test_raw_input_however_it_is_cut(text: str, written: list[int], read: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode()

    def pieces(whole: str, sizes: list[int]) -> list[str]:
        cut, at = [], 0
        for size in sizes:
            cut.append(whole[at : at + size])
            at += size
        return [*cut, whole[at:]]

    writer = CallWriter(0, "apply_patch")
    arguments = writer.begin("input", string=True)
    arguments += "".join(writer.extend(piece) for piece in pieces(text, written))
    arguments += writer.close()
    raw = RawInput()
    told = "".join(raw.push(piece) for piece in pieces(arguments, read))
    assert told + raw.finish(arguments) == text


def test_log_probabilities(client: Client) -> None:
    client.toy.say("hm</think>ab")
    fields: dict[str, Any] = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = post(client, **fields).json()
    logprobs = whole["output"][1]["content"][0]["logprobs"]
    # As in chat, the mark that ends the reasoning counts with the text.
    assert [entry["token"] for entry in logprobs] == ["</think>", "a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in logprobs)
    told = events(post(client, stream=True, **fields))
    deltas = [e["logprobs"] for e in told if e["type"] == "response.output_text.delta"]
    assert [entry for some in deltas for entry in some] == logprobs
    assert put_together(told)["output"][1]["content"][0]["logprobs"] == logprobs


def test_usage(client: Client) -> None:
    client.toy.say("abc</think>de")
    usage = post(client).json()["usage"]
    assert usage["output_tokens"] == 3 + 1 + 2 + 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


# Requests


def our_prompt(client: Client, body: dict[str, Any]) -> str:
    fields, _ = responses_schema.read(json.dumps({"input": "Hi", **body}).encode())
    read, _, _ = read_responses(fields)
    return render_chat(read_conversation(read.chat, "v4.1"), client.toy.tokenizer).text


PROMPTS: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief."},
    "instructions alone": {"instructions": "Be brief.", "input": None},
    "empty instructions": {"instructions": "", **OFF},
    "developer": {"instructions": "I", "input": [{"role": "developer", "content": "D"}, USER]},
    "system last": {"input": [USER, {"role": "system", "content": "S"}]},
    "parts": {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            }
        ]
    },
    "loop": {"tools": [F], "input": [USER, thought("r"), SAID, FC, FO]},
    "two loops": {"tools": [F], "input": [USER, thought("1"), FC, FO, thought("2"), SAID, USER]},
    "calls together": {
        "tools": [F],
        "input": [USER, FC, {**FC, "call_id": "c2"}, {**FO, "call_id": "c2"}, FO, USER],
    },
    "calls in turn": {
        "tools": [F],
        "input": [USER, FC, FO, {**FC, "call_id": "c2"}, {**FO, "call_id": "c2"}],
    },
    "answers in a row": {"tools": [F], "input": [USER, SAID, SAID, USER]},
    "thoughts in a row": {"tools": [F], "input": [USER, thought("1"), thought("2"), SAID, USER]},
    "thought and answer twice": {
        "tools": [F],
        "input": [USER, thought("1"), SAID, thought("2"), SAID, USER],
    },
    "result in parts": {
        "tools": [F],
        "input": [USER, FC, {**FO, "output": [{"type": "input_text", "text": "p"}]}],
    },
    "reasoning that cannot be read": {
        "tools": [F],
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            SAID,
            USER,
        ],
    },
    "tools of an agent": {"tools": CODEX},
    "patch": {
        "tools": [PATCH],
        "input": [
            USER,
            thought("r"),
            {
                "type": "custom_tool_call",
                "call_id": "c1",
                "name": "apply_patch",
                "input": '*** x\n"y"',
            },
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
    },
    "call in a namespace": {
        "tools": [SPACE],
        "input": [USER, {**FC, "name": "g", "namespace": "mcp"}, FO],
    },
    "bare function": {"tools": [{"type": "function", "name": "f"}]},
    "strict function": {
        "tools": [
            {
                **F,
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            }
        ]
    },
    "no tools wanted": {"tools": [F], "tool_choice": "none"},
    "some tool wanted": {"tools": [F], "tool_choice": "required", **OFF},
    "one tool wanted": {
        "tools": [F, PATCH],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        **OFF,
    },
    "effort": {"reasoning": {"effort": "low", "summary": "auto"}},
    "most effort": {"reasoning": {"effort": "max"}},
    "json": {"input": "json?", "text": {"format": {"type": "json_object"}}},
    "json schema": {
        "text": {
            "format": {
                "type": "json_schema",
                "name": "s",
                "schema": {"type": "object", "properties": {"a": {"type": "string"}}},
            }
        }
    },
    "search of an earlier server": {
        "input": [USER, {"type": "web_search_call", "id": "x", "status": "completed"}, SAID, USER]
    },
    "control tokens spelled": {"input": "<｜User｜></think>"},
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_are_those_of_deepseeks_own_service(client: Client, case: str) -> None:
    body = {"input": "Hi", **PROMPTS[case]}
    assert our_prompt(client, body) == peer_prompt("responses", body)


def test_only_the_allowed_tools_are_offered(client: Client) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    }
    some = our_prompt(client, {"tools": [F, SPACE], "tool_choice": allowed})
    assert some == our_prompt(client, {"tools": [F]})
    allowed = {**allowed, "tools": [{"type": "function", "name": "g", "namespace": "mcp"}]}
    some = our_prompt(client, {"tools": [F, SPACE], "tool_choice": allowed})
    assert some == our_prompt(client, {"tools": [SPACE]})


def test_text_behind_a_call_is_taken(client: Client) -> None:
    late = our_prompt(client, {"tools": [F], "input": [USER, FC, SAID, FO]})
    assert late == our_prompt(client, {"tools": [F], "input": [USER, SAID, FC, FO]})


def test_a_required_call_is_forced(client: Client) -> None:
    client.toy.say("It is fine." + calls(call("f")))
    answer = post(client, tools=[F], tool_choice="required", **OFF).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]


def test_what_changes_nothing_is_named(client: Client) -> None:
    client.toy.say("ok")
    response = post(
        client,
        tools=CODEX,
        include=["reasoning.encrypted_content", "web_search_call.results"],
        truncation="auto",
        user="u",
        background=False,
        text={"verbosity": "low"},
        reasoning={"effort": "none", "summary": "auto", "generate_summary": "auto"},
        input=[USER, {"type": "web_search_call", "id": "x"}],
    )
    assert response.status_code == 200, response.text
    assert set(response.headers["x-deepdraft-ignored"].split(", ")) == {
        *("truncation", "user", "background", "include", "text.verbosity"),
        *("reasoning.summary", "reasoning.generate_summary"),
        *("tools.format", "tools.web_search", "tools.local_shell", "input.web_search_call"),
    }


def test_unknown_keys_below_the_top_level_are_named(client: Client) -> None:
    client.toy.say("ok")
    part = {"type": "input_text", "text": "Hi", "cache": 1}
    first = {"type": "message", "role": "user", "content": [part], "id": None, "colour": "red"}
    space = {"type": "namespace", "name": "n", "tools": [{**F, "inner": 1}], "outer": 1}
    body: dict[str, Any] = {"tools": [{**F, "defer": True}, space], "text": {"tone": "kind"}, **OFF}
    one = post(client, input=[first, {**first, "a b": 1}], **body)
    assert one.status_code == 200, one.text
    assert set(one.headers["x-deepdraft-ignored"].split(", ")) == {
        *("text.tone", "tools.defer", "tools.outer", "tools.tools.inner"),
        *("input.colour", "input.content.cache", "?"),
    }
    # What an earlier request said is not named again.
    client.toy.say("ok")
    two = post(client, input="And?", previous_response_id=one.json()["id"], **OFF)
    assert two.status_code == 200 and "x-deepdraft-ignored" not in two.headers
    # And a header has an end.
    many = {f"k{i}": 1 for i in range(40)}
    client.toy.say("ok")
    other = {**F, "name": "other", **{f"j{i}": 1 for i in range(40)}}
    three = post(client, input=[{**first, **many}], tools=[{**F, **many}, other], **OFF)
    assert len(three.headers["x-deepdraft-ignored"].split(", ")) == 64


# Kept responses


def test_a_response_can_be_asked_for_again(client: Client) -> None:
    client.toy.say("ok")
    one = post(client, **OFF).json()
    assert one["store"] is True
    assert client.get(f"/v1/responses/{one['id']}").json() == one
    (told,) = events(post(client, stream=True, **OFF))[-1:]
    assert client.get(f"/responses/{told['response']['id']}").json() == told["response"]
    assert client.get(f"/v1/responses/{one['id']}?stream=true").status_code == 400
    deleted = client.request("DELETE", f"/v1/responses/{one['id']}")
    assert deleted.json() == {"id": one["id"], "object": "response", "deleted": True}
    for response in (
        client.get(f"/v1/responses/{one['id']}"),
        client.request("DELETE", f"/v1/responses/{one['id']}"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
    unkept = post(client, store=False, **OFF).json()
    assert unkept["store"] is False
    assert client.get(f"/v1/responses/{unkept['id']}").status_code == 404


def test_a_conversation_goes_on_from_a_kept_response(client: Client) -> None:
    prompts = list[str]()

    def model(prompt: str) -> str:
        # The toy asks again for every token.
        if prompt not in prompts:
            prompts.append(prompt)
        return "r</think>" + (f"say\n\n{TWO}" if prompt == prompts[0] else "done")

    client.toy.say(model)

    one = post(client, tools=CODEX, instructions="First.").json()
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": item["name"]}
        for item in one["output"]
        if "call_id" in item
    ]
    assert [r["output"] for r in results] == ["f", "apply_patch", "g"]
    two = post(client, tools=CODEX, input=results, previous_response_id=one["id"]).json()
    assert two["previous_response_id"] == one["id"]
    replayed = [USER, *one["output"], *results]
    assert prompts[1] == our_prompt(client, {"tools": CODEX, "input": replayed})
    three = post(client, tools=CODEX, input="And?", previous_response_id=two["id"])
    assert three.status_code == 200
    replayed += [*two["output"], {"role": "user", "content": "And?"}]
    assert prompts[2] == our_prompt(client, {"tools": CODEX, "input": replayed})


def test_nothing_is_kept_where_nothing_may_be(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"response_retention_s": 0})
    client.toy.say("ok")
    answer = post(client, **OFF).json()
    assert answer["store"] is False
    error = post(client, previous_response_id=answer["id"], **OFF)
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_is_kept_for_the_client_that_made_it(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"api_keys": ("one", "two")})
    client.toy.say("ok")

    def ask(method: str, path: str, key: str, **options: Any) -> Any:
        return client.request(method, path, headers={"authorization": f"Bearer {key}"}, **options)

    body = {"input": "Hi", "temperature": 0, **OFF}
    answer = ask("POST", "/v1/responses", "one", json=body).json()
    path = f"/v1/responses/{answer['id']}"
    further = {**body, "previous_response_id": answer["id"]}
    assert ask("GET", path, "two").status_code == 404
    assert ask("DELETE", path, "two").status_code == 404
    assert ask("POST", "/v1/responses", "two", json=further).status_code == 400
    assert ask("POST", "/v1/responses", "one", json=further).status_code == 200
    assert ask("GET", path, "one").json() == answer


def test_the_store_forgets_by_age_and_by_size() -> None:
    now = 0.0
    store = ResponseStore(10, 1100, clock=lambda: now)
    item = msgspec.Raw(b'"' + b"x" * 98 + b'"')
    for i in range(3):
        store.put(str(i), b"r" * 50, [item] * (i + 1), num_new=1)
    assert store.num_bytes == 3 * (50 + 100) + 100 * 6
    store.put("3", b"r" * 50, [item], num_new=1)
    assert store.get("0") is None and store.get("1") is not None
    now = 9.9
    store.put("4", b"", [], num_new=0)
    now = 10.0
    assert store.get("3") is None and store.get("4") is not None
    assert store.delete("4") and not store.delete("4")
    assert store.num_bytes == 0
    store.put("big", b"r" * 2000, [], num_new=0)
    assert store.get("big") is None and store.num_bytes == 0


def test_a_kept_item_does_not_hold_its_request() -> None:
    body = b'[{"a": 1}' + b" " * 10_000 + b"]"
    (raw,) = msgspec.json.decode(body, type=list[msgspec.Raw])
    store = ResponseStore(10, 10_000)
    store.put("a", b"", [raw], num_new=1)
    kept = store.get("a")
    assert kept is not None and bytes(kept.items[0]) == b'{"a": 1}'
    assert memoryview(kept.items[0]).obj is not memoryview(raw).obj
