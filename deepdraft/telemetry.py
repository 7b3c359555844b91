"""Counters and the logger.

Owns: a named set of counters that threads may share, and how log lines look.
Knows nothing of: requests, tensors, HTTP. Prompts, answers and keys are never logged.
"""

import logging
import threading
from collections import Counter

logger = logging.getLogger("deepdraft")


class Counters:
    """Named integer counters; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to counter `name`, which starts at 0."""
        with self._lock:
            self._values[name] += amount

    def get(self, name: str) -> int:
        """The value of counter `name`, 0 if nothing was added to it."""
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment, sorted by name."""
        with self._lock:
            return dict(sorted(self._values.items()))


def configure_logging(level: str = "info") -> None:
    """Sends our log lines and uvicorn's to stderr in one format. Safe to call again."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("deepdraft", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level.upper())
        log.propagate = False
