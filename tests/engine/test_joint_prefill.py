"""Short prompts that wait together are read in one step, and nothing but the time tells."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deepdraft.engine.engine import Engine
from deepdraft.engine.load import load_engine
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.server.service import bundled_checkpoint
from deepdraft.types import SpeculationParams, TokenEvent

from .fake import FakeSequence, JoiningRunner
from .test_engine import EOS, answer, ask
from .test_load import EngineConfig
from .test_many_streams import COSTS


def script(prompt: list[int]) -> list[int]:
    return [prompt[0] + 20, prompt[0] + 21]


def served(
    runner: JoiningRunner, lengths: list[int], **options: int
) -> list[tuple[list[int], str | None]]:
    """The answers to prompts that are all there before the engine begins."""
    engine = Engine(runner, max_running=len(lengths), **options)
    streams = [engine.generate(ask(str(i), (i + 2,) * n)) for i, n in enumerate(lengths)]
    engine.start()
    try:
        return [answer(stream) for stream in streams]
    finally:
        engine.close()
        engine._scheduler.check()
        assert runner.open_handles == set()


def wanted(num: int) -> list[tuple[list[int], str]]:
    return [([i + 22, i + 23, EOS], "stop") for i in range(num)]


def test_parts_fill_steps_up_to_their_rows() -> None:
    runner = JoiningRunner(script)
    assert served(runner, [5, 4, 3, 6, 2], prefill_chunk=64) == wanted(5)
    # The oldest first, then the shortest; 12 rows a step.
    assert runner.joint == [[5, 2, 3], [4, 6]] and runner.chunks == []


def test_what_is_too_long_or_must_be_alone_is_read_alone() -> None:
    runner = JoiningRunner(script, max_step_rows=8)
    runner.apart = lambda s: False
    assert served(runner, [20, 3, 3, 10, 4], prefill_chunk=64) == wanted(5)
    assert runner.chunks == [20, 10] and runner.joint == [[3, 3, 4]]
    runner = JoiningRunner(script)
    opened: list[FakeSequence] = []
    open_sequence = runner.open_sequence

    def note() -> FakeSequence:
        opened.append(open_sequence())
        return opened[-1]

    runner.open_sequence = note  # type: ignore[method-assign]
    runner.apart = lambda s: s is opened[0]
    assert served(runner, [3, 3, 3], prefill_chunk=64) == wanted(3)
    assert runner.chunks == [3] and runner.joint == [[3, 3]]


def test_a_runner_that_takes_no_parts_reads_them_one_by_one() -> None:
    runner = JoiningRunner(script, joint_rows=0)
    assert served(runner, [3, 3, 3]) == wanted(3)
    assert runner.chunks == [3, 3, 3] and runner.joint == []


def test_a_failed_step_is_read_again_one_by_one() -> None:
    runner = JoiningRunner(script)

    def fault(sequences: list[FakeSequence]) -> None:
        raise RuntimeError("secret")

    runner.joint_fault = fault
    assert served(runner, [3, 4, 5]) == wanted(3)
    assert sorted(runner.chunks) == [3, 4, 5] and runner.joint == []


def test_a_failed_step_ends_the_sequences_that_it_touched() -> None:
    runner = JoiningRunner(script)
    opened: list[FakeSequence] = []

    def fault(sequences: list[FakeSequence]) -> None:
        raise RuntimeError("secret")

    runner.joint_fault = fault
    runner.touches = lambda s: opened.append(s) is None and len(opened) == 2
    answers = served(runner, [3, 4, 5])
    assert [reason for _, reason in answers].count("error") == 1
    assert [a for a in answers if a[1] != "error"] == [
        w for a, w in zip(answers, wanted(3), strict=True) if a[1] != "error"
    ]


def test_a_bad_prompt_fails_alone() -> None:
    runner = JoiningRunner(script)

    def fault(sequences: list[FakeSequence]) -> None:
        raise RuntimeError("secret")

    def alone(sequence: FakeSequence, ids: list[int]) -> None:
        if ids[0] == 3:
            raise RuntimeError("secret")

    runner.joint_fault, runner.prefill_fault = fault, alone
    first, bad, last = served(runner, [3, 3, 3])
    assert (first, last) == (wanted(3)[0], wanted(3)[2])
    assert bad == ([], "error")


@pytest.fixture(scope="module")
def demo() -> Runner:
    options = EngineConfig(max_running=6, max_context=256, schedule="all")
    runner = load_engine(bundled_checkpoint(), options).runner
    assert isinstance(runner, Runner)
    return runner


PROMPTS = [[(7 * i + k * k) % 4000 + 5 for k in range(n)] for i, n in enumerate((1, 30, 2, 17, 44))]


def everything(runner: Runner, read: Callable[[list], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Logits behind the prompts, of the drafts that follow, and of a step that verifies them."""
    sequences = [runner.open_sequence() for _ in PROMPTS]
    try:
        logits = torch.stack(read(sequences))
        last = logits.argmax(-1).tolist()
        drafts = runner.draft(list(zip(sequences, last, strict=True)))
        drafted, raw = runner.refine(drafts, 0, last)
        rows = [(s, [i, 9]) for s, i in zip(sequences, last, strict=True)]
        return [logits, drafted, torch.tensor(raw), runner.step(rows)]
    finally:
        for sequence in sequences:
            runner.close_sequence(sequence)


