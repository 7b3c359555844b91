"""The supervisor: restarts, orphans, limits. The processes are small Python scripts."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepdraft.adapters.supervisor import Health, Rules, Supervised, answers, scrape
from deepdraft.errors import EngineError

from .broken import broken_server

FAST = Rules(
    probe_every_s=0.03, ill_after=2, backoff_s=0.02, backoff_most_s=0.05, grace_s=2.0, start_s=20.0
)
READY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch()\n"
FOREVER = READY + "time.sleep(600)"
CHILD = "import time; time.sleep(600)"
# A child of its own session, and one that ignores being asked to end.
FAMILY = f"""
import signal, subprocess, sys
a = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
b = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}])
print("pids", a.pid, b.pid, flush=True)
{FOREVER}"""


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """A process that has ended and was not taken counts as alive where we should have taken it."""
    return Path(f"/proc/{pid}").exists()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def supervised(tmp_path: Path, code: str, rules: Rules = FAST, **more: object) -> Supervised:
    flag = tmp_path / "ready"
    command = [sys.executable, "-S", "-c", code, str(flag)]
    return Supervised("toy", command, flag.exists, rules=rules, **more)  # type: ignore[arg-type]


def test_life(tmp_path: Path) -> None:
    phases: list[str] = []
    log = tmp_path / "log"
    one = supervised(tmp_path, "print('hello')\n" + FOREVER, log=log, on_change=phases.append)
    with one:
        one.wait_ready(20)
        pids = one.pids()
        assert len(pids) == 1 and one.health.starts == 1 and one.health.memory_bytes >= 0
        until(lambda: one.health.memory_bytes > 1 << 20)
    assert not alive(pids[0]) and phases == ["starting", "ready", "stopped"]
    assert log.read_text() == "hello\n" and list(one.tail) == ["hello"]


def test_nothing_is_left_of_a_family(tmp_path: Path) -> None:
    rules = Rules(probe_every_s=0.03, grace_s=0.3)
    with supervised(tmp_path, FAMILY, rules) as one:
        one.wait_ready(20)
        until(lambda: len(one.tail) > 0)
        pids = [*map(int, one.tail[0].split()[1:]), *one.pids()]
        assert len(set(pids)) == 3 and all(map(alive, pids))
    assert not any(map(alive, pids))


def test_a_killed_process_comes_back_without_its_orphans(tmp_path: Path) -> None:
    with supervised(tmp_path, FAMILY) as one:
        one.wait_ready(20)
        until(lambda: len(one.tail) > 0)
        orphans = [int(p) for p in one.tail[0].split()[1:]]
        (main,) = set(one.pids()) - set(orphans)
        os.kill(main, signal.SIGKILL)
        until(lambda: one.health.starts == 2)
        assert not any(map(alive, [main, *orphans]))
        assert "signal 9" in one.health.reason
        one.wait_ready(20)
    assert not any(map(alive, orphans))


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.adapters.test_supervisor import FAMILY, supervised\n"
        "one = supervised(Path(sys.argv[1]), FAMILY); one.start(); one.wait_ready(30)\n"
        "print(*one.tail[0].split()[1:], *one.pids(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as outer:
        assert outer.stdout is not None
        pids = [int(p) for p in outer.stdout.readline().split()]
        assert len(set(pids)) == 3 and all(map(alive, pids))
        outer.kill()
    until(lambda: not any(map(alive, pids)))


def test_nothing_is_left_when_the_leash_is_killed(tmp_path: Path) -> None:
    quiet = f"""
