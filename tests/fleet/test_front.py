"""A front and engines over real sockets, in one process and without Ray: every API through it, and
what a client sees when the engine that writes its answer is lost."""

import asyncio
import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.server import fleet_link
from deepdraft.server import fleet_wire as wire
from deepdraft.server.app import create_app
from deepdraft.server.fleet_front import FrontService
from deepdraft.server.fleet_link import Links
from deepdraft.server.fleet_node import Node
from deepdraft.server.fleet_registry import Entry, LocalRegistry
from deepdraft.server.fleet_replica import identity_of
from deepdraft.server.fleet_router import Router
from deepdraft.types import GenerateRequest
from tests.server.toy import Toy

ANSWER = "abcdefghijklmnopqrstuvwxyz"
Body = dict[str, Any]


def the_rest(text: str) -> str:
    """What is still to be said where a prompt ends with a part of the answer."""
    end = max(text.rfind(mark) + len(mark) for mark in ("|", "</think>", "<｜Assistant｜>"))
    return ANSWER[len(text[end:]) :]


class Engine:
    """A toy with a port; `at(n, call)` calls on the loop at step n of the engine."""

    def __init__(self, toy: Toy, world: "World", label: str) -> None:
        self.toy, self.world, self.label = toy, world, label
        self.faults: dict[int, Callable[[], object]] = {}
        self.steps = 0
        self.broken = False
        toy.say(the_rest)
        toy.runner.step_fault = self._step

    def _step(self, sequences: object) -> None:
        self.steps += 1
        fault = self.faults.pop(self.steps, None)
        if fault is not None:
            done = asyncio.run_coroutine_threadsafe(self._on_loop(fault), self.world.loop)
            done.result(30)

    async def _on_loop(self, fault: Callable[[], object]) -> None:
        result = fault()
        if isinstance(result, Awaitable):
            await result

    async def start(self, **options: Any) -> None:
        self.toy.service.start()
        assert await asyncio.to_thread(self.toy.service.wait, 30)
        self.steps = 0  # without the warm-up's
        identity = identity_of(self.toy.service, self.label, self.toy_path())
        changed = {n: getattr(identity, n) for n in wire.Identity.__struct_fields__}
        changed |= {"code": "as it was", **options.pop("identity", {})}  # files may be saved
        self.node = Node(
            self.toy.service,
            wire.Identity(**changed),
            options.pop("secret", self.world.registry.secret()),
            **{"resume": self.world.router.resume, "beat_s": 0.1, **options},
        )
        port = await self.node.start("127.0.0.1")
        self.entry = Entry(self.label, self.node.identity.incarnation, "127.0.0.1", port)
        self.world.registry.put(self.entry)

    def toy_path(self) -> Path:
        return self.world.path / self.label

    def die(self) -> None:
        """As a killed process: its connections end, and nothing listens any more."""
        self.world.registry.drop(self.entry.incarnation)
        assert self.node._server is not None
        self.node._server.close()
        for line in list(self.node._lines):
            line.writer.transport.abort()

    def fall_silent(self) -> None:
        """As a stopped process: its connections stay."""
        assert self.node._beats is not None
        self.node._beats.cancel()
        for line in self.node._lines:
            line.write = lambda data: None  # type: ignore[method-assign]


