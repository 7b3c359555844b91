"""Drafting by cost for many requests at once, reckoned in the cost table's milliseconds."""

import pytest

from deepdraft.engine.block import Block
from deepdraft.engine.engine import Engine
from deepdraft.engine.speculate import Speculation, Speculator
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.types import SamplingParams

from .fake import DraftingRunner, FakeDraft, FakeSequence
from .test_engine import answer, ask, serving

STREAMS = 16
# As measured with the demo model on two busy cores: a sequence costs more than a row, and drafts
# for one nearly half as much as for sixteen.
COSTS = StepCosts(
    verify=CostTable(
        rows=(1, 6, 16, 48, 96),
        loads=(1.0, 16.0),
        ms=((9.4, 15.6, 17.8, 21.0, 25.7), (21.9, 21.9, 21.9, 31.8, 50.0)),
    ),
    draft=CostTable(rows=(1, 4, 16), ms=((4.2, 5.5, 9.4),)),
)


def of_plain(
    error: float, monkeypatch: pytest.MonkeyPatch, *, sure: float = 3.0, num_tokens: int = 300
) -> float:
    """Tokens per ms of sixteen streams drafted by cost, as a part of what plain decoding gives."""
    spent, tokens = 0.0, 0
    learn = Speculator.learn

    def count(self: Speculator, blocks: list[Block], accepted: list[int], ms: float) -> None:
        nonlocal spent, tokens
        if len(blocks) == STREAMS:  # neither the first nor the last few steps
            assert self.worth is not None
            spent += self.worth.step_ms(blocks)
            tokens += sum(accepted) + len(blocks)
        learn(self, blocks, accepted, ms)

    monkeypatch.setattr(Speculator, "learn", count)
    runner = DraftingRunner(strength=0.0, error=error, max_tokens=1000, max_step_rows=96)
    runner.confidence = sure
    options = Speculation(costs=COSTS)
    with serving(runner, speculation=options, max_running=STREAMS) as engine:
        streams = [
            engine.generate(
                ask(
                    str(i),
                    (i + 2, 3, 4),
                    sampling=SamplingParams(seed=i, temperature=0.8),
                    max_new_tokens=num_tokens,
                    stop_token_ids=frozenset(),
                )
            )
            for i in range(STREAMS)
        ]
        for stream in streams:
            assert len(answer(stream)[0]) == num_tokens
    assert tokens > 0.5 * STREAMS * num_tokens
    return tokens / spent * COSTS.verify.step_ms(STREAMS, STREAMS) / STREAMS


@pytest.mark.parametrize(("sure", "least"), [(3.0, 0.97), (0.0, 0.975)])
def test_a_hopeless_drafter_costs_little(
    sure: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quite sure of its drafts, or in doubt: none stands."""
    assert of_plain(40.0, monkeypatch, sure=sure) > least


def test_a_good_drafter_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_plain(0.0, monkeypatch) > 1.3


def test_a_drafter_in_between_does_not_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_plain(1.0, monkeypatch) > 0.97


def test_new_requests_are_tried_at_once_whatever_was_before() -> None:
    """Where most of a crowd is new, a pause that others earned ends."""
    runner = DraftingRunner(strength=0.0, error=40.0, max_tokens=1000, max_step_rows=96)

    def drafted_steps(engine: Engine, num_tokens: int, num_streams: int = STREAMS) -> int:
        before = engine.stats().get("spec_drafted_steps", 0)
        streams = [
            engine.generate(ask(str(i), (i + 2, 3), max_new_tokens=num_tokens))
            for i in range(num_streams)
        ]
        for stream in streams:
            answer(stream)
        return engine.stats()["spec_drafted_steps"] - before

    with serving(runner, speculation=Speculation(costs=COSTS), max_running=STREAMS) as engine:
        hopeless = drafted_steps(engine, 100)
        assert hopeless < 15 * STREAMS
        runner.error = 0.0
        assert drafted_steps(engine, 100) > STREAMS


class Shortening(DraftingRunner):
    """Drafts blocks of a given size, and notes which."""

    shortens = True

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.sizes: list[tuple[int, int | None]] = []

    def draft(  # type: ignore[override]
        self, batch: list[tuple[FakeSequence, int]], size: int | None = None
    ) -> list[FakeDraft]:
        self.sizes.append((len(batch), size))
        blocks = super().draft(batch)
        for block in blocks:
            block.size = size or self.block_size
        return blocks


@pytest.mark.parametrize(("error", "wanted"), [(0.0, None), (0.7, 2)])
def test_blocks_of_several_streams_are_as_long_as_pays(error: float, wanted: int | None) -> None:
    """Whole where drafts stand, short where they fall; the answers are those of each alone."""
    runner = Shortening(strength=0.0, error=error, max_tokens=1000, max_step_rows=96)
    requests = [
        ask(str(i), (i + 2, 3), max_new_tokens=60, stop_token_ids=frozenset()) for i in range(8)
    ]
    with serving(runner, speculation=Speculation(costs=COSTS), max_running=8) as engine:
        alone = [answer(engine.generate(request)) for request in requests]
        assert {size for _, size in runner.sizes} == {None}
        runner.sizes.clear()
        streams = [engine.generate(request) for request in requests]
        assert [answer(stream) for stream in streams] == alone
    several = [size for num, size in runner.sizes if num > 1]
    assert several[-1] == wanted and {2, 3, 4, None} >= set(several)
