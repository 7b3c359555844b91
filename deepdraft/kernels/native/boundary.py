"""Launches of `boundary.cu`: from one sublayer to the next, a row by a cluster of blocks.

Contract and reference: as of `kernels.mhc.boundary`, which calls this file where it can run. The
streams have the Triton kernel's bits; the sum of squares has another order. Of several ranks' parts
the kernel makes the exchange itself: the bits of `kernels.one_shot` and the boundary behind it.

Owns: parameters and macros, which shapes the kernel takes. Knows nothing of: compiling (build).
"""

import ctypes
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepdraft.kernels.native import build, stages
from deepdraft.kernels.one_shot import Ticket
from deepdraft.kernels.runtime import programmatic_launch

CLUSTER = 8
"""Blocks that share a row."""
_VALUES = 4
_MOST_THREADS = 1024
_SHARED_BYTES = 256


class _Params(ctypes.Structure):
    """`Params` of boundary.cu for one rank."""

    _fields_: ClassVar[Any] = (
        *((n, ctypes.c_void_p) for n in ("y", "shared", "x", "coef", "norm")),
        *((n, ctypes.c_void_p) for n in ("out", "u", "codes", "scales")),
        ("hidden", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _params(ranks: int) -> type[_Params]:
    """`Params` of boundary.cu."""
    if ranks == 1:
        return _Params

    class Joined(_Params):
        _fields_: ClassVar[Any] = (
            ("boxes", ctypes.c_void_p * ranks),
            *((n, ctypes.c_void_p) for n in ("count", "error", "positions")),
            *((n, ctypes.c_int) for n in ("slot", "capacity", "limit")),
        )

    return Joined


def enabled(device: torch.device) -> bool:
    """Whether `mhc` is to take this kernel."""
    return stages.enabled("boundary", device)


def fits(hidden: int) -> bool:
    """Whether the kernel takes streams of this width: each block has whole groups of 32."""
    return hidden % (32 * CLUSTER) == 0 and _threads(hidden) <= _MOST_THREADS


def _threads(hidden: int) -> int:
    return -(-hidden // CLUSTER // _VALUES // 32) * 32


def macros(streams: int, picks: int, ticket: Ticket | None = None) -> dict[str, int]:
    """Macros of one variant of boundary.cu."""
    made = {"S": streams, "K": picks, "CL": CLUSTER, "SHARED_BYTES": _SHARED_BYTES}
    return made if ticket is None else made | {"RANKS": len(ticket.boxes), "RANK": ticket.rank}


def _kernel(device: torch.device, made: dict[str, int], threads: int) -> build.Kernel:
    return build.Kernel.kept(device, "boundary.cu", "boundary_kernel", made, threads=threads)


def boundary(
    x: Tensor,
    norm: Tensor | None,
    y: Tensor,
    shared: Tensor | None,
    coef: Tensor,
    *,
    norm_eps: float,
    ticket: Ticket | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expand and collapse: streams bfloat16 [R, S, D], the next input bfloat16 [R, D], its FP8
    codes uint8 [R, D] and scales float32 [D/32, R]; without `norm` only the streams are filled.
    Tensors as `mhc.boundary` has checked them.

    ticket: y is this rank's part, float32 [R, D] or picks, and is exchanged.
    """
    rows, streams, hidden = x.shape
    picks = y.shape[1] if y.dim() == 3 else 0
    out = torch.empty_like(x)
    u = torch.empty(rows, hidden, dtype=torch.bfloat16, device=x.device)
    codes = torch.empty(rows, hidden, dtype=torch.uint8, device=x.device)
    scales = torch.empty(hidden // 32, rows, dtype=torch.float32, device=x.device)
    more: dict[str, Any] = {}
    if ticket is not None:
        if y.dtype != (torch.bfloat16 if picks else torch.float32):
            raise ValueError(f"parts are float32, picks bfloat16, got {y.dtype}")
        more = {
            "boxes": ticket.boxes, "count": ticket.count, "error": ticket.error,
            "positions": ticket.positions, "slot": ticket.slot, "capacity": ticket.capacity,
            "limit": ticket.limit,
        }  # fmt: skip
    params = _params(1 if ticket is None else len(ticket.boxes))(
        y=y.data_ptr(), shared=0 if shared is None else shared.data_ptr(), x=x.data_ptr(),
        coef=coef.data_ptr(), norm=0 if norm is None else norm.data_ptr(), out=out.data_ptr(),
        u=u.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(), hidden=hidden, rows=rows,
        eps=norm_eps, **more,
    )  # fmt: skip
    kernel = _kernel(x.device, macros(streams, picks, ticket), _threads(hidden))
    kernel.launch((CLUSTER, rows), params, programmatic=programmatic_launch())
    return out, u, codes, scales
