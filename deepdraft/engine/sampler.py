"""Chooses tokens from logits.

Owns: penalties, temperature, the top-k / top-p / min-p filters, the noise, log-probabilities.
Knows nothing of: sequences, batches, steps. A row's choice depends on that row's arguments alone,
bit for bit: every operation is elementwise, a sort within the row, or an integer sum (which has
one value in any order), so neither other rows nor the device's reduction order can change it.

Letters: R rows, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from deepdraft.types import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
# Constants of the splitmix64 finaliser and its Weyl step (Steele, Lea and Flood, 2014).
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# exp(x - max) is at most 1, so sums of 2**44ths stay below 2**63 for any vocabulary up to 2**19.
_WEIGHT_UNIT = float(1 << 44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one row of logits needs beside the logits.

    `position` is the absolute position that the chosen token takes in its sequence.
    `output_counts` and `prompt_ids` are read by the penalties only.
    """

    params: SamplingParams
    position: int
    output_counts: Mapping[int, int] | None = None
    prompt_ids: Collection[int] = ()
    mask: np.ndarray | None = None
    """The tokens (bool [V]) that a grammar allows; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome for one row: a token, or why there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


Top = tuple[float, int]
"""Largest value of a row, and its token."""


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes the shift a logical one.
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


class Sampler:
    """Samples rows of logits over a vocabulary of fixed size on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
        self._steps_V = ids * _signed(_WEYL)
        self.vocab_size = vocab_size
        # A draft and the target's choice at its place use the same noise.
        self._recent: dict[tuple[int, int], Tensor] = {}
        self._most_recent = max(16, (1 << 20) // vocab_size)

    def gumbel(self, seed: int, position: int) -> Tensor:
        """Standard Gumbel noise [V], float64, a pure function of (seed, position, token id).

        Not to be written to.
        """
        place = (seed, position)
        noise_V = self._recent.get(place)
        if noise_V is None:
            if len(self._recent) >= self._most_recent:
                self._recent.clear()
            noise_V = self._recent[place] = self._make_gumbel(seed, position)
        return noise_V

    def _make_gumbel(self, seed: int, position: int) -> Tensor:
        key = _mix((_mix(seed & _MASK) + position * _WEYL) & _MASK)
        x_V = self._steps_V + _signed(key)
        x_V = _shift_xor(x_V, 30) * _signed(_MIX_1)
        x_V = _shift_xor(x_V, 27) * _signed(_MIX_2)
        x_V = _shift_xor(x_V, 31)
        # The upper 52 bits, centred in their cell: exact in float64 and never 0 or 1.
        x_V = (x_V >> 12) & ((1 << 52) - 1)
        u_V = x_V.double().add_(0.5).mul_(2.0**-52)
        return u_V.log_().neg_().log_().neg_()

    def sample(self, logits_RV: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """One choice per row. A row with NaN or without a finite maximum gets an error instead."""
        assert logits_RV.shape == (len(rows), self.vocab_size), (
            f"{tuple(logits_RV.shape)=} {len(rows)=} {self.vocab_size=}"
        )
        choices = []
        for i, (row, top) in enumerate(zip(rows, self.tops(logits_RV), strict=True)):
            choice = self.choose(logits_RV[i], row, top)
            if choice.error is None and row.params.logprobs is not None:
                logprob = logprobs(logits_RV[i], choice.token_id, row.params.logprobs)
                choice = Choice(token_id=choice.token_id, logprob=logprob)
            choices.append(choice)
        return choices

    def tops(self, logits_RV: Tensor) -> list[Top]:
        """The largest value of each row and its lowest id. NaN wins, so this finds NaN, too."""
        best = logits_RV.max(dim=-1)
        return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))

    def choose(self, logits_V: Tensor, row: Row, top: Top) -> Choice:
        """The choice of one row, without its log-probability. `top`: of `tops`."""
        error = unusable(row, top)
        if error is not None:
            return Choice(error=error)
        params = row.params
        if params.temperature == 0.0 and not _adjusts(row):
            # The best of all tokens is the best of those allowed if it is one of them.
            if row.mask is None or row.mask[top[1]]:
                return Choice(token_id=top[1])
        scores_V = scores(logits_V, row)
        if params.temperature != 0.0:
            scores_V = scores_V + self.gumbel(params.seed, row.position)
        value, token_id = (x.item() for x in scores_V.max(0))
        if not math.isfinite(value):
            return Choice(error=nothing_allowed(row))
        return Choice(token_id=int(token_id))


def unusable(row: Row, top: Top) -> str | None:
    """What is wrong with logits whose largest value is `top`, if anything."""
    value = top[0]
    if math.isfinite(value):
        return None
    what = "NaN" if math.isnan(value) else f"a largest value of {value}"
    return f"the model's logits at position {row.position} have {what}"