def test_the_bundled_model_has_the_same_bits(demo: Runner) -> None:
    """In one step, and in parts of two steps, as alone."""

    def alone(sequences: list) -> list[torch.Tensor]:
        found = [
            demo.prefill(s, ids, final=True) for s, ids in zip(sequences, PROMPTS, strict=True)
        ]
        return [logits for logits in found if logits is not None]

    def together(sequences: list) -> list[torch.Tensor]:
        assert sum(map(len, PROMPTS)) <= demo.joint_rows
        return demo.prefill_together(list(zip(sequences, PROMPTS, strict=True)))

    def twice(sequences: list) -> list[torch.Tensor]:
        cuts = [max(0, len(ids) - 3) for ids in PROMPTS]
        parts = [(s, ids[:n]) for s, ids, n in zip(sequences, PROMPTS, cuts, strict=True) if n]
        assert all(demo.joins(s, len(ids)) for s, ids in parts)
        demo.prefill_together(parts)
        rest = [(s, ids[n:]) for s, ids, n in zip(sequences, PROMPTS, cuts, strict=True)]
        return demo.prefill_together(rest)

    expected = everything(demo, alone)
    for read in (together, twice):
        for a, b in zip(everything(demo, read), expected, strict=True):
            assert torch.equal(a, b)


def test_a_sequence_that_waits_for_a_replay_does_not_join(demo: Runner) -> None:
    sequence = demo.open_sequence()
    demo.prefill(sequence, list(range(5, 45)), final=True)
    assert demo.joins(sequence, 3) and not demo.joins(sequence, 97)
    sequence.keep_global(40)
    assert not demo.joins(sequence, 3)
    demo.close_sequence(sequence)


def test_streams_of_the_bundled_model_are_what_each_is_alone(
    demo: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ask(str(i), tuple(ids), max_new_tokens=6, stop_token_ids=frozenset(), reuse=False)
        for i, ids in enumerate(PROMPTS)
    ]
    joint: list[int] = []
    together = demo.prefill_together

    def note(batch: list) -> list[torch.Tensor]:
        joint.append(len(batch))
        return together(batch)

    monkeypatch.setattr(demo, "prefill_together", note)
    engine = Engine(demo, max_running=5)
    streams = [engine.generate(request) for request in requests]
    engine.start()
    found = [ids_of(stream) for stream in streams]
    assert joint == [5]
    assert found == [ids_of(engine.generate(request)) for request in requests]
    engine.close()


def test_drafts_of_several_streams_change_nothing(
    demo: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cost, in blocks of any length, as each is alone and undrafted."""
    requests = [
        ask(str(i), tuple(ids), max_new_tokens=24, stop_token_ids=frozenset(), reuse=False)
        for i, ids in enumerate(PROMPTS)
    ]
    sizes: set[int | None] = set()
    draft = demo.draft

    def note(batch: list, size: int | None = None) -> list:
        sizes.add(size if len(batch) > 1 else None)
        return draft(batch, size)

    monkeypatch.setattr(demo, "draft", note)
    engine = Engine(demo, max_running=5, speculation=Speculation(costs=COSTS))
    streams = [engine.generate(request) for request in requests]
    engine.start()
    found = [ids_of(stream) for stream in streams]
    assert sizes & {2, 3, 4}
    off = SpeculationParams(num_drafts=0)
    assert found == [ids_of(engine.generate(replace(r, speculation=off))) for r in requests]
    engine.close()


def ids_of(events: "list[TokenEvent] | object") -> list[int]:
    return [i for event in events for i in event.token_ids]  # type: ignore[attr-defined]
