"""Picking tokens on the device: the best logit, or the best with keyed Gumbel noise.

The rule is that of `deepdraft.engine.sampler` for rows without filters, penalties, bias or mask: at
temperature 0 the largest logit, else argmax((logit - max) / T + noise) in float64 with noise that
is a pure function of (seed, position, token). Equal scores go to the lower token.

Letters: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

_TILE = 4096
# Constants of the splitmix64 finaliser and its Weyl step (Steele, Lea and Flood, 2014).
_WEYL = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def gumbel(seed, position, token):
    """Standard Gumbel noise, float64, from uint64 scalars and token numbers uint64 [N]."""
    key = mix64(mix64(seed) + position * _WEYL)
    bits = mix64(key + (token + 1) * _WEYL) >> 12
    # The upper 52 bits, centred in their cell: never 0 or 1.
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def logit_tile(logits_ptr, bias_ptr, row, v, V, BIAS: tl.constexpr):
    """Logits fp32 [N] of one row, -inf beyond the vocabulary."""
    at = row.to(tl.int64) * V + v
    x = tl.load(logits_ptr + at, mask=v < V, other=float("-inf"))
    if BIAS:
        x += tl.load(bias_ptr + at, mask=v < V, other=0.0)
    return x


@triton.jit
def largest_kernel(
    logits_ptr, bias_ptr, position_ptr, tops_ptr, V, N: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    if tl.load(position_ptr + row) < 0:
        return
    x = logit_tile(logits_ptr, bias_ptr, row, tile * N + tl.arange(0, N), V, BIAS)
    # NaN counts as +inf: neither is a usable largest logit.
    top = tl.max(tl.where(x == x, x, float("inf")), axis=0)
    tl.store(tops_ptr + row * tl.num_programs(0) + tile, top)


@triton.jit
def best_kernel(
    logits_ptr, bias_ptr, tops_ptr, slot_ptr, temperature_ptr, seed_ptr, position_ptr,
    best_ptr, token_ptr, V, AHEAD,
    N: tl.constexpr, TP: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row)
    if position < 0:
        return
    tiles = tl.num_programs(0)
    v, i = tile * N + tl.arange(0, N), tl.arange(0, TP)
    x = logit_tile(logits_ptr, bias_ptr, row, v, V, BIAS)
    slot = row
    if SLOTS:
        slot = tl.maximum(tl.load(slot_ptr + row), 0)
    score = x.to(tl.float64)
    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0:
        tops = tl.load(tops_ptr + row * tiles + i, mask=i < tiles, other=float("-inf"))
        top = tl.max(tops, axis=0)
        seed = tl.load(seed_ptr + slot).to(tl.uint64)
        score = (score - top.to(tl.float64)) / temperature
        score += gumbel(seed, (position + AHEAD).to(tl.uint64), v.to(tl.uint64))
    best, at = tl.max(score, axis=0, return_indices=True)
    tl.store(best_ptr + row * tiles + tile, best)
    tl.store(token_ptr + row * tiles + tile, tile * N + at)


@triton.jit
def pick_kernel(
    best_ptr, token_ptr, tops_ptr, position_ptr, picked_ptr, V, TILES, TP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, TP)
    best = tl.load(best_ptr + row * TILES + i, mask=i < TILES, other=float("-inf"))
    _, tile = tl.max(best, axis=0, return_indices=True)
    token = tl.load(token_ptr + row * TILES + tl.minimum(tile, TILES - 1))
    top = tl.max(tl.load(tops_ptr + row * TILES + i, mask=i < TILES, other=float("-inf")), axis=0)
    usable = (top < float("inf")) & (top > float("-inf")) & (tl.load(position_ptr + row) >= 0)
    tl.store(picked_ptr + row, tl.where(usable, tl.minimum(token, V - 1), -1))


def _pick(
    logits: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    slots: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    ahead: int,
) -> Tensor:
    given = (logits, positions, temperature, seeds)
    device = check(*given, *(t for t in (bias, slots) if t is not None))
    rows, vocabulary = positions.shape[0], logits.shape[1]
    types = logits.dtype, temperature.dtype, seeds.dtype
    if types != (torch.float32, torch.float64, torch.int64):
        raise ValueError("logits are float32, temperatures float64, seeds int64")
    if logits.shape[0] < rows or (bias is not None and bias.shape != logits.shape):
        raise ValueError(f"{logits.shape=} does not hold {rows} rows, or the bias does not fit")
    tiles = -(-vocabulary // _TILE)
    tops = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    best = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    token = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    picked = torch.empty(rows, dtype=torch.int32, device=device)
    more = logits if bias is None else bias
    launch(
        largest_kernel, (tiles, rows), logits, more, positions, tops, vocabulary,
        N=_TILE, BIAS=bias is not None,
    )  # fmt: skip
    launch(
        best_kernel, (tiles, rows),
        logits, more, tops, positions if slots is None else slots, temperature, seeds, positions,
        best, token, vocabulary, ahead,
        N=_TILE, TP=next_power(tiles), BIAS=bias is not None, SLOTS=slots is not None, num_warps=8,
    )  # fmt: skip
    launch(
        pick_kernel, (rows,), best, token, tops, positions, picked, vocabulary, tiles,
        TP=next_power(tiles), num_warps=1,
    )  # fmt: skip
    return picked


def pick_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits float32 [R, V], temperature float64 [R], seeds and positions int64 [R] (a seed's bits
    as a signed number) -> tokens int32 [R]; -1 where the largest logit is not finite or any is
    NaN, and at positions below 0."""
    if positions.dtype != torch.int64:
        raise ValueError(f"positions are int64, got {positions.dtype}")
    return _pick(logits, None, positions, None, temperature, seeds, 0)


def pick_rows(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """The token behind each row of a step: int32 [R], -1 as in `pick_tokens`.

    logits float32 [>= R, V], with `bias` of the same shape added first; positions, slots int32
    [R]: a row's own position (-1: it does not count) and its sequence; temperature float64 [S],
    seeds int64 [S] of the sequences.
    """
    return _pick(logits, bias, positions, slots, temperature, seeds, 1)
