"""Sampling with every setting of a request on the device: mask, penalties, bias, temperature,
top-k, top-p, min-p, keyed noise; log-probabilities.

The rule is that of `deepdraft.engine.sampler` (`scores`, `choose`, `logprobs`), in float64 and in
the same order of operations. Logarithms and exponentials are the device's, which may differ from
the CPU's in the last of 53 bits: a choice could differ where two scores are that close. The order
of a row's tokens for top-k and top-p comes from torch's stable sort, whose result is exact.

Letters: R rows of a step, W rows of a sequence, S slots, V vocabulary, N listed tokens.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs
from deepdraft.kernels.sample import gumbel, largest_kernel, pick_kernel

_TILE = 4096
_NUMBERS = (
    "temperature", "log_min_p", "repetition", "frequency", "presence", "top_p"
)  # fmt: skip
_TEMPERATURE, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE = (tl.constexpr(i) for i in range(5))
_COUNT = tl.constexpr(len(_NUMBERS))
_UNIT = tl.constexpr(float(1 << 44))
"""Weights are counted in 2**-44ths, so that a sum has one value in any order."""
_ROUND = tl.constexpr(float(1 << 52))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the sequences ask for, at fixed addresses; `set` writes one slot.

    numbers float64 [S, 6]: temperature, log of min-p, repetition, frequency and presence penalty,
    top-p; cuts int64 [S, 3]: top-k (0: all), mantissa and negated exponent of top-p; seeds int64
    [S]; counts int32 [S, V]: how often a token was put out; seen uint8 [S, V]: tokens of the
    prompt; bias float64 [S, V].
    """

    numbers: Tensor
    cuts: Tensor
    seeds: Tensor
    counts: Tensor
    seen: Tensor
    bias: Tensor

    @classmethod
    def empty(cls, slots: int, vocabulary: int, device: torch.device | str) -> "Settings":
        """Slots that ask for the best token."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        settings = cls(
            zeros(slots, len(_NUMBERS), dtype=torch.float64),
            zeros(slots, 3, dtype=torch.int64),
            zeros(slots, dtype=torch.int64),
            zeros(slots, vocabulary, dtype=torch.int32),
            zeros(slots, vocabulary, dtype=torch.uint8),
            zeros(slots, vocabulary, dtype=torch.float64),
        )
        for slot in range(slots):
            settings.set(slot)
        return settings

    def set(
        self,
        slot: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
        seed: int = 0,
        bias: dict[int, float] | None = None,
        prompt: list[int] | None = None,
    ) -> None:
        """Begin a sequence: nothing was put out yet. From the host, between steps."""
        low = math.log(min_p) if min_p > 0 else -math.inf
        row = [temperature, low, repetition, frequency, presence, top_p]
        mantissa, exponent = math.frexp(top_p)
        self.numbers[slot] = torch.tensor(row, dtype=torch.float64)
        self.cuts[slot] = torch.tensor([top_k, int(mantissa * 2**53), 53 - exponent])
        seed &= (1 << 64) - 1
        self.seeds[slot] = seed - (1 << 64) if seed >> 63 else seed
        for table in (self.counts, self.seen, self.bias):
            table[slot].zero_()
        if prompt:
            self.seen[slot, torch.tensor(sorted(set(prompt)), device=self.seen.device)] = 1
        if bias:
            at = torch.tensor(list(bias), device=self.bias.device)
            values = torch.tensor(list(bias.values()), dtype=torch.float64)
            self.bias[slot, at] = values.to(self.bias.device)


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def counts_of(counts_ptr, ids_ptr, slot, row, v, V, W: tl.constexpr):
    """How often tokens v were put out before this row: in earlier steps and as drafts of this."""
    count = tl.load(counts_ptr + slot.to(tl.int64) * V + v, mask=v < V, other=0)
    first = row // W * W
    for ahead in tl.static_range(1, W):
        at = first + ahead
        token = tl.load(ids_ptr + at, mask=at <= row, other=-1)
        count += (v == token).to(tl.int32)
    return count


@triton.jit
def adjust_kernel(
    logits_ptr, mask_ptr, position_ptr, slot_ptr, ids_ptr, number_ptr, counts_ptr, seen_ptr,
    bias_ptr, scores_ptr, best_ptr, V,
    W: tl.constexpr, MASK: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mask, repetition, frequency and presence penalty, bias: float64 scores and tiles' tops."""
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    if tl.load(position_ptr + row) < 0:
        return
    v = tile * N + tl.arange(0, N)
    inside = v < V
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    number_ptr += slot * _COUNT
    at = row.to(tl.int64) * V + v
    score = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float64)
    if MASK:
        score = tl.where(tl.load(mask_ptr + at, mask=inside, other=0) != 0, score, float("-inf"))
    own = slot.to(tl.int64) * V + v
    repetition = tl.load(number_ptr + _REPETITION)
    frequency, presence = tl.load(number_ptr + _FREQUENCY), tl.load(number_ptr + _PRESENCE)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        count = counts_of(counts_ptr, ids_ptr, slot, row, v, V, W)
        seen = (tl.load(seen_ptr + own, mask=inside, other=0) != 0) | (count > 0)
        if repetition != 1:
            changed = tl.where(score > 0, score / repetition, score * repetition)
            score = tl.where(seen, changed, score)
        lower = score - (frequency * count.to(tl.float64) + presence)
        score = tl.where(count > 0, lower, score)
    score += tl.load(bias_ptr + own, mask=inside, other=0.0)
    tl.store(scores_ptr + at, score, mask=inside)
    tl.store(best_ptr + row * tl.num_programs(0) + tile, tl.max(score, axis=0))


