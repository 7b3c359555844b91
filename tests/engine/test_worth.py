"""Costs corrected in the engine, on a clock that the model itself advances."""

import pytest

from deepdraft.engine import worth
from deepdraft.engine.measure import _best
from deepdraft.engine.speculate import Speculation
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.spec.live import LiveCosts
from deepdraft.types import SamplingParams, SpeculationParams

from .fake import DraftingRunner, FakeDraft, FakeSequence
from .test_engine import answer, ask, serving


def step_ms(num_rows: int, num_sequences: int) -> float:
    return 8.0 + 0.8 * num_sequences + 1.4 * (num_rows - num_sequences)


def draft_ms(num_sequences: int) -> float:
    return 3.7 + 0.3 * num_sequences


class Timed(DraftingRunner):
    """Its steps and drafts take time, every ninth step thrice as long."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.ms = self.shown = 0.0
        self.steps = 0

    def step(self, batch: list[tuple[FakeSequence, list[int]]]) -> object:
        ms = step_ms(sum(len(ids) for _, ids in batch), len(batch))
        self.steps += 1
        self.ms += ms
        self.shown += ms * (3.0 if self.steps % 9 == 0 else 1.0)
        return super().step(batch)

    def draft(self, batch: list[tuple[FakeSequence, int]]) -> list[FakeDraft]:
        self.ms += draft_ms(len(batch))
        self.shown += draft_ms(len(batch))
        return super().draft(batch)


NEARLY_FREE = StepCosts(
    verify=CostTable(rows=(1, 6, 24, 96), loads=(1.0, 16.0), ms=((13.0, 13.1, 13.5, 14.0),) * 2),
    draft=CostTable(rows=(1, 16), ms=((1.0, 1.1),)),
)
FAR_TOO_DEAR = StepCosts(
    verify=CostTable(
        rows=(1, 6, 24, 96),
        loads=(1.0, 16.0),
        ms=((5.0, 21.0, 60.0, 200.0), (10.0, 21.0, 60.0, 200.0)),
    ),
    draft=CostTable(rows=(1, 16), ms=((8.0, 16.0),)),
)


def of_plain(
    told: StepCosts, error: float, num_streams: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Tokens per ms as a part of plain decoding's, of the first answers and of later ones, which
    are plain decoding's token for token."""
    runner = Timed(strength=0.0, error=error, max_tokens=1000, max_step_rows=96)
    monkeypatch.setattr(worth, "step_clock", lambda device: lambda: runner.shown / 1e3)
    tokens = 250
    shares = []
    options = Speculation(costs=LiveCosts(told))
    with serving(runner, speculation=options, max_running=num_streams) as engine:
        answers = {}
        for run in ("plain", "first", "later"):
            params = SpeculationParams(num_drafts=0) if run == "plain" else SpeculationParams()
            begin = runner.ms
            streams = [
                engine.generate(
                    ask(
                        str(i),
                        (i + 2, 3, 4),
                        sampling=SamplingParams(seed=i, temperature=0.8),
                        max_new_tokens=tokens,
                        stop_token_ids=frozenset(),
                        speculation=params,
                    )
                )
                for i in range(num_streams)
            ]
            answers[run] = [answer(stream)[0] for stream in streams]
            shares.append((tokens - 1) * step_ms(num_streams, num_streams) / (runner.ms - begin))
    assert answers["plain"] == answers["first"] == answers["later"]
    return shares[1], shares[2]


@pytest.mark.parametrize("num_streams", [1, 4])
def test_drafts_that_fall_cost_little_however_cheap_they_seem(
    num_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = of_plain(NEARLY_FREE, 40.0, num_streams, monkeypatch)
    # A request is believed anew, which costs a few steps.
    assert first > 0.88 and later > 0.94


@pytest.mark.parametrize("num_streams", [1, 4])
def test_drafts_that_stand_are_made_however_dear_they_seem(
    num_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = of_plain(FAR_TOO_DEAR, 0.0, num_streams, monkeypatch)
    drafted = step_ms(6 * num_streams, num_streams) + draft_ms(num_streams)
    best = 6 * step_ms(num_streams, num_streams) / drafted
    assert first > 0.7 * best and later > 0.94 * best


def test_sizes_that_seem_cheaper_than_smaller_ones_share_their_mean() -> None:
    samples = [(1, 1.0, 14.0), (1, 1.0, 15.0), (2, 1.0, 12.0), (3, 1.0, 13.0), (6, 1.0, 17.0)]
    assert _best([*samples, (6, 2.0, 9.0)]) == [
        (1, 1.0, 13.0),
        (2, 1.0, 13.0),
        (3, 1.0, 13.0),
        (6, 1.0, 17.0),
        (6, 2.0, 9.0),
    ]
