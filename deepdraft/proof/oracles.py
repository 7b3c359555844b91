"""Oracles of the verification rules: the exact law of what comes out, and samples of it.

Owns: dice that visit every outcome with its probability, small targets and drafters in fractions,
the comparison with the target's own law, and the checks that `selftest` runs on them.
Knows nothing of: models, devices, files.

A check takes the rule as an argument, so a faulty rule can be shown to be caught. Exact checks run
the very code that serves requests, on fractions instead of floats.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch

from deepdraft.engine import sampler
from deepdraft.proof.failed import Failed
from deepdraft.spec.laws import law
from deepdraft.spec.noise import KeyedDice
from deepdraft.spec.protocol import Dice, Number, Proposal, Row, Rule, Target, Verdict
from deepdraft.spec.verify import verify, verify_block, verify_coupled, verify_token
from deepdraft.types import SamplingParams

T = TypeVar("T")
Prefix = tuple[int, ...]
LawRule = Callable[[Proposal, Target, Dice], Verdict]
Keep = Callable[[Prefix], int]
"""How many of the drafts are verified, given all of them."""
Table = Callable[[Prefix], Row]
"""The law of the next token after a prefix."""


# Dice that visit everything


class _Branches:
    """Follows a script of choices; where the script ends, it takes the first one and notes all."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[tuple[int, int]] = []
        self.probability: Number = Fraction(1)

    def _choose(self, options: Sequence[tuple[Any, Number]]) -> Any:
        step = len(self.taken)
        number = self.script[step] if step < len(self.script) else 0
        value, probability = options[number]
        self.taken.append((number, len(options)))
        self.probability = self.probability * probability
        return value

    def accept(self, position: int, probability: Number, /) -> bool:
        """True with this probability."""
        if not 0 <= probability <= 1:
            raise Failed(f"an acceptance probability of {probability} at position {position}")
        options = [(True, probability), (False, 1 - probability)]
        return self._choose([o for o in options if o[1] > 0])

    def pick(self, position: int, weights_V: Row, /) -> int:
        """Every token of positive weight in turn."""
        total = weights_V.sum()
        if not total > 0 or weights_V.min() < 0:
            raise Failed(f"a token is to be drawn from {list(weights_V)} at position {position}")
        return self._choose([(x, w / total) for x, w in enumerate(weights_V) if w > 0])


def outcomes(run: Callable[[Dice], T]) -> Iterator[tuple[Number, T]]:
    """Everything that `run` can return, and how likely each way there is."""
    script: list[int] = []
    while True:
        dice = _Branches(script)
        result = run(dice)
        yield dice.probability, result
        taken = dice.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [number for number, _ in taken]
        script[-1] += 1


# Small targets and drafters


def fractions(*values: int) -> Row:
    """Weights as a law of fractions."""
    total = sum(values)
    return np.array([Fraction(v, total) for v in values], dtype=object)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target and a drafter over a small vocabulary."""

    name: str
    vocab_size: int
    target: Table
    draft: Table
    one_hot: bool = False
    """The drafter proposes the likeliest token of its law and states no law."""

    def proposal(self, dice: Dice, size: int, context: Prefix = ()) -> Proposal:
        """Drafts after a context, drawn by the dice; its length is their first position."""
        ids: list[int] = []
        laws = []
        for i in range(size):
            law_V = self.draft((*context, *ids))
            laws.append(law_V)
            if self.one_hot:
                ids.append(int(np.argmax(law_V)))
            else:
                ids.append(dice.pick(len(context) + i, law_V))
        return Proposal(
            start=len(context), token_ids=tuple(ids), laws=None if self.one_hot else laws
        )


class Laws:
    """The target's laws along some drafts."""

    def __init__(self, table: Table, context: Prefix, ids: Prefix) -> None:
        self.table, self.context, self.ids = table, context, ids

    def law(self, i: int, /) -> Row:
        """The law after the first i drafts."""
        return self.table((*self.context, *self.ids[:i]))

    def pick(self, i: int, /) -> int | None:
        """Not for these rules."""
        raise Failed(f"a rule on laws asked for the target's pick {i}")


