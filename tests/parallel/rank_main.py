"""Ranks that go wrong as they are told: `python rank_main.py MODE`, as a rank that `run_ranks` has
started or, started by something else, as rank 0 of three that starts the others. No torch: starts
fast.

Ranks meet by counting in files of the directory TEST_DIR; exchange k waits for all ranks.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deepdraft.errors import RankError
from deepdraft.parallel.launch import LedRanks, Limits
from deepdraft.parallel.rank import Rank, this_rank

DIR = Path(os.environ["TEST_DIR"])


def exchange(me: Rank, number: int) -> None:
    """As a collective: returns when every rank has come."""
    me.pulse.enter_exchange()
    (DIR / f"came-{number}-{me.rank}").touch()
    while not all((DIR / f"came-{number}-{rank}").exists() for rank in range(me.size)):
        time.sleep(0.01)
    me.pulse.leave_exchange()


def main() -> None:
    mode = sys.argv[1]
    me, led = this_rank(), None
    if me is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "3,5"  # as Ray does in a process that runs already
        limits = Limits(beat_s=1.5, step_s=60)
        led = LedRanks([sys.executable, __file__, mode], 3, lost, limits=limits)
        me = led.start()
    (DIR / f"pid-{me.rank}").write_text(str(os.getpid()))
    (DIR / f"gpus-{me.rank}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if mode == "bad-setting":
        me.end("config.json: hidden_size is odd", exit_code=2)
    if mode == "child" and me.rank == 1:  # a child of its own must end with it
        child = subprocess.Popen(["sleep", "600"])
        (DIR / "pid-child").write_text(str(child.pid))
    me.pulse.set_state("idle")
    with me.pulse.step():
        exchange(me, 1)
    with me.pulse.step():
        if me.rank == 1:
            fault(mode, me)
        exchange(me, 2)
    if mode == "serve" and me.rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        (DIR / "serving").touch()
        time.sleep(600)
    if mode == "early" and me.rank == 1:
        sys.exit(0)
    if led is not None:
        led.close()
        return
    for fd in me.commands:  # rank 0 closes, the others wait for it
        if me.rank == 0:
            time.sleep(0.3 if mode != "early" else 600)
            os.close(fd)
        else:
            os.read(fd, 1)
    me.pulse.set_state("ended")


def lost(error: RankError) -> None:
    """Ends rank 0, which has started the others."""
    (DIR / "lost").write_text(error.message)
    os._exit(error.exit_code)


def fault(mode: str, me: Rank) -> None:
    """What goes wrong on rank 1 in the middle of its second step."""
    if mode in ("wait", "child"):
        (DIR / "waiting").touch()
        time.sleep(600)
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "exit":
        os._exit(9)
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "loop":
        while True:
            time.sleep(0.01)
    if mode == "raise":
        me.end("ZeroDivisionError: in layer 3")


main()
