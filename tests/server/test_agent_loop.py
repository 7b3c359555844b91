"""A scripted agent: it thinks, calls tools, reads their results, goes on, and answers at last."""

import json
import re
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from .conftest import Live
from .dialects import call, calls

FILES = {"a.txt": "alpha <b> 2>&1", "b.txt": 'beta "quoted"'}


def think(prompt: str) -> str:
    """What the model says, by the results that it has seen."""
    seen = re.findall(r"<tool_result>(.*?)</tool_result>", prompt, re.S)
    if not seen:
        return f"I must look.</think>Looking.\n\n{calls(call('list_files'))}"
    if len(seen) == 1:
        both = [call("read_file", ("path", True, name)) for name in sorted(FILES)]
        return f"Two files.</think>\n\n{calls(*both)}"
    if len(seen) == 3:
        joined = "+".join(re.findall(r"<tool_result>(\w+)", prompt))
        return "Enough.</think>\n\n" + calls(
            call(
                "write_file", ("path", True, "c.txt"), ("text", True, joined), ("mode", False, "1")
            )
        )
    return "It is done.</think>Wrote c.txt."


class Tools:
    """The tools, and what was done with them."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.written: dict[str, str] = {}

    def use(self, name: str, arguments: dict[str, Any]) -> str:
        self.used.append(name)
        if name == "list_files":
            return json.dumps(sorted(FILES))
        if name == "read_file":
            return FILES[arguments["path"]]
        assert arguments["mode"] == 1
        self.written[arguments["path"]] = arguments["text"]
        return "ok"

    def check(self) -> None:
        assert self.used == ["list_files", "read_file", "read_file", "write_file"]
        assert self.written == {"c.txt": "alpha+beta"}


def parameters(**types: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types)}


SPECS = {
    "list_files": parameters(),
    "read_file": parameters(path="string"),
    "write_file": parameters(path="string", text="string", mode="integer"),
}


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_with_the_openai_sdk(
    make_live: Callable[..., Live], stream: bool, keeps_reasoning: bool
) -> None:
    live = make_live(max_tokens=20_000, drafts=True)
    live.toy.say(think)
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": spec}}
        for name, spec in SPECS.items()
    ]
    mine, messages = Tools(), [{"role": "user", "content": "Join the files."}]
    for _ in range(6):
        options: Any = {"model": "toy", "messages": messages, "tools": tools, "temperature": 0}
        if stream:
            message = put_together(client.chat.completions.create(stream=True, **options))
        else:
            message = client.chat.completions.create(**options).choices[0].message.model_dump()
        if not keeps_reasoning:
            message.pop("reasoning_content", None)
        messages.append({k: v for k, v in message.items() if v is not None})
        if not message.get("tool_calls"):
            break
        for one in message["tool_calls"]:
            function = one["function"]
            result = mine.use(function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
    mine.check()
    assert messages[-1]["content"] == "Wrote c.txt."
    client.close()


def put_together(chunks: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    made: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump()
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(made):
                made.append({k: piece[k] for k in ("id", "type", "function")})
            else:
                made[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    assert message["reasoning_content"]
    return {**message, "tool_calls": made or None}


def test_with_the_anthropic_sdk(make_live: Callable[..., Live]) -> None:
    live = make_live(max_tokens=20_000)
    live.toy.say(think)
    client = anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)
    tools: Any = [{"name": name, "input_schema": spec} for name, spec in SPECS.items()]
    mine, messages = Tools(), [{"role": "user", "content": "Join the files."}]
    answer: Any = None
    for _ in range(6):
        with client.messages.stream(
            model="toy",
            messages=messages,
            tools=tools,
            max_tokens=3000,
            extra_body={"temperature": 0},
        ) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})  # type: ignore[dict-item]
        if answer.stop_reason != "tool_use":
            break
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": mine.use(block.name, dict(block.input)),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})  # type: ignore[dict-item]
    mine.check()
    assert answer.content[-1].text == "Wrote c.txt."
    client.close()