class World:
    """Engines, a front before them, a client of that."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.loop = path, asyncio.get_running_loop()
        self.registry = LocalRegistry()
        self.engine_options = options.pop("engine", {})
        self.server_options = options.pop("server", {})
        self.tls = options.pop("tls", None)
        self.router = Router(**{"resume": True, "patience_s": 10.0, **options})
        self.engines: list[Engine] = []

    async def add(self, label: str, **options: Any) -> Engine:
        (self.path / label).mkdir()
        toy = Toy(self.path / label, engine=self.engine_options, server=self.server_options)
        engine = Engine(toy, self, label)
        self.engines.append(engine)
        await engine.start(**options)
        return engine

    async def open(self) -> None:
        toy = self.engines[0]
        service = FrontService(
            self.router,
            toy.toy.tokenizer,
            toy.node.identity.tokenizer,
            toy.toy.service.config,
            sessions=True,
        )
        self.links = Links(
            self.router,
            self.registry,
            name="f",
            accepts=service.accepts,
            tls=self.tls,
            look_s=0.05,
        )
        await self.links.start()
        self.service = service
        transport = httpx.ASGITransport(app=create_app(service))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=30)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.01)

    async def connected(self, number: int) -> None:
        await self.until(lambda: len(self.router.ready()) == number)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "Hi|", **fields})

    async def post(self, path: str, body: Body) -> httpx.Response:
        return await self.client.post(path, json={"model": "toy", "temperature": 0, **body})

    def where(self) -> Engine:
        """The engine that has a request."""
        [engine] = [e for e in self.engines if e.node.num_requests]
        return engine

    async def close(self) -> None:
        await self.client.aclose()
        await self.links.close()
        for engine in self.engines:
            await engine.node.close()
            await asyncio.to_thread(engine.toy.service.close)
            assert engine.toy.runner.open_handles == set() or engine.broken
        self.router.check()
        assert self.router.num_flights == 0


@contextlib.asynccontextmanager
async def world_of(
    path: Path, number: int = 2, identity: Body | None = None, **options: Any
) -> AsyncIterator[World]:
    world = World(path, **options)
    for i in range(number):
        await world.add(f"e{i}", identity=identity or {})
    await world.open()
    await world.connected(number)
    yield world
    await world.close()


def text_of(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def data_of(answer: httpx.Response) -> list[Body]:
    lines = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data: ")]
    return [json.loads(x) for x in lines if x != "[DONE]"]


def streamed_text(answer: httpx.Response) -> str:
    return "".join(c["choices"][0]["text"] for c in data_of(answer) if c.get("choices"))


def fault_once(world: World, step: int, fault: Callable[[Engine], object]) -> None:
    """On whichever engine comes to its step first."""
    done: list[Engine] = []

    def once(engine: Engine) -> object:
        if done:
            return None
        done.append(engine)
        return fault(engine)

    for engine in world.engines:
        engine.faults[step] = lambda engine=engine: once(engine)


def test_answers_through_a_front(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:
            whole = await world.complete()
            assert text_of(whole) == ANSWER
            assert whole.headers["x-deepdraft-replica"] in ("e0", "e1")
            assert whole.json()["system_fingerprint"] == "fp_toy"
            stream = await world.complete(stream=True, n=2)
            by_choice = ["", ""]
            for chunk in data_of(stream):
                for choice in chunk["choices"]:
                    by_choice[choice["index"]] += choice["text"]
            assert by_choice == [ANSWER, ANSWER] and stream.text.rstrip().endswith("[DONE]")
            stopped = await world.complete(stop="k", logprobs=1)
            assert text_of(stopped) == ANSWER[:10]
            chosen = await world.complete(guided_choice=["yes", "no"])
            assert text_of(chosen) in ("yes", "no")
            messages = [{"role": "user", "content": "Hi"}]
            chat = await world.post("/v1/chat/completions", {"messages": messages, "n": 2})
            assert [c["index"] for c in chat.json()["choices"]] == [0, 1]
            [model] = (await world.client.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("toy", 4096)
            assert (await world.client.get("/readyz")).status_code == 200
            health = (await world.client.get("/healthz")).json()
            assert health["replicas"] == {"ready": 2} and health["state"] == "ready"
            await asyncio.sleep(1.0)  # until statistics came
            metrics = (await world.client.get("/metrics")).text
            assert "deepdraft_generation_tokens_total" in metrics
            assert "deepdraft_time_to_first_token_seconds_count" in metrics

    asyncio.run(run())


def test_refusals_are_the_engines_own(tmp_path: Path) -> None:
    async def run() -> None:
        small = {"max_running": 1, "max_queue": 1}
        async with world_of(tmp_path, engine=small) as world:
            refused = await world.complete(n=5)
            assert refused.status_code == 400 and "5 answers" in refused.json()["error"]["message"]
            for engine in world.engines:
                engine.toy.runner.delay_s = 0.02
            many = await asyncio.gather(*(world.complete() for _ in range(12)))
            states = [a.status_code for a in many]
            assert set(states) == {200, 503} and states.count(200) >= 4
            full = next(a for a in many if a.status_code == 503)
            assert "queue is full" in full.json()["error"]["message"]
            assert full.headers["retry-after"] == "2"
            assert all(text_of(a) == ANSWER for a in many if a.status_code == 200)

    asyncio.run(run())


def test_no_engine_and_an_engine_that_comes(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            world.engines[0].die()
            await world.connected(0)
            assert (await world.client.get("/readyz")).status_code == 503
            none = await world.complete()
            assert none.status_code == 503 and "no replica" in none.json()["error"]["message"]
            assert (await world.client.get("/healthz")).status_code == 200
            await world.add("late")
            await world.connected(1)
            answer = await world.complete()
            assert answer.headers["x-deepdraft-replica"] == "late"

    asyncio.run(run())


@pytest.mark.parametrize("step", [1, 5, 20])
def test_a_stream_goes_on_elsewhere(tmp_path: Path, step: int) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:
            fault_once(world, step, Engine.die)
            answer = await world.complete(
                stream=True, logprobs=0, stream_options={"include_usage": True}
            )
            assert streamed_text(answer) == ANSWER
            assert data_of(answer)[-1]["usage"]["completion_tokens"] == len(ANSWER) + 1
            counts = world.router.counters
            assert counts.get("resumed") + counts.get("retried") == 1
            logprobs = [c["choices"][0].get("logprobs") for c in data_of(answer) if c["choices"]]
            tokens = [t for entry in logprobs if entry for t in entry["tokens"]]
            assert "".join(tokens).startswith(ANSWER)

    asyncio.run(run())


def test_every_clock_on_the_wall_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes' clocks differ and jump: what is told of time is how much is left of it."""
    chance, now = random.Random(5), time.time()
    monkeypatch.setattr(time, "time", lambda: now + chance.uniform(-1e9, 1e9))

    async def run() -> None:
        async with world_of(tmp_path, server={"request_timeout_s": 60.0}) as world:
            fault_once(world, 5, Engine.die)
            assert streamed_text(await world.complete(stream=True)) == ANSWER
            assert world.router.counters.get("resumed") == 1

    asyncio.run(run())