def _memoryless(row: Row) -> Table:
    return lambda prefix: row


def _contextual(seed: int, vocab_size: int, *, zeros: float = 0.0, spread: int = 9) -> Table:
    """Another law after every prefix; a share of the entries is 0."""

    def table(prefix: Prefix) -> Row:
        r = random.Random(f"{seed}:{prefix}")
        values = [0 if r.random() < zeros else r.randint(1, spread) for _ in range(vocab_size)]
        if not any(values):
            values[r.randrange(vocab_size)] = 1
        return fractions(*values)

    return table


def _near(table: Table, seed: int, vocab_size: int) -> Table:
    """A law close to another one, as a good drafter's."""
    noise = _contextual(seed, vocab_size)
    return lambda prefix: (3 * table(prefix) + noise(prefix)) / 4


def cases(vocab_size: int) -> list[Case]:
    """Targets and drafters that differ with the prefix, and the awkward ones."""
    v = vocab_size
    plain, holes = _contextual(1, v), _contextual(2, v, zeros=0.4)
    left = fractions(*[1] * (v // 2), *[0] * (v - v // 2))
    right = fractions(*[0] * (v // 2), *[2] * (v - v // 2))
    table = [
        ("unrelated laws", plain, _contextual(3, v), False),
        ("near laws", plain, _near(plain, 4, v), False),
        ("zeros in the target", holes, _contextual(5, v), False),
        ("zeros in the draft", plain, _contextual(6, v, zeros=0.4), False),
        ("zeros in both", holes, _contextual(7, v, zeros=0.4), False),
        ("identical laws", plain, plain, False),
        ("identical laws with zeros", holes, holes, False),
        ("disjoint supports", _memoryless(left), _memoryless(right), False),
        ("a certain target", _contextual(8, v, zeros=1.0), _contextual(9, v), False),
        ("stated one-hot laws", plain, _contextual(8, v, zeros=1.0), False),
        ("one-hot drafts without laws", plain, _contextual(9, v), True),
        ("one-hot drafts, zeros", holes, _contextual(10, v), True),
    ]
    return [
        Case(name=name, vocab_size=v, target=target, draft=draft, one_hot=one_hot)
        for name, target, draft, one_hot in table
    ]


# Exact checks


def joint_law(table: Table, length: int, context: Prefix = ()) -> dict[Prefix, Number]:
    """The probability of every text of this length under a table."""
    laws: dict[Prefix, Number] = {(): Fraction(1)}
    for _ in range(length):
        laws = {
            (*prefix, x): p * q
            for prefix, p in laws.items()
            for x, q in enumerate(table((*context, *prefix)))
            if q > 0
        }
    return laws


def output_law(
    rule: LawRule, case: Case, size: int, keep: Keep | None = None
) -> tuple[dict[Prefix, Number], Number]:
    """The exact law of size + 1 tokens from one verified block and plain decoding after it.

    Also the expected number of accepted drafts. `keep` cuts the block before verification.
    """

    def run(dice: Dice) -> tuple[Prefix, int]:
        proposal = case.proposal(dice, size)
        if keep is not None:
            proposal = proposal.cut(keep(proposal.token_ids))
        verdict = rule(proposal, Laws(case.target, (), proposal.token_ids), dice)
        return verdict.tokens(proposal), verdict.num_accepted

    ends: dict[Prefix, Number] = defaultdict(Fraction)
    accepted: Number = Fraction(0)
    for probability, (text, num_accepted) in outcomes(run):
        ends[text] += probability
        accepted += probability * num_accepted
    whole: dict[Prefix, Number] = defaultdict(Fraction)
    for text, probability in ends.items():
        for rest, share in joint_law(case.target, size + 1 - len(text), text).items():
            whole[text + rest] += probability * share
    return dict(whole), accepted


def check_output_law(
    name: str, rule: LawRule, case: Case, size: int, keep: Keep | None = None
) -> Number:
    """The text follows the target's law exactly. Returns the expected accepted drafts."""
    got, accepted = output_law(rule, case, size, keep)
    want = joint_law(case.target, size + 1)
    for text in want.keys() | got.keys():
        if got.get(text, 0) != want.get(text, 0):
            raise Failed(
                f"{name}, {case.name}, {size} drafts: text {text} has probability "
                f"{got.get(text, 0)}, the target gives {want.get(text, 0)}"
            )
    return accepted


# Expected accepted drafts with a memoryless target (1/3, 2/3) and draft (2/3, 1/3); those for 2
# drafts are the example of Sun et al. 2024, section 2, the others by enumeration (design notes).
COIN = Case(
    name="coins 1/3 and 2/3",
    vocab_size=2,
    target=_memoryless(fractions(1, 2)),
    draft=_memoryless(fractions(2, 1)),
)
ACCEPTED = {
    1: (Fraction(2, 3), Fraction(2, 3)),
    2: (Fraction(10, 9), Fraction(11, 9)),
    3: (Fraction(38, 27), Fraction(5, 3)),
    5: (Fraction(422, 243), Fraction(64, 27)),
}
# Three tokens up to three drafts, two tokens up to five: 3**6 texts would take too long here.
EXACT_SIZES = ((3, (1, 2, 3)), (2, (1, 2, 3, 4, 5)))


def check_exact(token: LawRule = verify_token, block: LawRule = verify_block) -> str:
    """Both rules by enumeration in fractions: exact output law, known and ordered acceptance."""
    compared = 0
    for size, expected in ACCEPTED.items():
        for name, rule, want in zip(("token", "block"), (token, block), expected, strict=True):
            accepted = check_output_law(name, rule, COIN, size)
            if accepted != want:
                raise Failed(f"{name}: {accepted} of {size} drafts accepted, {want} expected")
            compared += 1
    for vocab_size, sizes in EXACT_SIZES:
        for case, size in itertools.product(cases(vocab_size), sizes):
            by_token = check_output_law("token", token, case, size)
            by_block = check_output_law("block", block, case, size)
            if by_block < by_token:
                raise Failed(
                    f"{case.name}, {size} drafts: block accepts {by_block}, token {by_token}"
                )
            compared += 2
    return f"{compared} exact laws"


def stopping_rule(ids: Prefix) -> int:
    """A cut that looks at drafts: whether draft i goes in depends on the drafts before it only."""
    for i in range(len(ids)):
        if random.Random(f"stop:{ids[:i]}").random() < 0.3:
            return i
    return len(ids)


def check_cuts(keep: Keep = stopping_rule) -> str:
    """A block cut by a stopping rule keeps the law, under both rules."""
    compared = 0
    for case in cases(2):
        for name, rule in (("token", verify_token), ("block", verify_block)):
            check_output_law(f"{name}, cut", rule, case, 4, keep)
            compared += 1
    return f"{compared} exact laws"


# Sampled checks


FAMILIES: tuple[tuple[str, Row, Row], ...] = (
    ("reversed", np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])),
    ("close", np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])),
    ("equal", np.array([0.6, 0.3, 0.1]), np.array([0.6, 0.3, 0.1])),
    ("filtered target", np.array([0.45, 0.55, 0.0]), np.array([0.2, 0.1, 0.7])),
    ("sure draft", np.array([0.4, 0.35, 0.25]), np.array([0.96, 0.03, 0.01])),
)
"""Name, target law, draft law; three tokens, the same after every prefix."""

