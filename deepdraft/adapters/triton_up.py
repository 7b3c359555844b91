"""`deepdraft triton up`: the bundled Triton server on an exported repository, with its engine.

Owns: what is started in which order, which model is loaded when, the end.
Knows nothing of: how requests are served.

Triton counts a Python model as ready for as long as its process lives, whatever became of the
engine behind it. So models are loaded explicitly: while the engine's readiness path answers 200.
"""

import contextlib
import http.client
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.adapters.environment_check import port_is_free, unused_regions
from deepdraft.adapters.environments import Environment, ready
from deepdraft.adapters.supervisor import Rules, Supervised, answers
from deepdraft.adapters.triton_export import Export, config_text, read_note
from deepdraft.adapters.triton_server import Ports, command, variables
from deepdraft.errors import ConfigError, EngineError
from deepdraft.telemetry import logger

Say = Callable[[str], None]
_READY_S = 60.0
_ENGINE_S = 600.0
_PROBE_EVERY_S = 0.25
_UNLOAD_AFTER = 2


@dataclass(slots=True)
class Running:
    """A Triton server with its engine."""

    ports: Ports
    export: Export
    engine_url: str
    triton: Supervised
    engine: Supervised | None
    gate: "Gate"
    """Loads and unloads the model as the engine comes and goes."""

    @property
    def http_url(self) -> str:
        """Where KServe's HTTP protocol is spoken."""
        return f"http://{self.ports.host}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        """Where KServe's gRPC protocol is spoken."""
        return f"{self.ports.host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """Triton's own counters."""
        return f"http://{self.ports.host}:{self.ports.metrics}/metrics"

    def is_ready(self) -> bool:
        """Whether the model takes requests: Triton says so, and its engine does."""
        return self.gate.loaded and self.gate.engine_is_ready() and self.gate.model_is_ready()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises EngineError where it is not ready in time, or given up."""
        limit = time.monotonic() + timeout_s
        while not self.is_ready():
            for part in (self.triton, self.engine):
                if part is not None and part.health.phase == "failed":
                    raise EngineError(f"{part.name}: {part.health.reason}")
            if time.monotonic() > limit:
                raise EngineError(
                    f"model {self.export.name} was not ready within {timeout_s:g} s: "
                    f"{self.gate.last_error or 'the engine is not ready'}"
                )
            time.sleep(0.05)


class Gate:
    """Keeps a Triton model loaded exactly while its engine is ready."""

    def __init__(self, http_url: str, model: str, engine_ready: Callable[[], bool]) -> None:
        self._http_url, self._model, self._engine_ready = http_url, model, engine_ready
        self.loaded = False
        self.last_error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="triton gate", daemon=True)

    def start(self) -> None:
        """Begins to probe."""
        self._thread.start()

    def stop(self) -> None:
        """Ends probing; the model stays as it is."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        misses = 0
        while not self._stop.wait(_PROBE_EVERY_S):
            misses = 0 if self.engine_is_ready() else misses + 1
            if misses == 0 and not self.model_is_ready():
                self.loaded = self._control("load")
            elif misses == 0:
                self.loaded = True
            elif misses == _UNLOAD_AFTER and self.loaded:
                logger.warning("the engine is not ready; model %s is unloaded", self._model)
                self.loaded = False
                self._control("unload")

    def engine_is_ready(self) -> bool:
        """Asks the engine now."""
        try:
            return self._engine_ready()
        except Exception as error:
            self.last_error = str(error)
            return False

    def model_is_ready(self) -> bool:
        """Asks Triton now."""
        try:
            return answers(f"{self._http_url}/v2/models/{self._model}/ready")
        except (OSError, http.client.HTTPException):
            return False

    def _control(self, what: str) -> bool:
        try:
            status, body = post(f"{self._http_url}/v2/repository/models/{self._model}/{what}", {})
        except (OSError, http.client.HTTPException) as error:
            self.last_error = f"Triton does not answer: {error}"
            return False
        if status != 200:
            self.last_error = body.decode("utf-8", "replace")[:500]
        return status == 200


def post(url: str, value: Any, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Status and body of a POST of JSON. Raises OSError or http.client.HTTPException."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", parts.path, json.dumps(value), headers)
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    finally:
        connection.close()


