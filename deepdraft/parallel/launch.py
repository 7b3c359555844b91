"""Starts the ranks of one model, watches them, and ends them together.

Owns: the processes, the limits of silence, the message that says which rank failed and why.
Knows nothing of: torch, what a rank computes.

The clock of a limit runs only while the parent itself runs: a machine that slept, or a stopped
process group, is no hang.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

from deepdraft.errors import ConfigError, DeepdraftError, RankError
from deepdraft.parallel.rank import PAGE_BYTES, VARIABLE, Health, Pulse, Rank, read_page

POLL_S = 0.05
_NAMES = {signal.SIGKILL: "for instance by the system for lack of memory, or by hand"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which a rank counts as hanging."""

    beat_s: float = 6.0
    """Without a sign of life."""
    loading_beat_s: float = 60.0
    """The same while it starts or loads: a long native call may keep the beat from counting."""
    step_s: float = 8.0
    """In one step. CPU steps may be slow: give more there."""
    warm_s: float = 0.0
    """For so long after it has loaded, a rank may take `warm_step_s` for a step: kernels are
    compiled then."""
    warm_step_s: float = 120.0
    end_s: float = 5.0
    """Between the end of rank 0 and that of the others."""
    cause_s: float = 1.5
    """Wait for the cause when a rank only says that it lost another."""


