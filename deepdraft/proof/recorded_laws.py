"""Statistical tests of the verification rules on recorded laws of target and drafter.

Owns: the simulation, chi-square and total-variation tests, their power. Knows nothing of: models,
where the laws were recorded.

A recorded block gives p_0 .. p_k and q_0 .. q_{k-1} over the tokens that occur in it. They are
taken as laws that do not depend on the drafts, so the text must be independent draws from p_0, p_1
and so on: drafts and verdict come from the serving code, what a verdict leaves open is drawn
from p.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepdraft.spec.laws import draw
from deepdraft.spec.noise import KeyedDice, Purpose
from deepdraft.spec.protocol import Proposal, Row, Rule
from deepdraft.spec.verify import survival, verify

MIN_EXPECTED = 10.0
"""Rarer tokens are counted as one."""
SHIFT = 0.01


RULES: tuple[Rule, ...] = ("token", "block")


class FixedTarget:
    """A target whose laws are given."""

    def __init__(self, laws: Sequence[Row]) -> None:
        self._laws = laws

    def law(self, i: int) -> Row:
        """p_i."""
        return self._laws[i]

    def pick(self, i: int) -> int | None:
        """Unused: coupled needs no laws."""
        raise AssertionError


def laws_of(block: dict[str, Any]) -> tuple[list[Row], list[Row]]:
    """p and q of a recorded block, each row with sum 1."""
    rows = [[np.asarray(row, dtype=np.float64) for row in block[name]] for name in ("p", "q")]
    p, q = ([row / row.sum() for row in part] for part in rows)
    return p, q


def simulate(block: dict[str, Any], rule: Rule, num_trials: int, length: int) -> np.ndarray:
    """Texts [trials, length] of one block, continued from p."""
    p, q = laws_of(block)
    target, num_drafts = FixedTarget(p), len(q)
    texts = np.empty((num_trials, length), dtype=np.int64)
    for trial in range(num_trials):
        dice = KeyedDice(trial, 0)
        ids = tuple(dice.draft(i, q[i]) for i in range(num_drafts))
        proposal = Proposal(start=0, token_ids=ids, laws=q)
        tokens = list(verify(rule, proposal, target, dice).tokens(proposal))
        later = KeyedDice(trial, 1 << 40)
        for i in range(len(tokens), length):
            tokens.append(draw(p[i], later.uniform((1 << 40) + i, Purpose.NEXT)))
        texts[trial] = tokens[:length]
    return texts


def chi_square(counts: Row, law: Row) -> tuple[float, int]:
    """p-value and degrees of freedom; infinite surprise (0) for a token of probability 0."""
    total = counts.sum()
    if counts[law == 0].any():
        return 0.0, 0
    often = law * total >= MIN_EXPECTED
    observed, expected = list(counts[often]), list(law[often] * total)
    rest = float(law[~often].sum() * total)
    if rest >= MIN_EXPECTED:
        observed.append(counts[~often].sum())
        expected.append(rest)
    freedom = len(observed) - 1
    if freedom < 1:
        return 1.0, 0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), freedom


def total_variation(counts: Row, law: Row, alpha: float) -> tuple[float, float]:
    """Distance of frequencies from the law, and what it exceeds with a chance below alpha."""
    total = counts.sum()
    distance = 0.5 * float(np.abs(counts / total - law).sum())
    mean = 0.5 * float(np.sqrt(law * (1 - law) / total).sum())  # bounds the expected distance
    # One draw moves the distance by at most 1 / total: McDiarmid's inequality.
    return distance, mean + math.sqrt(math.log(1 / alpha) / (2 * total))


def power(law: Row, freedom: int, num_trials: int, alpha: float) -> float:
    """The chance that chi-square at level alpha sees mass 0.01 moved between the two likeliest
    tokens (normal approximation of the noncentral law)."""
    first, second = sorted(law)[-1], sorted(law)[-2]
    if second < SHIFT:
        return 0.0
    noncentral = num_trials * SHIFT**2 * (1 / first + 1 / second)
    low, high = 0.0, 10.0 * freedom + 200.0
    for _ in range(100):
        middle = (low + high) / 2
        half = torch.tensor([freedom / 2, middle / 2], dtype=torch.float64)
        low, high = (middle, high) if torch.special.gammaincc(*half) > alpha else (low, middle)
    mean, deviation = freedom + noncentral, math.sqrt(2 * (freedom + 2 * noncentral))
    return 0.5 * math.erfc((high - mean) / deviation / math.sqrt(2))


def check(
    recorded: dict[str, list[dict[str, Any]]],
    *,
    num_trials: int,
    num_blocks: int,
    length: int = 3,
    level: float = 1e-4,
) -> dict[str, Any]:
    """Tests the first blocks of each setting under both rules; the level is shared by all tests."""
    chosen = [(name, b) for name, blocks in recorded.items() for b in blocks[:num_blocks]]
    alpha = level / (len(chosen) * len(RULES) * length)
    tests: list[dict[str, Any]] = []
    for name, block in chosen:
        p, q = laws_of(block)
        for rule in RULES:
            texts = simulate(block, rule, num_trials, length)
            for place in range(length):
                counts = np.bincount(texts[:, place], minlength=p[place].shape[0]).astype(float)
                value, freedom = chi_square(counts, p[place])
                distance, most = total_variation(counts, p[place], alpha)
                tests.append(
                    {
                        "setting": name,
                        "rule": rule,
                        "place": place,
                        "draft_distance": round(0.5 * float(np.abs(p[place] - q[place]).sum()), 4),
                        "p_value": value,
                        "freedom": freedom,
                        "total_variation": round(distance, 6),
                        "allowed": round(most, 6),
                        "power": round(power(p[place], max(1, freedom), num_trials, alpha), 4),
                    }
                )
    return {
        "what": "chi-square and total variation of the rules on recorded laws",
        "trials": num_trials,
        "tests": tests,
        "alpha_of_a_test": alpha,
        "rejected": sum(t["p_value"] < alpha or t["total_variation"] > t["allowed"] for t in tests),
        "smallest_p_value": min(t["p_value"] for t in tests),
        "expected_drafts": expected_drafts(recorded),
    }


def expected_drafts(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Exact expected accepted drafts of the recorded drafts, over all blocks."""
    sums = dict.fromkeys(RULES, 0.0)
    worse = count = 0
    for block in (b for blocks in recorded.values() for b in blocks):
        p, q = laws_of(block)
        proposal = Proposal(start=0, token_ids=tuple(block["drafts"]), laws=q)
        own = {rule: float(sum(survival(rule, proposal, FixedTarget(p)))) for rule in RULES}
        worse += own["block"] < own["token"] - 1e-12
        count += 1
        for rule in RULES:
            sums[rule] += own[rule]
    return {
        "blocks": count,
        "token": round(sums["token"] / count, 5),
        "block": round(sums["block"] / count, 5),
        "blocks_where_block_is_worse": worse,
    }


def main() -> int:
    """python -m deepdraft.proof.recorded_laws FILE TRIALS: the report as JSON."""
    with open(sys.argv[1]) as stream:
        report = check(json.load(stream), num_trials=int(sys.argv[2]), num_blocks=1)
    print(json.dumps(report, indent=1))
    return 1 if report["rejected"] else 0


if __name__ == "__main__":
    sys.exit(main())