def choose_ports(host: str, http_port: int, grpc_port: int, metrics_port: int) -> Ports:
    """Ports that are free; 0 means any. Raises ConfigError that names one that is taken, or a host
    that is none of this machine's."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host} is no IPv4 address or name of this machine: {error}"
        ) from error
    wanted = {"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port}
    fixed = [p for p in wanted.values() if p]
    if len(set(fixed)) != len(fixed):
        raise ConfigError(f"the ports must differ, got {fixed}")
    for flag, port in wanted.items():
        if port and not port_is_free(host, port):
            raise ConfigError(f"{flag} {port} is taken on {host}; choose another, or 0 for any")
    with contextlib.ExitStack() as stack:
        chosen = []
        for port in wanted.values():
            if not port:
                probe = stack.enter_context(socket.socket())
                probe.bind((host, 0))
                port = probe.getsockname()[1]
            chosen.append(port)
    return Ports(host, *chosen)


@contextlib.contextmanager
def running(
    repository: Path,
    *,
    ports: Ports | None = None,
    engine_rules: Rules | None = None,
    logs: Path | None = None,
    environment: Environment | None = None,
    say: Say = lambda text: None,
) -> Generator[Running]:
    """Starts engine and server, and ends both, whatever happens. Raises DeepdraftError."""
    export = read_note(repository)
    environment = environment or ready("triton")
    ports = ports or choose_ports("127.0.0.1", 0, 0, 0)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepdraft-triton-")))
        folder = logs or work
        folder.mkdir(parents=True, exist_ok=True)
        engine, engine_url = None, export.engine_url
        if engine_url is None:
            engine, engine_url = _own_engine(export, folder, engine_rules or Rules())
        served = _copy(repository, export, engine_url, work / "repository")
        triton = Supervised(
            "triton",
            command(environment, served, ports),
            lambda: answers(f"http://{ports.host}:{ports.http}/v2/health/live"),
            environ=variables(environment),
            log=folder / "triton.log",
            rules=Rules(start_s=_READY_S),
        )
        url = engine_url
        gate = Gate(
            f"http://{ports.host}:{ports.http}",
            export.name,
            lambda: answers(url.removesuffix("/v1") + export.ready_path),
        )
        stack.callback(_sweep_shared_memory)
        for part in (engine, triton):
            if part is not None:
                stack.enter_context(part)
        gate.start()
        stack.callback(gate.stop)
        say(f"starting Triton on http {ports.http}, grpc {ports.grpc}, metrics {ports.metrics}")
        triton.wait_ready(_READY_S)
        yield Running(ports, export, engine_url, triton, engine, gate)


def _own_engine(export: Export, folder: Path, rules: Rules) -> tuple[Supervised, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "deepdraft.cli.main", "serve", str(export.checkpoint)]
    # The address is ours alone; whoever may reach Triton may use the model.
    environ = {k: v for k, v in os.environ.items() if k != "DEEPDRAFT_API_KEY"}
    engine = Supervised(
        "engine",
        [*serve, "--port", str(port), *export.serve_options],
        lambda: answers(f"{url}/readyz"),
        environ=environ,
        log=folder / "engine.log",
        rules=rules,
    )
    return engine, url


def _copy(repository: Path, export: Export, engine_url: str, to: Path) -> Path:
    """The repository as it is served: with the engine's address of this run."""
    shutil.copytree(repository / export.name, to / export.name)
    (to / export.name / "config.pbtxt").write_text(config_text(export, engine_url))
    return to


def _sweep_shared_memory() -> None:
    """Takes away regions that a killed server left; those of a server that runs are in use."""
    for region in unused_regions():
        with contextlib.suppress(OSError):
            region.unlink()


def up(repository: Path, ports: Ports, *, logs: Path | None, rules: Rules, say: Say) -> int:
    """Runs until interrupted."""
    with running(repository, ports=ports, logs=logs, engine_rules=rules, say=say) as server:
        server.wait_ready(_ENGINE_S)
        say(
            f"model {server.export.name} is ready: {server.http_url}/v2/models/{server.export.name}"
        )
        was = True
        while True:
            time.sleep(0.5)
            for part in (server.triton, server.engine):
                if part is not None and part.health.phase == "failed":
                    raise EngineError(f"{part.name}: {part.health.reason}")
            now = server.gate.loaded
            if now != was:
                say(
                    "ready again"
                    if now
                    else f"not ready: {server.gate.last_error or 'engine down'}"
                )
                was = now
