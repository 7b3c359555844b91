"""Fixtures: the toy service, in-process and on a real socket."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.server.app import create_app
from deepdraft.server.run import Server
from tests.known_costs import costs_are_measured_once

from .toy import Toy

__all__ = ["costs_are_measured_once"]


class Client:
    """A synchronous in-process client of a toy's application."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self._app = create_app(toy.service)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        import asyncio

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
                return await client.request(method, path, timeout=30, **options)

        return asyncio.run(run())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, **fields}
        return self.post("/v1/completions", body)


@pytest.fixture
def make_toy(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    """Makes toys and ends their engines after the test."""
    toys: list[Toy] = []

    def make(**options: Any) -> Toy:
        directory = tmp_path / f"toy{len(toys)}"
        directory.mkdir()
        toys.append(Toy(directory, **options))
        return toys[-1]

    yield make
    for toy in toys:
        toy.service.close()
        engine = toy.service._engine
        if engine is not None:
            engine._scheduler.check()
            assert engine._scheduler.idle, "the engine still holds requests"
        assert toy.runner.open_handles == set(), "a sequence was never closed"


@pytest.fixture
def make_client(make_toy: Callable[..., Toy]) -> Callable[..., Client]:
    """Makes clients of loaded toys."""

    def make(**options: Any) -> Client:
        toy = make_toy(**options)
        toy.service.start()
        assert toy.service.wait(30)
        assert toy.service.state == "ready", toy.service.failure
        return Client(toy)

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    """A client of a loaded toy."""
    return make_client()


class Live:
    """A toy on a real socket, served by a thread."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.server = Server(toy.service)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self) -> None:
        self.thread.start()
        deadline = threading.Event()
        for _ in range(2000):
            if self.server.started:
                return
            deadline.wait(0.01)
        raise AssertionError("the server did not start")

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.toy.service.cancel_all()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def make_live(make_toy: Callable[..., Toy]) -> Iterator[Callable[..., Live]]:
    """Makes toys on real sockets; without `wait` loading waits for the toy's gate."""
    lives: list[Live] = []

    def make(*, wait: bool = True, **options: Any) -> Live:
        options["server"] = {"port": 0, **options.get("server", {})}
        live = Live(make_toy(**options))
        if not wait:
            live.toy.gate.clear()
        lives.append(live)
        live.start()
        if wait:
            assert live.toy.service.wait(30)
        return live

    yield make
    for live in lives:
        live.stop()
