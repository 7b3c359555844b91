"""Every time constant, share and count of cache and transfer, so that tests can shrink them.

Owns: defaults and their order (a reader's deadline lies below its lease, grace above it).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from deepdraft.errors import ConfigError
from deepdraft.kv.layout import Layout, Span

SMALL_CHECKPOINT = 1 << 20
"""Bytes of a checkpoint below which a model counts as small."""


LARGEST_CHUNK = 32 << 20
"""Bytes of a chunk at most, unless a block is larger: families whose state is not packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Times in seconds, shares of the slab's slots in 0..1."""

    chunk_blocks: int = 36
    high_water: float = 0.95
    low_water: float = 0.85
    lease_s: float = 30.0
    max_lease_s: float = 120.0
    grace_s: float = 60.0
    """How long memory of a lease ended by force stays unused; above any reader's deadline."""
    leases_per_peer: int = 8
    leased_share: float = 0.5
    quarantine_share: float = 0.05
    max_checkpoints: int = 8
    """Checkpoints of one conversation that are kept."""
    min_tokens: int = 32
    """Fewer tokens are computed faster than they are looked for: all conversations begin with the
    same few."""

    @classmethod
    def of(cls, layout: Layout) -> StoreSettings:
        """For a model's layout: chunks of the documented size, but for small models chunks just
        large enough for a checkpoint, so that a short conversation does not fill a large slot."""
        span = Span(0, layout.window)
        checkpoint = layout.checkpoint_bytes((span, span, span), Span(0, layout.pending_rows))
        most = min(cls().chunk_blocks, max(1, LARGEST_CHUNK // layout.block_bytes))
        if checkpoint >= SMALL_CHECKPOINT:
            return cls(chunk_blocks=most)
        return cls(chunk_blocks=min(most, max(1, -(-checkpoint // layout.block_bytes))))

    def hurried(self, by: float) -> StoreSettings:
        """All times divided by `by`."""
        return replace(
            self,
            lease_s=self.lease_s / by,
            max_lease_s=self.max_lease_s / by,
            grace_s=self.grace_s / by,
        )

    def __post_init__(self) -> None:
        if not 0 < self.low_water <= self.high_water <= 1:
            raise ConfigError(
                f"the KV store's marks must satisfy 0 < low <= high <= 1, got low "
                f"{self.low_water}, high {self.high_water}"
            )
        if not 0 < self.lease_s <= self.max_lease_s:
            raise ConfigError(f"a lease of {self.lease_s} s, at most {self.max_lease_s} s")
        if self.grace_s < self.lease_s:
            raise ConfigError(
                f"grace ({self.grace_s} s) must not be below a lease ({self.lease_s} s): a reader "
                f"may still read that long"
            )
        if min(self.chunk_blocks, self.max_checkpoints, self.min_tokens) < 1:
            raise ConfigError("chunk_blocks, max_checkpoints and min_tokens must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Times in seconds. A reader's deadline lies below the owner's lease limit."""

    connect_s: float = 0.5
    deadline_s: float = 25.0
    idle_s: float = 5.0
    """Without a byte for this long a peer counts as stalled."""
    renew_s: float = 5.0
    backoff_s: float = 5.0
    connections: int = field(default_factory=lambda: min(2, max(1, (os.cpu_count() or 1) // 4)))
    """Of one fetch, where there are many chunks. Two bring 5 GB/s, more than most networks have,
    with nine tenths of the bytes' own rate; four bring a third more for twice the threads."""
    check_beside: bool = field(default_factory=lambda: (os.cpu_count() or 1) > 2)
    """Digests have a thread of their own beside each connection's; on two cores, which receiving
    and sending fill, it would only wait for them."""
    sidecar_start_s: float = 30.0
    """Until a sidecar must have registered its memory."""
    sidecar_answer_s: float = 1.0
    """Within which a sidecar answers that it lives."""
    sidecar_backoff_s: float = 0.5
    """Between a sidecar's end and its next start; twice as long after each start that failed."""
    max_connections: int = 64
    """That an owner serves at a time."""

    def hurried(self, by: float) -> TransferSettings:
        """All times but that of connecting divided by `by`."""
        return replace(
            self,
            deadline_s=self.deadline_s / by,
            idle_s=self.idle_s / by,
            renew_s=self.renew_s / by,
            backoff_s=self.backoff_s / by,
        )

    def __post_init__(self) -> None:
        if min(self.connect_s, self.deadline_s, self.idle_s, self.renew_s) <= 0:
            raise ConfigError("the KV transfer's times must be above 0")
        if min(self.connections, self.max_connections) < 1:
            raise ConfigError("the KV transfer needs at least one connection")
