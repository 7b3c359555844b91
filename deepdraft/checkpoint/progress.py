"""How far a long read or write of weights has come, on stderr.

Owns: one line that is redrawn on a terminal, a line now and then elsewhere.
Knows nothing of: what is read or written.
"""

import sys
import time
from typing import Self

_REDRAW_S = 0.2
_LINE_S = 10.0
_WIDTH = 30


class Bar:
    """To be called with the bytes so far and in all. As a context it ends its line, however far
    it came."""

    def __init__(self, what: str) -> None:
        self._what, self._begin, self._drawn = what, time.monotonic(), 0.0
        self._tty = sys.stderr.isatty()
        self._last: tuple[int, int] | None = None
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tty and self._last is not None and not self._ended:
            self._draw(*self._last, end="\n")

    def __call__(self, done: int, total: int) -> None:
        """Draws if it is time to, and at the end."""
        now = time.monotonic()
        if not self._tty:
            if now - max(self._drawn, self._begin) > _LINE_S:
                self._drawn = now
                print(self._text(done, total), file=sys.stderr, flush=True)
            return
        self._last = done, total
        if not self._ended and (now - self._drawn > _REDRAW_S or done >= total):
            self._drawn, self._ended = now, done >= total
            self._draw(done, total, end="\n" if self._ended else "")

    def _text(self, done: int, total: int) -> str:
        unit, name = (1e9, "GB") if total >= 10**9 else (1e6, "MB")
        text = f"{self._what} {done / unit:.1f} of {total / unit:.1f} {name}"
        took_s = time.monotonic() - self._begin
        return f"{text}, {done / took_s / 1e9:.2f} GB/s" if took_s > 0 else text

    def _draw(self, done: int, total: int, *, end: str) -> None:
        bar = "#" * int(_WIDTH * (done / total if total else 1.0))
        text = f"\r{self._text(done, total)} [{bar:<{_WIDTH}}]\x1b[K"
        print(text, end=end, file=sys.stderr, flush=True)
