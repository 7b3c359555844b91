"""Rolling upgrades: what counts as another version, what may change, the way back; without Ray."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepdraft.errors import ConfigError, EngineError
from deepdraft.server import fleet_upgrade, fleet_version
from deepdraft.server.fleet_config import FleetFile, load_fleet_file
from deepdraft.server.fleet_registry import Entry
from deepdraft.server.fleet_upgrade import check_change, upgrade
from deepdraft.server.fleet_version import Deployed, version_of


def fleet_of(tmp_path: Path, text: str = "") -> FleetFile:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return load_fleet_file(file)


BASE = """
[engine]
max_running = 4
[server]
port = 8123
[replicas]
count = 2
"""


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (("max_running = 4", "max_running = 5"), True),
        (("[engine]", "model = '/m'\n[engine]"), True),
        (("[engine]", "[engine]\nnumerics = 'quant'"), True),
        (("[replicas]", "[fleet]\ndirectory = 'redis://a'\n[replicas]"), True),
        (("count = 2", "count = 2\ncpus = 0.5"), True),
        (("count = 2", "count = 3"), False),
        (("count = 2", "count = 2\nmin_count = 1\nmax_count = 5\nup_s = 3"), False),
        (("count = 2", "count = 2\n[ray]\nstart_s = 5"), False),
    ],
)
def test_what_is_another_version(
    tmp_path: Path, change: tuple[str, str], other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_version, "code_digest", lambda: "00" * 32)
    old = version_of(fleet_of(tmp_path, BASE))
    top, text = "", BASE.replace(*change)
    if "model = " in text:  # a key of the file itself stands before all tables
        top, text = "model = '/m'\n", BASE
    assert (version_of(fleet_of(tmp_path, top + text)) != old) == other


def test_other_weights_and_other_code_are_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    fleet = fleet_of(tmp_path, f"model = '{model}'")
    seen = {version_of(fleet)}
    (model / "model.safetensors").write_bytes(b"1")
    seen.add(version_of(fleet))
    (model / "config.json").write_text("{ }")
    seen.add(version_of(fleet))
    program = tmp_path / "deepdraft"
    program.mkdir()
    (program / "__init__.py").write_text("")
    monkeypatch.setattr(fleet_version.deepdraft, "__file__", str(program / "__init__.py"))
    seen.add(version_of(fleet))
    (program / "a.py").write_text("a = 1")
    seen.add(version_of(fleet))
    (program / "a.py").write_text("a = 2")
    seen.add(version_of(fleet))
    assert len(seen) == 6


def test_what_cannot_change(tmp_path: Path) -> None:
    old = fleet_of(tmp_path, BASE)
    check_change(old, fleet_of(tmp_path, BASE.replace("= 4", "= 9")))
    with pytest.raises(ConfigError, match=r"server\.port cannot change .* it is 8123"):
        check_change(old, fleet_of(tmp_path, BASE.replace("8123", "8124")))


def test_what_is_deployed_comes_back_as_it_was(tmp_path: Path) -> None:
    text = BASE + "[fleet]\ndirectory = 'redis://:secret@h'\n"
    made = Deployed(fleet_of(tmp_path, text), "1-a", "1")
    assert Deployed.decode(made.encode()) == made
    assert "secret" not in repr(made)
    for junk in (b"", b"{}", b'{"fleet": {"nonsense": 1}, "name": 3}'):
        with pytest.raises(ConfigError, match="another deepdraft"):
            Deployed.decode(junk)


class FakeRay:
    """Ray Serve as `fleet_ray` shows it: each deployment leads through a list of states."""

    def __init__(self, fleet: FleetFile, name: str) -> None:
        self.kept: bytes | None = Deployed(fleet, name, "1").encode()
        self.free = [{"CPU": 8.0}]
        self.deployed: list[tuple[str, bool]] = []
        self.coming: dict[str, list[str]] = {}
        """By the version's name, the states that follow; the last one stays."""
        self.states_now = ["RUNNING"]

    def application(self, name: str) -> Any:
        state = self.states_now[0]
        if len(self.states_now) > 1:
            self.states_now.pop(0)
        return None if state == "gone" else SimpleNamespace(status=SimpleNamespace(value=state))

    def deploy(self, deployed: Deployed, *, again: bool, in_place: bool) -> None:
        assert again, "the number of replicas starts anew"
        self.deployed.append((deployed.name, in_place))
        self.states_now = list(self.coming.get(deployed.name, ["DEPLOYING", "RUNNING"]))


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    # A developer may save a file meanwhile.
    monkeypatch.setattr(fleet_version, "code_digest", lambda: "00" * 32)
    fleet = fleet_of(tmp_path, BASE)
    fake = FakeRay(fleet, version_of(fleet))

    @contextlib.contextmanager
    def connected(fleet: FleetFile) -> Iterator[None]:
        yield None

    class Registry:
        def __init__(self, name: str) -> None:
            assert name == fleet.name

        def keep(self, data: bytes) -> None:
            fake.kept = data

        def kept(self) -> bytes | None:
            return fake.kept

    found = {
        "check_ray": lambda: None,
        "connected": connected,
        "application": fake.application,
        "deploy": fake.deploy,
        "why": lambda found: "its selftest fails",
        "states": lambda found: found.status.value,
        "free_of_nodes": lambda: fake.free,
        "LOOK_S": 0.001,
    }
    for name, value in found.items():
        monkeypatch.setattr(fleet_upgrade.fleet_ray, name, value)
    monkeypatch.setattr(fleet_upgrade, "RayRegistry", Registry)
    return fake


