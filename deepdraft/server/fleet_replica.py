"""One replica of a fleet: an engine that fronts find and talk to, inside Ray Serve.

Owns: what must hold before a replica is ready, when it is no longer healthy, how it leaves.
Knows nothing of: how replicas are placed, started and replaced (`fleet_ray`, Ray); HTTP; what
fronts ask (`fleet_node`). Ray calls the methods; importing this module imports neither Ray nor
torch.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepdraft import __version__
from deepdraft.config import Config, EngineConfig
from deepdraft.errors import ConfigError, EngineError
from deepdraft.parallel.rank import Rank
from deepdraft.server.fleet_config import FleetFile
from deepdraft.server.fleet_front import tokenizer_digest
from deepdraft.server.fleet_node import Node
from deepdraft.server.fleet_ranks import ReplicaRanks
from deepdraft.server.fleet_registry import Entry, RayRegistry
from deepdraft.server.fleet_spill import SpillFolder
from deepdraft.server.fleet_version import code_digest
from deepdraft.server.fleet_wire import Identity
from deepdraft.server.service import Service, bundled_checkpoint
from deepdraft.telemetry import configure_logging, logger

_SELFTEST_S = 1800.0
"""A self-test takes seconds; this much only where something is badly wrong."""
_LONGEST_NAME = 64
_LOOK_S = 0.2
"""Between two looks at the ranks while the model loads."""
_ANNOUNCE_S = 5.0
_END_S = 15.0
"""To leave, beside the time of requests and conversations."""
_GIVE_BACK_S = 5.0
"""For the last events of requests that go elsewhere."""


async def selftest(device: str) -> None:
    """Runs `deepdraft selftest` in a process of its own. Raises EngineError where it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deepdraft.cli.main", "selftest", "--device", device),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _SELFTEST_S)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        failed = [line.strip() for line in lines if line.strip().startswith("FAIL")] or lines[-1:]
        raise EngineError(f"deepdraft selftest fails on this machine: {'; '.join(failed)[:1000]}")


def with_label(app: ASGIApp, name: bytes, label: str) -> ASGIApp:
    """The application with a header that says who answered, and without the request's id, which
    Ray's proxy gave it or passed on, and writes into the answer itself."""
    header = (name, label.encode())

    async def labelled(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message.get("headers", ()) if h[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*kept, header]}
            await send(message)

        await app(scope, receive, sent if scope["type"] == "http" else send)

    return labelled


