"""Conversations that bounce between server processes while things break.

Owns: the processes, their network, the faults, the comparison of every answer with a cold run.
The bench script and a short test use it; see docs/kv-sharing.md.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deepdraft.kv.fleet_files import init_fleet
from tests.kv.lineage import Lineage
from tests.kv.served import Peer, tiny_model, told, toy_tokenizer

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
PASSWORD = "fleet-run"
PATIENCE_S = 1200.0
"""The harness's own, so generous that a busy or paused machine does not end a run."""
Json = dict[str, Any]


def can_make_networks() -> bool:
    """Root, and a kernel with network namespaces and veth."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ddprobe{os.getpid() % 1000}"
    made = _ip("link", "add", name, "type", "veth", "peer", "name", f"{name}p", check=False)
    if made:
        _ip("link", "del", name)
    return made


def _ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.returncode == 0


class Network:
    """Each server in a namespace with two links: one to its peers and Redis, one to its clients.
    Without namespaces everything is on loopback and nothing can be partitioned."""

    def __init__(self, count: int, *, namespaces: bool) -> None:
        self.count, self.namespaces = count, namespaces
        self.tag = f"dd{os.getpid() % 10000}"
        # Of this run alone: what a killed one left behind would take the answers otherwise.
        part = os.getpid() % 250
        self.peers, self.clients = f"10.77.{part}", f"10.78.{part}"
        if not namespaces:
            return
        self.bridge = f"{self.tag}br"
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.peers}.254/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for i in range(count):
            space = self.space(i)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            for kind, address, gate in (
                ("p", f"{self.peers}.{i + 1}/24", None),
                ("c", f"{self.clients}.{4 * i + 2}/30", f"{self.clients}.{4 * i + 1}/30"),
            ):
                here, there = f"{self.tag}{kind}{i}", f"{kind}0"
                _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
                _ip("-n", space, "addr", "add", address, "dev", there)
                _ip("-n", space, "link", "set", there, "up")
                if gate is None:
                    _ip("link", "set", here, "master", self.bridge)
                else:
                    _ip("addr", "add", gate, "dev", here)
                _ip("link", "set", here, "up")

    def space(self, i: int) -> str:
        return f"{self.tag}n{i}"

    def prefix(self, i: int) -> list[str]:
        """What starts a command as server i."""
        return ["ip", "netns", "exec", self.space(i)] if self.namespaces else []

    def peer_host(self, i: int) -> str:
        return f"{self.peers}.{i + 1}" if self.namespaces else "127.0.0.1"

    def client_host(self, i: int) -> str:
        return f"{self.clients}.{4 * i + 2}" if self.namespaces else "127.0.0.1"

    @property
    def redis_host(self) -> str:
        return f"{self.peers}.254" if self.namespaces else "127.0.0.1"

    def part(self, i: int, *, up: bool) -> None:
        """Takes server i's link to its peers and Redis down, or brings it up."""
        if self.namespaces:
            _ip("link", "set", f"{self.tag}p{i}", "up" if up else "down")

    def close(self) -> None:
        if not self.namespaces:
            return
        for i in range(self.count):
            _ip("netns", "del", self.space(i), check=False)
            for kind in "pc":
                _ip("link", "del", f"{self.tag}{kind}{i}", check=False)
        _ip("link", "del", self.bridge, check=False)


