"""`deepdraft serve --tp 2`: the answers of one process, and an end together. Real processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepdraft.checkpoint.convert import convert
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.parallel.launch import Limits, run_ranks
from tests.parallel.living import alive
from tests.parallel.served import DEMO, write_served

BODY = {"prompt": "Hello there", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_served(tmp_path_factory.mktemp("served") / "model")


class Server:
    """One running `deepdraft serve` with its log."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        command = [sys.executable, "-m", "deepdraft.cli.main", "serve", *map(str, arguments)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--log-level", "info", "--schedule", "all"],
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + 120
        while "ready after" not in self.text():
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.1)
        found = re.search(r"running on (http://\S+)", self.text())
        assert found is not None
        self.url = found[1]

    def text(self) -> str:
        return self.log.read_text()

    def answer(self, **more: object) -> str:
        raw = json.dumps(BODY | more).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", raw, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["text"]

    def ranks(self) -> list[int]:
        listed = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(listed).read_text().split()]


@contextlib.contextmanager
def serving(log: Path, *arguments: object) -> Iterator[Server]:
    server = Server(log, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait(30)


def all_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < end, "a rank is still there"
        time.sleep(0.05)


def test_two_ranks_answer_as_one_process_and_end_on_sigterm(model, tmp_path):
    with serving(tmp_path / "one.log", model) as one:
        wanted = one.answer(), one.answer(prompt="What now", max_tokens=6)
    converted = tmp_path / "model"
    convert(Checkpoint.open(model), converted, 2)
    with serving(tmp_path / "two.log", converted, "--tp", 2) as two:
        ranks = two.ranks()
        assert len(ranks) == 2
        assert (two.answer(), two.answer(prompt="What now", max_tokens=6)) == wanted
        two.process.send_signal(signal.SIGTERM)
        assert two.process.wait(60) == 0, two.text()
        all_gone(ranks)


def test_a_rank_killed_while_an_answer_grows(model, tmp_path):
    with serving(tmp_path / "log", model, "--tp", 2) as server:
        ranks = server.ranks()
        failed: list[Exception] = []

        def ask() -> None:
            try:
                server.answer(max_tokens=3000)
            except Exception as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)
        os.kill(ranks[1], signal.SIGKILL)
        assert server.process.wait(30) == 3
        asking.join(30)
        assert failed  # cut off or answered 500
        all_gone(ranks)
    assert re.search(r"Error: rank 1 .*was killed by SIGKILL.*start again", server.text())


def test_what_cannot_be_split_is_told_before_any_rank_starts(model, tmp_path):
    def refusal(*arguments: object, command: str = "serve") -> str:
        program = [sys.executable, "-m", "deepdraft.cli.main", command, *map(str, arguments)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        return line

    assert "split over 2 ranks: moe_intermediate_size = 96 is 3 groups of 32" in refusal(
        DEMO, "--tp", 2
    )
    assert "o_groups = 2" in (told := refusal(model, "--tp", 4)) and "work: 1, 2" in told
    assert "engine.tp must be an integer >= 1, got 0" in refusal(model, "--tp", 0)
    assert "not kept with --tp yet" in refusal(model, "--tp", 2, "--kv-spill", tmp_path)
    told = refusal(model, "--tp", 2, "-p", "hello", command="generate")
    assert "--tp 2 belongs to `deepdraft serve`" in told
    gpu = ("--tp", 2, "--device", "cuda", "--numerics", "quant")
    assert "no NVIDIA driver; run with --device cpu" in refusal(model, *gpu)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "covers DeepSeek-V4.1, this is 'llama'" in refusal(tmp_path, "--tp", 2)


def test_a_file_that_is_missing_is_told_once(model, tmp_path):
    """Every rank finds it; the message is that of one process."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken, ignore=lambda *_: ["tokenizer.json"])
    command = [sys.executable, "-m", "deepdraft.cli.main", "serve", str(broken), "--tp", "2"]
    done = subprocess.run(
        [*command, "--port", "0", "--log-level", "error"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "tokenizer.json" in line]
    assert len(lines) == 1 and lines[0].startswith("Error: ") and "rank" not in lines[0]


def test_every_call_of_a_runner_on_two_ranks(model, tmp_path):
    """Parts of prompts, drafts, rows taken back, parking, a refusal: the ranks stay together."""
    main = Path(__file__).parent / "engine_main.py"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "found.json"
    limits = Limits(step_s=300, beat_s=60)
    run_ranks([sys.executable, str(main), str(model), str(out)], 2, env=env, limits=limits)
    found = json.loads(out.read_text())
    assert "all 2 sequences" in found.pop("refused")
    assert found == {"rows": True, "gone_on": True, "together": True, "raw": True, "free": 2}