def newer(tmp_path: Path) -> FleetFile:
    return fleet_of(tmp_path, BASE.replace("max_running = 4", "max_running = 5"))


def said(lines: list[str]) -> str:
    return " / ".join(lines)


def test_an_upgrade(ray: FakeRay, tmp_path: Path) -> None:
    new, lines = newer(tmp_path), list[str]()
    upgrade(new, lines.append)
    assert ray.deployed == [(version_of(new), False)]
    assert ray.kept is not None and Deployed.decode(ray.kept).fleet == new
    assert f"all replicas run {version_of(new)}" in said(lines)
    upgrade(new, lines.append)
    assert len(ray.deployed) == 1 and "already" in lines[-1]


def test_a_version_that_does_not_start_is_taken_back(ray: FakeRay, tmp_path: Path) -> None:
    new, old = newer(tmp_path), version_of(fleet_of(tmp_path, BASE))
    kept = ray.kept
    ray.coming[version_of(new)] = ["DEPLOYING", "DEPLOY_FAILED"]
    with pytest.raises(EngineError, match=f"is stopped, {old} serves: its selftest fails"):
        upgrade(new, list[str]().append)
    assert ray.deployed == [(version_of(new), False), (old, False)]
    assert ray.kept == kept, "the next upgrade begins at what serves"


def test_one_that_never_comes_is_taken_back(ray: FakeRay, tmp_path: Path) -> None:
    new = newer(tmp_path)
    new = replace(new, ray=replace(new.ray, start_s=1.0))
    ray.coming[version_of(new)] = ["DEPLOYING"]
    with pytest.raises(EngineError, match=r"nothing has moved within ray\.start_s"):
        upgrade(new, list[str]().append)
    assert len(ray.deployed) == 2


def test_a_fleet_that_is_ended_meanwhile(ray: FakeRay, tmp_path: Path) -> None:
    new = newer(tmp_path)
    ray.coming[version_of(new)] = ["DEPLOYING", "gone"]
    with pytest.raises(EngineError, match="ended meanwhile"):
        upgrade(new, list[str]().append)
    assert len(ray.deployed) == 1, "what was ended is not started again"