class Redis:
    """The directory's server."""

    def __init__(self, directory: Path, host: str, port: int) -> None:
        self.directory, self.host, self.port = directory, host, port
        directory.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@{self.host}:{self.port}/0"

    def start(self) -> None:
        assert REDIS is not None
        self.process = subprocess.Popen(
            [
                *(REDIS, "--port", str(self.port), "--bind", self.host, "--save", ""),
                *("--requirepass", PASSWORD, "--dir", str(self.directory)),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._wait()

    def _wait(self) -> None:
        import redis

        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.exceptions.RedisError:
                assert time.monotonic() < until, "redis-server does not start"
                time.sleep(0.02)

    def save(self) -> None:
        """A copy on disk that the next start reads."""
        import redis

        with redis.Redis.from_url(self.url) as client:
            client.save()

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def restart(self, *, keep: bool) -> None:
        """With the data of the last `save`, or with none."""
        self.stop()
        if not keep:
            (self.directory / "dump.rdb").unlink(missing_ok=True)
        self.start()


@dataclass
class Node:
    """One server process and its files."""

    number: int
    directory: Path
    command: list[str]
    url: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: int = 0
    away: bool = False
    reports: list[Json] = field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        ready = self.directory / f"ready{self.starts}"
        report = self.directory / f"report{self.starts}.json"
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            [*self.command, str(ready), str(report)], stdout=log, stderr=log
        )
        log.close()
        until = time.monotonic() + PATIENCE_S
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < until, self.tail()
            time.sleep(0.02)
        with httpx.Client() as client:
            while True:
                try:
                    if client.get(f"{self.url}/readyz", timeout=60).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                assert self.process.poll() is None and time.monotonic() < until, self.tail()
                time.sleep(0.02)

    def tail(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Asks it to end, and reads its report."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        report = self.directory / f"report{self.starts}.json"
        self.reports.append(json.loads(report.read_text()))


class FleetRun:
    """Servers, their directory, and a balancer that knows which servers are away."""

    def __init__(
        self,
        directory: Path,
        *,
        servers: int,
        numerics: str = "exact",
        prefill: str = "full",
        reuse: str = "exact",
        namespaces: bool = False,
        first_port: int = 18000,
        hurry: float = 20.0,
        nixl: str | None = None,
    ) -> None:
        """`nixl`: the interpreter of the servers' sidecars, with UCX over tcp."""
        self.random, self.reuse = random.Random(7), reuse
        self.tokenizer = toy_tokenizer(directory / "tokenizer")
        self.network = Network(servers, namespaces=namespaces)
        self.redis = Redis(directory / "redis", self.network.redis_host, first_port)
        self.redis.start()
        self.counts: Counter[str] = Counter()
        names = [f"node{i}" for i in range(servers)]
        hosts = [self.network.peer_host(i) for i in range(servers)]
        places = init_fleet(directory / "fleet", names, sorted(set(hosts)))
        self.nodes = []
        for i, name in enumerate(names):
            place = directory / name
            place.mkdir()
            port = first_port + 10 + i
            settings = place / "config.toml"
            settings.write_text(
                f"""
[engine]
numerics = "{numerics}"
prefill = "{prefill}"
prefill_chunk = 64
kv_memory = "48MiB"
[server]
host = "{self.network.client_host(i)}"
port = {port}
log_level = "warning"
drain_s = 5.0
[fleet]
directory = "{self.redis.url}"
name = "{name}"
listen = "{hosts[i]}:{port + 100}"
files = "{places[i]}"
fetch = "always"
hurry = {hurry}
{f'nixl = "{nixl}"' if nixl else ""}
"""
            )
            command = [
                *self.network.prefix(i),
                *(["env", "UCX_TLS=tcp", "UCX_MODULES=^ib"] if nixl else []),
                *(sys.executable, "-m", "tests.kv.node"),
                *(str(settings), str(directory / "tokenizer"), reuse),
            ]
            url = f"http://{self.network.client_host(i)}:{port}"
            self.nodes.append(Node(i, place, command, url))
        for node in self.nodes:
            node.start()
        model = tiny_model(self.tokenizer, numerics)
        exact = reuse == "exact"
        self.oracle = Peer(
            self.tokenizer,
            model,
            numerics=numerics,
            prefill=prefill,
            kv_memory=0 if exact else 512 << 20,
            drafts=0,
        )
        self.lineage = None if exact else Lineage(self.oracle, reuse)
        self.client = httpx.Client(
            timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
        )

    # ---- requests ---------------------------------------------------------------------------

    def _take(self) -> Node:
        while True:
            node = self.random.choice(self.nodes)
            with node.lock:
                if not node.away:
                    node.busy += 1
                    return node
            time.sleep(0.01)

    def turn(self, conversation: Json) -> None:
        """One turn on any server, compared with the oracle of its provenance."""
        if sum(len(m["content"]) for m in conversation["messages"]) > 220:
            conversation["messages"] = conversation["messages"][:1]
        content = conversation["random"].choice("abcdefgh") * 9
        if self.lineage is not None:
            conversation["turns"] = conversation.get("turns", 0) + 1
            # No text comes twice; and it is shorter than a window, as the decoder is replayed over
            # one where more is new, which would hide how the state came to be.
            content = content[0] + str(conversation["turns"])
        conversation["messages"].append({"role": "user", "content": content})
        body = {
            "messages": conversation["messages"],
            "temperature": 0,
            "max_tokens": 6 if self.lineage is None else 3,
            "thinking": {"type": "disabled"},
        }
        headers = {"X-Session-ID": conversation["id"]}
        node = self._take()
        try:
            answer = self.client.post(f"{node.url}/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            self.counts["client_errors"] += 1
            self.counts[type(error).__name__] += 1
            return
        finally:
            with node.lock:
                node.busy -= 1
        self.counts["turns"] += 1
        if answer.status_code != 200:
            self.counts["client_errors"] += 1
            return
        usage = answer.json()["usage"]
        details = usage["prompt_tokens_details"]
        self.counts["prompt_tokens"] += usage["prompt_tokens"]
        self.counts["cached_tokens"] += details["cached_tokens"]
        self.counts[f"from_{details.get('cache_source', 'nothing')}"] += 1
        self.counts[f"provenance_{details.get('cache_provenance', 'none').split()[0]}"] += 1
        path = "/v1/chat/completions"
        if self.lineage is None:
            right = self.oracle.post(path, body)
        else:
            provenance = details.get("cache_provenance", "none")
            right = self.lineage.post(path, body, provenance, details["cached_tokens"])
        self.counts["different"] += told(answer)[0] != told(right)[0]
        content = answer.json()["choices"][0]["message"]["content"] or "x"
        conversation["messages"].append({"role": "assistant", "content": content})

    # ---- faults -----------------------------------------------------------------------------

    def _away(self) -> Node | None:
        """A server without requests, which gets none until `_back`; one stays always."""
        there = [n for n in self.nodes if not n.away]
        if len(there) < 2:
            return None
        node = self.random.choice(there)
        with node.lock:
            node.away = True
        while node.busy:
            time.sleep(0.005)
        return node

    def fault(self, kind: str) -> None:
        """One fault, from its beginning to its end."""
        self.counts[f"fault_{kind}"] += 1
        if kind.startswith("redis"):
            self._redis_fault(kind)
            return
        if kind == "partition":
            node = self.random.choice(self.nodes)
            self.network.part(node.number, up=False)
            time.sleep(1.0)
            self.network.part(node.number, up=True)
            return
        node = self._away()
        if node is None:
            return
        assert node.process is not None
        if kind == "kill":
            node.kill()
            node.start()
        elif kind == "stall":
            os.kill(node.process.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(node.process.pid, signal.SIGCONT)
        elif kind == "leave":
            node.stop()
            node.start()
        elif kind == "leave_killed":
            node.process.send_signal(signal.SIGTERM)
            time.sleep(self.random.uniform(0.0, 0.15))
            node.kill()
            node.start()
        node.away = False

    def _redis_fault(self, kind: str) -> None:
        assert self.redis.process is not None
        if kind == "redis_stall":
            self.redis.process.send_signal(signal.SIGSTOP)
            time.sleep(0.6)
            self.redis.process.send_signal(signal.SIGCONT)
        elif kind == "redis_lost":
            self.redis.restart(keep=False)
        elif kind == "redis_old":
            self.redis.save()
            time.sleep(0.5)
            self.redis.restart(keep=True)

    # ---- the run ----------------------------------------------------------------------------

    def run(
        self,
        *,
        turns: int,
        conversations: int,
        every: int,
        faults: list[str],
        seconds: float | None = None,
        most_s: float = float("inf"),
    ) -> Json:
        """`turns` turns of `conversations` conversations, again and again for `seconds`; a fault
        after each `every` turns. After `most_s` no further turn begins."""
        begin = time.monotonic()

        def first(i: int) -> str:
            """Where states depend on their past, conversations have no text in common; for
            replays they begin with the same, which is what is replayed then."""
            if self.reuse == "whole":
                return f"{i}: you are a server. " * 5
            same = f"You are number {i % 5}. " * 5
            return same if self.reuse == "exact" else f"{same}Or {i}?"

        chats = [
            {
                "id": f"session-{i}",
                "random": random.Random(i),
                "messages": [{"role": "system", "content": first(i)}],
            }
            for i in range(conversations)
        ]
        stop = threading.Event()
        breaker = threading.Thread(target=self._break, args=(stop, every, faults))
        breaker.start()
        workers = ThreadPoolExecutor(3)
        locks = [threading.Lock() for _ in chats]

        def one(i: int) -> None:
            with locks[i]:
                if time.monotonic() - begin < most_s:
                    self.turn(chats[i])

        try:
            while True:
                order = [self.random.randrange(conversations) for _ in range(turns)]
                for done in [workers.submit(one, i) for i in order]:
                    done.result()
                if seconds is None or time.monotonic() - begin > seconds:
                    break
        finally:
            stop.set()
            breaker.join()
            workers.shutdown()
        for node in self.nodes:
            node.stop()
        return self._summary(time.monotonic() - begin)

    def _break(self, stop: threading.Event, every: int, faults: list[str]) -> None:
        seen = 0
        while not stop.is_set() and faults:
            if self.counts["turns"] >= seen + every:
                seen = self.counts["turns"]
                self.fault(faults[(seen // every - 1) % len(faults)])
            stop.wait(0.01)

    def _summary(self, seconds: float) -> Json:
        totals: Counter[str] = Counter()
        for node in self.nodes:
            for report in node.reports:
                for name in ("reserved", "quarantined", "pins", "leaked_slots", "leaked_bytes"):
                    totals[name] += report[name]
                for name, value in report["stats"].items():
                    if name.startswith(
                        (
                            "kv_fetch_",
                            "kv_claim_",
                            "kv_lookup_",
                            "kv_sidecar_",
                            "kv_hand",
                            "kv_taken",
                        )
                    ):
                        totals[name] += value
        seen = self.lineage.counts if self.lineage is not None else Counter[str]()
        return {
            "seconds": round(seconds, 1),
            "namespaces": self.network.namespaces,
            "client_errors": 0,
            **dict(sorted({**self.counts, **seen}.items())),
            "servers": dict(sorted(totals.items())),
        }

    def close(self) -> None:
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.kill()
        self.redis.stop()
        self.network.close()
        self.oracle.close()
        self.client.close()
