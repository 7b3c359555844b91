"""Two replicas on a real Ray with a real Redis (`make test-fleet`; skipped where Ray is not
installed): conversations bounce between them, one is killed in the middle, the fleet is drained."""

import collections
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.children import Child, replicas_of

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed here: make test-fleet has it",
    ),
    pytest.mark.skipif(REDIS is None, reason="there is no redis-server"),
]
PATIENCE_S = 600.0
CONVERSATIONS, TURNS, WORKERS = 30, 3, 4
PASSWORD = "fleet-live"
Json = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Fleet:
    """A fleet's process and what is needed to talk to it."""

    name: str
    file: Path
    url: str
    environment: dict[str, str]
    child: Child = field(init=False)

    def start(self) -> None:
        self.child = Child(self.words("up"), self.environment)

    def words(self, command: str) -> list[str]:
        return [sys.executable, "-m", "deepdraft.cli.main", "fleet", command, str(self.file)]

    def status(self) -> Json:
        done = subprocess.run(
            [*self.words("status"), "--json"], env=self.environment, capture_output=True, text=True
        )
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])


def make_fleet(tmp_path: Path, settings: str) -> Fleet:
    name, port = f"t{os.getpid()}-{free_port()}", free_port()
    file = tmp_path / "fleet.toml"
    head, _, tables = settings.partition("\n\n")
    file.write_text(f'name = "{name}"\n{head}\n{tables}\n[server]\nport = {port}\ndrain_s = 300\n')
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return Fleet(name, file, f"http://127.0.0.1:{port}", environment)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert REDIS is not None
    port = free_port()
    words = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass"]
    process = subprocess.Popen(
        [*words, PASSWORD], cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL
    )
    yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def oracle() -> Iterator[str]:
    """One server without a cache: what every answer must be."""
    port = free_port()
    words = ["serve", "--port", str(port), "--kv-memory", "0", "--drafts", "0"]
    child = Child([sys.executable, "-m", "deepdraft.cli.main", *words], dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    child.wait_until(lambda: _ready(url), PATIENCE_S)
    yield url
    child.end(signal.SIGTERM)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Run:
    """Conversations and what came of their turns."""

    fleet: Fleet
    oracle: str
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    replicas: set[str] = field(default_factory=set)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """When failed requests began and ended, and how they failed."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=PATIENCE_S))

    def ask(self, body: Json, session: str) -> Json:
        """One turn; a client that gets no answer asks again."""
        while True:
            begin = time.monotonic()
            try:
                answer = self.client.post(
                    f"{self.fleet.url}/v1/chat/completions",
                    json=body,
                    headers={"X-Session-ID": session},
                )
                if answer.status_code == 200:
                    self.replicas.add(answer.headers["x-deepdraft-replica"])
                    return answer.json()
                failed = f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                failed = type(error).__name__
            self.spans.append((begin, time.monotonic(), failed))

    def conversation(self, number: int) -> None:
        chance = random.Random(number)
        messages: list[Json] = [{"role": "system", "content": f"You are number {number}. " * 4}]
        for _ in range(TURNS):
            words = " ".join(chance.choices(("river", "stone", "cloud", "seven", "salt"), k=5))
            messages.append({"role": "user", "content": f"Tell me about {words}."})
            body = {
                "messages": messages,
                "temperature": 0,
                "max_tokens": 10,
                "thinking": {"type": "disabled"},
            }
            got = self.ask(body, f"session-{number}")
            right = self.client.post(f"{self.oracle}/v1/chat/completions", json=body).json()
            text, true = (a["choices"][0]["message"]["content"] for a in (got, right))
            self.counts["different"] += text != true
            self.counts["turns"] += 1
            source = got["usage"]["prompt_tokens_details"].get("cache_source", "computed")
            self.counts[source] += 1
            messages.append({"role": "assistant", "content": text or "x"})


def test_a_replica_is_killed_under_conversations_and_the_fleet_is_drained(
    tmp_path: Path, redis_url: str, oracle: str
) -> None:
    fleet = make_fleet(
        tmp_path,
        f"""
[engine]
kv_memory = "64MiB"
[fleet]
directory = "{redis_url}"
fetch = "always"
[replicas]
count = 2
cpus = 0.5
selftest = false
look_s = 1.0""",
    )
    fleet.start()
    try:
        fleet.child.wait_for("2 replicas are ready", PATIENCE_S)
        run = Run(fleet, oracle)
        killed: list[tuple[int, float]] = []
        half = threading.Event()

        def kill() -> None:
            half.wait(PATIENCE_S)
            pid = replicas_of(fleet.name)[0]
            os.kill(pid, signal.SIGKILL)
            killed.append((pid, time.monotonic()))

        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(WORKERS) as workers:
            jobs = [workers.submit(run.conversation, n) for n in range(CONVERSATIONS)]
            for job in jobs:
                job.result()
                if run.counts["turns"] >= CONVERSATIONS * TURNS // 3:
                    half.set()
        killer.join()
        [(victim, when)] = killed
        assert run.counts["different"] == 0
        assert run.counts["turns"] == CONVERSATIONS * TURNS
        assert run.counts["peer"] > 0 and run.counts["host"] > 0
        # Only what the killed one was doing may fail, at most once each.
        assert len(run.spans) <= WORKERS
        assert all(begin <= when <= end for begin, end, _ in run.spans), run.spans

        def healed() -> bool:
            return fleet.status()["replicas"].get("RUNNING", 0) == 2

        fleet.child.wait_until(healed, PATIENCE_S)
        record(run, healed_s=time.monotonic() - when)
        assert victim not in replicas_of(fleet.name)
        drain(fleet, run.client)
    finally:
        fleet.child.end(signal.SIGKILL)
    assert replicas_of(fleet.name) == []


def record(run: Run, healed_s: float) -> None:
    """Writes what came of a run where DEEPDRAFT_RECORD says."""
    if file := os.environ.get("DEEPDRAFT_RECORD"):
        from deepdraft.proof.bench import provenance

        figures = {
            "what": "2 replicas on Ray, one killed (-9) under conversations; make test-fleet",
            **provenance(),
            "ray": importlib.metadata.version("ray"),
            "conversations": CONVERSATIONS,
            "at_a_time": WORKERS,
            **run.counts,
            "failed_requests": [failed for _, _, failed in run.spans],
            "replicas_seen": len(run.replicas),
            "killed_to_all_ready_s": round(healed_s, 1),
        }
        Path(file).write_text(json.dumps(figures, indent=1) + "\n")


def drain(fleet: Fleet, client: httpx.Client) -> None:
    """SIGTERM while a stream is under way: it gets to its end, then everything ends."""
    body = {
        "messages": [{"role": "user", "content": "Tell me about rivers"}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", f"{fleet.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        fleet.child.process.send_signal(signal.SIGTERM)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["usage"]["completion_tokens"] == 300
    assert fleet.child.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        client.get(f"{fleet.url}/readyz")


def test_a_fleet_whose_replicas_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "nothing we know"}')
    fleet = make_fleet(
        tmp_path, f'model = "{broken}"\n\n[replicas]\ncount = 1\ncpus = 0.5\nselftest = false'
    )
    fleet.start()
    try:
        fleet.child.wait_for("Error:", PATIENCE_S)
        assert fleet.child.process.wait(PATIENCE_S) == 2
        assert "a replica does not become ready" in fleet.child.text()
        assert "nothing we know" in fleet.child.text()
        assert replicas_of(fleet.name) == []
    finally:
        fleet.child.end(signal.SIGKILL)
