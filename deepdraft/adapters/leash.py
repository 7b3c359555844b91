"""A process that starts one command and leaves nothing of it behind, however things end.

Run as `python leash.py GRACE_S COMMAND...`, its standard input being a pipe that the starter holds.
Ends the command and everything it started when the pipe closes (the starter is gone, or asks for
it) or when the command itself ends. Exits as the command did.

Owns: a session of its own, and every process below. Knows nothing of: what the command is.
Standard library only: it is started by file, and takes some 10 MB.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.02
_REAP_S = 5.0


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Ids of the processes below `root`, the ones that have ended and wait for it left out."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            below.setdefault(int(fields[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        for child in below.get(queue.pop(), ()):
            found.append(child)
            queue.append(child)
    return found


def end(root: int, command: int, grace_s: float) -> None:
    """Asks the command to end what it started and itself; then kills whatever is left of them.

    As the subreaper of all of them, `root` sees also those that left the session.
    """
    with contextlib.suppress(OSError):
        os.kill(command, signal.SIGTERM)
    limit = time.monotonic() + grace_s
    while command in descendants(root) and time.monotonic() < limit:
        time.sleep(_LOOK_S)
    while left := descendants(root):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    _reap()


def _reap() -> None:
    """Takes what has ended; else it goes to the system's first process, which may not take it.

    A process whose threads are still ending cannot be taken yet.
    """
    limit = time.monotonic() + _REAP_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < limit:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_LOOK_S)


def main() -> int:
    """Runs the command until it or the pipe ends."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The starter ends us by the pipe; signals of its terminal are not for us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=child)
    except OSError as error:
        print(f"{command[0]} does not start: {error.strerror}", file=sys.stderr)
        return 127
    status = None
    while status is None:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 1):
            break
        status = process.poll()
    end(os.getpid(), process.pid, grace_s if status is None else 0.0)
    if status is None:
        return 0
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
