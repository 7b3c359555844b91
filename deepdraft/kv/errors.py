"""Errors of the cache. None of them reaches a client: the answer to each is to compute again."""

from deepdraft.errors import StateError


class SnapshotError(StateError):
    """Stored bytes are damaged, forged or belong to something else: recompute."""


class StoreFull(StateError):
    """No room that may be freed; nothing was stored."""
