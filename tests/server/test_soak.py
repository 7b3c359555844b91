"""A short soak of the bundled model: faults of all kinds, 64 clients at once, and nothing is left
behind; every finished answer is the one that the request gets alone."""

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import pytest

from deepdraft.config import Config, EngineConfig, ServerConfig
from deepdraft.engine.load import load_engine
from deepdraft.server.service import Service, bundled_checkpoint

from .conftest import Live
from .test_live import until


class DemoToy:
    """What `Live` needs of a toy, with the bundled model."""

    def __init__(self) -> None:
        engine = EngineConfig(
            max_running=4, max_context=512, schedule="all", preempt_after_s=0.1, max_stall_ms=30
        )
        self.service = Service(
            lambda: load_engine(bundled_checkpoint(), engine, name="demo"),
            Config(engine=engine, server=ServerConfig(port=0)),
        )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    live = Live(DemoToy())  # type: ignore[arg-type]
    live.start()
    assert live.toy.service.wait(120) and live.toy.service.state == "ready"
    yield live
    live.stop()
    live.toy.service.close()


PROMPTS = [f"({i}) Say something about {'stones and rivers ' * (1 + i * i)}." for i in range(6)]


def body(i: int, **fields: object) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": PROMPTS[i]}],
        "temperature": (0, 0.9)[i % 2],
        "seed": i,
        "max_tokens": 10 + i,
        "thinking": {"type": "disabled"},
        "user_id": "ab"[i % 2],
        **fields,
    }


async def solo(client: httpx.AsyncClient) -> list[str]:
    answers = []
    for i in range(len(PROMPTS)):
        response = await client.post("/v1/chat/completions", json=body(i))
        answers.append(response.json()["choices"][0]["message"]["content"])
    return answers


async def one_thing(client: httpx.AsyncClient, rng: random.Random, alone: list[str]) -> None:
    i = rng.randrange(len(PROMPTS))
    kind = rng.choice(("whole", "whole", "stream", "stream", "cancel", "vanish", "bad", "long"))
    if kind == "whole":
        answer = (await client.post("/v1/chat/completions", json=body(i))).json()
        assert answer["choices"][0]["message"]["content"] == alone[i]
    elif kind in ("stream", "cancel"):
        text, left = "", rng.randrange(5) if kind == "cancel" else 10_000
        async with client.stream("POST", "/v1/chat/completions", json=body(i, stream=True)) as r:
            async for line in r.aiter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    text += delta.get("content") or ""
                    left -= 1
                if left < 0:
                    return
        assert text == alone[i]
    elif kind == "vanish":
        try:
            await client.post("/v1/chat/completions", json=body(i, max_tokens=200), timeout=0.3)
        except httpx.TimeoutException:
            return
    elif kind == "bad":
        content = json.dumps(body(i)).encode()[: rng.randrange(200)]
        assert (await client.post("/v1/chat/completions", content=content)).status_code == 400
    else:
        text = [{"role": "user", "content": "word " * 30_000}]
        response = await client.post("/v1/chat/completions", json=body(i, messages=text))
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def soak(url: str, num_clients: int, num_things: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        alone = await solo(client)

    async def worker(seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for _ in range(num_things):
                await one_thing(client, rng, alone)

    await asyncio.gather(*(worker(seed) for seed in range(num_clients)))


def nothing_is_left(live: Live) -> bool:
    engine = live.toy.service._engine
    assert engine is not None
    stats = engine.stats()
    free = engine.runner.pool.num_free  # type: ignore[attr-defined]
    return not (stats["waiting"] or stats["running"] or stats["parked"]) and free == 4


def test_faults_leave_nothing_and_change_nothing(live: Live) -> None:
    asyncio.run(soak(live.url, num_clients=64, num_things=1))
    until(lambda: nothing_is_left(live), 60)
    until(lambda: not live.server.server_state.tasks, 20)
    engine = live.toy.service._engine
    assert engine is not None and engine.failure is None
    engine._scheduler.check()
    assert not engine._scheduler._tenants._active
    engine.runner.pool.check()  # type: ignore[attr-defined]
    assert httpx.get(f"{live.url}/readyz").status_code == 200
