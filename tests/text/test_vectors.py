"""The shared vectors: prompts and token ids of all families, parsing of V4.1 and V4."""

import dataclasses
import json
from typing import Any

import pytest

from deepdraft.errors import DeepdraftError, RequestError
from deepdraft.text.filters import StopMatcher
from deepdraft.text.prompt import ParseStart, render_chat, render_fim
from deepdraft.text.request_rules import check_conversation
from tests.text import cases

STAGES = {
    "ReasoningStart": "reasoning",
    "ReasoningContinuation": "reasoning_continuation",
    "ContentContinuation": "content_continuation",
    None: "content",
}

START_DEVIATIONS = {
    # With thinking off, an answer that continues a prefix keeps its leading newlines; the official
    # conversion has no stage for that and drops them. A code prefix needs them.
    "v4.1/prefix-content-thinking-off": "content_continuation",
    "v4/prefix-content-thinking-off": "content_continuation",
}

PARSE_DEVIATIONS: dict[str, dict[str, Any]] = {
    # Arguments are always JSON: text that is not becomes a string.
    "parse/call-bad-json-value": {"tool_calls": [("c", '{"n": "not json"}')]},
    # A repeated parameter keeps its last value (in the stream both appear, and readers of JSON
    # keep the last).
    "parse/duplicate-param": {"tool_calls": [("c", '{"n": 2}')]},
    # Text around the JSON is dropped, not turned into as many spaces as there were chunks.
    "parse/json-fenced": {"content": '{"a": 1}'},
}


def _params(group: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in cases.vectors()[group]]


@pytest.mark.parametrize("case", _params("encode"))
def test_encode(case: dict[str, Any]) -> None:
    tokenizer = cases.published_tokenizer()
    if case["family"] == "fim":
        prompt = render_fim(case["request"]["prompt"], case["request"]["suffix"], tokenizer)
    else:
        request = dict(case["request"])
        if isinstance(request.get("thinking"), bool):  # the encoder's own switch, not a body's
            request["thinking"] = {"type": "enabled" if request["thinking"] else "disabled"}
        prompt = render_chat(cases.conversation(request), tokenizer, case["family"])
    assert prompt.text == case["prompt"]
    assert tokenizer.decode(prompt.token_ids) == case["prompt"]
    if "token_ids" in case:
        assert list(prompt.token_ids) == case["token_ids"]
    if "parse_start" in case:
        expected = case["parse_start"]
        assert prompt.parse_start == ParseStart(
            stage=START_DEVIATIONS.get(case["id"], STAGES[expected["stage"]]),
            tool_calls=expected["tool_calls"],
            in_tool_calls=expected["starts_in_tool_calls"],
            json_output=expected["json_output"],
        )


def _start(start: dict[str, Any]) -> ParseStart:
    return ParseStart(
        stage=STAGES[start.get("thinking_initial_stage")],
        tool_calls=start.get("parse_tool_calls", True),
        in_tool_calls=start.get("starts_in_tool_calls", False),
        json_output=start.get("parse_json_output", False),
    )


@pytest.mark.parametrize("by_character", [False, True], ids=["whole", "by-character"])
@pytest.mark.parametrize("case", _params("parse_text"))
def test_parse_text(case: dict[str, Any], by_character: bool) -> None:
    text = case["output_text"]
    pieces = list(text) if by_character else [text]
    result, parser = cases.parse_text(pieces, _start(case["start"]), case["finish"])
    stop = StopMatcher(case["start"].get("stop_sequences", []))
    content = stop.push(result["content"]) + stop.flush()
    expected = dict(case["expect"])
    expected["tool_calls"] = [(c["name"], c["arguments"]) for c in expected["tool_calls"]]
    deviation = PARSE_DEVIATIONS.get(case["id"], {})
    assert all(expected[key] != value for key, value in deviation.items()), "no deviation any more"
    expected |= deviation
    assert result["reasoning"] == (expected["reasoning_content"] or "")
    assert content == expected["content"]
    calls = [(c.name, c.arguments) for c in parser.tool_calls]
    assert calls == expected["tool_calls"]
    assert parser.finish_reason(case["finish"]) == expected["finish_reason"]
    for (_, whole), (_, streamed) in zip(calls, result["calls"], strict=True):
        assert json.loads(whole) == json.loads(streamed)


