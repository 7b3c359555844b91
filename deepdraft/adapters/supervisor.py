"""Keeps one engine running: start, health, restart with back-off, memory limit, log, metrics.

Owns: the life of one supervised process and what is left of it (nothing).
Knows nothing of: what the process is; a probe says whether it is well.

The process runs on a leash (`leash`) that ends it, and all it started, also where we are killed. A
fault is answered by ending everything and starting anew: an engine whose core died answers no more,
though its server may go on listening.
"""

import collections
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from deepdraft.adapters.leash import descendants
from deepdraft.errors import EngineError
from deepdraft.telemetry import logger

Phase = Literal["new", "starting", "ready", "ill", "waiting", "failed", "stopped"]
_LEASH = Path(__file__).with_name("leash.py")
_TAIL = 40
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MAX_METRICS = 8 << 20
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a process counts as ill, and what happens then."""

    probe_every_s: float = 0.25
    ill_after: int = 3
    """Failed probes in a row, of a process that was ready."""
    start_s: float = 300.0
    """Until the first probe that succeeds."""
    backoff_s: float = 0.2
    backoff_most_s: float = 30.0
    """The wait doubles with every failure in a row; a minute of health forgets them."""
    healthy_s: float = 60.0
    most_failures: int = 8
    """In a row; then it is given up."""
    most_first_failures: int = 2
    """The same, of a process that was never ready: its command or files are wrong."""
    memory_bytes: int | None = None
    """Resident memory of all its processes together."""
    grace_s: float = 10.0
    log_bytes: int = 16 << 20
    """Of the log; one older part is kept."""


@dataclass(slots=True)
class Health:
    """What became of a process so far."""

    phase: Phase = "new"
    starts: int = 0
    failures: int = 0
    """In a row."""
    reason: str = ""
    """Why it was started anew, or given up."""
    was_ready: bool = False
    """At any time."""
    ready_s: float | None = None
    """From the last start to the first good probe."""
    memory_bytes: int = 0
    history: list[str] = field(default_factory=list)


class Supervised:
    """A process that is kept running between `start` and `stop`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        probe: Callable[[], bool],
        *,
        environ: dict[str, str] | None = None,
        log: Path | None = None,
        rules: Rules | None = None,
        on_change: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        """`probe` says within a second or so whether the process is well; errors mean no."""
        self.name, self.rules = name, rules or Rules()
        self._command, self._probe = list(command), probe
        self._environ, self._log_path = environ, log
        self._on_change = on_change
        self.health = Health()
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        """The last lines that the process wrote."""
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._live, name=f"supervise {name}", daemon=True)

    def __enter__(self) -> "Supervised":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the process and everything it started; returns when nothing is left."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises EngineError where it is given up, or not ready in time."""
        limit = time.monotonic() + timeout_s
        with self._changed:
            while self.health.phase not in ("ready", "failed", "stopped"):
                left = limit - time.monotonic()
                if left <= 0:
                    raise EngineError(f"{self.name} was not ready within {timeout_s:g} s")
                self._changed.wait(left)
        if self.health.phase != "ready":
            raise EngineError(f"{self.name}: {self.health.reason}{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, for a message."""
        lines = [line for line in self.tail if line.strip()][-5:]
        return f"; it said: {' / '.join(lines)}"[:1500] if lines else ""

    def pids(self) -> list[int]:
        """Its processes, without the leash."""
        process = self._process
        return descendants(process.pid) if process is not None else []

    def _live(self) -> None:
        try:
            while not self._stop.is_set():
                reason = self._once()
                if self._stop.is_set():
                    break
                self._failed(reason)
                if self.health.phase == "failed":
                    return
        finally:
            if self.health.phase != "failed":
                self._phase("stopped")

    def _failed(self, reason: str) -> None:
        health = self.health
        health.failures += 1
        health.reason = reason
        health.history.append(reason)
        del health.history[:-20]
        logger.warning("%s: %s", self.name, reason)
        most = self.rules.most_failures if health.was_ready else self.rules.most_first_failures
        if health.failures >= most:
            health.reason = f"given up after {health.failures} failures; the last: {reason}"
            self._phase("failed")
            return
        self._phase("waiting")
        wait = self.rules.backoff_s * 2 ** (health.failures - 1)
        self._stop.wait(min(wait, self.rules.backoff_most_s))

    def _once(self) -> str:
        """One life of the process; returns why it ended."""
        self.health.starts += 1
        self._phase("starting")
        begun = time.monotonic()
        leash = [sys.executable, "-I", "-S", str(_LEASH), str(self.rules.grace_s)]
        process = subprocess.Popen(
            [*leash, *self._command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self._environ, start_new_session=True,
        )  # fmt: skip
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            return self._watch(process, begun)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()
            # Nothing is left here, unless the leash itself was killed.
            _kill_session(process.pid)
            self._process = None
            reader.join(1.0)

    def _watch(self, process: subprocess.Popen[bytes], begun: float) -> str:
        misses, rules, health = 0, self.rules, self.health
        ready_at: float | None = None
        while not self._stop.wait(rules.probe_every_s):
            status = process.poll()
            if status is not None:
                return f"ended with status {_status(status)}{self.last_words()}"
            health.memory_bytes = sum(map(_resident, self.pids()))
            if rules.memory_bytes is not None and health.memory_bytes > rules.memory_bytes:
                return (
                    f"took {health.memory_bytes >> 20} MiB of memory, more than the limit of "
                    f"{rules.memory_bytes >> 20} MiB"
                )
            well = self._is_well()
            now = time.monotonic()
            if well:
                misses = 0
                if ready_at is None:
                    ready_at, health.ready_s = now, now - begun
                    health.was_ready = True
                self._phase("ready")
                if now - ready_at > rules.healthy_s:
                    health.failures = 0
            elif ready_at is None:
                if now - begun > rules.start_s:
                    return f"was not ready within {rules.start_s:g} s{self.last_words()}"
            else:
                misses += 1
                self._phase("ill")
                if misses >= rules.ill_after:
                    return f"{misses} probes in a row failed"
        return "stopped"

    def _is_well(self) -> bool:
        try:
            return self._probe()
        except Exception as error:
            logger.debug("%s: probe: %s", self.name, error)
            return False

    def _phase(self, phase: Phase) -> None:
        if self.health.phase == phase:
            return
        with self._changed:
            self.health.phase = phase
            self._changed.notify_all()
        self._on_change(phase)

    def _read(self, pipe: IO[bytes]) -> None:
        """Takes what the process writes, to the log and the tail; never lets it block."""
        log = _Log(self._log_path, self.rules.log_bytes)
        with pipe, contextlib.closing(log):
            while line := pipe.readline(1 << 16):
                log.write(line)
                self.tail.append(line.decode("utf-8", "replace").rstrip())


class _Log:
    """A file that is moved aside, to NAME.1, when it is full."""

    def __init__(self, path: Path | None, most: int) -> None:
        self._path, self._most = path, most
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("ab", buffering=0) if path is not None else None
        except OSError as error:  # what the process writes must be taken all the same
            logger.warning("no log is kept in %s: %s", path, error.strerror)

    def write(self, line: bytes) -> None:
        if self._file is None or self._path is None:
            return
        try:
            self._file.write(line)
            if self._file.tell() > self._most:
                self._file.close()
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
        except OSError as error:  # a full disk must not stop the engine
            logger.warning("the log %s ends here: %s", self._path, error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _kill_session(session: int) -> None:
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(directory.name), signal.SIGKILL)


def _status(status: int) -> str:
    return f"{status} (signal {status - 128})" if 128 < status < 193 else str(status)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def answers(url: str, *, timeout_s: float = 1.0) -> bool:
    """A probe: whether GET of an address gives 200 in time."""
    return fetch(url, timeout_s=timeout_s)[0] == 200


def fetch(url: str, *, timeout_s: float, most: int = 1 << 16) -> tuple[int, bytes]:
    """Status and body of a GET; `timeout_s` bounds connecting and then the answer as a whole.
    Raises OSError or http.client.HTTPException."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    late: threading.Timer | None = None
    try:
        connection.connect()
        late = threading.Timer(timeout_s, _cut, (connection.sock,))
        late.daemon = True
        late.start()
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        return response.status, response.read(most)
    finally:
        if late is not None:
            late.cancel()
        connection.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        sock.shutdown(socket.SHUT_RDWR)


def scrape(url: str, *, timeout_s: float = 2.0) -> dict[str, float]:
    """Counters and gauges of a Prometheus page: name with labels -> value. Raises EngineError."""
    try:
        status, body = fetch(url, timeout_s=timeout_s, most=_MAX_METRICS)
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"no metrics from {url}: {error}") from error
    if status != 200:
        raise EngineError(f"no metrics from {url}: status {status}")
    values = {}
    for line in body.decode("utf-8", "replace").splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        with contextlib.suppress(ValueError):
            values[match[1] + (match[2] or "")] = float(match[3])
    return values
