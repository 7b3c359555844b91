"""`deepdraft vllm up`: vLLM's server on a checkpoint; and what its own parser says first.

Owns: bringing the plugin. Knows nothing of: how it is configured (`vllm_launch`), how a server is
kept (`engine_up`).
"""

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from deepdraft.adapters import child, vllm_parse_child, vllm_plugin
from deepdraft.adapters.engine_up import serving
from deepdraft.adapters.environments import Environment
from deepdraft.adapters.supervisor import Rules, Supervised
from deepdraft.adapters.vllm_launch import Launch

_PARSE_S = 300.0


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
    with contextlib.ExitStack() as stack:
        plugin = stack.enter_context(vllm_plugin.directory()) if launch.plugin else None
        server = serving(
            "vllm",
            [*launch.command(environment, port, name), *extra],
            environ=launch.variables(plugin),
            port=port,
            logs=logs,
            rules=rules,
        )
        yield stack.enter_context(server)
