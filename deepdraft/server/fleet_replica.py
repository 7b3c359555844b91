"""One replica of a fleet: an engine behind the application of `deepdraft serve`, inside Ray Serve.

Owns: what must hold before a replica is ready, when it is no longer healthy.
Knows nothing of: how replicas are placed, started and replaced (`fleet_ray`, Ray); HTTP. Ray calls
the methods; importing this module imports neither Ray nor torch.
"""

import asyncio
import contextlib
import re
import socket
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepdraft import __version__
from deepdraft.errors import ConfigError, EngineError
from deepdraft.server.fleet_config import FleetFile
from deepdraft.server.service import Service, bundled_checkpoint
from deepdraft.telemetry import configure_logging, logger

HEADER = b"x-deepdraft-replica"
_SELFTEST_S = 1800.0
"""A self-test takes seconds; this much only where something is badly wrong."""
_LONGEST_NAME = 64
_PROGRESS = ("decode_steps", "prompt_tokens", "generated_tokens")
"""Counters of which one moves with each step of an engine that is at work."""


class Watch:
    """Whether an engine goes on: it must make progress while it has requests."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._progress: tuple[int, ...] = ()
        self._since = 0.0

    def look(self, stats: dict[str, int], now: float) -> None:
        """`stats`: the engine's counters; `now`: seconds of a clock that never goes back.

        Raises EngineError where requests have waited for `hang_s` without a step.
        """
        progress = tuple(stats.get(n, 0) for n in _PROGRESS)
        busy = stats.get("running", 0) + stats.get("waiting", 0)
        if not busy or progress != self._progress:
            self._progress, self._since = progress, now
        elif now - self._since >= self._hang_s:
            raise EngineError(
                f"the engine has made no step for {now - self._since:.0f} s with {busy} requests"
            )


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


def with_label(app: ASGIApp, label: str) -> ASGIApp:
    """The application with a header that says which replica answered, and without the request's id,
    which Ray's proxy gave it or passed on, and writes into the answer itself."""
    header = (HEADER, label.encode())

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
        self.service = Service(lambda: load(fleet), fleet.of_replica(self.label))
        server = self.service.config.server
        configure_logging(server.log_level, server.log_format)
        self._watch = Watch(fleet.replicas.hang_s)
        self.service.start()
        # Side by side: neither needs the other, and both take seconds.
        tests = selftest(fleet.config.engine.device) if fleet.replicas.selftest else _nothing()
        try:
            await asyncio.gather(tests, asyncio.to_thread(self.service.wait))
            if self.service.failure is not None:
                raise self.service.failure
        except BaseException:
            await asyncio.to_thread(self.service.close)
            raise
        logger.info("replica %s is ready", self.label)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray Serve after `__init__`."""
        from deepdraft.server.app import create_app

        return with_label(create_app(self.service), self.label)

    async def check_health(self) -> None:
        """Called by Ray Serve every `look_s`. Raises EngineError where the engine is dead or hangs.

        Counters are read in a thread: a hung engine may hold their lock.
        """
        health = await asyncio.to_thread(self.service.health)
        if health["state"] == "failed":
            raise EngineError("the engine has failed; its log says why")
        await asyncio.to_thread(lambda: self._watch.look(self.service.stats(), time.monotonic()))


def load(fleet: FleetFile) -> Any:
    """The fleet's model in this process. Raises CheckpointError, ConfigError."""
    from pathlib import Path

    from deepdraft.engine.load import load_engine

    path = bundled_checkpoint() if fleet.model is None else Path(fleet.model)
    name = "demo" if fleet.model is None else path.resolve().name
    return load_engine(path, fleet.config.engine, name=name)


async def _nothing() -> None:
    return


def _label() -> str:
    import importlib

    serve: Any = importlib.import_module("ray.serve")
    unique = serve.get_replica_context().replica_id.unique_id
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return f"{host[: _LONGEST_NAME - 1 - len(unique)]}-{unique}"
