"""Tool calls of an answer while they are written.

Owns: `CallWriter`, which turns parameters into JSON arguments piece by piece; `ToolCallDelta`,
`ParsedCall`; reading of one DSML tag.
Knows nothing of: tokens, where tags begin and end in the stream.
"""

import json
import re
from dataclasses import dataclass

from deepdraft.text.filters import JsonFilter


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index` (0, 1, ...).

    The first piece of a call carries its `name` and no arguments; later ones carry `arguments`,
    JSON text whose concatenation is a JSON object once the call is complete. A parameter that the
    model repeats is repeated there, and JSON readers keep the last.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call. Where `complete`, `arguments` is a JSON object with each name once."""

    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Tag:
    """A DSML tag: `kind` is calls, invoke, parameter, or empty where it is none of these."""

    kind: str
    closing: bool
    name: str | None = None
    string: bool | None = None


BLOCK_NAMES = ("calls", "tool_calls", "toolcalls", "function_calls", "tool")
"""Block names: V4.1, V4, two that models write by mistake, V3.2."""

_NAME = re.compile(r'\bname\s*=\s*"(.*?)"(?=\s*$|\s+string\s*=)', re.DOTALL)
_LOOSE_NAME = re.compile(r'\bname\s*=\s*"?([^"\s>]+)')
_STRING = re.compile(r'\bstring\s*=\s*"?(true|false)"?')
_BARE_END = re.compile(r"=\s*[\w.-]+\s*\Z")


def tag_end(text: str, start: int = 0) -> int:
    """Index of the `>` that ends a tag whose text after the marker is `text`, or -1.

    Where text before `start` was searched already and had none, more text changes nothing there.
    """
    end = text.find(">", start)
    while end >= 0:
        head = text[:end].rstrip()
        if '"' not in head or head.endswith('"') or _BARE_END.search(head):
            return end
        end = text.find(">", end + 1)
    return -1


def read_tag(text: str, *, closing: bool) -> Tag:
    """Read the text between a tag's marker and its `>`."""
    parts = text.split(maxsplit=1)
    word = parts[0] if parts else ""
    if word in BLOCK_NAMES:
        return Tag("calls", closing)
    if word not in ("invoke", "parameter"):
        return Tag("", closing)
    if closing:
        return Tag(word, closing)
    attributes = parts[1] if len(parts) > 1 else ""
    name = _NAME.search(attributes) or _LOOSE_NAME.search(attributes)
    rest = attributes[: name.start()] + attributes[name.end() :] if name else attributes
    string = _STRING.search(rest)
    return Tag(
        word,
        closing,
        name.group(1) if name else None,
        None if string is None else string.group(1) == "true",
    )


class CallWriter:
    """The arguments of one call, written while its parameters come in."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.complete = False
        self._written: list[str] = []
        self._values: dict[str, str] = {}
        self._key: str | None = None
        self._string = False
        self._value: list[str] = []

    def begin(self, key: str, *, string: bool | None) -> str:
        """Open a parameter; `string` None means that the tag did not say.

        Returns argument text, as do the other methods.
        """
        self._key, self._string, self._value = key, bool(string), []
        if not self._string:
            return ""  # must be checked to be JSON first
        return self._write(self._head() + '"')

    def extend(self, text: str) -> str:
        """More text of the open parameter."""
        if self._key is None:
            return ""
        self._value.append(text)
        return self._write(_escaped(text)) if self._string else ""

    def end(self) -> str:
        """Close the open parameter, if one is."""
        if self._key is None:
            return ""
        text = "".join(self._value)
        if self._string:
            piece = '"'
            value = f'"{_escaped(text)}"'
        else:
            value = text.strip() if _is_json(text) else f'"{_escaped(text)}"'
            piece = self._head() + value
        self._values[self._key] = value
        self._key = None
        return self._write(piece)

    def close(self) -> str:
        """Complete the call."""
        piece = self.end() + self._write("}" if self._written else "{}")
        self.complete = True
        return piece

    def abandon(self) -> str:
        """End the call where the answer was cut: what the model wrote so far, as it is."""
        if self._key is None or self._string:
            return ""
        return self._write(self._head() + "".join(self._value))

    def parsed(self) -> ParsedCall:
        """The call as a whole."""
        if not self.complete:
            return ParsedCall(self.name, "".join(self._written), False)
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in self._values.items())
        return ParsedCall(self.name, "{" + ", ".join(pairs) + "}", True)

    def _head(self) -> str:
        opening = ", " if self._written else "{"
        return f"{opening}{json.dumps(self._key, ensure_ascii=False)}: "

    def _write(self, piece: str) -> str:
        if piece:
            self._written.append(piece)
        return piece


class MarkedCall:
    """A call whose arguments come as JSON, perhaps in a fence, and are passed on as they are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.complete = False
        self._filter = JsonFilter()
        self._written: list[str] = []

    def extend(self, text: str) -> str:
        """More text; returns argument text, as does `close`."""
        piece = self._filter.push(text)
        self._written.append(piece)
        return piece

    def close(self) -> str:
        """End the call; a call without arguments gets an empty object."""
        piece = self._filter.flush()
        if not "".join(self._written).strip() and not piece.strip():
            piece = "{}"
        self._written.append(piece)
        self.complete = True
        return piece

    def parsed(self) -> ParsedCall:
        """The call as a whole."""
        text = "".join(self._written)
        return ParsedCall(self.name, text, self.complete and _is_json(text))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True
