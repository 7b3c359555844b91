"""A fleet's file, what is missing on the machine, and when a replica is no longer healthy; without
Ray."""

import asyncio
import importlib.metadata
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepdraft import __version__
from deepdraft.cli.main import main
from deepdraft.errors import ConfigError, EngineError
from deepdraft.server import fleet_ray, fleet_replica
from deepdraft.server.fleet_config import FleetFile, load_fleet_file
from deepdraft.server.fleet_node import Watch
from deepdraft.server.fleet_replica import Replica, with_label

CUDA = "[engine]\ndevice = 'cuda'\nnumerics = 'quant'\n"


def fleet_of(tmp_path: Path, text: str) -> FleetFile:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return load_fleet_file(file)


def test_a_file_says_everything(tmp_path: Path) -> None:
    fleet = fleet_of(
        tmp_path,
        """
name = "books"
model = "/models/v41"
[engine]
max_running = 4
max_queue = 7
[server]
host = "0.0.0.0"
port = 8123
drain_s = 3.0
[fleet]
directory = "redis://127.0.0.1"
[replicas]
count = 3
cpus = 0.5
look_s = 1.5
[ray]
cpus = 4
""",
    )
    assert (fleet.name, fleet.model, fleet.url) == ("books", "/models/v41", "http://127.0.0.1:8123")
    options = fleet_ray.options_of(fleet)
    assert options["num_replicas"] == 3
    assert options["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 0}
    assert fleet_ray.front_options_of(fleet)["max_ongoing_requests"] == 3 * 11 + 256
    assert options["graceful_shutdown_timeout_s"] == 3.0 + 10.0 + 15.0
    assert options["health_check_period_s"] == 1.5
    assert fleet_ray.http_options(fleet) == {"host": "0.0.0.0", "port": 8123}


def test_replicas_have_names_of_their_own_and_share_the_memory(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, '[fleet]\ndirectory = "redis://127.0.0.1"\n[replicas]\ncount = 4')
    one, other = fleet.of_replica("a"), fleet.of_replica("b")
    assert (one.fleet.name, other.fleet.name) == ("a", "b")
    alone = fleet_of(tmp_path, "[replicas]\ncount = 1").of_replica("a").engine.state_memory
    assert isinstance(alone, int) and alone // 4 == one.engine.state_memory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[replica]\ncount = 1", "unknown entry replica"),
        ("[replicas]\ncuont = 1", "did you mean replicas.count"),
        ("[engine]\nnumeric = 'exact'", "did you mean engine.numerics"),
        ("[ray]\nadress = 'a:1'", "did you mean ray.address"),
        ("replicas = 3", "replicas in .* must be a table"),
        ("name = 'a b'", "name must be 1 to 40 letters"),
        ("model = 3", "model must be"),
        ("[replicas]\ncount = 0", "replicas.count must be an integer >= 1, got 0"),
        ("[replicas]\ncount = true", "replicas.count must be"),
        ("[replicas]\nmin_count = 3", "replicas.min_count must be an integer from 1 to"),
        ("[replicas]\nmin_count = 0", "replicas.min_count must be an integer from 1 to"),
        ("[replicas]\nmax_count = 1", "replicas.max_count must be an integer >= replicas.count"),
        ("[replicas]\nmax_count = 2.5", "replicas.max_count must be"),
        ("[replicas]\nbusy = 1.1", "replicas.busy must be a number from 0.05 to 1"),
        ("[replicas]\ndown_s = 0", "replicas.down_s must be"),
        ("[replicas]\ncpus = 0", "replicas.cpus must be"),
        ("[replicas]\ngpus = 3", "replicas.gpus must be 0, 1, 2, 4 or 8, got 3"),
        ("[replicas]\ngpus = true", "replicas.gpus must be 0, 1, 2, 4 or 8"),
        ("[replicas]\nselftest = 'no'", "replicas.selftest must be true or false"),
        ("[replicas]\nhang_s = 0", "replicas.hang_s must be"),
        ("[replicas]\ngpus = 1", 'replicas.gpus must be 0 with engine.device = "cpu"'),
        (CUDA, "replicas.gpus must be 1, 2, 4 or 8 with"),
        (f"{CUDA}tp = 2\n[replicas]\ngpus = 4", "engine.tp must be absent or 4, as replicas.gpus"),
        (f"{CUDA}load = 'dummy'\n[replicas]\ngpus = 4", 'engine.load must be "checkpoint" with'),
        ("[engine]\ntp = 2\nkv_memory = '1GiB'", "engine.kv_memory must be absent: several ranks"),
        ("[engine]\ntp = 2\nkv_spill = '/x'", "engine.kv_spill must be absent: several ranks"),
        ("[server]\nport = 0", "server.port must be a port of its own"),
        (
            "[fleet]\ndirectory = 'redis://a'\nlisten = '127.0.0.1:80'",
            "fleet.listen must be host:0",
        ),
        ("[ray]\naddress = 'nowhere'", "ray.address must be host:port"),
        ("[ray]\naddress = 'a:1'\ncpus = 2", "ray.cpus must be absent with ray.address"),
        ("[ray]\nstart_s = 0", "ray.start_s must be"),
        ("[replicas", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet_of(tmp_path, text)


def test_a_missing_or_other_ray_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    file = tmp_path / "fleet.toml"
    file.write_text("")
    for found, message in ((missing, "not installed"), (lambda _: "2.9.3", "2.9.3 is installed")):
        monkeypatch.setattr(fleet_ray.importlib.metadata, "version", found)
        for command in ("up", "status", "drain", "down"):
            assert main(["fleet", command, str(file)]) == 2
            said = capsys.readouterr().err
            assert message in said and "pip install 'ray[serve]==2.60.*'" in said


def test_a_taken_port_and_too_few_cpus_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            fleet_ray.check_this_machine(fleet_of(tmp_path, f"[server]\nport = {port}"))
    few = fleet_of(
        tmp_path, f"[server]\nport = {port}\n[replicas]\ncount = 3\ncpus = 1.5\n[ray]\ncpus = 4"
    )
    with pytest.raises(ConfigError, match=r"3 replicas of 1.5 CPUs need 4.5, there are 4"):
        fleet_ray.check_this_machine(few)


class FakeServe:
    """Ray Serve on a cluster, as `fleet_ray` sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, object] | None = None
        self.taken = False
        self.proxies: dict[str, SimpleNamespace] = {}
        monkeypatch.setattr(fleet_ray, "_serve", lambda: self)
        monkeypatch.setitem(sys.modules, "ray.serve.context", self)  # type: ignore[arg-type]

    def _get_global_client(self, raise_if_no_controller_running: bool = True) -> object:
        if self.options is None:
            return None
        return SimpleNamespace(http_config=SimpleNamespace(**self.options))

    def start(self, *, proxy_location: str, http_options: dict[str, object]) -> None:
        self.options = self.options or http_options  # those of one that runs are kept
        if self.taken:
            raise RuntimeError("ray::ProxyActor.ready()\n  File x\nRuntimeError: in use\n")

    def shutdown(self) -> None:
        self.options = None

    def status(self) -> object:
        return self

    def beside(self, **states: str) -> None:
        self.proxies = {node: SimpleNamespace(value=state) for node, state in states.items()}


def test_a_port_that_ray_serve_cannot_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, serve = fleet_of(tmp_path, "[server]\nport = 8123"), FakeServe(monkeypatch)
    serve.taken = True
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:8123 \(.*in use\)"):
        fleet_ray.start_serve(fleet)
    assert serve.options is None, "another port can be had now"
    serve.taken = False
    fleet_ray.start_serve(fleet)
    fleet_ray.start_serve(fleet)
    other = fleet_of(tmp_path, "[server]\nport = 8124")
    with pytest.raises(ConfigError, match=r"runs there already and listens on 127\.0\.0\.1:8123"):
        fleet_ray.start_serve(other)
    serve.taken = True
    with pytest.raises(ConfigError, match="cannot listen"):
        fleet_ray.start_serve(fleet)
    assert serve.options is not None, "what it serves is others'"


def test_proxies_that_do_not_listen_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, serve = fleet_of(tmp_path, "[server]\nport = 8123"), FakeServe(monkeypatch)
    nodes = [{"NodeID": "n1", "NodeManagerAddress": "10.0.0.1"}, {"NodeID": "n2"}]
    said: list[str] = []

    def listens(waited_s: float) -> bool:
        return fleet_ray.listens(nodes, fleet, waited_s, said.append)

    serve.beside(n1="STARTING", n2="HEALTHY")
    assert not listens(0.5) and said == []
    assert listens(31.0) and "port 8123 of 10.0.0.1; the other nodes" in said[0]
    serve.beside(n1="UNHEALTHY", n2="STARTING")
    with pytest.raises(EngineError, match=r"does not listen on port 8123 of 10\.0\.0\.1, n2"):
        listens(31.0)
    serve.beside(n1="HEALTHY", n2="HEALTHY")
    assert listens(0.5)
    serve.beside()
    assert not listens(0.5)
    with pytest.raises(EngineError, match="of any node"):
        listens(31.0)


def test_a_directory_that_does_not_answer_is_said_without_its_password(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{closed.getsockname()[1]}/0"
        said: list[str] = []
        fleet_ray._say_directory(fleet_of(tmp_path, f'[fleet]\ndirectory = "{url}"'), said.append)
    assert len(said) == 1 and "does not answer (ConnectionError)" in said[0]
    assert "secret" not in said[0]


def test_a_replica_lies_on_one_node(tmp_path: Path) -> None:
    def nodes(*cpus: float, gpus: float = 0.0) -> list[dict[str, object]]:
        return [{"Alive": True, "Resources": {"CPU": c, "GPU": gpus}} for c in cpus]

    fleet = fleet_of(tmp_path, "[replicas]\ncount = 3\ncpus = 2")
    fleet_ray.check_nodes(nodes(4, 2), fleet)
    with pytest.raises(ConfigError, match="room for 2"):
        fleet_ray.check_nodes(nodes(3, 3), fleet)  # six CPUs in all
    with pytest.raises(ConfigError, match="on 0 nodes"):
        fleet_ray.check_nodes([{"Alive": False, "Resources": {"CPU": 64.0}}], fleet)
    fleet = fleet_of(tmp_path, f"{CUDA}[replicas]\ncount = 2\ngpus = 1")
    fleet_ray.check_nodes(nodes(8, gpus=2), fleet)
    with pytest.raises(ConfigError, match="16 CPUs and 1 GPUs on 2 nodes, room for 1"):
        fleet_ray.check_nodes([*nodes(8), *nodes(8, gpus=1)], fleet)
    fleet = fleet_of(tmp_path, f"{CUDA}[replicas]\ncount = 2\ngpus = 4")
    fleet_ray.check_nodes(nodes(8, gpus=8), fleet)
    three = fleet_of(tmp_path, f"{CUDA}[replicas]\ncount = 3\ngpus = 4")
    with pytest.raises(ConfigError, match=r"4 GPUs each do not fit: .* 12 GPUs .* room for 2"):
        fleet_ray.check_nodes(nodes(8, 8, gpus=6), three)
    with pytest.raises(ConfigError, match="room for 0"):
        fleet_ray.check_nodes(nodes(8, 8, 8, 8, gpus=3), fleet)  # twelve in all, never four


def test_what_others_hold_is_said(tmp_path: Path) -> None:
    fleet, said = fleet_of(tmp_path, "[replicas]\ncount = 3\ncpus = 1.5"), list[str]()
    assert fleet_ray.room([{"CPU": 1.0}, {"CPU": 2.0}], fleet) == 1
    assert fleet_ray.room([{"CPU": 1.0}, {"CPU": 1.0}, {}], fleet) == 0, "not from two nodes"
    fleet_ray.say_room([{"CPU": 3.2}, {"CPU": 2.0, "GPU": 1.0}], fleet, said.append)
    assert said == []
    fleet_ray.say_room([{"CPU": 3.2}], fleet, said.append)
    assert "room for 2 of 3 replicas now (1.5 CPUs, 0 GPUs each)" in said[0]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_an_engine_has_a_rank_for_each_of_its_gpus(gpus: int, tmp_path: Path) -> None:
    """All set aside in one piece, hence on one node."""
    fleet = fleet_of(tmp_path, f"{CUDA}[fleet]\ndirectory = 'redis://a'\n[replicas]\ngpus = {gpus}")
    options = fleet_ray.options_of(fleet)
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": gpus}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": gpus}
    config = fleet.of_replica("a")
    assert config.engine.tp == gpus and config.engine.kv_memory == 0
    assert config.fleet.directory is None and fleet.config.fleet.directory == "redis://a"
    assert "placement_group_bundles" not in fleet_ray.options_of(FleetFile())


def test_a_model_that_does_not_split_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet_ray.importlib.metadata, "version", lambda _: "2.60.0")
    file = tmp_path / "fleet.toml"
    file.write_text("[engine]\ntp = 2")  # of the bundled model
    for command in ("up", "upgrade"):
        assert main(["fleet", command, str(file)]) == 2
        said = capsys.readouterr().err
        assert "split over 2 ranks: moe_intermediate_size = 96 is 3 groups" in said


def test_only_an_engine_that_stands_still_with_requests_hangs() -> None:
    watch = Watch(hang_s=10.0)
    idle, busy = {"running": 0, "decode_steps": 5}, {"running": 1, "decode_steps": 5}
    for now in (0.0, 4.0, 100.0, 101.0):
        watch.look(idle, now)
    for now in (102.0, 106.0, 110.0):
        watch.look(busy, now)
    watch.look({**busy, "decode_steps": 6}, 110.5)
    watch.look({**busy, "decode_steps": 6, "prompt_tokens": 256}, 115.0)
    stuck = {"waiting": 2, "decode_steps": 6, "prompt_tokens": 256, "requests": 9}
    for now in (119.0, 123.0, 124.9):
        watch.look(stuck, now)
    with pytest.raises(EngineError, match="no step for 10 s with 2 requests"):
        watch.look({**stuck, "requests": 12}, 125.0)  # requests that arrive are no progress


def test_a_pause_of_the_whole_process_is_no_hang() -> None:
    watch = Watch(hang_s=10.0)
    busy = {"running": 1, "decode_steps": 5}
    watch.look(busy, 0.0)
    watch.look(busy, 600.0)
    watch.look(busy, 604.0)
    watch.look(busy, 608.0)
    with pytest.raises(EngineError, match="no step"):
        watch.look(busy, 611.0)


def test_an_engine_on_which_everything_fails_is_no_good() -> None:
    watch = Watch(hang_s=10.0)
    watch.look({"decode_steps": 5, "finished_error": 7}, 0.0)
    watch.look({"decode_steps": 5, "finished_error": 9}, 1.0)
    watch.look({"decode_steps": 6, "finished_error": 10}, 2.0)
    watch.look({"decode_steps": 6, "finished_error": 12}, 3.0)
    with pytest.raises(EngineError, match="last 3 requests failed"):
        watch.look({"decode_steps": 6, "finished_error": 13}, 4.0)


def test_a_replica_of_another_version_never_starts() -> None:
    with pytest.raises(ConfigError, match=r"deepdraft 0\.0\.1, this node has"):
        asyncio.run(Replica.__init__(object.__new__(Replica), FleetFile(), "0.0.1", "a"))


def test_the_selftest_of_a_replica_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(fleet_replica.sys, "executable", str(python))
    for code, ends in (("exit 0", True), ("echo '  FAIL rows: differ'; exit 1", False)):
        python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n{code}\n')
        python.chmod(0o700)
        if ends:
            asyncio.run(fleet_replica.selftest("cpu"))
        else:
            with pytest.raises(EngineError, match="FAIL rows: differ"):
                asyncio.run(fleet_replica.selftest("cpu"))
        said = (tmp_path / "said").read_text().split()
        assert said == ["-m", "deepdraft.cli.main", "selftest", "--device", "cpu"]


def test_an_answer_says_which_front_gave_it() -> None:
    headers = [(b"a", b"b"), (b"x-request-id", b"1")]  # the proxy writes that one

    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})

    got: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        got.append(message)

    asyncio.run(with_label(app, b"x-deepdraft-front", "me")({"type": "http"}, None, send))
    assert got[0]["headers"] == [(b"a", b"b"), (b"x-deepdraft-front", b"me")]
    assert got[1] == {"type": "http.response.body", "body": b"x"}


class _Loads:
    """Stands in for a Service whose model loads at once."""

    failure = None

    def __init__(self, *_: object) -> None:
        self.config, self.closed = FleetFile().config, False

    def start(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def test_a_replica_whose_selftest_fails_never_becomes_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(device: str) -> None:
        raise EngineError(f"deepdraft selftest fails on this machine: {device}")

    monkeypatch.setattr(fleet_replica, "Service", _Loads)
    monkeypatch.setattr(fleet_replica, "selftest", fails)
    replica = object.__new__(Replica)
    with pytest.raises(EngineError, match="selftest fails on this machine: cpu"):
        asyncio.run(Replica.__init__(replica, FleetFile(), __version__, "a"))
    assert replica.service.closed


def test_bounds_make_the_number_follow_the_load(tmp_path: Path) -> None:
    """What Ray Serve is told builds the policy that decides."""
    fixed = fleet_of(tmp_path, "[replicas]\ncount = 3")
    assert fleet_ray.number_of(fixed) == {"num_replicas": 3}
    text = (
        "[engine]\nmax_running = 4\n[replicas]\ncount = 2\nmin_count = 1\nmax_count = 5\nlook_s = 1"
    )
    told = fleet_ray.number_of(fleet_of(tmp_path, text))["autoscaling_config"]
    bounds = [told[f"{name}_replicas"] for name in ("min", "initial", "max")]
    assert bounds == [1, 2, 5] and told["metrics_interval_s"] == 1
    again = fleet_ray.number_of(fleet_of(tmp_path, text), again=True)["autoscaling_config"]
    assert again == {**told, "initial_replicas": None}, "a fleet that runs does not start anew"
    module, _, name = told["policy"]["policy_function"].partition(":")
    policy = getattr(importlib.import_module(module), name)(**told["policy"]["policy_kwargs"])
    assert (policy._rules.min_count, policy._rules.max_count, policy._rules.capacity) == (1, 5, 4)