def test_without_room_an_old_one_must_leave_first(ray: FakeRay, tmp_path: Path) -> None:
    ray.free = [{"CPU": 0.5}]
    with pytest.raises(ConfigError, match="--in-place"):
        upgrade(newer(tmp_path), list[str]().append)
    assert not ray.deployed
    upgrade(newer(tmp_path), list[str]().append, in_place=True)
    assert ray.deployed == [(version_of(newer(tmp_path)), True)]


def test_more_replicas_of_the_same_version_need_no_spare_room(ray: FakeRay, tmp_path: Path) -> None:
    ray.free = []
    more = fleet_of(tmp_path, BASE.replace("count = 2", "count = 3"))
    upgrade(more, list[str]().append)
    assert ray.deployed == [(version_of(more), False)]


@pytest.mark.parametrize("state", ["DEPLOYING", "DELETING", "gone"])
def test_what_cannot_be_upgraded_now(ray: FakeRay, tmp_path: Path, state: str) -> None:
    ray.states_now = [state]
    with pytest.raises(ConfigError, match="no fleet" if state == "gone" else "just changing"):
        upgrade(newer(tmp_path), list[str]().append)
    assert not ray.deployed


class Draining:
    """A fleet of which one replica is to leave: looks at it, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[tuple[str, str, str]] = []
        """Labels in the registry, state of the application, what Ray does; the last one stays."""
        self.asked: list[str] = []
        found = {
            "check_ray": lambda: None,
            "connected": lambda fleet: contextlib.nullcontext(),
            "application": self.application,
            "states": lambda state: state.states,
            "leaving_s": lambda fleet: 0.0,
            "LOOK_S": 0.001,
        }
        for name, value in found.items():
            monkeypatch.setattr(fleet_upgrade.fleet_ray, name, value)
        monkeypatch.setattr(fleet_upgrade, "RayRegistry", lambda name: self)
        monkeypatch.setattr(fleet_upgrade, "_CALM_S", 0.02)
        self.begun = False

    def entries(self) -> list[Entry]:
        if self.begun and len(self.looks) > 1:
            self.looks.pop(0)
        self.begun = True
        return [Entry(label, f"of {label}", "h", 1) for label in self.looks[0][0].split()]

    def application(self, name: str) -> Any:
        _, state, states = self.looks[0]
        status = SimpleNamespace(value=state)
        return None if state == "gone" else SimpleNamespace(status=status, states=states)

    def ask_to_leave(self, incarnation: str) -> None:
        self.asked.append(incarnation)


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([("a", "RUNNING"), ("a", "RUNNING"), ("", "UNHEALTHY"), ("c", "RUNNING")], "c is there"),
        # The entry of one that was killed before is still there, and goes.
        (
            [("a b x", "RUNNING"), ("b x", "UNHEALTHY"), ("b", "RUNNING"), ("b c", "RUNNING")],
            "c is",
        ),
        ([("a b", "RUNNING"), ("a b", "RUNNING"), ("b", "RUNNING")], "none comes in its place: 1"),
        ([("a b", "RUNNING"), ("b", "gone")], "the fleet was ended meanwhile"),
        ([("a b", "RUNNING"), ("b", "DEPLOYING")], "no replica has taken its place: 1"),
        ([("b x", "RUNNING")], "no replica a runs; those that do: b, x"),
    ],
)
def test_one_replica_leaves(
    looks: list[tuple[str, str]], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Draining(monkeypatch)
    ray.looks = [(labels, state, "1 running") for labels, state in looks]
    fleet = fleet_of(tmp_path, "[ray]\nstart_s = 1")
    lines: list[str] = []
    try:
        fleet_upgrade.drain_one(fleet, "a", lines.append)
    except (ConfigError, EngineError) as error:
        lines.append(error.message)
    assert told in lines[-1]
    assert ray.asked == ([] if "those that do" in told else ["of a"])