# Chi-square quantiles at 1 - 1e-6 for 1 and 2 degrees of freedom.
_CHI_SQUARE = {1: 23.93, 2: 27.64}
MakeDice = Callable[[int, int], Any]
"""(seed, start of the block) -> dice that also `draft`, as `KeyedDice`."""


def chi_square(counts: Row, law_V: Row) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom. Raises Failed for a count where law is 0."""
    if counts[law_V == 0].any():
        raise Failed(f"{counts[law_V == 0].sum()} tokens of probability 0")
    here = law_V > 0
    expected = counts.sum() * law_V[here]
    return float(((counts[here] - expected) ** 2 / expected).sum()), int(here.sum()) - 1


def _check_counts(what: str, counts: Row, law_V: Row) -> float:
    value, freedom = chi_square(counts, law_V)
    if value > _CHI_SQUARE[freedom]:
        raise Failed(
            f"{what}: tokens come with {counts / counts.sum()} instead of {law_V}, chi-square "
            f"{value:.1f} at {freedom} degrees of freedom"
        )
    return value


class _Drafting:
    """Lets a case draw its drafts from the draft's own stream."""

    def __init__(self, dice: Any) -> None:
        self.dice = dice

    def accept(self, position: int, probability: Number, /) -> bool:
        """Not for drafters."""
        raise Failed("a drafter accepted something")

    def pick(self, position: int, weights_V: Row, /) -> int:
        """A draft."""
        return self.dice.draft(position, weights_V)


