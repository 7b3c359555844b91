"""Replicas as processes of their own, without Ray, behind a front in this one: engines of several
ranks that are killed, and conversations that a replica leaves on disk for the next one."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.server.app import create_app
from deepdraft.server.fleet_config import load_fleet_file
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_front import FrontService, tokenizer_of
from deepdraft.server.fleet_link import Links
from deepdraft.server.fleet_router import Router
from tests.fleet.replica_main import FolderRegistry
from tests.parallel.living import alive
from tests.parallel.served import write_served

MAIN = Path(__file__).parent / "replica_main.py"
ROOT = str(Path(__file__).parents[2])
PATIENCE_S = 120
TWO_RANKS = 'model = "{}"\n[engine]\ntp = 2\nschedule = "all"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("served") / "model")


class Running:
    """One replica's process and its log."""

    def __init__(self, world: "World", label: str) -> None:
        self.log = world.place / f"{label}.log"
        words = [sys.executable, str(MAIN), str(world.file), label, str(world.registry.folder)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
                stdin=subprocess.PIPE,
                stderr=log,
            )

    def ranks(self) -> list[int]:
        """Processes that it has started."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for listed in tasks for pid in listed.read_text().split()]

    def leave(self) -> int:
        """Its exit code, when it has left as it was asked to."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


class World:
    """Replicas, a front, a client."""

    def __init__(self, place: Path, settings: str) -> None:
        self.place, self.file = place, place / "fleet.toml"
        self.file.write_text(f"{settings}\n[replicas]\nselftest = false\nresume = true\n")
        self.fleet = load_fleet_file(self.file)
        (place / "registry").mkdir()
        self.registry = FolderRegistry(place / "registry")
        self.replicas: list[Running] = []

    def start(self, label: str) -> Running:
        self.replicas.append(Running(self, label))
        return self.replicas[-1]

    async def ready(self, number: int) -> None:
        await self.until(lambda: len(self.router.ready()) == number)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                for replica in self.replicas:
                    assert replica.process.poll() in (None, 0, -9), replica.log.read_text()
                await asyncio.sleep(0.02)

    async def seat_of(self, tokens: int) -> Seat:
        """Where a request is that has so many tokens."""

        def found() -> list[Seat]:
            seats = self.router.seats
            return [s for s in seats if any(len(f.tokens) >= tokens for f in s.flights.values())]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return answer


@contextlib.asynccontextmanager
async def world_of(place: Path, settings: str) -> AsyncIterator[World]:
    world = World(place, settings)
    assert world.fleet.model is not None
    tokenizer, digest = tokenizer_of(Path(world.fleet.model))
    world.router = Router(resume=True, patience_s=PATIENCE_S)
    service = FrontService(world.router, tokenizer, digest, world.fleet.config)
    links = Links(world.router, world.registry, name="f", accepts=service.accepts, look_s=0.05)
    await links.start()
    transport = httpx.ASGITransport(app=create_app(service))
    world.client = httpx.AsyncClient(transport=transport, base_url="http://f", timeout=PATIENCE_S)
    try:
        yield world
    finally:
        await world.client.aclose()
        await links.close()
        for replica in world.replicas:
            replica.process.kill()
            replica.process.communicate()


def text_of(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_replica_of_two_ranks_ends_when_one_is_killed(
    number: int, model: Path, tmp_path: Path
) -> None:
    """What it was doing goes on in another replica, if there is one."""

    async def run() -> None:
        async with world_of(tmp_path, TWO_RANKS.format(model)) as world:
            replicas = {label: world.start(label) for label in "ab"[:number]}
            await world.ready(number)
            ranks = {label: replica.ranks() for label, replica in replicas.items()}
            assert all(len(r) == 1 for r in ranks.values()), "rank 0 is the replica itself"
            growing = asyncio.create_task(world.complete("Hello there", 150))
            seat = await world.seat_of(5)
            lost = replicas.pop(seat.label)
            os.kill(ranks[seat.label][0], signal.SIGKILL)
            assert await asyncio.to_thread(lost.process.wait, PATIENCE_S) == 3
            assert re.search(r"replica .: rank 1 .*was killed by SIGKILL", lost.log.read_text())
            for other in replicas.values():
                true = await world.complete("Hello there", 150)
                assert text_of(await growing) == text_of(true), "it went on where it was"
                assert await asyncio.to_thread(other.leave) == 0
            assert not any(alive(pid) for found in ranks.values() for pid in found)
            growing.cancel()

    asyncio.run(run())


def test_ranks_end_with_their_replica(model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, TWO_RANKS.format(model)) as world:
            replica = world.start("a")
            await world.until(lambda: len(replica.ranks()) == 1)  # also while it loads
            [rank] = replica.ranks()
            replica.process.kill()
            await world.until(lambda: not alive(rank))

    asyncio.run(run())


def nobody() -> int:
    """A port on which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return closed.getsockname()[1]


def test_a_replica_finds_the_conversations_that_another_left_on_disk(
    model: Path, tmp_path: Path
) -> None:
    """And serves from them, though the directory by which they would be shared does not answer."""

    async def run() -> None:
        settings = (
            f'model = "{model}"\n[engine]\nschedule = "all"\nkv_memory = "16MiB"\n'
            f'kv_spill = "{tmp_path}/s"\n[fleet]\ndirectory = "redis://:word@127.0.0.1:{nobody()}"'
        )
        async with world_of(tmp_path, settings) as world:
            first = world.start("a")
            await world.ready(1)
            prompt = "All that was said so far. " * 20
            begun = await world.complete(prompt, 40)
            assert await asyncio.to_thread(first.leave) == 0
            kept = list((tmp_path / "s" / "deepdraft" / "replica-0").glob("*/*.ddkv"))
            assert kept, "nothing was written"
            world.start("b")
            await world.ready(1)
            more = await world.complete(prompt + text_of(begun) + " And now", 10)
            details = more.json()["usage"]["prompt_tokens_details"]
            assert details["cache_source"] == "disk" and details["cached_tokens"] > 100
            logs = "".join(replica.log.read_text() for replica in world.replicas)
            assert "directory" in logs and "word" not in logs, logs

    asyncio.run(run())