def test_what_nobody_has_seen_goes_on_without_being_asked(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, resume=False) as world:
            fault_once(world, 5, Engine.die)
            assert text_of(await world.complete(n=2)) == ANSWER
            grown = await world.complete(guided_regex="[a-z]{20}")
            assert text_of(grown) == ANSWER[:20]

    asyncio.run(run())


def test_a_form_goes_on_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:
            fault_once(world, 5, Engine.die)
            answer = await world.complete(guided_regex="[a-z]{20}", stream=True)
            assert streamed_text(answer) == ANSWER[:20]

    asyncio.run(run())


CHAT = {"messages": [{"role": "user", "content": "Hi|"}], "stream": True, "max_tokens": 20}
STREAMS = {
    "/v1/completions": {"prompt": "Hi|", "stream": True},
    "/v1/chat/completions": {**CHAT, "thinking": {"type": "disabled"}},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi|", "stream": True, "reasoning": {"effort": "none"}},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_is_lost_ends_with_an_error_of_its_api(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with world_of(tmp_path, resume=False) as world:
            fault_once(world, 5, Engine.die)
            answer = await world.post(path, STREAMS[path])
            assert answer.status_code == 200, answer.text
            last = data_of(answer)[-1]
            shown = json.dumps(last)
            assert "in the middle of its answer" in shown
            if path == "/v1/responses":
                assert last["type"] == "response.failed"
            elif path == "/v1/messages":
                assert last["type"] == "error" and last["error"]["type"] == "api_error"
            else:
                assert last["error"]["type"] == "server_error"
            again = await world.post(path, STREAMS[path])
            assert "error" not in json.dumps(data_of(again)[-1].get("type", ""))

    asyncio.run(run())


def test_an_engine_that_falls_silent_is_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, quiet_s=2.0, hang_s=60.0) as world:
            fault_once(world, 5, Engine.fall_silent)
            answer = await world.complete(stream=True)
            assert streamed_text(answer) == ANSWER
            await world.until(lambda: [s.state for s in world.router.seats].count("quiet") == 1)
            # What waits in its socket is read, and its requests there are cancelled.
            await world.until(lambda: all(not e.node.num_requests for e in world.engines))

    asyncio.run(run())


