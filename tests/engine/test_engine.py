"""The engine loop over a fake runner: streams, cancellation, faults, draining."""

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepdraft.engine.engine import Engine
from deepdraft.errors import EngineError, Overloaded, PromptTooLong, RequestError
from deepdraft.types import GenerateRequest, SamplingParams, TokenEvent

from .fake import FakeRunner, FakeSequence

EOS = 1
GREEDY = SamplingParams(temperature=0.0)


def ask(name: str = "r", prompt: tuple[int, ...] = (5, 6, 7), **fields: object) -> GenerateRequest:
    values: dict[str, object] = {
        "sampling": GREEDY,
        "max_new_tokens": 50,
        "stop_token_ids": frozenset({EOS}),
        **fields,
    }
    return GenerateRequest(request_id=name, prompt_ids=prompt, **values)  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(runner: FakeRunner, **options: int) -> Iterator[Engine]:
    engine = Engine(runner, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        engine._scheduler.check()
        assert engine._scheduler.idle
        assert runner.open_handles == set(), "a sequence was never closed"


def answer(events: Iterator[TokenEvent]) -> tuple[list[int], str | None]:
    ids: list[int] = []
    reason = None
    for event in events:
        assert reason is None, "an event after the last one"
        ids += event.token_ids
        reason = event.finish_reason
    return ids, reason


def test_an_answer_ends_with_its_stop_token() -> None:
    with serving(FakeRunner(lambda p: [20, 21, 22])) as engine:
        assert answer(engine.generate(ask())) == ([20, 21, 22, EOS], "stop")
        assert answer(engine.generate(ask(max_new_tokens=2))) == ([20, 21], "length")
        assert answer(engine.generate(ask(max_new_tokens=4))) == ([20, 21, 22, EOS], "stop")


def test_the_engine_thread_works_with_the_number_of_threads_torch_was_given() -> None:
    """A new thread's OpenMP starts with all cores, whatever torch was told in another."""
    openmp = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    seen: list[int] = []
    runner = FakeRunner()
    runner.prefill_fault = lambda s, ids: seen.append(openmp.omp_get_max_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        with serving(runner) as engine:
            answer(engine.generate(ask(max_new_tokens=1)))
    finally:
        torch.set_num_threads(before)
    assert seen == [7]


def test_the_runner_sees_every_token_once_and_in_order() -> None:
    runner = FakeRunner(lambda p: [20, 21, 22])
    seen: list[list[int]] = []
    close = runner.close_sequence

    def record(handle: FakeSequence) -> None:
        seen.append(handle.token_ids)
        close(handle)

    runner.close_sequence = record  # type: ignore[method-assign]
    with serving(runner, prefill_chunk=4) as engine:
        answer(engine.generate(ask(prompt=tuple(range(2, 12)))))
    # The stop token itself is never fed: nothing follows it.
    assert seen == [[*range(2, 12), 20, 21, 22]]
    assert runner.chunks == [4, 4, 2]


@pytest.mark.parametrize("max_running", [1, 3])
def test_many_requests_at_once_each_get_their_own_answer(max_running: int) -> None:
    runner = FakeRunner(lambda p: [p[0], p[0] + 1, p[0] + 2])
    with serving(runner, max_running=max_running) as engine:
        streams = [engine.generate(ask(str(i), (50 + i, 3))) for i in range(50)]
        for i, stream in enumerate(streams):
            assert answer(stream) == ([50 + i, 51 + i, 52 + i, EOS], "stop")
    assert runner.most_open == max_running
    assert engine.stats()["finished_stop"] == 50


def test_sampled_answers_do_not_depend_on_company() -> None:
    """The same request alone, and among others in one batch: the same tokens."""

    def sampled(name: str, seed: int) -> GenerateRequest:
        return ask(name, (9, 8, 7), sampling=SamplingParams(seed=seed), max_new_tokens=12)

    def runner() -> FakeRunner:
        return FakeRunner(lambda p: [20] * 12, strength=1.0)

    with serving(runner()) as engine:
        alone = [answer(engine.generate(sampled("x", seed))) for seed in range(5)]
    with serving(runner(), max_running=4) as engine:
        streams = [engine.generate(sampled(str(seed), seed)) for seed in range(5)]
        together = [answer(s) for s in streams]
    assert together == alone
    assert len({tuple(ids) for ids, _ in alone}) == 5, "the seeds have no effect"


def test_a_runner_exception_fails_that_request_only() -> None:
    runner = FakeRunner(lambda p: [20, 21, 22])

    def fault(sequences: list[FakeSequence]) -> None:
        if any(13 in s.token_ids for s in sequences):
            raise RuntimeError("secret detail")

    runner.step_fault = fault
    with serving(runner, max_running=3) as engine:
        good, bad = ask("good", (5, 6)), ask("bad", (13, 6))
        streams = [engine.generate(r) for r in (good, bad)]
        assert answer(streams[0]) == ([20, 21, 22, EOS], "stop")
        events = list(streams[1])
        assert events[-1].finish_reason == "error"
        assert events[-1].error == "the model failed at position 2: RuntimeError"
        assert answer(engine.generate(good)) == ([20, 21, 22, EOS], "stop")


def test_a_sequence_that_a_failed_step_touched_is_not_used_again() -> None:
    runner = FakeRunner(lambda p: [20, 21, 22])
    faults = iter([True])

    def fault(sequences: list[FakeSequence]) -> None:
        if len(sequences) == 2 and next(faults, False):
            sequences[0].token_ids.append(99)
            raise RuntimeError("half a step")

    runner.step_fault = fault
    gate = threading.Event()
    runner.prefill_fault = lambda s, ids: (gate.wait(5), None)[1]
    with serving(runner, max_running=2) as engine:
        streams = [engine.generate(ask(n)) for n in "ab"]
        gate.set()
        outcomes = sorted(answer(s)[1] or "" for s in streams)
    assert outcomes == ["error", "stop"]


def test_a_prefill_or_open_exception_fails_that_request_only() -> None:
    runner = FakeRunner(lambda p: [20])

    def fault(sequence: FakeSequence, token_ids: list[int]) -> None:
        if 13 in token_ids:
            raise ValueError("no")

    runner.prefill_fault = fault
    with serving(runner, prefill_chunk=2) as engine:
        events = list(engine.generate(ask("bad", (2, 3, 4, 13))))
        assert [e.finish_reason for e in events] == ["error"]
        assert events[0].error == "the model failed at prompt tokens 2..4: ValueError"
        open_sequence = runner.open_sequence

        def full() -> FakeSequence:
            raise MemoryError

        runner.open_sequence = full  # type: ignore[method-assign]
        assert answer(engine.generate(ask("full"))) == ([], "error")
        runner.open_sequence = open_sequence  # type: ignore[method-assign]
        assert answer(engine.generate(ask("good"))) == ([20, EOS], "stop")


def test_nan_logits_end_the_request_without_a_garbage_token() -> None:
    runner = FakeRunner(lambda p: [20, 21, 22])

    def spoil(sequence: FakeSequence, logits: torch.Tensor) -> torch.Tensor:
        if sequence.token_ids[0] == 13 and sequence.num_tokens == 4:
            logits[100] = float("nan")
        return logits

    runner.spoil = spoil
    with serving(runner, max_running=2) as engine:
        streams = [engine.generate(ask(str(first), (first, 6, 7))) for first in (13, 5)]
        events = list(streams[0])
        assert [i for e in events for i in e.token_ids] == [20]
        assert events[-1].finish_reason == "error"
        assert "NaN" in (events[-1].error or "") and "position 4" in (events[-1].error or "")
        assert answer(streams[1]) == ([20, 21, 22, EOS], "stop")


def test_cancel_ends_a_running_and_a_waiting_request() -> None:
    runner = FakeRunner(lambda p: [20] * 4000, max_tokens=5000)
    with serving(runner, max_running=1) as engine:
        running = engine.generate(ask("running", max_new_tokens=4000))
        waiting = engine.generate(ask("waiting"))
        next(running)
        engine.cancel("waiting", "unknown")
        assert answer(waiting) == ([], "abort")
        running.close()
        ids, reason = answer(running)
        assert reason == "abort" and len(ids) < 4000
        assert answer(engine.generate(ask("next", max_new_tokens=1))) == ([20], "length")
        engine.cancel("running")


def test_cancel_takes_effect_within_a_long_prompt() -> None:
    runner = FakeRunner(max_tokens=100_000)
    runner.delay_s = 0.002
    started = threading.Event()
    runner.prefill_fault = lambda s, ids: started.set()
    with serving(runner, prefill_chunk=8) as engine:
        stream = engine.generate(ask(prompt=(4,) * 80_000))
        assert started.wait(5)
        stream.close()
        begin = time.monotonic()
        assert answer(stream) == ([], "abort")
        assert time.monotonic() - begin < 15
    assert sum(runner.chunks) < 80_000


@pytest.mark.parametrize("computes_here", [False, True])
def test_the_pace_of_prompts_goes_by_the_time_that_is_theirs(computes_here: bool) -> None:
    """A runner that computes on the engine's thread is not slower for what other programs do."""
    runner = FakeRunner()
    runner.delay_s = 0.05  # on which no processor works
    runner.computes_here = computes_here  # type: ignore[attr-defined]
    with serving(runner, max_stall_ms=10) as engine:
        answer(engine.generate(ask(prompt=(4,) * 100, max_new_tokens=1)))
        assert (engine._pace.rows > 100) == computes_here
        counted = engine.stats()
    assert counted["prompt_parts"] == 1 and counted["prompt_tokens"] == 100
    assert counted["prompt_us"] >= 50_000


def test_requests_that_cannot_run_are_refused_at_once() -> None:
    with serving(FakeRunner(max_tokens=10)) as engine:
        with pytest.raises(PromptTooLong, match="context is 10 tokens; the prompt has 8 and 3"):
            engine.generate(ask(prompt=(4,) * 8, max_new_tokens=3))
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.generate(ask(prompt=()))
        with pytest.raises(RequestError, match=r"token id 300 is outside .* \[0, 300\)"):
            engine.generate(ask(prompt=(300,)))
        with pytest.raises(RequestError, match="token id -1"):
            engine.generate(ask(sampling=SamplingParams(logit_bias=((-1, 1.0),))))
        with pytest.raises(RequestError, match="at least 1"):
            engine.generate(ask(max_new_tokens=0))
        assert answer(engine.generate(ask(prompt=(4,) * 8, max_new_tokens=2)))[1] == "stop"


def test_a_full_queue_refuses_and_recovers() -> None:
    runner = FakeRunner(lambda p: [20])
    gate = threading.Event()
    runner.prefill_fault = lambda s, ids: (gate.wait(5), None)[1]
    with serving(runner, max_queue=2, max_running=1) as engine:
        streams = [engine.generate(ask(str(i))) for i in range(3)]
        with pytest.raises(Overloaded):
            engine.generate(ask("one too many"))
        gate.set()
        assert [answer(s)[1] for s in streams] == ["stop"] * 3
        assert answer(engine.generate(ask("again")))[1] == "stop"


def test_asyncio_streams_mix_and_end() -> None:
    async def run(engine: Engine) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {"a": [], "b": []}
        async for event in engine.stream([ask("a", (30,)), ask("b", (40,))]):
            got[event.request_id] += event.token_ids
        return got

    with serving(FakeRunner(lambda p: [p[0], p[0]])) as engine:
        assert asyncio.run(run(engine)) == {"a": [30, 30, EOS], "b": [40, 40, EOS]}


def test_closing_an_asyncio_stream_cancels_its_requests() -> None:
    runner = FakeRunner(lambda p: [20] * 4000, max_tokens=5000)
    runner.delay_s = 0.001

    async def run(engine: Engine) -> None:
        stream = engine.stream([ask(n, max_new_tokens=4000) for n in "ab"])
        await anext(stream)
        stream.close()
        reasons = [e.finish_reason async for e in stream if e.finish_reason]
        assert reasons == ["abort", "abort"]

    with serving(runner, max_running=2) as engine:
        asyncio.run(run(engine))


def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    runner = FakeRunner(lambda p: [20] * 20)
    runner.delay_s = 0.002
    with serving(runner) as engine:
        stream = engine.generate(ask())
        next(stream)
        engine.begin_drain()
        with pytest.raises(Overloaded, match="shutting down"):
            engine.generate(ask("late"))
        assert engine.drain(10.0)
        assert answer(stream)[1] == "stop"


def test_drain_ends_what_does_not_finish_in_time() -> None:
    runner = FakeRunner(lambda p: [20] * 4000, max_tokens=5000)
    runner.delay_s = 0.002
    with serving(runner) as engine:
        stream = engine.generate(ask(max_new_tokens=4000))
        next(stream)
        assert not engine.drain(0.05)
        assert answer(stream)[1] == "abort"


def test_close_ends_waiting_requests_too() -> None:
    runner = FakeRunner(lambda p: [20] * 4000, max_tokens=5000)
    engine = Engine(runner, max_running=1)
    engine.start()
    streams = [engine.generate(ask(n, max_new_tokens=4000)) for n in "ab"]
    engine.close()
    assert [answer(s)[1] for s in streams] == ["abort", "abort"]
    assert not engine._thread.is_alive()


def test_a_fault_of_the_loop_itself_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(lambda p: [20, 21])
    engine = Engine(runner)

    def broken() -> None:
        raise KeyError("a bug")

    engine._scheduler.plan = broken  # type: ignore[method-assign,assignment]
    stream = engine.generate(ask())
    engine.start()
    events = list(stream)
    assert [e.finish_reason for e in events] == ["error"]
    assert engine.failure == "the engine has stopped: KeyError"
    with pytest.raises(EngineError, match="the engine has stopped"):
        engine.generate(ask("late"))
    engine.close()


def test_a_sink_that_raises_does_not_stop_the_engine() -> None:
    with serving(FakeRunner(lambda p: [20, 21])) as engine:

        def sink(event: TokenEvent) -> None:
            raise OSError("gone")

        engine.submit([ask("rude")], [sink])
        assert answer(engine.generate(ask("good"))) == ([20, 21, EOS], "stop")


def test_warm_up_runs_the_whole_path_and_reports_a_fault() -> None:
    runner = FakeRunner()
    with serving(runner) as engine:
        engine.warm_up()
        assert runner.chunks == [3] and runner.num_steps == 1
        runner.spoil = lambda s, logits: logits * float("nan")
        with pytest.raises(EngineError, match=r"warm-up step failed: .*NaN"):
            engine.warm_up()
