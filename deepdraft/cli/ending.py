"""How a command that made folders or started processes ends when it is told to.

Owns: SIGTERM and SIGHUP. Knows nothing of: commands.
"""

import contextlib
import signal
from collections.abc import Generator
from types import FrameType


@contextlib.contextmanager
def clean_end() -> Generator[None]:
    """Leaves the block as an exception does, with status 128 + signal, where Python would end at
    once and leave its folders; also a decorator. Further signals wait for what is cleaned up. A
    signal that is ignored (nohup) stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        for own in taken:
            signal.signal(own, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    taken = [n for n in numbers if signal.getsignal(n) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