def _step(rule: LawRule, case: Case, size: int, context: Prefix, dice: Any) -> tuple[Prefix, int]:
    """One drafted and verified block: what it appends and how many drafts that holds."""
    proposal = case.proposal(_Drafting(dice), size, context)
    verdict = rule(proposal, Laws(case.target, context, proposal.token_ids), dice)
    return verdict.tokens(proposal), verdict.num_accepted


def check_sampled(
    token: LawRule = verify_token,
    block: LawRule = verify_block,
    *,
    trials: int = 10_000,
    size: int = 2,
    make_dice: MakeDice = KeyedDice,
) -> str:
    """Three-token families with keyed dice: first tokens follow the target, block accepts more."""
    worst, shares = 0.0, []
    for number, (name, p_V, q_V) in enumerate(FAMILIES):
        case = Case(name=name, vocab_size=3, target=_memoryless(p_V), draft=_memoryless(q_V))
        rules = (("token", token, np.zeros(3)), ("block", block, np.zeros(3)))
        accepted = dict.fromkeys(("token", "block"), 0)
        for trial in range(trials):
            dice = make_dice(number * trials + trial, 0)
            proposal = case.proposal(_Drafting(dice), size)
            for rule_name, rule, counts in rules:
                verdict = rule(proposal, Laws(case.target, (), proposal.token_ids), dice)
                counts[verdict.tokens(proposal)[0]] += 1
                accepted[rule_name] += verdict.num_accepted
        for rule_name, _, counts in rules:
            worst = max(worst, _check_counts(f"{rule_name}, {name}", counts, p_V))
        shares.append(accepted["block"] / max(1, accepted["token"]))
        if accepted["block"] < 0.98 * accepted["token"]:
            raise Failed(
                f"{name}: block accepts {accepted['block']} drafts, token {accepted['token']}"
            )
    return (
        f"{len(FAMILIES)} families, {trials} trials, chi-square at most {worst:.1f}, "
        f"block accepts {min(shares):.3f} to {max(shares):.3f} times the token rule's drafts"
    )


def check_keys(make_dice: MakeDice = KeyedDice, *, trials: int = 3_000) -> str:
    """The block after the first one follows the target too: no key serves twice.

    The family is the one in which dice keyed by position alone do most harm.
    """
    name, p_V, q_V = FAMILIES[-1]
    case = Case(name=name, vocab_size=3, target=_memoryless(p_V), draft=_memoryless(q_V))
    worst = 0.0
    for rule_name, rule in (("token", verify_token), ("block", verify_block)):
        counts = np.zeros(3)
        for seed in range(trials):
            text, _ = _step(rule, case, 3, (), make_dice(seed, 0))
            after, _ = _step(rule, case, 3, text, make_dice(seed, len(text)))
            counts[after[0]] += 1
        worst = max(worst, _check_counts(f"{rule_name}, {name}, second block", counts, p_V))
    return f"{trials} trials of two blocks, chi-square at most {worst:.1f}"


