"""Limits of keys over a fleet: several servers with one real Redis, and Redis at its worst.

Redis tests start `redis-server` on a Unix socket each; without one they are skipped."""

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.config import ApiKey, Config, FleetConfig, ServerConfig
from deepdraft.kv.directory import DirectorySettings, RedisDirectory
from deepdraft.kv.fleet_files import init_fleet
from deepdraft.server.auth import named_keys
from deepdraft.server.limits import (
    Bucket,
    FleetLimits,
    Limits,
    Place,
    TooManyRequests,
    open_limits,
)
from tests.kv.test_directory import RealRedis, needs_redis

from .conftest import Live, make_toy
from .toy import Toy

__all__ = ["make_toy"]

PATIENCE_S = 60.0
PATIENT = DirectorySettings(timeout_s=20)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RealRedis]:
    server = RealRedis(tmp_path).start()
    yield server
    server.stop()


def key(name: str = "team", secret: str = "a", **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=named_keys([secret])[0].sha256, **limits)


class Servers:
    """Limits of several servers, as each of them would hold them."""

    def __init__(self, url: str, *keys: ApiKey, count: int = 2, **options: Any) -> None:
        self.all = [
            FleetLimits(keys, RedisDirectory.connect(url, "f", PATIENT).client, "f", **options)
            for _ in range(count)
        ]
        self.client = RedisDirectory.connect(url, "f", PATIENT).client

    async def count(self, what: str) -> int:
        return await self.client.zcard(f"{{f}}:limits:team:{what}")

    async def until(self, what: str, count: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while await self.count(what) != count:
            assert time.monotonic() < end, (what, await self.count(what), count)
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for one in self.all:
            await one.close()
        await self.client.aclose()
        await self.client.connection_pool.disconnect()


def play(
    url: str, what: Callable[[Servers], Awaitable[None]], *keys: ApiKey, **options: Any
) -> None:
    """Runs a scene among servers in a loop of its own."""

    async def run() -> None:
        servers = Servers(url, *keys, **options)
        try:
            await asyncio.wait_for(what(servers), 2 * PATIENCE_S)
        finally:
            await servers.close()

    asyncio.run(run())


async def enter(limits: Limits, count: int = 1, prompt: int = 10) -> Place:
    place = await limits.enter("team", count, prompt)
    assert place is not None
    return place


def test_what_is_owed_is_paid_before_the_next() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    assert bucket.take(50) == 0 and bucket.take(50) == 0  # at least one was left
    assert bucket.take(1) == pytest.approx(41)
    bucket.owe(19)
    assert bucket.take(1) == pytest.approx(60)
    now[0] = 60.0
    assert bucket.take(1) == 0
    bucket.owe(-1000)  # what was given back is no more than a minute's worth
    assert bucket.take(60) == 0 and bucket.take(1) > 0


def test_one_server_counts_tokens_itself() -> None:
    async def scene() -> None:
        limits = open_limits(Config(), (key(tokens_per_minute=100), key("free", "b")))
        assert type(limits) is Limits and limits.bind("team") and not limits.bind("free")
        assert await limits.enter("free", 1, 10**6) is None
        place = await enter(limits, prompt=60)
        place.leave(70)
        place.leave(10**6)  # only once
        with pytest.raises(TooManyRequests, match="100 tokens a minute") as refused:
            await limits.enter("team", 1, 1)
        assert 15 < refused.value.retry_after_s <= 19
        await limits.close()

    asyncio.run(scene())


@needs_redis
def test_requests_at_once_over_the_fleet(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        first, second = await enter(a), await enter(b)
        third = asyncio.create_task(enter(b))
        await fleet.until("waiting", 1)
        fourth = asyncio.create_task(enter(a))
        await fleet.until("waiting", 2)
        with pytest.raises(TooManyRequests, match="2 requests running and 2 waiting"):
            await enter(b)
        first.leave(5)
        # Who came first is first, on whichever server.
        place = await third
        assert await fleet.count("running") == 2 and not fourth.done()
        for one in (second, place):
            one.leave(0)
        (await fourth).leave(0)
        await fleet.until("running", 0)
        assert a.counters.snapshot()["limit_waits"] > 0

    play(redis.url, scene, key(max_running=2, max_queue=2))


@needs_redis
def test_choices_of_one_request_take_a_place_each(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        place = await enter(a, count=2)
        assert await fleet.count("running") == 2
        more = asyncio.create_task(enter(b, count=2))
        await fleet.until("waiting", 1)
        place.leave(0)
        (await more).leave(0)
        # More than may ever run at once is the engine's to order.
        huge = await enter(a, count=7)
        assert await fleet.count("running") == 3
        huge.leave(0)
        await fleet.until("running", 0)

    play(redis.url, scene, key(max_running=3))


@needs_redis
def test_places_of_a_server_that_died_end(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        await enter(a)
        stuck = asyncio.create_task(enter(a))
        await fleet.until("waiting", 1)
        assert a._renewing is not None
        a._renewing.cancel()  # it died: nobody renews its place, nor asks for the one in the line
        stuck.cancel()
        a._tasks.clear()
        (await enter(b)).leave(0)
        a._places.clear()

    play(redis.url, scene, key(max_running=1), lease_s=2.0)


@needs_redis
def test_places_are_renewed_and_come_back_after_data_is_lost(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        place = await enter(a)
        name = "{f}:limits:team:running"

        async def ends() -> list[float]:
            return [
                float(end) for _, end in await fleet.client.zrange(name, 0, -1, withscores=True)
            ]

        before = await ends()
        await asyncio.sleep(0.02)
        await a.renew()
        assert before < await ends()
        await fleet.client.flushall()
        await a.renew()
        assert await fleet.count("running") == 1
        waits = asyncio.create_task(enter(b))
        await fleet.until("waiting", 1)
        place.leave(0)
        (await waits).leave(0)

    play(redis.url, scene, key(max_running=1))


@needs_redis
def test_who_gives_up_leaves_the_line(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        place = await enter(a)
        gone = asyncio.create_task(enter(b))
        await fleet.until("waiting", 1)
        gone.cancel()
        await fleet.until("waiting", 0)
        place.leave(0)
        (await enter(b)).leave(0)

    play(redis.url, scene, key(max_running=1))


@needs_redis
def test_requests_a_minute_over_the_fleet(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        begin = time.monotonic()
        passed = 0
        for _ in range(6):
            for one in fleet.all:
                wait_s = await one.request("team")
                passed += wait_s == 0
                assert 0 <= wait_s <= 60 / 5
        refilled = (time.monotonic() - begin) * 5 / 60
        assert 5 <= passed <= 5 + refilled
        assert await fleet.all[0].request("free") == 0

    play(redis.url, scene, key(requests_per_minute=5), key("free", "b"))


@needs_redis
def test_tokens_a_minute_over_the_fleet(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        begin = time.monotonic()
        first, second = await enter(a, prompt=50), await enter(b, prompt=50)
        first.leave(30)
        second.leave(-50)  # was not run: only what the first took is gone
        while a._tasks or b._tasks:
            await asyncio.sleep(0.01)
        with pytest.raises(TooManyRequests, match="60 tokens a minute") as refused:
            await enter(b)
        owed = 1 + 50 + 30 - 60
        assert owed - (time.monotonic() - begin) - 1 <= refused.value.retry_after_s <= owed
        assert await fleet.count("running") == 0  # who is refused holds no place

    play(redis.url, scene, key(tokens_per_minute=60, max_running=3))


def test_no_redis_is_no_refusal(tmp_path: Path) -> None:
    async def scene(fleet: Servers) -> None:
        [one] = fleet.all
        assert await one.request("team") == 0
        places = [await enter(one) for _ in range(5)]  # the engine bounds them
        for place in places:
            place.leave(3)
        assert [await one.request("team") == 0 for _ in range(4)] == [True, True, False, False]
        assert one.counters.snapshot()["limit_away"] >= 3

    keys = key(requests_per_minute=3, tokens_per_minute=1000, max_running=1)
    play(f"unix://{tmp_path}/nobody.sock", scene, keys, count=1)


@needs_redis
def test_without_redis_a_server_has_its_part(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        for _ in range(2):
            for one in fleet.all:
                await one.renew()
        assert [one.share for one in fleet.all] == [0.5, 0.5]
        redis.stop()
        a = fleet.all[0]
        passed = [await a.request("team") == 0 for _ in range(12)]
        assert passed == [True] * 4 + [False] * 8
        place = await enter(a)
        place.leave(1)

    play(redis.url, scene, key(requests_per_minute=8, max_running=1), count=2)


@needs_redis
def test_a_server_that_ends_counts_no_more(redis: RealRedis) -> None:
    async def scene(fleet: Servers) -> None:
        a, b = fleet.all
        await a.renew()
        assert await b.see_members() == 2
        place = await enter(a)
        await a.close()
        assert await b.see_members() == 1 and b.share == 1.0
        assert await fleet.count("running") == 0 and place.left

    play(redis.url, scene, key(max_running=1))


# The client leaves a connection open whose handshake failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@needs_redis
def test_tls_and_a_password(tmp_path: Path) -> None:
    [place] = init_fleet(tmp_path / "fleet", ["redis"], ["127.0.0.1"])
    [other] = init_fleet(tmp_path / "strangers", ["redis"], ["127.0.0.1"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RealRedis(tmp_path).start(
        *("--tls-port", str(port), "--bind", "127.0.0.1", "--requirepass", "secret"),
        *("--tls-cert-file", str(place / "cert.pem"), "--tls-key-file", str(place / "key.pem")),
        *("--tls-ca-cert-file", str(place / "ca.pem")),
    )

    def url(password: str, files: Path) -> str:
        parts = f"ssl_certfile={files}/cert.pem&ssl_keyfile={files}/key.pem&ssl_ca_certs={files}"
        return f"rediss://:{password}@127.0.0.1:{port}/0?{parts}/ca.pem"

    async def scene(url: str, timeout_s: float) -> tuple[tuple[str, ...], int]:
        client = RedisDirectory.connect(url, "f", DirectorySettings(timeout_s=timeout_s)).client
        limits = FleetLimits((key(max_running=1),), client, "f")
        place = await enter(limits)
        ids = place.ids
        place.leave(0)
        await limits.close()
        return ids, limits.counters.snapshot().get("limit_away", 0)

    try:
        ids, away = asyncio.run(scene(url("secret", place), 20))
        assert len(ids) == 1 and away == 0
        for wrong in (url("guess", place), url("secret", other), f"redis://127.0.0.1:{port}/0"):
            ids, away = asyncio.run(scene(wrong, 0.3))
            assert ids == () and away > 0
    finally:
        server.stop()
        gc.collect()  # what the client left open is found here, not in the test that comes next


# ---- servers ------------------------------------------------------------------------------------


Ask = Callable[..., httpx.Response]


@pytest.fixture
def make_ask(make_toy: Callable[..., Toy], redis: RealRedis) -> Iterator[Callable[..., Ask]]:
    """Makes a server whose key may run one request, and what sends chats to it."""
    lives: list[Live] = []

    def make(queue: int) -> Ask:
        toy = make_toy(server={"port": 0, "keys": (key(max_running=1, max_queue=queue),)})
        toy.say("ok")
        config = toy.service.config
        # The application counts in the directory; the toy's engine has no cache to share.
        fleet = FleetConfig(directory=redis.url, namespace="f")
        toy.service.config = replace(config, fleet=fleet)
        live = Live(toy)
        toy.service.config = config
        lives.append(live)
        live.start()
        assert toy.service.wait(30)

        def ask(timeout: float = PATIENCE_S, **given: Any) -> httpx.Response:
            headers = {"x-api-key": "a", **given.pop("headers", {})}
            chat = {"messages": [{"role": "user", "content": "Hi"}], "thinking": False}
            return httpx.post(
                f"{live.url}/v1/chat/completions",
                json={**chat, **given},
                headers=headers,
                timeout=timeout,
            )

        return ask

    yield make
    for live in lives:
        live.stop()


@needs_redis
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_another_servers(
    redis: RealRedis, make_ask: Callable[..., Ask], stream: bool
) -> None:
    ask = make_ask(queue=1)
    assert ask(stream=stream).status_code == 200
    answers: list[httpx.Response] = []

    async def scene(fleet: Servers) -> None:
        await fleet.until("running", 0)  # what the first one held
        place = await enter(fleet.all[0])
        thread = threading.Thread(target=lambda: answers.append(ask(stream=stream)))
        thread.start()
        await fleet.until("waiting", 1)
        full = await asyncio.to_thread(ask, stream=stream)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert "in this fleet" in full.json()["error"]["message"]
        late = await asyncio.to_thread(ask, stream=stream, headers={"x-request-timeout": "0.001"})
        assert late.status_code in (429, 504)
        assert not answers
        place.leave(0)
        await asyncio.to_thread(thread.join, PATIENCE_S)
        await fleet.until("running", 0)

    play(redis.url, scene, key(max_running=1, max_queue=1))
    assert answers[0].status_code == 200


@needs_redis
def test_a_deadline_and_a_client_that_leaves_end_the_wait(
    redis: RealRedis, make_ask: Callable[..., Ask]
) -> None:
    ask = make_ask(queue=9)
    assert ask().status_code == 200

    async def scene(fleet: Servers) -> None:
        place = await enter(fleet.all[0])
        late = await asyncio.to_thread(ask, headers={"x-request-timeout": "0.3"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        with pytest.raises(httpx.ReadTimeout):
            await asyncio.to_thread(ask, timeout=2.0)
        await fleet.until("waiting", 0)
        place.leave(0)
        assert (await asyncio.to_thread(ask)).status_code == 200
        await fleet.until("running", 0)

    play(redis.url, scene, key(max_running=1))


def test_no_directory_and_no_limits_need_no_redis() -> None:
    keys = (key(),)
    fleet = FleetConfig(directory="unix:///nowhere")
    assert type(open_limits(Config(fleet=fleet), keys)) is Limits
    config = Config(fleet=fleet, server=ServerConfig())
    assert isinstance(open_limits(config, (key(max_running=1),)), FleetLimits)
