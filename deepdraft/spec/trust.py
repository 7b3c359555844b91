"""How far the confidences of one text's drafts are to be believed, learnt from what came of them.

Owns: one shift of log-odds a text and its learning. Knows nothing of: calibration files, costs.
"""

import math
from collections.abc import Sequence

from deepdraft.errors import ConfigError

MOST_ODDS = 6.0
"""A confidence counts as log-odds of at most so much: nobody is surer than 0.9975."""
_LOWEST, _HIGHEST = -8.0, 5.0


class Trust:
    """A shift `b`: a draft of confidence c stands with the log-odds of c plus b.

    A calibration is right on the average of many texts. On a text of another kind than the drafter
    was trained on, confidences of 0.9 may fall nine times in ten; on a text that repeats itself,
    drafts of 0.5 may all stand. Before a text began b has mean 0 and standard deviation `spread`;
    each draft that was judged moves it by one step of Newton's method, and what was learnt weighs
    `memory` times less with each step, drafted or not.

    >>> trust = Trust()
    >>> trust.learn((0.9, 0.9), 0)
    >>> trust.apply((0.9,))[0] < 0.7
    True
    """

    def __init__(self, *, spread: float = 1.5, memory: float = 0.96) -> None:
        if not (spread > 0.0 and 0.0 <= memory <= 1.0):
            raise ConfigError("trust: spread > 0 and 0 <= memory <= 1")
        self.memory = memory
        self.shift = 0.0
        self._least = self._weight = 1.0 / spread**2

    def apply(self, confidences: Sequence[float]) -> tuple[float, ...]:
        """The confidences shifted; what is no probability stays as it is."""
        return tuple(
            _probability(_odds(c) + self.shift) if 0.0 <= c <= 1.0 else c for c in confidences
        )

    def learn(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Takes a block whose verified drafts had these confidences, unshifted; those behind the
        first that fell were not judged."""
        self.rest()
        for i, confidence in enumerate(confidences[: num_accepted + 1]):
            if not 0.0 <= confidence <= 1.0:
                return
            p = _probability(_odds(confidence) + self.shift)
            self._weight += p * (1.0 - p)
            self.shift += ((i < num_accepted) - p) / self._weight
            self.shift = min(_HIGHEST, max(_LOWEST, self.shift))

    def rest(self) -> None:
        """A step without drafts: what they would be worth is a little less known."""
        self._weight = self._least + self.memory * (self._weight - self._least)


def promised(confidences: Sequence[float]) -> float:
    """Drafts of a block expected to stand, if its confidences are right."""
    total, survival = 0.0, 1.0
    for confidence in confidences:
        survival *= confidence
        total += survival
    return total


def _odds(p: float) -> float:
    least = _probability(-MOST_ODDS)
    p = min(1.0 - least, max(least, p))
    return math.log(p / (1.0 - p))


def _probability(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))
