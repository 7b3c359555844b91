"""Loses a node of a Ray cluster under load, and records how the fleet on it heals:

    python bench/fleet_nodes.py [--out bench/results/i-nodes.json]

Two nodes of one cluster, both on this machine (a head and a further raylet), and a fleet of two
replicas on them through `ray.address`. Under load the further raylet is killed with all that it
started. Every answer is compared with that of a server without a cache.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.fleet_changes import PATIENCE_S, Json, Talk
from deepdraft.proof.bench import provenance
from deepdraft.proof.fleet_served import free_port
from tests.fleet.children import Child, replicas_of
from tests.fleet.test_live import PASSWORD, REDIS, _ready, make_fleet

SETTINGS = """

[engine]
kv_memory = "64MiB"
[fleet]
directory = "{redis}"
fetch = "always"
[replicas]
count = 2
cpus = 1
selftest = false
look_s = 1.0
[ray]
address = "{address}"
"""


def wait(holds: Any, most_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.2)


def tree_of(pid: int) -> list[int]:
    """A process and all that it started."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            todo += [int(child) for child in task.read_text().split()]
    return found


class Nodes:
    """A cluster of two nodes, the fleet on it, its Redis and oracle."""

    def __init__(self, place: Path) -> None:
        assert REDIS is not None, "redis-server is missing"
        utils: Any = importlib.import_module("ray.cluster_utils")
        kept = {"num_cpus": 2, "object_store_memory": 100 << 20}
        head = {**kept, "include_dashboard": False}
        self.cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        self.node = self.cluster.add_node(**kept)
        redis_port, port = free_port(), free_port()
        words = [REDIS, "--port", str(redis_port), "--bind", "127.0.0.1", "--save", ""]
        self.redis = subprocess.Popen(
            [*words, "--requirepass", PASSWORD], cwd=place, stdout=subprocess.DEVNULL
        )
        words = ["serve", "--port", str(port), "--kv-memory", "0", "--drafts", "0"]
        self.oracle = Child([sys.executable, "-m", "deepdraft.cli.main", *words], dict(os.environ))
        self.oracle_url = f"http://127.0.0.1:{port}"
        url = f"redis://:{PASSWORD}@127.0.0.1:{redis_port}/0"
        self.fleet = make_fleet(place, SETTINGS.format(redis=url, address=self.cluster.address))

    def command(self, name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.fleet.words(name), env=self.fleet.environment, capture_output=True, text=True
        )

    def tree(self) -> list[int]:
        return tree_of(self.node.all_processes["raylet"][0].process.pid)

    def close(self) -> None:
        self.cluster.shutdown()
        self.oracle.end(signal.SIGTERM)
        self.redis.kill()
        self.redis.wait()


def lose_a_node(nodes: Nodes) -> Json:
    """The figures of one loss."""
    fleet, begin = nodes.fleet, time.monotonic()
    up = nodes.command("up")
    assert up.returncode == 0, up.stderr[-3000:]
    result: Json = {"up_s": round(time.monotonic() - begin, 1)}
    nodes.oracle.wait_until(lambda: _ready(nodes.oracle_url), PATIENCE_S)
    before = set(replicas_of(fleet.name))
    assert len(before) == 2 and len(before & set(nodes.tree())) == 1, "not one on each node"
    talk, ends = Talk(fleet, nodes.oracle_url), threading.Event()
    thread = threading.Thread(target=talk.until, args=(ends, 8, 3))
    thread.start()
    try:
        wait(lambda: talk.counts["turns"] >= 20)
        # At once and whole, as a machine that loses its power.
        for pid in nodes.tree():
            os.kill(pid, signal.SIGKILL)
        lost, turns = time.monotonic(), talk.counts["turns"]

        def healed() -> bool:
            new = set(replicas_of(fleet.name)) - before
            return bool(new) and fleet.status()["replicas"].get("RUNNING", 0) == 2

        wait(healed)
        result["lost_to_all_ready_s"] = round(time.monotonic() - lost, 1)
        result["turns_meanwhile"] = talk.counts["turns"] - turns
        time.sleep(5)
    finally:
        ends.set()
        thread.join()
    drain = nodes.command("drain")
    assert drain.returncode == 0, drain.stderr[-2000:]
    assert replicas_of(fleet.name) == []
    return result | {"different": 0, **talk.counts, "failed": talk.faults}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    result: Json = {
        "what": "a node is lost: bench/fleet_nodes.py",
        **provenance(),
        "ray": importlib.metadata.version("ray"),
    }
    with tempfile.TemporaryDirectory(prefix="fn") as place:
        nodes = Nodes(Path(place))
        try:
            result |= lose_a_node(nodes)
        finally:
            nodes.close()
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        Path(options.out).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
