"""The oracles hold for our rules, and each planted fault is caught by one of them."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from deepdraft.proof import oracles
from deepdraft.proof.failed import Failed
from deepdraft.spec.laws import excess
from deepdraft.spec.noise import KeyedDice, Purpose
from deepdraft.spec.protocol import Dice, Proposal, Row, Target, Verdict
from deepdraft.spec.verify import verify_block, verify_coupled, verify_token


class Shifted:
    """A target whose laws are asked for at the wrong place."""

    def __init__(self, target: Target, by: int, *, only: int | None = None) -> None:
        self.target, self.by, self.only = target, by, only

    def law(self, i: int, /) -> Row:
        return self.target.law(max(0, i + self.by) if self.only in (None, i) else i)

    def pick(self, i: int, /) -> int | None:
        return self.target.pick(i)


def token_with_faults(proposal: Proposal, target: Target, dice: Dice, fault: str) -> Verdict:
    """The token rule, written once more, with one line changed by name."""
    assert proposal.laws is not None
    for i, x in enumerate(proposal.token_ids):
        p_V, q_V = target.law(i), proposal.laws[i]
        chance = min(Fraction(1), p_V[x] / q_V[x])
        if fault == "the ratio upside down":
            chance = min(Fraction(1), q_V[x] / p_V[x]) if p_V[x] else Fraction(1)
        if not dice.accept(i, chance):
            left_V, mass = excess(1, p_V, q_V)
            if fault == "replacement from the target" or not mass:
                left_V = p_V
            if fault == "replacement from |p - q|":
                left_V = abs(p_V - q_V)
            if fault == "replacement from the target without the draft":
                left_V = p_V.copy()
                left_V[x] = 0
                left_V = left_V if left_V.any() else p_V
            return Verdict(num_accepted=i, next_token=dice.pick(i, left_V), why="rejected")
    k = len(proposal)
    return Verdict(num_accepted=k, next_token=dice.pick(k, target.law(k)), why="bonus")


def block_with_faults(proposal: Proposal, target: Target, dice: Dice, fault: str) -> Verdict:
    """The block rule read from the front, as in the paper, with one line changed by name."""
    assert proposal.laws is not None
    k, w, best = len(proposal), [Fraction(1)], 0
    for i, x in enumerate(proposal.token_ids):
        p_V, q_V = target.law(i), proposal.laws[i]
        ratio = w[-1] * p_V[x] / q_V[x]
        w.append(ratio if fault == "weights not bounded by 1" else min(ratio, Fraction(1)))
    for i in range(1, k + 1):
        if i == k:
            chance = min(Fraction(1), w[k])
        else:
            mass = excess(w[i], target.law(i), proposal.laws[i])[1]
            rest = mass + 1 - w[i]
            chance = min(Fraction(1), max(Fraction(0), mass / rest if rest > 0 else Fraction(1)))
            if fault == "every prefix by its weight":
                chance = min(Fraction(1), w[i])
        if dice.accept(i, chance):
            best = i
        elif fault == "stops at the first failure":
            break
    p_V = target.law(best)
    if best < k:
        scale = Fraction(1) if fault == "replacement without the weight" else w[best]
        left_V, mass = excess(scale, p_V, proposal.laws[best])
        p_V = left_V if mass else p_V
    return Verdict(num_accepted=best, next_token=dice.pick(best, p_V), why="rejected")


CASES = [(c, 3) for c in oracles.cases(2) if not c.one_hot]
# In a vocabulary of two, some faulty replacements are right by chance.
CASES += [(c, 2) for c in oracles.cases(3) if not c.one_hot]


def exact(rule: oracles.LawRule) -> None:
    """The output law in every case that states laws."""
    for case, size in CASES:
        oracles.check_output_law("planted", rule, case, size)


def test_all_rules_hold_by_enumeration() -> None:
    assert oracles.check_exact() == "200 exact laws"


def test_rules_written_again_without_fault_agree() -> None:
    for case, size in CASES:
        for ours, again in (
            (verify_token, lambda *a: token_with_faults(*a, "")),
            (verify_block, lambda *a: block_with_faults(*a, "")),
        ):
            assert oracles.output_law(ours, case, size) == oracles.output_law(again, case, size)


@pytest.mark.parametrize(
    "fault",
    [
        "replacement from the target",
        "replacement from |p - q|",
        "replacement from the target without the draft",
        "the ratio upside down",
    ],
)
def test_faults_of_the_token_rule_are_caught(fault: str) -> None:
    with pytest.raises(Failed, match=r"has probability|is to be drawn"):
        exact(lambda *a: token_with_faults(*a, fault))


@pytest.mark.parametrize(
    "fault",
    [
        "weights not bounded by 1",
        "every prefix by its weight",
        "stops at the first failure",
        "replacement without the weight",
    ],
)
def test_faults_of_the_block_rule_are_caught(fault: str) -> None:
    with pytest.raises(Failed, match=r"has probability|is to be drawn"):
        exact(lambda *a: block_with_faults(*a, fault))


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_a_law_that_the_drafts_were_not_drawn_from_is_caught(rule: oracles.LawRule) -> None:
    def other_temperature(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        assert proposal.laws is not None
        laws = [row * row / (row * row).sum() for row in proposal.laws]
        return rule(replace(proposal, laws=laws), target, dice)

    with pytest.raises(Failed, match="has probability"):
        exact(other_temperature)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_sampled_drafts_stated_as_certain_keep_the_law(rule: oracles.LawRule) -> None:
    # Given the draft, the token rule with a one-hot law is exact whatever drew it.
    exact(lambda proposal, target, dice: rule(replace(proposal, laws=None), target, dice))


@pytest.mark.parametrize("rule", [verify_token, verify_block])
@pytest.mark.parametrize("by", [-1, 1])
def test_laws_of_the_wrong_position_are_caught(rule: oracles.LawRule, by: int) -> None:
    def shifted(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        return rule(proposal, Shifted(target, by), dice)

    with pytest.raises(Failed, match="has probability"):
        exact(shifted)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_a_bonus_of_the_wrong_row_is_caught(rule: oracles.LawRule) -> None:
    def off_by_one(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        return rule(proposal, Shifted(target, -1, only=len(proposal)), dice)

    with pytest.raises(Failed, match="has probability"):
        exact(off_by_one)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_one_draft_too_many_or_too_few_is_caught(rule: oracles.LawRule) -> None:
    def drops_one(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        verdict = rule(proposal, target, dice)
        return replace(verdict, num_accepted=max(0, verdict.num_accepted - 1))

    def keeps_one(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        verdict = rule(proposal, target, dice)
        return replace(verdict, num_accepted=min(len(proposal), verdict.num_accepted + 1))

    for fault in (drops_one, keeps_one):
        with pytest.raises(Failed, match="has probability"):
            exact(fault)


def test_accepting_less_often_is_caught() -> None:
    def lazy(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        return verify_token(proposal.cut(len(proposal) - 1), target, dice)

    with pytest.raises(Failed, match=r"0 of 1 drafts accepted, 2/3 expected"):
        oracles.check_exact(token=lazy)
    with pytest.raises(Failed, match=r"block: 10/9 of 2 drafts accepted, 11/9 expected"):
        oracles.check_exact(block=verify_token)


def test_cuts_by_a_stopping_rule_keep_the_law() -> None:
    assert oracles.check_cuts() == "24 exact laws"


def test_a_cut_that_looks_ahead_is_caught() -> None:
    def looks_ahead(ids: tuple[int, ...]) -> int:
        # Ends before the first draft that is token 1: reads what it throws away.
        return ids.index(1) if 1 in ids else len(ids)

    with pytest.raises(Failed, match="has probability"):
        oracles.check_cuts(looks_ahead)


class SamePurpose(KeyedDice):
    """One stream for two purposes."""

    shared: tuple[Purpose, Purpose]

    def uniform(self, position: int, purpose: Purpose) -> float:
        return super().uniform(position, self.shared[0] if purpose in self.shared else purpose)


@pytest.mark.parametrize(
    "shared",
    [
        (Purpose.DRAFT, Purpose.ACCEPT),
        (Purpose.ACCEPT, Purpose.NEXT),
        (Purpose.DRAFT, Purpose.NEXT),
    ],
)
def test_one_stream_for_two_purposes_is_caught(shared: tuple[Purpose, Purpose]) -> None:
    dice = type("Shared", (SamePurpose,), {"shared": shared})
    with pytest.raises(Failed, match="chi-square"):
        oracles.check_sampled(make_dice=dice, trials=3000)


def test_dice_keyed_by_position_alone_are_caught() -> None:
    with pytest.raises(Failed, match=r"block.*chi-square"):
        oracles.check_keys(lambda seed, start: KeyedDice(seed, 0))


def test_keyed_dice_hold() -> None:
    assert "chi-square" in oracles.check_keys()


def test_sampling_notices_a_biased_rule_and_a_weak_one() -> None:
    def biased(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        return verify_token(replace(proposal, laws=[np.full(3, 1 / 3)] * 2), target, dice)

    with pytest.raises(Failed, match=r"token, reversed: tokens come with"):
        oracles.check_sampled(token=biased, trials=2000)

    def weak(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        return verify_block(proposal.cut(1), target, dice)

    with pytest.raises(Failed, match="block accepts"):
        oracles.check_sampled(block=weak, trials=500)


def test_tokens_of_probability_zero_are_caught() -> None:
    with pytest.raises(Failed, match="probability 0"):
        oracles.chi_square(np.array([5, 1]), np.array([1.0, 0.0]))


def test_coupled_texts_hold_and_a_wrong_one_is_caught() -> None:
    assert "as in plain decoding" in oracles.check_coupled(length=30)

    def keeps_all(proposal: Proposal, target: Target) -> Verdict:
        k = len(proposal)
        return Verdict(num_accepted=k, next_token=target.pick(k), why="bonus")

    with pytest.raises(Failed, match="other text from token"):
        oracles.check_coupled(keeps_all, length=30)

    def late(proposal: Proposal, target: Target) -> Verdict:
        verdict = verify_coupled(proposal, target)
        k = min(len(proposal), verdict.num_accepted + 1)
        return replace(verdict, next_token=target.pick(k))

    with pytest.raises(Failed, match="other text from token"):
        oracles.check_coupled(late, length=30)


def test_enumeration_visits_every_way_once() -> None:
    def run(dice: Dice) -> Any:
        first = dice.accept(0, Fraction(1, 3))
        return first, dice.pick(1, oracles.fractions(1, 0, 3)) if first else None

    seen = [(result, p) for p, result in oracles.outcomes(run)]
    assert seen == [
        ((True, 0), Fraction(1, 12)),
        ((True, 2), Fraction(1, 4)),
        ((False, None), Fraction(2, 3)),
    ]


def test_enumeration_refuses_impossible_questions() -> None:
    with pytest.raises(Failed, match="acceptance probability"):
        list(oracles.outcomes(lambda dice: dice.accept(0, Fraction(4, 3))))
    with pytest.raises(Failed, match="is to be drawn"):
        list(oracles.outcomes(lambda dice: dice.pick(0, np.array([Fraction(0)] * 2))))
