"""The simulated fleet against what can be reckoned by hand, against queueing theory, and its own
laws on random fleets."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.engine.engine import Engine
from deepdraft.engine.pace import Pace
from deepdraft.engine.request import Request
from deepdraft.engine.scheduler import Limits, PrefillChunk, Scheduler, StepPlan
from deepdraft.errors import ConfigError
from deepdraft.proof.fleet_costs import Costs, costs_of, read_costs
from deepdraft.proof.fleet_figures import figures
from deepdraft.proof.fleet_sim import (
    ROUTINGS,
    FleetShape,
    SimConversation,
    SimTurn,
    Simulated,
    simulate,
)
from deepdraft.types import GenerateRequest

COSTS = Costs(
    request_s=0.01,
    prefill_s=((100, 0.1), (200, 0.3)),
    decode_s=((1, 0.02), (3, 0.04)),
    chunk=1000,
    capacity=(1.0, 2.0, 3.0),
)


def chat(at_s: float, *turns: tuple[int, int], pause_s: float = 1.0) -> SimConversation:
    return SimConversation(at_s, tuple(SimTurn(n, a, pause_s) for n, a in turns))


def play(*trace: SimConversation, costs: Costs = COSTS, **shape: Any) -> Simulated:
    return simulate(trace, costs, FleetShape(**shape))


def test_one_request_alone() -> None:
    out = play(chat(5.0, (100, 11)))
    [turn] = out.turns
    assert turn.first_s == pytest.approx(0.01 + 0.1)
    assert turn.end_s == pytest.approx(0.11 + 10 * 0.02)  # the first token comes with the prompt
    assert out.wall_s == pytest.approx(5.31)
    assert (turn.prompt, turn.cached, turn.source, turn.tokens) == (100, 0, "none", 11)
    assert out.busy_share == pytest.approx(0.31 / 5.31)


def test_a_prompt_waits_for_the_round_under_way() -> None:
    first, second = play(chat(0.0, (100, 11)), chat(0.125, (100, 1))).turns
    assert first.prompt == 100 and second.tokens in (1, 11)
    late = first if first.tokens == 1 else second
    # A round ends at 0.13; then comes its prompt, before the next round.
    assert late.first_s == pytest.approx(0.005 + 0.01 + 0.1)


def test_rounds_of_many_streams() -> None:
    out = play(*(chat(0.0, (100, 11)) for _ in range(3)), costs=replace(COSTS, max_running=3))
    assert max(t.end_s for t in out.turns) < 3 * 0.31
    assert COSTS.round_s(2) == pytest.approx(0.03) and COSTS.round_s(5) == pytest.approx(0.06)


def test_a_long_prompt_is_read_in_parts_beside_a_stream() -> None:
    costs = replace(COSTS, chunk=50, prefill_s=((1000, 1.0),), max_stall_s=0.02)
    beside = play(chat(0.0, (10, 500)), chat(0.5, (1000, 1)), costs=costs).turns
    alone = play(chat(0.5, (1000, 1)), costs=costs).turns
    long = next(t for t in beside if t.prompt == 1000)
    # 20 rows a part (0.02 s), each with a round of 0.02: twice the time.
    assert long.first_s == pytest.approx(2 * alone[0].first_s, rel=0.05)
    short = play(
        chat(0.0, (10, 500)),
        chat(0.5, (1000, 1)),
        costs=replace(costs, part_s=((20, 0.03), (50, 0.05))),
    ).turns
    assert next(t for t in short if t.prompt == 1000).first_s > 1.2 * long.first_s


def test_few_rows_take_more_than_their_share() -> None:
    costs = replace(COSTS, chunk=100, prefill_s=((100, 0.1), (200, 0.3)))
    assert costs.read_s([(0, 10)]) == pytest.approx(0.01) and costs.read_s([]) == 0
    table = replace(costs, part_s=((10, 0.03), (50, 0.06), (80, 0.08)))
    for rows, seconds in ((10, 0.03), (30, 0.045), (5, 0.02625), (100, 0.08 + 0.02 * 2 / 3)):
        whole = 0.08 + 0.02 * 2 / 3
        assert table.read_s([(0, rows)]) == pytest.approx(0.1 * seconds / whole)
    # Behind 100 tokens a row takes twice as long, and so do few of them; together they are many.
    assert table.read_s([(100, 10)]) == pytest.approx(2 * table.read_s([(0, 10)]))
    both = table.read_s([(0, 10), (20, 40)])
    assert both == pytest.approx(table.read_s([(0, 50)]))
    assert both < 5 * table.read_s([(0, 10)])


def test_short_prompts_overtake_a_long_one() -> None:
    costs = replace(COSTS, chunk=100, prefill_s=((1000, 1.0),), request_s=0.0)
    out = play(chat(0.0, (1000, 1)), chat(0.01, (30, 1)), costs=costs).turns
    assert [t.prompt for t in out] == [30, 1000]
    assert out[0].first_s < 0.25


def test_a_later_turn_computes_what_is_new() -> None:
    costs = replace(COSTS, gap_tokens=3, resume_s=0.005)
    first, second = play(chat(0.0, (100, 11), (20, 1)), costs=costs).turns
    assert (second.known, second.cached, second.prompt) == (111, 108, 131)
    assert second.source == "host"
    new = costs.prefill(131) - costs.prefill(108)
    assert second.first_s == pytest.approx(0.01 + 0.005 + new)
    assert first.end_s + 1.0 + second.end_s == pytest.approx(first.end_s + 1.0 + second.first_s)


def test_what_is_computed_again_may_differ_from_turn_to_turn() -> None:
    costs = replace(COSTS, gap_tokens=3, gaps=(1, 25, 25, 25))
    out = play(chat(0.0, *[(100, 11)] * 40), costs=costs)
    again = [t.known - t.cached for t in out.turns[1:]]
    assert set(again) == {1, 25} and 3 <= again.count(1) <= 20
    assert costs_of(json.loads(json.dumps(costs.as_dict())), "t") == costs


def test_a_turn_elsewhere_fetches_what_is_not_there() -> None:
    costs = replace(
        COSTS, kv_token_bytes=10.0, kv_base_bytes=100.0, fetch_overhead_s=0.5, fetch_bytes_per_s=1e4
    )
    trace = [chat(0.0, *[(100, 11)] * 12)]
    out = simulate(trace, costs, FleetShape(replicas=2, routing="random", seed=1))
    fetched = [t for t in out.turns if t.source == "peer"]
    assert 2 <= len(fetched) <= 10
    first = fetched[0]
    assert out.fetch_bytes >= len(fetched) * 100
    new = costs.prefill(first.prompt) - costs.prefill(first.cached)
    size = costs.kv_bytes(first.known, 1)
    assert first.first_s == pytest.approx(costs.fetch_s(size) + 0.01 + new)
    # Without sharing only what lies there is used; it may be an old part of the conversation.
    alone = simulate(trace, costs, FleetShape(replicas=2, routing="random", seed=1, sharing=False))
    assert alone.fetch_bytes == 0 and all(t.source != "peer" for t in alone.turns)
    assert sum(t.cached for t in alone.turns) < sum(t.cached for t in out.turns)


def test_stickiness_spreads_conversations() -> None:
    trace = [chat(0.1 * i, (50, 3), (10, 3), (10, 3)) for i in range(30)]
    out = simulate(trace, COSTS, FleetShape(replicas=3, routing="sticky", sharing=False))
    own = figures(out.turns, out.wall_s, replicas=3, fetch_bytes=0)
    assert own["later_turns"]["sources"] == {"host": 60} and own["imbalance"] == pytest.approx(0)
    assert {n: v["turns"] for n, v in own["by_replica"].items()} == {
        f"replica {i}": 30 for i in (1, 2, 3)
    }


def test_memory_that_is_full_forgets_the_oldest() -> None:
    costs = replace(COSTS, kv_token_bytes=1.0)
    trace = [chat(0.0, (100, 1), (10, 1), pause_s=60), chat(10.0, (100, 1), (10, 1), pause_s=60)]
    both = play(*trace, costs=costs, kv_bytes=230)
    assert [t.source for t in both.turns if t.number == 2] == ["host", "host"]
    one = play(*trace, costs=costs, kv_bytes=150)
    assert [t.source for t in one.turns if t.number == 2] == ["none", "none"]
    assert one.kv_bytes_most <= 150 < both.kv_bytes_most
    nothing = play(*trace, costs=costs, kv_bytes=0)
    assert nothing.kv_bytes_most == 0


def test_processes_share_the_cores_of_their_machine() -> None:
    trace = [chat(0.0, (100, 11)) for _ in range(2)]
    shape = FleetShape(replicas=2, per_machine=2, routing="sticky")
    alone = simulate(trace, COSTS, replace(shape, per_machine=1)).turns
    shared = simulate(trace, replace(COSTS, capacity=(1.0,)), shape).turns
    partly = simulate(trace, replace(COSTS, capacity=(1.0, 1.6)), shape).turns
    for a, s, p in zip(alone, shared, partly, strict=True):
        assert s.end_s == pytest.approx(2 * a.end_s)
        assert p.end_s == pytest.approx(2 / 1.6 * a.end_s)


def test_work_beside_the_engine_takes_from_it_only_where_cores_are_few() -> None:
    costs = replace(COSTS, side_request_s=0.05, side_token_s=0.02)
    base = play(chat(0.0, (100, 11))).turns[0]
    two = play(chat(0.0, (100, 11)), costs=replace(costs, capacity=(1.0, 2.0))).turns[0]
    one = play(chat(0.0, (100, 11)), costs=replace(costs, capacity=(1.0,))).turns[0]
    # With a core for each only a token's own way back is added, and that of none before it.
    assert two.first_s == pytest.approx(base.first_s + 0.02)
    assert two.end_s == pytest.approx(base.end_s + 0.02)
    # On one core all of it is waited for, and the way back beside the next round.
    assert one.first_s == pytest.approx(base.first_s + 0.05 + 2 * 0.02)
    assert one.end_s > base.end_s + 0.05 + 10 * 0.02


def test_the_way_is_time_that_nobody_works() -> None:
    base = play(chat(0.0, (100, 11))).turns[0]
    late = play(chat(0.0, (100, 11)), costs=replace(COSTS, path_s=0.04)).turns[0]
    assert late.first_s == pytest.approx(base.first_s + 0.04)
    assert late.end_s == pytest.approx(base.end_s + 0.04)
    # What is worked on the way is a part of it, and more of it goes on beside the engine.
    side = replace(COSTS, path_s=0.04, side_request_s=0.05, side_token_s=0.01, capacity=(1.0, 2.0))
    assert play(chat(0.0, (100, 1)), costs=side).turns[0].first_s == pytest.approx(0.11 + 0.04)
    # The second one waits for the first one's whole work, then its own way begins.
    both = play(chat(0.0, (100, 1)), chat(0.0, (50, 1)), costs=side, replicas=2, routing="sticky")
    assert max(t.first_s for t in both.turns) > 0.05 + 0.04 + 0.06


def test_what_runs_anyway_takes_its_part_of_the_cores() -> None:
    trace = [chat(0.0, (100, 11)) for _ in range(2)]
    shape = FleetShape(replicas=2, per_machine=2, routing="sticky")
    costs = replace(COSTS, capacity=(1.0, 2.0), side_idle=0.2)
    alone = simulate(trace[:1], costs, shape).turns[0]
    assert alone.end_s == pytest.approx(0.31)  # it was measured beside that
    for turn in simulate(trace, costs, shape).turns:
        assert turn.end_s == pytest.approx(0.31 * 2.2 / 2)


def test_waiting_times_are_those_of_the_theory() -> None:
    """M/D/1: one at a time, Poisson arrivals, equal work. Mean wait = load / (2 (1 - load)) of the
    work (Pollaczek and Khinchine)."""
    work, load, count = 0.11, 0.6, 8_000
    rng = random.Random(5)
    now, trace = 0.0, []
    for _ in range(count):
        now += rng.expovariate(load / work)
        trace.append(chat(now, (100, 1)))
    out = play(*trace, costs=replace(COSTS, max_running=1))
    wait = sum(t.first_s for t in out.turns) / count - work
    assert wait == pytest.approx(work * load / (2 * (1 - load)), rel=0.08)
    assert out.busy_share == pytest.approx(load, rel=0.03)


def test_two_choices_are_better_than_one() -> None:
    rng = random.Random(6)
    now, trace = 0.0, []
    for _ in range(3000):
        now += rng.expovariate(8 * 0.8 / 0.11)
        trace.append(chat(now, (100, 1)))
    costs = replace(COSTS, max_running=1)
    mean = {
        routing: sum(
            t.first_s for t in play(*trace, costs=costs, replicas=8, routing=routing).turns
        )
        for routing in ("random", "two")
    }
    assert mean["two"] < 0.7 * mean["random"]


turn = st.tuples(st.integers(1, 400), st.integers(1, 30))
conversations = st.lists(
    st.tuples(st.floats(0, 5), st.lists(turn, min_size=1, max_size=4), st.floats(0, 1)), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(
    raw=conversations,
    replicas=st.integers(1, 4),
    per_machine=st.integers(1, 4),
    routing=st.sampled_from(ROUTINGS),
    sharing=st.booleans(),
    kv_bytes=st.sampled_from([0.0, 500.0, 1e9]),
    side=st.sampled_from([0.0, 0.003]),
    seed=st.integers(0, 3),
)
def test_laws(
    raw: list[Any],
    replicas: int,
    per_machine: int,
    routing: Any,
    sharing: bool,
    kv_bytes: float,
    side: float,
    seed: int,
) -> None:
    costs = replace(
        COSTS,
        chunk=64,
        max_running=3,
        gap_tokens=2,
        part_s=((16, 0.03), (64, 0.06)),
        kv_token_bytes=1.0,
        fetch_overhead_s=0.01,
        side_token_s=side,
        side_request_s=side,
        capacity=(1.0, 1.5),
    )
    trace = [chat(at, *turns, pause_s=pause) for at, turns, pause in raw]
    shape = FleetShape(
        replicas=replicas,
        per_machine=per_machine,
        routing=routing,
        sharing=sharing,
        kv_bytes=kv_bytes,
        seed=seed,
    )
    out = simulate(trace, costs, shape)
    assert len(out.turns) == sum(len(c.turns) for c in trace)
    assert sum(t.tokens for t in out.turns) == sum(t.answer for c in trace for t in c.turns)
    for t in out.turns:
        assert 0 < t.first_s <= t.end_s and 0 <= t.cached < t.prompt
        new = costs.prefill(t.prompt) - costs.prefill(t.cached)
        assert t.first_s >= costs.request_s + new - 1e-9
        assert (t.source == "none") == (t.cached == 0)
        assert sharing or t.source != "peer"
    assert out.kv_bytes_most <= kv_bytes and 0 <= out.busy_share <= 1 + 1e-9
    again = simulate(trace, costs, shape)
    assert again.turns == out.turns and again.wall_s == out.wall_s


class RealScheduler:
    """The engine's own scheduler in simulated time, one step after the other."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.pace = Pace(1e3 * costs.max_stall_s)
        limits = Limits(max_queue=1000, max_running=costs.max_running, step_rows=costs.chunk)
        self.scheduler = Scheduler(limits, pace=self.pace)
        self.now = 0.0
        self.tokens: dict[str, int] = {}
        self.times: dict[str, tuple[float, float]] = {}

    def play(self, trace: list[SimConversation]) -> list[tuple[float, float]]:
        """First token and end of each request, from its arrival."""
        coming = sorted(range(len(trace)), key=lambda i: trace[i].at_s)
        while coming or not self.scheduler.idle:
            while coming and trace[coming[0]].at_s <= self.now:
                i = coming.pop(0)
                [turn] = trace[i].turns
                source = GenerateRequest(
                    request_id=str(i), prompt_ids=(0,) * turn.new, max_new_tokens=turn.answer
                )
                self.scheduler.add([Request(source, lambda event: None)])
            self.scheduler.admit()
            plan = self.scheduler.plan()
            if plan is None:
                self.now = trace[coming[0]].at_s
            else:
                self._step(plan)
        return [
            (first - c.at_s, end - c.at_s)
            for c, (first, end) in zip(
                trace, (self.times[str(i)] for i in range(len(trace))), strict=True
            )
        ]

    def _step(self, plan: StepPlan) -> None:
        costs = self.costs
        self.now += sum(c.start == 0 for c in plan.prefill) * costs.request_s
        for group in self._joined(plan.prefill):
            took_s = costs.read_s([(c.start, c.end - c.start) for c in group])
            self.pace.observe(sum(c.end - c.start for c in group), 1e3 * took_s)
            self.now += took_s
            for chunk in group:
                chunk.request.num_computed = chunk.end
                if chunk.request.prefilled:
                    self.times[chunk.request.request_id] = (self.now, self.now)
                    self._token(chunk.request)
        if plan.decode:
            self.now += costs.round_s(len(plan.decode))
        for request in plan.decode:
            self._token(request)

    def _joined(self, chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
        """The engine's own rule, for a runner that takes so many rows at once."""
        most = self.costs.joint_rows
        runner = SimpleNamespace(joint_rows=most, joins=lambda handle, rows: rows <= most)
        return Engine._joined(SimpleNamespace(runner=runner), chunks)  # type: ignore[arg-type]

    def _token(self, request: Request) -> None:
        id = request.request_id
        self.tokens[id] = self.tokens.get(id, 0) + 1
        if self.tokens[id] == request.source.max_new_tokens:
            self.times[id] = (self.times[id][0], self.now)
            self.scheduler.remove(request)


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_is_what_the_real_scheduler_makes_of_the_same_costs(seed: int) -> None:
    rng = random.Random(seed)
    costs = replace(
        COSTS,
        prefill_s=((100, 0.05), (1000, 0.9)),
        decode_s=((1, 0.01), (4, 0.02), (8, 0.05)),
        chunk=rng.choice((32, 128, 256)),
        max_running=rng.choice((1, 3, 8)),
        max_stall_s=rng.choice((0.01, 0.05, 0.2)),
        part_s=rng.choice(((), ((10, 0.01), (100, 0.05)))),
        request_s=rng.choice((0.0, 0.02)),
        joint_rows=rng.choice((0, 40, 96)),
    )
    trace = [
        chat(rng.uniform(0, 6), (rng.choice((5, 40, 900)) + rng.randrange(30), rng.randint(1, 40)))
        for _ in range(40)
    ]
    out = simulate(trace, costs, FleetShape())
    simulated = {(t.prompt, t.tokens, round(t.first_s, 9), round(t.end_s, 9)) for t in out.turns}
    real = RealScheduler(costs).play(trace)
    for conversation, (first_s, end_s) in zip(trace, real, strict=True):
        [turn] = conversation.turns
        own = [s for s in simulated if s[:2] == (turn.new, turn.answer)]
        assert any(
            s[2:] == (pytest.approx(first_s, abs=1e-6), pytest.approx(end_s, abs=1e-6)) for s in own
        ), (conversation, first_s, end_s, own)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefill_s": []}, "pairs above 0"),
        ({"prefill_s": [[10, 0.2], [20, 0.1]]}, "both rising"),
        ({"decode_s": [[0, 1]]}, "pairs above 0"),
        ({"decode_s": [[1]]}, "no cost table"),
        ({"capacity": []}, "capacity"),
        ({"chunk": 0}, "chunk"),
        ({"no_such": 1}, "unknown entries"),
        ({"part_s": [[20, 0.2], [10, 0.3]]}, "both rising"),
        ({"part_s": [[20, 0.0]]}, "pairs above 0"),
        ({"part_s": 0.1}, "no cost table"),
        ({"resume_s": "x"}, "no cost table"),
        ({"prefill_s": None}, "no cost table"),
    ],
)
def test_tables_that_are_none(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        costs_of({**COSTS.as_dict(), **wrong}, "t")


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS.as_dict()))
    assert read_costs(file) == COSTS
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="must be an object"):
        read_costs(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        read_costs(file)


def test_shapes_that_are_none() -> None:
    for wrong in ({"replicas": 0}, {"routing": "no"}, {"kv_bytes": -1.0}):
        with pytest.raises(ConfigError):
            FleetShape(**wrong)  # type: ignore[arg-type]
