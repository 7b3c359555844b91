"""From one sublayer to the next for many rows, and the next mix coefficients.

Contract and reference: `deepdraft.ops.boundary` (boundary, mix_coefficients). One program takes a
row through the sum of picks, expand, collapse, norm and quantisation; tiles of rows times parts of
the channels give the sums of the mix, which `mhc` finishes. A row's bits depend on that row alone:
the parts are as long whatever the row count, so that few rows have many programs, too.

Letters: R rows, S residual streams, D hidden, M = (2 + S) S coefficients, K picks, B rows of a
tile, C parts of the S * D channels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.layout import GROUP
from deepdraft.kernels.mhc import mix_finish_kernel, norm_block, sublayer_output
from deepdraft.kernels.prefill_gemm import quantized_values
from deepdraft.kernels.rounding import round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`channels` of a row at a time; of the mix, `rows` of a tile, `part` channels of a program,
    `deep` of them a step (powers of two of 16 at least). Rows, part and steps are part of the
    numerics."""

    channels: int = 1024
    warps: int = 4
    rows: int = 64
    part: int = 1024
    deep: int = 64
    mix_warps: int = 4
    stages: int = 3


PLAN = StreamPlan()
PARTS = 3
"""bf16 numbers that add up to a float32 number: 8 bits each."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Residual-mix coefficients of a sublayer: `parts` bfloat16 [3, M, S * D], which add up to fn;
    base float32 [M], scale float32 [3]."""

    parts: Tensor
    base: Tensor
    scale: Tensor

    @staticmethod
    def of(fn: Tensor, base: Tensor, scale: Tensor) -> "Mix":
        """From fn float32 [M, S * D]. The streams are bf16, so with fn in parts all products are
        exact on the tensor cores."""
        parts, rest = [], fn.float()
        for _ in range(PARTS):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        return Mix(torch.stack(parts), base, scale)


