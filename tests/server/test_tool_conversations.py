"""200 scripted conversations with tools: every call is parsed, its arguments are valid JSON and
those that were meant, in three APIs, streamed and whole, with and without thinking and drafts."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Client
from .dialects import call, calls, events
from .toy import Toy

NUM = 200
# What models write into arguments: markup of their own and of others, quotes, other alphabets.
STRINGS = (
    *("Rome", "", " ", "a b", "2>&1 | tee 'x' > \"y\"", "<b>bold</b>", "</think>", "< ", "</"),
    *('{"a": 1}', "[1, 2", "null", "true", "3", "\n\n", "line\nline\n", "\ttab", "back\\slash"),
    *(
        "é🎉日本",
        "x" * 50,
        'say "hi"',
        "<｜DSML｜",
        "</｜DSML",
        "<invoke>",
        "if a < b && c > d: ...",
    ),
)
VALUES: tuple[Any, ...] = (
    *(0, -7, 3.5, 10**20, True, False, None, [], {}, [1, "a", [None]], {"k": {"n": [1, 2]}}),
    {"text": 'q"uote', "list": [{"a": 1}, {"b": None}]},
)
NAMES = ("get_weather", "run", "search-docs", "f", "write_file_2")
KEYS = ("city", "n", "command", "path", "größe", "opts", "x-y", "q")


class Script:
    """One conversation: what the model says in each turn, and what that means."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.thinking = rng.random() < 0.5
        self.stream = rng.random() < 0.6
        self.tools = [
            {
                "name": name,
                "description": "A tool.",
                "parameters": {"type": "object", "properties": {k: {} for k in KEYS}},
            }
            for name in rng.sample(NAMES, rng.randint(1, 4))
        ]
        self.turns = [self._turn() for _ in range(rng.randint(1, 3))]

    def _turn(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """What the model writes, and the calls in it."""
        rng, meant, written = self.rng, [], []
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(self.tools)["name"]
            arguments: dict[str, Any] = {}
            parameters = []
            for key in rng.sample(KEYS, rng.randint(0, 4)):
                if rng.random() < 0.6:
                    value = rng.choice(STRINGS)
                    parameters.append((key, True, value))
                else:
                    value = rng.choice(VALUES)
                    parameters.append((key, False, json.dumps(value, ensure_ascii=False)))
                arguments[key] = value
            meant.append((name, arguments))
            written.append(call(name, *parameters))
        text = rng.choice(("", "", "Let me look.", "Grüße 🎉 <b>"))
        reasoning = rng.choice(("", "I should look.", "a < b\n")) if self.thinking else ""
        head = f"{reasoning}</think>" if self.thinking else ""
        return f"{head}{text}\n\n{calls(*written)}", meant


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "drafted"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    toy = Toy(tmp_path_factory.mktemp("toy"), max_tokens=60_000, drafts=request.param)
    toy.service.start()
    assert toy.service.wait(60)
    yield Client(toy)
    toy.service.close()
    assert not toy.runner.open_handles


Called = list[tuple[str, str, str]]
"""Id, name and arguments of each call."""


class Chat:
    """A conversation in chat completions."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]

    def ask(self, client: Client) -> Called:
        script = self.script
        tools = [{"type": "function", "function": tool} for tool in script.tools]
        body = {
            "messages": self.messages,
            "tools": tools,
            "thinking": {"type": "enabled" if script.thinking else "disabled"},
            "temperature": 0,
            "stream": script.stream,
        }
        response = client.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        message = streamed(response.text) if script.stream else whole(response.json())
        self.messages.append(message)
        return [
            (c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls", ())
        ]

    def results(self, called: Called) -> None:
        for call_id, name, _ in called:
            self.messages.append(
                {"role": "tool", "tool_call_id": call_id, "content": f"result of {name}"}
            )


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    wanted = "tool_calls" if choice["message"].get("tool_calls") else "stop"
    assert choice["finish_reason"] == wanted
    return choice["message"]


def streamed(text: str) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    made: list[dict[str, Any]] = []
    reason = None
    for line in text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        reason = choice["finish_reason"] or reason
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(made):
                made.append({k: piece[k] for k in ("id", "type", "function")})
            else:
                made[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    assert reason == ("tool_calls" if made else "stop")
    return {**message, "tool_calls": made} if made else message


class Messages:
    """A conversation in Anthropic's Messages."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]

    def ask(self, client: Client) -> Called:
        script = self.script
        tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in script.tools
        ]
        body = {
            "messages": self.messages,
            "tools": tools,
            "max_tokens": 20_000,
            "thinking": {"type": "enabled" if script.thinking else "disabled"},
            "temperature": 0,
        }
        response = client.post("/v1/messages", body)
        assert response.status_code == 200, response.text
        answer = response.json()
        self.messages.append({"role": "assistant", "content": answer["content"]})
        used = [b for b in answer["content"] if b["type"] == "tool_use"]
        assert answer["stop_reason"] == ("tool_use" if used else "end_turn")
        return [(b["id"], b["name"], json.dumps(b["input"])) for b in used]

    def results(self, called: Called) -> None:
        content = [
            {"type": "tool_result", "tool_use_id": call_id, "content": f"result of {name}"}
            for call_id, name, _ in called
        ]
        self.messages.append({"role": "user", "content": content})


class Responses:
    """A conversation in OpenAI's Responses, each turn going on from the last one."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.input: Any = "Go on."
        self.last: str | None = None

    def ask(self, client: Client) -> Called:
        script = self.script
        body = {
            "input": self.input,
            "previous_response_id": self.last,
            "tools": [{"type": "function", **tool} for tool in script.tools],
            "reasoning": {"effort": "high" if script.thinking else "none"},
            "temperature": 0,
            "stream": script.stream,
        }
        response = client.post("/v1/responses", body)
        assert response.status_code == 200, response.text
        answer = events(response)[-1]["response"] if script.stream else response.json()
        assert answer["status"] == "completed"
        self.last = answer["id"]
        used = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["call_id"], item["name"], item["arguments"]) for item in used]

    def results(self, called: Called) -> None:
        self.input = [
            {"type": "function_call_output", "call_id": call_id, "output": f"result of {name}"}
            for call_id, name, _ in called
        ]


APIS: tuple[Callable[[Script], Any], ...] = (Chat, Messages, Responses)


NUM_PARTS = 20
PARTS = [pytest.param(i, marks=[pytest.mark.full] if i > 2 else []) for i in range(NUM_PARTS)]


@pytest.mark.parametrize("part", PARTS)
def test_every_call_is_parsed_and_valid(client: Client, part: int) -> None:
    # A quarter of them is drafted: that is many times slower here.
    drafted = hasattr(client.toy.runner, "block_size")
    for seed in range(part * NUM // NUM_PARTS, (part + 1) * NUM // NUM_PARTS):
        if (seed % 4 == 3) == drafted:
            talk(client, seed)


def talk(client: Client, seed: int) -> None:
    script = Script(seed)
    conversation = APIS[seed % 3](script)
    for written, meant in script.turns:
        client.toy.say(written)
        called = conversation.ask(client)
        found = [(name, json.loads(arguments)) for _, name, arguments in called]
        assert found == meant, f"conversation {seed}: {written}"
        assert len({call_id for call_id, _, _ in called}) == len(called)
        conversation.results(called)
    client.toy.say(("done</think>" if script.thinking else "") + "All done.")
    assert conversation.ask(client) == []