def nothing_allowed(row: Row) -> str:
    """The error of a row whose settings forbid every token."""
    return f"no token is allowed at position {row.position}"


def scores(logits_V: Tensor, row: Row) -> Tensor:
    """Log-weights [V] (float64, not normalised) that the row's token is drawn from.

    Order: grammar mask, repetition, frequency and presence penalty, bias, temperature, top-k,
    top-p among what top-k left, min-p relative to the best token. A filtered token is -inf. At
    temperature 0 the adjusted logits come back unfiltered: argmax needs no filter.
    """
    params = row.params
    scores_V = logits_V.double()
    if row.mask is not None:
        allowed_V = torch.from_numpy(row.mask).to(scores_V.device)
        scores_V = scores_V.masked_fill(~allowed_V, -math.inf)
    if _adjusts(row):
        scores_V = _adjust(scores_V, row)
    if params.temperature == 0.0:
        return scores_V
    # Subtracting the maximum first keeps a tiny temperature from overflowing to inf - inf.
    scores_V = (scores_V - scores_V.max()) / params.temperature
    if 0 < params.top_k < scores_V.shape[0] or params.top_p < 1.0:
        scores_V = _keep_top(scores_V, params.top_k, params.top_p)
    if params.min_p > 0.0:
        scores_V = scores_V.masked_fill(scores_V < math.log(params.min_p), -math.inf)
    return scores_V


def _adjusts(row: Row) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or (row.output_counts and (params.presence_penalty or params.frequency_penalty))
    )


def _adjust(scores_V: Tensor, row: Row) -> Tensor:
    params, counts = row.params, row.output_counts or {}
    scores_V = scores_V.clone()
    device = scores_V.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *counts}), dtype=torch.int64, device=device)
        old = scores_V[seen]
        penalty = params.repetition_penalty
        scores_V[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float64, device=device)
        scores_V[ids] -= params.frequency_penalty * times + params.presence_penalty
    if params.logit_bias:
        bias = dict(params.logit_bias)
        ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        scores_V[ids] += torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
    return scores_V


def _integer_weights(shifted: Tensor) -> Tensor:
    """exp of log-weights (maximum 0) in 2**-44ths, int64: a sum has one value in any order."""
    return (shifted.exp() * _WEIGHT_UNIT).round_().to(torch.int64)


def _keep_top(scores_V: Tensor, top_k: int, top_p: float) -> Tensor:
    # The stable sort puts the lowest id first among equals, so ties are cut in a fixed way.
    ordered_V, order_V = torch.sort(scores_V, descending=True, stable=True)
    num_kept = ordered_V.shape[0]
    if 0 < top_k < num_kept:
        num_kept = top_k
    if top_p < 1.0:
        weights = _integer_weights(ordered_V[:num_kept])
        upto = weights.cumsum(0)
        # Token i stays while the tokens before it hold less than top_p of the whole.
        limit = math.ceil(Fraction(top_p) * int(upto[-1]))
        num_kept = max(1, int(((upto - weights) < limit).sum()))
    kept_V = torch.full_like(scores_V, -math.inf)
    kept_V[order_V[:num_kept]] = ordered_V[:num_kept]
    return kept_V


def probabilities(logits_RV: Tensor, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Each token's probability in the model's own law, in float32: to be shown, not judged by."""
    if not token_ids:
        return ()
    logits_RV = logits_RV[: len(token_ids)].float()
    if logits_RV.device.type == "cpu":
        # A third of the time of torch's operators, which matters to a step of a small model.
        rows = logits_RV.numpy()
        tops = rows.max(axis=1)
        totals = np.exp(rows - tops[:, None]).sum(axis=1).tolist()
        return tuple(
            math.exp(float(rows[i, token_id] - tops[i])) / totals[i]
            for i, token_id in enumerate(token_ids)
        )
    ids = torch.tensor(token_ids, device=logits_RV.device).unsqueeze(1)
    chosen = logits_RV.gather(1, ids) - logits_RV.logsumexp(1, keepdim=True)
    return tuple(chosen.squeeze(1).exp().tolist())


def logprobs(logits_V: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Natural logs of the model's own distribution, before penalties, temperature and filters."""
    shifted_V = logits_V.double()
    shifted_V = shifted_V - shifted_V.max()
    total = int(_integer_weights(shifted_V).sum())
    log_total = math.log(total / _WEIGHT_UNIT)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ordered_V, order_V = torch.sort(shifted_V, descending=True, stable=True)
        best = zip(order_V[:num_top].tolist(), ordered_V[:num_top].tolist(), strict=True)
        top = tuple((i, x - log_total) for i, x in best)
    chosen = float(shifted_V[token_id]) - log_total
    return TokenLogprob(token_id=token_id, logprob=chosen, top=top)
