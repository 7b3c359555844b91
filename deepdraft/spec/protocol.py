"""The vocabulary of speculation: what a drafter proposes, what verification asks and answers.

Owns: `Proposal`, `Verdict`, the rules' names, and the two things a rule needs from outside: the
target's laws and the dice. Knows nothing of: models, logits, how noise is made.

A *law* is a row [V] of probabilities: float64, or Python fractions in an object array, with which
the same code can be enumerated exactly. Letters: k drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from deepdraft.types import Rule

Row = NDArray[Any]
Number = Any
"""A float or a Fraction: whatever the laws hold."""

RULES: tuple[Rule, ...] = get_args(Rule)

Why = Literal["bonus", "rejected", "malformed", "target"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """Drafted tokens and the laws they were drawn from.

    `start` is the absolute position of the first draft. `laws[i]` is the law that draft i was
    really drawn from: after the draft's temperature, filter or shortlist, normalised. None says
    that each draft was certain given what stood before it (argmax, look-up): a one-hot law.
    """

    start: int
    token_ids: tuple[int, ...]
    laws: Sequence[Row] | Row | None = None
    confidences: tuple[float, ...] = ()
    """Probability that draft i is accepted if all before it were; no rule reads it."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_drafts: int) -> "Proposal":
        """The first drafts alone. Which number, may depend on these drafts, never on later ones."""
        return Proposal(
            start=self.start,
            token_ids=self.token_ids[:num_drafts],
            laws=None if self.laws is None else self.laws[:num_drafts],
            confidences=self.confidences[:num_drafts],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a proposal.

    `num_accepted` drafts stand, `next_token` follows them. Why that token:
    "bonus" (all drafts stand), "rejected" (it replaces a draft), "malformed" (the drafts were cut
    where one could not be used; `detail` says which), "target" (there is no token: the target's law
    at that place is unusable, the accepted drafts stand all the same).
    """

    num_accepted: int
    next_token: int | None
    why: Why
    detail: str = ""

    def tokens(self, proposal: Proposal) -> tuple[int, ...]:
        """Everything that this step appends to the text."""
        accepted = proposal.token_ids[: self.num_accepted]
        return accepted if self.next_token is None else (*accepted, self.next_token)


class Target(Protocol):
    """The target at the drafted positions, after every setting of the request.

    Index i means: after the first i drafts, so penalties, masks and grammar see exactly these.
    A rule asks for i only if draft i - 1 is possible under law i - 1, in rising order, each index
    once; what it does not ask for need not be computed.
    """

    def law(self, i: int, /) -> Row:
        """The law [V] of the token at position start + i, for the rules "token" and "block"."""
        ...

    def pick(self, i: int, /) -> int | None:
        """What plain decoding chooses there, for the rule "coupled"; None: it has no token."""
        ...


class Dice(Protocol):
    """All randomness of a verification."""

    def accept(self, position: int, probability: Number, /) -> bool:
        """True with this probability; asked at most once for a position."""
        ...

    def pick(self, position: int, weights_V: Row, /) -> int:
        """A token drawn in proportion to weights that are >= 0 and not all 0."""
        ...


def one_hot(vocab_size: int, token_id: int) -> Row:
    """The law [V] of a certain token, float64."""
    law_V = np.zeros(vocab_size)
    law_V[token_id] = 1.0
    return law_V
