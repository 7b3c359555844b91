"""Frozen records that every layer may see. No torch, no wire format."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""`abort`: somebody asked for it; `timeout`: the request's deadline passed."""
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
    steps: bool = False
    """Events say how each step went (`StepTrace`)."""


class TokenMatcher(Protocol):
    """Where one answer stands in its grammar; `engine.grammar.Matcher` is one."""

    def mask(self) -> Any:
        """The tokens (bool [V], numpy) that may come next, or None: all of them."""
        ...

    def advance(self, token_id: int, /) -> bool:
        """Takes a token; False, and nothing is changed, where it is not allowed."""
        ...

    def rollback(self, num_tokens: int, /) -> None:
        """Takes back the last tokens."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the answer may follow."""
        ...


class TokenGrammar(Protocol):
    """What an answer must look like; `engine.grammar.Grammar` is one."""

    def matcher(self) -> TokenMatcher:
        """The state of a new answer. May be called from any thread."""
        ...


class StoredSink(Protocol):
    """Who wants to know that a conversation was stored; `kv.fleet.Session` is one."""

    def stored(self, entry: int, /) -> None:
        """The number of the entry. Called on any thread; must not block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt as token ids and how to go on from it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    """Tokens of the whole answer, `generated_ids` included."""
    generated_ids: tuple[int, ...] = ()
    """Tokens of the answer that stand already and are not reported again: positions, noise,
    penalties and grammar go on behind them, so the answer is the one that began elsewhere."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the answer; the id itself is reported as the last token."""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    grammar: TokenGrammar | None = None
    """What the answer must look like. It ends by itself where nothing may follow."""
    reuse: bool = True
    """May start from stored conversations, and is stored as one."""
    session: StoredSink | None = None
    """Is told of the conversation's entry in the KV cache once it can be read."""
    tenant: str = ""
    """Whose request it is; a busy engine is shared between tenants."""
    priority: int = 0
    """Among the requests of one tenant a lower number goes first."""
    deadline_s: float | None = None
    """Seconds from its arrival after which the request ends, wherever it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What a request took from the KV cache (docs/kv-sharing.md)."""

    num_tokens: int
    """Tokens of the prompt that were not computed."""
    source: Literal["host", "disk", "peer"]
    """Where they lay."""
    provenance: str
    """exact: as if computed here; whole: as if the conversation had never paused; or
    `replayed at M`, approximate by the model's own design."""


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


Origin = Literal["accepted", "corrected", "bonus", "plain"]
"""How a token came: a draft that stood, the target's own token in place of one that fell, the one
behind a block that stood as a whole, or without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One request's part of one step. Made only for requests that ask for `steps`."""

    index: int
    """0: the prompt, which gives one token; from 1: steps of decoding."""
    rows: int
    """Its last token and the drafts that were verified."""
    drafted: int
    """Drafts made, those that the schedule then left out included."""
    accepted: int
    ms: float = field(compare=False)
    """The whole step, which requests share; for the prompt, since the request got its memory."""
    draft_ms: float = field(compare=False)
    """What of it the drafter took."""
    origins: tuple[Origin, ...]
    """Of the event's tokens, as the next two."""
    confidences: tuple[float | None, ...]
    """What was expected of a draft: to stand if those before it do. None: no draft."""
    probabilities: tuple[float, ...]
    """In the model's own law: before temperature, filters, penalties, bias and masks."""
    rejected: int | None = None
    """The draft that fell."""
    rejected_confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """How far a long prompt is read: tokens done and in all, the rate of late, what is left."""

    done: int
    total: int
    tokens_per_second: float
    seconds_left: float
    """At that rate; later parts see more and take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request. The last event of a request carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    at_fault: bool = False
    """The error is the request's own fault."""
    cached: CacheUse | None = None
    """What of the prompt came from the KV cache; None: nothing."""
    stats: DecodeStats | None = None
    """In the last event of a request that was decoded."""
    step: StepTrace | None = None
    """How the step went that gave these tokens, where it was asked for."""
    progress: PromptProgress | None = None
    """Of the prompt, now and then while it is read; such an event has no tokens."""
