"""Ranks start by one command and end together, whatever one of them does. Real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepdraft.errors import RankError
from deepdraft.parallel.launch import Limits, run_ranks
from tests.parallel.living import alive

MAIN = Path(__file__).parent / "rank_main.py"
ROOT = str(Path(__file__).parents[2])


def pids(directory: Path) -> list[int]:
    """Of the ranks, and of their children, that said who they are."""
    return [int(path.read_text() or 0) for path in directory.glob("pid-*")]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.02)


@contextlib.contextmanager
def none_left(directory: Path) -> Iterator[None]:
    yield
    found = pids(directory)
    assert len(found) >= 2
    end = time.monotonic() + 20
    while any(map(alive, found)):
        assert time.monotonic() < end, "a rank is still there"
        time.sleep(0.02)


def start(mode: str, directory: Path, size: int = 3, **limits: float) -> None:
    env = {**os.environ, "TEST_DIR": str(directory), "PYTHONPATH": ROOT}
    run_ranks([sys.executable, str(MAIN), mode], size, env=env, limits=Limits(**limits))


def test_ranks_that_work_end_quietly(tmp_path):
    with none_left(tmp_path):
        start("fine", tmp_path)
    assert sorted(p.name for p in tmp_path.glob("came-2-*")) == [f"came-2-{r}" for r in range(3)]


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("die", r"rank 1 \(process \d+, step 2, exchange 1\) was killed by SIGKILL"),
        ("exit", r"rank 1 .* ended with code 9 and gave no reason"),
        ("raise", r"rank 1 .*step 2.* failed: ZeroDivisionError: in layer 3\. All 3 ranks"),
        ("early", r"rank 1 .* ended with code 0"),
    ],
)
def test_a_rank_that_ends_takes_all_with_it(mode, told, tmp_path):
    with none_left(tmp_path), pytest.raises(RankError, match=told) as caught:
        start(mode, tmp_path)
    assert caught.value.exit_code == 3


def test_a_stopped_rank_is_named_not_the_ones_that_wait(tmp_path):
    told = r"rank 1 .*step 2, exchange 1\) gave no sign of life for \d+ s \(stopped by a signal\)"
    with none_left(tmp_path), pytest.raises(RankError, match=told):
        start("stop", tmp_path, beat_s=1.5, step_s=60)


def test_a_rank_in_an_endless_step_is_named(tmp_path):
    told = r"rank 1 .*step 2, exchange 1\) has been in one step for"
    with none_left(tmp_path), pytest.raises(RankError, match=told):
        start("loop", tmp_path, beat_s=30, step_s=1.5)


def test_a_wrong_setting_is_told_as_by_one_process(tmp_path):
    with pytest.raises(RankError, match=r"^config\.json: hidden_size is odd$") as caught:
        start("bad-setting", tmp_path)
    assert caught.value.exit_code == 2


def test_children_of_a_rank_end_too(tmp_path):
    def kill_rank() -> None:
        wait_for(tmp_path / "waiting")
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)

    threading.Thread(target=kill_rank).start()
    with none_left(tmp_path), pytest.raises(RankError, match=r"rank 1 .* SIGKILL"):
        start("child", tmp_path)
    assert (tmp_path / "pid-child").exists()


def parent(directory: Path, mode: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from deepdraft.cli.main import main; import deepdraft.parallel.launch as l; "
        f"l.run_ranks([sys.executable, {str(MAIN)!r}, {mode!r}], 2)"
    )
    env = {**os.environ, "TEST_DIR": str(directory), "PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True)


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    with none_left(tmp_path):
        process = parent(tmp_path, "wait")
        wait_for(tmp_path / "waiting")
        process.kill()
        process.wait(30)


def test_sigterm_reaches_rank_0_which_ends_in_its_own_way(tmp_path):
    with none_left(tmp_path):
        process = parent(tmp_path, "serve")
        wait_for(tmp_path / "serving")
        process.terminate()
        assert process.wait(60) == 0


def test_a_parent_that_slept_blames_no_rank(tmp_path):
    """All processes are stopped for longer than the limits, as when a machine sleeps."""
    code = (
        "import sys; import deepdraft.parallel.launch as l; "
        f"l.run_ranks([sys.executable, {str(MAIN)!r}, 'serve'], 2, limits=l.Limits(beat_s=1.0))"
    )
    env = {**os.environ, "TEST_DIR": str(tmp_path), "PYTHONPATH": ROOT}
    with none_left(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", code], env=env)
        wait_for(tmp_path / "serving")
        everyone = [process.pid, *pids(tmp_path)]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.7)
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0


def lead(mode: str, directory: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "TEST_DIR": str(directory), "PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, str(MAIN), mode], env=env)


def test_rank_0_that_starts_the_others_ends_with_them(tmp_path):
    with none_left(tmp_path):
        assert lead("fine", tmp_path).wait(60) == 0
    assert sorted(p.name for p in tmp_path.glob("came-2-*")) == [f"came-2-{r}" for r in range(3)]
    assert not (tmp_path / "lost").exists()
    assert {p.read_text() for p in tmp_path.glob("gpus-*")} == {"3,5"}, "they see its GPUs"


@pytest.mark.parametrize(
    ("mode", "told", "code"),
    [
        ("die", r"rank 1 \(process \d+, step 2, exchange 1\) was killed by SIGKILL", 3),
        ("stop", r"rank 1 .*gave no sign of life for \d+ s \(stopped by a signal\)", 3),
        ("bad-setting", r"^config\.json: hidden_size is odd$", 2),
    ],
)
def test_rank_0_that_started_the_others_hears_of_a_loss(mode, told, code, tmp_path):
    """By then the others are gone; that it waits for them in an exchange does not matter. With the
    wrong setting it is rank 0 itself that cannot go on."""
    with none_left(tmp_path):
        assert lead(mode, tmp_path).wait(60) == code
    assert re.search(told, (tmp_path / "lost").read_text())


def test_the_others_end_with_rank_0_that_started_them(tmp_path):
    with none_left(tmp_path):
        process = lead("wait", tmp_path)
        wait_for(tmp_path / "waiting")
        process.kill()
        process.wait(30)
