"""The rules at their edges: unusable laws, no mass, what they ask for, floats, vocabularies."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.errors import ConfigError
from deepdraft.proof import oracles
from deepdraft.spec.laws import draw, is_law, law
from deepdraft.spec.noise import KeyedDice
from deepdraft.spec.protocol import Dice, Proposal, Row, Rule, Target, Verdict, one_hot
from deepdraft.spec.verify import (
    survival,
    verify,
    verify_block,
    verify_coupled,
    verify_token,
)

LAW_RULES = [verify_token, verify_block]
RULE_NAMES: list[Rule] = ["token", "block"]


class Rows:
    """A target of given laws and picks that notes what was asked."""

    def __init__(self, laws: Any = (), picks: Any = ()) -> None:
        self.laws, self.picks = laws, picks
        self.asked: list[int] = []

    def law(self, i: int, /) -> Row:
        self.asked.append(i)
        return self.laws[i]

    def pick(self, i: int, /) -> int | None:
        self.asked.append(i)
        return self.picks[i]


class Fixed:
    """Dice that accept or refuse everything possible, and pick the likeliest token."""

    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts
        self.weights: list[Row] = []

    def accept(self, position: int, probability: Any, /) -> bool:
        return bool(probability > 0) if self.accepts else bool(probability >= 1)

    def pick(self, position: int, weights_V: Row, /) -> int:
        self.weights.append(weights_V)
        return int(np.argmax(weights_V))


P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.3, 0.5])
BROKEN_LAWS = {
    "NaN": np.array([0.2, math.nan, 0.5]),
    "infinite": np.array([0.2, math.inf, 0.5]),
    "all zero": np.zeros(3),
    "negative": np.array([-0.1, 0.6, 0.5]),
    "sum above 1": np.array([0.4, 0.3, 0.5]),
    "sum below 1": np.array([0.1, 0.3, 0.5]),
    "too long": np.array([0.2, 0.3, 0.4, 0.1]),
    "too short": np.array([0.5, 0.5]),
    "two axes": np.array([[0.2, 0.3, 0.5]]),
    "no axis": np.array(1.0),
    "missing": None,
    "empty": np.zeros(0),
    "huge": np.array([1e308, 1e308, 1e308]),
}


@pytest.mark.parametrize("rule", LAW_RULES)
@pytest.mark.parametrize("name", BROKEN_LAWS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_draft_without_a_proper_law_ends_the_block(
    rule: oracles.LawRule, name: str, at: int
) -> None:
    laws = [Q, Q, Q]
    laws[at] = BROKEN_LAWS[name]
    proposal = Proposal(start=7, token_ids=(0, 0, 0), laws=laws)
    dice = Fixed(accepts=True)
    verdict = rule(proposal, Rows([P, P, P, P]), dice)
    assert (verdict.num_accepted, verdict.why) == (at, "malformed")
    assert f"draft {at}" in verdict.detail
    assert dice.weights[0] is P


@pytest.mark.parametrize("rule", LAW_RULES)
@pytest.mark.parametrize(
    ("ids", "laws", "text"),
    [
        ((0, 3), [Q, Q], "outside the vocabulary"),
        ((0, -1), [Q, Q], "outside the vocabulary"),
        ((0, 3), None, "outside the vocabulary"),
        ((0, 1), [Q], "has no law"),
        ((0, 1), [Q, np.array([0.5, 0.0, 0.5])], "probability 0 under its own law"),
    ],
)
def test_a_draft_that_cannot_be_ends_the_block(
    rule: oracles.LawRule, ids: tuple[int, ...], laws: Any, text: str
) -> None:
    verdict = rule(Proposal(start=0, token_ids=ids, laws=laws), Rows([P] * 3), Fixed(True))
    assert (verdict.num_accepted, verdict.why) == (1, "malformed")
    assert text in verdict.detail


@pytest.mark.parametrize("rule", LAW_RULES)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_broken_draft_law_leaves_the_output_law_exact(rule: oracles.LawRule, at: int) -> None:
    def broken(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
        laws = list(proposal.laws or ())
        laws[at] = np.array([math.nan, 1.0])
        return rule(Proposal(start=0, token_ids=proposal.token_ids, laws=laws), target, dice)

    for case in oracles.cases(2):
        if not case.one_hot:
            oracles.check_output_law("broken", broken, case, 3)


@pytest.mark.parametrize("rule", LAW_RULES)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_target_without_a_law_costs_only_what_needs_it(rule: oracles.LawRule, at: int) -> None:
    """Texts up to the unusable law follow the target exactly; there, and only there, they end."""
    for case in oracles.cases(2):

        def table(prefix: tuple[int, ...], case: oracles.Case = case) -> Row:
            return np.full(2, math.nan) if len(prefix) == at else case.target(prefix)

        def run(dice: Dice, case: oracles.Case = case, table: Any = table) -> tuple[int, ...]:
            proposal = case.proposal(dice, 3)
            verdict = rule(proposal, oracles.Laws(table, (), proposal.token_ids), dice)
            text = verdict.tokens(proposal)
            assert (verdict.next_token is None) == (verdict.why == "target")
            if verdict.why == "target":
                assert len(text) == at
                assert f"position {at}" in verdict.detail
            return text

        got: dict[tuple[int, ...], Any] = {}
        for probability, text in oracles.outcomes(run):
            assert len(text) <= at, "nothing stands behind an unusable law"
            rests = oracles.joint_law(case.target, at - len(text), text)
            for rest, share in rests.items():
                got[text + rest] = got.get(text + rest, 0) + probability * share
        assert got == oracles.joint_law(case.target, at)


def test_the_block_goes_on_past_nothing_it_may_not_ask() -> None:
    """Laws are asked for in order, once, and never behind a draft that the target forbids."""
    for rule, case in product(LAW_RULES, oracles.cases(3)):

        def run(dice: Dice, rule: Any = rule, case: oracles.Case = case) -> None:
            proposal = case.proposal(dice, 3)
            inner = oracles.Laws(case.target, (), proposal.token_ids)
            target = Rows([inner.law(i) for i in range(4)])
            rule(proposal, target, dice)
            assert target.asked == list(range(len(target.asked)))
            for i in target.asked[:-1]:
                assert target.laws[i][proposal.token_ids[i]] > 0

        for _ in oracles.outcomes(run):
            pass


@pytest.mark.parametrize("rule", LAW_RULES)
def test_equal_laws_accept_everything(rule: oracles.LawRule) -> None:
    for seed in range(200):
        p = np.random.default_rng(seed).dirichlet([0.3] * 5, size=4)
        ids = tuple(int(row.argmax()) for row in p[:3])
        proposal = Proposal(start=0, token_ids=ids, laws=p[:3].copy())
        verdict = rule(proposal, Rows(p), KeyedDice(seed, 0))
        assert (verdict.num_accepted, verdict.why) == (3, "bonus")


def test_nothing_left_of_nothing_counts_as_accepted() -> None:
    class RefusesOnce:
        def __init__(self) -> None:
            self.asked: list[tuple[int, Any]] = []

        def accept(self, position: int, probability: Any, /) -> bool:
            self.asked.append((position, probability))
            return len(self.asked) > 1

        def pick(self, position: int, weights_V: Row, /) -> int:
            return int(np.argmax(weights_V))

    proposal = Proposal(start=4, token_ids=(1, 1), laws=[P, P])
    dice = RefusesOnce()
    verdict = verify_block(proposal, Rows([P] * 3), dice)
    assert dice.asked == [(5, 1), (4, 1)]
    assert (verdict.num_accepted, verdict.next_token) == (1, 0)


@pytest.mark.parametrize("rule", LAW_RULES)
def test_no_drafts_give_one_token_of_the_target(rule: oracles.LawRule) -> None:
    verdict = rule(Proposal(start=4, token_ids=()), Rows([P]), Fixed(True))
    assert verdict == Verdict(num_accepted=0, next_token=0, why="bonus")
    verdict = rule(Proposal(start=4, token_ids=(), laws=[]), Rows([np.zeros(3)]), Fixed(True))
    assert verdict.next_token is None
    assert verdict.why == "target"


@pytest.mark.parametrize("rule", LAW_RULES)
def test_no_mass_left_after_rounding_falls_back_to_the_target(rule: oracles.LawRule) -> None:
    # q exceeds p everywhere by a rounding error; dice that refuse what they may do so.
    p_V = np.array([0.5, 0.5 - 1e-10])
    q_V = np.array([0.5 + 1e-10, 0.5])
    dice = Fixed(accepts=False)
    verdict = rule(Proposal(start=0, token_ids=(0, 0), laws=[q_V, q_V]), Rows([p_V] * 3), dice)
    assert verdict.num_accepted < 2
    assert verdict.next_token == 0
    assert dice.weights[0] is p_V


def test_tiny_probabilities_do_not_overflow_or_vanish() -> None:
    tiny = np.array([1e-300, 1.0])
    for rule in LAW_RULES:
        proposal = Proposal(start=0, token_ids=(0, 0), laws=[tiny, tiny])
        verdict = rule(proposal, Rows([np.array([0.9, 0.1])] * 3), KeyedDice(1, 0))
        assert verdict.num_accepted == 2
        proposal = Proposal(start=0, token_ids=(0, 0), laws=[P[:2] / P[:2].sum()] * 2)
        verdict = rule(proposal, Rows([tiny] * 3), KeyedDice(1, 0))
        assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_coupled_keeps_what_plain_decoding_picks() -> None:
    proposal = Proposal(start=3, token_ids=(5, 6, 7))
    for picks, want in {
        (5, 6, 7, 8): Verdict(num_accepted=3, next_token=8, why="bonus"),
        (5, 9, 7, 8): Verdict(num_accepted=1, next_token=9, why="rejected"),
        (1, 6, 7, 8): Verdict(num_accepted=0, next_token=1, why="rejected"),
    }.items():
        target = Rows(picks=picks)
        assert verify_coupled(proposal, target) == want
        assert target.asked == list(range(want.num_accepted + 1))
    verdict = verify_coupled(proposal, Rows(picks=(5, None, 7, 8)))
    assert (verdict.num_accepted, verdict.next_token, verdict.why) == (1, None, "target")
    assert verdict.tokens(proposal) == (5,)


def test_rules_by_name() -> None:
    proposal = Proposal(start=0, token_ids=(0,), laws=[Q])
    for name in RULE_NAMES:
        verdict = verify(name, proposal, Rows([P, P]), Fixed(True))
        assert verdict.num_accepted == 1
    assert verify("coupled", proposal, Rows(picks=(0, 1)), Fixed(True)).tokens(proposal) == (0, 1)
    with pytest.raises(ConfigError, match="unknown verification rule 'fly'; use one of token"):
        verify("fly", proposal, Rows([P, P]), Fixed(True))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not for 'coupled'"):
        survival("coupled", proposal, Rows([P, P]))


@pytest.mark.parametrize("name", RULE_NAMES)
def test_survival_is_the_chance_of_standing(name: Rule) -> None:
    """Its mean over drafts is the enumerated number of accepted drafts, position by position."""
    rule = {"token": verify_token, "block": verify_block}[name]
    for case in oracles.cases(2):
        stands = [Fraction(0)] * 3
        said = [Fraction(0)] * 3

        def run(dice: Dice, case: oracles.Case = case) -> tuple[Proposal, int]:
            proposal = case.proposal(dice, 3)
            target = oracles.Laws(case.target, (), proposal.token_ids)
            return proposal, rule(proposal, target, dice).num_accepted

        for probability, (proposal, num_accepted) in oracles.outcomes(run):
            target = oracles.Laws(case.target, (), proposal.token_ids)
            chain = survival(name, proposal, target)
            for i in range(3):
                stands[i] += probability * (num_accepted > i)
                said[i] += probability * chain[i]
        assert said == stands, case.name


def test_survival_ends_at_unusable_laws() -> None:
    proposal = Proposal(start=0, token_ids=(0, 0, 0), laws=[Q, BROKEN_LAWS["NaN"], Q])
    assert survival("block", proposal, Rows([P] * 4)) == [1, 0, 0]
    proposal = Proposal(start=0, token_ids=(2, 2), laws=[Q, Q])
    assert survival("token", proposal, Rows([P, np.full(3, math.nan)])) == [0.4, 0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
def test_block_never_expects_fewer_drafts(seed: int, size: int) -> None:
    r = np.random.default_rng(seed)
    p, q = r.dirichlet([0.4] * 6, size=size + 1), r.dirichlet([0.4] * 6, size=size)
    ids = tuple(int(r.choice(6, p=row)) for row in q)
    proposal = Proposal(start=0, token_ids=ids, laws=q)
    token = survival("token", proposal, Rows(p))
    block = survival("block", proposal, Rows(p))
    assert all(b >= t - 1e-12 for b, t in zip(block, token, strict=True))


@pytest.mark.parametrize("rule", LAW_RULES)
def test_floats_give_the_exact_law_to_rounding(rule: oracles.LawRule) -> None:
    for case in oracles.cases(3):
        floats = oracles.Case(
            name=case.name,
            vocab_size=3,
            target=lambda prefix, case=case: case.target(prefix).astype(np.float64),
            draft=lambda prefix, case=case: case.draft(prefix).astype(np.float64),
            one_hot=case.one_hot,
        )
        got, accepted = oracles.output_law(rule, floats, 2)
        want = oracles.joint_law(case.target, 3)
        for text in got.keys() | want.keys():
            assert abs(got.get(text, 0) - want.get(text, 0)) < 1e-14
        assert abs(accepted - oracles.output_law(rule, case, 2)[1]) < 1e-14


@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_published_vocabulary(name: Rule) -> None:
    """129,280 tokens: drafts near the target mostly stand, replacements come from the excess."""
    r = np.random.default_rng(5)
    logits = torch.tensor(r.normal(size=(4, 129_280)) * 3, dtype=torch.float32)
    p = [law(row) for row in logits]
    q = [law(row + 0.3 * torch.tensor(r.normal(size=129_280))) for row in logits[:3]]
    accepted = rejected = 0
    for seed in range(20):
        dice = KeyedDice(seed, 100)
        ids = tuple(dice.draft(100 + i, q[i]) for i in range(3))
        proposal = Proposal(start=100, token_ids=ids, laws=q)
        verdict = verify(name, proposal, Rows(p), dice)
        accepted += verdict.num_accepted
        assert verdict == verify(name, proposal, Rows(p), KeyedDice(seed, 100))
        if verdict.why == "rejected":
            rejected += 1
            i = verdict.num_accepted
            assert verdict.next_token is not None
            if name == "token":
                assert p[i][verdict.next_token] > q[i][verdict.next_token]
    assert 30 <= accepted < 60
    assert rejected


def test_laws_from_scores() -> None:
    got = law(torch.tensor([0.0, math.log(3.0), -math.inf]))
    assert got.dtype == np.float64
    assert np.allclose(got, [0.25, 0.75, 0.0], atol=1e-7)
    assert law(np.array([1.0, 5.0, 5.0]), greedy=True).tolist() == [0.0, 1.0, 0.0]
    assert is_law(law(np.array([1e300, -1e300, 0.0])))
    for scores in ([math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]):
        assert not is_law(law(np.array(scores)))
    assert is_law(one_hot(4, 2))


def test_draws_never_touch_zero_weights() -> None:
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    below_one = 1.0 - 2.0**-53
    drawn = [draw(weights, u) for u in (0.0, 0.2499, 0.25, 0.5, below_one)]
    assert drawn == [1, 1, 3, 3, 3]
    assert draw(weights * 1e-320, below_one) == 3
    assert draw(np.array([1.0, 0.0]), 1.0) == 0  # not a number our dice give


def test_proposals_are_cut_whole() -> None:
    proposal = Proposal(start=9, token_ids=(1, 2, 0), laws=[P, Q, P], confidences=(0.9, 0.5, 0.1))
    cut = proposal.cut(2)
    assert (cut.start, cut.token_ids, cut.confidences, len(cut)) == (9, (1, 2), (0.9, 0.5), 2)
    assert cut.laws is not None
    assert len(cut.laws) == 2
    assert Proposal(start=0, token_ids=(1, 2)).cut(1).laws is None
