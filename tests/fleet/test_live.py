"""Two replicas on a real Ray with a real Redis (`make test-fleet`; skipped where Ray is not
installed): conversations bounce between them, one is stopped and one is killed in the middle, and
the client sees none of it; then the fleet is drained under a stream."""

import collections
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from deepdraft.proof.fleet_served import free_port
from deepdraft.server.service import bundled_checkpoint
from tests.fleet.asking import Answered, Failed, Json, ask
from tests.fleet.children import Child, process_of, ranks_of, replicas_of
from tests.parallel.living import alive
from tests.parallel.served import write_served

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

    def ready(self) -> int:
        """Replicas that the front can use."""
        health = httpx.get(f"{self.url}/healthz", timeout=60).json()
        return health["replicas"].get("ready", 0)

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

    def ask(self, body: Json, session: str) -> Answered:
        """One turn; a client that gets no answer asks again."""
        while True:
            begin = time.monotonic()
            try:
                answer = ask(self.client, self.fleet.url, body, session)
            except (httpx.HTTPError, Failed) as error:
                self.spans.append((begin, time.monotonic(), f"{type(error).__name__} {error}"))
            else:
                self.replicas.add(answer.replica)
                return answer

    def conversation(self, number: int) -> None:
        chance = random.Random(number)
        messages: list[Json] = [{"role": "system", "content": f"You are number {number}. " * 4}]
        for turn in range(TURNS):
            words = " ".join(chance.choices(("river", "stone", "cloud", "seven", "salt"), k=5))
            messages.append({"role": "user", "content": f"Tell me about {words}."})
            body = {
                "messages": messages,
                "temperature": 0,
                "max_tokens": 10,
                "thinking": {"type": "disabled"},
            }
            more: Json = {"stream": (number + turn) % 2 == 0}
            if more["stream"]:
                more |= {"max_tokens": 24}
            got = self.ask(body | more, f"session-{number}")
            body |= {"max_tokens": more.get("max_tokens", 10)}
            right = self.client.post(f"{self.oracle}/v1/chat/completions", json=body).json()
            text, true = got.text, right["choices"][0]["message"]["content"] or ""
            self.counts["different"] += text != true
            self.counts["turns"] += 1
            source = got.usage["prompt_tokens_details"].get("cache_source", "computed")
            self.counts[source] += 1
            messages.append({"role": "assistant", "content": text or "x"})


def test_replicas_are_stopped_and_killed_under_conversations_and_nobody_sees_it(
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
look_s = 1.0
quiet_s = 2.0
resume = true""",
    )
    fleet.start()
    try:
        fleet.child.wait_for("2 replicas are ready", PATIENCE_S)
        run = Run(fleet, oracle)
        victims = replicas_of(fleet.name)
        killed: list[float] = []
        third, two_thirds = threading.Event(), threading.Event()

        def harm() -> None:
            third.wait(PATIENCE_S)
            os.kill(victims[1], signal.SIGSTOP)
            two_thirds.wait(PATIENCE_S)
            os.kill(victims[1], signal.SIGCONT)  # what it was doing, it goes on with
            fleet.child.wait_until(lambda: fleet.ready() == 2, PATIENCE_S)
            os.kill(victims[0], signal.SIGKILL)
            killed.append(time.monotonic())

        harmer = threading.Thread(target=harm)
        harmer.start()
        with ThreadPoolExecutor(WORKERS) as workers:
            jobs = [workers.submit(run.conversation, n) for n in range(CONVERSATIONS)]
            for job in jobs:
                job.result()
                for event, part in ((third, 3), (two_thirds, 2)):
                    if run.counts["turns"] >= CONVERSATIONS * TURNS // part:
                        event.set()
        harmer.join()
        assert run.counts["different"] == 0
        assert run.counts["turns"] == CONVERSATIONS * TURNS
        assert run.counts["peer"] > 0 and run.counts["host"] > 0
        assert run.spans == [], "with resume no request fails"
        assert len(run.replicas) >= 2

        def healed() -> bool:
            return fleet.status()["replicas"].get("RUNNING", 0) == 2 and fleet.ready() == 2

        fleet.child.wait_until(healed, PATIENCE_S)
        record(run, healed_s=time.monotonic() - killed[0])
        assert victims[0] not in replicas_of(fleet.name)
        drain(fleet, run.client)
    finally:
        fleet.child.end(signal.SIGKILL)
    assert replicas_of(fleet.name) == []


def record(run: Run, healed_s: float) -> None:
    """Writes what came of a run where DEEPDRAFT_RECORD says."""
    if file := os.environ.get("DEEPDRAFT_RECORD"):
        from deepdraft.proof.bench import provenance

        figures = {
            "what": "2 replicas on Ray with --resume, one stopped and woken, one killed (-9) under "
            "conversations; make test-fleet",
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
    shutil.copy(bundled_checkpoint() / "tokenizer.json", broken)
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


def test_a_rank_is_killed_under_a_stream(tmp_path: Path) -> None:
    """Engines of two ranks each: the stream goes on in the other replica, and the one that lost
    its rank is replaced."""
    model = write_served(tmp_path / "model")
    fleet = make_fleet(
        tmp_path,
        f"""model = "{model}"

[engine]
tp = 2
schedule = "all"
[replicas]
count = 2
cpus = 0.5
selftest = false
look_s = 1.0
resume = true""",
    )
    fleet.start()
    try:
        fleet.child.wait_for("2 replicas are ready", PATIENCE_S)
        body = {"prompt": "Hello there", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=fleet.url, timeout=PATIENCE_S) as client:
            true = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                replica = process_of(fleet.name, answer.headers["x-deepdraft-replica"])
                [rank] = ranks_of(replica)
                lines = answer.iter_lines()
                said = [next(lines) for _ in range(20)]
                os.kill(rank, signal.SIGKILL)
                said += lines
        data = [line.removeprefix("data: ") for line in said if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        assert "".join(json.loads(d)["choices"][0]["text"] for d in data) == true
        fleet.child.wait_until(lambda: replica not in replicas_of(fleet.name), PATIENCE_S)
        fleet.child.wait_until(lambda: fleet.ready() == 2, PATIENCE_S)
        every = [rank for pid in replicas_of(fleet.name) for rank in ranks_of(pid)]
        assert len(every) == 2
        fleet.child.end(signal.SIGTERM)
        assert not any(map(alive, every))
    finally:
        fleet.child.end(signal.SIGKILL)
    assert replicas_of(fleet.name) == []
