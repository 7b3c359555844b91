"""Requests among engines that die, hang, leave and repeat themselves: no token is lost, doubled or
another's, and every request ends once. Without Ray, sockets and threads."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepdraft.errors import DeepdraftError, Overloaded
from deepdraft.server.fleet_flights import ANSWER_TOKENS, Seat
from deepdraft.server.fleet_router import MOST_LOSSES
from deepdraft.server.fleet_wire import (
    Event,
    Events,
    Identity,
    RemoteSession,
)
from deepdraft.types import (
    CacheUse,
    DecodeStats,
    GenerateRequest,
    PromptProgress,
    SamplingParams,
    SpeculationParams,
)
from tests.fleet.world import Client, FakeEngine, World


def test_a_request_runs_and_ends() -> None:
    world = World()
    client = world.ask(n=3)
    assert not client.opened
    world.finish()
    assert isinstance(client.opened[0], Seat)
    assert [e.finish_reason for e in client.ends.values()] == ["length"] * 3
    world.check_text(client)
    assert world.router.num_flights == 0


def test_one_that_dies_before_the_first_token_costs_nothing() -> None:
    for resume in (False, True):
        world = World(resume=resume)
        before, after = world.ask(), world.ask()
        world.read()
        first = world.on(after)
        world.die(first)  # some taken, without a token
        world.die(world.engines[0])
        world.add()
        world.finish()
        for client in (before, after):
            assert client.reason() == "length"
            world.check_text(client)
        assert world.router.counters.get("retried") >= 2


def test_one_that_dies_before_it_answers() -> None:
    world = World()
    client = world.ask(n=2)
    [taker] = [e for e in world.engines if e.inbox]
    world.die(taker)
    assert not client.opened
    world.finish()
    assert client.over and not any(e.error for e in client.ends.values())
    world.check_text(client)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("resume", [True, False])
def test_one_that_dies_in_the_middle(resume: bool, streamed: bool) -> None:
    world = World(resume=resume)
    client = world.ask(streamed=streamed)
    world.read()
    engine = world.on(client)
    engine.step(world.router, 2)
    world.die(engine)
    world.finish()
    world.check_text(client)
    if resume or not streamed:
        assert client.reason() == "length" and world.router.counters.get("resumed") == 1
    else:
        assert "in the middle of its answer" in client.error()
        assert len(client.tokens[client.requests[0].request_id]) == 2


def test_what_is_drawn_by_another_rule_is_not_resumed_but_cut() -> None:
    world = World()
    sampled = SamplingParams(temperature=1.0, seed=3)
    block = {"speculation": SpeculationParams(rule="block"), "sampling": sampled}
    clients = [world.ask(**block), world.ask(sampling=sampled), world.ask(streamed=False, **block)]
    world.read()
    for engine in list(world.engines):
        engine.step(world.router, 2)
        world.add()
        world.die(engine)
    world.finish()
    assert "cannot be taken up" in clients[0].error()
    assert [c.reason() for c in clients[1:]] == ["length", "length"]


def test_a_deterministic_rule_counts_though_it_is_the_engines_own() -> None:
    world = World(engines=0)
    engine = FakeEngine("e")
    identity = replace_struct(engine.seat.identity, rule="token")
    engine.seat.identity = identity
    world.engines.append(engine)
    world.router.join(engine.seat)
    client = Client(
        [GenerateRequest(request_id="r", prompt_ids=(1,), sampling=SamplingParams(seed=1))]
    )
    world.router.submit(client.requests, client.take, client.open, identity, streamed=True)
    world.read()
    engine.step(world.router)
    world.die(engine)
    assert "cannot be taken up" in client.error()


def replace_struct(identity: Identity, **changes: Any) -> Identity:
    return Identity(**{n: getattr(identity, n) for n in Identity.__struct_fields__} | changes)


def test_events_that_come_twice_or_late_are_nobodys() -> None:
    world = World()
    client = world.ask()
    world.read()
    engine = world.on(client)
    engine.step(world.router, 2)
    [again] = engine.last.values()
    world.router.hear(engine.seat, Events((again,)))
    world.check_text(client)
    world.die(engine)
    engine.step(world.router, 2)  # it woke up, and does not know
    world.router.hear(engine.seat, Events((again,)))
    world.finish()
    assert client.reason() == "length"
    world.check_text(client)


def test_an_answer_with_a_hole_is_not_shown() -> None:
    world = World()
    client = world.ask()
    world.read()
    engine = world.on(client)
    engine.advance(next(iter(engine.asks)), 2)  # lost on its way
    engine.step(world.router, 1)
    assert engine.closed
    world.engines.remove(engine)
    world.finish()
    assert client.reason() == "length"
    world.check_text(client)


def test_one_that_is_silent_is_left_and_what_it_says_later_is_dropped() -> None:
    world = World()
    begun, fresh = world.ask(), world.ask()
    world.read()
    silent = world.on(begun)
    silent.step(world.router, 2)
    other = next(e for e in world.engines if e is not silent)
    for _ in range(7):
        world.pass_time(1.0)
        other.beat(world.router)
    assert silent.seat.state == "quiet" and not silent.closed
    assert world.ask() and world.ask() and not silent.seat.flights
    late = list(silent.asks)
    silent.step(world.router, 1)  # it wakes up, and has not read the cancels yet
    assert silent.seat.state == "ready" and world.router.counters.get("late") == len(late)
    world.finish()
    for client in (begun, fresh):
        assert client.reason() == "length"
        world.check_text(client)


def test_without_resume_a_stream_waits_for_the_silent_one_until_it_is_given_up() -> None:
    world = World(resume=False)
    begun = world.ask()
    world.read()
    silent = world.on(begun)
    silent.step(world.router, 2)
    other = next(e for e in world.engines if e is not silent)
    for _ in range(30):
        world.pass_time(1.0)
        other.beat(world.router)
    assert not begun.over
    silent.step(world.router, 1)
    assert silent.seat.state == "ready" and len(begun.tokens["r3-0"]) == 3
    for _ in range(61):
        world.pass_time(1.0)
        other.beat(world.router)
    assert silent.closed and "has not answered" in begun.error()


def test_a_pause_of_the_front_itself_is_no_silence() -> None:
    world = World()
    client = world.ask()
    world.read()
    world.now += 1000.0
    world.router.tick()
    assert len(world.router.seats) == 2
    world.finish()
    assert client.reason() == "length"


def test_a_pause_of_the_front_itself_is_not_taken_from_those_that_wait_for_an_engine() -> None:
    world = World(engines=1)
    client = world.ask()
    world.read()
    world.engines[0].step(world.router, 1)
    world.die(world.engines[0])
    world.pass_time(10.0)
    world.now += 1000.0
    world.router.tick()
    assert not client.over
    world.pass_time(19.0)
    assert not client.over
    world.add()
    world.finish()
    assert client.reason() == "length"
    world.check_text(client)


def test_a_full_fleet_refuses_and_a_moved_request_waits_for_room() -> None:
    world = World(engines=0)
    a, b = world.add(room=1), world.add(room=1)
    first, second = world.ask(), world.ask()
    world.read()
    world.read()
    third = world.ask()
    world.read()
    world.read()
    assert isinstance(third.opened[0], Overloaded | DeepdraftError)
    assert getattr(third.opened[0], "http_status", 0) == 503
    a.step(world.router, 1)
    world.die(a)
    world.read()
    assert world.router.num_homeless == 1, "the other one is full"
    b.step(world.router, 10)
    world.pass_time(1.0)
    world.finish()
    for client in (first, second):
        assert client.reason() == "length"
        world.check_text(client)


def test_all_gone() -> None:
    world = World()
    client = world.ask()
    world.read()
    world.on(client).step(world.router, 1)
    for engine in list(world.engines):
        world.die(engine)
    refused = world.ask()
    assert getattr(refused.opened[0], "http_status", 0) == 503
    world.pass_time(20.0)
    assert not client.over
    world.pass_time(11.0)
    assert "no replica" in client.error() and world.router.num_flights == 0


def test_a_request_that_comes_back_in_time_goes_on() -> None:
    world = World(engines=1)
    client = world.ask(deadline_s=50.0)
    world.read()
    world.engines[0].step(world.router, 1)
    world.die(world.engines[0])
    world.pass_time(20.0)
    engine = world.add()
    engine.read(world.router)
    [ask] = engine.asks.values()
    assert ask.deadline_s == pytest.approx(30.0) and len(ask.generated_ids) == 1
    world.finish()
    assert client.reason() == "length"


def test_a_request_whose_time_is_up_while_it_waits() -> None:
    world = World(engines=1)
    client = world.ask(deadline_s=5.0)
    world.read()
    world.die(world.engines[0])
    world.pass_time(6.0)
    assert client.reason() == "timeout"


def test_a_request_that_kills_its_engines_is_not_passed_on_for_ever() -> None:
    world = World(engines=5)
    client = world.ask()
    for _ in range(MOST_LOSSES):
        world.read()
        world.die(world.on(client))
    assert f"{MOST_LOSSES} replicas were lost" in client.error()
    assert len(world.engines) == 5 - MOST_LOSSES


def test_cancelled_while_it_moves_and_while_it_waits() -> None:
    world = World(engines=1)
    client = world.ask()
    world.read()
    world.die(world.engines[0])
    world.router.cancel("r2-0")
    assert client.reason() == "abort" and world.router.num_flights == 0
    engine = world.add()
    early = world.ask()
    world.router.cancel(early.requests[0].request_id)
    assert isinstance(early.opened[0], Overloaded) and not early.ends
    world.finish()
    assert not engine.asks


def test_one_that_leaves_gives_back_what_it_has() -> None:
    world = World()
    begun, fresh = world.ask(), world.ask()
    world.read()
    leaving = world.on(begun)
    leaving.step(world.router, 2)
    leaving.beat(world.router, "draining")
    more = [world.ask() for _ in range(4)]
    world.read()
    assert all(world.on(c) is not leaving for c in more)
    leaving.end(world.router, "abort")
    world.finish()
    for client in (begun, fresh, *more):
        assert client.reason() == "length"
        world.check_text(client)


def test_a_last_one_that_leaves_does_not_hold_streams_for_long() -> None:
    world = World(engines=1)
    client = world.ask()
    world.read()
    world.engines[0].step(world.router, 2)
    world.engines[0].beat(world.router, "draining")
    world.engines[0].end(world.router, "abort")
    for _ in range(6):
        world.engines[0].beat(world.router, "draining")
        world.pass_time(1.0)
    assert "no replica" in client.error()


def test_a_failure_of_a_request_is_tried_once_more_elsewhere() -> None:
    world = World(engines=3)
    client = world.ask()
    world.read()
    first = world.on(client)
    first.end(world.router, "error", error="the model failed at position 2")
    assert not client.over
    world.read()
    assert world.on(client) is not first
    world.on(client).end(world.router, "error", error="the model failed at position 2")
    assert "position 2" in client.error()
    faulty = world.ask()
    world.read()
    world.on(faulty).end(world.router, "error", error="no token is allowed", at_fault=True)
    assert faulty.ends["r5-0"].at_fault


def test_a_failed_engine_is_left() -> None:
    world = World()
    clients = [world.ask() for _ in range(4)]
    world.read()
    failed = world.engines[0]
    failed.step(world.router, 1)
    failed.end(world.router, "error", error="the engine has stopped", lost=True)
    failed.beat(world.router, "failed")
    assert failed.closed and failed.seat not in world.router.seats
    world.engines.remove(failed)
    world.finish()
    assert all(c.reason() == "length" for c in clients)


def test_another_fingerprint_takes_new_requests_but_no_begun_ones() -> None:
    world = World(engines=0)
    old = world.add()
    begun, fresh = world.ask(), world.ask()
    old.read(world.router)
    old.step(world.router, 0)
    id = next(a for a, f in old.seat.flights.items() if f.source is begun.requests[0])
    world.router.hear(old.seat, Events((old.advance(id, 2),)))
    new = world.add(fingerprint="fp_b")
    world.die(old)
    new.read(world.router)
    assert [a.prompt_ids for a in new.asks.values()] == [fresh.requests[0].prompt_ids]
    changed = FakeEngine("changed")
    changed.seat.identity = replace_struct(old.seat.identity, code="d")
    world.router.join(changed.seat)
    changed.beat(world.router)
    world.pass_time(31.0)
    changed.read(world.router)
    assert begun.requests[0].prompt_ids not in [a.prompt_ids for a in changed.asks.values()]
    assert "no replica" in begun.error(), "nor does one of another program"


def test_usage_steps_and_statistics_of_an_answer_that_moved() -> None:
    world = World()
    client = world.ask(length=4)
    world.read()
    stats = DecodeStats(
        rule="coupled", steps=2, drafted_steps=1, drafts=3, verified=3, accepted=1,
        histogram=(1, 1), average_iteration_ms=10.0, average_accept_length=1.5,
    )  # fmt: skip
    first = CacheUse(num_tokens=5, source="host", provenance="exact")
    engine = world.on(client)
    engine.step(world.router, 2, stats=stats, cached=first)
    world.die(engine)
    world.read()
    second = world.on(client)
    id = next(iter(second.asks))
    progress = PromptProgress(done=1, total=2, tokens_per_second=1.0, seconds_left=1.0)
    world.router.hear(second.seat, Events((Event(id, 2, progress=progress),)))
    second.step(world.router, 2, stats=stats, cached=replace(first, num_tokens=9))
    assert [e.cached and e.cached.num_tokens for e in client.events] == [5, None]
    last = client.events[-1].stats
    assert last is not None and (last.steps, last.accepted, last.histogram) == (4, 2, (2, 2))


def test_requests_go_where_there_is_least_to_do() -> None:
    world = World(engines=3)
    for engine, waiting in zip(world.engines, (0, 5000, 9000), strict=True):
        engine.beat(world.router, running=1, free=8, to_read=waiting, prompt_us=500.0, row_us=9e3)
    for _ in range(12):
        world.ask(length=1)
    world.read()
    assert [len(e.asks) for e in world.engines][2] == 0, "of two the worse one never"
    assert len(world.engines[0].asks) > len(world.engines[1].asks)


def test_a_conversation_stays_where_it_is_while_it_can() -> None:
    world = World(engines=3, sticky=True)
    places: dict[int, set[FakeEngine]] = {}

    def round_of_turns() -> None:
        for chat in range(20):
            client = world.ask(session=RemoteSession(f"chat {chat}", ""))
            world.read()
            places.setdefault(chat, set()).add(world.on(client))
            world.finish()

    round_of_turns()
    round_of_turns()
    assert all(len(p) == 1 for p in places.values())
    assert {e for p in places.values() for e in p} == set(world.engines)
    gone = world.engines[0]
    world.die(gone)
    round_of_turns()
    assert all((len(p) == 2) == (gone in p) for p in places.values())


def test_idle_engines_share_alike() -> None:
    """By what requests took, not by their number: one in ten has a long prompt."""
    world = World(engines=3)
    for i in range(300):
        world.ask(length=1, prompt_ids=(5,) * (900 if i % 10 == 0 else 20))
        world.read()
        for engine in world.engines:
            engine.step(world.router, 10)
    done = [e.seat.rows for e in world.engines]
    assert sum(done) == 30 * 900 + 270 * 20 + 300
    assert max(done) / (sum(done) / 3) < 1.12
    late = world.add()
    assert late.seat.rows == min(done), "a new one does not get all that comes"


def test_what_a_front_knows_itself_is_not_taken_from_late_reports() -> None:
    world = World(engines=1)
    [engine] = world.engines
    seat = engine.seat
    world.ask(length=3)
    world.read()
    engine.beat(world.router, running=1, free=8, to_read=2, prompt_us=500.0, row_us=1e3)
    busy = seat.cost
    world.finish()
    assert seat.cost == 0 < busy, "nothing is at hand, whatever it said before"
    engine.beat(world.router, running=2, waiting=1, free=6, row_us=1e3)
    assert seat.cost == pytest.approx(3 * ANSWER_TOKENS), "another front's three"


class Faults(RuleBasedStateMachine):
    """Anything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(resume=True, engines=2)

    def engine(self, data: Any) -> FakeEngine:
        return data.draw(st.sampled_from(self.world.engines))

    has_engines = precondition(lambda self: bool(self.world.engines))

    @rule(n=st.integers(1, 3), length=st.integers(1, 6), streamed=st.booleans(), rule=st.booleans())
    def ask(self, n: int, length: int, streamed: bool, rule: bool) -> None:
        sampling = SamplingParams(temperature=1.0) if rule else SamplingParams(temperature=0.0)
        speculation = SpeculationParams(rule="token" if rule else None)
        fields = {"sampling": sampling, "speculation": speculation}
        self.world.ask(n=n, length=length, streamed=streamed, **fields)

    @precondition(lambda self: len(self.world.engines) < 4)
    @rule(room=st.integers(1, 9), other=st.booleans())
    def join(self, room: int, other: bool) -> None:
        self.world.add(room=room, fingerprint="fp_b" if other else "fp_a")

    @has_engines
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        self.engine(data).read(self.world.router)

    @has_engines
    @rule(data=st.data(), num=st.integers(1, 3))
    def step(self, data: Any, num: int) -> None:
        self.engine(data).step(self.world.router, num)

    @has_engines
    @rule(data=st.data())
    def repeat(self, data: Any) -> None:
        engine = self.engine(data)
        for event in engine.last.values():
            self.world.router.hear(engine.seat, Events((event,)))

    @has_engines
    @rule(data=st.data())
    def lose_an_event(self, data: Any) -> None:
        engine = self.engine(data)
        for id in list(engine.asks)[:1]:
            engine.advance(id, 1)

    @has_engines
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        self.world.die(self.engine(data))

    @has_engines
    @rule(data=st.data(), state=st.sampled_from(["ready", "draining", "failed"]))
    def beat(self, data: Any, state: str) -> None:
        self.engine(data).beat(self.world.router, state)

    @has_engines
    @rule(data=st.data(), reason=st.sampled_from(["abort", "error"]), lost=st.booleans())
    def end(self, data: Any, reason: str, lost: bool) -> None:
        self.engine(data).end(self.world.router, reason, lost=lost, error="it failed")

    @rule(seconds=st.sampled_from([1.0, 6.0, 70.0]))
    def silence(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        going = [c for c in self.world.clients if not c.over]
        if going:
            client = data.draw(st.sampled_from(going))
            for request in client.requests:
                self.world.router.cancel(request.request_id)
            client.cancelled = True

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.world.engines = [e for e in self.world.engines if not e.closed]
        self.world.router.check()
        for client in self.world.clients:
            self.world.check_text(client)

    def teardown(self) -> None:
        for fingerprint in ("fp_a", "fp_b"):
            self.world.add(fingerprint=fingerprint)
        for _ in range(12):
            self.world.finish()
            self.world.pass_time(1.0)
            for engine in self.world.engines:
                engine.beat(self.world.router)
        for _ in range(40):
            self.world.pass_time(1.0)
            self.nothing_is_wrong()
        self.world.finish()
        self.nothing_is_wrong()
        assert self.world.router.num_flights == 0
        assert all(c.over for c in self.world.clients)


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
