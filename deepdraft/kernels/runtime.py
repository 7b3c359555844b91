"""How the kernels run: compiled on a GPU, or in Triton's interpreter on a CPU.

Owns: the switches every kernel file reads, the row tile, the checks before a launch. Knows nothing
of: what a kernel computes.

The interpreter (TRITON_INTERPRET=1, set before triton is imported) checks numerics without a GPU.
It has no inline assembly and rounds some types wrongly (kernels/rounding.py), so `INTERPRET` picks
the portable twin of a few expressions. It is for tests: a launch on CPU tensors without it, or on
CUDA tensors with it, is refused.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

ROW_TILE = 8
"""Rows of a batch that one program works on, whatever the row count: the bits of a row do not
depend on it. More rows are more tiles. Row buffers are padded to a multiple of it."""


def padded_rows(rows: int) -> int:
    """The least multiple of the row tile that holds this many rows."""
    return -(-rows // ROW_TILE) * ROW_TILE


def pad_rows(x: Tensor) -> Tensor:
    """x [R, ...] with rows of zeros up to a multiple of 8. Kernels take such row buffers; what the
    added rows hold matters to no other row."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def next_power(n: int, least: int = 1) -> int:
    """The least power of two that is at least n and `least`: tile sides of Triton."""
    return max(least, 1 << (n - 1).bit_length())


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Under programmatic launch: wait until what earlier kernels wrote can be read, then let the
    next one start. Before it a kernel reads weights only and writes nothing; every program passes
    it, or a later kernel could overtake an earlier one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, size):
    """Have `size` bytes (a multiple of 16) from ptr brought into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        """
        { .reg .pred first; .reg .u32 lane;
          mov.u32 lane, %tid.x;  setp.eq.u32 first, lane, 0;
          @first cp.async.bulk.prefetch.L2.global [$1], $2;  mov.u32 $0, 0; }
        """,
        "=r,l,r",
        [ptr.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


_programmatic = False


def use_programmatic_launch(on: bool) -> None:
    """Whether kernels launched from now on may start while their predecessor ends (Hopper's
    programmatic dependent launch). A captured graph keeps what it was captured with; results are
    the same. Off in the interpreter."""
    global _programmatic
    _programmatic = on and not INTERPRET.value


def programmatic_launch() -> bool:
    """Whether programmatic launch is on."""
    return _programmatic


def launch(kernel: Any, grid: tuple[Any, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options): a jitted function's parameters are not those of a call.

    A kernel with a parameter PDL is launched programmatically where that is switched on; another
    one starts when its predecessor has ended.
    """
    if "PDL" in kernel.arg_names:
        options["PDL"] = _programmatic
        if _programmatic:
            options["launch_pdl"] = True
    kernel[grid](*args, **options)


def check(*tensors: Tensor) -> torch.device:
    """The tensors' common device. ValueError where a kernel cannot run on them.

    Tensors without storage (device meta) pass: bench/kernels_sass.py compiles with them.
    """
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        names = sorted(map(str, devices))
        raise ValueError(f"the tensors of one kernel lie on several devices: {names}")
    device = devices.pop()
    if device.type == "cuda" and INTERPRET.value:
        raise ValueError("TRITON_INTERPRET=1 is set: unset it to run kernels on a GPU")
    if device.type not in ("cuda", "meta") and not INTERPRET.value:
        raise ValueError(
            f"Triton kernels run on CUDA tensors, these are on {device}; use the reference in "
            "deepdraft.ops, or set TRITON_INTERPRET=1 to test a kernel on the CPU"
        )
    for t in tensors:
        if not t.is_contiguous():
            raise ValueError(f"kernels take contiguous tensors, got strides {t.stride()}")
    return device
