"""How far a long read or write of weights has come, on stderr.

Owns: one line that is redrawn on a terminal, a line now and then elsewhere.
Knows nothing of: what is read or written.
"""

import sys
import time

_REDRAW_S = 0.2
_LINE_S = 10.0
_WIDTH = 30


class Bar:
    """To be called with the bytes so far and in all."""

    def __init__(self, what: str) -> None:
        self._what, self._begin, self._drawn = what, time.monotonic(), 0.0
        self._tty = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Draws if it is time to, and at the end."""
        now = time.monotonic()
        text = f"{self._what} {done / 1e9:.1f} of {total / 1e9:.1f} GB"
        if now > self._begin:
            text += f", {done / (now - self._begin) / 1e9:.2f} GB/s"
        if not self._tty:
            if now - max(self._drawn, self._begin) > _LINE_S:
                self._drawn = now
                print(text, file=sys.stderr, flush=True)
        elif now - self._drawn > _REDRAW_S or done >= total:
            self._drawn = now
            bar = "#" * int(_WIDTH * (done / total if total else 1.0))
            end = "\n" if done >= total else ""
            print(f"\r{text} [{bar:<{_WIDTH}}]\x1b[K", end=end, file=sys.stderr, flush=True)
