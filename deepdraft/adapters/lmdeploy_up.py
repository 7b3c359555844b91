"""`deepdraft lmdeploy up`: LMDeploy's server on a checkpoint, on a machine with a GPU.

Owns: what must be there first (a CUDA driver, an interpreter that has LMDeploy), bringing the
module map. Knows nothing of: how it is configured (`lmdeploy_launch`), how a server is kept
(`engine_up`).

Our environment `lmdeploy` has a torch for CPUs, for the check of its model; a server runs in an
installation of one's own.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from deepdraft.adapters.engine_up import serving
from deepdraft.adapters.environment_check import has_cuda
from deepdraft.adapters.environments import clean_environ, find
from deepdraft.adapters.lmdeploy_launch import Launch, write_server
from deepdraft.adapters.supervisor import Rules, Supervised
from deepdraft.errors import ConfigError

_ASK_S = 60.0
_VERSION = "import importlib.metadata as m; print(m.version('lmdeploy'))"


def tried_version() -> str:
    """The LMDeploy that our facts are about."""
    return find("lmdeploy").pins()["lmdeploy"]


def installed_version(python: str) -> str:
    """The LMDeploy that an interpreter has. Raises ConfigError that says what is missing."""
    if not has_cuda():
        raise ConfigError(
            "LMDeploy runs on GPUs only, and this machine has no CUDA driver. `deepdraft lmdeploy "
            "check` works here; serve the checkpoint with `deepdraft serve` or `deepdraft vllm up`"
        )
    try:
        done = subprocess.run(
            [python, "-I", "-c", _VERSION],
            capture_output=True, text=True, timeout=_ASK_S, env=clean_environ(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--python {python} does not start: {error}") from error
    version = done.stdout.strip()
    if done.returncode or not version:
        raise ConfigError(
            f"{python} has no LMDeploy; install lmdeploy=={tried_version()} there with the torch "
            "that it asks for"
        )
    return version


@contextlib.contextmanager
def running(
    launch: Launch,
    python: str,
    *,
    port: int,
    name: str,
    extra: Sequence[str] = (),
    logs: Path | None = None,
    rules: Rules | None = None,
) -> Generator[Supervised]:
    """The server, kept running until the block ends. Raises ConfigError for a port in use, and for
    options that a server with our module map does not take."""
    if launch.stacked and extra:
        raise ConfigError(
            f"stacked experts are served by a program of ours, which takes no {extra[0]}; leave "
            "further options out"
        )
    with contextlib.ExitStack() as stack:
        if launch.stacked:
            prefix = "deepdraft-lmdeploy-"
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
            program = [str(write_server(launch, Path(folder), name)), str(port)]
        else:
            program = ["-m", "lmdeploy", *launch.words(), *launch.server_words(port, name), *extra]
        server = serving(
            "lmdeploy",
            [python, *program],
            environ=clean_environ(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"),
            port=port,
            logs=logs,
            rules=rules,
        )
        yield stack.enter_context(server)
