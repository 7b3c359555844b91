"""Counters, histograms and the logger.

Owns: named counters and histograms that threads may share, and how log lines look.
Knows nothing of: requests, tensors, HTTP. Prompts, answers and keys are never logged.
"""

import json
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

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


class Histogram:
    """Counts of values up to each bound, and their sum; may be called from any thread."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: rising; a last one, infinity, is added."""
        self.bounds = bounds
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def snapshot(self) -> tuple[tuple[int, ...], float]:
        """Values in each bucket (not cumulative), and their sum."""
        with self._lock:
            return tuple(self._counts), self._sum


def log_event(name: str, fields: Mapping[str, Any]) -> None:
    """A line that programs read: a name and fields, at level info."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(
            "%s %s", name, json.dumps(fields), extra={"event": name, "fields": dict(fields)}
        )


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event or message, and an event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        if event is None:
            line["message"] = record.getMessage()
        else:
            line |= {"event": event, **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str = "info", style: str = "text") -> None:
    """Sends our log lines and uvicorn's to stderr in one format, `text` or `json`. Safe to call
    again."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if style == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    for name in ("deepdraft", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level.upper())
        log.propagate = False
