"""Answers split into reasoning, content and tool calls.

Owns: `OutputParser`, the state machine over token ids (or over text), with the calls of V4.1, V4
and V3.2 (`parse_marks` has those of V3 and V3.1). docs/prompt-format.md lists where it differs from
DeepSeek's own stream parser, and why.
Knows nothing of: HTTP, sampling, how the prompt was made (only where it left off).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from deepdraft.text.calls import (
    BLOCK_NAMES,
    CallWriter,
    ParsedCall,
    Tag,
    ToolCallDelta,
    read_tag,
    tag_end,
)
from deepdraft.text.control import DSML, EOS, THINK_END
from deepdraft.text.conversation import ParseStart
from deepdraft.text.filters import JsonFilter, StopMatcher, partial_suffix
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import FinishReason

__all__ = [
    "ContentDelta",
    "Delta",
    "OutputParser",
    "ParsedCall",
    "ReasoningDelta",
    "StopMatcher",
    "ToolCallDelta",
]

_BLOCK_OPENERS = tuple(f"{space}{name}>" for name in BLOCK_NAMES for space in ("", " "))
_INVOKE_OPENERS = ("invoke ", " invoke ")
_MAX_TAG = 4096
"""Characters after which a tag without an end is dropped."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


class State(Enum):
    REASONING = auto()
    CONTENT = auto()
    OPENING = auto()  # after "<" and the DSML marker in reasoning or content
    CALLS = auto()  # inside the block, between calls
    INVOKE = auto()  # inside a call, between parameters
    VALUE = auto()  # inside a parameter
    TAG = auto()  # inside a tag of the block
    DONE = auto()  # after the block: the rest is dropped


_REASONING, _CONTENT = State.REASONING, State.CONTENT
"""Looked up for every token; a member through its class costs several times more."""


