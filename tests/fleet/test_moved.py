"""Answers of every kind that are taken from their engine in the middle and go on in another one:
what the client reads is what it would have been."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.fleet.test_front import ANSWER, Body, Engine, World, data_of, fault_once, world_of
from tests.server.dialects import CALLS_CLOSE, CALLS_OPEN

CALL = (
    f'{CALLS_OPEN}<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Köln</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    f"</｜DSML｜ invoke>\n{CALLS_CLOSE}"
)
PARAMETERS: Body = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
JSON = '{"city": "Bonn", "days": 12}'
PLAIN = {"thinking": {"type": "disabled"}}
USAGE = {"stream_options": {"include_usage": True}}
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
THOUGHT = f"I think so.</think>Well, {ANSWER}"
DRAWN = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CASES: list[tuple[str, str | None, Body]] = [
    (TEXT, ANSWER, {"prompt": ["Hi|", "Ho|"], "n": 2, **USAGE}),
    (TEXT, ANSWER, {"prompt": "Hi|", "logprobs": 3, "stop": ["xyz", "mno"]}),
    (TEXT, ANSWER, {"prompt": "Hi|", "guided_regex": "[a-z]{20}"}),
    (TEXT, None, {"prompt": "Hi|", "logprobs": 2, **DRAWN}),
    (TEXT, None, {"prompt": "Hi|", "n": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, **DRAWN}),
    (TEXT, None, {"prompt": "Hi|", "presence_penalty": 1.5, "repetition_penalty": 1.2, **DRAWN}),
    (CHAT, ANSWER, {**ASK, **PLAIN, "logprobs": True, "top_logprobs": 2, **USAGE}),
    (CHAT, THOUGHT, {**ASK, **USAGE}),
    (CHAT, f"Let me see.\n\n{CALL}", {**ASK, **PLAIN, "tools": TOOLS, "n": 2}),
    (CHAT, CALL, {**ASK, **PLAIN, "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, JSON, {**ASK, **PLAIN, "response_format": FORM}),
    (CHAT, f"hm</think>{JSON}", {**ASK, "response_format": FORM}),
    (MESSAGES, THOUGHT, {**ASK, "max_tokens": 60}),
    (MESSAGES, ANSWER, {**ASK, **PLAIN, "max_tokens": 60, "stop_sequences": ["mno"]}),
    (RESPONSES, THOUGHT, {"input": "Hi"}),
    (RESPONSES, ANSWER, {"input": "Hi", "reasoning": {"effort": "none"}}),
]
OWN = {
    *("id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id"),
    *(
        "sequence_number",
        "signature",
        "encrypted_content",
        "timings",
        "speculation",
        "obfuscation",
        "text_offset",
    ),
}
"""Of one answer, or of the way in which it was cut into events."""


def rest_of(answer: str) -> Callable[[str], str]:
    """What is still to be said where a prompt ends with a part of the answer."""

    def rest(text: str) -> str:
        *_, last = re.finditer(r"<｜Assistant｜>(?:<think>|</think>)?|\|", text)
        so_far = text[last.end() :]
        assert answer.startswith(so_far), so_far
        return answer[len(so_far) :]

    return rest


def merged(answer: httpx.Response) -> Body:
    """A stream as one whole, whatever pieces it came in."""
    whole: Body = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict):
            number = value.get("index", value.get("output_index", ""))
            for name, inner in value.items():
                if name not in OWN:
                    add(f"{key}.{number}{name}", inner)
        elif isinstance(value, list):
            for inner in value:
                add(f"{key}[]", inner)
        elif isinstance(value, str) and key.endswith(("text", "delta", "content", "arguments")):
            whole[key] = whole.get(key, "") + value
        elif value is not None and key.endswith(("[]", "token", "logprob", "bytes")):
            whole.setdefault(key, []).append(value)
        elif value is not None:
            whole[key] = value

    assert answer.status_code == 200, answer.text
    for event in data_of(answer):
        add(str(event.get("type", "")), event)
    return whole


def num_moved(world: World) -> int:
    counters = world.router.counters
    return counters.get("resumed") + counters.get("retried")


def give_back(engine: Engine) -> None:
    engine.node.give_back()


async def whole_of(world: World, path: str, body: Body) -> Body:
    """The answer, when no engine has anything of it any more."""
    whole = merged(await world.post(path, {**body, "stream": True}))
    await world.until(
        lambda: all(
            not e.node.num_requests and e.toy.service.stats()["running"] == 0 for e in world.engines
        )
    )
    return whole


def test_answers_of_every_kind_are_the_same_after_they_have_moved(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:
            for path, answer, body in CASES:
                for engine in world.engines:
                    engine.toy.say("" if answer is None else rest_of(answer))
                    engine.toy.runner.strength = 0.0 if answer is None else 40.0
                expected = await whole_of(world, path, body)
                for step in (1, 4, 10):
                    before = num_moved(world)
                    for engine in world.engines:
                        engine.steps = 0
                    fault_once(world, step, give_back)
                    got = await whole_of(world, path, body)
                    assert got == expected, (path, body, step)
                    assert num_moved(world) > before, (path, body, step)
                    for engine in world.engines:
                        engine.faults.clear()
            assert world.router.counters.get("resumed") > len(CASES)

    asyncio.run(run())
