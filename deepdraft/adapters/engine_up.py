"""Another engine's server, kept running in the foreground: what `vllm up` and `lmdeploy up` share.

Owns: the port that must be free, the probe, the log's place, what is said while it runs.
Knows nothing of: engines; how a process is kept (`supervisor`).
"""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Never

from deepdraft.adapters.environment_check import port_is_free
from deepdraft.adapters.supervisor import Rules, Supervised, answers
from deepdraft.errors import ConfigError, EngineError

Say = Callable[[str], None]
START_S = 900.0
_LOOK_S = 0.5


@contextlib.contextmanager
def serving(
    engine: str,
    command: Sequence[str],
    *,
    environ: dict[str, str],
    port: int,
    logs: Path | None = None,
    rules: Rules | None = None,
) -> Generator[Supervised]:
    """An engine's server on 127.0.0.1, kept running until the block ends; well while /health
    gives 200. Raises ConfigError for a port in use or logs that cannot be kept."""
    if not port_is_free("127.0.0.1", port):
        raise ConfigError(f"--port {port} is taken; choose another")
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs {logs}: {error.strerror}") from error
    server = Supervised(
        engine,
        command,
        # It tells a dead engine core, which the process of the server outlives for a while.
        lambda: answers(f"http://127.0.0.1:{port}/health"),
        environ=environ,
        log=logs / f"{engine}.log" if logs else None,
        rules=rules or Rules(start_s=START_S),
    )
    with server:
        yield server


def foreground(server: Supervised, port: int, name: str, say: Say) -> Never:
    """Says what becomes of it until interrupted. Raises EngineError where it is given up."""
    say(f"starting {server.name}; its first answer takes a minute or so")
    server.wait_ready(server.rules.start_s)
    say(f"{name} is ready: http://127.0.0.1:{port}/v1 (metrics at /metrics)")
    phase = server.health.phase
    while True:
        time.sleep(_LOOK_S)
        now = server.health.phase
        if now == "failed":
            raise EngineError(f"{server.name}: {server.health.reason}")
        if now != phase:
            say("ready again" if now == "ready" else f"not ready: {server.health.reason or now}")
            phase = now
