"""The one mutable record of a request inside the engine.

Owns: what is known of a request between its admission and its last event.
Knows nothing of: tensors, HTTP, the queue's policy. The engine thread alone writes it, except
`cancelled`, which any thread may set and nobody clears.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepdraft.errors import EngineError, PromptTooLong, RequestError
from deepdraft.spec.gate import DraftGate
from deepdraft.spec.trust import Trust
from deepdraft.types import (
    CacheUse,
    DecodeStats,
    FinishReason,
    GenerateRequest,
    Rule,
    TokenEvent,
    TokenMatcher,
)

Wake = Callable[[], None]
EventSink = Callable[[TokenEvent], Wake | None]
"""Takes an event; may return what wakes its reader, to be called when the step's events are out."""


def crowd_gate() -> DraftGate:
    """The gate of several requests together. A trial is dear, so its pauses are longer."""
    return DraftGate(credit=0.2, decay=0.95, first_pause=16, longest_pause=128)


@dataclass(slots=True)
class DecodeRecord:
    """Sums over a request's decode steps."""

    ms: float = 0.0
    drafted_steps: int = 0
    drafts: int = 0
    verified: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    """Steps by accepted drafts."""

    def add(self, ms: float, *, drafts: int, accepted: int) -> None:
        """A step that verified all its drafts."""
        self.ms += ms
        self.drafted_steps += drafts > 0
        self.drafts += drafts
        self.verified += drafts
        self.histogram[accepted] += 1

    def stats(self, rule: Rule) -> DecodeStats | None:
        """The finished record; None without a step."""
        steps = sum(self.histogram.values())
        if not steps:
            return None
        accepted = sum(n * count for n, count in self.histogram.items())
        return DecodeStats(
            rule=rule,
            steps=steps,
            drafted_steps=self.drafted_steps,
            drafts=self.drafts,
            verified=self.verified,
            accepted=accepted,
            histogram=tuple(self.histogram[n] for n in range(max(self.histogram) + 1)),
            average_iteration_ms=self.ms / steps,
            average_accept_length=1 + accepted / steps,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way through the engine.

    The lengths keep one order: num_computed <= num_context <= num_prompt + len(output_ids).
    """

    source: GenerateRequest
    sink: EventSink
    handle: Any = None
    """The runner's sequence; None while the request waits."""
    parked: Any = None
    """The sequence of a preempted request, as the runner's `park` gave it."""
    pinned: bool = False
    """It cannot be preempted."""
    number: int = 0
    """Of its arrival."""
    arrived: float = 0.0
    """When it came, by the engine's clock."""
    num_computed: int = 0
    """Tokens of the context that the runner has seen."""
    num_replay: int = 0
    """Tokens of the answer that belong to the context: those of a sequence that was lost."""
    output_ids: list[int] = field(default_factory=list)
    output_counts: Counter[int] = field(default_factory=Counter)
    """How often each token was produced: what the penalties read."""
    rule: Rule = "coupled"
    """How its drafts are verified; settled on admission."""
    gate: DraftGate = field(default_factory=DraftGate)
    trust: Trust = field(default_factory=Trust)
    """How far its drafts' confidences are believed."""
    record: DecodeRecord = field(default_factory=DecodeRecord)
    cached: CacheUse | None = None
    """What of the prompt came from the KV cache."""
    points: list[int] = field(default_factory=list)
    """Prompt lengths, rising, after which a checkpoint is still to be taken."""
    pauses: list[int] = field(default_factory=list)
    """Those of them at which a part of the prompt must end."""
    checkpoints: list[Any] = field(default_factory=list)
    """Those taken, to be stored or given back."""
    matcher: TokenMatcher | None = None
    """Where the answer stands in its grammar, if it has one; made on admission."""
    at_fault: bool = False
    """It fails by its own fault."""
    tainted: bool = False
    """Its state may hold NaN or infinities."""
    opened: float = 0.0
    """When it first got a sequence, by the engine's clock."""
    told: tuple[float, int] | None = None
    """When its reader last heard of the prompt's progress, and how far it was."""
    answered: float = 0.0
    """When its first token was chosen."""
    cancelled: bool = False
    finished: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.source.generated_ids:
            self.output_ids = list(self.source.generated_ids)
            self.output_counts.update(self.output_ids)
            self.begin_again()

    def take_grammar(self) -> None:
        """Makes the matcher, if the answer has a grammar, and leads it to where the answer stands.

        Raises RequestError for an answer begun elsewhere that the grammar forbids.
        """
        if self.source.grammar is None:
            return
        self.matcher = self.source.grammar.matcher()
        for i, token_id in enumerate(self.source.generated_ids):
            if not self.matcher.advance(token_id):
                raise RequestError(f"token {i} of the answer to go on with breaks its grammar")

    @property
    def request_id(self) -> str:
        """The id under which events are reported."""
        return self.source.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt_ids)

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.source.tenant

    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        return self.source.priority

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among the requests of its tenant."""
        return self.source.priority, self.number

    @property
    def num_context(self) -> int:
        """Tokens that the runner must have seen before the request decodes."""
        return self.num_prompt + self.num_replay

    @property
    def prefilled(self) -> bool:
        """The runner has seen the whole context."""
        return self.num_computed == self.num_context

    def context(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the context."""
        prompt, n = self.source.prompt_ids, self.num_prompt
        return [*prompt[start:end], *self.output_ids[max(0, start - n) : max(0, end - n)]]

    def begin_again(self) -> None:
        """Its sequence was lost: the runner has seen nothing; the tokens chosen so far stand."""
        self.parked, self.num_computed = None, 0
        # The last one goes into the next step.
        self.num_replay = max(0, len(self.output_ids) - 1)

    def chunk_end(self, size: int) -> int:
        """Where the next part of the context ends, at most `size` tokens long."""
        end = min(self.num_computed + size, self.num_context)
        return min((p for p in self.pauses if self.num_computed < p < end), default=end)

    @property
    def next_position(self) -> int:
        """Absolute position of the token chosen next; keys its noise."""
        return self.num_prompt + len(self.output_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be appended."""
        return self.source.max_new_tokens - len(self.output_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one chosen token; returns why the answer ends here, or None.

        Raises EngineError for a token that the grammar forbids.
        """
        if self.matcher is not None and not self.matcher.advance(token_id):
            raise EngineError(f"token {token_id} was chosen although the grammar forbids it")
        self.output_ids.append(token_id)
        self.output_counts[token_id] += 1
        if token_id in self.source.stop_token_ids:
            return "stop"
        if self.matcher is not None and self.matcher.is_finished:
            return "stop"
        if len(self.output_ids) >= self.source.max_new_tokens:
            return "length"
        return None


def check_request(request: GenerateRequest, vocab_size: int, max_tokens: int) -> None:
    """Raises RequestError or PromptTooLong for a request that a model of this vocabulary and
    context cannot run."""
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    biased = (i for i, _ in request.sampling.logit_bias)
    for token_id in (*request.prompt_ids, *request.generated_ids, *biased):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {token_id} is outside this model's vocabulary [0, {vocab_size})"
            )
    temperature = request.sampling.temperature
    if not 0.0 <= temperature < math.inf:
        raise RequestError(
            f"temperature is {temperature}; it must be a number of at least 0", param="temperature"
        )
    if request.max_new_tokens < 1:
        raise RequestError(
            f"max_tokens must be at least 1, got {request.max_new_tokens}", param="max_tokens"
        )
    if len(request.generated_ids) >= request.max_new_tokens or not (
        request.stop_token_ids.isdisjoint(request.generated_ids)
    ):
        raise RequestError("the answer to go on with has ended already")
    if num_prompt + request.max_new_tokens > max_tokens:
        raise PromptTooLong(
            f"this model's context is {max_tokens} tokens; the prompt has {num_prompt} and "
            f"{request.max_new_tokens} more were asked for: shorten one of them"
        )
