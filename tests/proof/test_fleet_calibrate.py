"""Calibration on an engine that is known: a server in virtual time, built on the costs that the
calibration is to find again. No sockets, no clock of the machine."""

import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepdraft.errors import EngineError
from deepdraft.proof import fleet_calibrate
from deepdraft.proof.bench_fleet import then
from deepdraft.proof.fleet_calibrate import Calibration, Machine
from deepdraft.proof.fleet_costs import Costs
from deepdraft.proof.fleet_sim import FleetShape, in_tokens, simulate
from deepdraft.proof.fleet_trace import TracePlan
from deepdraft.proof.serve_client import Answer, Ask

TRUE = Costs(
    request_s=0.004,
    path_s=0.03,
    resume_s=0.006,
    prefill_s=((250, 0.15), (1600, 1.2)),
    part_s=((20, 0.02), (100, 0.07), (250, 0.15)),
    decode_s=((1, 0.010), (8, 0.024)),
    gap_tokens=5,
    chars_per_token=3.0,
    turn_tokens=8.0,
)
WAY_S, CPU_REQUEST_S, CPU_TOKEN_S, IDLE = 0.03, 0.008, 0.002, 0.1
KV_TOKEN, KV_TURN, TURNS, FETCH_S, FETCH_BYTES = 500.0, 200_000.0, 4, 0.012, 1e8


class World:
    """Two servers, their clock, what they count. One request or group of them at a time."""

    def __init__(self, capacity: float = 1.6) -> None:
        self.now = self.cpu = 0.0
        self.capacity = capacity
        self.counted: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.chats: dict[str, tuple[int, int, int]] = {}
        """Tokens, turns, server."""

    # ---- a fleet, as the calibration sees it

    def counters(self) -> Counter[str]:
        return Counter(self.counted)

    def cpu_s(self) -> float:
        return self.cpu + IDLE * self.now

    # ---- the clock

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.counted[f"deepdraft_{name}"] += amount  # type: ignore[assignment]

    def together(self, asks: list[tuple[int, Ask]]) -> list[Answer]:
        """What `Calibration._together` is given, in virtual time."""
        servers = {at for at, _ in asks}
        slow = len(servers) / self.capacity if len(servers) > 1 else 1.0
        answers = [self._answer(at, ask, slow) for at, ask in asks]
        most, streams = max(ask.max_tokens for _, ask in asks), len(asks) / len(servers)
        rounds_s = (most - 1) * TRUE.round_s(round(streams)) * slow
        steps = (most - 1) * len(servers)
        self.count(
            iteration_seconds_total=rounds_s * len(servers),
            iterations_total=steps,
            spec_decode_steps_total=(most - 1) * len(asks),
            request_decode_time_seconds_sum=rounds_s * len(asks),
        )
        self.now += max(a.first_s for a in answers) + rounds_s
        self.cpu += rounds_s * len(servers) + len(asks) * most * CPU_TOKEN_S
        for answer in answers:
            answer.end_s = answer.first_s + rounds_s
        return answers

    def _answer(self, at: int, ask: Ask, slow: float) -> Answer:
        chars, turns = sum(map(len, ask.turns[::2])), (len(ask.turns) + 1) // 2
        known, turn, home = self.chats.get(ask.session or "", (0, 0, at))
        new = round(len(ask.turns[-1]) / 3.0 + 8.0) if known else round(chars / 3.0 + 8.0)
        prompt = known + new
        cached = max(0, known - TRUE.gap_tokens)
        read_s = slow * self._read_s(cached, prompt)
        begin_s = TRUE.request_s + (TRUE.resume_s if cached else 0.0)
        fetch_s = 0.0
        if cached and home != at:
            size = known * KV_TOKEN + min(turn, TURNS) * KV_TURN
            fetch_s = FETCH_S + size / FETCH_BYTES
            self.count(kv_fetch_bytes_total=size)
        self.count(
            e2e_request_latency_seconds_count=1,
            time_to_first_token_seconds_sum=begin_s + read_s,
            prefill_seconds_total=read_s,
            generation_tokens_total=ask.max_tokens,
        )
        self.cpu += read_s + CPU_REQUEST_S
        if ask.session:
            self.chats[ask.session] = prompt + ask.max_tokens, turns, at
        first_s = WAY_S + fetch_s + begin_s + read_s
        return Answer(
            text="x" * 30, first_s=first_s, prompt_tokens=prompt, cached_tokens=cached,
            tokens=ask.max_tokens,
        )  # fmt: skip

    @staticmethod
    def _read_s(start: int, end: int) -> float:
        seconds = 0.0
        while start < end:
            rows = min(TRUE.chunk, end - start)
            seconds += TRUE.read_s([(start, rows)])
            start += rows
        return seconds


