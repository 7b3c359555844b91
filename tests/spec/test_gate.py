"""The gate: when it pauses, for how long, what its trials cost."""

import pytest

from deepdraft.errors import ConfigError
from deepdraft.spec.gate import DraftGate

PLAIN = 10.0


def pause(gate: DraftGate) -> int:
    """Steps until the gate wants a draft; that one is asked for."""
    steps = 0
    while not gate.wants_draft():
        steps += 1
        assert steps < 1000
    return steps


def poor_steps(gate: DraftGate, num_tokens: float, ms: float, plain_ms: float = PLAIN) -> int:
    steps = 0
    while True:
        gate.record(num_tokens, ms, plain_ms)
        steps += 1
        assert steps < 100
        if not gate.wants_draft():
            return steps


def test_a_pause_is_as_long_as_the_loss_demands() -> None:
    gate = DraftGate(share=0.05, keep=0.0)
    gate.record(1, 15.0, PLAIN)
    assert pause(gate) == 10  # half a step is a twentieth of ten
    gate.record(1, 14.0, PLAIN)
    assert pause(gate) == 8
    gate.record(1, 10.1, PLAIN)
    assert pause(gate) == 4  # the first pause
    gate.record(1, 90.0, PLAIN)
    assert pause(gate) == 64  # the longest
    # What counts are plain steps, not ms.
    gate.record(1, 150.0, 100.0)
    assert pause(gate) == 10


def test_a_kept_loss_makes_pauses_longer_and_no_trial_better() -> None:
    kept = DraftGate(share=0.05, keep=0.5)
    kept.record(1, 15.0, PLAIN)
    pauses = [pause(kept)]
    for _ in range(3):
        kept.record(1, 15.0, PLAIN)
        pauses.append(pause(kept))
    assert pauses == sorted(pauses) and pauses[0] == 10 < pauses[1] == 15
    # A good step wins back what was kept, or more bad ones follow.
    for keep, open_again in ((0.0, True), (1.0, False)):
        gate = DraftGate(keep=keep)
        gate.record(1, 15.0, PLAIN)
        pause(gate)
        gate.record(1.8, 15.0, PLAIN)
        assert gate.wants_draft() is open_again


@pytest.mark.parametrize("loss", [0.02, 0.3, 0.5, 1.2, 3.0])
def test_trials_that_always_fail_cost_about_their_share(loss: float) -> None:
    gate = DraftGate()
    steps = lost = 0.0
    for _ in range(5000):
        steps += 1
        if gate.wants_draft():
            gate.record(1, PLAIN * (1 + loss), PLAIN)
            lost += loss
    most = max(0.022, loss / 64) if loss > 0.1 else loss / 4
    assert 0.0 < lost / steps <= most


def test_a_text_that_turns_is_found_out_soon() -> None:
    """After however many good steps; and drafts that pay again keep it open."""
    gate = DraftGate()
    for _ in range(500):
        assert gate.wants_draft()
        gate.record(5, 20.0, PLAIN)
    gate.record(1, 17.0, PLAIN)
    assert gate.wants_draft(), "one poor step after many good ones changes nothing"
    assert 2 <= poor_steps(gate, 1, 17.0) <= 6
    assert 4 <= pause(gate) + 1 <= 64
    for _ in range(50):
        gate.record(5, 20.0, PLAIN)
        assert gate.wants_draft()


def test_it_begins_with_credit() -> None:
    assert poor_steps(DraftGate(), 1, 15.0) == 1
    assert poor_steps(DraftGate(credit=2.0), 1, 15.0) > 3
    # In plain steps of now: their ms do not matter.
    assert poor_steps(DraftGate(credit=2.0), 1, 150.0, 100.0) > 3


@pytest.mark.parametrize(
    "bad",
    [
        {"credit": -1.0},
        {"credit": 6.0},
        {"first_pause": 9, "longest_pause": 8},
        {"first_pause": 0},
        {"decay": 0.0},
        {"keep": 1.5},
        {"share": 0.0},
    ],
)
def test_it_refuses_what_makes_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="draft gate"):
        DraftGate(**bad)  # type: ignore[arg-type]
