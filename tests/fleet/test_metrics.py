"""Metrics of a fleet: sums that never fall, replicas by label, the text read again."""

import asyncio
import http.server
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from deepdraft.proof.fleet_served import samples
from deepdraft.server import fleet_metrics
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_metrics import (
    FleetMetrics,
    ask_replicas,
    labelled,
    read_replicas,
    replica_line,
)
from deepdraft.server.fleet_wire import Identity, Load
from deepdraft.server.metrics import metrics_text
from tests.fleet.test_front import world_of


def seat(label: str, incarnation: str | None = None, **stats: int) -> Seat:
    identity = Identity(
        label=label, incarnation=incarnation or label, version="1.2", code="c", fingerprint="fp",
        tokenizer="t", names=("m",), family="v4.1", vocab_size=10, max_tokens=10, eos_token_id=1,
        bos_token_id=None, more_end_ids=(), created=0, defaults={}, drafts=0, rule="coupled",
    )  # fmt: skip
    made = Seat(identity, lambda message: None)
    made.stats = dict(stats)
    return made


def values(text: str) -> dict[str, float]:
    """Samples with their labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            assert name not in found, name
            found[name] = float(number)
    return found


def test_counters_never_fall_and_gauges_go_with_their_engine() -> None:
    metrics = FleetMetrics()
    a, b = seat("a", requests=5, running=2, kv_entries=3), seat("b", requests=7, running=1)
    assert metrics.sums([a, b]) == {"requests": 12, "running": 3, "kv_entries": 3}
    a.stats["requests"] = 6
    assert metrics.sums([a, b])["requests"] == 13
    assert metrics.sums([b]) == {"requests": 13, "running": 1}
    # Its replacement counts from nothing; a new connection to b has told nothing yet.
    again = seat("b")
    assert metrics.sums([seat("a", "a2", requests=1, running=4), again])["requests"] == 14
    again.stats = {"requests": 8, "running": 0}
    assert metrics.sums([again]) == {"requests": 15, "running": 0}
    assert metrics.sums([]) == {"requests": 15}


def test_slots_of_different_sizes_are_summed_as_bytes() -> None:
    metrics = FleetMetrics()
    a = seat("a", kv_slots_free=3, kv_slots_used=1, kv_slot_bytes=10)
    b = seat("b", kv_slots_free=1, kv_slots_used=0, kv_slot_bytes=100)
    found = values(metrics_text(metrics.sums([a, b])))
    assert found['deepdraft_kv_slab_bytes{state="free"}'] == 130
    assert found['deepdraft_kv_slab_bytes{state="used"}'] == 10
    longest = [seat(label, kv_lease_most_milliseconds=ms) for label, ms in (("a", 5), ("b", 9))]
    assert metrics.sums(longest)["kv_lease_most_milliseconds"] == 9


def fleet() -> tuple[FleetMetrics, list[Seat]]:
    stats: dict[str, Any] = {
        "requests": 5, "running": 1, "waiting": 2, "prompt_tokens": 100, "generated_tokens": 50,
        "http_200": 9, "finished_stop": 4, "kv_tokens_reused": 75, "kv_tokens_computed": 25,
        "kv_slots_free": 2, "kv_slots_used": 6, "kv_slots_condemned": 0, "kv_slots_quarantined": 0,
        "kv_slot_bytes": 1 << 20, "kv_entries": 4,
    }  # fmt: skip
    one, two = seat("host-1", **stats), seat("host-2", **stats)
    two.stats["requests"] = 7
    two.state, two.load = "quiet", Load(to_read=33, free=3)
    return FleetMetrics(), [two, one]


def test_the_exposition() -> None:
    metrics, seats = fleet()
    own = {"fleet_placed": 12, "http_200": 3, "tasks": 8}
    text = metrics.text(seats, own, "front-1", {})
    found = values(text)
    assert found["deepdraft_requests_total"] == 12
    assert found['deepdraft_replica_requests_total{replica="host-2"}'] == 7
    assert found['deepdraft_fleet_events_total{what="placed",front="front-1"}'] == 12
    # Answers are the front's alone; an engine has none, whatever it says.
    assert found['deepdraft_http_responses_total{status="200",front="front-1"}'] == 3
    assert sum("http_responses" in name for name in found) == 1
    assert found['deepdraft_replica_requests_finished_total{reason="stop",replica="host-1"}'] == 4
    assert found['deepdraft_replica_state{replica="host-2",state="quiet",version="1.2"}'] == 1
    assert found['deepdraft_replica_to_read_tokens{replica="host-2"}'] == 33
    # Each family has one head, before its samples, and all of them together.
    kinds = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert max(Counter(kinds).values()) == 1
    order = [re.split(r"[{ ]", line)[0] for line in text.splitlines() if line[0] != "#"]
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert len(runs) == len(set(runs)) and set(runs) == set(kinds)
    # What counts a fleet's sums takes each once.
    assert samples(text)["deepdraft_requests_total"] == 12


def test_status_reads_what_fronts_write() -> None:
    metrics, seats = fleet()
    [one, two] = read_replicas(metrics.text(seats, {}, "f", {}))
    assert one == {
        "replica": "host-1", "state": "ready", "version": "1.2", "running": 1, "waiting": 2,
        "to_read_tokens": 0, "prompt_tokens": 100, "generated_tokens": 50, "kv_bytes": 8 << 20,
        "kv_used_bytes": 6 << 20, "kv_conversations": 4, "reused": 0.75,
    }  # fmt: skip
    assert two["state"] == "quiet" and two["to_read_tokens"] == 33
    assert replica_line(one) == (
        "host-1: ready, 1 running, 2 waiting, 0 tokens to read; KV 6 of 8 MiB, 4 conversations, "
        "75 % of prompt tokens reused; 50 tokens generated"
    )
    [bare] = read_replicas(metrics.text([seat("new")], {}, "f", {}))
    assert bare["reused"] is None and "- of prompt tokens" in replica_line(bare)
    assert read_replicas("nonsense\ndeepdraft_replica_x{replica=\n") == []


def test_a_label_on_every_sample() -> None:
    text = 'a 1\n# HELP b x\nb{c="d"} 2.5\n'
    assert labelled(text, "front", "f") == 'a{front="f"} 1\n# HELP b x\nb{c="d",front="f"} 2.5\n'


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = FleetMetrics().text(fleet()[1], {}, "f", {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is written."""


