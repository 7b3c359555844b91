"""Who runs when: order, limits, shares, preemption, what a plan holds; and machines that try to
break the books and the promises."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepdraft.engine.fair import RateLimited, TenantLimits
from deepdraft.engine.pace import FIRST_ROWS, LEAST_ROWS, Pace
from deepdraft.engine.request import Request
from deepdraft.engine.scheduler import Limits, Scheduler
from deepdraft.errors import Overloaded, RequestError
from deepdraft.types import GenerateRequest


def request(name: str, num_prompt: int = 5, max_new: int = 3, **fields: Any) -> Request:
    source = GenerateRequest(
        request_id=name, prompt_ids=tuple(range(num_prompt)), max_new_tokens=max_new, **fields
    )
    return Request(source, lambda event: None)


def scheduler(pace: Pace | None = None, **limits: Any) -> Scheduler:
    return Scheduler(Limits(**limits), pace=pace)


def names(requests: list[Request]) -> list[str]:
    return [r.request_id for r in requests]


def prefill(*requests: Request) -> None:
    for one in requests:
        one.num_computed = one.num_context


# Order and limits


def test_admission_is_first_in_first_out() -> None:
    one = scheduler(max_queue=8, max_running=2)
    one.add([request("a"), request("b")])
    one.add([request("c"), request("d")])
    assert names(one.admit()) == ["a", "b"]
    assert one.admit() == []
    one.remove(one.everything()[0])
    assert names(one.admit()) == ["c"]
    assert names(one.everything()) == ["b", "c", "d"]


def test_a_full_queue_refuses_a_group_as_a_whole() -> None:
    one = scheduler(max_queue=2, max_running=1)
    one.add([request("a"), request("b")])
    with pytest.raises(Overloaded, match="the queue is full"):
        one.add([request("c"), request("d")])
    assert names(one.everything()) == ["a", "b"]
    one.add([request("c")])
    with pytest.raises(Overloaded):
        one.add([request("d")])
    with pytest.raises(RequestError, match="at most 3 at once"):
        one.add([request(str(i)) for i in range(4)])


def test_a_lower_number_goes_first_within_a_tenant() -> None:
    one = scheduler(max_running=1)
    one.add([request("a", priority=0), request("b", priority=5), request("c", priority=-1)])
    one.add([request("d", priority=-1)])
    order = []
    while admitted := one.admit():
        order += names(admitted)
        one.remove(admitted[0])
    assert order == ["c", "d", "a", "b"]


def test_priority_does_not_reach_into_another_tenant() -> None:
    one = scheduler(max_running=2)
    one.add([request(f"a{i}", priority=-100, tenant="a") for i in range(4)])
    one.add([request("b", priority=100, tenant="b")])
    assert names(one.admit()) == ["a0", "b"]


def test_caps_of_a_tenant() -> None:
    capped = TenantLimits(max_running=1, max_queue=2)
    one = Scheduler(Limits(max_running=4), tenants={"a": capped})
    one.add([request(f"a{i}", tenant="a") for i in range(3)])
    with pytest.raises(RateLimited, match="3 requests waiting and 0 running"):
        one.add([request("a3", tenant="a")])
    assert names(one.admit()) == ["a0"], "one at a time, however many places are free"
    with pytest.raises(RateLimited, match="2 requests waiting and 1 running"):
        one.add([request("a3", tenant="a")])
    with pytest.raises(RequestError, match="at most 3 at once"):
        one.add([request(str(i), tenant="a") for i in range(4)])
    one.add([request("b", tenant="b")])
    assert names(one.admit()) == ["b"]
    one.remove(one.everything()[0])
    assert names(one.admit()) == ["a1"]


def test_one_tenant_does_not_fill_the_queue_of_all() -> None:
    one = scheduler(max_queue=16, max_running=2)
    with pytest.raises(RequestError, match="at most 16 at once"):
        one.add([request(f"all{i}", tenant="a") for i in range(17)])
    one.add([request(f"a{i}", tenant="a") for i in range(16)])
    with pytest.raises(Overloaded, match="is for others"):
        one.add([request("more", tenant="a")])
    one.add([request("b", tenant="b")])
    alone = scheduler(max_queue=16, max_running=2)
    alone.add([request(f"{i}") for i in range(18)])  # who has no name has no others


def test_weights_share_a_busy_server() -> None:
    one = Scheduler(Limits(max_running=6), tenants={"big": TenantLimits(weight=2.0)})
    for i in range(10):
        one.add([request(f"small{i}", tenant="small"), request(f"big{i}", tenant="big")][::-1][:1])
        one.add([request(f"small{i}", tenant="small")])
    admitted = names(one.admit())
    assert sum(n.startswith("big") for n in admitted) == 4


def test_of_equal_shares_who_had_less_goes_first() -> None:
    one = scheduler(max_running=2)
    one.add([request("a", tenant="a")])
    one.add([request("b", tenant="b")])
    a, b = one.admit()
    one.charge(a, 100)
    one.charge(b, 10)
    one.add([request("a2", tenant="a")])
    one.add([request("b2", tenant="b")])
    one.remove(a)
    one.remove(b)
    assert names(one.admit())[0] == "b2"


def test_deadlines() -> None:
    one = scheduler(max_running=1)
    one.add([request("a", deadline_s=5.0), request("b", deadline_s=2.0), request("c")], 100.0)
    one.admit()
    assert names(one.expired(101.9)) == []
    assert names(one.expired(102.0)) == ["b"]
    assert sorted(names(one.expired(1e9))) == ["a", "b"]


# Preemption


def park(one: Scheduler, victim: Request) -> None:
    victim.handle, victim.parked = None, object()
    one.park(victim)


def resume(*requests: Request) -> None:
    for r in requests:
        r.handle, r.parked = object(), None


def test_a_starved_tenant_gets_the_place_of_the_youngest_of_the_other() -> None:
    one = scheduler(max_running=3, max_parked=1, preempt_after_s=1.0)
    one.add([request(f"a{i}", tenant="a") for i in range(5)], 0.0)
    resume(*one.admit())
    one.add([request("b", tenant="b")], 10.0)
    assert one.victim(10.9) is None, "it has not waited long enough"
    victim = one.victim(11.0)
    assert victim is not None and victim.request_id == "a2"
    park(one, victim)
    admitted = one.admit()
    resume(*admitted)
    assert names(admitted) == ["b"], "the place is for the one that it was taken for"
    assert one.victim(1e9) is None, "2 and 1 are as even as they get"
    one.remove(admitted[0])
    admitted = one.admit()
    assert names(admitted) == ["a2"], "preempted before the later ones"
    resume(*admitted)
    one.check()


def test_the_more_urgent_of_one_tenant_preempts() -> None:
    one = scheduler(max_running=1, max_parked=1, preempt_after_s=0.0)
    one.add([request("a")])
    resume(*one.admit())
    one.add([request("equal")])
    assert one.victim(9.0) is None
    one.add([request("urgent", priority=-1)])
    victim = one.victim(9.0)
    assert victim is not None and victim.request_id == "a"
    park(one, victim)
    assert names(one.admit()) == ["urgent"]
    assert one.victim(9.0) is None


@pytest.mark.parametrize("max_parked, pinned", [(0, False), (2, True)])
def test_no_room_to_park_and_no_way_to(max_parked: int, pinned: bool) -> None:
    one = scheduler(max_running=2, max_parked=max_parked, preempt_after_s=0.0)
    one.add([request("a0", tenant="a"), request("a1", tenant="a")])
    for running in one.admit():
        running.pinned = pinned
    one.add([request("b", tenant="b")])
    assert one.victim(100.0) is None


# Steps


def test_a_prompt_is_cut_into_chunks_and_answers_go_on_meanwhile() -> None:
    one = scheduler(max_running=2, step_rows=5)
    first, second = request("first", 3), request("second", 10)
    one.add([first])
    one.admit()
    plan = one.plan()
    assert plan is not None and plan.decode == ()
    (chunk,) = plan.prefill
    assert (chunk.request, chunk.start, chunk.end, chunk.final) == (first, 0, 3, True)
    prefill(first)
    one.add([second])
    one.admit()
    chunks = []
    while not second.prefilled:
        plan = one.plan()
        assert plan is not None and plan.decode == (first,) and plan.num_rows <= 5
        (chunk,) = plan.prefill
        chunks.append((chunk.start, chunk.end, chunk.final))
        second.num_computed = chunk.end
    assert chunks == [(0, 4, False), (4, 8, False), (8, 10, True)]
    plan = one.plan()
    assert plan is not None and plan.prefill == () and plan.decode == (first, second)


def test_a_lost_sequence_is_computed_again_with_its_answer() -> None:
    one = scheduler(max_running=1, step_rows=4)
    lost = request("a", 5, max_new=9)
    one.add([lost])
    one.admit()
    prefill(lost)
    for token_id in (70, 71, 72):
        lost.append(token_id)
    lost.begin_again()
    seen: list[int] = []
    while not lost.prefilled:
        plan = one.plan()
        assert plan is not None
        (chunk,) = plan.prefill
        seen += lost.context(chunk.start, chunk.end)
        lost.num_computed = chunk.end
    assert seen == [0, 1, 2, 3, 4, 70, 71], "the last token goes into the next step"
    plan = one.plan()
    assert plan is not None and plan.decode == (lost,)


def test_a_long_prompt_takes_no_more_than_the_pace_allows() -> None:
    pace = Pace(10.0)
    one = scheduler(pace, max_running=2, step_rows=1000)
    long, other = request("long", 900), request("other", 2)
    one.add([long])
    one.admit()
    plan = one.plan()
    assert plan is not None and plan.num_rows == 900, "nobody waits for a token"
    one.add([other])
    one.admit()
    prefill(other)
    for rows, ms, allowed in ((None, 0.0, FIRST_ROWS), (32, 32.0, 10), (10, 40.0, LEAST_ROWS)):
        if rows is not None:
            pace.observe(rows, ms)
        plan = one.plan()
        assert plan is not None and plan.decode == (other,)
        assert plan.prefill[0].end == allowed


def test_short_prompts_are_finished_beside_a_long_one() -> None:
    one = scheduler(max_running=4, step_rows=100)
    one.add([request("long", 500), request("s1", 30), request("s2", 10), request("s3", 40)])
    one.admit()
    plan = one.plan()
    assert plan is not None
    assert [(c.request.request_id, c.end) for c in plan.prefill] == [
        ("long", 50),
        ("s2", 10),
        ("s1", 30),
    ]
    one = scheduler(max_running=2, step_rows=100)
    one.add([request("long", 500), request("s1", 20)])
    one.admit()
    plan = one.plan()
    assert plan is not None and plan.num_rows == 100, "no room is left over"


def test_prompts_of_tenants_take_turns() -> None:
    one = scheduler(max_running=2, step_rows=10)
    one.add([request("a", 500, tenant="a")])
    one.add([request("b", 500, tenant="b")])
    one.admit()
    turns = []
    for _ in range(6):
        plan = one.plan()
        assert plan is not None
        for chunk in plan.prefill:
            turns.append(chunk.request.request_id)
            one.charge(chunk.request, chunk.end - chunk.start)
            chunk.request.num_computed = chunk.end
    assert turns == ["a", "b"] * 3


def test_an_idle_scheduler_plans_nothing() -> None:
    one = scheduler()
    assert one.idle and one.plan() is None and one.victim(0.0) is None


@given(
    fixed=st.floats(0.0, 5.0),
    per_row=st.floats(0.01, 3.0),
    stall=st.floats(20.0, 200.0),
)
def test_the_pace_settles_below_the_stall(fixed: float, per_row: float, stall: float) -> None:
    """A machine with a fixed cost of a part and a cost a row: parts end up taking what is
    allowed, or the least size."""
    pace = Pace(stall)
    for _ in range(40):
        rows = pace.rows
        pace.observe(rows, fixed + per_row * rows)
    rows = pace.rows
    assert rows == LEAST_ROWS or fixed + per_row * rows <= 1.05 * stall
    assert fixed + per_row * (rows + 2) >= 0.8 * stall


def test_a_pace_of_nothing_measured_or_no_time() -> None:
    pace = Pace(50.0)
    pace.observe(0, 3.0)
    assert pace.rows == FIRST_ROWS
    pace.observe(10, 0.0)
    assert pace.rows > 1 << 20


def test_a_machine_whose_parts_cost_the_same_reads_no_less_than_is_worth_it() -> None:
    pace = Pace(10.0, least_rows=256)
    assert pace.rows == 256
    for _ in range(20):
        pace.observe(pace.rows, 30.0)
    assert pace.rows == 256


def test_answers_end_at_a_stop_token_or_at_the_limit() -> None:
    source = GenerateRequest(
        request_id="a", prompt_ids=(1, 2), max_new_tokens=3, stop_token_ids=frozenset({9})
    )
    one = Request(source, lambda event: None)
    assert [one.append(5), one.append(5), one.append(6)] == [None, None, "length"]
    assert one.output_counts == {5: 2, 6: 1} and one.next_position == 5
    two = Request(source, lambda event: None)
    assert two.append(9) == "stop"


def test_importing_the_scheduler_does_not_import_torch() -> None:
    code = "import sys, deepdraft.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Fairness


class Sim:
    """A machine on which a step takes 1 whatever it holds; preempted sequences are kept."""

    def __init__(self, one: Scheduler) -> None:
        self.one, self.now = one, 0.0
        self.ended: dict[str, float] = {}

    def step(self) -> None:
        one = self.one
        while (victim := one.victim(self.now)) is not None:
            park(one, victim)
            resume(*one.admit())
        resume(*one.admit())
        plan = one.plan()
        assert plan is not None
        self.now += 1
        for chunk in plan.prefill:
            chunk.request.num_computed = chunk.end
            one.charge(chunk.request, chunk.end - chunk.start)
            if chunk.final:
                self.token(chunk.request)
        for running in plan.decode:
            one.charge(running, 1)
            self.token(running)

    def token(self, running: Request) -> None:
        if running.append(7) is not None:
            running.finished = "length"
            self.one.remove(running)
            self.ended[running.request_id] = self.now


def time_of(length: int, prompt: int, *, crowd: int, before: int, **limits: Any) -> float:
    """When a single request of tenant b ends that comes `before` steps after a crowd of a's."""
    sim = Sim(scheduler(max_queue=1000, step_rows=64, **limits))
    if crowd:
        sim.one.add([request(f"a{i}", prompt, length, tenant="a") for i in range(crowd)], 0.0)
        for _ in range(before):
            if len(sim.ended) == crowd:  # short answers: nothing is left to step
                break
            sim.step()
    sim.one.add([request("b", prompt, length, tenant="b")], sim.now)
    begin = sim.now
    while "b" not in sim.ended:
        sim.step()
        sim.one.check()
    return sim.ended["b"] - begin


