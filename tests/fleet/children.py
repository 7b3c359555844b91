"""Processes of the live tests: started in a session of their own, read while they run, ended."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Child:
    """A process whose output is read while it runs."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._lines.append(line)

    def text(self) -> str:
        """What it has said so far."""
        return "".join(self._lines)

    def wait_for(self, words: str, most_s: float) -> None:
        """Until it says these words; fails where it ends before."""
        self.wait_until(lambda: words in self.text(), most_s)

    def wait_until(self, holds: Callable[[], bool], most_s: float) -> None:
        """Until the condition holds; fails where the process ends before."""
        until = time.monotonic() + most_s
        while not holds():
            if self.process.poll() is not None:
                self._reader.join(10)
                assert holds(), self.text()[-4000:]
                return
            assert time.monotonic() < until, self.text()[-4000:]
            time.sleep(0.05)

    def end(self, number: int) -> None:
        """Sends a signal, waits for the end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait()
        self._reader.join(60)


def replicas_of(name: str, kind: str = "Replica") -> list[int]:
    """Process ids of the replicas of a fleet on this machine, or of its fronts (`kind` Front), as
    Ray titles them."""
    title = f"ray::ServeReplica:{name}:{kind}".encode()
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{int(entry)}/cmdline", "rb") as file:
                if file.read().startswith(title):
                    found.append(int(entry))
        except (ValueError, OSError):
            continue
    return sorted(found)


def process_of(name: str, label: str) -> int:
    """Process id of one replica: Ray names its log by what the label ends with."""
    unique = label.rpartition("-")[2]
    for pid in replicas_of(name):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if unique in os.readlink(fd):
                    return pid
    raise LookupError(f"no process writes the log of {label}")


def ranks_of(replica: int) -> list[int]:
    """Processes that run the other ranks of a replica's engine."""
    found = []
    for listed in Path(f"/proc/{replica}/task").glob("*/children"):
        for pid in listed.read_text().split():
            if b"deepdraft.engine.rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