import subprocess, sys
b = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}])
print("pids", b.pid, flush=True)
{FOREVER}"""
    with supervised(tmp_path, quiet) as one:
        one.wait_ready(20)
        pids = one.pids()
        assert one._process is not None and len(pids) == 2
        one._process.kill()
        until(lambda: one.health.starts == 2)
        # They are the system's first process's to take then.
        assert not any(map(runs, pids))


def test_a_process_that_is_ill_is_started_anew(tmp_path: Path) -> None:
    with supervised(tmp_path, FOREVER) as one:
        one.wait_ready(20)
        (tmp_path / "ready").unlink()
        until(lambda: one.health.starts == 2)
        assert "probes in a row" in one.health.reason
        one.wait_ready(20)


def test_a_probe_that_fails_by_an_error_is_a_failed_probe(tmp_path: Path) -> None:
    def probe() -> bool:
        raise OSError("refused")

    rules = Rules(probe_every_s=0.02, start_s=0.2, backoff_s=0.01, grace_s=1.0)
    one = Supervised("toy", [sys.executable, "-S", "-c", CHILD], probe, rules=rules)
    with one, pytest.raises(EngineError, match=r"given up after 2 failures.*not ready within"):
        one.wait_ready(30)
    assert one.health.phase == "failed" and one.pids() == []


def test_what_cannot_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    one = supervised(tmp_path, "import sys; sys.exit('no such model')")
    with one, pytest.raises(EngineError, match=r"status 1.*no such model"):
        one.wait_ready(20)
    assert one.health.starts == 2
    two = Supervised("none", [str(tmp_path / "none")], lambda: False, rules=FAST)
    with two, pytest.raises(EngineError, match=r"status 127.*does not start"):
        two.wait_ready(20)


def test_backoff_doubles_and_ends(tmp_path: Path) -> None:
    rules = Rules(probe_every_s=0.01, backoff_s=0.02, backoff_most_s=0.05, most_failures=4)
    one = supervised(tmp_path, READY + "time.sleep(0.3)", rules)
    waits: list[float] = []
    waited = one._stop.wait

    def wait(seconds: float | None = None) -> bool:
        if threading.current_thread() is one._thread and seconds != rules.probe_every_s:
            waits.append(seconds or 0.0)
        return waited(seconds)

    one._stop.wait = wait  # type: ignore[method-assign]
    with one:
        until(lambda: one.health.phase == "failed")
    assert waits == [0.02, 0.04, 0.05] and one.health.starts == 4
    assert len(one.health.history) == 4 and "given up after 4" in one.health.reason


def test_a_memory_limit(tmp_path: Path) -> None:
    grows = "x = bytearray(120 << 20)\nx[::4096] = b'1' * len(x[::4096])\n" + FOREVER
    rules = Rules(
        probe_every_s=0.02, backoff_s=0.01, memory_bytes=90 << 20, most_failures=1,
        most_first_failures=1, grace_s=1.0,
    )  # fmt: skip
    with supervised(tmp_path, grows, rules) as one:
        until(lambda: one.health.phase == "failed")
    assert "more than the limit of 90 MiB" in one.health.reason


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rules = Rules(probe_every_s=0.02, log_bytes=2000)
    talks = "for i in range(300): print(i, 'x' * 20, flush=True)\n" + FOREVER
    with supervised(tmp_path, talks, rules, log=log) as one:
        one.wait_ready(20)
        until(lambda: bool(one.tail) and one.tail[-1].startswith("299"))
    assert log.stat().st_size <= 2100 and (tmp_path / "log.1").stat().st_size <= 2100
    assert len(one.tail) == 40


def test_a_log_that_cannot_be_kept_does_not_hold_the_process(tmp_path: Path) -> None:
    talks = "print('x' * 300_000, flush=True)\n" + FOREVER  # more than a pipe holds
    with supervised(tmp_path, talks, FAST, log=tmp_path) as one:
        one.wait_ready(20)
        assert one.health.starts == 1


def test_metrics_and_probes() -> None:
    with broken_server() as server:
        assert answers(server.url + "/readyz")
        server.ready = False
        assert not answers(server.url + "/readyz")
        with pytest.raises(EngineError, match="status 404"):
            scrape(server.url + "/metrics")
    with pytest.raises(EngineError, match="no metrics"):
        scrape(server.url + "/metrics")
    assert Health().phase == "new"


def test_a_probe_is_not_held_by_a_slow_answer() -> None:
    sent: list[bool] = []

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                for _ in range(1000):
                    connection.sendall(b"H")
                    time.sleep(0.01)
                sent.append(True)
            except OSError:
                sent.append(False)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises((OSError, http.client.HTTPException)):
            answers(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=0.3)
        thread.join()
    assert sent == [False]


def test_scraped_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepdraft.adapters import supervisor

    page = b'# HELP x y\na_total 3\nb{le="+Inf",n="q r"} 1.5e3 1700000000\nbad line here\nc NaN\n'
    monkeypatch.setattr(supervisor, "fetch", lambda url, **_: (200, page))
    found = scrape("http://x/metrics")
    assert found.pop("c") != 0
    assert found == {"a_total": 3.0, 'b{le="+Inf",n="q r"}': 1500.0}