class Server:
    """One of the world's servers."""

    def __init__(self, world: World, at: int) -> None:
        self.world, self.at, self.model = world, at, "known"

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        with self.world.lock:
            return self.world.together([(self.at, ask)])[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Stands for the fleet, the threads and the clock of a calibration."""
    world = World()

    def together(self: Calibration, asks: Any) -> list[Answer]:
        answers = world.together(list(asks))
        self._due += len(answers)
        return answers

    monkeypatch.setattr(Calibration, "_together", together)
    clock = SimpleNamespace(
        sleep=world.sleep,
        perf_counter=lambda: world.now,
        monotonic=lambda: world.now,
        process_time=lambda: 0.0,
    )
    monkeypatch.setattr(fleet_calibrate, "time", clock)
    return world


def calibration(world: World, servers: int = 2) -> Calibration:
    targets: Any = [Server(world, at) for at in range(servers)]
    fleet: Any = world
    return Calibration(fleet, targets, TracePlan(conversations=8), 2)


def test_costs_are_found_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "_mixed", lambda self, costs: costs)
    said: list[str] = []
    costs = calibration(world, 1).engine(said.append)
    assert costs.request_s == pytest.approx(TRUE.request_s)
    assert costs.resume_s == pytest.approx(TRUE.resume_s)
    assert costs.path_s == pytest.approx(WAY_S)
    assert costs.gap_tokens == TRUE.gap_tokens
    assert costs.side_idle == pytest.approx(IDLE)
    assert costs.side_request_s == pytest.approx(CPU_REQUEST_S + CPU_TOKEN_S)
    assert costs.gaps == (TRUE.gap_tokens,) * 64
    assert costs.chars_per_token == pytest.approx(3.0, rel=0.01)
    assert costs.turn_tokens == pytest.approx(8.0, abs=1.0)
    for streams in (1, 2, 4, 8):
        assert costs.round_s(streams) == pytest.approx(TRUE.round_s(streams))
    for tokens in (250, 700, 1500):
        assert costs.prefill(tokens) == pytest.approx(TRUE.prefill(tokens), rel=0.05)
    for start, rows in ((0, 40), (900, 60), (300, 200)):
        assert costs.read_s([(start, rows)]) == pytest.approx(
            TRUE.read_s([(start, rows)]), rel=0.08
        )
    turn_s = costs.alone_s
    assert turn_s == pytest.approx(TRUE.prefill(820) + 23 * TRUE.round_s(1), rel=0.2)
    assert len(said) == 4


def test_two_servers_show_cores_and_fetches(world: World) -> None:
    costs = calibration(world).pair(TRUE, lambda text: None)
    assert costs.capacity == (1.0, pytest.approx(1.6, rel=0.02))
    assert costs.kv_token_bytes == pytest.approx(KV_TOKEN, rel=0.02)
    assert costs.kv_base_bytes == pytest.approx(KV_TURN, rel=0.1)
    assert costs.kv_most_turns == TURNS
    assert costs.fetch_overhead_s == pytest.approx(FETCH_S, rel=0.2)
    assert costs.fetch_s(1e6) == pytest.approx(FETCH_S + 1e6 / FETCH_BYTES, rel=0.1)


def test_servers_that_share_nothing_cannot_show_fetches(world: World) -> None:
    world.capacity = 5.0
    alone = calibration(world)
    assert alone.machine(2).capacity == (1.0, 2.0), "two do no more than twice as much"
    assert alone.machine(1).capacity == (1.0,)
    world.chats = type("Nothing", (dict,), {"get": lambda self, key, default: default})()
    with pytest.raises(EngineError, match="no server fetched"):
        alone.pair(TRUE, lambda text: None)


def test_a_short_trace_sets_the_tables_right(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts is what an engine of other costs takes for it in the simulator."""
    slow = replace(
        TRUE,
        prefill_s=tuple((n, 1.3 * s) for n, s in TRUE.prefill_s),
        decode_s=tuple((n, 0.8 * s) for n, s in TRUE.decode_s),
        path_s=0.05,
        side_token_s=CPU_TOKEN_S,
    )

    def played(target: Any, trace: Any) -> list[Any]:
        plan = TracePlan(conversations=len(trace), most_turns=12, seed=1)
        out = simulate(in_tokens(plan, TRUE), slow, FleetShape())
        world.count(
            prefill_seconds_total=out.read_s,
            iteration_seconds_total=out.decode_s,
            e2e_request_latency_seconds_count=1,
        )
        world.cpu += out.read_s + out.decode_s + 24 * CPU_TOKEN_S
        answer = Answer(first_s=0.05, end_s=0.1, tokens=24)
        return [type("Done", (), {"answer": answer})()]

    monkeypatch.setattr(fleet_calibrate, "conversations", played)
    one = calibration(world, 1)
    costs = one._mixed(TRUE)
    for tokens in (250, 1600):
        assert costs.prefill(tokens) == pytest.approx(1.3 * TRUE.prefill(tokens), rel=0.02)
    for streams in (1, 8):
        assert costs.round_s(streams) == pytest.approx(0.8 * TRUE.round_s(streams), rel=0.02)
    assert costs.side_token_s == pytest.approx(CPU_TOKEN_S)
    assert costs.path_s == pytest.approx(0.05), "it is longer where much is at hand"


def test_a_fleet_that_does_not_count_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one = calibration(world, 1)
    monkeypatch.setattr(World, "count", lambda self, **amounts: None)
    with pytest.raises(EngineError, match="does not count what it answered"):
        one.machine(1)


def test_costs_on_a_machine_that_got_slower() -> None:
    known = replace(TRUE, alone_s=0.8)
    states = [Machine(0.8, (1.0, 1.8)), Machine(1.2, (1.0, 1.4))]
    now = then(known, states)
    assert now.capacity == (1.0, pytest.approx(1.6)) and now.alone_s == pytest.approx(1.0)
    assert now.prefill(250) == pytest.approx(1.25 * TRUE.prefill(250))
    assert now.read_s([(0, 40)]) == pytest.approx(1.25 * TRUE.read_s([(0, 40)]))
    assert now.round_s(3) == pytest.approx(1.25 * TRUE.round_s(3))
    assert now.path_s == pytest.approx(1.25 * TRUE.path_s)
    # Costs of a file that does not say how fast the machine was stay as they are.
    assert then(TRUE, [Machine(1.2, (1.0,))]) == TRUE
