"""Changes a fleet while it serves, and records how that went:

    python bench/fleet_changes.py [--only grow,in_place,shrink,upgrade,broken,drain]
        [--out bench/results/i-changes.json]

Bundled model, real Ray, real Redis, all on this machine; half of the requests are streams. The
number of replicas follows the load up and down, every replica is replaced by another version, a
version that cannot start is tried, one replica is drained. Every answer is compared with that of a
server without a cache. Needs an environment with Ray (`make test-fleet` makes one), redis-server.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.proof.bench import provenance
from deepdraft.proof.fleet_served import free_port
from deepdraft.server.service import bundled_checkpoint
from tests.fleet.asking import CHAT, Failed, Json, ask
from tests.fleet.children import Child, replicas_of
from tests.fleet.test_live import PASSWORD, REDIS, Fleet, _ready, make_fleet

PATIENCE_S = 240.0
STEPS = ("grow", "in_place", "shrink", "upgrade", "broken", "drain")
SETTINGS = """
[engine]
kv_memory = "64MiB"
max_running = 4
max_queue = {max_queue}
[fleet]
directory = "{redis}"
fetch = "always"
hand_over_s = 20
[replicas]
count = 1
min_count = 1
max_count = 2
cpus = 0.5
selftest = {selftest}
look_s = 1.0
up_s = 2.0
down_s = 10.0
busy = 0.6
[ray]
cpus = 4
"""


class Talk:
    """Conversations that never end, each turn compared with the oracle."""

    def __init__(self, fleet: Fleet, oracle: str) -> None:
        self.fleet, self.oracle = fleet, oracle
        self.client = httpx.Client(timeout=PATIENCE_S)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._chats: dict[int, list[Json]] = {}
        self._lock = threading.Lock()

    def turn(self, number: int) -> None:
        chance = random.Random(f"{number} {len(self._chats.get(number, ()))}")
        chat = self._chats.setdefault(
            number, [{"role": "system", "content": f"You are number {number}. " * 4}]
        )
        if len(chat) > 8:
            del chat[1:]
        words = " ".join(chance.choices(("river", "stone", "cloud", "seven", "salt"), k=5))
        asked: Json = {"role": "user", "content": f"Tell me about {words}."}
        body = {
            "messages": [*chat, asked],
            "temperature": 0,
            "max_tokens": 16,
            "thinking": {"type": "disabled"},
        }
        try:
            stream = {"stream": chance.random() < 0.5}
            got = ask(self.client, self.fleet.url, body | stream, f"session-{number}")
        except (httpx.HTTPError, Failed, ValueError, KeyError) as error:
            with self._lock:
                self.faults.append(f"{type(error).__name__}: {str(error)[:200]}")
            return
        right = self.client.post(f"{self.oracle}{CHAT}", json=body).json()
        true = right["choices"][0]["message"]["content"] or ""
        details = got.usage["prompt_tokens_details"]
        with self._lock:
            self.counts["turns"] += 1
            self.counts["different"] += got.text != true
            self.counts[details.get("cache_source", "computed")] += 1
            if len(chat) > 1:  # a later turn of its conversation
                self.counts["later_prompt_tokens"] += got.usage["prompt_tokens"]
                self.counts["later_cached_tokens"] += details["cached_tokens"]
        chat += [asked, {"role": "assistant", "content": true or "x"}]

    def until(self, ends: threading.Event, conversations: int, workers: int) -> None:
        """Turns of so many conversations, so many at a time, until `ends`."""

        def work(mine: list[int]) -> None:
            while not ends.is_set():
                for number in mine:
                    if not ends.is_set():
                        self.turn(number)

        with ThreadPoolExecutor(workers) as pool:
            for job in [
                pool.submit(work, list(range(w, conversations, workers))) for w in range(workers)
            ]:
                job.result()


class Changes:
    """The fleet, its Redis and oracle, and what is done to it."""

    def __init__(self, place: Path, selftest: bool) -> None:
        assert REDIS is not None, "redis-server is missing"
        self.place, self.steps = place, dict[str, Json]()
        self.selftest = str(selftest).lower()
        port = free_port()
        words = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self.redis = subprocess.Popen(
            [*words, "--requirepass", PASSWORD], cwd=place, stdout=subprocess.DEVNULL
        )
        self.redis_url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        port = free_port()
        words = ["serve", "--port", str(port), "--kv-memory", "0", "--drafts", "0"]
        self.oracle = Child([sys.executable, "-m", "deepdraft.cli.main", *words], dict(os.environ))
        url = f"http://127.0.0.1:{port}"
        self.fleet = make_fleet(place, "\n" + self.settings())
        self.talk = Talk(self.fleet, url)
        self.fleet.start()
        try:
            self.oracle.wait_until(lambda: _ready(url), PATIENCE_S)
            self.fleet.child.wait_for("replicas are ready", PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def settings(self, **more: Any) -> str:
        return SETTINGS.format(
            **{"redis": self.redis_url, "selftest": self.selftest, "max_queue": 256, **more}
        )

    def close(self) -> None:
        self.fleet.child.end(signal.SIGTERM)
        self.oracle.end(signal.SIGTERM)
        self.redis.kill()
        self.redis.wait()
        assert replicas_of(self.fleet.name) == [], "a replica is left"

    def step(self, name: str, action: Any, *, conversations: int = 12, workers: int = 4) -> None:
        """One change under load: what it took and what the clients saw."""
        ends, begin, before = threading.Event(), time.monotonic(), self.talk.counts.copy()
        faults = len(self.talk.faults)
        thread = threading.Thread(target=self.talk.until, args=(ends, conversations, workers))
        thread.start()
        try:
            more = action() or {}
        finally:
            ends.set()
            thread.join()
        seen = self.talk.counts - before
        prompt = seen.pop("later_prompt_tokens", 0)
        cached = seen.pop("later_cached_tokens", 0)
        self.steps[name] = {
            "seconds": round(time.monotonic() - begin, 1),
            "workers": workers,
            "different": 0,
            **seen,
            "later_turns_reuse": round(cached / prompt, 4) if prompt else None,
            "failed": self.talk.faults[faults:],
            **more,
        }
        print(name, json.dumps(self.steps[name]), flush=True)

    def count(self) -> int:
        return self.fleet.status()["replicas"].get("RUNNING", 0)

    def wait_count(self, wanted: int) -> None:
        self.fleet.child.wait_until(lambda: self.count() == wanted, PATIENCE_S)

    def command(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*self.fleet.words(words[0]), *words[1:]],
            env=self.fleet.environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr.strip()

    def rewrite(self, text: str, head: str = "") -> None:
        """CONFIG with other settings; name and port stay."""
        lines = self.fleet.file.read_text().splitlines()
        name = next(line for line in lines if line.startswith("name ="))
        server = lines[lines.index("[server]") :]
        self.fleet.file.write_text("\n".join([name, head, text, *server]) + "\n")

    def grow(self) -> None:
        self.step("grow", lambda: self.wait_count(2), workers=8)

    def shrink(self) -> None:
        self.step("shrink", lambda: self.wait_count(1), workers=1)
        # Every conversation goes on with what was handed over.
        self.step("after_shrink", lambda: time.sleep(10), workers=2)

    def upgrade(self) -> None:
        old = set(replicas_of(self.fleet.name))
        self.rewrite(self.settings(max_queue=200))

        def action() -> Json:
            code, said = self.command("upgrade")
            assert code == 0, said
            new = set(replicas_of(self.fleet.name))
            assert new and not new & old, (old, new)
            return {"replicas_replaced": len(old), "said": said.splitlines()}

        self.step("upgrade", action)

    def in_place(self) -> None:
        """With two replicas: one leaves before the next one starts."""
        old = set(replicas_of(self.fleet.name))
        assert len(old) == 2, "grow first"
        self.rewrite(self.settings(max_queue=201))

        def action() -> Json:
            code, said = self.command("upgrade", "--in-place")
            assert code == 0, said
            assert not set(replicas_of(self.fleet.name)) & old
            return {"replicas_replaced": 2, "said": said.splitlines()[1:]}

        # Enough at a time that two are needed all along.
        self.step("in_place", action, workers=6)

    def broken(self) -> None:
        model = self.place / "broken"
        shutil.copytree(bundled_checkpoint(), model)
        (model / "config.json").write_text('{"model_type": "nothing we know"}')
        old = set(replicas_of(self.fleet.name))
        self.rewrite(self.settings(max_queue=200), head=f'model = "{model}"')

        def action() -> Json:
            code, said = self.command("upgrade")
            assert code == 2 and "nothing we know" in said, (code, said)
            assert old <= set(replicas_of(self.fleet.name)), "an old one was lost"
            return {"exit_code": code, "said": said.splitlines()[-1][:600]}

        self.step("broken", action)
        self.rewrite(self.settings(max_queue=200))

    def drain(self) -> None:
        self.step("grow_again", lambda: self.wait_count(2), workers=8)
        answer = self.talk.client.get(f"{self.fleet.url}/v1/models")
        assert answer.status_code == 200
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        one = self.talk.client.post(f"{self.fleet.url}{CHAT}", json=body)
        label = one.headers["x-deepdraft-replica"]

        def action() -> Json:
            code, said = self.command("drain", label)
            assert code == 0, said
            return {"said": said.splitlines()}

        self.step("drain", action)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--no-selftest", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    result: Json = {
        "what": "a fleet on Ray that changes under load: bench/fleet_changes.py",
        **provenance(),
        "ray": importlib.metadata.version("ray"),
    }
    with tempfile.TemporaryDirectory(prefix="fc") as place:
        changes = Changes(Path(place), selftest=not options.no_selftest)
        try:
            for step in options.only.split(","):
                getattr(changes, step)()
        finally:
            changes.close()
    result["steps"] = changes.steps
    result["different"] = changes.talk.counts["different"]
    result["failed"] = changes.talk.faults
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        Path(options.out).write_text(text)
    print(text)
    sys.exit(bool(result["different"] or result["failed"]))


if __name__ == "__main__":
    main()