@dataclass(frozen=True, slots=True)
class Entered:
    """The streams bfloat16 [R, S, D] as the next sublayer meets them, its input bfloat16 [R, D],
    the same quantised (values), and its coefficients float32 [R, M]: none without a mix."""

    x: Tensor
    u: Tensor
    quantised: Tensor
    coef: Tensor | None


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def cross_kernel(
    y_ptr, shared_ptr, x_ptr, coef_ptr, pre_ptr, norm_ptr, out_ptr, u_ptr, quant_ptr, square_ptr,
    R, D, PRE_STRIDE, NORM_EPS, PARTS,
    K: tl.constexpr, S: tl.constexpr, N: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr,
    PP: tl.constexpr,
):  # fmt: skip
    """square_ptr [PARTS, R]: of all the row's streams, in the first part (`mix_finish_kernel` adds
    the parts up)."""
    row = tl.program_id(0).to(tl.int64)
    M: tl.constexpr = (2 + S) * S
    x_ptr += row * (S * D)
    out_ptr += row * (S * D)
    u_ptr += row * D
    quant_ptr += row * D
    coef_ptr += row * M
    pre_ptr += row * PRE_STRIDE
    squares, x_squares = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for start in range(0, D, N):
        d = start + tl.arange(0, N)
        here = d < D
        h, y = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        if EXPAND:
            y = sublayer_output(y_ptr, shared_ptr, row, d, here, D, K)
        for to in tl.static_range(S):
            if EXPAND:
                stream = tl.load(coef_ptr + S + to) * y
                for a in tl.static_range(S):
                    old = tl.load(x_ptr + a * D + d, mask=here, other=0.0).to(tl.float32)
                    stream += tl.load(coef_ptr + 2 * S + a * S + to) * old
                stream = round_bf16(stream)
                tl.store(out_ptr + to * D + d, to_bf16_rne(stream), mask=here)
            else:
                stream = tl.load(x_ptr + to * D + d, mask=here, other=0.0).to(tl.float32)
            h += tl.load(pre_ptr + to) * stream
            x_squares += stream * stream
        h = round_bf16(h)
        squares += h * h
        tl.store(u_ptr + d, to_bf16_rne(h), mask=here)
    if MIX:
        part = tl.arange(0, PP)
        value = tl.where(part == 0, tl.sum(x_squares, axis=0), 0.0)
        tl.store(square_ptr + part * R + row, value, mask=part < PARTS)
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / D + NORM_EPS)
    tl.debug_barrier()
    for start in range(0, D, N):
        d = start + tl.arange(0, N)
        here = d < D
        h = tl.load(u_ptr + d, mask=here, other=0.0).to(tl.float32)
        u = norm_block(h, inverse, tl.load(norm_ptr + d, mask=here, other=0.0))
        tl.debug_barrier()
        tl.store(u_ptr + d, to_bf16_rne(u), mask=here)
        quant = tl.reshape(quantized_values(tl.reshape(u, (N // 32, 32))), (N,))
        tl.store(quant_ptr + d, to_bf16_rne(quant), mask=here)


@triton.jit
def mix_parts_kernel(
    x_ptr, fn_ptr, part_ptr, R, WIDTH, M,
    MP: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums of one part of the channels for B rows: part_ptr [C, R, M].

    Loads are operands of the product and nothing else: Triton (3.6) gives a load that is also used
    otherwise one buffer too few, and overwrites it while the tensor cores read."""
    chunk = tl.program_id(0)
    row = tl.program_id(1) * B + tl.arange(0, B)
    # Columns of the product: part of fn * MP + m.
    column, k = tl.arange(0, 4 * MP), tl.arange(0, BK)
    m, third = column % MP, column // MP
    x_at = x_ptr + tl.minimum(row, R - 1).to(tl.int64)[:, None] * WIDTH + k[None, :]
    real = ((m < M) & (third < 3))[None, :]
    fn_at = fn_ptr + (third * M + m)[None, :] * WIDTH + k[:, None]
    sums = tl.zeros((B, 4 * MP), tl.float32)
    end = tl.minimum((chunk + 1) * CHUNK, WIDTH)
    for start in range(chunk * CHUNK, end, BK):
        x = tl.load(x_at + start, mask=(start + k < end)[None, :], other=0.0)
        fn = tl.load(fn_at + start, mask=real & (start + k < end)[:, None], other=0.0)
        sums = dot_bf16(x, fn, sums)
    mixes = tl.sum(tl.reshape(sums, (B, 4, MP)), axis=1)
    m, at = tl.arange(0, MP)[None, :], chunk.to(tl.int64) * R + row
    tl.store(part_ptr + at[:, None] * M + m, mixes, mask=(m < M) & (row < R)[:, None])


# ---- launch --------------------------------------------------------------------------------


def enter(
    x: Tensor,
    norm: Tensor,
    *,
    y: Tensor | None = None,
    shared: Tensor | None = None,
    coef: Tensor | None = None,
    pre: Tensor | None = None,
    mix: Mix | None = None,
    iters: int = 1,
    eps: float = 0.0,
    norm_eps: float = 0.0,
    plan: StreamPlan = PLAN,
) -> Entered:
    """Into the next sublayer (contract: `ops.boundary`: boundary, then mix_coefficients).

    x bfloat16 [R, S, D]; y bfloat16 [R, D], or [R, K, D] picks with the `shared` expert [R, D];
    coef float32 [R, M] of the sublayer that made y; pre float32 [R, S] collapses where it is not
    coef's; norm float32 [D]; mix: of the next sublayer. Without `y` the streams stay as they are.
    """
    rows, streams, hidden = x.shape
    given = [t for t in (x, norm, y, shared, coef, pre) if t is not None]
    device = check(*given)
    picks = 0 if y is None or y.dim() == 2 else y.shape[1]
    collapse = coef if pre is None else pre
    if hidden % GROUP or x.dtype != torch.bfloat16:
        raise ValueError(f"streams are bfloat16 [R, S, multiple of {GROUP}]: {x.shape} {x.dtype}")
    if collapse is None or (y is not None and coef is None) or (picks > 0) != (shared is not None):
        raise ValueError("a collapse needs pre or coef, an expand coef, picks the shared expert")
    if mix is not None and mix.parts.shape[1:] != ((2 + streams) * streams, streams * hidden):
        raise ValueError(f"{mix.parts.shape} is no mix of {streams} streams of {hidden}")
    out = torch.empty_like(x) if y is not None else x
    u = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    quantised = torch.empty_like(u)
    parts = -(-streams * hidden // plan.part)
    squares = torch.empty(parts, rows, dtype=torch.float32, device=device)
    launch(
        cross_kernel, (rows,),
        x if y is None else y, x if shared is None else shared, x, norm if coef is None else coef,
        collapse, norm, out, u, quantised, squares,
        rows, hidden, collapse.shape[1], norm_eps, parts,
        K=picks, S=streams, N=min(plan.channels, next_power(hidden)), EXPAND=y is not None,
        MIX=mix is not None, PP=next_power(parts), num_warps=plan.warps,
    )  # fmt: skip
    coefficients = None
    if mix is not None:
        coefficients = _coefficients(
            out, squares, mix, iters=iters, eps=eps, norm_eps=norm_eps, plan=plan
        )
    return Entered(out, u, quantised, coefficients)


def _coefficients(
    x: Tensor, squares: Tensor, mix: Mix, *, iters: int, eps: float, norm_eps: float,
    plan: StreamPlan,
) -> Tensor:  # fmt: skip
    """pre, post and comb float32 [R, M] of streams bfloat16 [R, S, D]; squares float32 [C, R]."""
    device = check(x, mix.parts, mix.base, mix.scale)
    rows, streams, hidden = x.shape
    width, m, parts = streams * hidden, mix.parts.shape[1], squares.shape[0]
    sums = torch.empty(parts, rows, m, dtype=torch.float32, device=device)
    coef = torch.empty(rows, m, dtype=torch.float32, device=device)
    launch(
        mix_parts_kernel, (parts, triton.cdiv(rows, plan.rows)), x, mix.parts, sums,
        rows, width, m, MP=next_power(m, 16), B=plan.rows, CHUNK=plan.part, BK=plan.deep,
        num_warps=plan.mix_warps, num_stages=plan.stages,
    )  # fmt: skip
    launch(
        mix_finish_kernel, (rows,), sums, squares, mix.base, mix.scale, coef,
        rows, width, parts, norm_eps, eps,
        S=streams, SP=next_power(streams, 2), CP=next_power(parts), ITERS=iters, num_warps=1,
    )  # fmt: skip
    return coef
