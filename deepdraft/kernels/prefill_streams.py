"""From one sublayer to the next for many rows: one read and one write of the residual streams.

Contract and reference: `deepdraft.ops.boundary` (boundary, mix_coefficients). One program takes a
few rows through the sum of picks, expand, collapse, norm and quantisation, and on the way adds up
the next sublayer's mix coefficients, which the decode step makes of a second read of the streams.

Letters: R rows, S residual streams, D hidden, M = (2 + S) S coefficients, K picks, B rows of a
program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.layout import GROUP
from deepdraft.kernels.mhc import norm_block
from deepdraft.kernels.prefill_gemm import quantized_values
from deepdraft.kernels.rounding import round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`rows` of a program, `channels` at a time (powers of two of 16 and 32 at least)."""

    rows: int = 64
    channels: int = 32
    warps: int = 4
    stages: int = 2


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


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def written(y_ptr, shared_ptr, at, row, D, mask, K: tl.constexpr):
    """fp32 [B, N]: y as it stands (K = 0), or its picks in order and the shared expert last. at:
    channels [1, N]; row: int64 [B, 1]."""
    if K == 0:
        return tl.load(y_ptr + row * D + at, mask=mask, other=0.0).to(tl.float32)
    else:
        y = tl.load(y_ptr + row * (K * D) + at, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(1, K):
            y += tl.load(y_ptr + row * (K * D) + k * D + at, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(shared_ptr + row * D + at, mask=mask, other=0.0).to(tl.float32)
        return round_bf16(y)


@triton.jit
def finish_mix(coef_ptr, base_ptr, scale_ptr, row, inside, EPS, S: tl.constexpr, SP: tl.constexpr,
               ITERS: tl.constexpr):  # fmt: skip
    """Raw mixes in coef_ptr [R, M] become pre, post and comb (notes 2.2). row int64 [B]."""
    M: tl.constexpr = (2 + S) * S
    a, b = tl.arange(0, SP)[None, :, None], tl.arange(0, SP)[None, None, :]
    own = (coef_ptr + row * M)[:, None, None]
    here = inside[:, None, None] & (a < S) & (b < S)
    at = 2 * S + a * S + b
    logit = tl.load(own + at, mask=here, other=0.0) * tl.load(scale_ptr + 2)
    logit += tl.load(base_ptr + at, mask=(a < S) & (b < S), other=0.0)
    logit = tl.where(here, logit, float("-inf"))
    top = tl.maximum(tl.max(logit, axis=2, keep_dims=True), -1e30)
    comb = tl.where(here, tl.exp(logit - top), 0.0)
    comb = tl.where(here, comb / tl.sum(comb, axis=2, keep_dims=True) + EPS, 0.0)
    comb = tl.where(here, comb / (tl.sum(comb, axis=1, keep_dims=True) + EPS), 0.0)
    for _ in range(ITERS - 1):
        comb = tl.where(here, comb / (tl.sum(comb, axis=2, keep_dims=True) + EPS), 0.0)
        comb = tl.where(here, comb / (tl.sum(comb, axis=1, keep_dims=True) + EPS), 0.0)
    tl.store(own + at, comb, mask=here)
    one = tl.arange(0, SP)[None, :]
    own, here = (coef_ptr + row * M)[:, None], inside[:, None] & (one < S)
    for kind in tl.static_range(2):
        at = kind * S + one
        logit = tl.load(own + at, mask=here, other=0.0) * tl.load(scale_ptr + kind)
        logit += tl.load(base_ptr + at, mask=one < S, other=0.0)
        gate = 1.0 / (1.0 + tl.exp(-logit))
        tl.store(own + at, gate + EPS if kind == 0 else 2.0 * gate, mask=here)


# ---- kernel --------------------------------------------------------------------------------


@triton.jit
def enter_kernel(  # noqa: PLR0915 one pass over a row's streams
    y_ptr, shared_ptr, x_ptr, coef_ptr, pre_ptr, norm_ptr, part_ptr, base_ptr, scale_ptr,
    out_ptr, u_ptr, quant_ptr, next_ptr, R, D, PRE_STRIDE, NORM_EPS, EPS,
    K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, MP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, EXPAND: tl.constexpr, MIX: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * B + tl.arange(0, B)
    inside, row = b < R, b.to(tl.int64)
    M: tl.constexpr = (2 + S) * S
    wide, some = row[:, None], inside[:, None]
    # Columns of the product: part * MP + m.
    column = tl.arange(0, 4 * MP)
    m, part = column % MP, column // MP
    part_at = (part * M + m)[None, :] * (S * D)
    real = ((m < M) & (part < 3))[None, :]
    mixes = tl.zeros((B, 4 * MP), tl.float32)
    x_square, h_square = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for start in range(0, D, N):
        d = start + tl.arange(0, N)[None, :]
        here = some & (d < D)
        y = tl.zeros((B, N), tl.float32)
        if EXPAND:
            y = written(y_ptr, shared_ptr, d, wide, D, here, K)
        h = tl.zeros((B, N), tl.float32)
        for to in tl.static_range(S):
            if EXPAND:
                post = tl.load(coef_ptr + row * M + S + to, mask=inside, other=0.0)
                stream = post[:, None] * y
                for a in tl.static_range(S):
                    at = x_ptr + wide * (S * D) + a * D + d
                    old = tl.load(at, mask=here, other=0.0).to(tl.float32)
                    comb_at = coef_ptr + row * M + 2 * S + a * S + to
                    stream += tl.load(comb_at, mask=inside, other=0.0)[:, None] * old
                stream = round_bf16(stream)
                at = out_ptr + wide * (S * D) + to * D + d
                tl.store(at, to_bf16_rne(stream), mask=here)
            else:
                at = x_ptr + wide * (S * D) + to * D + d
                stream = tl.load(at, mask=here, other=0.0).to(tl.float32)
            h += tl.load(pre_ptr + row * PRE_STRIDE + to, mask=inside, other=0.0)[:, None] * stream
            if MIX:
                x_square += tl.sum(stream * stream, axis=1)
                own = start + tl.arange(0, N)[:, None]
                at = part_ptr + part_at + to * D + own
                fn = tl.load(at, mask=real & (own < D), other=0.0)
                mixes = dot_bf16(to_bf16_rne(stream), fn, mixes)
        h = round_bf16(h)
        h_square += tl.sum(h * h, axis=1)
        tl.store(u_ptr + wide * D + d, to_bf16_rne(h), mask=here)
    if MIX:
        inverse = tl.rsqrt(x_square / (S * D) + NORM_EPS)
        mixes = tl.sum(tl.reshape(mixes, (B, 4, MP)), axis=1) * inverse[:, None]
        m = tl.arange(0, MP)[None, :]
        tl.store(next_ptr + wide * M + m, mixes, mask=(m < M) & some)
    tl.debug_barrier()
    if MIX:
        finish_mix(next_ptr, base_ptr, scale_ptr, row, inside, EPS, S, SP, ITERS)
    inverse = tl.rsqrt(h_square / D + NORM_EPS)[:, None]
    for start in range(0, D, N):
        d = start + tl.arange(0, N)[None, :]
        here = some & (d < D)
        h = tl.load(u_ptr + wide * D + d, mask=here, other=0.0).to(tl.float32)
        u = norm_block(h, inverse, tl.load(norm_ptr + d, mask=d < D, other=0.0))
        tl.debug_barrier()
        tl.store(u_ptr + wide * D + d, to_bf16_rne(u), mask=here)
        quant = tl.reshape(quantized_values(tl.reshape(u, (B * N // 32, 32))), (B, N))
        tl.store(quant_ptr + wide * D + d, to_bf16_rne(quant), mask=here)


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
    fn, base, scale = (norm, norm, norm) if mix is None else (mix.parts, mix.base, mix.scale)
    given = [t for t in (x, norm, y, shared, coef, pre, fn, base, scale) if t is not None]
    device = check(*given)
    picks = 0 if y is None or y.dim() == 2 else y.shape[1]
    collapse = coef if pre is None else pre
    if hidden % GROUP or x.dtype != torch.bfloat16:
        raise ValueError(f"streams are bfloat16 [R, S, multiple of {GROUP}]: {x.shape} {x.dtype}")
    if collapse is None or (y is not None and coef is None) or (picks > 0) != (shared is not None):
        raise ValueError("a collapse needs pre or coef, an expand coef, picks the shared expert")
    m = (2 + streams) * streams
    if mix is not None and fn.shape != (PARTS, m, streams * hidden):
        raise ValueError(f"{fn.shape} is no mix of {streams} streams of {hidden}")
    out = torch.empty_like(x) if y is not None else x
    u = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    quantised = torch.empty_like(u)
    coefficients = None
    if mix is not None:
        coefficients = torch.empty(rows, m, dtype=torch.float32, device=device)
    launch(
        enter_kernel, (-(-rows // plan.rows),),
        x if y is None else y, x if shared is None else shared, x, norm if coef is None else coef,
        collapse, norm, fn, base, scale,
        out, u, quantised, u if coefficients is None else coefficients,
        rows, hidden, collapse.shape[1], norm_eps, eps,
        K=picks, S=streams, SP=next_power(streams, 2), MP=next_power(m, 16), B=plan.rows,
        N=plan.channels, EXPAND=y is not None, MIX=mix is not None, ITERS=iters,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return Entered(out, u, quantised, coefficients)