def test_one_that_leaves_hands_its_streams_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:

            def leave(engine: Engine) -> None:
                engine.node.begin_drain()
                engine.node.give_back()

            fault_once(world, 5, leave)
            assert streamed_text(await world.complete(stream=True)) == ANSWER
            assert sorted(seat.state for seat in world.router.seats) == ["draining", "ready"]
            assert text_of(await world.complete()) == ANSWER

    asyncio.run(run())


def test_one_that_leaves_finishes_what_it_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, resume=False) as world:
            left: list[asyncio.Task[bool]] = []

            def leave(engine: Engine) -> None:
                engine.node.begin_drain()
                left.append(asyncio.create_task(engine.node.wait_idle(30)))

            fault_once(world, 5, leave)
            assert streamed_text(await world.complete(stream=True)) == ANSWER
            assert await left[0] and world.router.counters.get("resumed") == 0

    asyncio.run(run())


def test_an_engine_whose_thread_stops_is_left(tmp_path: Path) -> None:
    def stop(sequences: object) -> None:
        raise SystemExit("the engine's thread ends")

    async def run() -> None:
        async with world_of(tmp_path) as world:
            broken = world.engines[0]
            whole = await asyncio.gather(*(world.complete(stream=True) for _ in range(6)))
            assert all(streamed_text(a) == ANSWER for a in whole)
            broken.toy.runner.step_fault, broken.broken = stop, True
            async with asyncio.timeout(30):
                while broken.node.failure is None:
                    more = await asyncio.gather(*(world.complete(stream=True) for _ in range(6)))
                    assert all(streamed_text(a) == ANSWER for a in more)
            await world.connected(1)
            with pytest.raises(Exception, match="engine has stopped"):
                broken.node.check()

    asyncio.run(run())


def test_a_client_that_goes_ends_its_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            engine = world.engines[0]
            engine.toy.runner.delay_s = 0.05
            remote, view = world.service.ready()
            request = GenerateRequest(request_id="r", prompt_ids=(20, 30), max_new_tokens=1000)
            events = await remote.open([request])
            assert (await anext(events)).token_ids and view.names == ("toy",)
            events.close()
            await world.until(lambda: not engine.node.num_requests)
            await world.until(lambda: engine.toy.service.stats()["running"] == 0)

    asyncio.run(run())


def test_a_front_that_falls_silent_leaves_nothing_on_its_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its machine is lost: nothing ends the connection, and nothing comes any more."""

    async def run() -> None:
        async with world_of(tmp_path, 1, patience_s=0.1) as world:
            engine = world.engines[0]
            [line] = engine.node._lines
            line.silent_s = 15.0
            await world.until(lambda: line.silent_s < 10)  # a sign of life came
            engine.toy.runner.delay_s = 0.02
            asked = asyncio.create_task(world.complete(stream=True))
            await world.until(lambda: engine.node.num_requests == 1)
            for task in world.links._tasks:  # signs of life, and the look at the registry
                task.cancel()
            world.links._known.clear()
            line.silent_s = 19.5
            await world.until(lambda: not engine.node._lines)
            assert engine.node.num_requests == 0
            await world.until(lambda: engine.toy.service.stats()["running"] == 0)
            await world.until(lambda: world.router.tick() or asked.done())
            assert "no replica can go on" in data_of(await asked)[-1]["error"]["message"]

    logging.getLogger("deepdraft").propagate = True
    asyncio.run(run())
    assert "front f has said nothing for 2" in caplog.text


def test_where_nobody_listens_any_more_there_is_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was killed cannot take itself out of the registry; one that lives comes back."""
    monkeypatch.setattr(fleet_link, "REFUSED_S", 0.2)

    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                world.registry.put(Entry("dead", "i", "127.0.0.1", closed.getsockname()[1]))
                await world.until(lambda: "i" in world.links._kept)
                await world.until(lambda: "i" not in world.registry.found)
            assert world.registry.entries() == [world.engines[0].entry]

    logging.getLogger("deepdraft").propagate = True
    asyncio.run(run())
    assert "replica dead could not be used" in caplog.text
    assert "(ConnectionRefusedError)" in caplog.text


