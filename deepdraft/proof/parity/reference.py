"""What a reference gave: logits at every position, a greedy continuation, and what else it told.

Owns: the record. Knows nothing of: how a reference runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deepdraft.checkpoint.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class Trace:
    """One teacher-forced pass over a text and a free greedy continuation of it."""

    name: str
    """What computed it, with its version."""
    ids: list[int]
    logits: Tensor
    """float32 [N, V]; row i follows token i. NaN where a reference does not tell a value."""
    greedy: list[int] = field(default_factory=list)
    greedy_logits: Tensor | None = None
    """[len(greedy), V]: row i chose greedy[i]."""
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """L0, L1, ...: stream_in, attn_out, ffn_out [N, ...]; experts, weights [N, K]."""
    spec: ModelSpec | None = None
    weights: dict[str, Tensor] | None = None
    """By published name, dequantised."""
    frequencies: dict[str, list[float]] = field(default_factory=dict)
    """Rotary frequencies in its memory, by transformers' name of the buffer."""
    factors: dict[str, float] = field(default_factory=dict)
    """What it multiplies cos and sin with, by transformers' name."""
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    """Position of the first row of logits that counts."""
    partial: bool = False
    """Logits are log-probabilities of some tokens only (a wire reference)."""
