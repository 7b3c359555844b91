"""Answers of V3, R1 and V3.1, whose calls are written with control tokens.

Owns: `MarkedParser`: the state of calls; everything else is `OutputParser`'s. V3 and R1 write the
word "function", the name on a line and fenced JSON; V3.1 the name and bare JSON. Either is read.
Knows nothing of: HTTP, sampling, how the prompt was made.
"""

from typing import Literal

from deepdraft.text.calls import MarkedCall, ParsedCall, ToolCallDelta
from deepdraft.text.control import (
    CALL_BEGIN,
    CALL_END,
    CALL_MARKS,
    CALL_SEP,
    CALLS_BEGIN,
    THINK_END,
    THINK_START,
)
from deepdraft.text.conversation import TRAITS, Family, ParseStart
from deepdraft.text.parse import Delta, OutputParser, State
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import FinishReason

_MAX_NAME = 512
"""Characters of a call's head that are kept."""


def make_parser(start: ParseStart, tokenizer: Tokenizer, family: Family) -> OutputParser:
    """The parser of a family's answers."""
    kind = MarkedParser if TRAITS[family].calls == "marks" else OutputParser
    return kind(start, tokenizer)


class MarkedParser(OutputParser):
    """As `OutputParser`, for calls in marks."""

    marks = (THINK_END, THINK_START, *CALL_MARKS)

    def __init__(self, parse_start: ParseStart, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(parse_start, tokenizer)
        self._marked: list[MarkedCall] = []
        self._fenced = False
        self._silent = True
        """Nothing was written yet: a mark may still begin reasoning."""

    def finish(self, reason: FinishReason = "stop") -> list[Delta]:
        """End the answer: a call that the model left open ends with it."""
        if self._pending_text:
            self._read_text(self._pending_text)
            self._pending_text = ""
        if self._state is State.VALUE:
            self._close_marked(complete=reason == "stop")
        return [*self._take(), *super().finish(reason)]

    def finish_reason(self, reason: FinishReason) -> Literal[FinishReason, "tool_calls"]:
        """`tool_calls` where the model stopped by itself and made a call, else `reason`."""
        return "tool_calls" if reason == "stop" and self._marked else reason

    @property
    def tool_calls(self) -> list[ParsedCall]:
        """The calls so far, with their arguments as they were written."""
        return [call.parsed() for call in self._marked]

    def _read_marker(self, marker: str) -> None:
        if marker == THINK_END:
            self._read_think_end()
        elif marker == THINK_START and self._silent and self._state is not State.DONE:
            if self._state is State.CONTENT:
                self._state, self._strip = State.REASONING, True
        elif marker in CALL_MARKS and self._parse_calls:
            self._read_call_mark(marker)
        else:
            self._read_text(marker)
        self._silent = False

    def _read_call_mark(self, marker: str) -> None:
        if self._state in (State.REASONING, State.CONTENT):
            if marker not in (CALLS_BEGIN, CALL_BEGIN):
                self._read_text(marker)
                return
            held, self._held, self._newlines = self._held, "", 0
            self._emit_text(held)
            self._state = State.CALLS
        if self._state is State.DONE:
            return
        if marker == CALL_SEP and self._state is State.INVOKE:
            head = self._tag.strip()
            self._fenced = head == "function"
            self._tag, self._state = "", State.TAG
            if not self._fenced:
                self._begin_marked(head)
            return
        if marker == CALL_SEP:
            return
        if self._state is State.TAG:  # a name without its arguments
            self._begin_marked(self._tag.strip())
        if self._state is State.VALUE:
            self._close_marked(complete=True)
        if marker == CALL_BEGIN:
            self._tag, self._state = "", State.INVOKE
        elif marker == CALL_END or marker == CALLS_BEGIN:
            self._state = State.CALLS
        else:
            self._state = State.DONE

    def _read_text(self, text: str) -> None:
        if text.strip("\n"):
            self._silent = False
        match self._state:
            case State.CALLS:
                pass
            case State.INVOKE:
                self._tag = (self._tag + text)[:_MAX_NAME]
            case State.TAG:
                name, line, rest = (self._tag + text).partition("\n")
                self._tag = name[:_MAX_NAME]
                if line:
                    self._begin_marked(name.strip())
                    self._read_text(rest)
            case State.VALUE:
                self._call_text(self._marked[-1].extend(text))
            case _:
                super()._read_text(text)

    def _begin_marked(self, name: str) -> None:
        self._tag, self._state = "", State.VALUE
        self._marked.append(MarkedCall(name))
        self._append(ToolCallDelta(len(self._marked) - 1, name=name))

    def _close_marked(self, *, complete: bool) -> None:
        if complete:
            self._call_text(self._marked[-1].close())
        self._state = State.CALLS

    def _call_text(self, piece: str) -> None:
        if piece:
            self._append(ToolCallDelta(len(self._marked) - 1, arguments=piece))
