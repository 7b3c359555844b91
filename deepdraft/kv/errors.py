"""Errors of the cache. None of them reaches a client: the answer to each is to compute again."""

from deepdraft.errors import StateError

_MOST_TOLD = 400


class SnapshotError(StateError):
    """Stored bytes are damaged, forged or belong to something else: recompute.

    A message may quote what a peer or a file says: it is one line of so many characters at most.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message[:_MOST_TOLD]))


class StoreFull(StateError):
    """No room that may be freed; nothing was stored."""
