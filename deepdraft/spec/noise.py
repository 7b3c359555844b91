"""Keyed randomness for drafting and verification.

Owns: which numbers a draft, an acceptance and a replacement use. Knows nothing of: laws, rules,
and the noise of plain decoding, from which its keys are set apart.

A number is a pure function of (seed, start of the block, position, purpose). The start belongs to
the key: the block rule decides on later drafts and on their dice before it keeps an earlier end, so
a later step that used those numbers again would use numbers that already lost (docs/speculation.md
shows the bias). Starts only grow, so no key comes twice, and a run repeats exactly.
"""

from enum import IntEnum

from deepdraft.spec.laws import draw
from deepdraft.spec.protocol import Number, Row

_MASK = (1 << 64) - 1
# Constants of the splitmix64 finaliser and its Weyl step (Steele, Lea and Flood, 2014).
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Sets these keys apart from those of the plain sampler, which start from the seed itself.
_DOMAIN = 0x64726166745F6469


class Purpose(IntEnum):
    """What a number is for; each has its own stream."""

    DRAFT = 1
    ACCEPT = 2
    NEXT = 3


_NUM_PURPOSES = len(Purpose)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


class KeyedDice:
    """The dice of one block of one request: those of its drafts and those of its verification.

    `start` is the absolute position of the block's first draft, as in the `Proposal`.
    """

    def __init__(self, seed: int, start: int) -> None:
        self.seed, self.start = seed, start
        self._key = _mix((_mix((seed ^ _DOMAIN) & _MASK) + start * _WEYL) & _MASK)

    def uniform(self, position: int, purpose: Purpose) -> float:
        """A multiple of 2**-53 in [0, 1)."""
        place = position * _NUM_PURPOSES + purpose
        return (_mix((self._key + place * _WEYL) & _MASK) >> 11) * 2.0**-53

    def draft(self, position: int, law_V: Row) -> int:
        """A draft for this position, drawn from its law."""
        return draw(law_V, self.uniform(position, Purpose.DRAFT))

    def accept(self, position: int, probability: Number, /) -> bool:
        """True with this probability."""
        # Strictly below: the number may be 0, and probability 0 must stay impossible.
        return self.uniform(position, Purpose.ACCEPT) < probability

    def pick(self, position: int, weights_V: Row, /) -> int:
        """A token drawn in proportion to the weights."""
        return draw(weights_V, self.uniform(position, Purpose.NEXT))
