"""The one mutable record of a request inside the engine.

Owns: what is known of a request between its admission and its last event.
Knows nothing of: tensors, HTTP, the queue's policy. The engine thread alone writes it, except
`cancelled`, which any thread may set and nobody clears.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepdraft.types import FinishReason, GenerateRequest, TokenEvent

EventSink = Callable[[TokenEvent], None]


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

    @property
    def next_position(self) -> int:
        """Absolute position of the token chosen next; keys its noise."""
        return self.num_prompt + len(self.output_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one chosen token; returns why the answer ends here, or None."""
        self.output_ids.append(token_id)
        self.output_counts[token_id] += 1
        if token_id in self.source.stop_token_ids:
            return "stop"
        if len(self.output_ids) >= self.source.max_new_tokens:
            return "length"
        return None
