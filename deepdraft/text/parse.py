"""Output of the V4.1 and V4 families, split into reasoning, content and tool calls.

Owns: `OutputParser`, the state machine over token ids (or over text); `StopMatcher`.
Knows nothing of: HTTP, sampling, how the prompt was made (only where it left off).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepdraft.text.conversation import ParseStart
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import FinishReason


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` (0, 1, ...).

    The first piece of a call carries its `name` and no arguments; later ones carry `arguments`,
    JSON text whose concatenation is a JSON object once the call is complete.
    """

    index: int
    name: str | None = None
    arguments: str = ""


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call; `arguments` is a JSON object's text where `complete`."""

    name: str
    arguments: str
    complete: bool


class OutputParser:
    """Splits one answer. Feed it with `push` (ids) or `push_text`, then `finish` once.

    How the answer is cut into pushes never changes the concatenated deltas.
    """

    def __init__(self, parse_start: ParseStart, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` is needed for `push`. Markers then count only as their token ids."""
        raise NotImplementedError

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """Read tokens of the answer. End-of-sentence ids are skipped."""
        raise NotImplementedError

    def push_text(self, text: str) -> list[Delta]:
        """Read text of the answer; markers count by their spelling."""
        raise NotImplementedError

    def finish(self, reason: FinishReason = "stop") -> list[Delta]:
        """End the answer and give what was held back."""
        raise NotImplementedError

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens read so far that belong to the reasoning (token input only)."""
        raise NotImplementedError

    @property
    def tool_calls(self) -> Sequence[ParsedCall]:
        """The calls so far; a repeated parameter holds its last value."""
        raise NotImplementedError

    @property
    def in_content(self) -> bool:
        """Whether the next text would be content (stop strings apply there only)."""
        raise NotImplementedError


class StopMatcher:
    """Finds the first of some stop strings in a stream and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings, none for a matcher that passes everything on."""
        raise NotImplementedError

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        raise NotImplementedError

    def push(self, text: str) -> str:
        """Text that is safe to pass on. After a match always empty."""
        raise NotImplementedError

    def flush(self) -> str:
        """The held-back text, at the end of a stream without a match."""
        raise NotImplementedError
