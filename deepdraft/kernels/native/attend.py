"""Launches of `attend.cu`: sparse attention of a decode step, whole.

Contract and reference: as of `kernels.attention`, which calls this file where it can run. Sums have
another order than the Triton kernels', so the last bits differ.

Owns: parameters and macros, which shapes the kernel takes. Knows nothing of: compiling (build).
"""

import ctypes
import functools

import torch
from torch import Tensor

from deepdraft.kernels.native import build
from deepdraft.kernels.runtime import programmatic_launch

CHANNELS = 512
KEYS = 64
HEADS = 16
CHUNKS = 2
"""Chunks of 64 keys that a block works on."""
_MOST_BLOCKS = 8
"""Of a cluster."""
_THREADS = 256


class _Params(ctypes.Structure):
    """`Params` of attend.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "cosines", "sines", "window", "main")),
        *((n, ctypes.c_void_p) for n in ("window_rows", "main_rows", "sink", "out")),
        *((n, ctypes.c_int) for n in ("heads", "q_stride", "window_places", "main_places")),
        ("window_blocks", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


_enabled = False


def enable(on: bool) -> None:
    """Whether `attention` takes this kernel from now on."""
    global _enabled
    _enabled = on


def enabled() -> bool:
    """Whether `attention` is to take this kernel."""
    return _enabled


def fits(channels: int, pairs: int, q_stride: int, window: int, selected: int) -> bool:
    """Whether the kernel takes entries of so many channels, of which so many pairs turn, and so
    many places of the window and selected ones."""
    enough = 0 < sum(_blocks(window, selected)) <= _MOST_BLOCKS
    return channels == CHANNELS and pairs % 4 == 0 and q_stride % 8 == 0 and enough


def _blocks(window: int, selected: int) -> tuple[int, int]:
    """Blocks of a cluster that work on the window, and on the selected entries."""
    return -(-window // (CHUNKS * KEYS)), -(-selected // (CHUNKS * KEYS))


def macros(pairs: int, blocks: int) -> dict[str, int]:
    """Macros of one variant of attend.cu."""
    return {"C": CHANNELS, "PAIRS": pairs, "CL": blocks, "SHARED_BYTES": shared_bytes(blocks)}


def shared_bytes(blocks: int) -> int:
    """Dynamic shared memory of one block."""
    row, stats = 2 * (CHANNELS + 8), CHUNKS * HEADS * 2
    heads = HEADS * (row + 2 * (KEYS + 8) + 4 * (KEYS + 2) + 4 * (CHUNKS + 1))
    return KEYS * row + heads + 4 * (CHUNKS * KEYS + stats * (blocks + 1))


@functools.cache
def _kernel(device: torch.device, pairs: int, blocks: int) -> build.Kernel:
    code = build.cubin("attend.cu", macros(pairs, blocks), "sm_90a")
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context exists
        return build.Kernel(code, "attend_kernel", threads=_THREADS, shared=shared_bytes(blocks))


def attention(
    q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, window_rows: Tensor,
    main: Tensor | None, main_rows: Tensor | None, sink: Tensor, *, scale: float,
) -> Tensor:  # fmt: skip
    """bfloat16 [R, H, 512]. Tensors as `attention.sparse_attention` has checked them."""
    rows, heads = q.shape[0], sink.shape[0]
    places = 0 if main_rows is None else main_rows.shape[1]
    of_window, of_main = _blocks(window_rows.shape[1], places)
    out = torch.empty(rows, heads, CHANNELS, dtype=torch.bfloat16, device=q.device)
    params = _Params(
        q=q.data_ptr(), cosines=cos.data_ptr(), sines=sin.data_ptr(), window=window.data_ptr(),
        main=0 if main is None else main.data_ptr(), window_rows=window_rows.data_ptr(),
        main_rows=0 if main_rows is None else main_rows.data_ptr(), sink=sink.data_ptr(),
        out=out.data_ptr(), heads=heads, q_stride=q.shape[1],
        window_places=window_rows.shape[1], main_places=places, window_blocks=of_window,
        scale=scale,
    )  # fmt: skip
    blocks = of_window + of_main
    kernel = _kernel(q.device, cos.shape[1], blocks)
    grid = blocks * -(-heads // HEADS), rows
    kernel.launch(grid, params, programmatic=programmatic_launch())
    return out
