"""Responses that can be asked for again, for a while.

Owns: `ResponseStore`: what is kept, for whom, how long, and in how much memory.
Knows nothing of: HTTP, fields, events. Nothing is written to disk. Runs without torch.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

_ITEM_BYTES = 100
"""What a reference to an item costs beside its text, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One response: its JSON, and the input and output items of the conversation so far."""

    owner: bytes
    expires: float
    size: int
    response: bytes
    items: tuple[msgspec.Raw, ...]


class ResponseStore:
    """Keeps responses for `retention_s`, in at most `max_bytes`; the oldest go first."""

    def __init__(
        self, retention_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retention_s = retention_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._retention_s > 0 and self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Memory in use, about."""
        return self._num_bytes

    def put(
        self,
        response_id: str,
        response: bytes,
        items: Sequence[msgspec.Raw],
        *,
        num_new: int,
        owner: bytes = b"",
    ) -> None:
        """Keeps a response.

        `items`: the whole conversation; the last `num_new` are not shared with a kept response.
        """
        if not self.enabled:
            return
        old, new = items[: len(items) - num_new], items[len(items) - num_new :]
        # Copies: an item as it was read holds on to its request's whole body.
        copied = (*old, *(msgspec.Raw(bytes(item)) for item in new))
        size = len(response) + sum(len(bytes(item)) for item in new) + _ITEM_BYTES * len(items)
        with self._lock:
            expires = self._clock() + self._retention_s
            kept = Kept(owner=owner, expires=expires, size=size, response=response, items=copied)
            self._kept[response_id] = kept
            self._num_bytes += size
            self._expire()
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def get(self, response_id: str, owner: bytes = b"") -> Kept | None:
        """A kept response of this owner."""
        with self._lock:
            self._expire()
            kept = self._kept.get(response_id)
            return kept if kept is not None and kept.owner == owner else None

    def delete(self, response_id: str, owner: bytes = b"") -> bool:
        """Forgets a response; False when there is none of this owner."""
        with self._lock:
            self._expire()
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner:
                return False
            self._drop(response_id)
            return True

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).size

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest].expires > now:
                return
            self._drop(oldest)