def test_status_asks_a_front() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [own["replica"] for own in ask_replicas(url, None)] == ["host-1", "host-2"]
        thread.join()
    assert ask_replicas(url, None) == []  # nobody is there any more


def test_a_front_shows_its_engines(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path) as world:

            async def text() -> str:
                answer = await world.client.get("/metrics")
                assert answer.status_code == 200
                return answer.text

            async def until(done: float) -> str:
                """Engines tell their counters when their next beat is due."""
                async with asyncio.timeout(30):
                    while samples(shown := await text())[name] != done:
                        await asyncio.sleep(0.02)
                return shown

            name = "deepdraft_requests_finished_total"
            await until(2)  # each engine's warm-up
            for _ in range(6):
                assert (await world.complete()).status_code == 200
            shown = await until(8)
            found = values(shown)
            assert sum(v for k, v in found.items() if "replica_requests_finished_total" in k) == 8
            assert found['deepdraft_fleet_events_total{what="placed",front="front"}'] == 6
            assert [r["replica"] for r in read_replicas(shown)] == ["e0", "e1"]
            assert sum(r["generated_tokens"] for r in read_replicas(shown)) > 6
            world.engines[0].die()
            await world.connected(1)
            shown = await text()
            assert samples(shown)[name] == 8  # counters never fall
            assert [r["replica"] for r in read_replicas(shown)] == ["e1"]

    asyncio.run(run())


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name, _ in fleet_metrics._LOAD.values():
        assert f"`replica_{name}" in page, name
    assert "`fleet_events_total{what,front}`" in page
    source = Path(fleet_metrics.__file__).parent
    code = "".join(f.read_text() for f in source.glob("fleet_[rlf]*.py"))
    for what in set(re.findall(r'counters\.add\(\s*"(\w+)"', code)):
        assert f"`{what}`" in page, what