class Replica:
    """What Ray Serve makes `replicas.count` of. `__init__` returns when the model is warm."""

    async def __init__(self, fleet: FleetFile, version: str, label: str | None = None) -> None:
        """`version`: of the deepdraft that started the fleet; `label`: of this replica, by default
        the machine's name and what Ray calls it.

        Raises ConfigError, CheckpointError or EngineError; then Ray counts a failed start.
        """
        if version != __version__:
            raise ConfigError(
                f"the fleet was started by deepdraft {version}, this node has {__version__}; "
                "install the same on every node"
            )
        self.label = label or _label()
        self._fleet = fleet
        self._leaves: asyncio.Task[None] | None = None
        config = fleet.of_replica(self.label, _host(fleet))
        configure_logging(config.server.log_level, config.server.log_format)
        self._spill: SpillFolder | None = None
        if config.engine.kv_spill is not None:
            self._spill = SpillFolder(Path(config.engine.kv_spill) / fleet.name)
            engine = dataclasses.replace(config.engine, kv_spill=str(self._spill.path))
            config = dataclasses.replace(config, engine=engine)
        self._ranks: ReplicaRanks | None = None
        rank: Rank | None = None
        if config.engine.tp > 1:
            self._ranks = ReplicaRanks(model_path(fleet), config.engine, self.label)
            rank = self._ranks.start()
        self.service = Service(lambda: load(fleet, config.engine, rank), config)
        self.service.start()
        # Side by side: neither needs the other, and both take seconds.
        tests = selftest(config.engine.device) if fleet.replicas.selftest else _nothing()
        try:
            await asyncio.gather(tests, asyncio.to_thread(self._wait_loaded))
            await self._open()
        except BaseException:
            await asyncio.to_thread(self._close_engine)
            raise
        # Of this object, not of its class: Ray Serve calls and awaits it when the replica is to
        # leave; Python itself, at the end of an object, does not.
        self.__dict__["__del__"] = self.leave
        logger.info("replica %s is ready", self.label)

    def _wait_loaded(self) -> None:
        while not self.service.wait(_LOOK_S):
            if self._ranks is not None:
                self._ranks.check()
        if self.service.failure is not None:
            raise self.service.failure
        if self._ranks is not None:
            self._ranks.serve()
        if self._spill is not None:
            reuse = self.service.ready()[0].reuse
            if reuse is not None and reuse.cache.spill is not None:
                self._spill.keep_only(reuse.cache.spill.path)

    def _close_engine(self) -> None:
        """Ends engine and ranks; the folder of conversations is free."""
        self.service.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._spill is not None:
            self._spill.release()

    async def _open(self) -> None:
        """Fronts can find the engine from now on."""
        self._registry = RayRegistry(self._fleet.name)
        replicas = self._fleet.replicas
        self.node = Node(
            self.service,
            identity_of(self.service, self.label, model_path(self._fleet)),
            await asyncio.to_thread(self._registry.secret),
            hang_s=replicas.hang_s,
            resume=replicas.resume,
            tls=server_tls(self.service.config),
        )
        host = _host(self._fleet)
        port = await self.node.start(host)
        self.entry = Entry(self.label, self.node.identity.incarnation, host, port)
        await asyncio.to_thread(self._registry.put, self.entry)
        self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        """A front that could not reach this engine for long has taken it out of the registry."""
        while True:
            await asyncio.sleep(_ANNOUNCE_S)
            with contextlib.suppress(Exception):  # Ray's own; fronts keep what they have
                if self.entry not in await asyncio.to_thread(self._registry.entries):
                    await asyncio.to_thread(self._registry.put, self.entry)
                asked = self._registry.asked_to_leave
                if await asyncio.to_thread(asked, self.entry.incarnation):
                    self._begin_to_leave()
                    return

    async def check_health(self) -> None:
        """Called by Ray Serve every `look_s`. Raises EngineError where the engine is dead or
        hangs, and where it has left because it was asked to: then Ray starts another."""
        if self._leaves is not None:
            if self._leaves.done() or asyncio.get_running_loop().time() > self._gone_by:
                raise EngineError("this replica was drained")
            return
        self.node.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve every `look_s` where the number of replicas follows the load, of
        which `fleet_scale.Policy` hears this."""
        load = self.node.load()
        wait_s = load.to_read * load.prompt_us / 1e6
        return {
            "running": float(load.running),
            "waiting": float(load.waiting),
            "wait_s": wait_s,
        }

    async def leave(self) -> None:
        """See `_leave`; once only."""
        await asyncio.shield(self._begin_to_leave())

    def _begin_to_leave(self) -> asyncio.Task[None]:
        if self._leaves is None:
            config = self._fleet.config
            most_s = config.server.drain_s + config.fleet.hand_over_s + _END_S
            self._gone_by = asyncio.get_running_loop().time() + most_s
            self._leaves = asyncio.create_task(self._leave())
        return self._leaves

    async def _leave(self) -> None:
        """Takes nothing new, finishes what it can within `server.drain_s`, gives the rest to the
        other replicas, and its conversations too."""
        drain_s = self._fleet.config.server.drain_s
        logger.info("replica %s leaves; %d requests", self.label, self.node.num_requests)
        self._announcing.cancel()
        with contextlib.suppress(Exception):  # Ray may be ending as well
            await asyncio.to_thread(self._registry.drop, self.entry.incarnation)
        self.node.begin_drain()
        if not await self.node.wait_idle(drain_s):
            self.node.give_back()
            await self.node.wait_idle(_GIVE_BACK_S)
        await asyncio.to_thread(self._close_engine)
        await self.node.close()


def model_path(fleet: FleetFile) -> Path:
    """The checkpoint directory on this node."""
    return bundled_checkpoint() if fleet.model is None else Path(fleet.model)


def load(fleet: FleetFile, options: EngineConfig, rank: Rank | None) -> Any:
    """The fleet's model in this process, as one of several with `rank`. Raises CheckpointError,
    ConfigError."""
    from deepdraft.engine.load import load_engine

    path = model_path(fleet)
    name = "demo" if fleet.model is None else path.resolve().name
    return load_engine(path, options, name=name, rank=rank)


def identity_of(service: Service, label: str, path: Path) -> Identity:
    """Who this process is: of a service that has loaded the checkpoint in `path`."""
    engine, view = service.ready()
    speculator = engine.speculator
    return Identity(
        label=label,
        incarnation=secrets.token_hex(16),
        version=__version__,
        code=code_digest(),
        fingerprint=view.fingerprint,
        tokenizer=tokenizer_digest(path),
        names=view.names,
        family=view.family,
        vocab_size=view.vocab_size,
        max_tokens=view.max_tokens,
        eos_token_id=view.eos_token_id,
        bos_token_id=view.bos_token_id,
        more_end_ids=tuple(sorted(view.more_end_ids)),
        created=view.created,
        defaults=dict(view.defaults),
        drafts=speculator.block_size,
        rule=speculator.options.rule,
    )


def server_tls(config: Config) -> Any:
    """What an engine shows to fronts, where the fleet has certificates. Raises ConfigError."""
    if config.fleet.files is None:
        return None
    from deepdraft.kv.fleet_files import load_fleet

    return load_fleet(Path(config.fleet.files)).server_tls


async def _nothing() -> None:
    return


def _host(fleet: FleetFile) -> str:
    """Where fronts reach this node: on a Ray of our own all are on this machine."""
    if fleet.ray.address is None:
        return "127.0.0.1"
    util: Any = importlib.import_module("ray.util")
    return str(util.get_node_ip_address())


def _label() -> str:
    serve: Any = importlib.import_module("ray.serve")
    unique = serve.get_replica_context().replica_id.unique_id
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return f"{host[: _LONGEST_NAME - 1 - len(unique)]}-{unique}"
