"""Two sets of logits: how far apart they are, where, and whether it matters.

Owns: the measures and tolerances. Knows nothing of: models, causes.

In float32 the judge is dl = max |difference| / std(reference), at most 1e-4 (engines reach 2e-6).
In half precision a single routing flip makes the maximum large, so the judges are the mean KL
divergence and the share of positions with the same best token, among those whose margin exceeds
the noise.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT32_TOLERANCE = 1e-4
HALF_KL = 0.5
"""What fails for sure. Clean tiny models reach 0.16 in bfloat16: where an indexer of random weights
chooses 16 of 384 tokens, rounding alone chooses others."""
HALF_AGREEMENT = 0.95


@dataclass(frozen=True, slots=True)
class Measures:
    """Logits of ours against a reference's."""

    dl: float
    """Largest difference over the standard deviation of the reference's logits."""
    dl_short: float
    """The same over the first eight positions."""
    mean_kl: float
    top1: float
    """Share of positions with the same best token."""
    top1_clear: float
    """The same, where the reference's margin is more than twice the noise (the 95th percentile of
    differences)."""
    first_bad: int | None
    """First position whose dl is beyond the tolerance."""
    not_finite: int
    """Positions with values of ours that are not finite."""
    by_position: list[float]
    """dl at each position."""
    margins: list[float]
    """Reference's best logit minus its second best, at each position, over the same deviation."""
    agrees: list[bool]

    def passed(self, dtype: str) -> bool:
        """Whether they agree as well as `dtype` allows."""
        if self.not_finite:
            return False
        if dtype == "float32":
            return self.dl <= FLOAT32_TOLERANCE
        return self.mean_kl <= HALF_KL and self.top1_clear >= HALF_AGREEMENT

    def as_json(self) -> dict[str, Any]:
        """Figures, without the lists."""
        return {
            "dl": self.dl,
            "dl_short": self.dl_short,
            "mean_kl": self.mean_kl,
            "top1": self.top1,
            "top1_where_margin_is_clear": self.top1_clear,
            "first_bad_position": self.first_bad,
            "positions_not_finite": self.not_finite,
        }


def measure(ours: Tensor, theirs: Tensor) -> Measures:
    """Logits [N, V] of both. NaN in `theirs`: the reference did not tell that value."""
    told = ~theirs.isnan()
    complete = bool(told.all())
    ours, theirs = ours.double(), theirs.double()
    finite = torch.isfinite(torch.where(told, ours, 0.0)).all(-1)
    difference = torch.where(told, ours - theirs, 0.0).nan_to_num(nan=torch.inf).abs()
    spread = theirs[told].std().clamp_min(1e-30)
    rows = (difference.amax(-1) / spread).nan_to_num(nan=torch.inf)
    known = torch.where(told, theirs, -torch.inf)
    best = known.topk(2, -1)
    margins = (best.values[:, 0] - best.values[:, 1]) / spread
    same = ours.argmax(-1) == best.indices[:, 0]
    noise = float(rows[finite].quantile(0.95)) if bool(finite.any()) else 0.0
    clear = margins > 2 * noise
    kl = _mean_kl(ours[finite], theirs[finite]) if complete and bool(finite.any()) else 0.0
    bad = (rows > FLOAT32_TOLERANCE).nonzero()
    return Measures(
        dl=float(rows.max()),
        dl_short=float(rows[:8].max()),
        mean_kl=kl,
        top1=float(same.double().mean()),
        top1_clear=float(same[clear].double().mean()) if bool(clear.any()) else 1.0,
        first_bad=int(bad[0]) if len(bad) else None,
        not_finite=int((~finite).sum()),
        by_position=rows.tolist(),
        margins=margins.tolist(),
        agrees=same.tolist(),
    )


def text_difference(ours: Tensor, theirs: Tensor, ids: list[int]) -> float:
    """Largest difference of the log-probabilities [N, V] of the text's own tokens."""
    rows, following = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
    difference = (ours[rows, following].double() - theirs[rows, following].double()).abs()
    told = difference[~theirs[rows, following].isnan()]
    return float(told.nan_to_num(nan=torch.inf).max()) if len(told) else 0.0


def _mean_kl(ours: Tensor, theirs: Tensor) -> float:
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0.0))


@dataclass(frozen=True, slots=True)
class GreedyMeasures:
    """Free greedy continuations of both."""

    ours: list[int]
    theirs: list[int]
    first_difference: int | None
    margin: float | None
    """The reference's margin there, over the deviation of its logits."""

    def passed(self, noise: float) -> bool:
        """Equal, or different only where the reference itself was undecided."""
        return self.first_difference is None or (self.margin or 0.0) <= 2 * noise

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "tokens": len(self.theirs),
            "first_difference": self.first_difference,
            "margin_there": self.margin,
        }


def compare_greedy(ours: list[int], theirs: list[int], logits: Tensor | None) -> GreedyMeasures:
    """Two continuations; `logits` [len(theirs), V] chose the reference's."""
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    margin = None
    if first is not None and logits is not None:
        best = logits[first].double().topk(2).values
        margin = float((best[0] - best[1]) / logits.double().std().clamp_min(1e-30))
    return GreedyMeasures(ours, theirs, first, margin)
