"""Filters over a stream of text: stop strings, and the JSON value inside an answer.

Owns: `StopMatcher`, `JsonFilter`. How the stream is cut never changes what comes out in all.
Knows nothing of: tokens, reasoning, calls.
"""

import re
from collections.abc import Sequence

_FENCE = "```"
_FENCE_END = "\n```"
_OPENER = re.compile(r"[ \t]*(\w*)[ \t]*\n?")
_JSON_FENCES = frozenset({"", "json"})


class StopMatcher:
    """Finds the first of some stop strings in a stream and holds back what may become one.

    The match that ends first counts; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; none for a matcher that passes everything on."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, or None."""

    def push(self, text: str) -> str:
        """Text that is safe to pass on. After a match always empty."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self.matched = best[2]
            self._held = ""
            return text[: best[1]]
        keep = max(partial_suffix(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back text, at the end of a stream without a match."""
        held, self._held = self._held, ""
        return held


class JsonFilter:
    """Keeps the JSON of an answer: a fenced block, else all from the first bracket on.

    An answer without either is passed on whole at its end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._skipped: list[str] = []
        self._mode = "search"  # then "bare", or "fence" and "done"
        self._virtual = 0  # characters at the front of the fenced text that are not in the answer

    def push(self, text: str) -> str:
        """The part of the answer so far that belongs to the JSON and was not given yet."""
        match self._mode:
            case "bare":
                return text
            case "done":
                return ""
            case "fence":
                return self._in_fence(self._held + text)
        return self._search(self._held + text)

    def flush(self) -> str:
        """What is left at the end of the answer."""
        held, self._held = self._held, ""
        if self._mode == "search":
            return "".join(self._skipped) + held
        return self._real(held) if self._mode == "fence" else ""

    def _search(self, text: str) -> str:
        while True:
            bracket = min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=-1)
            fence = text.find(_FENCE)
            if bracket >= 0 and not 0 <= fence < bracket:
                self._mode, self._held = "bare", ""
                return text[bracket:]
            if fence < 0:
                self._skip(text, len(text) - partial_suffix(text, _FENCE))
                return ""
            opener = _OPENER.match(text, fence + len(_FENCE))
            assert opener is not None  # it matches the empty string
            if opener.end() == len(text) and not text.endswith("\n"):
                self._skip(text, fence)  # the rest of its line may follow
                return ""
            if opener[0].endswith("\n") and opener[1].lower() in _JSON_FENCES:
                self._mode, self._virtual = "fence", 1
                return self._in_fence("\n" + text[opener.end() :])
            # The fence of another language, or the end of one.
            self._skip(text, opener.end())
            text = self._held

    def _skip(self, text: str, count: int) -> None:
        self._skipped.append(text[:count])
        self._held = text[count:]

    def _in_fence(self, text: str) -> str:
        end = text.find(_FENCE_END)
        if end >= 0:
            self._mode, self._held = "done", ""
            return self._real(text[:end])
        keep = partial_suffix(text, _FENCE_END)
        self._held = text[len(text) - keep :]
        return self._real(text[: len(text) - keep])

    def _real(self, text: str) -> str:
        real = text[self._virtual :]
        self._virtual = max(0, self._virtual - len(text))
        return real


def partial_suffix(text: str, pattern: str) -> int:
    """Length of the longest end of `text` that is a beginning of `pattern`, but not all of it."""
    for size in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:size]):
            return size
    return 0
