"""Does fetching a cache beat computing it? Measured while serving.

Owns: the two estimates, their decay and the comparison.
Knows nothing of: sockets, models, who asks. Runs without torch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

DECAY = 0.9
"""Weight of the past against each new fetch."""
MIN_TOKENS = 8
"""Shorter parts of a prompt say more about the cost of a call than of a token."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Estimates in seconds; None where nothing was measured yet."""

    fetch: bool
    fetch_s: float | None
    compute_s: float | None


@dataclass(slots=True)
class Costs:
    """Seconds of a fetch as overhead + bytes x rate, seconds of a prompt as tokens x rate.

    Until both are known a fetch is tried: it is how one becomes known.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _token_s: float | None = None
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Decayed n, bytes, seconds, bytes^2, bytes x seconds."""

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A part of a prompt was computed."""
        if num_tokens < MIN_TOKENS or seconds <= 0:
            return
        with self._lock:
            new = seconds / num_tokens
            # Longer parts count more; a single odd one must not turn the rule.
            share = min(0.5, num_tokens / 512)
            old = self._token_s
            self._token_s = new if old is None else old + share * (new - old)

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        """A fetch ended well."""
        if seconds <= 0:
            return
        with self._lock:
            b, s = float(num_bytes), seconds
            new = (1.0, b, s, b * b, b * s)
            self._sums = [DECAY * old + x for old, x in zip(self._sums, new, strict=True)]

    def fetch_seconds(self, num_bytes: int) -> float | None:
        """Expected time of a fetch."""
        with self._lock:
            n, b, s, bb, bs = self._sums
            if not n:
                return None
            spread = n * bb - b * b
            rate = (n * bs - b * s) / spread if spread > 1e-9 * n * bb else 0.0
            rate = min(max(rate, 0.0), s / b if b else 0.0)  # no negative rate, no negative start
            return (s - rate * b) / n + rate * num_bytes

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Expected time of computing so many tokens of a prompt."""
        with self._lock:
            return None if self._token_s is None else self._token_s * num_tokens

    def decide(self, num_bytes: int, num_tokens: int) -> Decision:
        """Whether fetching `num_bytes` to save `num_tokens` is expected to be faster."""
        fetch, compute = self.fetch_seconds(num_bytes), self.compute_seconds(num_tokens)
        if fetch is None or compute is None:
            return Decision(True, fetch, compute)
        return Decision(fetch < compute, fetch, compute)