def test_what_this_front_does_not_use_stays_there_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a fleet is upgraded to a model with another tokenizer, fronts of both versions run."""
    monkeypatch.setattr(fleet_link, "FORGET_S", 0.2)
    monkeypatch.setattr(fleet_link, "_LONGEST_PAUSE_S", 0.01)
    looks: list[float] = []

    def accepts(identity: wire.Identity) -> bool:
        looks.append(time.monotonic())
        return False

    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            other = Links(world.router, world.registry, name="o", accepts=accepts, look_s=0.05)
            await other.start()
            await world.until(lambda: bool(looks) and looks[-1] - looks[0] > 0.6)
            assert world.registry.entries() == [world.engines[0].entry]
            await other.close()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore")
def test_strangers_and_strange_engines_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            await world.add("liar", secret=b"x" * 32)
            await world.add("foreign", identity={"tokenizer": "another", "version": "9.9"})
            other = await world.add("newer", identity={"fingerprint": "fp_new"})
            await world.connected(2)
            labels = {seat.label for seat in world.router.ready()}
            assert labels == {"e0", "newer"}
            prints = {(await world.complete()).json()["system_fingerprint"] for _ in range(20)}
            assert prints == {"fp_toy", "fp_new"}
            await world.until(lambda: "foreign" in caplog.text)
            # Someone who does not know the secret.
            reader, writer = await asyncio.open_connection("127.0.0.1", other.entry.port)
            greeting = await wire.read_to_front(reader)
            assert isinstance(greeting, wire.Greet)
            writer.write(wire.frame(wire.Prove("me", b"n" * 32, b"p" * 32)))
            assert await reader.read() == b""
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", other.entry.port)
            writer.write(b"\xff\xff\xff\xff" + b"x" * 100)
            await reader.read()
            assert reader.at_eof()
            writer.close()

    with caplog.at_level(logging.WARNING, "deepdraft"):
        logging.getLogger("deepdraft").propagate = True
        asyncio.run(run())
    assert "deepdraft 9.9" in caplog.text and "does not know the fleet's secret" in caplog.text


def test_a_session_is_prepared_by_the_engine_that_takes_it(tmp_path: Path) -> None:
    class Sessions:
        def __init__(self) -> None:
            self.prepared: list[tuple[str, int, str]] = []

        def prepare(self, key: str, token_ids: Any, trace: str) -> None:
            self.prepared.append((key, len(token_ids), trace))

    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            here = Sessions()
            service = type("Shared", (type(world.engines[0].toy.service),), {"fleet": here})
            world.engines[0].toy.service.__class__ = service
            answer = await world.client.post(
                "/v1/completions",
                json={"prompt": "Hi|"},
                headers={"X-Session-ID": "s", "X-Request-Id": "trace-me"},
            )
            assert answer.status_code == 200
            [(key, size, trace)] = here.prepared
            assert len(key) == 64 and size >= 3 and trace == "trace-me"

    asyncio.run(run())


def test_a_fleet_with_certificates_speaks_tls(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from deepdraft.kv.fleet_files import init_fleet, load_fleet

    init_fleet(tmp_path / "files", ["one"], ["127.0.0.1"])
    files = load_fleet(tmp_path / "files" / "nodes" / "one")

    async def run() -> None:
        world = World(tmp_path, tls=files.client_tls)
        await world.add("e0", tls=files.server_tls)
        await world.add("plain")
        await world.open()
        await world.connected(1)
        answer = await world.complete()
        assert text_of(answer) == ANSWER and answer.headers["x-deepdraft-replica"] == "e0"
        await world.close()

    asyncio.run(run())