@settings(max_examples=40, deadline=None)
@example(length=2, prompt=1, max_running=5, before=81, max_parked=0)
@given(
    length=st.integers(2, 60),
    prompt=st.integers(1, 150),
    max_running=st.integers(1, 8),
    before=st.integers(0, 100),
    max_parked=st.integers(0, 2),
)
def test_a_queue_of_200_delays_another_tenant_by_at_most_two_request_times(
    length: int, prompt: int, max_running: int, before: int, max_parked: int
) -> None:
    sizes = {"max_running": max_running, "max_parked": max_parked, "preempt_after_s": 5.0}
    alone = time_of(length, prompt, crowd=0, before=0, **sizes)
    # A crowded prompt is read beside others of its own kind.
    beside = alone + (prompt // 64 + 1) * max_running
    crowded = time_of(length, prompt, crowd=200, before=before, **sizes)
    assert crowded <= 2 * beside + 1


def test_preemption_bounds_the_wait_where_requests_are_long() -> None:
    sizes = {"max_running": 4, "preempt_after_s": 5.0}
    without = time_of(500, 10, crowd=200, before=20, max_parked=0, **sizes)
    with_it = time_of(500, 10, crowd=200, before=20, max_parked=1, **sizes)
    assert without > 900 and with_it < 515


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancellations, deadlines, preemptions, losses and steps against a set."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Scheduler(
            Limits(max_queue=6, max_running=3, step_rows=8, max_parked=2, preempt_after_s=3.0),
            tenants={
                "a": TenantLimits(max_running=2, max_queue=3),
                "b": TenantLimits(weight=2.0),
            },
            pace=Pace(10.0),
        )
        self.model: set[Request] = set()
        self.num_made, self.now = 0, 0.0
        self.context: dict[Request, list[int]] = {}
        """What the runner has seen of each sequence."""

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        deadline=st.none() | st.integers(1, 30),
    )
    def arrive(self, lengths: list[int], tenant: str, priority: int, deadline: int | None) -> None:
        group = [
            request(
                str(self.num_made + i), n, 6, tenant=tenant, priority=priority, deadline_s=deadline
            )
            for i, n in enumerate(lengths)
        ]
        self.num_made += len(group)
        own = sum(r.tenant == "a" for r in self.model)
        fits = len(self.model) + len(group) <= 6 + 3
        fits_own = tenant != "a" or own + len(group) <= 3 + 2
        if fits and fits_own:
            self.one.add(group, self.now)
            self.model |= set(group)
            return
        with pytest.raises(RateLimited if fits else Overloaded):
            self.one.add(group, self.now)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        by_number = sorted(self.model, key=lambda r: r.number)
        data.draw(st.sampled_from(by_number)).cancelled = True

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        by_number = sorted(self.model, key=lambda r: r.number)
        data.draw(st.sampled_from(by_number)).pinned = True

    @rule(lost=st.booleans(), passed=st.integers(0, 4))
    def step(self, lost: bool, passed: int) -> None:
        self.now += passed
        gone = {*self.one.cancelled(), *self.one.expired(self.now)}
        for one in gone:
            self.end(one)
        while (victim := self.one.victim(self.now)) is not None:
            assert victim.handle is not None and not victim.pinned
            urgent = self.one._tenants.next()
            park(self.one, victim)
            admitted = self.one.admit()
            assert admitted == [urgent]
            self.open(admitted, lost)
        self.open(self.one.admit(), lost)
        plan = self.one.plan()
        assert (plan is None) == (not self.one.num_running)
        assert (plan is None) == (not self.model), "somebody waits and nobody runs"
        if plan is None:
            return
        assert plan.num_rows <= 8
        for chunk in plan.prefill:
            one = chunk.request
            assert one.num_computed == chunk.start < chunk.end <= one.num_context
            self.context[one] += one.context(chunk.start, chunk.end)
            one.num_computed = chunk.end
            self.one.charge(one, chunk.end - chunk.start)
            if chunk.final and not one.output_ids:
                self.token(one)
        for one in plan.decode:
            # A decoded request has had everything before its last token, whatever befell it.
            done = [*one.source.prompt_ids, *one.output_ids]
            assert self.context[one] == done[:-1]
            self.context[one].append(done[-1])
            self.one.charge(one, 1)
            self.token(one)

    def open(self, admitted: list[Request], lost: bool) -> None:
        for one in admitted:
            if one.parked is not None and lost:
                one.begin_again()
            if one.parked is None:
                self.context[one] = []
            resume(one)

    def token(self, one: Request) -> None:
        reason = one.append(100 + len(one.output_ids))
        if reason is not None:
            self.end(one)
            one.finished = reason

    def end(self, one: Request) -> None:
        one.handle = one.parked = None
        self.one.remove(one)
        self.model.remove(one)

    @invariant()
    def books_are_right(self) -> None:
        self.one.check()
        assert set(self.one.everything()) == self.model

    def teardown(self) -> None:
        """Everything is served in the end."""
        for _ in range(2000):
            if not self.model:
                break
            self.step(lost=False, passed=1)
        assert self.one.idle and not list(self.one._tenants._active)


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