@triton.jit
def shift_kernel(
    scores_ptr, best_ptr, position_ptr, slot_ptr, number_ptr, V,
    N: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores relative to the row's best, divided by its temperature; as they were at 0."""
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    if tl.load(position_ptr + row) < 0:
        return
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature = tl.load(number_ptr + slot * _COUNT + _TEMPERATURE)
    if temperature > 0:
        i, tiles = tl.arange(0, TP), tl.num_programs(0)
        best = tl.load(best_ptr + row * tiles + i, mask=i < tiles, other=float("-inf"))
        v = tile * N + tl.arange(0, N)
        at = scores_ptr + row.to(tl.int64) * V + v
        score = tl.load(at, mask=v < V, other=float("-inf"))
        tl.store(at, (score - tl.max(best, axis=0)) / temperature, mask=v < V)


@triton.jit
def integer_weights(shifted):
    """exp of log-weights (at most 0) in 2**-44ths, int64, ties to even."""
    return ((tl.exp(shifted) * _UNIT + _ROUND) - _ROUND).to(tl.int64)


@triton.jit
def share_of(total, mantissa, shift):
    """total * mantissa / 2**shift rounded up, exact; total and mantissa below 2**63."""
    high, low = tl.umulhi(total, mantissa), total * mantissa
    more = shift >= 64
    near, far = tl.where(more, 0, shift), tl.minimum(tl.where(more, shift - 64, 0), 62)
    upper = tl.where(more, high >> far, high << ((64 - near) & 63))
    # low is a pattern of 64 bits: shifted as one.
    lower = (low >> near) & ((tl.full((1,), 1, tl.int64) << ((64 - near) & 63)) - 1)
    whole = tl.where(more, upper, upper | lower)
    rest_low = tl.where(more, low, low & ((tl.full((1,), 1, tl.int64) << near) - 1))
    rest_high = tl.where(more, high & ((tl.full((1,), 1, tl.int64) << far) - 1), 0)
    return whole + ((rest_low != 0) | (rest_high != 0)).to(tl.int64)


@triton.jit
def cut_kernel(
    value_ptr, order_ptr, position_ptr, slot_ptr, number_ptr, cut_ptr, edge_ptr, edge_token_ptr, V,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last token that top-k and top-p leave: its score and number. One program a row, which
    goes through the row's scores from the best."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    if tl.load(position_ptr + row) < 0:
        return
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    cut_ptr += slot * 3
    top_k = tl.load(cut_ptr)
    kept = tl.where((top_k > 0) & (top_k < V), top_k, V).to(tl.int32)
    value_ptr += row.to(tl.int64) * V
    order_ptr += row.to(tl.int64) * V
    if tl.load(number_ptr + slot * _COUNT + 5) < 1:
        total = tl.zeros((1,), tl.int64)
        for start in range(0, kept, N):
            i = start + tl.arange(0, N)
            value = tl.load(value_ptr + i, mask=i < kept, other=float("-inf"))
            total += tl.sum(integer_weights(value), axis=0)
        limit = share_of(total, tl.load(cut_ptr + 1), tl.load(cut_ptr + 2))
        before = tl.zeros((1,), tl.int64)
        count = tl.zeros((1,), tl.int32)
        for start in range(0, kept, N):
            i = start + tl.arange(0, N)
            value = tl.load(value_ptr + i, mask=i < kept, other=float("-inf"))
            weight = integer_weights(value)
            ahead = before + tl.cumsum(weight, axis=0) - weight
            count += tl.sum(((ahead < limit) & (i < kept)).to(tl.int32), axis=0)
            before += tl.sum(weight, axis=0)
        kept = tl.maximum(tl.max(count, axis=0), 1)
    tl.store(edge_ptr + row, tl.load(value_ptr + kept - 1))
    tl.store(edge_token_ptr + row, tl.load(order_ptr + kept - 1).to(tl.int32))


@triton.jit
def draw_kernel(
    scores_ptr, edge_ptr, edge_token_ptr, position_ptr, slot_ptr, number_ptr, seed_ptr,
    best_ptr, token_ptr, V, CUT: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of each tile after the filters, with noise where there is a temperature."""
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row)
    if position < 0:
        return
    v = tile * N + tl.arange(0, N)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    number_ptr += slot * _COUNT
    score = tl.load(scores_ptr + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    if tl.load(number_ptr + _TEMPERATURE) > 0:
        if CUT:
            edge, last = tl.load(edge_ptr + row), tl.load(edge_token_ptr + row)
            kept = (score > edge) | ((score == edge) & (v <= last))
            score = tl.where(kept, score, float("-inf"))
        score = tl.where(score < tl.load(number_ptr + _MIN_P), float("-inf"), score)
        seed = tl.load(seed_ptr + slot).to(tl.uint64)
        score += gumbel(seed, (position + 1).to(tl.uint64), v.to(tl.uint64))
    best, at = tl.max(score, axis=0, return_indices=True)
    tl.store(best_ptr + row * tl.num_programs(0) + tile, best)
    tl.store(token_ptr + row * tl.num_programs(0) + tile, tile * N + at)


@triton.jit
def forbid_kernel(best_ptr, picked_ptr, TILES, TP: tl.constexpr, PDL: tl.constexpr):
    """No token where the settings forbid every one."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, TP)
    best = tl.load(best_ptr + row * TILES + i, mask=i < TILES, other=float("-inf"))
    top = tl.max(best, axis=0)
    picked = tl.load(picked_ptr + row)
    tl.store(picked_ptr + row, tl.where((top > float("-inf")) & (top < float("inf")), picked, -1))


@triton.jit
def count_kernel(
    token_ptr, confirmed_ptr, slot_ptr, counts_ptr, V, PDL: tl.constexpr
):  # fmt: skip
    """Every confirmed row's pick was put out once more."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    token = tl.load(token_ptr + row)
    if (tl.load(confirmed_ptr + row) >= 0) & (token >= 0):
        slot = tl.maximum(tl.load(slot_ptr + row), 0)
        tl.atomic_add(counts_ptr + slot.to(tl.int64) * V + token, 1)


@triton.jit
def list_kernel(
    logits_ptr, tops_ptr, sums_ptr, value_ptr, token_ptr, V,
    LISTED: tl.constexpr, N: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each tile's best tokens, and the weights of all of them."""
    wait_for_inputs(PDL)
    tile, row, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    i, v = tl.arange(0, TP), tile * N + tl.arange(0, N)
    top = tl.max(tl.load(tops_ptr + row * tiles + i, mask=i < tiles, other=float("-inf")), axis=0)
    x = tl.load(logits_ptr + row.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    weights = integer_weights(x.to(tl.float64) - top.to(tl.float64))
    tl.store(sums_ptr + row * tiles + tile, tl.sum(weights, axis=0))
    out = (row * tiles + tile) * LISTED
    for n in range(LISTED):
        best, at = tl.max(x, axis=0, return_indices=True)
        tl.store(value_ptr + out + n, best)
        tl.store(token_ptr + out + n, tile * N + at)
        x = tl.where(v == tile * N + at, float("-inf"), x)


@triton.jit
def merge_kernel(
    logits_ptr, tops_ptr, sums_ptr, value_ptr, token_ptr, picked_ptr,
    chosen_ptr, listed_ptr, listed_token_ptr, V, TILES,
    LISTED: tl.constexpr, CP: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The row's best tokens from its tiles', and log-probabilities."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i, c = tl.arange(0, TP), tl.arange(0, CP)
    top = tl.max(tl.load(tops_ptr + row * TILES + i, mask=i < TILES, other=float("-inf")), axis=0)
    total = tl.sum(tl.load(sums_ptr + row * TILES + i, mask=i < TILES, other=0), axis=0)
    base = top.to(tl.float64) + tl.log(total.to(tl.float64) / _UNIT)
    token = tl.load(picked_ptr + row)
    at = row.to(tl.int64) * V + tl.maximum(token, 0)
    tl.store(chosen_ptr + row, tl.load(logits_ptr + at).to(tl.float64) - base)
    inside = c < TILES * LISTED
    value = tl.load(value_ptr + row * TILES * LISTED + c, mask=inside, other=float("-inf"))
    for n in range(LISTED):
        best, place = tl.max(value, axis=0, return_indices=True)
        tl.store(listed_ptr + row * LISTED + n, best.to(tl.float64) - base)
        found = tl.load(token_ptr + row * TILES * LISTED + place)
        tl.store(listed_token_ptr + row * LISTED + n, found)
        value = tl.where(c == place, float("-inf"), value)


# ---- launches ------------------------------------------------------------------------------


def pick_filtered(
    logits: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    settings: Settings,
    *,
    width: int,
    cut: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """The token behind each row of a step under its sequence's settings: int32 [R], -1 where the
    logits are unusable, every token is forbidden, or the row does not count.

    logits float32 [>= R, V]; ids, positions, slots int32 [R], `width` rows a sequence: its last
    token, then drafts, which count as put out for the rows behind them. mask uint8 [R, V]: nonzero
    where a grammar allows a token (device or pinned memory). cut: whether any sequence has top-k or
    top-p; without it they are not looked at.
    """
    device = check(logits, ids, positions, slots, settings.numbers, settings.counts)
    rows, vocabulary = positions.shape[0], logits.shape[1]
    if logits.shape[0] < rows or logits.dtype != torch.float32 or rows % width:
        raise ValueError(f"{logits.shape} {logits.dtype} does not hold {rows} rows by {width}")
    if settings.counts.shape[1] != vocabulary:
        raise ValueError(f"settings of {settings.counts.shape[1]} tokens, logits of {vocabulary}")
    if mask is not None and (mask.shape != (rows, vocabulary) or mask.dtype != torch.uint8):
        raise ValueError(f"a mask is uint8 {rows, vocabulary}, got {mask.dtype} {mask.shape}")
    tiles = -(-vocabulary // _TILE)
    grid, wide = (tiles, rows), {"N": _TILE, "num_warps": 8}
    exact = {"enable_fp_fusion": False}
    tops = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    best = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    token = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    scores = torch.empty(rows, vocabulary, dtype=torch.float64, device=device)
    edge = torch.empty(rows, dtype=torch.float64, device=device)
    edge_token = torch.empty(rows, dtype=torch.int32, device=device)
    picked = torch.empty(rows, dtype=torch.int32, device=device)
    s, places = settings, next_power(tiles)
    launch(largest_kernel, grid, logits, logits, positions, tops, vocabulary, N=_TILE, BIAS=False)
    launch(
        adjust_kernel, grid,
        logits, logits if mask is None else mask, positions, slots, ids, s.numbers, s.counts,
        s.seen, s.bias, scores, best, vocabulary, W=width, MASK=mask is not None, **wide, **exact,
    )  # fmt: skip
    launch(
        shift_kernel, grid, scores, best, positions, slots, s.numbers, vocabulary,
        TP=places, **wide, **exact,
    )  # fmt: skip
    if cut:
        value, order = torch.sort(scores, dim=1, descending=True, stable=True)
        launch(
            cut_kernel, (rows,), value, order, positions, slots, s.numbers, s.cuts, edge,
            edge_token, vocabulary, **wide,
        )  # fmt: skip
    launch(
        draw_kernel, grid, scores, edge, edge_token, positions, slots, s.numbers, s.seeds,
        best, token, vocabulary, CUT=cut, **wide,
    )  # fmt: skip
    launch(
        pick_kernel, (rows,), best, token, tops, positions, picked, vocabulary, tiles,
        TP=places, num_warps=1,
    )  # fmt: skip
    launch(forbid_kernel, (rows,), best, picked, tiles, TP=places, num_warps=1)
    return picked


def count_tokens(picks: Tensor, confirmed: Tensor, slots: Tensor, settings: Settings) -> None:
    """Add the picks int32 [R] of confirmed rows (`accept.Accepted.confirmed`) to the counts."""
    check(picks, confirmed, slots, settings.counts)
    rows, vocabulary = picks.shape[0], settings.counts.shape[1]
    launch(count_kernel, (rows,), picks, confirmed, slots, settings.counts, vocabulary, num_warps=1)


def token_logprobs(logits: Tensor, picked: Tensor, *, listed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural logs of the model's own law: of the picked tokens float64 [R], and of the `listed`
    best ones float64 [R, N] with their numbers int32 [R, N] (at least 1).

    logits float32 [>= R, V], finite; picked int32 [R]: rows with -1 give that of token 0.
    """
    device = check(logits, picked)
    rows, vocabulary, listed = picked.shape[0], logits.shape[1], max(1, listed)
    if logits.shape[0] < rows or listed > vocabulary:
        raise ValueError(f"{logits.shape} does not hold {rows} rows of {listed} tokens")
    tiles = -(-vocabulary // _TILE)
    tops = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    sums = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    value = torch.empty(rows, tiles, listed, dtype=torch.float32, device=device)
    token = torch.empty(rows, tiles, listed, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.float64, device=device)
    best = torch.empty(rows, listed, dtype=torch.float64, device=device)
    best_token = torch.empty(rows, listed, dtype=torch.int32, device=device)
    everyone = torch.zeros(rows, dtype=torch.int32, device=device)
    places = next_power(tiles)
    launch(
        largest_kernel, (tiles, rows), logits, logits, everyone, tops, vocabulary,
        N=_TILE, BIAS=False,
    )  # fmt: skip
    launch(
        list_kernel, (tiles, rows), logits, tops, sums, value, token, vocabulary,
        LISTED=listed, N=_TILE, TP=places, num_warps=8,
    )  # fmt: skip
    launch(
        merge_kernel, (rows,), logits, tops, sums, value, token, picked, chosen, best, best_token,
        vocabulary, tiles, LISTED=listed, CP=next_power(tiles * listed), TP=places,
    )  # fmt: skip
    return chosen, best, best_token
