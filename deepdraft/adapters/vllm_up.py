"""`deepdraft vllm up`: vLLM's server on a checkpoint, watched; and what its own parser says first.

Owns: what is started, when it counts as well, the end. Knows nothing of: how it is configured
(`vllm_launch`), how a process is kept (`supervisor`).
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Never

from deepdraft.adapters import child, vllm_parse_child, vllm_plugin
from deepdraft.adapters.environment_check import port_is_free
from deepdraft.adapters.environments import Environment
from deepdraft.adapters.supervisor import Rules, Supervised, answers
from deepdraft.adapters.vllm_launch import Launch
from deepdraft.errors import ConfigError, EngineError

Say = Callable[[str], None]
_PARSE_S = 300.0
START_S = 900.0
_LOOK_S = 0.5


def parsed(launch: Launch, environment: Environment, extra: Sequence[str] = ()) -> dict[str, Any]:
    """What vLLM's own parser makes of the settings, drafts included (`vllm_parse_child`).

    Starts no engine and reads no weights. Raises EngineError with its objection.
    """
    with contextlib.ExitStack() as stack:
        plugin = stack.enter_context(vllm_plugin.directory()) if launch.plugin else None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepdraft-vllm-"))
        return child.ask(
            "vLLM's parser of options",
            environment.python,
            vllm_parse_child.__file__,
            {"words": [*launch.words(), *extra]},
            folder=Path(folder),
            environ=launch.variables(plugin),
            timeout_s=_PARSE_S,
        )


@contextlib.contextmanager
def running(
    launch: Launch,
    environment: Environment,
    *,
    port: int,
    name: str,
    extra: Sequence[str] = (),
    logs: Path | None = None,
    rules: Rules | None = None,
) -> Generator[Supervised]:
    """The server, kept running until the block ends. Raises ConfigError for a port in use."""
    if not port_is_free("127.0.0.1", port):
        raise ConfigError(f"--port {port} is taken; choose another")
    with contextlib.ExitStack() as stack:
        plugin = stack.enter_context(vllm_plugin.directory()) if launch.plugin else None
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        server = Supervised(
            "vllm",
            [*launch.command(environment, port, name), *extra],
            # It tells a dead engine core, which the process of the server outlives for a while.
            lambda: answers(f"http://127.0.0.1:{port}/health"),
            environ=launch.variables(plugin),
            log=logs / "vllm.log" if logs else None,
            rules=rules or Rules(start_s=START_S),
        )
        yield stack.enter_context(server)


def up(server: Supervised, port: int, name: str, say: Say) -> Never:
    """Runs until interrupted."""
    say("starting vLLM; its first answer takes a minute or so")
    server.wait_ready(START_S)
    say(f"{name} is ready: http://127.0.0.1:{port}/v1 (metrics at /metrics)")
    phase = server.health.phase
    while True:
        time.sleep(_LOOK_S)
        now = server.health.phase
        if now == "failed":
            raise EngineError(f"vllm: {server.health.reason}")
        if now != phase:
            say("ready again" if now == "ready" else f"not ready: {server.health.reason or now}")
            phase = now
