"""Frozen records that every layer may see. No torch, no wire format."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen.

    temperature 0 means argmax (ties: lowest id). `top_k` 0 and `top_p` 1 switch the filter off.
    Noise is keyed by (seed, absolute position), never by step, so that a drafted and a plain run
    of one request choose the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    """None: no log-probabilities; n: of the chosen token and the n best ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt as token ids and how to go on from it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the answer; the id itself is reported as the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request. The last event of a request carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
