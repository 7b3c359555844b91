"""Laws from scores, checks of laws, draws from weights.

Knows nothing of: drafts, rules, noise.
"""

from typing import Any

import numpy as np

from deepdraft.spec.protocol import Number, Row, one_hot

SUM_TOLERANCE = 1e-6
"""How far from 1 a law's sum may lie; more would show in the output."""


def law(scores_V: Any, *, greedy: bool = False) -> Row:
    """The law [V] (float64) that a token is drawn from, given its log-weights.

    `scores_V` is an array or a CPU tensor; -inf is impossible. `greedy` gives the best token (of
    equals the lowest id) all the mass. Without a finite maximum the answer is NaN, no law.
    """
    scores_V = np.asarray(scores_V, dtype=np.float64)
    top = scores_V.max()
    if not np.isfinite(top):
        return np.full_like(scores_V, np.nan)
    if greedy:
        return one_hot(scores_V.shape[0], int(scores_V.argmax()))
    law_V = np.exp(scores_V - top)
    law_V /= law_V.sum()
    return law_V


def as_row(values: Any) -> Row:
    """Float64, or unchanged if it holds fractions."""
    row = np.asarray(values)
    return row if row.dtype == object else row.astype(np.float64, copy=False)


def is_law(row: Row) -> bool:
    """One axis, nothing negative, NaN or infinite, and a sum of 1."""
    if row.ndim != 1 or row.shape[0] == 0:
        return False
    # NaN fails every comparison; the bound from above keeps the sum from overflowing.
    return (
        float(np.minimum.reduce(row)) >= 0.0
        and float(np.maximum.reduce(row)) <= 1.0 + SUM_TOLERANCE
        and abs(float(np.add.reduce(row)) - 1.0) <= SUM_TOLERANCE
    )


def excess(scale: Number, p_V: Row, q_V: Row) -> tuple[Row, Number]:
    """max(scale * p - q, 0) [V] and its sum."""
    excess_V = scale * p_V - q_V
    excess_V = np.maximum(excess_V, 0, out=excess_V)
    return excess_V, np.add.reduce(excess_V)


def draw(weights_V: Row, u: float) -> int:
    """The token at which the running sum of the weights first exceeds u of the whole.

    u in [0, 1). A token of weight 0 is never drawn.
    """
    upto_V = weights_V.cumsum()
    token_id = int(upto_V.searchsorted(u * upto_V[-1], side="right"))
    if token_id == upto_V.shape[0]:  # u * total rounded up to the total
        token_id = int(np.flatnonzero(weights_V)[-1])
    return token_id
