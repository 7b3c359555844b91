"""The file that describes a fleet: which model, how many replicas, on which Ray.

Owns: the tables `replicas` and `ray`, what of `engine`, `server` and `fleet` a fleet cannot have.
Knows nothing of: Ray itself. Everything here is checked before Ray is imported.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepdraft.config import (
    Config,
    build_settings,
    is_int,
    load_config,
    memory_of_machine,
    read_settings,
    require,
    require_number,
)
from deepdraft.errors import ConfigError

_TABLES = ("engine", "server", "fleet", "replicas", "ray")
_GPUS = (0, 1, 2, 4, 8)
_MOST_FRONTS, _MOST_DIRECTORY = 256, 36
_PATHS = {
    "engine": ("kv_spill", "cost_table"),
    "server": ("tls_cert", "tls_key"),
    "fleet": ("files",),
    "ray": ("directory",),
}
"""Settings that are paths. Replicas may run in another directory, so they are made absolute."""
LEAST_QUIET_S = 2.0
"""Replicas give a sign of life twice a second, busy ones somewhat late."""
_STATE_SHARE = 4
"""Sequences take this part of the machine's memory, as in `serve`; here all replicas together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many engines there are, and what each of them gets."""

    count: int = 2
    """At the start, and for good without `min_count` and `max_count`."""
    min_count: int | None = None
    max_count: int | None = None
    """The number follows the load between these; None: `count`."""
    busy: float = 0.7
    """Part of `engine.max_running` that is to be in use: more asks for a further replica."""
    wait_s: float = 2.0
    """Seconds that a prompt may wait for those before it, likewise."""
    up_s: float = 10.0
    """Seconds that more replicas must have been needed until one is started."""
    down_s: float = 300.0
    """Seconds that fewer would have done until one leaves, and between two that leave."""
    cpus: float = 1.0
    """CPUs that Ray sets aside for each."""
    gpus: int = 0
    """GPUs of each, on one node: 0, 1, 2, 4 or 8."""
    selftest: bool = True
    """Whether each runs `deepdraft selftest` before it is ready."""
    hang_s: float = 60.0
    """Seconds that requests may wait for an engine that makes no step, until it is replaced."""
    look_s: float = 2.0
    """Seconds between two looks at a replica; the third bad one in a row has it replaced."""
    quiet_s: float = 5.0
    """Seconds of silence of a replica until what can run elsewhere does."""
    fronts: int = 1
    """Processes that read requests and write answers, before the replicas."""
    resume: bool = False
    """Whether streams under way go on in another replica where theirs is lost."""
    sticky: bool = False
    """Whether a conversation (by its session header) goes to the same replica while that is
    there, whatever the load."""

    def __post_init__(self) -> None:
        require(is_int(self.count, 1), "replicas.count", self.count, "an integer >= 1")
        low, high = self.bounds
        ok = is_int(low, 1) and low <= self.count
        require(ok, "replicas.min_count", low, "an integer from 1 to replicas.count")
        ok = is_int(high, self.count)
        require(ok, "replicas.max_count", high, "an integer >= replicas.count")
        require_number("replicas.busy", self.busy, 0.05, 1)
        require_number("replicas.cpus", self.cpus, 0.01)
        ok = is_int(self.gpus) and self.gpus in _GPUS
        require(ok, "replicas.gpus", self.gpus, "0, 1, 2, 4 or 8")
        ok = is_int(self.fronts, 1) and self.fronts <= _MOST_FRONTS
        require(ok, "replicas.fronts", self.fronts, f"an integer from 1 to {_MOST_FRONTS}")
        for name in ("selftest", "resume", "sticky"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"replicas.{name}", value, "true or false")
        for name in ("look_s", "wait_s", "up_s", "down_s"):
            require_number(f"replicas.{name}", getattr(self, name), 0.1)
        require_number("replicas.quiet_s", self.quiet_s, LEAST_QUIET_S)
        require_number("replicas.hang_s", self.hang_s, LEAST_QUIET_S)
        rule = f"at least replicas.quiet_s ({self.quiet_s:g})"
        require(self.hang_s >= self.quiet_s, "replicas.hang_s", self.hang_s, rule)

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most replicas."""
        low = self.count if self.min_count is None else self.min_count
        high = self.count if self.max_count is None else self.max_count
        return low, high

    @property
    def scales(self) -> bool:
        """Whether their number follows the load."""
        return self.bounds != (self.count, self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Which Ray the fleet lives on."""

    address: str | None = None
    """host:port of a Ray that runs; None: one is started on this machine, on loopback."""
    cpus: int | None = None
    """CPUs that the started Ray may give away; None: the machine's."""
    directory: str | None = None
    """Where the started Ray keeps its logs; None: a temporary one, kept only after a failure."""
    start_s: float = 900.0
    """Seconds until all replicas must be ready."""

    def __post_init__(self) -> None:
        ok = self.address is None or (
            isinstance(self.address, str)
            and re.fullmatch(r"[\w.\[\]:-]+:\d{1,5}", self.address) is not None
        )
        require(ok, "ray.address", self.address, "host:port, or absent")
        ok = self.cpus is None or is_int(self.cpus, 1)
        require(ok, "ray.cpus", self.cpus, "an integer >= 1, or absent")
        ok = self.directory is None or (
            isinstance(self.directory, str) and 0 < len(self.directory) <= _MOST_DIRECTORY
        )
        rule = f"a path of at most {_MOST_DIRECTORY} characters (sockets lie in it), or absent"
        require(ok, "ray.directory", self.directory, rule)
        require_number("ray.start_s", self.start_s, 1)
        for name in ("cpus", "directory"):
            ok = self.address is None or getattr(self, name) is None
            require(ok, f"ray.{name}", getattr(self, name), "absent with ray.address")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """A fleet, as its file describes it."""

    name: str = "deepdraft"
    """Of the application on Ray, and of `status`, `drain` and `down`."""
    model: str | None = None
    """A checkpoint directory, the same path on every node; None: the bundled model."""
    config: Config = field(default_factory=Config)
    """What each replica is told, as `deepdraft serve` would be."""
    replicas: Replicas = field(default_factory=Replicas)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        ok = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,40}", self.name)
        require(bool(ok), "name", self.name, "1 to 40 letters, digits, _ or -")
        ok = self.model is None or (isinstance(self.model, str) and bool(self.model))
        require(ok, "model", self.model, "a checkpoint directory, or absent")
        server, fleet = self.config.server, self.config.fleet
        require(server.port > 0, "server.port", server.port, "a port of its own in a fleet")
        self._settle_gpus()
        if fleet.directory is not None:
            require(
                fleet.address()[1] == 0,
                "fleet.listen",
                fleet.listen,
                "host:0 in a fleet: each replica takes a free port",
            )

    def _settle_gpus(self) -> None:
        """An engine has a rank for each of its GPUs; without GPUs, as many as `engine.tp` says."""
        engine, gpus = self.config.engine, self.replicas.gpus
        on_gpu = engine.device == "cuda"
        rule = f'{"1, 2, 4 or 8" if on_gpu else "0"} with engine.device = "{engine.device}"'
        require(on_gpu == bool(gpus), "replicas.gpus", gpus, rule)
        if on_gpu and gpus != engine.tp:
            rule = f"absent or {gpus}, as replicas.gpus"
            require(engine.tp == 1, "engine.tp", engine.tp, rule)
            engine = replace(engine, tp=gpus)
        if engine.tp > 1:
            for name in ("kv_spill", "kv_memory"):
                value, rule = getattr(engine, name), "absent: several ranks keep no conversations"
                require(value in (None, 0, "auto"), f"engine.{name}", value, rule)
            engine = replace(engine, kv_memory=0)
        object.__setattr__(self, "config", replace(self.config, engine=engine))

    @property
    def url(self) -> str:
        """Where clients connect to on this machine."""
        server = self.config.server
        host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
        scheme = "http" if server.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"

    def of_replica(self, label: str, host: str = "127.0.0.1") -> Config:
        """The settings of one replica, in its own process.

        `label` is its name in the directory of conversations, unless the file or certificates say
        it; its sequences take their share of the machine's memory. `host`: of its node, told to
        peers where it listens on every address.
        """
        config, count = self.config, self.replicas.bounds[1]
        engine, fleet = config.engine, config.fleet
        if engine.state_memory == "auto":
            share = memory_of_machine() // _STATE_SHARE // count
            engine = replace(engine, state_memory=share)
        if fleet.files is None and fleet.name is None:
            fleet = replace(fleet, name=label)
        if fleet.advertise is None and fleet.address()[0] in ("0.0.0.0", "::"):
            fleet = replace(fleet, advertise=host)
        if engine.tp > 1:
            fleet = replace(fleet, directory=None)  # limits of keys are the fronts'
        return replace(config, engine=engine, fleet=fleet)


def _absolute(table: dict[str, Any], names: Iterable[str]) -> None:
    """Makes paths absolute, from the working directory as `serve` takes them."""
    for name in names:
        if table.get(name) and isinstance(table[name], str):
            table[name] = os.path.abspath(table[name])


def load_fleet_file(file: str | Path) -> FleetFile:
    """Reads and checks a fleet's TOML file. Raises ConfigError, which names the setting."""
    tables = read_settings(file)
    for name in tables:
        if name not in (*_TABLES, "name", "model"):
            known = ", ".join(f"[{table}]" for table in _TABLES)
            raise ConfigError(f"unknown entry {name} in {file}; known: name, model, {known}")
    for name in _TABLES:
        table = tables.setdefault(name, {})
        if not isinstance(table, dict):
            require(False, f"{name} in {file}", table, "a table")
        _absolute(table, _PATHS.get(name, ()))
    _absolute(tables, ("model",))
    config = load_config(engine=tables["engine"], server=tables["server"], fleet=tables["fleet"])
    return FleetFile(
        **{name: tables[name] for name in ("name", "model") if name in tables},
        config=config,
        replicas=build_settings(Replicas, "replicas", tables["replicas"]),
        ray=build_settings(RayConfig, "ray", tables["ray"]),
    )