class _ThisProcess:
    """Rank 0 where it watches the others itself: it ends when it says so."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@dataclass(slots=True)
class _Watched:
    rank: int
    process: subprocess.Popen[bytes] | _ThisProcess
    last: tuple[int, int] = (-1, -1)
    silent_s: float = 0.0
    step: int = -1
    step_s: float = 0.0
    ready_s: float = 0.0
    """Since it left loading."""
    health: Health = field(init=False)

    def look(self, pages: mmap.mmap, elapsed_s: float) -> None:
        """Reads the page and advances the clocks."""
        self.health = health = read_page(pages, self.rank)
        mark = (health.beat, health.steps)
        self.silent_s = 0.0 if mark != self.last else self.silent_s + elapsed_s
        self.last = mark
        same = health.state == "step" and health.steps == self.step
        self.step_s = self.step_s + elapsed_s if same else 0.0
        self.step = health.steps
        if health.state not in ("starting", "loading"):
            self.ready_s += elapsed_s

    def hangs(self, limits: Limits) -> bool:
        if self.health.state == "ended":
            return False
        early = self.health.state in ("starting", "loading")
        beat_s = limits.loading_beat_s if early else limits.beat_s
        step_s = limits.warm_step_s if self.ready_s < limits.warm_s else limits.step_s
        return self.silent_s > beat_s or self.step_s > step_s


def run_ranks(
    command: Sequence[str],
    size: int,
    *,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs `command` as ranks 0..size-1 and returns when rank 0 has ended well.

    SIGINT and SIGTERM go to rank 0, which ends the way it does alone; the others follow when it
    closes their pipes. Raises RankError when a rank dies, fails or hangs; by then all are gone. To
    be called on the main thread.
    """
    limits = limits or Limits()
    with _started(command, size, os.environ if env is None else env) as (pages, ranks, _):
        handlers = {
            number: signal.signal(number, lambda n, _frame: _forward(ranks[0], n))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            _watch(pages, ranks, limits)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _forward(first: _Watched, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(first.process.pid, number)


class LedRanks:
    """Ranks 1..size-1 as children of this process, which is rank 0 and was started by something
    else (a worker of Ray). A thread of its own starts and watches them."""

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        on_loss: Callable[[RankError], None],
        *,
        limits: Limits | None = None,
    ) -> None:
        """`on_loss` is called on that thread, once, when a rank has died, failed or hangs, this one
        included; by then the others are gone, and this process cannot go on as rank 0."""
        self._command, self._size, self._on_loss = list(command), size, on_loss
        self._limits = limits or Limits()
        self._self = _ThisProcess()
        self._me: Future[Rank] = Future()
        # It makes the others, and not `start`: a child ends with the thread that made it.
        self._thread = threading.Thread(target=self._run, name="deepdraft-ranks", daemon=True)

    def start(self) -> Rank:
        """Starts the others; returns this process as rank 0. Raises ConfigError, OSError."""
        self._thread.start()
        me = self._me.result()
        me.pulse.start()
        return me

    def close(self) -> None:
        """Rank 0 makes no more calls: the others end, at the latest after `end_s`."""
        if self._self.returncode is None:
            me = self._me.result()
            me.pulse.set_state("ended")
            self._self.returncode = 0
            with open(os.devnull, "wb") as nowhere:
                for fd in me.commands:  # closed for the others; a late call of rank 0 hits nothing
                    os.dup2(nowhere.fileno(), fd, inheritable=False)
        self._thread.join()

    def _run(self) -> None:
        try:
            with _started(self._command, self._size, os.environ, self._self) as started:
                pages, ranks, me = started
                assert me is not None
                self._me.set_result(me)
                _watch(pages, ranks, self._limits)
        except Exception as error:
            if not self._me.done():
                self._me.set_exception(error)
                return
            if not isinstance(error, RankError):
                error = RankError(f"the ranks cannot be watched: {type(error).__name__}: {error}")
            self._on_loss(error)


class _Lead(Rank):
    """Rank 0 beside the thread that watches the ranks: that one knows the cause and has the process
    ended, so that a caller who cannot go on waits for it here."""

    def end(self, message: str, *, exit_code: int = 3, peer_lost: bool = False) -> NoReturn:
        """Never returns."""
        self.pulse.fail(message, exit_code=exit_code, peer_lost=peer_lost)
        while True:
            threading.Event().wait()


@contextlib.contextmanager
def _started(
    command: Sequence[str], size: int, env: Mapping[str, str], first: _ThisProcess | None = None
) -> Generator[tuple[mmap.mmap, list[_Watched], Rank | None]]:
    """The ranks' processes; on leaving, whatever way, none of them is left. `first`: rank 0 is this
    process, as the last of the three."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("several ranks (--tp) need Linux; run with --tp 1 here")
    shared = os.memfd_create("deepdraft-ranks")
    store = os.memfd_create("deepdraft-store")
    os.ftruncate(shared, size * PAGE_BYTES)
    pipes = [os.pipe() for _ in range(size - 1)]
    ranks: list[_Watched] = []
    try:
        pages = mmap.mmap(shared, size * PAGE_BYTES)
        me: Rank | None = None
        if first is not None:
            own = tuple(w for _, w in pipes)
            me = _Lead(0, size, Pulse(pages, 0), f"/proc/self/fd/{store}", own)
            ranks.append(_Watched(0, first))
        for rank in range(len(ranks), size):
            ends = [w for _, w in pipes] if rank == 0 else [pipes[rank - 1][0]]
            told = {
                "rank": rank,
                "size": size,
                "parent": os.getpid(),
                "pages": shared,
                "store": store,
                "commands": ends,
            }
            process = subprocess.Popen(
                list(command),
                env={**env, VARIABLE: json.dumps(told)},
                pass_fds=(shared, store, *ends),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own: its children end with it
            )
            ranks.append(_Watched(rank, process))
        kept = () if me is None else me.commands
        for fd in (fd for pair in pipes for fd in pair if fd not in kept):
            os.close(fd)
        pipes = []
        yield pages, ranks, me
    finally:
        _kill(ranks)
        for fd in (shared, store, *(fd for pair in pipes for fd in pair)):
            os.close(fd)


def _kill(ranks: Sequence[_Watched]) -> None:
    """SIGKILL to every started rank's process group, also where the rank itself is gone."""
    processes = [w.process for w in ranks if not isinstance(w.process, _ThisProcess)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def _watch(pages: mmap.mmap, ranks: Sequence[_Watched], limits: Limits) -> None:
    before = time.monotonic()
    waited_s = ended_s = 0.0
    while True:
        time.sleep(POLL_S)
        now = time.monotonic()
        elapsed_s = min(now - before, 4 * POLL_S)  # more: this process did not run either
        before = now
        gone = [w for w in ranks if w.process.poll() is not None]
        for watched in ranks:
            watched.look(pages, elapsed_s)
        if ranks[0].process.returncode == 0 or ranks[0].health.state == "ended":
            if len(gone) == len(ranks) and not any(w.process.returncode for w in gone):
                return
            ended_s += elapsed_s
            if ended_s > limits.end_s:
                return  # the answers are out; what still runs is killed by the caller
        else:
            failed = [
                w
                for w in ranks
                if (w in gone and w.health.state != "ended") or w.health.state == "failed"
            ]
            if failed:
                waited_s += elapsed_s
                cause = next((w for w in failed if not w.health.peer_lost), None)
                if (cause is not None and cause in gone) or waited_s > limits.cause_s:
                    raise _died(cause or failed[0], ranks)
                continue
            hanging = [w for w in ranks if w.hangs(limits)]
            if hanging:
                raise _hangs(ranks, hanging, limits)


def _died(cause: _Watched, ranks: Sequence[_Watched]) -> RankError:
    code, health = cause.process.returncode, cause.health
    exit_code = RankError.exit_code
    if health.state == "failed" and health.exit_code == DeepdraftError.exit_code:
        # A wrong setting or file: told as by a single process.
        return RankError(health.message, exit_code=health.exit_code)
    if health.state == "failed":
        what, exit_code = f"failed: {health.message}", health.exit_code
    elif code is not None and code < 0:
        name = signal.Signals(-code).name
        why = f", {_NAMES[hint]}" if (hint := signal.Signals(-code)) in _NAMES else ""
        what = f"was killed by {name}{why}"
    elif code is not None:
        what = f"ended with code {code} and gave no reason (its output above may say more)"
    else:
        what = "failed without a reason"
    return RankError(
        f"rank {cause.rank} (process {cause.process.pid}, {_where(health)}) {what}. "
        f"All {len(ranks)} ranks were stopped; start again",
        exit_code=exit_code,
    )


def _hangs(ranks: Sequence[_Watched], hanging: Sequence[_Watched], limits: Limits) -> RankError:
    # Those that wait for others are no cause, though they may pass the limit first, having begun
    # first; of the rest the one that came least far.
    def order(watched: _Watched) -> tuple[bool, bool, int, bool]:
        hangs, health = watched in hanging, watched.health
        silent = hangs and watched.silent_s > limits.beat_s
        return not silent, health.in_exchange, health.exchanges, not hangs

    cause = min((w for w in ranks if w.health.state != "ended"), key=order)
    state = _process_state(cause.process.pid)
    if cause.silent_s > limits.beat_s:
        what = f"gave no sign of life for {cause.silent_s:.0f} s{state}"
    else:
        what = f"has been in one step for {cause.step_s:.0f} s{state}"
    return RankError(
        f"rank {cause.rank} (process {cause.process.pid}, {_where(cause.health)}) {what}. "
        "All ranks were stopped; start again"
    )


def _where(health: Health) -> str:
    if health.state != "step" and not health.steps:
        return health.state
    waits = ", waiting for the others" if health.in_exchange else ""
    return f"step {health.steps}, exchange {health.exchanges}{waits}"


def _process_state(pid: int) -> str:
    """What the kernel says of a process that does not move."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            letter = file.read().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
    known = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a device"}
    return f" ({known[letter]})" if letter in known else ""
