"""One rank's view of itself: who it is, the page on which it tells how it fares, how it ends.

Owns: the environment a rank is started with, its page of shared memory, the end with its parent.
Knows nothing of: torch, what the rank computes, the other ranks.

A rank writes, the parent (`launch`) reads. A thread counts the page's beat up, so a stopped process
shows; the state, the steps and the exchanges show one that waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, NoReturn

from deepdraft.errors import ConfigError, DeepdraftError, EngineError

VARIABLE = "DEEPDRAFT_RANK"
"""Environment of a rank: JSON that `launch` writes."""
PAGE_BYTES = 4096
BEAT_S = 0.2
_PR_SET_PDEATHSIG = 1

State = Literal["starting", "loading", "idle", "step", "failed", "ended"]
STATES: tuple[State, ...] = ("starting", "loading", "idle", "step", "failed", "ended")
_FIELDS = struct.Struct("<QQQIIIIi")
"""Beat, steps begun, exchanges entered, state, in an exchange, message bytes, peer lost, exit
code."""
_BEAT, _STEPS, _EXCHANGES, _STATE, _WAITS = 0, 8, 16, 24, 28
_MESSAGE = 64
_MOST_MESSAGE = PAGE_BYTES - _MESSAGE


@dataclass(frozen=True, slots=True)
class Health:
    """What a page says."""

    beat: int
    steps: int
    exchanges: int
    state: State
    in_exchange: bool
    message: str
    peer_lost: bool
    """The failure is that of another rank, seen from here."""
    exit_code: int


def read_page(pages: mmap.mmap, rank: int) -> Health:
    """The page of one rank."""
    at = rank * PAGE_BYTES
    beat, steps, exchanges, state, waits, size, lost, code = _FIELDS.unpack_from(pages, at)
    start = at + _MESSAGE
    text = pages[start : start + min(size, _MOST_MESSAGE)].decode("utf-8", "replace")
    known = STATES[state] if state < len(STATES) else "failed"
    return Health(beat, steps, exchanges, known, bool(waits), text, bool(lost), code)


class Pulse:
    """The writing side of one page."""

    def __init__(self, pages: mmap.mmap, rank: int) -> None:
        self._pages, self._at = pages, rank * PAGE_BYTES
        self._steps = self._exchanges = self._beats = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="deepdraft-pulse", daemon=True)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._beats += 1
            self._put("<Q", _BEAT, self._beats)

    def _put(self, form: str, offset: int, value: int) -> None:
        struct.pack_into(form, self._pages, self._at + offset, value)

    def set_state(self, state: State) -> None:
        """Shown to the parent, which allows each state its own time."""
        self._put("<I", _STATE, STATES.index(state))

    @contextlib.contextmanager
    def step(self) -> Generator[None]:
        """A step, whose length the parent bounds."""
        self._steps += 1
        self._put("<Q", _STEPS, self._steps)
        self.set_state("step")
        yield
        self.set_state("idle")  # not after an exception: that is a failure to be told

    def enter_exchange(self) -> None:
        """About to wait for the other ranks."""
        self._exchanges += 1
        self._put("<Q", _EXCHANGES, self._exchanges)
        self._put("<I", _WAITS, 1)

    def leave_exchange(self) -> None:
        """The other ranks came."""
        self._put("<I", _WAITS, 0)

    def fail(self, message: str, *, exit_code: int = 3, peer_lost: bool = False) -> None:
        """The reason why this rank ends, for the parent's message. The first one counts."""
        if read_page(self._pages, self._at // PAGE_BYTES).state == "failed":
            return
        raw = message.encode()[:_MOST_MESSAGE]
        start = self._at + _MESSAGE
        self._pages[start : start + len(raw)] = raw
        beat, steps, exchanges, _, waits, *_ = _FIELDS.unpack_from(self._pages, self._at)
        _FIELDS.pack_into(
            self._pages, self._at, beat, steps, exchanges, STATES.index("failed"), waits,
            len(raw), peer_lost, exit_code,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """This process as one of several: numbers, its pulse, and what joins it to the others."""

    rank: int
    size: int
    pulse: Pulse
    store: str
    """Path of the file through which the ranks find each other."""
    commands: tuple[int, ...]
    """Rank 0: write ends of the pipes to ranks 1, 2, ...; others: their read end."""

    def end(self, message: str, *, exit_code: int = 3, peer_lost: bool = False) -> NoReturn:
        """Tells the parent why and ends at once, without waiting for any other rank."""
        self.pulse.fail(message, exit_code=exit_code, peer_lost=peer_lost)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class PeerLost(EngineError):
    """Another rank went away: a consequence, its own end is the cause."""


def run_rank(me: Rank, work: Callable[[Rank], None]) -> NoReturn:
    """Runs `work` as this rank and ends the process, a failure being told to the parent. At once:
    other ranks may wait for this one, and the clean-up of libraries might wait for them."""
    try:
        work(me)
    except PeerLost as error:
        me.end(error.message, peer_lost=True)
    except DeepdraftError as error:
        engine = isinstance(error, EngineError)
        me.end(error.message, exit_code=3 if engine else error.exit_code)
    except Exception as error:
        traceback.print_exc()
        me.end(f"{type(error).__name__}: {error}")
    me.pulse.set_state("ended")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # closes the pipes: rank 0's end tells the others


def this_rank() -> Rank | None:
    """The rank that this process was started as by `launch`; None: it was not.

    Makes the process end with its parent, and its pulse beat. To be called once.
    """
    raw = os.environ.pop(VARIABLE, None)
    if raw is None:
        return None
    try:
        told = json.loads(raw)
        rank, size, parent = (int(told[k]) for k in ("rank", "size", "parent"))
        commands = tuple(int(fd) for fd in told["commands"])
        pages = mmap.mmap(int(told["pages"]), size * PAGE_BYTES)
        store = f"/proc/self/fd/{int(told['store'])}"
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{VARIABLE} is set, but not by deepdraft: {error!r}") from error
    _end_with(parent)
    pulse = Pulse(pages, rank)
    pulse.start()
    return Rank(rank, size, pulse, store, commands)


def _end_with(parent: int) -> None:
    """SIGKILL for this process when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(3)  # the parent ended before it could be noticed
