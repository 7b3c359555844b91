"""A server process of our own, for measurements through HTTP.

Owns: its start, the wait until it is ready, its end. Knows nothing of: what is measured.
"""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepdraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    url: str
    pid: int
    ready_s: float
    """From the start of the process to the first 200 of /readyz."""


@contextlib.contextmanager
def served(
    model: str | Path | None, options: Sequence[str] = (), *, timeout_s: float = 120.0
) -> Generator[Served]:
    """Serves a model (None: the bundled one) on a free port. Raises ConfigError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepdraft.cli.main", "serve", "--port", str(port), *options]
    if model is not None:
        command.insert(4, str(model))
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise ConfigError(f"the server ended with status {process.returncode}")
            if time.perf_counter() - begin > timeout_s:
                raise ConfigError(f"the server was not ready within {timeout_s} s")
            time.sleep(0.02)
        yield Served(url, process.pid, time.perf_counter() - begin)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False
