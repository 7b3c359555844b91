"""Sums of a row's picked experts, written to the memory of the rank that has the row.

Owns: the kernel. Knows nothing of: ranks' processes, when what was written may be read.

Contract: bf16(((y_0 + y_1) + y_2) + ...) in float32, by row (reference: `sum_of_picks`).

Letters: R rows of a chunk, K picks, D hidden, N ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.rounding import to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power

_BLOCK = 1024


@triton.jit
def push_sums_kernel(
    y_ptr, places_ptr, ROWS, D, EACH, ODD, RANK, SIZE, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row of the chunk; which rank has it: see `push_sums`. Neighbours are rows of
    different ranks, so that all links and this device's memory are in use at any time."""
    owner = (RANK + tl.program_id(0) % SIZE) % SIZE
    first = tl.maximum(owner * EACH - ODD, 0)
    at = tl.program_id(0) // SIZE
    row = first + at
    inside = row < tl.minimum((owner + 1) * EACH - ODD, ROWS)
    place = tl.load(places_ptr + owner).to(tl.pointer_type(tl.bfloat16))
    place = tl.multiple_of(place, 16)
    place += (at * SIZE + RANK).to(tl.int64) * D
    y_ptr += row.to(tl.int64) * K * D
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        here = inside & (d < D)
        total = tl.load(y_ptr + d, mask=here, other=0.0).to(tl.float32)
        for k in tl.static_range(1, K):
            total += tl.load(y_ptr + k * D + d, mask=here, other=0.0).to(tl.float32)
        tl.store(place + d, to_bf16_rne(total), mask=here)


def push_sums(
    y: Tensor, places: Tensor, *, rows: int, each: int, odd: int, rank: int
) -> None:  # fmt: skip
    """y bfloat16 [>= rows, K, D]: the sums of its first `rows` rows go to `places` int64 [N], the
    addresses of the ranks' bfloat16 [R, N, D], at place `rank` of each row. Rank n has rows
    n * each - odd and on, the first one from 0."""
    check(y, places)
    _, picks, hidden = y.shape
    size = places.shape[0]
    if y.dtype != torch.bfloat16 or places.dtype != torch.int64 or rows > y.shape[0]:
        raise ValueError(f"{rows} rows of bfloat16 [R, K, D], got {y.shape} {y.dtype}")
    if rows + odd > size * each or hidden % 8:
        raise ValueError(f"{rows} rows of {hidden} are not shared as {size} x {each} - {odd}")
    launch(
        push_sums_kernel, (size * each,), y, places, rows, hidden, each, odd, rank, size,
        K=picks, BLOCK=min(_BLOCK, next_power(hidden)), num_warps=4,
    )  # fmt: skip


def sum_of_picks(y: Tensor) -> Tensor:
    """The reference: y bfloat16 [R, K, D] -> bfloat16 [R, D], added in order in float32."""
    total = y[:, 0].float()
    for k in range(1, y.shape[1]):
        total = total + y[:, k].float()
    return total.bfloat16()
