"""Whether to draft at all, judged from past steps.

Owns: the account of what drafting won or lost, pauses. Knows nothing of: target results, costs'
origin, how drafts are chosen.
"""

from deepdraft.errors import ConfigError


class DraftGate:
    """Whether a request, or several together, should draft at all, judged from past steps.

    A drafter costs time before its confidences are known. The gate keeps an account of the plain
    steps that drafting won, over sums that forget by `decay` a step and hold at most `most`, so
    that a text which turns is found out soon. It begins with `credit`. Below zero it pauses, for as
    many steps as make the loss a part `share` of them, from `first_pause` to `longest_pause`: while
    drafting does not pay, trials cost about that part of all time. After a pause the part `keep` of
    the loss still stands.
    """

    def __init__(
        self,
        *,
        credit: float = 0.0,
        most: float = 3.0,
        decay: float = 0.98,
        keep: float = 0.5,
        share: float = 0.02,
        first_pause: int = 4,
        longest_pause: int = 64,
    ) -> None:
        if not (
            0.0 <= credit <= most
            and 0.0 < decay < 1.0
            and 0.0 <= keep <= 1.0
            and 0.0 < share <= 1.0
            and 1 <= first_pause <= longest_pause
        ):
            raise ConfigError(
                "draft gate: 0 <= credit <= most, 0 < decay < 1, 0 <= keep <= 1, 0 < share <= 1 "
                "and 1 <= first_pause <= longest_pause"
            )
        self.most, self.decay, self.keep, self.share = most, decay, keep, share
        self.first_pause, self.longest_pause = first_pause, longest_pause
        self._won = credit
        """Plain steps."""
        self._resting = 0

    def wants_draft(self) -> bool:
        """Asked once a step."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    @property
    def on_trial(self) -> bool:
        """Drafting lost when it was last seen: the step after a pause is to find out anew."""
        return self._won < 0.0

    def record(self, num_tokens: float, ms: float, plain_ms: float) -> None:
        """A drafted step: the tokens that it is worth (what its confidences promise says more than
        what chance made of them), its whole time, and the time that a plain step takes now."""
        self._won = min(self.most, self.decay * self._won + num_tokens - ms / plain_ms)
        if self._won >= 0.0:
            return
        pause = -self._won / self.share
        self._resting = round(min(self.longest_pause, max(self.first_pause, pause)))
        self._won *= self.keep
