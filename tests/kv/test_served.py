"""Through HTTP: with and without the cache the same requests get the same answers."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deepdraft.text.tokenizer import Tokenizer
from tests.kv.served import Json, Peer, tiny_model, told, toy_tokenizer

SYSTEM = "You are a tiny server. Answer with letters. " * 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


MakePeer = Callable[..., Peer]


@pytest.fixture(scope="module")
def make_peer(tokenizer: Tokenizer) -> Iterator[MakePeer]:
    models, peers = {}, list[Peer]()

    def make(numerics: str = "exact", **options: Any) -> Peer:
        if numerics not in models:
            models[numerics] = tiny_model(tokenizer, numerics)
        peers.append(Peer(tokenizer, models[numerics], numerics=numerics, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


class Walk:
    """Random conversations; every request goes to both servers."""

    def __init__(self, cached: Peer, plain: Peer, seed: int) -> None:
        self.cached, self.plain = cached, plain
        self.random = random.Random(seed)
        self.chats: list[list[Json]] = []
        self.num_cached = 0

    def both(self, path: str, body: Json) -> Json:
        answers = []
        for peer in (self.plain, self.cached):
            answers.append(told(peer.post(path, body)))
        (plain, none), (cached, tokens) = answers
        assert cached == plain
        assert none == 0
        self.num_cached += tokens
        return plain[-1] if isinstance(plain[-1], dict) else {}

    def settings(self) -> Json:
        settings: Json = {"max_tokens": self.random.choice((1, 2, 9, 17))}
        if self.random.random() < 0.5:
            settings["temperature"] = 0
        else:
            settings |= {"temperature": 1.0, "seed": self.random.randrange(99), "top_p": 0.9}
        if self.random.random() < 0.3:
            settings["logprobs"] = True
        if self.random.random() < 0.3:
            settings |= {"stop": ["e"]}
        return settings

    def words(self) -> str:
        return "".join(self.random.choices("abcdef ghij", k=self.random.randrange(1, 40)))

    def chat(self) -> None:
        old = self.random.choice(self.chats) if self.chats else []
        cut = self.random.randrange(len(old) + 1) // 2 * 2 if self.random.random() < 0.4 else None
        history = old[:cut] if old else [{"role": "system", "content": SYSTEM}]
        messages = [*history, {"role": "user", "content": self.words()}]
        thinking = self.random.random() < 0.4
        body: Json = {
            "messages": messages,
            "thinking": {"type": "enabled" if thinking else "disabled"},
            **self.settings(),
        }
        if self.random.random() < 0.3:
            tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
            body["tools"] = [{"type": "function", "function": tool}]
        if self.random.random() < 0.2:
            body["n"] = 2
        message = self.both("/v1/chat/completions", body)["choices"][0]["message"]
        kept = {"role": "assistant", "content": message.get("content") or "x"}
        if thinking and message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
        if sum(len(m["content"]) for m in messages) < 300:
            self.chats.append([*messages, kept])

    def stream(self) -> None:
        if not self.chats:
            return
        messages = [*self.random.choice(self.chats), {"role": "user", "content": "more"}]
        extra = {"stream": True, "stream_options": {"include_usage": True}}
        self.both("/v1/chat/completions", {"messages": messages, **self.settings(), **extra})

    def message(self) -> None:
        if not self.chats:
            return
        history = [m for m in self.random.choice(self.chats) if m["role"] != "system"]
        turns = [{"role": m["role"], "content": m["content"]} for m in history]
        body = {"system": SYSTEM, "messages": [*turns, {"role": "user", "content": "on"}]}
        limits = {"max_tokens": 7, "temperature": 0, "thinking": {"type": "disabled"}}
        self.both("/v1/messages", {**body, **limits})

    def response(self) -> None:
        body = {"instructions": SYSTEM, "input": self.words(), "temperature": 0}
        self.both("/v1/responses", {**body, "max_output_tokens": 6, "store": False})

    def complete(self) -> None:
        shared = SYSTEM[: self.random.choice((30, 31, 80))]
        prompt = [shared + self.words(), shared] if self.random.random() < 0.3 else shared
        settings = self.settings()
        if settings.pop("logprobs", False):
            settings["logprobs"] = 1
        self.both("/v1/completions", {"prompt": prompt, **settings})

    def abort(self) -> None:
        """A client that leaves after the first bytes; then it asks again."""
        messages = [{"role": "user", "content": SYSTEM + self.words()}]
        body = {"messages": messages, "max_tokens": 40, "temperature": 0}
        for peer in (self.cached, self.plain):
            asyncio.run(_leave(peer, {**body, "stream": True}))
        self.both("/v1/chat/completions", {**body, "max_tokens": 5})


async def _leave(peer: Peer, body: Json) -> None:
    """Sends a request and disconnects after the second piece of its answer."""
    gone = asyncio.Event()
    pieces = 0
    request = httpx.Request("POST", "http://tiny/v1/chat/completions", json=body)
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": request.content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal pieces
        pieces += message["type"] == "http.response.body"
        if pieces >= 2:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": request.url.path,
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
    }
    await peer.app(scope, receive, send)


def walk_both(make_peer: MakePeer, numerics: str, prefill: str, seed: int, count: int) -> None:
    cached = make_peer(numerics, prefill=prefill, kv_memory="24MiB")
    plain = make_peer(numerics, prefill=prefill, kv_memory=0)
    walk = Walk(cached, plain, seed)
    kinds = (walk.chat, walk.chat, walk.stream, walk.message, walk.response, walk.complete)
    for _ in range(count):
        walk.random.choice((*kinds, walk.abort))()
    cached.cache.flush()
    cached.cache.check()
    stats = cached.stats()
    assert stats["kv_hits"] > count // 4 and walk.num_cached > 20 * count
    assert stats.get("kv_errors", 0) == 0
    assert stats["kv_pins"] == stats["kv_leases"] == 0
    assert "kv_hits" not in plain.stats()


@pytest.mark.parametrize(("prefill", "seed"), [("full", 1), ("encoder", 2)])
def test_random_requests(prefill: str, seed: int, make_peer: MakePeer) -> None:
    walk_both(make_peer, "exact", prefill, seed, 10)


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["exact", "quant"])
@pytest.mark.parametrize("prefill", ["full", "encoder"])
@pytest.mark.parametrize("seed", range(3, 6))
def test_many_random_requests(numerics: str, prefill: str, seed: int, make_peer: MakePeer) -> None:
    walk_both(make_peer, numerics, prefill, seed, 40)
