"""Launches of `stream.cu`: dense FP8 products and routed MXFP4 experts of few rows.

Contracts and references: `deepdraft.ops.gemm`, `deepdraft.ops.moe`, as of the Triton kernels in
`kernels.gemv` and `kernels.moe`, which call this file for weights in fragment order
(`fragments.Streamed`). Sums have another order than theirs, so the last bits differ.

Owns: parameters and macros, whether this machine can build the kernels. Knows nothing of: weights'
order (fragments), compiling (build).
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from deepdraft.errors import ConfigError
from deepdraft.kernels.native import build, trials
from deepdraft.kernels.native.fragments import (
    Streamed,
    StreamPlan,
    dense_stream_plan,
    expert_stream_plan,
)
from deepdraft.kernels.runtime import ROW_TILE, programmatic_launch
from deepdraft.telemetry import logger

FP8_ROWS, BF16_ROWS, UP, DOWN = 1, 2, 3, 4
_OUTPUTS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}


class _Params(ctypes.Structure):
    """`Params` of stream.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("w", "ws", "x", "xs", "y", "ys", "part", "arrive")),
        *((n, ctypes.c_void_p) for n in ("experts", "slots", "weights")),
        *((n, ctypes.c_int) for n in ("rows", "groups", "units", "x_width", "block_units")),
        *((n, ctypes.c_int) for n in ("picks", "places")),
        ("limit", ctypes.c_float),
        ("early", ctypes.c_int),
    )


SETTING = "DEEPDRAFT_NATIVE"
_CHOICES = {
    "none": (),
    "experts": ("expert",),
    "dense": ("dense",),
    "stages": ("stage",),
    "all": ("expert", "dense", "stage"),
}
_DEFAULT = "all"


def chosen(kind: str, device: torch.device) -> bool:
    """Whether weights of this kind, or stages between products, are this language's on a device."""
    setting = os.environ.get(SETTING, _DEFAULT)
    if setting not in _CHOICES:
        raise ConfigError(f"{SETTING}={setting!r}: one of {', '.join(_CHOICES)}")
    return kind in _CHOICES[setting] and available(device)


