"""What a match is worth: from which stored pieces a request can start, and what it must compute.

Owns: the rules that keep reuse exact, and the comparison of ways to start.
Knows nothing of: bytes, tensors, where entries lie. Runs without torch.

Global KV may be cut at any even length; windows exist at checkpoints only. So a request starts

* at a checkpoint inside its shared prefix, or
* at the shared prefix's end, after the windows were computed again from far enough back: a layer's
  window reaches W - 1 positions into the layer below, so L layers need L (W - 1) + 1 tokens
  (recompute; exact), or
* there, with the windows replayed over one W (replay; approximate, only when asked for).

In mode `encoder` a cold run computes the decoder on the last W tokens only. A checkpoint's decoder
rows would give another answer, so an exact start takes the encoder's rows alone, at least W tokens
before the end. At least one token is always computed.

Families without windows (`Geometry.window` 0) start at any length that is shared (prefix).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Literal

from deepdraft.kv.prefix import Match

MOST_ENTRIES = 8
"""Of those that share a prefix are tried, newest first: any will do."""
HAS_DECODER, DECODER_REPLAYED, HAS_DRAFTER = 1, 2, 4
"""Bits of a checkpoint's label in the prefix tree."""

Mode = Literal["full", "encoder"]
Reuse = Literal["exact", "whole", "replay"]
"""exact: the answer equals a cold run's, bit for bit. whole: also hand over a state as it is, which
equals the uninterrupted conversation. replay: also approximate windows (by design of the model)."""
Kind = Literal["checkpoint", "recompute", "replay", "prefix"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a model that decide how far back windows reach."""

    window: int
    """0: state is token-major alone, and may be cut anywhere."""
    encoder_layers: int
    layers: int
    slack: int
    """Tokens that may be taken back later: windows are made exact that much further."""

    def depth(self, layers: int) -> int:
        """Tokens to run so that the last window of `layers` layers is exact."""
        return layers * (self.window - 1) + 1 + self.slack


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request: its length, the prefill mode, which reuse it allows."""

    num_tokens: int
    mode: Mode
    reuse: Reuse
    drafter: bool
    rebuild: bool
    """Windows can be computed again in mode `full`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to start. `rows`: tokens to run through the model, those of the request included."""

    kind: Kind
    entry: int
    position: int
    """Tokens whose global KV is reused."""
    rows: int
    replay_from: int | None
    decoder: bool
    """Take the decoder's (and drafter's) rows of the checkpoint."""
    exact: bool
    """Global KV and windows equal a cold run's."""


def plans(
    geometry: Geometry, wanted: Wanted, match: Match | None, *, exact_entries: bool
) -> Iterator[Plan]:
    """All ways to start from a match of the request's tokens but the last one.

    `exact_entries`: the match is over entries whose global KV is exact.
    """
    if match is None or (wanted.reuse == "exact" and not exact_entries):
        return
    if not geometry.window:
        for entry in nlargest(MOST_ENTRIES, match.entries):
            rows = wanted.num_tokens - match.length
            yield Plan("prefix", entry, match.length, rows, None, True, exact_entries)
        return
    yield from _checkpoints(geometry, wanted, match, exact_entries)
    length = match.length // 2 * 2
    if not length:
        return
    exact = exact_entries
    starts: list[tuple[Kind, int, bool]] = []
    n = wanted.num_tokens
    if wanted.mode == "encoder":
        back = geometry.depth(geometry.encoder_layers)
        starts.append(("recompute", min(length, max(0, n - geometry.window)) - back, exact))
    elif wanted.rebuild:
        starts.append(("recompute", length - geometry.depth(geometry.layers), exact))
    if wanted.reuse == "replay":
        starts.append(("replay", length - geometry.window, False))
    for kind, start, is_exact in starts:
        if start > 0:
            for entry in nlargest(MOST_ENTRIES, match.entries):
                yield Plan(kind, entry, length, n - start, start, False, is_exact)


def _checkpoints(
    geometry: Geometry, wanted: Wanted, match: Match, exact_entries: bool
) -> Iterator[Plan]:
    n = wanted.num_tokens
    for mark in match.marks:
        c, label = mark.position, mark.label
        if c >= n:
            continue
        whole = bool(label & HAS_DECODER) and (bool(label & HAS_DRAFTER) or not wanted.drafter)
        if wanted.mode == "encoder" and wanted.reuse == "exact":
            usable, decoder = c <= n - geometry.window, False
        elif wanted.reuse == "exact":
            usable, decoder = whole and not label & DECODER_REPLAYED, True
        else:
            usable, decoder = whole, True
        if usable:
            yield Plan("checkpoint", mark.entry, c, n - c, None, decoder, exact_entries)


def best_first(candidates: list[Plan]) -> list[Plan]:
    """Fewest rows first; of equal ones checkpoints, then exact ones."""
    return sorted(candidates, key=lambda p: (p.rows, p.kind != "checkpoint", not p.exact))
