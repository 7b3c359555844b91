"""The queue: order, limits, what a plan holds; and a machine that tries to break the books."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepdraft.engine.request import Request
from deepdraft.engine.scheduler import Scheduler
from deepdraft.errors import Overloaded
from deepdraft.types import GenerateRequest


def request(name: str, num_prompt: int = 5, max_new: int = 3) -> Request:
    source = GenerateRequest(
        request_id=name, prompt_ids=tuple(range(num_prompt)), max_new_tokens=max_new
    )
    return Request(source, lambda event: None)


def names(requests: list[Request]) -> list[str]:
    return [r.request_id for r in requests]


def test_admission_is_first_in_first_out() -> None:
    scheduler = Scheduler(max_queue=8, max_running=2, prefill_chunk=4)
    scheduler.add([request("a"), request("b")])
    scheduler.add([request("c"), request("d")])
    assert names(scheduler.admit()) == ["a", "b"]
    assert scheduler.admit() == []
    scheduler.remove(scheduler.everything()[0])
    assert names(scheduler.admit()) == ["c"]
    assert names(scheduler.everything()) == ["b", "c", "d"]


def test_a_full_queue_refuses_a_group_as_a_whole() -> None:
    scheduler = Scheduler(max_queue=2, max_running=1, prefill_chunk=4)
    scheduler.add([request("a"), request("b")])
    with pytest.raises(Overloaded, match="the queue is full"):
        scheduler.add([request("c"), request("d")])
    assert names(scheduler.everything()) == ["a", "b"]
    scheduler.add([request("c")])
    with pytest.raises(Overloaded):
        scheduler.add([request("d")])


def test_a_prompt_is_cut_into_chunks_and_answers_go_on_meanwhile() -> None:
    scheduler = Scheduler(max_queue=8, max_running=2, prefill_chunk=4)
    first, second = request("first", 3), request("second", 10)
    scheduler.add([first, second])
    scheduler.admit()
    plan = scheduler.plan()
    assert plan is not None and plan.prefill is not None
    assert (plan.prefill.request, plan.prefill.start, plan.prefill.end) == (first, 0, 3)
    assert plan.prefill.final and plan.decode == ()
    first.num_computed = 3
    chunks = []
    while not second.prefilled:
        plan = scheduler.plan()
        assert plan is not None and plan.prefill is not None
        assert plan.decode == (first,)
        chunks.append((plan.prefill.start, plan.prefill.end, plan.prefill.final))
        second.num_computed = plan.prefill.end
    assert chunks == [(0, 4, False), (4, 8, False), (8, 10, True)]
    plan = scheduler.plan()
    assert plan is not None and plan.prefill is None and plan.decode == (first, second)


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(max_queue=1, max_running=1, prefill_chunk=4)
    assert scheduler.idle and scheduler.plan() is None


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


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancellations and steps against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(max_queue=4, max_running=2, prefill_chunk=3)
        self.model: list[Request] = []
        self.num_made = 0

    @rule(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=3))
    def arrive(self, lengths: list[int]) -> None:
        group = [request(str(self.num_made + i), n) for i, n in enumerate(lengths)]
        self.num_made += len(group)
        if len(self.model) + len(group) <= 4 + 2:
            self.scheduler.add(group)
            self.model += group
        else:
            with pytest.raises(Overloaded):
                self.scheduler.add(group)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.model)).cancelled = True

    @rule()
    def step(self) -> None:
        for gone in self.scheduler.cancelled():
            self.scheduler.remove(gone)
            self.model.remove(gone)
        for admitted in self.scheduler.admit():
            admitted.handle = object()
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.model)
        if plan is None:
            return
        if plan.prefill is not None:
            plan.prefill.request.num_computed = plan.prefill.end
        for running in plan.decode:
            reason = running.append(7)
            if reason is not None:
                self.scheduler.remove(running)
                running.finished = reason
                self.model.remove(running)

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check()
        assert self.scheduler.everything() == self.model


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
