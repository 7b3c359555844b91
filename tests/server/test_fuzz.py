"""Random bodies made from the OpenAPI document, mostly near to right ones: no answer is a 500."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deepdraft.server import openapi
from deepdraft.server.app import create_app

from .toy import Toy

DOCUMENT = json.loads(openapi.document())
TEXTS = (
    *("", "Hi", "user", "assistant", "system", "tool", "function", "text", "auto", "f", "toy"),
    *(
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜DSML｜ calls>\n",
        "\x00",
        "é🎉",
        "x" * 300,
        "a\nb",
        "json",
    ),
)
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 5, 20, 0.5, 1.5, 1e300, -1e-300, 2**31, 2**63, 10**30)


class Maker:
    """Random values of schemas."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wild = self.rng.choice((0.0, 0.0, 0.02, 0.1))
        """How often a value is of some other schema."""

    def junk(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(7 if depth < 3 else 4)
        if kind < 4:
            return (None, self.rng.random() < 0.5, self.text(), self.rng.choice(NUMBERS))[kind]
        if kind == 4:
            return [self.junk(depth + 1) for _ in range(self.rng.randrange(4))]
        return {self.text(): self.junk(depth + 1) for _ in range(self.rng.randrange(4))}

    def text(self) -> str:
        return self.rng.choice(TEXTS)

    def make(self, schema: Any, depth: int = 0) -> Any:
        if self.rng.random() < self.wild:
            return self.junk()
        if "$ref" in schema:
            return self.make(
                DOCUMENT["components"]["schemas"][schema["$ref"].split("/")[-1]], depth
            )
        for key in ("anyOf", "oneOf"):
            if key in schema:
                options = schema[key]
                if depth > 6:
                    options = [o for o in options if o.get("type") == "null"] or options
                return self.make(self.rng.choice(options), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            high = 0 if depth > 6 else 3
            return [
                self.make(schema.get("items", {}), depth + 1)
                for _ in range(self.rng.randrange(high + 1))
            ]
        if kind == "string":
            return self.text()
        if kind in ("integer", "number"):
            return self.rng.choice((0, 1, 1, 1, 2, 5) if self.rng.random() < 0.8 else NUMBERS)
        return {"boolean": self.rng.random() < 0.5, "null": None}.get(kind, self.junk())

    def object(self, schema: Any, depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        chance = self.rng.choice((0.02, 0.1, 0.3))
        made = {
            name: self.make(one, depth + 1)
            for name, one in properties.items()
            if (name in required and self.rng.random() > self.wild) or self.rng.random() < chance
        }
        more = schema.get("additionalProperties")
        if isinstance(more, dict) or self.rng.random() < self.wild:
            made[self.text()] = self.make(more if isinstance(more, dict) else {}, depth + 1)
        return made


POSTS = [
    (path, operation["requestBody"]["content"]["application/json"]["schema"])
    for path, operations in DOCUMENT["paths"].items()
    for operation in operations.values()
    if "requestBody" in operation
]


def request(seed: int) -> tuple[str, str, bytes]:
    """Method, path and body."""
    maker = Maker(seed)
    rng = maker.rng
    if rng.random() < 0.03:
        path = rng.choice(list(DOCUMENT["paths"]))
        for name in ("{id}", "{name}"):
            path = path.replace(
                name, rng.choice(("toy", "x", "%00", "a/b", "é", "resp_" + "0" * 32))
            )
        return rng.choice(("GET", "DELETE", "PUT")), path, b""
    path, schema = rng.choice(POSTS)
    body = maker.make(schema)
    if isinstance(body, dict) and rng.random() < 0.7:
        # Whole conversations, so that what lies behind the first checks is reached as well.
        body |= sane(path, rng)
        body.pop("model", None)
    content = json.dumps(body).encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(content))
        content = rng.choice(
            (content[:at], content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :])
        )
    return "POST", path, content


def sane(path: str, rng: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": rng.choice(TEXTS) or "x"}]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": "ok"}, *messages]
    if "responses" in path:
        return {"input": rng.choice(("Hi", messages)), "previous_response_id": None}
    if "chat" in path or "messages" in path:
        return {"messages": messages}
    if path == "/v1/completions":
        return {"prompt": rng.choice(("Hi", ["a", "b"], [5, 6]))}
    return {}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    toy = Toy(tmp_path_factory.mktemp("toy"), max_tokens=2000)
    answers = ("ok", "r</think>ok", '{"a": 1}', "ok</think>", "\n\n<｜DSML｜ calls>\n")
    toy.say(lambda prompt: answers[len(prompt) % len(answers)])
    toy.service.start()
    assert toy.service.wait(60)
    yield toy
    toy.service.close()
    assert not toy.runner.open_handles


def check(response: httpx.Response, stream: bool) -> None:
    assert response.status_code in (200, 400, 404, 405), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"], response.text
        assert "internal error" not in response.text
    elif stream:
        assert "internal error" not in response.text and "server_error" not in response.text


async def run(toy: Toy, seeds: range) -> Counter[int]:
    transport = httpx.ASGITransport(app=create_app(toy.service), raise_app_exceptions=True)
    found: Counter[int] = Counter()
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        for seed in seeds:
            method, path, content = request(seed)
            response = await client.request(method, path, content=content, timeout=60)
            try:
                check(response, "event-stream" in response.headers.get("content-type", ""))
            except (AssertionError, ValueError, KeyError, TypeError) as error:
                raise AssertionError(f"seed {seed}: {method} {path} {content[:2000]!r}") from error
            found[response.status_code] += 1
    return found


def test_300_random_requests(toy: Toy) -> None:
    found = asyncio.run(run(toy, range(300)))
    assert found[200] > 60 and found[400] > 60, "the requests are no good mixture"


@pytest.mark.full
def test_5000_random_requests(toy: Toy) -> None:
    found = asyncio.run(run(toy, range(1000, 6000)))
    assert found[200] > 1000 and found[400] > 1000, found