class OutputParser:
    """Splits one answer. Feed it with `push` (ids) or `push_text`, then `finish` once.

    How the answer is cut into pushes never changes the concatenated deltas.
    """

    marks: tuple[str, ...] = (THINK_END, DSML)
    """Control tokens that mean something here."""

    def __init__(self, parse_start: ParseStart, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` is needed for `push`. Markers then count only as their token ids."""
        stage = parse_start.stage
        self._state = State.CONTENT
        if parse_start.in_tool_calls:
            self._state = State.CALLS
        elif stage.startswith("reasoning"):
            self._state = State.REASONING
        self._strip = not stage.endswith("continuation")
        """Leading newlines are dropped until there is other text."""
        self._parse_calls = parse_start.tool_calls or parse_start.in_tool_calls
        self._json = JsonFilter() if parse_start.json_output else None
        self._tokenizer = tokenizer
        self._decoder = tokenizer.incremental() if tokenizer else None
        self._markers: dict[int, str] = {}
        self._eos = tokenizer.id_of(EOS) if tokenizer else None
        for marker in self.marks:
            token_id = tokenizer.id_of(marker) if tokenizer else None
            if token_id is not None:
                self._markers[token_id] = marker
        self._outer = self._state  # REASONING or CONTENT while OPENING
        self._newlines = 0  # held back in reasoning and content: maybe white space to drop
        self._held = ""  # held back after them: may belong to a tag
        self._tag = ""
        self._tag_searched = 0
        self._tag_closing = False
        self._pending_text = ""  # text input: may be the beginning of a marker
        self._calls: list[CallWriter] = []
        self._in_call = False
        self._out: list[Delta] = []
        self._num_reasoning_tokens = 0

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """Read tokens of the answer. End-of-sentence ids are skipped."""
        if self._decoder is None:
            raise ValueError("push needs the tokenizer; use push_text for text")
        for token_id in token_ids:
            if token_id == self._eos:
                continue
            marker = self._markers.get(token_id)
            if marker is None:
                if self._state is _REASONING:
                    self._num_reasoning_tokens += 1
                self._read_text(self._decoder.push(token_id))
            else:
                self._decoder.flush()  # a marker cuts a character short
                self._read_marker(marker)
        return self._take()

    def push_text(self, text: str) -> list[Delta]:
        """Read text of the answer; markers count by their spelling."""
        text = self._pending_text + text
        while True:
            found = [(i, m) for m in self.marks if (i := text.find(m)) >= 0]
            if not found:
                break
            index, marker = min(found)
            self._read_text(text[:index])
            self._read_marker(marker)
            text = text[index + len(marker) :]
        keep = max(partial_suffix(text, m) for m in self.marks)
        self._pending_text = text[len(text) - keep :]
        self._read_text(text[: len(text) - keep])
        return self._take()

    def finish(self, reason: FinishReason = "stop") -> list[Delta]:
        """End the answer and give what was held back.

        A call that the model left open is closed if it stopped by itself, else left as it is. An
        incomplete character and half a tag are dropped.
        """
        self._read_text(self._pending_text)
        self._pending_text = ""
        if self._decoder is not None:
            self._decoder.flush()
        if self._state in (State.REASONING, State.CONTENT):
            self._emit_held()
        elif self._state is State.VALUE:
            self._arguments(self._calls[-1].extend(self._held) if self._in_call else "")
        self._held = ""
        if self._in_call:
            call = self._calls[-1]
            self._arguments(call.close() if reason == "stop" else call.abandon())
            self._in_call = False
        if self._json is not None and (rest := self._json.flush()):
            self._append(ContentDelta(rest))
        self._state = State.DONE
        return self._take()

    def finish_reason(self, reason: FinishReason) -> Literal[FinishReason, "tool_calls"]:
        """`tool_calls` where the model stopped by itself and made a call, else `reason`."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens read so far that belong to the reasoning (token input only)."""
        return self._num_reasoning_tokens

    @property
    def tool_calls(self) -> list[ParsedCall]:
        """The calls so far; a repeated parameter holds its last value."""
        return [call.parsed() for call in self._calls]

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _read_marker(self, marker: str) -> None:
        if marker == DSML and self._parse_calls:
            self._read_dsml()
        elif marker == THINK_END:
            self._read_think_end()
        else:
            self._read_text(marker)

    def _read_think_end(self) -> None:
        if self._state is State.OPENING:
            self._not_a_block()
        if self._state is State.REASONING:
            if self._held:
                self._emit_held()
            self._state, self._newlines, self._strip = State.CONTENT, 0, True
        elif self._state is State.CONTENT:
            self._emit_held()  # a stray one is swallowed
            self._strip = False
        else:
            self._read_text(THINK_END)

    def _read_dsml(self) -> None:
        if self._state is State.OPENING:
            self._not_a_block()
        if self._state in (State.REASONING, State.CONTENT):
            if self._held.endswith("<"):
                self._outer, self._state, self._tag = self._state, State.OPENING, ""
            else:
                self._read_text(DSML)
        elif self._state is State.VALUE:
            if self._held == "</":
                self._arguments(self._calls[-1].end() if self._in_call else "")
                self._begin_tag(closing=True)
            else:
                self._read_text(DSML)
        elif self._state is not State.DONE:
            # Between tags, or in a tag that was never ended: then this one counts.
            before = self._tag if self._state is State.TAG else self._held
            if before.endswith(("<", "</")):
                self._begin_tag(closing=before.endswith("</"))
            elif self._state is State.TAG:
                self._tag += DSML

    def _read_text(self, text: str) -> None:
        if not text:
            return
        state = self._state
        if state is _CONTENT or state is _REASONING:
            self._read_plain(text)
            return
        match state:
            case State.OPENING:
                self._tag += text
                self._check_opening()
            case State.CALLS | State.INVOKE:
                self._held = (self._held + text)[-2:]
            case State.VALUE:
                text = self._held + text
                keep = 2 if text.endswith("</") else int(text.endswith("<"))
                self._held = text[len(text) - keep :]
                if self._in_call:
                    self._arguments(self._calls[-1].extend(text[: len(text) - keep]))
            case State.TAG:
                self._tag += text
                self._check_tag()
            case State.DONE:
                pass

    def _read_plain(self, text: str) -> None:
        """Reasoning or content; newlines (and a `<`) at the end may turn out to be dropped."""
        text, self._held = self._held + text, ""
        if self._strip:
            text = text.lstrip("\n")
        if self._parse_calls and text.endswith("<"):
            text, self._held = text[:-1], "<"
        body = text
        if self._parse_calls or self._state is _REASONING:
            body = text.rstrip("\n")
        if body:
            newlines, self._newlines = self._newlines, 0
            self._emit_text("\n" * newlines + body)
        self._newlines += len(text) - len(body)

    def _emit_held(self) -> None:
        text = "\n" * self._newlines + self._held
        self._newlines, self._held = 0, ""
        self._emit_text(text)

    def _check_opening(self) -> None:
        if self._tag.startswith(_BLOCK_OPENERS):
            self._newlines, self._held = 0, ""
            rest = self._tag[self._tag.index(">") + 1 :]
            self._state = State.CALLS
            self._read_text(rest)
        elif self._tag.startswith(_INVOKE_OPENERS):
            # A call without a block around it.
            rest, self._newlines = self._tag, 0
            self._begin_tag(closing=False)
            self._read_text(rest)
        elif not any(o.startswith(self._tag) for o in (*_BLOCK_OPENERS, *_INVOKE_OPENERS)):
            self._not_a_block()

    def _not_a_block(self) -> None:
        """The marker did not open a block after all: it was text."""
        text, self._held, self._tag = self._held + DSML + self._tag, "", ""
        self._state = self._outer
        self._read_plain(text)

    def _begin_tag(self, *, closing: bool) -> None:
        self._held, self._tag, self._tag_searched = "", "", 0
        self._tag_closing = closing
        self._state = State.TAG

    def _check_tag(self) -> None:
        head = self._tag[:_MAX_TAG]
        end = tag_end(head, self._tag_searched)
        self._tag_searched = len(head)
        if end >= 0:
            rest = self._tag[end + 1 :]
            self._end_tag(read_tag(head[:end], closing=self._tag_closing))
        elif len(head) == _MAX_TAG:
            rest = self._tag[_MAX_TAG:]
            self._end_tag(Tag("", self._tag_closing))
        else:
            return
        self._read_text(rest)

    def _end_tag(self, tag: Tag) -> None:
        self._tag = ""
        self._state = State.INVOKE if self._in_call else State.CALLS
        match tag:
            case Tag("calls", closing=True):
                self._close_call()
                self._state = State.DONE
            case Tag("invoke", closing=True):
                self._close_call()
                self._state = State.CALLS
            case Tag("invoke", closing=False, name=str() as name):
                self._close_call()
                self._calls.append(CallWriter(len(self._calls), name))
                self._in_call = True
                self._state = State.INVOKE
                self._append(ToolCallDelta(len(self._calls) - 1, name=name))
            case Tag("parameter", closing=False) if self._in_call:
                self._state = State.VALUE
                if tag.name is not None:
                    self._arguments(self._calls[-1].begin(tag.name, string=tag.string))

    def _close_call(self) -> None:
        if self._in_call:
            self._arguments(self._calls[-1].close())
            self._in_call = False

    def _arguments(self, piece: str) -> None:
        if piece:
            self._append(ToolCallDelta(len(self._calls) - 1, arguments=piece))

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        self._strip = False
        if self._state is _REASONING:
            self._append(ReasoningDelta(text))
            return
        if self._json is not None:
            text = self._json.push(text)
        if text:
            self._append(ContentDelta(text))

    def _append(self, delta: Delta) -> None:
        """Add to this push's deltas, joined to the last one where both are of one kind."""
        if not self._out:
            self._out.append(delta)
            return
        match self._out[-1], delta:
            case (ReasoningDelta(a), ReasoningDelta(b)):
                self._out[-1] = ReasoningDelta(a + b)
            case (ContentDelta(a), ContentDelta(b)):
                self._out[-1] = ContentDelta(a + b)
            case (ToolCallDelta(i, None, a), ToolCallDelta(j, None, b)) if i == j:
                self._out[-1] = ToolCallDelta(i, None, a + b)
            case _:
                self._out.append(delta)
