"""Launches of `scores.cu`: scores of all index entries for the few rows of a step.

Contract and reference: as of `kernels.index.index_scores`, which calls this file where it can run.
Sums have another order than Triton's: a row's bits depend on that row alone all the same.

Owns: parameters. Knows nothing of: compiling (build).
"""

import ctypes

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages
from deepdraft.kernels.runtime import programmatic_launch

THREADS, ROWS = 256, 8
HEADS, CHANNELS = 32, 128
GROUP = 32
"""Entries of which the best score is kept."""


class _Params(ctypes.Structure):
    """`Params` of scores.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("queries", "weights", "keys", "base", "reach")),
        *((n, ctypes.c_void_p) for n in ("scores", "best")),
        *((n, ctypes.c_int) for n in ("rows", "capacity", "groups")),
        *((n, ctypes.c_int) for n in ("weight_stride", "weight_start", "weight_bf16", "skip")),
        ("weight_scale", ctypes.c_float),
    )


def enabled(device: torch.device) -> bool:
    """Whether `index` is to take this kernel."""
    return stages.enabled("scores", device)


def fits(heads: int, channels: int) -> bool:
    """Whether it is written for such keys."""
    return (heads, channels) == (HEADS, CHANNELS)


def macros() -> dict[str, int]:
    """Macros of the only variant."""
    return {"SHARED_BYTES": 1024 + ROWS * (8192 + 4 * HEADS) + 16 * ROWS}


def _kernel(device: torch.device) -> build.Kernel:
    return build.Kernel.kept(device, "scores.cu", "scores_kernel", macros(), threads=THREADS)


def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def score(
    queries: Tensor, raw_weights: Tensor, keys: Tensor, base: Tensor, reach: Tensor,
    scores: Tensor, best: Tensor | None, *, weight_scale: float, weight_start: int, skip: int,
) -> None:  # fmt: skip
    """Fills scores float32 [R, capacity] and best float32 [R, capacity / 32]. Tensors as `index`
    has checked them."""
    rows, capacity = scores.shape
    params = _Params(
        queries=queries.data_ptr(), weights=raw_weights.data_ptr(), keys=keys.data_ptr(),
        base=base.data_ptr(), reach=reach.data_ptr(), scores=scores.data_ptr(),
        best=0 if best is None else best.data_ptr(), rows=rows, capacity=capacity,
        groups=0 if best is None else best.shape[1], weight_stride=raw_weights.shape[1],
        weight_start=weight_start, weight_bf16=raw_weights.dtype == torch.bfloat16, skip=skip,
        weight_scale=weight_scale,
    )  # fmt: skip
    blocks = min(_blocks(scores.device), -(-capacity // 128))
    _kernel(scores.device).launch(
        (blocks, -(-rows // ROWS)), params, programmatic=programmatic_launch()
    )
