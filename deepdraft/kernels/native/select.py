"""Launches of `select.cu`: the K best scores of a row.

Contract and reference: as of `kernels.index.select_top` and `candidate_blocks`, which call this
file where it can run; the results are the same.

Owns: parameters. Knows nothing of: compiling (build).
"""

import ctypes

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages
from deepdraft.kernels.runtime import programmatic_launch

THREADS = 1024
MOST = 48 * THREADS
"""Scores of a row that one block selects from: they fit into shared memory."""
_STEP = 8 * THREADS


class _Params(ctypes.Structure):
    """`Params` of select.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("scores", "reach", "length", "blocks", "base")),
        *((n, ctypes.c_void_p) for n in ("entries", "address", "counts")),
        *((n, ctypes.c_int) for n in ("capacity", "picks", "skip", "mul", "div", "keep", "block")),
        ("newest", ctypes.c_int),
    )


def enabled(device: torch.device) -> bool:
    """Whether `index` is to take this kernel."""
    return stages.enabled("select", device)


def macros(most: int, gather: int) -> dict[str, int]:
    """Macros of the variant for rows of so many scores."""
    return {"PLACES": most, "GATHER": gather, "SHARED_BYTES": _shared_bytes(most)}


def _shared_bytes(most: int) -> int:
    return 4 * (most + 3 * THREADS + 3 * 32)


def _kernel(device: torch.device, most: int, gather: int) -> build.Kernel:
    made = macros(most, gather)
    return build.Kernel.kept(device, "select.cu", "select_kernel", made, threads=THREADS)


def select(
    scores: Tensor, reach: Tensor, length: Tensor, base: Tensor, entries: Tensor, address: Tensor,
    counts: Tensor, *, skip: int, mul: int, div: int, blocks: tuple[Tensor, int] | None,
    gather: int = 0, newest: bool = False,
) -> None:  # fmt: skip
    """Fills entries and address int32 [R, K] and counts int32 [R]. Tensors as `index` has checked
    them; blocks: numbers int32 [R, keep] and entries of a block. gather n: `scores` are those of
    all entries, of which each place of the blocks has n; newest: the last place comes first."""
    rows, capacity = scores.shape
    params = _Params(
        scores=scores.data_ptr(), reach=reach.data_ptr(), length=length.data_ptr(),
        blocks=0 if blocks is None else blocks[0].data_ptr(), base=base.data_ptr(),
        entries=entries.data_ptr(), address=address.data_ptr(), counts=counts.data_ptr(),
        capacity=capacity, picks=entries.shape[1], skip=skip, mul=mul, div=div,
        keep=0 if blocks is None else blocks[0].shape[1], block=1 if blocks is None else blocks[1],
        newest=newest,
    )  # fmt: skip
    places = capacity
    if gather:
        assert blocks is not None, "places are gathered from blocks"
        places = blocks[0].shape[1] * blocks[1]
    kernel = _kernel(scores.device, -(-places // _STEP) * _STEP, gather)
    kernel.launch((1, rows), params, programmatic=programmatic_launch())
