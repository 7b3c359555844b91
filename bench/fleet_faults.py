"""Three replicas that are killed, stopped, drained and upgraded, and a Redis that is restarted,
under conversations; every answer compared with that of a server without a cache:

    python bench/fleet_faults.py --answers /tmp/answers.json --oracle       once; needs no quiet
    python bench/fleet_faults.py --answers /tmp/answers.json [--out bench/results/i-faults.json]
    python bench/fleet_faults.py ... --fronts 2 --faults kill_front,kill,kill_front     fronts, too

Bundled model, real Ray, real Redis, all on this machine. Half of the turns are streams, a fifth is
sampled with a seed. The questions and, as long as answers are right, the answers are the same in
each run, so the oracle's can be made beforehand. Needs an environment with Ray (`make test-fleet`
makes one) and redis-server.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.proof.bench import provenance
from deepdraft.proof.fleet_served import free_port
from deepdraft.proof.fleet_trace import TracePlan, fleet_trace
from tests.fleet.asking import CHAT, Failed, Json, ask
from tests.fleet.children import Child, replicas_of
from tests.fleet.test_live import PASSWORD, REDIS, Fleet, _ready, make_fleet
from tests.parallel.living import alive

PATIENCE_S = 300.0
REPLICAS = 3
FAULTS = (
    *("kill", "stop", "redis_data", "drain", "kill", "redis_empty", "stop_for_good"),
    *("kill", "drain", "redis_down", "kill", "upgrade", "stop", "redis_data", "kill"),
    *("drain", "redis_empty", "kill_busiest", "stop", "kill"),
)
AHEAD = 200
"""Turns that may be begun before the next fault has been done."""
SETTINGS = """
[engine]
kv_memory = "64MiB"
kv_spill = "{place}/spill"
kv_spill_bytes = "256MiB"
max_queue = {max_queue}
[fleet]
directory = "{redis}"
fetch = "always"
hand_over_s = 10
[replicas]
count = 3
cpus = 0.5
selftest = false
look_s = 1.0
quiet_s = 3.0
hang_s = 30.0
resume = {resume}
fronts = {fronts}
[ray]
cpus = 4
"""


@dataclass(frozen=True)
class Turn:
    """One question, and how it is asked."""

    text: str
    stream: bool
    options: Json


def conversations(number: int, turns: int) -> list[list[Turn]]:
    """So many conversations with so many turns in all, the same each time."""
    seed = 0
    while True:
        plan = TracePlan(
            conversations=number, rate=1.0, mean_turns=turns / number, document_chars=200,
            pause_s=0.0, seed=seed,
        )  # fmt: skip
        trace = [list(c.turns) for c in fleet_trace(plan)]
        over = sum(map(len, trace)) - turns
        if 0 <= over <= turns // 10:
            break
        seed += 1
    chance = random.Random(f"faults {seed}")
    for chat in trace:
        while over and len(chat) > 2:
            chat.pop()
            over -= 1
    made = []
    for chat in trace:
        made.append([])
        for turn in chat:
            stream = chance.random() < 0.5
            options: Json = {"temperature": 0, "max_tokens": 24 if stream else 8}
            if chance.random() < 0.2:
                options |= {"temperature": 1.0, "seed": chance.randrange(1 << 30)}
            made[-1].append(Turn(turn.text, stream, options))
    return made


def body_of(messages: list[Json], turn: Turn) -> Json:
    """The request of a turn."""
    asked = [*messages, {"role": "user", "content": turn.text}]
    return {"messages": asked, "thinking": {"type": "disabled"}, **turn.options}


def content(answer: Json) -> str:
    """What an answer says; an empty one cannot be a message of the next turn."""
    return answer["choices"][0]["message"]["content"] or ""


def ask_oracle(chats: list[list[Turn]], file: Path) -> None:
    """All right answers, from one server without a cache and without drafts."""
    port = free_port()
    words = ["serve", "--port", str(port), "--kv-memory", "0", "--drafts", "0"]
    child = Child([sys.executable, "-m", "deepdraft.cli.main", *words], dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    child.wait_until(lambda: _ready(url), PATIENCE_S)
    client = httpx.Client(timeout=PATIENCE_S)

    def answers(chat: list[Turn]) -> list[str]:
        messages: list[Json] = []
        for turn in chat:
            answer = client.post(f"{url}{CHAT}", json=body_of(messages, turn))
            answer.raise_for_status()
            text = content(answer.json())
            messages.append({"role": "user", "content": turn.text})
            messages.append({"role": "assistant", "content": text or "x"})
        return [m["content"] for m in messages[1::2]]

    # A run that was ended goes on where it was.
    turns = [[t.text for t in c] for c in chats]
    known = json.loads(file.read_text()) if file.exists() else {}
    right = known["right"] if known.get("turns") == turns else []
    with ThreadPoolExecutor(8) as pool:
        for answered in pool.map(answers, chats[len(right) :]):
            right.append(answered)
            file.write_text(json.dumps({"turns": turns, "right": right}))
    child.end(signal.SIGTERM)


@dataclass
class Clients:
    """Who talks, and what came of it."""

    url: str
    chats: list[list[Turn]]
    right: list[list[str]]
    thresholds: list[int]
    faults_done: int = 0
    begun: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    by_replica: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[Json] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """The longest silence within each stream."""

    def __post_init__(self) -> None:
        self.lock = threading.Condition()
        self.start = time.monotonic()
        self.client = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=64))

    def at(self) -> float:
        return round(time.monotonic() - self.start, 1)

    def run(self, workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            for job in [pool.submit(self.conversation, n) for n in range(len(self.chats))]:
                job.result()

    def _wait_turn(self) -> None:
        """So that faults are spread over the turns however long they take."""
        with self.lock:

            def may() -> bool:
                done = self.faults_done
                return done >= len(self.thresholds) or self.begun < self.thresholds[done] + AHEAD

            self.lock.wait_for(may, timeout=PATIENCE_S)
            self.begun += 1
            self.lock.notify_all()

    def conversation(self, number: int) -> None:
        messages: list[Json] = []
        for place, (turn, true) in enumerate(
            zip(self.chats[number], self.right[number], strict=True)
        ):
            self._wait_turn()
            text, usage = self.ask(body_of(messages, turn), turn, f"session-{number}")
            details = usage["prompt_tokens_details"]
            with self.lock:
                self.counts["turns"] += 1
                self.counts["different"] += (text or "x") != true
                self.counts[details.get("cache_source", "computed")] += 1
                if place:
                    self.counts["later_prompt_tokens"] += usage["prompt_tokens"]
                    self.counts["later_cached_tokens"] += details["cached_tokens"]
            messages.append({"role": "user", "content": turn.text})
            messages.append({"role": "assistant", "content": true})
        with self.lock:
            self.counts["conversations"] += 1

    def ask(self, body: Json, turn: Turn, session: str) -> tuple[str, Json]:
        """The answer; a client that gets none asks again."""
        for _ in range(20):
            begin = time.monotonic()
            try:
                got = ask(self.client, self.url, body | {"stream": turn.stream}, session)
                with self.lock:
                    self.latencies.append(time.monotonic() - begin)
                    self.by_replica[got.replica] += 1
                    if turn.stream:
                        self.gaps.append(got.gap_s)
                return got.text, got.usage
            except (httpx.HTTPError, Failed) as error:
                with self.lock:
                    self.failed.append({
                        "at": self.at(),
                        "after_s": round(time.monotonic() - begin, 1),
                        "stream": turn.stream,
                        "what": f"{type(error).__name__}: {error}"[:300],
                    })  # fmt: skip
                time.sleep(0.5)
        raise AssertionError(f"{session} was not answered in 20 tries")


class Redis:
    """The directory of conversations, which is restarted."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        assert REDIS is not None, "redis-server is missing"
        words = [REDIS, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.place)]
        self.process = subprocess.Popen(
            [*words, "--save", "3600 1000000", "--requirepass", PASSWORD],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                return
            except OSError:
                assert time.monotonic() < until, "Redis does not come back"
                time.sleep(0.05)

    def stop(self, keep: bool) -> None:
        if keep:
            import redis

            with redis.Redis.from_url(self.url) as client:
                client.save()
        self.process.kill()
        self.process.wait()
        if not keep:
            (self.place / "dump.rdb").unlink(missing_ok=True)


class Harm:
    """The fleet and what is done to it."""

    def __init__(self, place: Path, resume: bool, fronts: int) -> None:
        self.place, self.fronts, self.resume = place, fronts, str(resume).lower()
        self.redis = Redis(place)
        self.fleet: Fleet = make_fleet(place, "\n" + self.settings())
        self.log: list[Json] = []
        self.missing = 0
        """Faults still to be done."""
        self.chance = random.Random(7)
        self.queue = 256

    def settings(self, queue: int = 256) -> str:
        return SETTINGS.format(
            redis=self.redis.url,
            place=self.place,
            resume=self.resume,
            fronts=self.fronts,
            max_queue=queue,
        )

    def healed(self) -> bool:
        try:
            health = httpx.get(f"{self.fleet.url}/healthz", timeout=60).json()
        except (httpx.HTTPError, ValueError):
            return False
        there = [len(replicas_of(self.fleet.name, kind)) for kind in ("Replica", "Front")]
        return health["replicas"] == {"ready": REPLICAS} and there == [REPLICAS, self.fronts]

    def wait_healed(self) -> None:
        self.fleet.child.wait_until(self.healed, PATIENCE_S)

    def command(self, *words: str) -> None:
        done = subprocess.run(
            [*self.fleet.words(words[0]), *words[1:]],
            env=self.fleet.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def any(self) -> int:
        return self.chance.choice(replicas_of(self.fleet.name))

    def kill(self) -> None:
        os.kill(self.any(), signal.SIGKILL)

    def kill_front(self) -> None:
        """With what it was answering; its place is taken by another."""
        pid = self.chance.choice(replicas_of(self.fleet.name, "Front"))
        os.kill(pid, signal.SIGKILL)
        self.fleet.child.wait_until(lambda: not alive(pid), PATIENCE_S)

    def kill_busiest(self) -> None:
        def ticks(pid: int) -> int:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        pids = replicas_of(self.fleet.name)
        before = {pid: ticks(pid) for pid in pids}
        time.sleep(1.0)
        os.kill(max(pids, key=lambda pid: ticks(pid) - before[pid]), signal.SIGKILL)

    def stop(self) -> None:
        """And wakes it, after its requests have gone elsewhere: then it goes on with them."""
        pid = self.any()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(7.0)
        os.kill(pid, signal.SIGCONT)

    def stop_for_good(self) -> None:
        """Until Ray finds out and replaces it."""
        pid = self.any()
        os.kill(pid, signal.SIGSTOP)
        self.fleet.child.wait_until(lambda: not alive(pid), PATIENCE_S)

    def drain(self) -> None:
        health = httpx.get(f"{self.fleet.url}/healthz", timeout=60).json()
        self.command("drain", self.chance.choice(sorted(health["labels"])))

    def upgrade(self) -> None:
        old = set(replicas_of(self.fleet.name))
        self.queue += 1
        text = self.fleet.file.read_text()
        self.fleet.file.write_text(re.sub(r"max_queue = \d+", f"max_queue = {self.queue}", text))
        self.command("upgrade")
        assert not old & set(replicas_of(self.fleet.name)), "an old one is left"

    def redis_data(self) -> None:
        self.redis.stop(keep=True)
        self.redis.start()

    def redis_empty(self) -> None:
        self.redis.stop(keep=False)
        self.redis.start()

    def redis_down(self) -> None:
        self.redis.stop(keep=True)
        time.sleep(8.0)
        self.redis.start()

    def do(self, kind: str, clients: Clients) -> None:
        """One fault, until the fleet is whole again."""
        failed, begin, turns = len(clients.failed), clients.at(), clients.counts["turns"]
        getattr(self, kind)()
        done = clients.at()
        self.wait_healed()
        self.log.append({
            "kind": kind,
            "at": begin,
            "took_s": round(done - begin, 1),
            "whole_again_s": round(clients.at() - begin, 1),
            "turns_meanwhile": clients.counts["turns"] - turns,
            "failed_meanwhile": len(clients.failed) - failed,
        })  # fmt: skip
        self.missing -= 1
        print(json.dumps(self.log[-1]), flush=True)

    def close(self) -> None:
        self.fleet.child.end(signal.SIGTERM)
        self.redis.process.kill()
        self.redis.process.wait()


def spread(values: list[float]) -> Json:
    """Median, high percentiles and the largest, in seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {n: round(ordered[int(p * (len(ordered) - 1))], 3) for n, p in at.items()}
    return {**found, "max": round(ordered[-1], 3)}


def still_running(fleet: Fleet) -> int:
    """Requests that engines still have half a minute after the last answer: nobody's."""
    until = time.monotonic() + 30
    while True:
        engines = fleet.status()["engines"]
        left = sum(own["running"] + own["waiting"] for own in engines)
        if not left or time.monotonic() > until:
            return left
        time.sleep(1.0)


def routed(url: str) -> Json:
    """What the front says that it did with requests."""
    return httpx.get(f"{url}/healthz", timeout=60).json().get("routed", {})


def harm_all(harm: Harm, clients: Clients, faults: list[str], errors: list[str]) -> None:
    """Faults, one after the other, spread over the turns."""
    try:
        for number, kind in enumerate(faults):
            with clients.lock:
                clients.lock.wait_for(
                    lambda number=number: clients.begun >= clients.thresholds[number]
                )
            harm.do(kind, clients)
            with clients.lock:
                clients.faults_done = number + 1
                clients.lock.notify_all()
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}"[:2000])
        with clients.lock:
            clients.faults_done = len(clients.thresholds)
            clients.lock.notify_all()


def record(options: Any, harm: Harm, clients: Clients, errors: list[str]) -> Json:
    """What is to be kept of a run."""
    prompt = clients.counts.pop("later_prompt_tokens")
    cached = clients.counts.pop("later_cached_tokens")
    return {
        "what": "3 replicas of the bundled model on Ray, faults under conversations: "
        "bench/fleet_faults.py",
        **provenance(),
        "ray": importlib.metadata.version("ray"),
        "resume": not options.no_resume,
        "fronts": options.fronts,
        "workers": options.workers,
        **clients.counts,
        "lost_conversations": options.conversations - clients.counts["conversations"],
        "failed_requests": len(clients.failed),
        "failed": clients.failed,
        "faults": harm.log,
        "faults_of_each_kind": collections.Counter(fault["kind"] for fault in harm.log),
        "faults_not_done": harm.missing,
        "errors": errors,
        "later_turns_reuse": round(cached / prompt, 4),
        "answer_s": spread(clients.latencies),
        "longest_silence_in_a_stream_s": spread(clients.gaps),
        "left_behind": replicas_of(harm.fleet.name) if not options.keep else None,
    }


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--oracle", action="store_true", help="make the answers, and end")
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--no-resume", action="store_true")
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the fleet's logs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """See the module."""
    options = arguments()
    chats = conversations(options.conversations, options.turns)
    if options.oracle:
        ask_oracle(chats, options.answers)
        return
    known = json.loads(options.answers.read_text())
    assert known["turns"] == [[t.text for t in c] for c in chats], "answers of another trace"
    assert len(known["right"]) == len(chats), "answers are missing: --oracle goes on with them"
    faults = [f for f in options.faults.split(",") if f]
    first, last = 0.03, 0.93
    span = (last - first) / max(1, len(faults) - 1)
    thresholds = [int(options.turns * (first + span * i)) for i in range(len(faults))]
    place = Path(tempfile.mkdtemp(prefix="ff"))
    harm = Harm(place, not options.no_resume, options.fronts)
    harm.missing = len(faults)
    errors: list[str] = []
    begin = time.monotonic()
    try:
        harm.fleet.start()
        harm.fleet.child.wait_for("3 replicas are ready", PATIENCE_S)
        clients = Clients(harm.fleet.url, chats, known["right"], thresholds)
        started_s = time.monotonic() - begin
        thread = threading.Thread(target=harm_all, args=(harm, clients, faults, errors))
        thread.start()
        clients.run(options.workers)
        took_s = clients.at()
        thread.join()
        harm.wait_healed()
        counters, left = routed(harm.fleet.url), still_running(harm.fleet)
    finally:
        if not options.keep:
            harm.close()
    result = record(options, harm, clients, errors) | {
        "routed_since_the_upgrade": counters,
        "requests_left_on_engines": left,
        "seconds": took_s,
        "start_s": round(started_s, 1),
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)
    unexpected = clients.failed and "kill_front" not in faults
    sys.exit(bool(clients.counts["different"] or unexpected or errors or harm.missing or left))


if __name__ == "__main__":
    main()
