"""Launches of `route.cu`: router logits, each row's picks and the list of distinct experts.

Contract and reference: as of `kernels.gemv` (logits) and `kernels.routing.route_listed`. Logits are
summed in another order than the Triton kernel's, so the last bits differ.

Owns: parameters and macros, which shapes the kernel takes. Knows nothing of: compiling (build).
"""

import ctypes
import functools

import torch
from torch import Tensor

from deepdraft.kernels.layout import Tiled
from deepdraft.kernels.native import build, stages
from deepdraft.kernels.runtime import ROW_TILE, programmatic_launch

OWN = 8
"""Experts of a block: few blocks, so that few rows are read again and again."""
_WARPS = 16
_MOST_PICKS = 8


class _Params(ctypes.Structure):
    """`Params` of route.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("v", "w", "bias", "live", "forced", "picks", "weights")),
        *((n, ctypes.c_void_p) for n in ("experts", "slots", "scores", "arrive")),
        ("groups", ctypes.c_int),
        ("tile", ctypes.c_int),
        ("temperature", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


def enabled(device: torch.device) -> bool:
    """Whether `routing` is to take this kernel."""
    return stages.enabled("route", device)


def fits(gate: Tiled, picks: int) -> bool:
    """Whether the kernel takes this router."""
    return gate.kind == "bf16" and picks <= _MOST_PICKS


def macros(experts: int, picks: int) -> dict[str, int]:
    """Macros of one variant of route.cu."""
    return {"E": experts, "K": picks, "OWN": OWN, "SHARED_BYTES": _shared_bytes(picks)}


def _shared_bytes(picks: int) -> int:
    places = ROW_TILE * picks
    return 4 * (_WARPS * OWN * ROW_TILE + places * (2 + ROW_TILE) + 4)


@functools.cache
def _kernel(device: torch.device, experts: int, picks: int) -> build.Kernel:
    made = macros(experts, picks)
    return build.Kernel.load(device, "route.cu", "route_kernel", made, threads=32 * _WARPS)


def route(
    v: Tensor, gate: Tiled, bias: Tensor, positions: Tensor, forced: Tensor | None, *, k: int,
    scale: float, temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """v bfloat16 [R, D] times the router [E, D]: picks int32 [R, K], weights float32 [R, K], and
    of each row tile the distinct experts int32 [R/8, 8K] and slots int32 [R/8, 8K, 8].

    Tensors as `routing.route_rows` has checked them."""
    rows, experts, device = v.shape[0], gate.rows, v.device
    tiles, places = rows // ROW_TILE, ROW_TILE * k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    picks, listed, slots = ints(rows, k), ints(tiles, places), ints(tiles, places, ROW_TILE)
    weights = torch.empty(rows, k, dtype=torch.float32, device=device)
    scores = torch.empty(rows, experts, 2, dtype=torch.float32, device=device)
    params = _Params(
        v=v.data_ptr(), w=gate.values.data_ptr(), bias=bias.data_ptr(), live=positions.data_ptr(),
        forced=0 if forced is None else forced.data_ptr(), picks=picks.data_ptr(),
        weights=weights.data_ptr(), experts=listed.data_ptr(), slots=slots.data_ptr(),
        scores=scores.data_ptr(), arrive=gate.arrivals.data_ptr(), groups=gate.cols // 32,
        tile=gate.plan.tile, temperature=temperature, scale=scale,
    )  # fmt: skip
    kernel = _kernel(device, experts, k)
    kernel.launch((-(-experts // OWN), tiles), params, programmatic=programmatic_launch())
    return picks, weights, listed, slots
