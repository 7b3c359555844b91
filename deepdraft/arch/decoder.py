"""What all families but V4.1 share: sizes of a plain decoder, rotary scaling, routing.

Owns: `DecoderArgs`, `Rope`, `Router`, `StateKind`. Knows nothing of: files, tensors, torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "yarn", "llama3"]
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary base and its scaling, as effective values (docs/families.md)."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    softmax_factor: float = 1.0
    """Multiplies the softmax scale of MLA."""

    @property
    def yarn(self) -> tuple[float, float, float, int] | None:
        """(factor, beta_fast, beta_slow, original_max_positions), None for other kinds."""
        if self.kind != "yarn":
            return None
        return self.factor, self.beta_fast, self.beta_slow, self.original_max_positions


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token's experts are chosen and weighted."""

    scoring: Scoring
    experts: int
    picks: int
    scale: float
    """Multiplies the weights."""
    biased: bool
    """A bias per expert takes part in the choice (not in the weights)."""
    normalise: bool
    """The weights of the picks are divided by their sum."""
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    """A group's score is the sum of this many of its best (biased) scores."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """Rows of one kind: `layers` times a row of `width` values per entry.

    `ratio`: tokens per entry. `ring`: rows of the last so many tokens are needed (0: all entries
    are kept), counted back from ...
    """

    name: str
    label: str
    layers: int
    width: int
    ratio: int = 1
    ring: int = 0
    group: int = 1
    """... the next token: from the start of its group of so many tokens, and ..."""
    before: int = 0
    """... so many tokens before that start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderArgs:
    """Sizes that every decoder has, under the published names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None
    more_end_ids: tuple[int, ...] = ()
    """Where `eos_token_id` is a list, those behind its first."""
    scale_fmt: Literal["float", "ue8m0"] = "float"
    """Scales of quantised inputs: any float32, or powers of two."""

    @property
    def engram_layer_ids(self) -> tuple[int, ...]:
        """No family but V4.1 has an n-gram memory."""
        return ()

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """What a sequence keeps, kind by kind."""
        raise NotImplementedError
