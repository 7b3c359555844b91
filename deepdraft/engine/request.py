"""The one mutable record of a request inside the engine.

Owns: what is known of a request between its admission and its last event.
Knows nothing of: tensors, HTTP, the queue's policy. The engine thread alone writes it, except
`cancelled`, which any thread may set and nobody clears.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepdraft.errors import EngineError
from deepdraft.spec.schedule import DraftGate
from deepdraft.types import (
    CacheUse,
    DecodeStats,
    FinishReason,
    GenerateRequest,
    Rule,
    TokenEvent,
    TokenMatcher,
)

EventSink = Callable[[TokenEvent], None]


def new_gate() -> DraftGate:
    """The gate of a new request. The numbers come from recorded drafts of the demo model
    (docs/speculation.md): one bad step is enough to pause, and a pause is never long."""
    return DraftGate(trial=1, first_pause=16, longest_pause=64, decay=0.7)


@dataclass(slots=True)
class DecodeRecord:
    """Sums over a request's decode steps."""

    ms: float = 0.0
    drafted_steps: int = 0
    drafts: int = 0
    verified: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    """Steps by accepted drafts."""

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

    The lengths keep one order: num_computed <= num_prompt, then num_prompt + len(output_ids).
    """

    source: GenerateRequest
    sink: EventSink
    handle: Any = None
    """The runner's sequence; None while the request waits."""
    num_computed: int = 0
    """Prompt tokens that the runner has seen."""
    output_ids: list[int] = field(default_factory=list)
    output_counts: Counter[int] = field(default_factory=Counter)
    """How often each token was produced: what the penalties read."""
    rule: Rule = "coupled"
    """How its drafts are verified; settled on admission."""
    gate: DraftGate = field(default_factory=new_gate)
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
    """When it got its sequence (`time.perf_counter`)."""
    cancelled: bool = False
    finished: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The id under which events are reported."""
        return self.source.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt_ids)

    @property
    def prefilled(self) -> bool:
        """The runner has seen the whole prompt."""
        return self.num_computed == self.num_prompt

    def chunk_end(self, size: int) -> int:
        """Where the next part of the prompt ends, at most `size` tokens long."""
        end = min(self.num_computed + size, self.num_prompt)
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
