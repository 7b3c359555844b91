"""Launches of `attend_rows.cu`: sparse attention of many rows over unpacked keys.

Contract and reference: as of `kernels.prefill_attention.attend_rows`, which calls this where it
can run. Sums have another order than Triton's: a row's bits depend on that row alone all the same.

Owns: parameters. Knows nothing of: compiling (build).
"""

import ctypes

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages

THREADS = 384
HEADS, CHANNELS, PAIRS, KEYS = 64, 512, 32, 64


class _Params(ctypes.Structure):
    """`Params` of attend_rows.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "cos", "sin", "window", "first", "main")),
        *((n, ctypes.c_void_p) for n in ("list", "counts", "sink", "out")),
        *((n, ctypes.c_int) for n in ("rows", "q_stride", "window_places", "places")),
        ("first_main", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


def enabled(device: torch.device) -> bool:
    """Whether `prefill_attention` is to take this kernel."""
    return stages.enabled("attend_rows", device)


def fits(heads: int, channels: int, pairs: int, places: int, keys: int) -> bool:
    """Whether it is written for such heads, and for so many window places and keys a turn."""
    known = (heads, channels, pairs, keys) == (HEADS, CHANNELS, PAIRS, KEYS)
    return known and places > 0 and places % KEYS == 0


def macros() -> dict[str, int]:
    """Macros of the only variant."""
    tile, slots = HEADS * CHANNELS * 2, 2 * 4 * 22 * 32 * 4
    return {"SHARED_BYTES": 1024 + 3 * tile + slots + 16 + 32}


def _kernel(device: torch.device) -> build.Kernel:
    return build.Kernel.kept(
        device, "attend_rows.cu", "attend_rows_kernel", macros(), threads=THREADS
    )


def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_rows(
    q: Tensor, cos: Tensor, sin: Tensor, window: Tensor, first: Tensor, sink: Tensor, out: Tensor,
    *, places: int, scale: float, main: Tensor | None, main_rows: Tensor | None,
    counts: Tensor | None, first_main: int,
) -> None:  # fmt: skip
    """Fills out bfloat16 [R, H, C]. Tensors as `prefill_attention` has checked them."""
    listed = main_rows is not None
    params = _Params(
        q=q.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), window=window.data_ptr(),
        first=first.data_ptr(), main=(window if main is None else main).data_ptr(),
        list=main_rows.data_ptr() if listed else 0,
        counts=0 if counts is None or not listed else counts.data_ptr(), sink=sink.data_ptr(),
        out=out.data_ptr(), rows=q.shape[0], q_stride=q.shape[1], window_places=places,
        places=main_rows.shape[1] if listed else 0, first_main=first_main, scale=scale,
    )  # fmt: skip
    blocks = min(_blocks(q.device), q.shape[0])
    _kernel(q.device).launch((blocks, 1), params, programmatic=False)
