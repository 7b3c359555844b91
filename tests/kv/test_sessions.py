"""Through HTTP: sessions, their policy, two servers with a real Redis, what a client sees."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.config import Config, EngineConfig, FleetConfig
from deepdraft.engine.reuse import open_reuse
from deepdraft.errors import ConfigError
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.server.metrics import metrics_text
from deepdraft.text.tokenizer import Tokenizer
from tests.kv.served import Json, Peer, load_tiny, tiny_model, told, toy_tokenizer
from tests.kv.test_directory import RealRedis, needs_redis
from tests.server.toy import Toy

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Tell me about the letters a, b and c, please."}
MakePeer = Callable[..., Peer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def weights(tokenizer: Tokenizer) -> DeepseekV41:
    return tiny_model(tokenizer)


@pytest.fixture
def make_peer(tokenizer: Tokenizer, weights: DeepseekV41) -> Iterator[MakePeer]:
    peers: list[Peer] = []

    def make(**options: Any) -> Peer:
        settings: Any = {"kv_memory": "16MiB", **options}
        peers.append(Peer(tokenizer, weights, **settings))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def ask(peer: Peer, messages: list[Json], session: str | None = None, **more: Any) -> Any:
    headers = {} if session is None else {"X-Session-ID": session}
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, **more}
    body.setdefault("thinking", {"type": "disabled"})
    return peer.post(CHAT, body, headers)


def turns(peer: Peer, messages: list[Json], session: str | None = None) -> list[Json]:
    """The messages, the answer, and a next question."""
    answer = ask(peer, messages, session)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"] or "x"
    return [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "?"}]


# ---- policy and ids ------------------------------------------------------------------------


def test_a_session_is_asked_for_where_the_policy_says_so(make_peer: MakePeer) -> None:
    peer = make_peer(server={"session_policy": "require"})
    later = turns(peer, [USER])  # the first turn needs none
    refused = ask(peer, later)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Session-ID"
    assert "X-Session-ID" in refused.json()["error"]["message"]
    assert ask(peer, later, "s1").status_code == 200
    # The same in the other APIs; a completion has no turns.
    plain = {"messages": [*later], "max_tokens": 3, "temperature": 0}
    assert peer.post("/v1/messages", plain).status_code == 400
    assert peer.post("/v1/messages", plain, {"x-session-id": "s1"}).status_code == 200
    items = [{"role": m["role"], "content": m["content"]} for m in later]
    assert peer.post("/v1/responses", {"input": items, "store": False}).status_code == 400
    assert peer.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_the_header_has_a_name_of_its_own(make_peer: MakePeer) -> None:
    peer = make_peer(server={"session_policy": "require", "session_header": "X-Chat"})
    later = turns(peer, [USER])
    assert ask(peer, later, "s1").status_code == 400
    body = {"messages": later, "max_tokens": 2}
    assert peer.post(CHAT, body, {"X-Chat": "s1"}).status_code == 200


@pytest.mark.parametrize("bad", ["", " ", "a b", "x" * 257, "x" * 10_000, "a\tb", "\x7f", "é"])
def test_bad_session_ids_are_refused(bad: str, make_peer: MakePeer) -> None:
    peer = make_peer()
    headers: Any = {"X-Session-ID": bad.encode()}
    refused = peer.post(CHAT, {"messages": [USER], "max_tokens": 2}, headers)
    assert refused.status_code == 400
    assert "X-Session-ID" in refused.json()["error"]["message"]
    assert len(refused.text) < 1000


class SlowFleet:
    """Prepares nothing, and takes its time."""

    def __init__(self) -> None:
        self.go, self.lock = threading.Event(), threading.Lock()
        self.now = self.most = self.done = 0

    def prepare(self, key: str, token_ids: tuple[int, ...], trace: str) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.go.wait(60)
        with self.lock:
            self.now -= 1
            self.done += 1


@pytest.mark.parametrize("leave", [True, False])
def test_six_are_prepared_at_a_time_and_clients_may_leave(
    leave: bool, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, fleet = make_peer(), SlowFleet()
    monkeypatch.setattr(type(peer.service), "fleet", property(lambda self: fleet))

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app=peer.app)
        body = {"messages": [USER], "max_tokens": 2}
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            asked = [
                asyncio.ensure_future(
                    client.post(CHAT, json=body, headers={"X-Session-ID": f"s{i}"}, timeout=60)
                )
                for i in range(10)
            ]
            while fleet.now < 6:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert peer.service.num_preparing == 10
            if leave:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                fleet.go.set()
                return []
            fleet.go.set()
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    codes = asyncio.run(main())
    assert fleet.most == 6
    assert codes == ([] if leave else [200] * 10)
    assert peer.service.num_preparing == 0
    stats = peer.stats()
    assert (stats["waiting"], stats["running"]) == (0, 0)
    assert stats["requests"] == (1 if leave else 11)  # the warm-up is one


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"traceparent": f"00-{'4bf9' * 8}-{'0a' * 8}-01", "X-Request-Id": "mine"}, "4bf9" * 8),
        ({"traceparent": f"00-{'0' * 32}-{'0a' * 8}-01", "X-Request-Id": "mine"}, "mine"),
        ({"traceparent": "00-\u00e9"}, None),
        ({}, None),
    ],
)
def test_a_peer_is_told_the_trace_of_the_request(
    headers: Json, wanted: str | None, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, told_to = make_peer(), []

    class Told:
        def prepare(self, key: str, token_ids: tuple[int, ...], trace: str) -> None:
            told_to.append(trace)

    monkeypatch.setattr(type(peer.service), "fleet", property(lambda self: Told()))
    raw: Any = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = peer.post(CHAT, {"messages": [USER], "max_tokens": 2}, {"X-Session-ID": "s", **raw})
    assert answer.status_code == 200
    assert told_to == [wanted or answer.json()["id"]]


# ---- usage ---------------------------------------------------------------------------------


def test_usage_says_what_came_from_the_cache_in_every_api(make_peer: MakePeer) -> None:
    peer = make_peer()
    first = ask(peer, [USER]).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    n = first["prompt_tokens"]
    again = ask(peer, [USER]).json()["usage"]
    assert again["prompt_tokens_details"] == {
        "cached_tokens": n - 1,
        "cache_source": "host",
        "cache_provenance": "exact",
    }
    assert (again["prompt_cache_hit_tokens"], again["prompt_cache_miss_tokens"]) == (n - 1, 1)
    fields = {"messages": [USER], "max_tokens": 6, "thinking": {"type": "disabled"}}
    usage = peer.post("/v1/messages", fields).json()["usage"]
    assert usage["cache_read_input_tokens"] == n - 1 and usage["input_tokens"] == 1
    assert (usage["cache_source"], usage["cache_provenance"]) == ("host", "exact")
    fields = {"input": [USER], "max_output_tokens": 6, "reasoning": {"effort": "none"}}
    usage = peer.post("/v1/responses", {**fields, "store": False}).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == n - 1
    assert usage["input_tokens_details"]["cache_source"] == "host"
    body = {"prompt": ["ab" * 20, "ab" * 20, "xyz" * 12], "max_tokens": 2, "n": 2}
    peer.post("/v1/completions", body)
    usage = peer.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens"] == 119 and usage["prompt_cache_hit_tokens"] == 40 + 40 + 36


def test_metrics_moved(make_peer: MakePeer) -> None:
    peer = make_peer()
    prompts = sum(ask(peer, [USER]).json()["usage"]["prompt_tokens"] for _ in range(2))
    stats = peer.stats()
    assert (stats["kv_hits"], stats["kv_misses"]) == (1, 1)
    assert stats["kv_tokens_reused"] > 10
    text = metrics_text(stats)
    used = stats["kv_slots_used"] * stats["kv_slot_bytes"]
    for line in (
        'deepdraft_kv_lookups_total{result="hit"} 1',
        'deepdraft_kv_lookups_total{result="miss"} 1',
        'deepdraft_kv_starts_total{kind="checkpoint"} 1',
        f"deepdraft_kv_tokens_reused_total {stats['kv_tokens_reused']}",
        f"deepdraft_kv_tokens_computed_total {prompts - stats['kv_tokens_reused']}",
        f'deepdraft_kv_slab_bytes{{state="used"}} {used}',
    ):
        assert line in text.splitlines()


def test_every_counter_of_a_fleet_has_a_metric() -> None:
    text = metrics_text(
        {"kv_fetch_hit": 3, "kv_claim_stale": 1, "kv_fetch_microseconds": 2_500_000}
        | {"kv_lookup_none": 2, "kv_fetch_corrupt": 1, "kv_preparing": 4}
        | {"kv_fetch_read_microseconds": 1_500_000, "kv_restore_microseconds": 250_000}
        | {"kv_directory_microseconds": 4_000, "kv_lease_most_milliseconds": 900}
        | {"kv_sidecar_restarts": 2, "kv_fetch_peers_backing_off": 1}
    )
    for line in (
        'deepdraft_kv_fetches_total{result="hit"} 3',
        'deepdraft_kv_claims_total{result="stale"} 1',
        'deepdraft_kv_directory_lookups_total{result="unavailable"} 2',
        'deepdraft_kv_verify_failures_total{what="fetch"} 1',
        "deepdraft_kv_fetch_seconds_total 2.500000",
        "deepdraft_kv_preparing 4",
        'deepdraft_kv_phase_seconds_total{phase="read"} 1.500000',
        'deepdraft_kv_phase_seconds_total{phase="copy"} 0.250000',
        "deepdraft_kv_directory_seconds_total 0.004000",
        "deepdraft_kv_lease_age_max_seconds 0.900000",
        "deepdraft_kv_sidecar_restarts_total 2",
        "deepdraft_kv_peers_backing_off 1",
    ):
        assert line in text.splitlines()


# ---- without a cache -----------------------------------------------------------------------


def test_switched_off_and_families_without_one(make_peer: MakePeer, tmp_path: Path) -> None:
    off = make_peer(kv_memory=0)
    for _ in range(2):
        usage = ask(off, [USER], "s1").json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert not any(name.startswith("kv_") for name in off.stats())
    toy = Toy(tmp_path)  # a runner that is no V4.1 model
    model = toy.load()
    assert open_reuse(model, EngineConfig()) is None
    with pytest.raises(ConfigError, match="need the KV cache"):
        open_reuse(model, EngineConfig(kv_spill=str(tmp_path)))
    with pytest.raises(ConfigError, match="need the KV cache"):
        open_reuse(model, EngineConfig(), FleetConfig(directory="redis://127.0.0.1"))


def test_too_little_memory_says_so(tokenizer: Tokenizer, weights: DeepseekV41) -> None:
    options = EngineConfig(kv_memory=1000)
    with pytest.raises(ConfigError, match="give it more memory"):
        open_reuse(load_tiny(tokenizer, weights, options), options)


def test_a_spill_directory_outlives_the_server(make_peer: MakePeer, tmp_path: Path) -> None:
    first = make_peer(kv_spill=str(tmp_path / "spill"))
    answer = told(ask(first, [USER]))
    first.close()
    second = make_peer(kv_spill=str(tmp_path / "spill"))
    response = ask(second, [USER])
    assert told(response)[0] == answer[0]
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["cache_source"] == "disk" and details["cached_tokens"] > 10
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(AssertionError, match="kv_spill"):
        make_peer(kv_spill=str(file / "below"))


# ---- two servers ---------------------------------------------------------------------------


@needs_redis
def test_two_servers_and_a_real_redis(make_peer: MakePeer, tmp_path: Path) -> None:
    server = RealRedis(tmp_path)
    server.start()
    plain = make_peer(kv_memory=0)
    try:
        peers = [
            make_peer(fleet={"directory": server.url, "name": f"n{i}", "fetch": "always"})
            for i in range(2)
        ]
        messages = [USER]
        sources = []
        for i in range(5):
            peer = peers[i % 2]
            warm, cold = ask(peer, messages, "one"), ask(plain, messages)
            assert told(warm)[0] == told(cold)[0]
            details = warm.json()["usage"]["prompt_tokens_details"]
            sources.append(details.get("cache_source"))
            peer.cache.flush()
            peer.service.fleet.flush()  # type: ignore[union-attr]
            content = warm.json()["choices"][0]["message"]["content"] or "x"
            messages = [
                *messages,
                {"role": "assistant", "content": content},
                {"role": "user", "content": "go on"},
            ]
        assert sources == [None, "peer", "peer", "peer", "peer"]
        # Without its session, and under another one, the other server knows nothing of it.
        fresh = [{"role": "user", "content": "Something else, of a length that counts."}]
        ask(peers[0], fresh, "two")
        peers[0].cache.flush()
        peers[0].service.fleet.flush()  # type: ignore[union-attr]
        for session in (None, "three"):
            usage = ask(peers[1], fresh, session).json()["usage"]
            assert usage["prompt_tokens_details"].get("cache_source") != "peer"
            peers[1].cache.memory.evict(10**6)
        # Redis is gone: everything is answered, nothing is shared.
        server.stop()
        for peer in peers:
            assert told(ask(peer, messages, "one"))[0] == told(ask(plain, messages))[0]
    finally:
        server.stop()


@needs_redis
def test_a_server_that_stops_leaves_its_conversations(make_peer: MakePeer, tmp_path: Path) -> None:
    """Three conversations on one server; it stops; the other one goes on with them from its own
    memory, with the answers of a server without a cache."""
    server = RealRedis(tmp_path)
    server.start()
    plain = make_peer(kv_memory=0)
    try:
        leaving, staying = (
            make_peer(fleet={"directory": server.url, "name": f"n{i}"}) for i in range(2)
        )
        wait = threading.Event()
        while server.cli("HLEN", f"{{{space_of(leaving)}}}:members") != 2:
            wait.wait(0.01)
        said = {
            f"s{i}": [{"role": "user", "content": f"Tell me about number {i} at some length."}]
            for i in range(3)
        }
        said = {session: turns(leaving, messages, session) for session, messages in said.items()}
        leaving.close()
        assert staying.stats()["kv_taken_over"] == 3
        for session, messages in said.items():
            warm = ask(staying, messages, session)
            assert told(warm)[0] == told(ask(plain, messages))[0]
            details = warm.json()["usage"]["prompt_tokens_details"]
            assert details["cache_source"] == "peer" and details["cached_tokens"] > 32
        assert staying.stats()["kv_fetch_hit"] == 3, "what was offered; nothing for the turns"
    finally:
        server.stop()


def space_of(peer: Peer) -> str:
    return peer.service.fleet.directory.namespace  # type: ignore[union-attr]


@needs_redis
def test_a_tenant_never_gets_anothers_session(make_peer: MakePeer, tmp_path: Path) -> None:
    server = RealRedis(tmp_path)
    server.start()
    try:
        keys = {"api_keys": ("key-of-ann", "key-of-bob")}
        peers = [
            make_peer(
                server=keys,
                fleet={"directory": server.url, "name": f"n{i}", "fetch": "always"},
            )
            for i in range(2)
        ]

        def asked(peer: Peer, key: str) -> Json:
            headers = {"X-Session-ID": "one", "Authorization": f"Bearer {key}"}
            body = {"messages": [USER], "temperature": 0, "max_tokens": 4}
            answer = peer.post(CHAT, body, headers)
            peer.cache.flush()
            peer.service.fleet.flush()  # type: ignore[union-attr]
            return answer.json()["usage"]["prompt_tokens_details"]

        asked(peers[0], "key-of-ann")
        assert asked(peers[1], "key-of-bob").get("cache_source") is None
        peers[1].cache.memory.evict(10**6)
        asked(peers[0], "key-of-ann")
        assert asked(peers[1], "key-of-ann").get("cache_source") == "peer"
    finally:
        server.stop()


def test_a_fleet_needs_sensible_settings(tokenizer: Tokenizer, weights: DeepseekV41) -> None:
    options = EngineConfig(kv_memory=16 << 20)
    model = load_tiny(tokenizer, weights, options)
    for wrong, message in (
        ({"directory": "http://secret@x"}, "redis://"),
        ({"directory": "redis://x", "namespace": "a b"}, "namespace"),
        ({"directory": "redis://x", "name": "a b"}, "name of 1 to 64"),
        ({"directory": "redis://x", "listen": "0.0.0.0:0"}, "loopback"),
        ({"directory": "redis://x", "files": "/nowhere"}, "init-fleet"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            open_reuse(model, options, FleetConfig(**wrong))  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    for wrong in ({"listen": "nowhere"}, {"fetch": "sometimes"}, {"hurry": 0}, {"directory": 3}):
        with pytest.raises(ConfigError, match="fleet"):
            FleetConfig(**wrong)  # type: ignore[arg-type]
    assert "secret" not in repr(Config(fleet=FleetConfig(directory="redis://:secret@x")))
