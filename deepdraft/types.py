"""Frozen records that every layer may see. No torch, no wire format."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Rule = Literal["token", "block", "coupled"]
"""How drafts are verified (docs/speculation.md)."""


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
class SpeculationParams:
    """What one request asks of speculation; None: what the server does by itself."""

    rule: Rule | None = None
    num_drafts: int | None = None
    """At most so many drafts a step, never more than the server's; 0: none."""
    report: bool = False
    """The response shows the counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt as token ids and how to go on from it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the answer; the id itself is reported as the last token."""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """What decoding one request took: its steps after the prompt."""

    rule: Rule
    steps: int
    """Iterations: each verifies the drafts at hand and appends one token more than it accepts."""
    drafted_steps: int
    """Those for which the drafter ran."""
    drafts: int
    verified: int
    accepted: int
    histogram: tuple[int, ...]
    """Steps by the number of drafts they accepted, from 0."""
    average_iteration_ms: float = field(compare=False)
    average_accept_length: float
    """Accepted drafts of a step plus 1; 1 is no gain."""

    @property
    def cut(self) -> int:
        """Drafts that the schedule left out, by their confidence."""
        return self.drafts - self.verified


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request. The last event of a request carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    stats: DecodeStats | None = None
    """In the last event of a request that was decoded."""
