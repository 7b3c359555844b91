"""Residual streams: mix coefficients, and the boundary between two sublayers.

Contracts and references: `deepdraft.ops.boundary`. The boundary writes a sublayer's output back
into the streams, collapses them for the next sublayer, norms and quantises: one program a row.

Letters: R rows, S residual streams, D hidden, M = (2 + S) S coefficients of a row (pre, post, comb
row by row), K picks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import QuantRows, quantize_groups
from deepdraft.kernels.layout import GROUP
from deepdraft.kernels.native import boundary as native
from deepdraft.kernels.one_shot import OneShot
from deepdraft.kernels.rounding import round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import ROW_TILE, check, launch, next_power, wait_for_inputs

_CHUNK, _BLOCK = 256, 128
"""Columns of the mix matrix that one program sums, and that it reads at a time."""


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def mix_sums_kernel(
    x_ptr, fn_ptr, part_ptr, square_ptr, WIDTH, R, M,
    MP: tl.constexpr, CHUNK: tl.constexpr, BK: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    chunk, row_tile = tl.program_id(0), tl.program_id(1)
    m, rows = tl.arange(0, MP), row_tile * T + tl.arange(0, T)
    acc = tl.zeros((MP, T), tl.float32)
    square = tl.zeros((T,), tl.float32)
    for start in tl.static_range(0, CHUNK, BK):
        k = chunk * CHUNK + start + tl.arange(0, BK)
        inside = k < WIDTH
        at = rows[None, :].to(tl.int64) * WIDTH + k[:, None]
        x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        wanted = (m < M)[:, None] & inside[None, :]
        fn = tl.load(fn_ptr + m[:, None] * WIDTH + k[None, :], mask=wanted, other=0.0)
        # In three parts of 11 bits each: x has 8, so nothing but the last bits of fn is lost.
        acc = tl.dot(fn, x, acc, input_precision="tf32x3")
        square += tl.sum(x * x, axis=0)
    at = (chunk * R + rows)[None, :] * M + m[:, None]
    tl.store(part_ptr + at, acc, mask=(m < M)[:, None])
    tl.store(square_ptr + chunk * R + rows, square)


@triton.jit
def part_sum(part_ptr, at, inside, STRIDE, CHUNKS, CP: tl.constexpr):
    """Sum over the chunks (fixed tree) of part_ptr[chunk * STRIDE + at]; `at` has any shape [N]."""
    chunk = tl.arange(0, CP)
    wanted = (chunk < CHUNKS)[:, None] & inside[None, :]
    part_ptr += chunk[:, None] * STRIDE + at[None, :]
    return tl.sum(tl.load(part_ptr, mask=wanted, other=0.0), axis=0)


@triton.jit
def mix_finish_kernel(
    part_ptr, square_ptr, base_ptr, scale_ptr, coef_ptr, R, WIDTH, CHUNKS, NORM_EPS, EPS,
    S: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr, ITERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    M: tl.constexpr = (2 + S) * S
    chunk = tl.arange(0, CP)
    squares = tl.load(square_ptr + chunk * R + row, mask=chunk < CHUNKS, other=0.0)
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + NORM_EPS)
    part_ptr += row * M
    coef_ptr += row * M
    a, inside = tl.arange(0, SP), tl.arange(0, SP) < S
    for kind in tl.static_range(2):
        at = kind * S + a
        mix = part_sum(part_ptr, at, inside, R * M, CHUNKS, CP) * inverse
        logit = tl.load(base_ptr + at, mask=inside, other=0.0) + mix * tl.load(scale_ptr + kind)
        gate = 1.0 / (1.0 + tl.exp(-logit))
        tl.store(coef_ptr + at, gate + EPS if kind == 0 else 2.0 * gate, mask=inside)
    # comb, flat [SP * SP]: place a * SP + b holds what stream a gives to stream b.
    flat = tl.arange(0, SP * SP)
    first, second = flat // SP, flat % SP
    valid = (first < S) & (second < S)
    at = 2 * S + first * S + second
    mix = part_sum(part_ptr, at, valid, R * M, CHUNKS, CP) * inverse
    logit = tl.load(base_ptr + at, mask=valid, other=0.0) + mix * tl.load(scale_ptr + 2)
    live = tl.reshape(valid, (SP, SP))
    logit = tl.where(live, tl.reshape(logit, (SP, SP)), float("-inf"))
    top = tl.max(logit, axis=1)[:, None]
    comb = tl.where(live, tl.exp(logit - top), 0.0)
    comb = tl.where(live, comb / tl.sum(comb, axis=1)[:, None] + EPS, 0.0)
    comb = tl.where(live, comb / (tl.sum(comb, axis=0)[None, :] + EPS), 0.0)
    for _ in range(ITERS - 1):
        comb = tl.where(live, comb / (tl.sum(comb, axis=1)[:, None] + EPS), 0.0)
        comb = tl.where(live, comb / (tl.sum(comb, axis=0)[None, :] + EPS), 0.0)
    tl.store(coef_ptr + tl.reshape(at, (SP, SP)), comb, mask=live)


@triton.jit
def norm_block(h, inverse, weight):
    """fp32 [N] normed and weighted, rounded to bf16 values."""
    return round_bf16(h * inverse * weight)


@triton.jit
def sublayer_output(y_ptr, shared_ptr, wide, d, inside, D, K: tl.constexpr):
    """fp32 [BLOCK]: y as it stands (K = 0), or its picks in order and the shared expert last."""
    if K == 0:
        return tl.load(y_ptr + wide * D + d, mask=inside, other=0.0).to(tl.float32)
    else:
        y = tl.load(y_ptr + wide * K * D + d, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(1, K):
            part = tl.load(y_ptr + (wide * K + k) * D + d, mask=inside, other=0.0)
            y += part.to(tl.float32)
        part = tl.load(shared_ptr + wide * D + d, mask=inside, other=0.0)
        return round_bf16(y + part.to(tl.float32))


@triton.jit
def boundary_kernel(
    y_ptr, shared_ptr, x_ptr, coef_ptr, pre_ptr, norm_ptr,
    out_ptr, h_ptr, u_ptr, codes_ptr, scales_ptr,
    D, R, NORM_EPS, PRE_STRIDE,
    K: tl.constexpr, S: tl.constexpr, EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    out_ptr += wide * S * D
    coef_ptr += row * (2 + S) * S
    pre_ptr += row * PRE_STRIDE
    # The whole row is held at once, the streams but one at a time: all of them and the picks are
    # more than the registers hold, and they are in the cache after the first turn.
    d = tl.arange(0, BLOCK)
    inside = d < D
    x_ptr += wide * S * D
    y, h = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if EXPAND:
        y = sublayer_output(y_ptr, shared_ptr, wide, d, inside, D, K)
    for b in tl.static_range(S):
        if EXPAND:
            stream = tl.load(coef_ptr + S + b) * y
            for a in tl.static_range(S):
                x = tl.load(x_ptr + a * D + d, mask=inside, other=0.0).to(tl.float32)
                stream += tl.load(coef_ptr + 2 * S + a * S + b) * x
            stream = round_bf16(stream)
            tl.store(out_ptr + b * D + d, to_bf16_rne(stream), mask=inside)
        else:
            stream = tl.load(x_ptr + b * D + d, mask=inside, other=0.0).to(tl.float32)
        if COLLAPSE:
            h += tl.load(pre_ptr + b) * stream
    if COLLAPSE:
        h = round_bf16(h)
        if HIDDEN:
            tl.store(h_ptr + wide * D + d, to_bf16_rne(h), mask=inside)
        inverse = tl.rsqrt(tl.sum(h * h, axis=0) / D + NORM_EPS)
        u = norm_block(h, inverse, tl.load(norm_ptr + d, mask=inside, other=0.0))
        tl.store(u_ptr + wide * D + d, to_bf16_rne(u), mask=inside)
        codes, scales = quantize_groups(tl.reshape(u, (BLOCK // 32, 32)))
        g = tl.arange(0, BLOCK // 32)
        channel = g[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes_ptr + wide * D + channel, codes, mask=channel < D)
        tl.store(scales_ptr + g * R + row, scales, mask=g < D // 32)


@triton.jit
def norm_row(
    row, x_ptr, weight_ptr, u_ptr, codes_ptr, scales_ptr, WIDTH, STRIDE, R, NORM_EPS,
    GP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The first WIDTH columns of one row: normed, quantised and (WIDE) in bf16."""
    wide = row.to(tl.int64)
    g = tl.arange(0, GP)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = at < WIDTH
    x = tl.load(x_ptr + wide * STRIDE + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / WIDTH + NORM_EPS)
    u = norm_block(x, inverse, tl.load(weight_ptr + at, mask=inside, other=0.0))
    if WIDE:
        tl.store(u_ptr + wide * WIDTH + at, to_bf16_rne(u), mask=inside)
    codes, scales = quantize_groups(u)
    tl.store(codes_ptr + wide * WIDTH + at, codes, mask=inside)
    tl.store(scales_ptr + g * R + row, scales, mask=g < WIDTH // 32)


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, u_ptr, codes_ptr, scales_ptr, WIDTH, STRIDE, R, NORM_EPS, GP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    norm_row(
        row, x_ptr, weight_ptr, u_ptr, codes_ptr, scales_ptr, WIDTH, STRIDE, R, NORM_EPS, GP, True
    )


# ---- launches ------------------------------------------------------------------------------


def mix_coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float, norm_eps: float
) -> Tensor:
    """Streams x bfloat16 [R, S, D] -> pre, post and comb float32 [R, M] (contract: ops.boundary).

    fn [M, S * D], base [M], scale [3]: float32 as published.
    """
    device = check(x, fn, base, scale)
    rows, streams, hidden = x.shape
    width, m = streams * hidden, (2 + streams) * streams
    if rows % ROW_TILE or fn.shape != (m, width) or x.dtype != torch.bfloat16:
        raise ValueError(f"{x.shape=}, {x.dtype=} and {fn.shape=} do not fit one another")
    chunks = -(-width // _CHUNK)
    part = torch.empty(chunks, rows, m, dtype=torch.float32, device=device)
    square = torch.empty(chunks, rows, dtype=torch.float32, device=device)
    coef = torch.empty(rows, m, dtype=torch.float32, device=device)
    launch(
        mix_sums_kernel, (chunks, rows // ROW_TILE), x, fn, part, square, width, rows, m,
        MP=next_power(m, 16), CHUNK=_CHUNK, BK=_BLOCK, T=ROW_TILE,
    )  # fmt: skip
    launch(
        mix_finish_kernel, (rows,), part, square, base, scale, coef,
        rows, width, chunks, norm_eps, eps,
        S=streams, SP=next_power(streams, 2), CP=next_power(chunks), ITERS=iters, num_warps=1,
    )  # fmt: skip
    return coef


def boundary(
    x: Tensor,
    norm: Tensor | None,
    *,
    y: Tensor | None = None,
    shared: Tensor | None = None,
    coef: Tensor | None = None,
    pre: Tensor | None = None,
    hidden_out: Tensor | None = None,
    norm_eps: float = 0.0,
    exchange: OneShot | None = None,
) -> tuple[Tensor, Tensor | None, QuantRows | None]:
    """From one sublayer to the next (contract: ops.boundary.boundary).

    x bfloat16 [R, S, D]; y bfloat16 [R, D], or [R, K, D] picks with the `shared` expert [R, D];
    coef float32 [R, M]; norm float32 [D]. Returns the new streams, the next sublayer's input
    bfloat16 [R, D] and the same in FP8. Without `y`: no expand. Without `norm`: no collapse. `pre`
    [R, S] collapses where it is not coef's. `hidden_out` bfloat16 [R, D] receives the collapsed
    state before its norm. `exchange`: of several ranks; y is this one's part, float32 [R, D] or
    picks.
    """
    rows, streams, hidden = x.shape
    given = [t for t in (x, norm, y, shared, coef, pre, hidden_out) if t is not None]
    device = check(*given)
    if rows % ROW_TILE or hidden % GROUP:
        raise ValueError(f"streams must be [multiple of 8, S, multiple of 32]: {x.shape}")
    picks = 0 if y is None or y.dim() == 2 else y.shape[1]
    if (y is not None and coef is None) or (picks > 0) != (shared is not None):
        raise ValueError("an expand needs coef, and picks the shared expert's output")
    mix = coef if pre is None else pre
    if norm is not None and mix is None:
        raise ValueError("a collapse needs pre or coef")
    usual = pre is None and hidden_out is None and native.enabled(device) and native.fits(hidden)
    ticket = None
    if exchange is not None and y is not None:
        if usual and exchange.gives_tickets:
            ticket = exchange.ticket(rows * hidden, rows * native.CLUSTER)
        else:
            y = exchange.sum_rows(y) if shared is None else exchange.sum_picks(y, shared)
            shared, picks = None, 0
    if usual and y is not None and coef is not None:
        made = native.boundary(x, norm, y, shared, coef, norm_eps=norm_eps, ticket=ticket)
        out, u, codes, scales = made
        return (out, None, None) if norm is None else (out, u, QuantRows(codes, scales))
    out = torch.empty_like(x) if y is not None else x
    collapse = norm is not None
    h = u = x
    if collapse:
        u = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        h = u if hidden_out is None else hidden_out
    codes = torch.empty(rows, hidden, dtype=torch.uint8, device=device) if collapse else x
    shape = (hidden // GROUP, rows)
    scales = torch.empty(shape, dtype=torch.float32, device=device) if collapse else x
    launch(
        boundary_kernel, (rows,),
        x if y is None else y, x if shared is None else shared, x, x if coef is None else coef,
        x if mix is None else mix, x if norm is None else norm, out, h, u, codes, scales,
        hidden, rows, norm_eps, streams if pre is not None else (2 + streams) * streams,
        K=picks, S=streams, EXPAND=y is not None, COLLAPSE=collapse,
        HIDDEN=hidden_out is not None, BLOCK=next_power(hidden),
        num_warps=min(16, max(1, next_power(hidden) // 512)),
    )  # fmt: skip
    return out, u if collapse else None, QuantRows(codes, scales) if collapse else None


def norm_rows(
    x: Tensor, weight: Tensor, width: int, *, norm_eps: float
) -> tuple[Tensor, QuantRows]:
    """RMS norm of the first `width` columns of x bfloat16 [R, N]: bfloat16 [R, width], and the same
    in FP8 (contract: ops.boundary.norm_rows)."""
    device = check(x, weight)
    rows, stride = x.shape
    if rows % ROW_TILE or width % GROUP or width > stride or weight.shape != (width,):
        raise ValueError(f"{width} columns of {x.shape} do not fit the norm of {weight.shape}")
    u = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=device)
    launch(
        norm_kernel, (rows,), x, weight, u, codes, scales, width, stride, rows, norm_eps,
        GP=next_power(width // GROUP), num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return u, QuantRows(codes, scales)
