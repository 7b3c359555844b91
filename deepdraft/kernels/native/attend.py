"""Launches of `attend.cu`: the chunks of sparse attention.

Contract and reference: as of `kernels.attention`, which calls this file where it can run and then
combines the chunks, unless the kernel has (trial "joined"). Sums have another order than the Triton
kernel's, so the last bits differ.

Owns: parameters and macros, which shapes the kernel takes. Knows nothing of: compiling (build).
"""

import ctypes
import functools

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages, trials
from deepdraft.kernels.runtime import programmatic_launch

CHANNELS = 512
KEYS = 64
HEADS = 16
"""Heads of a block: more blocks hide each other's waits."""
_THREADS = 256
_COUNTERS = 4096
_MOST_JOINED = 12
"""Chunks that are combined in registers."""


class _Params(ctypes.Structure):
    """`Params` of attend.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "cosines", "sines", "window", "main")),
        *((n, ctypes.c_void_p) for n in ("window_rows", "main_rows", "part", "top", "total")),
        *((n, ctypes.c_int) for n in ("heads", "q_stride", "window_places", "main_places")),
        *((n, ctypes.c_int) for n in ("window_chunks", "chunks")),
        ("scale", ctypes.c_float),
        *((n, ctypes.c_void_p) for n in ("sink", "out", "arrive", "ahead")),
        ("ahead_bytes", ctypes.c_uint64),
    )


def enabled(device: torch.device) -> bool:
    """Whether `attention` is to take this kernel."""
    return stages.enabled("attend", device)


def fits(channels: int, pairs: int, q_stride: int) -> bool:
    """Whether the kernel takes entries of so many channels, of which so many pairs turn."""
    return channels == CHANNELS and pairs % 4 == 0 and q_stride % 8 == 0


def macros(pairs: int, heads: int, joined: int = 0, ahead: int = 0) -> dict[str, int]:
    """Macros of one variant of attend.cu. `joined`: chunks, 0 where the combine kernel follows."""
    more = {k: v for k, v in (("JOINED", joined), ("AHEAD", ahead)) if v}
    size = shared_bytes(heads)
    return {**more, "C": CHANNELS, "PAIRS": pairs, "BH": heads, "SHARED_BYTES": size}


def shared_bytes(heads: int) -> int:
    """Dynamic shared memory of one block."""
    row = 2 * (CHANNELS + 8)
    return KEYS * row + heads * (row + 2 * (KEYS + 8) + 4 * (KEYS + 2)) + 4 * KEYS


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Arrivals of chunks, zero between launches; steps of one device follow one another."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@functools.cache
def _kernel(
    device: torch.device, pairs: int, heads: int, joined: int = 0, ahead: int = 0
) -> build.Kernel:
    made = macros(pairs, heads, joined, ahead)
    return build.Kernel.load(device, "attend.cu", "attend_kernel", made, threads=_THREADS)


def chunks(
    q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, window_rows: Tensor,
    main: Tensor | None, main_rows: Tensor | None,
    part: Tensor, top: Tensor, total: Tensor, sink: Tensor, out: Tensor, *, scale: float,
    ahead: Tensor | None = None,
) -> bool:  # fmt: skip
    """All chunks of all rows: fills part float32 [R, chunks, H, C], top and total [R, chunks, H]
    as the Triton kernel does. Tensors as `attention.sparse_attention` has checked them.

    True where they are combined, too, and `out` is filled. `ahead`: weights that are read next."""
    rows, count, all_heads, _ = part.shape
    groups = -(-all_heads // HEADS)
    joined = count if trials.on("joined") and count <= _MOST_JOINED else 0
    if joined and rows * groups > _COUNTERS:
        joined = 0
    if not trials.on("ahead"):
        ahead = None
    params = _Params(
        q=q.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(), window=window.data_ptr(),
        main=0 if main is None else main.data_ptr(), window_rows=window_rows.data_ptr(),
        main_rows=0 if main_rows is None else main_rows.data_ptr(), part=part.data_ptr(),
        top=top.data_ptr(), total=total.data_ptr(), heads=all_heads, q_stride=q.shape[1],
        window_places=window_rows.shape[1],
        main_places=0 if main_rows is None else main_rows.shape[1],
        window_chunks=-(-window_rows.shape[1] // KEYS), chunks=count, scale=scale,
        sink=sink.data_ptr(), out=out.data_ptr(),
        arrive=_counters(q.device).data_ptr() if joined else 0,
        ahead=0 if ahead is None else ahead.data_ptr(),
        ahead_bytes=0 if ahead is None else ahead.nbytes // 16 * 16,
    )  # fmt: skip
    kernel = _kernel(q.device, cos.shape[1], HEADS, joined, int(ahead is not None))
    kernel.launch((count * groups, rows), params, programmatic=programmatic_launch())
    return joined > 0
