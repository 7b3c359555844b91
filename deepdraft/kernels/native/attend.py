"""Launches of `attend.cu` and `combine.cu`: the chunks of sparse attention, and what they make.

Contract and reference: as of `kernels.attention`, which calls this file where it can run.
Sums have another order than the Triton kernel's, so the last bits differ.

Owns: parameters and macros, which shapes the kernel takes. Knows nothing of: compiling (build).
"""

import ctypes

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages
from deepdraft.kernels.runtime import programmatic_launch

CHANNELS = 512
KEYS = 64
HEADS = 16
"""Heads of a block: more blocks hide each other's waits."""
_THREADS = 256
_MOST_CHUNKS = 12
"""That a thread combines in registers."""


class _Params(ctypes.Structure):
    """`Params` of attend.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "cosines", "sines", "window", "main")),
        *((n, ctypes.c_void_p) for n in ("window_rows", "main_rows", "part", "top", "total")),
        *((n, ctypes.c_int) for n in ("heads", "q_stride", "window_places", "main_places")),
        *((n, ctypes.c_int) for n in ("window_chunks", "chunks")),
        ("scale", ctypes.c_float),
    )


class _Combine(ctypes.Structure):
    """`Params` of combine.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("part", "top", "total", "sink", "cosines", "sines")),
        ("out", ctypes.c_void_p),
    )


def enabled(device: torch.device) -> bool:
    """Whether `attention` is to take this kernel."""
    return stages.enabled("attend", device)


def fits(channels: int, pairs: int, q_stride: int) -> bool:
    """Whether the kernel takes entries of so many channels, of which so many pairs turn."""
    return channels == CHANNELS and pairs % 4 == 0 and q_stride % 8 == 0


def macros(pairs: int, heads: int) -> dict[str, int]:
    """Macros of one variant of attend.cu."""
    return {"C": CHANNELS, "PAIRS": pairs, "BH": heads, "SHARED_BYTES": shared_bytes(heads)}


def shared_bytes(heads: int) -> int:
    """Dynamic shared memory of one block."""
    row = 2 * (CHANNELS + 8)
    return KEYS * row + heads * (row + 2 * (KEYS + 8) + 4 * (KEYS + 2)) + 4 * KEYS


def combine_macros(pairs: int, chunks: int, window: int) -> dict[str, int]:
    """Macros of one variant of combine.cu."""
    sizes = {"C": CHANNELS, "PAIRS": pairs, "CHUNKS": chunks, "WINDOW": window}
    return {**sizes, "SHARED_BYTES": 16}


def _kernel(device: torch.device, pairs: int, heads: int) -> build.Kernel:
    made = macros(pairs, heads)
    return build.Kernel.kept(device, "attend.cu", "attend_kernel", made, threads=_THREADS)


def chunks(
    q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, window_rows: Tensor,
    main: Tensor | None, main_rows: Tensor | None,
    part: Tensor, top: Tensor, total: Tensor, *, scale: float,
) -> None:  # fmt: skip
    """All chunks of all rows: fills part float32 [R, chunks, H, C], top and total [R, chunks, H]
    as the Triton kernel does. Tensors as `attention.sparse_attention` has checked them."""
    rows, count, all_heads, _ = part.shape
    groups = -(-all_heads // HEADS)
    params = _Params(
        q=q.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(), window=window.data_ptr(),
        main=0 if main is None else main.data_ptr(), window_rows=window_rows.data_ptr(),
        main_rows=0 if main_rows is None else main_rows.data_ptr(), part=part.data_ptr(),
        top=top.data_ptr(), total=total.data_ptr(), heads=all_heads, q_stride=q.shape[1],
        window_places=window_rows.shape[1],
        main_places=0 if main_rows is None else main_rows.shape[1],
        window_chunks=-(-window_rows.shape[1] // KEYS), chunks=count, scale=scale,
    )  # fmt: skip
    kernel = _kernel(q.device, cos.shape[1], HEADS)
    kernel.launch((count * groups, rows), params, programmatic=programmatic_launch())


def _combiner(device: torch.device, pairs: int, chunks: int, window: int) -> build.Kernel:
    made = combine_macros(pairs, chunks, window)
    return build.Kernel.kept(device, "combine.cu", "combine_kernel", made, threads=CHANNELS // 4)


def combine(
    part: Tensor, top: Tensor, total: Tensor, sink: Tensor, cos: Tensor, sin: Tensor, out: Tensor,
    *, window_chunks: int,
) -> bool:  # fmt: skip
    """Fills out bfloat16 [R, H, C] from the chunks, turned back. False: too many of them here."""
    rows, count, heads, _ = part.shape
    if count > _MOST_CHUNKS:
        return False
    params = _Combine(
        part=part.data_ptr(), top=top.data_ptr(), total=total.data_ptr(), sink=sink.data_ptr(),
        cosines=cos.data_ptr(), sines=sin.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    kernel = _combiner(part.device, cos.shape[1], count, window_chunks)
    kernel.launch((heads, rows), params, programmatic=programmatic_launch())
    return True
