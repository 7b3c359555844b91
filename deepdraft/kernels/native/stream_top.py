"""Launches of `stream_top.cu`: index scores of many rows and the best entries of each.

Contract and reference: as of `kernels.prefill_index.stream_top`, which calls this file where it can
run. Sums have another order than Triton's: a row's set depends on that row alone all the same.

Owns: parameters. Knows nothing of: compiling (build).
"""

import ctypes

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages
from deepdraft.kernels.native.scores import HEADS, fits

__all__ = ["enabled", "fits", "stream_top"]

THREADS, ROWS = 256, 8
MOST = 512
"""Places of a list, at most."""
_HELD, _TURNS = 2048, 4


class _Params(ctypes.Structure):
    """`Params` of stream_top.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("queries", "weights", "keys", "base", "reach")),
        *((n, ctypes.c_void_p) for n in ("entries", "address", "counts")),
        *((n, ctypes.c_int) for n in ("rows", "picks")),
        *((n, ctypes.c_int) for n in ("weight_stride", "weight_start", "weight_bf16", "skip")),
        ("weight_scale", ctypes.c_float),
    )


def enabled(device: torch.device) -> bool:
    """Whether `prefill_index` is to take this kernel."""
    return stages.enabled("stream_top", device)


def macros(held: int = _HELD, turns: int = _TURNS) -> dict[str, int]:
    """Macros of a variant: candidates of a row, tiles between two looks at them."""
    shared = 1024 + ROWS * (8192 + 4 * HEADS + 8 * held + 12)
    return {"HELD": held, "TURNS": turns, "SHARED_BYTES": shared}


def _kernel(device: torch.device) -> build.Kernel:
    return build.Kernel.kept(
        device, "stream_top.cu", "stream_top_kernel", macros(), threads=THREADS
    )


def stream_top(
    queries: Tensor, raw_weights: Tensor, keys: Tensor, base: Tensor, reach: Tensor,
    entries: Tensor, address: Tensor, counts: Tensor, *, weight_scale: float, weight_start: int,
    skip: int,
) -> None:  # fmt: skip
    """Fills entries and address int32 [R, K] and counts int32 [R]. Tensors as `prefill_index` has
    checked them; keys: records."""
    rows, picks = entries.shape
    params = _Params(
        queries=queries.data_ptr(), weights=raw_weights.data_ptr(), keys=keys.data_ptr(),
        base=base.data_ptr(), reach=reach.data_ptr(), entries=entries.data_ptr(),
        address=address.data_ptr(), counts=counts.data_ptr(), rows=rows, picks=picks,
        weight_stride=raw_weights.shape[1], weight_start=weight_start,
        weight_bf16=raw_weights.dtype == torch.bfloat16, skip=skip, weight_scale=weight_scale,
    )  # fmt: skip
    _kernel(queries.device).launch((-(-rows // ROWS), 1), params, programmatic=False)
