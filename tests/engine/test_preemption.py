"""Preemption in the engine: the same tokens whoever makes room for whom, and whatever fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepdraft.config import EngineConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.load import load_engine
from deepdraft.engine.runner import Runner
from deepdraft.errors import EngineError, StateError
from deepdraft.server.service import bundled_checkpoint
from deepdraft.types import GenerateRequest, SamplingParams, TokenEvent

from .fake import FakeSequence, ParkingRunner

Sink = Callable[[TokenEvent], None]


class Manual:
    """An engine that steps when a test says so, by a clock that a test moves."""

    def __init__(self, runner: Any, **options: Any) -> None:
        self.now = 0.0
        self.engine = Engine(runner, clock=lambda: self.now, **options)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def ask(self, name: str, prompt: tuple[int, ...], num: int = 8, **fields: Any) -> None:
        self.tokens[name] = []

        def sink(event: TokenEvent) -> None:
            self.tokens[name] += event.token_ids
            if event.finish_reason is not None:
                self.reasons[name] = event.finish_reason
                self.errors[name] = event.error or ""

        fields.setdefault("sampling", SamplingParams(temperature=0.0))
        request = GenerateRequest(request_id=name, prompt_ids=prompt, max_new_tokens=num, **fields)
        self.engine.submit([request], [sink])

    def step(self, times: int = 1, passed: float = 1.0) -> None:
        for _ in range(times):
            self.now += passed
            with torch.inference_mode():
                self.engine._step_once()
            self.engine._scheduler.check()

    def finish(self) -> None:
        while not self.engine._scheduler.idle:
            self.step()

    def stat(self, name: str) -> int:
        return self.engine.stats().get(name, 0)


def runner(**options: Any) -> ParkingRunner:
    return ParkingRunner(lambda p: [p[0] + i for i in range(30)], **options)


def crowd(one: Manual, num: int = 12) -> None:
    """Two of tenant a that run, and one of b that waits for a place."""
    one.ask("a0", (50, 2), num, tenant="a")
    one.ask("a1", (90, 2, 3), num, tenant="a")
    one.step(3)
    one.ask("b", (150, 2), num, tenant="b")


EXPECTED = {"a0": [*range(50, 62)], "a1": [*range(90, 102)], "b": [*range(150, 162)]}


def test_a_preempted_request_goes_on_without_recompute() -> None:
    fake = runner()
    one = Manual(fake, max_running=8, max_parked=1)
    crowd(one)
    one.step(2)
    assert len(fake.open_handles) == 2 and one.stat("parked") == 1 and one.stat("preemptions") == 1
    so_far = list(one.tokens["a1"])
    one.step(3)
    assert one.tokens["a1"] == so_far and len(one.tokens["b"]) > 2
    one.finish()
    assert one.tokens == EXPECTED and set(one.reasons.values()) == {"length"}
    assert sum(fake.chunks) == 7, "every prompt was read once"
    assert fake.open_handles == set() and one.stat("recomputed") == 0


def test_a_sequence_that_is_lost_is_computed_again() -> None:
    fake = runner()

    def fault(parked: FakeSequence) -> None:
        raise StateError("the memory was taken")

    fake.unpark_fault = fault
    one = Manual(fake, max_running=8, max_parked=1, prefill_chunk=4)
    crowd(one)
    one.finish()
    # The fake's script depends on where the prompt ends; it reads the replayed answer as a prompt.
    assert one.tokens["a0"] == EXPECTED["a0"] and one.tokens["b"] == EXPECTED["b"]
    assert len(one.tokens["a1"]) == 12 and one.stat("recomputed") == 1
    assert set(one.reasons.values()) == {"length"} and fake.open_handles == set()


def test_a_sequence_that_cannot_be_parked_runs_on() -> None:
    fake = runner()

    def fault(handle: FakeSequence) -> None:
        raise MemoryError

    fake.park_fault = fault
    one = Manual(fake, max_running=8, max_parked=1)
    crowd(one)
    one.finish()
    assert one.tokens == EXPECTED and one.stat("preemptions") == 0


def test_a_preempted_request_is_cancelled_and_runs_out_of_time() -> None:
    fake = runner()
    one = Manual(fake, max_running=8, max_parked=1)
    one.ask("a0", (50, 2), 20, tenant="a")
    one.ask("a1", (90, 2), 20, tenant="a", deadline_s=9.0)
    one.step(3)
    one.ask("b", (150, 2), 20, tenant="b")
    one.step(2)
    assert one.stat("parked") == 1
    one.step(6)
    assert one.reasons == {"a1": "timeout"} and one.stat("parked") == 0
    one.ask("c", (170, 2), 20, tenant="c", deadline_s=1.0)
    one.step(2)
    assert one.reasons["c"] == "timeout", "waiting"
    one.finish()
    assert one.reasons["a0"] == one.reasons["b"] == "length" and fake.open_handles == set()
    crowd(one, 20)
    one.step(2)
    one.engine.cancel("a1")
    one.finish()
    assert one.reasons["a1"] == "abort" and fake.open_handles == set()


@pytest.mark.parametrize("state", ["waiting", "reading", "decoding", "preempted"])
def test_a_request_that_is_cancelled_ends_within_a_step(state: str) -> None:
    fake = runner(max_tokens=1000)
    one = Manual(fake, max_running=8, max_parked=1, prefill_chunk=8)
    victim = {"waiting": "b", "reading": "c", "decoding": "a0", "preempted": "a1"}[state]
    if state == "reading":
        one.ask("c", (5,) * 500)
    else:
        crowd(one, 20)
    one.step(0 if state == "waiting" else 2)
    assert one.stat("parked") == (state in ("decoding", "preempted"))
    read, said = sum(fake.chunks), len(one.tokens[victim])
    assert (said > 0) == (state in ("decoding", "preempted"))
    one.engine.cancel(victim)
    one.step()
    assert one.reasons == {victim: "abort"} and len(one.tokens[victim]) == said
    assert state != "reading" or sum(fake.chunks) == read, "more of its prompt was read"
    one.finish()
    assert fake.open_handles == set()


def test_a_running_request_out_of_time_ends_with_what_it_has() -> None:
    one = Manual(runner())
    one.ask("a", (50, 2), 100, deadline_s=5.0)
    one.finish()
    assert one.reasons == {"a": "timeout"} and one.tokens["a"] == [50, 51, 52, 53]


class Panic(BaseException):
    """As a library written in Rust raises it."""


class BadMatcher:
    """Panics at the beginning, or at its third token."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_tokens = 0
        self.is_finished = False

    def mask(self) -> None:
        if self.where == "first mask" or (self.where == "mask" and self.num_tokens == 2):
            raise Panic("index out of range")

    def advance(self, token_id: int) -> bool:
        self.num_tokens += 1
        if self.where == "advance" and self.num_tokens == 3:
            raise Panic("index out of range")
        return True

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens


