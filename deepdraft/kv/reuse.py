"""What a lookup found and what a sequence started with.

Owns: the records between the cache and its caller, and how checkpoints compare.
Knows nothing of: bytes, memory, the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from deepdraft.kv.codec import Checkpoint
from deepdraft.kv.plan import DECODER_REPLAYED, HAS_DECODER, HAS_DRAFTER, Plan
from deepdraft.kv.prefix import Mark, Match, common_prefix, token_bytes
from deepdraft.kv.snapshot import Manifest, SnapshotFile
from deepdraft.kv.store import Entry
from deepdraft.models.state import SequenceState

Source = Literal["host", "disk", "peer"]


class WindowRebuilder(Protocol):
    """What mode `full` needs to start between checkpoints."""

    def rebuild_windows(self, state: SequenceState, *, feed_drafter: bool) -> None:
        """All layers again on the tokens from `replay_from` on, window rows only."""
        ...


@dataclass(slots=True, eq=False)
class Hit:
    """A way to start a request, kept readable until `restore` or `release`."""

    plan: Plan
    num_tokens: int
    source: Source
    entry: Entry | SnapshotFile
    refused: bool = False
    """The sequence could not take it, though its bytes are right."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a sequence starts with: the first `num_tokens` tokens of the request are done."""

    num_tokens: int
    cached_tokens: int
    """Tokens of the request that were not computed, for `usage`."""
    source: Source
    provenance: str
    """exact, whole (equals the uninterrupted conversation) or `replayed at M`."""


def label_of(info: Checkpoint) -> int:
    """A checkpoint's label in the prefix tree."""
    label = HAS_DECODER if info.has_decoder else 0
    label |= DECODER_REPLAYED if info.decoder_replayed else 0
    return label | (HAS_DRAFTER if info.has_drafter else 0)


def worth(info: Checkpoint) -> tuple[bool, bool, bool]:
    """Orders checkpoints at one position: the greater one can start more requests."""
    return info.has_decoder and not info.decoder_replayed, info.has_decoder, info.has_drafter


def match_of(manifest: Manifest, token_ids: Sequence[int] | np.ndarray) -> Match | None:
    """What a peer's conversation shares with these tokens, as the prefix tree would say it."""
    shared = common_prefix(token_bytes(manifest.token_ids), token_bytes(token_ids))
    marks = tuple(
        Mark(c.info.position, 0, label_of(c.info))
        for c in reversed(manifest.checkpoints)
        if c.info.position <= shared
    )
    return Match(shared, frozenset((0,)), marks) if shared else None


def covers(have: dict[int, int], old: Entry) -> bool:
    """Every checkpoint of `old` is in an entry that has these, or is not its last one."""
    last = max((c.info.position for c in old.checkpoints), default=0)
    return last == 0 or last in have
