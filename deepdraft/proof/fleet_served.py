"""Fleets that a measurement starts: plain servers with one directory, or replicas on Ray.

Owns: their processes, their Redis, addresses, counters read from /metrics, processor time.
Knows nothing of: what is asked. Everything started here ends with its block.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepdraft.errors import ConfigError
from deepdraft.proof.served import served

Kind = Literal["servers", "replicas", "url"]
_START_S = 600.0
_MAX_METRICS = 16 << 20
_KV_BYTES = 512 << 20
"""Of each server: no conversation of a measurement is evicted."""


@dataclass(frozen=True, slots=True)
class Started:
    """A fleet that answers."""

    urls: tuple[str, ...]
    """One for each server; of a fleet with its own routing one for all."""
    pids: tuple[int, ...]
    """Processes whose time, with that of their children, is the fleet's; none where not known."""

    def counters(self) -> Counter[str]:
        """Every sample of /metrics without its labels, summed over servers and labels."""
        total: Counter[str] = Counter()
        for url in self.urls:
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
                text = answer.read(_MAX_METRICS).decode()
            total.update(samples(text))
        return total

    def cpu_s(self) -> float:
        """Processor seconds so far of the processes and of their descendants that live."""
        return sum(map(tree_cpu_s, self.pids))


def samples(text: str) -> Counter[str]:
    """An exposition's samples by name, summed over labels; of a fleet's (`replica` labels beside
    sums) the sums alone. Histograms' buckets are left out."""
    total: Counter[str] = Counter()
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#") or not name or "replica=" in name or "_bucket{" in name:
            continue
        with contextlib.suppress(ValueError):
            total[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return total


def tree_cpu_s(root: int) -> float:
    """User and system seconds of a process and its living descendants; 0 where it is gone."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything.
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            ticks[int(entry)] = int(fields[11]) + int(fields[12])
            children.setdefault(int(fields[1]), []).append(int(entry))
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def directory() -> Generator[str]:
    """A Redis of our own, without data on disk. Raises ConfigError where there is none."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise ConfigError("sharing needs redis-server or valkey-server, which is not installed")
    port = free_port()
    words = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir"]
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen([*words, place], stdout=subprocess.DEVNULL)
        try:
            _wait_port(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def _wait_port(process: "subprocess.Popen[bytes]", port: int) -> None:
    until = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
            return
        if process.poll() is not None or time.monotonic() > until:
            raise ConfigError("the Redis of the measurement does not start")
        time.sleep(0.02)


@contextlib.contextmanager
def servers(model: str | None, count: int, *, sharing: bool) -> Generator[Started]:
    """`count` processes of `deepdraft serve`; with `sharing` they fetch from each other."""
    with contextlib.ExitStack() as stack:
        options = ["--kv-memory", str(_KV_BYTES)]
        if sharing and count > 1:
            options += ["--kv-directory", stack.enter_context(directory())]
        started = []
        for i in range(count):
            own = [*options, "--kv-name", f"bench-{i}"] if "--kv-directory" in options else options
            started.append(stack.enter_context(served(model, own, timeout_s=_START_S)))
        yield Started(tuple(s.url for s in started), tuple(s.pid for s in started))


@contextlib.contextmanager
def replicas(
    model: str | None, count: int, *, sharing: bool, extra: str = ""
) -> Generator[Started]:
    """A fleet of `count` replicas on a Ray of its own. `extra`: lines of its file's [replicas].

    Raises ConfigError with the last lines it said where it does not become ready.
    """
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddfb")))
        url = stack.enter_context(directory()) if sharing and count > 1 else None
        port = free_port()
        file = place / "fleet.toml"
        file.write_text(fleet_file(model, count, port, url, extra))
        said = place / "said"
        command = [sys.executable, "-m", "deepdraft.cli.main", "fleet", "up", str(file)]
        environment = {**os.environ, "XDG_STATE_HOME": str(place / "state")}
        with said.open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + _START_S
            while "are ready at" not in said.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > until:
                    last = said.read_text(errors="replace").strip().splitlines()[-5:]
                    raise ConfigError(f"the fleet does not become ready: {' / '.join(last)}")
                time.sleep(0.1)
            yield Started((f"http://127.0.0.1:{port}",), (process.pid,))
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def fleet_file(model: str | None, count: int, port: int, url: str | None, extra: str = "") -> str:
    """The settings of a measured fleet."""
    cores = os.cpu_count() or 1
    lines = [
        f'name = "bench{os.getpid()}-{port}"',
        *([f'model = "{Path(model).resolve()}"'] if model is not None else []),
        f"[engine]\nkv_memory = {_KV_BYTES}",
        f"[server]\nport = {port}\ndrain_s = 10",
        *([f'[fleet]\ndirectory = "{url}"'] if url is not None else []),
        f"[replicas]\ncount = {count}\ncpus = {min(1.0, 0.9 * cores / (count + 1)):.2f}",
        "selftest = false",
        *([extra] if extra else []),
    ]
    return "\n".join(lines) + "\n"