def dense_plan(device: torch.device, rows: int, cols: int, blocks: int = 1) -> StreamPlan | None:
    """How a dense FP8 matrix is streamed on this device; None: Triton's kernel reads it."""
    if rows % (32 * blocks) or not chosen("dense", device):
        return None
    plan = dense_stream_plan(rows, cols)
    fits = plan is not None and (blocks == 1 or rows // blocks // 32 % plan.down == 0)
    return plan if fits else None


def expert_plans(
    device: torch.device, hidden: int, width: int
) -> tuple[StreamPlan, StreamPlan] | None:
    """How the up and the down maps of experts are streamed; None: Triton's kernels read both."""
    if not chosen("expert", device):
        return None
    up, down = expert_stream_plan(2 * width, hidden), expert_stream_plan(hidden, width)
    return None if up is None or down is None else (up, down)


@functools.cache
def available(device: torch.device) -> bool:
    """Whether this device runs these kernels and there is a compiler for them; says why not."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        logger.info(
            "CUDA C++ kernels are for sm_90, this is sm_%d%d: Triton's are used", *capability
        )
        return False
    try:
        _kernel(device, FP8_ROWS, StreamPlan(1, 1, 8, 2, 1, 2), 0)
    except build.BuildError as error:
        logger.warning("CUDA C++ kernels cannot be built, Triton's are used: %s", error)
        return False
    return True


def macros(kind: int, plan: StreamPlan, output: int) -> dict[str, int]:
    """Macros of one variant of stream.cu."""
    more = {"BULK": 1} if plan.bulk else {}
    if plan.joined:
        more["JOINED"] = 1
    if trials.on("lanes"):
        more["EVERY_LANE"] = 1
    return {
        **more, "KIND": kind, "NG": plan.groups, "ST": plan.step, "WK": plan.across,
        "WM": plan.down,
        "SPLIT": plan.split, "DEPTH": plan.depth, "FOLD": plan.fold, "OUT": output,
        "SHARED_BYTES": shared_bytes(kind, plan),
    }  # fmt: skip


def shared_bytes(kind: int, plan: StreamPlan) -> int:
    """Dynamic shared memory of one block."""
    warps, fp4 = plan.warps, kind >= UP
    sums = (2 * warps if plan.across > 1 else 1) * 1024
    if plan.joined:
        sums += 2 * (plan.split - 1) * plan.down * 1024 + 64
    group, lists = (512, 64 * 36) if fp4 else (1024, 0)
    if plan.bulk:
        step = warps * plan.step * (group + (32 if fp4 else 0))
        return 640 + lists + sums + plan.depth * (step + 16)
    scales = 3 * plan.groups * 32 if fp4 else 0
    return 384 + lists + sums + warps * (plan.depth * plan.step * group + scales)


def threads(plan: StreamPlan) -> int:
    """Threads of one block: its warps, one that adds their sums, one that copies."""
    return 32 * (plan.warps + (plan.across > 1) + plan.bulk)


def _kernel(device: torch.device, kind: int, plan: StreamPlan, output: int) -> build.Kernel:
    made = macros(kind, plan, output)
    return _loaded(device, tuple(made.items()), threads(plan))


def _loaded(device: torch.device, made: tuple[tuple[str, int], ...], count: int) -> build.Kernel:
    return build.Kernel.kept(device, "stream.cu", "stream_kernel", dict(made), threads=count)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _checked(*tensors: Tensor) -> torch.device:
    device = tensors[0].device
    for t in tensors:
        if t.device != device or device.type != "cuda" or not t.is_contiguous():
            raise ValueError(
                f"CUDA C++ kernels take contiguous tensors of one CUDA device: {t.device}, "
                f"strides {t.stride()}"
            )
    return device


def _launch(
    device: torch.device, kind: int, w: Streamed, output: int, row_tiles: int, **fields: object
) -> None:
    programmatic = programmatic_launch()
    params = _Params(
        early=programmatic, w=w.values.data_ptr(), ws=w.scales.data_ptr(), groups=w.cols // 32,
        units=w.rows // 32, arrive=w.arrivals.data_ptr(),
        **{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fields.items()},
    )  # fmt: skip
    kernel = _kernel(device, kind, w.plan, output)
    blocks = _multiprocessors(device) * w.plan.blocks
    if w.plan.joined:
        blocks -= blocks % w.plan.split  # whole clusters
    grid = blocks, row_tiles
    kernel.launch(grid, params, programmatic=programmatic)


def gemv(
    x: Tensor, x_scales: Tensor | None, w: Streamed, *, blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """FP8 rows (codes, scales) or bfloat16 rows [R, blocks * K] times w [N, K]: [R, N] in dtype.

    torch.uint8: bf16 values quantised to FP8 in groups of 32, with scales float32 [N/32, R].
    """
    rows, width = x.shape
    if width != blocks * w.cols or rows % ROW_TILE or w.rows % (32 * blocks) or w.kind != "fp8":
        raise ValueError(
            f"{tuple(x.shape)=} must be [multiple of {ROW_TILE}, {blocks} x {w.cols}] for FP8 "
            f"weights of {w.rows} x {w.cols}, not {w.kind}"
        )
    if blocks > 1 and (w.rows // blocks // 32) % w.plan.down:
        raise ValueError(
            f"a block of {w.rows // blocks} rows is no multiple of {w.plan.down} units"
        )
    device = _checked(x, w.values, *(() if x_scales is None else (x_scales,)))
    row_tiles = rows // ROW_TILE
    apart = w.plan.split > 1 and not w.plan.joined
    if apart and w.arrivals.numel() < row_tiles * (w.rows // 32):
        raise ValueError(f"{rows} rows are more than this matrix has arrival counters for")
    y = torch.empty(rows, w.rows, dtype=dtype, device=device)
    scales = part = None
    if dtype == torch.uint8:
        scales = torch.empty(w.rows // 32, rows, dtype=torch.float32, device=device)
    if apart:
        size = row_tiles * w.rows // 32 * w.plan.split * 256
        part = torch.empty(size, dtype=torch.float32, device=device)
    _launch(
        device, BF16_ROWS if x_scales is None else FP8_ROWS, w, _OUTPUTS[dtype], row_tiles,
        x=x, xs=x_scales, y=y, ys=scales, part=part, rows=rows, x_width=width,
        block_units=w.rows // blocks // 32 if blocks > 1 else 0,
    )  # fmt: skip
    return y, scales


def routed_up(
    codes: Tensor, scales: Tensor, experts: Tensor, slots: Tensor, weights: Tensor, w13: Streamed,
    *, limit: float,
) -> Tensor:  # fmt: skip
    """FP8 rows [R, D] through the up half of their picked experts: bfloat16 [R * K, F], not yet
    quantised (`routed_down` does it). Rows of picks that are -1 are left as they were."""
    device = _checked(codes, scales, experts, slots, weights, w13.values)
    rows, k = weights.shape
    y = torch.empty(rows * k, w13.rows // 2, dtype=torch.bfloat16, device=device)
    _launch(
        device, UP, w13, 0, rows // ROW_TILE, x=codes, xs=scales, y=y, experts=experts,
        slots=slots, weights=weights, rows=rows, x_width=w13.cols, picks=k,
        places=experts.shape[1], limit=limit,
    )  # fmt: skip
    return y


def routed_down(h: Tensor, experts: Tensor, slots: Tensor, w2: Streamed, *, picks: int) -> Tensor:
    """h bfloat16 [R * K, F], quantised on the way, through the down half: bfloat16 [R * K, D]."""
    device = _checked(h, experts, slots, w2.values)
    rows = h.shape[0] // picks
    y = torch.empty(h.shape[0], w2.rows, dtype=torch.bfloat16, device=device)
    _launch(
        device, DOWN, w2, 0, rows // ROW_TILE, x=h, y=y, experts=experts, slots=slots, rows=rows,
        x_width=w2.cols, picks=picks, places=experts.shape[1],
    )  # fmt: skip
    return y
