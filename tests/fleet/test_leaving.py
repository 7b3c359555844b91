"""A replica that is to leave, whoever says so; without Ray and without an engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepdraft.errors import EngineError
from deepdraft.server import fleet_replica
from deepdraft.server.fleet_registry import Entry, LocalRegistry
from deepdraft.server.fleet_replica import Replica
from tests.fleet.test_config import fleet_of


class FakeNode:
    """Requests that end when they are told to, or never."""

    num_requests = 2

    def __init__(self, done: list[str], *, ends: bool) -> None:
        self.done, self.ends, self.broken = done, ends, False

    def begin_drain(self) -> None:
        self.done.append("drain")

    async def wait_idle(self, seconds: float) -> bool:
        self.done.append(f"wait {seconds:g}")
        await asyncio.sleep(0)
        return self.ends

    def give_back(self) -> None:
        self.done.append("give back")

    async def close(self) -> None:
        self.done.append("close node")

    def check(self) -> None:
        if self.broken:
            raise EngineError("the GPU has failed")

    def load(self) -> Any:
        return SimpleNamespace(running=3, waiting=2, to_read=4000, prompt_us=250.0)


def replica(tmp_path: Path, *, ends: bool = True) -> tuple[Replica, list[str]]:
    """One that is ready, without what `__init__` starts."""
    made, done = object.__new__(Replica), list[str]()
    text = "[server]\ndrain_s = 7\n[fleet]\nhand_over_s = 3\n[replicas]\ncpus = 1"
    service = SimpleNamespace(close=lambda: done.append("close service"))
    entry = Entry("a", "i1", "127.0.0.1", 1)
    vars(made).update(
        label="a",
        service=service,
        node=FakeNode(done, ends=ends),
        entry=entry,
        _fleet=fleet_of(tmp_path, text),
        _leaves=None,
        _ranks=SimpleNamespace(close=lambda: done.append("close ranks")),
        _spill=SimpleNamespace(release=lambda: done.append("free folder")),
        _registry=LocalRegistry(),
    )
    made._registry.put(entry)
    return made, done


def announcing(made: Replica) -> None:
    made._announcing = asyncio.create_task(made._announce())


@pytest.mark.parametrize("ends", [True, False])
def test_ray_tells_it_to_leave(ends: bool, tmp_path: Path) -> None:
    async def run() -> None:
        made, done = replica(tmp_path, ends=ends)
        announcing(made)
        await asyncio.gather(made.leave(), made.leave())
        rest = [] if ends else ["give back", "wait 5"]
        ends_of = ["close service", "close ranks", "free folder", "close node"]
        assert done == ["drain", "wait 7", *rest, *ends_of]
        assert made._registry.entries() == [], "no front finds it any more"

    asyncio.run(run())


def test_it_is_asked_to_leave_and_has_itself_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_replica, "_ANNOUNCE_S", 0.001)

    async def run() -> None:
        made, done = replica(tmp_path)
        announcing(made)
        await made.check_health()
        made._registry.leaving.add("another")
        made._registry.leaving.add("i1")
        while made._leaves is None:
            await asyncio.sleep(0.001)
        await asyncio.wait([made._leaves])
        assert done[-1] == "close node" and made._registry.leaving == {"another"}
        with pytest.raises(EngineError, match="was drained"):
            await made.check_health()
        await made.leave()  # Ray ends it: nothing is done twice
        assert done.count("drain") == 1

    asyncio.run(run())


def test_one_that_does_not_get_away_is_replaced_too(tmp_path: Path) -> None:
    async def run() -> None:
        made, _ = replica(tmp_path)
        announcing(made)
        never = asyncio.Event()
        made.node.wait_idle = lambda seconds: never.wait()  # type: ignore[method-assign]
        leaves = made._begin_to_leave()
        await made.check_health()
        loop = asyncio.get_running_loop()
        assert 7 + 3 < made._gone_by - loop.time() < 7 + 3 + 60
        made._gone_by = loop.time() - 1
        with pytest.raises(EngineError, match="was drained"):
            await made.check_health()
        leaves.cancel()

    asyncio.run(run())


def test_a_failed_engine_is_unhealthy(tmp_path: Path) -> None:
    made, _ = replica(tmp_path)
    made.node.broken = True  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="the GPU has failed"):
        asyncio.run(made.check_health())


def test_what_the_policy_hears(tmp_path: Path) -> None:
    made, _ = replica(tmp_path)
    found = asyncio.run(made.record_autoscaling_stats())
    assert found == {"running": 3.0, "waiting": 2.0, "wait_s": 1.0}
