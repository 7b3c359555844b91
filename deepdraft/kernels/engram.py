"""Engram of a decode step: table rows to FP8 activations, and the injection into the streams.

Contracts and references: `deepdraft.ops.engram`. Tables may lie in pinned host memory: a row is
264 bytes and is read once.

Letters: R rows, S streams, D hidden, G table rows of a token, W values of a table row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import QuantRows, quantize_groups
from deepdraft.kernels.rounding import from_e4m3, from_e8m0, round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

_BLOCK = 8192
"""Channels of a stream that a program has at once: it waits for memory twice."""


@triton.jit
def gather_kernel(
    values_ptr, scales_ptr, rows_ptr, codes_ptr, out_scales_ptr, G, R, ROWS,
    W: tl.constexpr, GP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    place, row = tl.program_id(0), tl.program_id(1)
    source = tl.load(rows_ptr + row * G + place)
    inside = (source >= 0) & (source < ROWS)
    source = tl.where(inside, source, 0)
    g = tl.arange(0, GP)
    wanted = g < W // 32
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes = tl.load(values_ptr + source * W + at, mask=wanted[:, None] & inside, other=0)
    scale = tl.load(scales_ptr + source * (W // 32) + g, mask=wanted & inside, other=1)
    x = round_bf16(from_e4m3(codes) * from_e8m0(scale)[:, None])
    codes, scales = quantize_groups(x)
    out = codes_ptr + (row * G + place).to(tl.int64) * W + at
    tl.store(out, codes, mask=wanted[:, None])
    tl.store(out_scales_ptr + (place * (W // 32) + g) * R + row, scales, mask=wanted)


@triton.jit
def inject_kernel(
    x_ptr, kv_ptr, gate_ptr, out_ptr, D, NORM_EPS, S: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    stream, row = tl.program_id(0), tl.program_id(1)
    wide = row.to(tl.int64)
    x_ptr += (wide * S + stream) * D
    out_ptr += (wide * S + stream) * D
    key_ptr = kv_ptr + (wide * (S + 1) + stream) * D
    value_ptr = kv_ptr + (wide * (S + 1) + S) * D
    gate_ptr += stream * D
    dot = tl.zeros((BLOCK,), tl.float32)
    x_square = tl.zeros((BLOCK,), tl.float32)
    key_square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < D
        x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + d, mask=inside, other=0.0).to(tl.float32)
        dot += x * tl.load(gate_ptr + d, mask=inside, other=0.0) * key
        x_square += x * x
        key_square += key * key
    delta = tl.sum(dot, axis=0) * tl.rsqrt(tl.sum(x_square, axis=0) / D + NORM_EPS)
    delta *= tl.rsqrt(tl.sum(key_square, axis=0) / D + NORM_EPS)
    root = tl.sqrt(tl.maximum(tl.abs(delta), 1e-6))
    signed = tl.where(delta > 0, root, tl.where(delta < 0, -root, 0.0))
    gamma = 1.0 / (1.0 + tl.exp(-signed))
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < D
        x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + d, to_bf16_rne(x + gamma * value), mask=inside)


def gather_rows(values: Tensor, scales: Tensor, rows: Tensor) -> QuantRows:
    """Table rows (contract: ops.engram.gather_rows): values uint8 [N, W], scales uint8 [N, W/32],
    both on the GPU or in pinned host memory; rows int64 [R, G] -> FP8 [R, G * W].

    A row number outside the table gives zeros.
    """
    device = check(rows)
    for table in (values, scales):
        if table.device != device and not table.is_pinned():
            raise ValueError("an Engram table must lie on the GPU or in pinned host memory")
        if not table.is_contiguous() or table.dtype != torch.uint8:
            raise ValueError(f"an Engram table is contiguous bytes, got {table.dtype}")
    (count, width), (tokens, places) = values.shape, rows.shape
    if width % 32 or scales.shape != (count, width // 32) or rows.dtype != torch.int64:
        raise ValueError(f"{values.shape=}, {scales.shape=} and {rows.dtype=} do not fit")
    codes = torch.empty(tokens, places * width, dtype=torch.uint8, device=device)
    shape = (places * width // 32, tokens)
    out_scales = torch.empty(shape, dtype=torch.float32, device=device)
    launch(
        gather_kernel, (places, tokens), values, scales, rows, codes, out_scales,
        places, tokens, count, W=width, GP=next_power(width // 32), num_warps=1,
    )  # fmt: skip
    return QuantRows(codes, out_scales)


def inject(x: Tensor, kv: Tensor, gate: Tensor, *, norm_eps: float) -> Tensor:
    """Streams x bfloat16 [R, S, D] plus the gated memory (contract: ops.engram.inject): kv
    bfloat16 [R, (S + 1) D], gate float32 [S, D]."""
    device = check(x, kv, gate)
    rows, streams, hidden = x.shape
    if kv.shape != (rows, (streams + 1) * hidden) or gate.shape != (streams, hidden):
        raise ValueError(f"{x.shape=}, {kv.shape=} and {gate.shape=} do not fit")
    out = torch.empty(rows, streams, hidden, dtype=torch.bfloat16, device=device)
    launch(
        inject_kernel, (streams, rows), x, kv, gate, out, hidden, norm_eps,
        S=streams, BLOCK=min(_BLOCK, next_power(hidden)), num_warps=16 if hidden > 2048 else 4,
    )  # fmt: skip
    return out
