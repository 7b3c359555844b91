"""The rules on laws recorded from the demo model: frequencies, and expected accepted drafts.

data/recorded-laws.json: {setting: [{p, q, drafts}]}, four blocks each of temperatures 0.7 and 1
with top_p 0.9, free and under a JSON schema, over the tokens that occur in the block.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepdraft.proof import recorded_laws
from deepdraft.spec.noise import KeyedDice
from deepdraft.spec.verify import survival

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "data" / "recorded-laws.json").read_text()
)


def test_what_was_recorded_is_worth_testing() -> None:
    assert len(RECORDED) == 4 and all(len(blocks) == 4 for blocks in RECORDED.values())
    distances = []
    for block in (b for blocks in RECORDED.values() for b in blocks):
        p, q = recorded_laws.laws_of(block)
        assert len(p) == len(q) + 1 >= 5
        distances += [0.5 * np.abs(a - b).sum() for a, b in zip(p, q, strict=False)]
        assert all(q[i][x] > 0 for i, x in enumerate(block["drafts"]))
    assert 0.2 < np.mean(distances) < 0.8


def test_no_rule_is_rejected() -> None:
    report = recorded_laws.check(RECORDED, num_trials=4000, num_blocks=1)
    assert len(report["tests"]) == 4 * 2 * 3
    assert report["rejected"] == 0, report["smallest_p_value"]


@pytest.mark.full
def test_no_rule_is_rejected_at_full_size() -> None:
    report = recorded_laws.check(RECORDED, num_trials=200_000, num_blocks=1)
    assert report["rejected"] == 0, report["smallest_p_value"]
    assert sum(t["power"] > 0.99 for t in report["tests"]) >= 20, "too few trials to tell"


def test_block_never_expects_fewer_drafts() -> None:
    expected = recorded_laws.expected_drafts(RECORDED)
    assert expected["blocks"] == 16 and expected["blocks_where_block_is_worse"] == 0
    assert expected["block"] > expected["token"] + 0.02
    # One-hot drafts: the block rule is the token rule.
    for block in RECORDED["temperature 1, top_p 0.9"]:
        p, _ = recorded_laws.laws_of(block)
        proposal = recorded_laws.Proposal(start=0, token_ids=tuple(block["drafts"]))
        rows = [
            survival(rule, proposal, recorded_laws.FixedTarget(p)) for rule in ("token", "block")
        ]
        assert rows[0] == rows[1]


def test_a_planted_fault_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts' own noise used again for the replacement."""
    honest = KeyedDice.uniform

    def shared(self: KeyedDice, position: int, purpose: Any) -> float:
        return honest(self, position, type(purpose)(1))

    monkeypatch.setattr(KeyedDice, "uniform", shared)
    report = recorded_laws.check(RECORDED, num_trials=4000, num_blocks=1)
    assert report["rejected"] > 3


def test_the_statistics_know_their_cases() -> None:
    law = np.array([0.5, 0.3, 0.2, 0.0])
    value, freedom = recorded_laws.chi_square(np.array([500.0, 300, 200, 0]), law)
    assert (value, freedom) == (1.0, 2)
    assert recorded_laws.chi_square(np.array([500.0, 300, 199, 1]), law) == (0.0, 0)
    # 5 % of the mass moved among 1000: 5 + 3 + 2 at two degrees, whose tail is exp(-x / 2).
    value, _ = recorded_laws.chi_square(np.array([550.0, 270, 180, 0]), law)
    assert value == pytest.approx(np.exp(-10.0 / 2), rel=1e-9)
    distance, most = recorded_laws.total_variation(np.array([550.0, 270, 180, 0]), law, 1e-6)
    assert distance == pytest.approx(0.05) and 0.08 < most < 0.12
    assert recorded_laws.power(law, 2, 200_000, 1e-6) > 0.99
    assert recorded_laws.power(law, 2, 2_000, 1e-6) < 0.01