class BadGrammar:
    def __init__(self, where: str) -> None:
        self.where = where

    def matcher(self) -> BadMatcher:
        if self.where == "matcher":
            raise Panic("no matcher")
        return BadMatcher(self.where)


@pytest.mark.parametrize("where", ["matcher", "first mask", "mask", "advance"])
def test_a_panic_ends_its_own_request_only(where: str) -> None:
    fake = runner()
    one = Manual(fake)
    one.ask("bad", (90, 2), grammar=BadGrammar(where))
    one.ask("good", (50, 2))
    one.finish()
    assert one.reasons == {"bad": "error", "good": "length"}
    assert one.errors["bad"].endswith("Panic") and "index" not in one.errors["bad"]
    assert one.tokens["bad"] == ([90, 91] if where in ("mask", "advance") else [])
    assert one.tokens["good"] == [*range(50, 58)] and fake.open_handles == set()


def test_rows_are_charged_to_their_tenants() -> None:
    one = Manual(runner(num_sequences=8), max_running=8)
    one.ask("a", (50,) * 40, 5, tenant="a")
    one.ask("b", (50, 2), 5, tenant="b")
    one.step(3)
    used = {name: t.used for name, t in one.engine._scheduler._tenants._active.items()}
    assert used == {"a": 42.0, "b": 4.0}


# The bundled model: real sequences, drafts, sampling


def ask_all(one: Manual, texts: list[tuple[int, ...]]) -> None:
    for i, prompt in enumerate(texts):
        sampling = SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, logprobs=1)
        one.ask(str(i), prompt, 24, tenant="ab"[i == 3], sampling=sampling)
        one.step(2)


@pytest.fixture(scope="module")
def demo() -> Runner:
    options = EngineConfig(max_running=3, max_context=256, schedule="all", kv_memory=0)
    model = load_engine(bundled_checkpoint(), options)
    assert isinstance(model.runner, Runner)
    return model.runner


@pytest.mark.parametrize("lost", [False, True])
def test_answers_of_the_bundled_model_do_not_depend_on_company(
    demo: Runner, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [tuple((13 * i + 7 * k) % 3000 + 5 for k in range(9 + 40 * i)) for i in range(4)]
    alone = {}
    for i, prompt in enumerate(texts):
        one = Manual(demo, max_running=1, prefill_chunk=256)
        sampling = SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, logprobs=1)
        one.ask(str(i), prompt, 24, sampling=sampling)
        one.finish()
        alone |= one.tokens
    if lost:

        def fault(parked: object) -> None:
            raise EngineError("gone")

        monkeypatch.setattr(demo, "unpark", fault)
    one = Manual(demo, max_running=3, prefill_chunk=32, max_parked=1, preempt_after_s=0.5)
    ask_all(one, texts)
    one.finish()
    assert one.stat("preemptions") >= 1 and one.stat("recomputed") == (
        one.stat("preemptions") if lost else 0
    )
    assert one.tokens == alone
    assert demo.num_free == 3
