"""Weights into the L2 cache while the memory is idle: no result, no bit depends on it.

For a side lane beside kernels that wait for latency and read little (attention), ahead of the
product that reads the weights next.
"""

import triton
import triton.language as tl
from torch import Tensor, uint8

from deepdraft.kernels.runtime import INTERPRET, check, launch, prefetch_l2, wait_for_inputs

_PIECE = 32768
"""Bytes of one request."""


@triton.jit
def prefetch_kernel(ptr, BYTES, PIECE: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * PIECE
    prefetch_l2(ptr + at, min(PIECE, BYTES - tl.program_id(0) * PIECE))


def prefetch(weights: Tensor, most: int) -> None:
    """Ask for the first `most` bytes of contiguous weights. Nothing in the interpreter."""
    device = check(weights)
    size = min(most, weights.nbytes) // 16 * 16
    if INTERPRET.value or device.type == "meta" or size <= 0:
        return
    launch(
        prefetch_kernel, (triton.cdiv(size, _PIECE),), weights.view(-1).view(uint8), size,
        PIECE=_PIECE, num_warps=1,
    )  # fmt: skip