@pytest.mark.parametrize("case", _params("parse_token_ids"))
def test_parse_token_ids(case: dict[str, Any]) -> None:
    tokenizer = cases.published_tokenizer()
    pieces = [[i] for i in case["token_ids"]]
    result, parser = cases.parse_ids(pieces, _start(case["start"]), tokenizer)
    message = case["expect"]["message"]
    assert result["reasoning"] == message.get("reasoning_content", "")
    assert result["content"] == message["content"]
    calls = [
        [c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])
    ]
    assert result["calls"] == calls
    assert parser.num_reasoning_tokens == case["expect"]["reasoning_tokens"]
    assert parser.finish_reason("stop") == case["expect"]["finish_reason"]


# Verdict of the rules in this layer on each body of `request_checks`; the rest is up to the server
# (docs/request-checks.md). "lenient": accepted here, refused by the official service.
REQUEST_VERDICTS = {
    "check/plain": "same",
    "check/129 tools": "same",
    "check/bad tool name": "same",
    "check/tool choice without tools": "same",
    "check/tool choice named off": "same",
    "check/parallel false": "same",
    "check/strict tool bad": "same",
    "check/thinking bad": "same",
    "check/disabled + effort": "same",
    "check/chat_template_kwargs": "different",
    "check/rf json_schema noschema": "same",
    "check/no content": "same",
    "check/assistant null": "lenient",
    "check/tool missing response": "same",
    "check/prefix not last": "same",
    "check/name field": "same",
    "check/function role": "same",
    "check/REJECT missing rc w/ tools": "lenient",
    "check/REJECT plain history no tools": "same",
    "check/REJECT tool turn earlier then user": "same",
    "check/REJECT empty rc": "same",
}


@pytest.mark.parametrize("name", REQUEST_VERDICTS)
def test_request_checks(name: str) -> None:
    check = next(c for c in cases.vectors()["request_checks"]["cases"] if c["id"] == name)
    body = {"messages": [{"role": "user", "content": "Hi"}]} | check["body"]
    if name == "check/129 tools":
        body["tools"] = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    refused = None
    try:
        conversation = cases.conversation(body)
        check_conversation(conversation)
        render_chat(conversation, cases.published_tokenizer(), "v4.1")
    except DeepdraftError as error:
        refused = error
        assert error.http_status == 400
        assert error.param
    officially_refused = "rejected" in check
    verdict = REQUEST_VERDICTS[name]
    if verdict == "lenient":
        assert officially_refused and refused is None
        return
    assert (refused is not None) == officially_refused, refused
    if verdict == "different":
        assert conversation.thinking != check["accepted"]["thinking"]
    elif not officially_refused:
        assert conversation.thinking == check["accepted"]["thinking"]


@pytest.mark.parametrize(
    "name", [name for name in REQUEST_VERDICTS if name.startswith("check/REJECT")]
)
def test_missing_reasoning_can_be_refused(name: str) -> None:
    check = next(c for c in cases.vectors()["request_checks"]["cases"] if c["id"] == name)
    conversation = cases.conversation(check["body"])
    if "accepted" in check:
        check_conversation(conversation, missing_reasoning="reject")
        return
    with pytest.raises(RequestError, match="reasoning_content"):
        check_conversation(conversation, missing_reasoning="reject")
    thinking_off = dataclasses.replace(conversation, thinking=False)
    check_conversation(thinking_off, missing_reasoning="reject")


def test_every_request_check_is_in_the_table() -> None:
    table = (cases.DATA.parents[1] / "docs" / "request-checks.md").read_text(encoding="utf-8")
    rows = {}
    for line in table.splitlines():
        columns = [c.strip() for c in line.strip("|").split("|")]
        if len(columns) >= 3 and columns[0].startswith("`check/"):
            rows[columns[0].strip("`")] = columns[1]
    checks = cases.vectors()["request_checks"]["cases"]
    assert sorted(rows) == sorted(c["id"] for c in checks)
    assert set(rows.values()) <= {"same", "lenient", "different"}
    assert {k: rows[k] for k in REQUEST_VERDICTS} == REQUEST_VERDICTS