class _Coupled:
    """A target that picks as plain decoding does, over logits that depend on the prefix."""

    def __init__(self, vocab_size: int, params: SamplingParams) -> None:
        self.vocab_size, self.params = vocab_size, params
        self.sampler = sampler.Sampler(vocab_size)

    def logits(self, prefix: Prefix, which: str) -> torch.Tensor:
        """The target's, or the draft's, which are near."""

        def noise(name: str) -> torch.Tensor:
            r = random.Random(f"{name}:{prefix[-3:]}")
            return torch.tensor([r.gauss(0.0, 1.0) for _ in range(self.vocab_size)])

        target = 1.5 * noise("target")
        return target if which == "target" else target + 0.4 * noise("draft")

    def choose(self, prefix: Prefix, which: str) -> int:
        """Plain decoding's choice after a prefix, from either's logits."""
        row = sampler.Row(params=self.params, position=len(prefix), output_counts=_counts(prefix))
        choice = self.sampler.sample(self.logits(prefix, which).unsqueeze(0), [row])[0]
        return choice.token_id

    def law(self, prefix: Prefix, which: str) -> Row:
        """The law that this choice follows."""
        row = sampler.Row(params=self.params, position=len(prefix), output_counts=_counts(prefix))
        scores_V = sampler.scores(self.logits(prefix, which), row)
        return law(scores_V, greedy=self.params.temperature == 0.0)


class _Along:
    """A `_Coupled` along some drafts, as a `Target`."""

    def __init__(self, source: _Coupled, context: Prefix, ids: Prefix) -> None:
        self.source, self.context, self.ids = source, context, ids

    def law(self, i: int, /) -> Row:
        return self.source.law((*self.context, *self.ids[:i]), "target")

    def pick(self, i: int, /) -> int | None:
        return self.source.choose((*self.context, *self.ids[:i]), "target")


def _counts(prefix: Prefix) -> dict[int, int]:
    return {x: prefix.count(x) for x in prefix}


CoupledRule = Callable[[Proposal, Target], Verdict]


def check_coupled(rule: CoupledRule = verify_coupled, *, length: int = 60) -> str:
    """The coupled rule's text is plain decoding's; at temperature 0 so is that of every rule."""
    drafts = accepted = 0
    for temperature, seed in itertools.product((0.0, 0.7, 1.0, 1.6), (1, 2)):
        params = SamplingParams(
            temperature=temperature, top_p=0.95, seed=seed, presence_penalty=0.3
        )
        source = _Coupled(12, params)
        plain: Prefix = ()
        while len(plain) < length:
            plain = (*plain, source.choose(plain, "target"))
        rules: tuple[Rule, ...] = ("coupled",) if temperature else ("coupled", "token", "block")
        for name in rules:
            text: Prefix = ()
            while len(text) < length:
                ids: Prefix = ()
                for _ in range(4):
                    ids = (*ids, source.choose(text + ids, "draft"))
                proposal = Proposal(start=len(text), token_ids=ids)
                target = _Along(source, text, ids)
                if name == "coupled":
                    verdict = rule(proposal, target)
                else:
                    verdict = verify(name, proposal, target, KeyedDice(seed, len(text)))
                text += verdict.tokens(proposal)
                drafts += len(ids)
                accepted += verdict.num_accepted
            if text[:length] != plain:
                at = next(i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b)
                raise Failed(f"{name} at temperature {temperature}: other text from token {at} on")
    return f"{8 * length} tokens as in plain decoding, {accepted / drafts:.2f} of drafts accepted"
