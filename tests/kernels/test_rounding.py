"""Rounding helpers against torch and the reference quantisers: every pattern, every boundary."""

import torch
import triton
import triton.language as tl

from deepdraft.kernels import rounding
from deepdraft.quant import formats
from deepdraft.quant.rounding import E2M1_MAX, E4M3_MAX, ceil_scale
from deepdraft.quant.simulate import ACT_AMAX_FLOOR, INDEX_AMAX_FLOOR
from tests.kernels.interpreter import DEVICE


@triton.jit
def narrow_kernel(x_ptr, bf16_ptr, e4m3_ptr, e2m1_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(bf16_ptr + i, rounding.to_bf16_rne(x))
    tl.store(e4m3_ptr + i, rounding.to_e4m3_rne(x))
    tl.store(e2m1_ptr + i, rounding.to_e2m1_rne(x))


@triton.jit
def widen_kernel(e4m3_ptr, e2m1_ptr, e8m0_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(e4m3_ptr + i, rounding.from_e4m3(i.to(tl.uint8)))
    tl.store(e2m1_ptr + i, rounding.from_e2m1(i & 15))
    tl.store(e8m0_ptr + i, rounding.from_e8m0(i))


@triton.jit
def scale_kernel(x_ptr, act_ptr, index_ptr, inverse_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    act = rounding.scale_bits(x, rounding.ACT_FLOOR, rounding.E4M3_CARRY)
    index = rounding.scale_bits(x, rounding.INDEX_FLOOR, rounding.E2M1_CARRY)
    tl.store(act_ptr + i, act.to(tl.float32, bitcast=True))
    tl.store(index_ptr + i, index.to(tl.float32, bitcast=True))
    tl.store(inverse_ptr + i, rounding.inverse_of(index))


def narrow(x):
    n = 1 << (x.numel() - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, n - x.numel())).to(DEVICE)
    bf16 = torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    e4m3 = torch.empty(n, dtype=torch.uint8, device=DEVICE)
    e2m1 = torch.empty(n, dtype=torch.uint8, device=DEVICE)
    block = min(n, 1 << 16) if DEVICE == "cpu" else 1024
    narrow_kernel[(n // block,)](x, bf16, e4m3, e2m1, N=block)
    return x.cpu(), bf16.cpu(), e4m3.cpu(), e2m1.cpu()


def neighbours(x):
    """x with the floats just below and above it."""
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat((x, torch.nextafter(x, up), torch.nextafter(x, down)))


def bits(x):
    return x.view(torch.int16)


def test_bf16_of_all_patterns_and_halfway_points():
    patterns = torch.arange(65536, dtype=torch.int32)
    every = (patterns << 16).view(torch.float32)
    halfway = ((patterns << 16) | 0x8000).view(torch.float32)
    x = torch.cat((every, halfway, ((patterns << 16) | 0x7FFF).view(torch.float32)))
    x, bf16, _, _ = narrow(torch.cat((x, ((patterns << 16) | 0x8001).view(torch.float32))))
    want = x.to(torch.bfloat16)
    nan = x.isnan()
    assert torch.equal(bits(bf16)[~nan], bits(want)[~nan])
    assert bool(bf16[nan].isnan().all())


def test_e4m3_of_all_bf16_values_and_all_boundaries():
    every = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(127, dtype=torch.uint8)
    values = formats.decode_e4m3(codes)
    middle = (values[1:] + values[:-1]) / 2
    edges = neighbours(torch.cat((values, middle)))
    x, _, e4m3, _ = narrow(torch.cat((every, edges, -edges)))
    nan = x.isnan()
    assert torch.equal(e4m3[~nan], formats.encode_e4m3(x[~nan]))
    assert bool(((e4m3[nan] & 0x7F) == 0x7F).all())


def test_e2m1_of_all_bf16_values_and_all_boundaries():
    every = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    edges = neighbours(torch.tensor([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6]))
    x, _, _, e2m1 = narrow(torch.cat((every[every.isfinite()], edges, -edges)))
    assert torch.equal(e2m1, formats.encode_e2m1(x))


def test_codes_become_numbers():
    e4m3, e2m1, e8m0 = (torch.empty(256, device=DEVICE) for _ in range(3))
    widen_kernel[(1,)](e4m3, e2m1, e8m0, N=256)
    codes = torch.arange(256, dtype=torch.uint8)
    number = (codes & 0x7F) != 0x7F
    assert torch.equal(e4m3.cpu()[number], formats.decode_e4m3(codes)[number])
    assert torch.equal(
        e2m1.cpu().view(torch.int32), formats.decode_e2m1(codes & 15).view(torch.int32)
    )
    assert torch.equal(e8m0.cpu()[1:255], formats.decode_e8m0(codes)[1:255])


def test_scales_of_groups():
    powers = torch.exp2(torch.arange(-126, 120).float())
    x = torch.cat([neighbours(powers * f) for f in (1.0, 1.5, 1.75)])
    x = torch.cat((torch.zeros(1), x[x.isfinite() & (x >= 0)]))
    n = 1 << (x.numel() - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, n - x.numel()), value=1.0)
    act, index, inverse = (torch.empty(n, device=DEVICE) for _ in range(3))
    scale_kernel[(1,)](x.to(DEVICE), act, index, inverse, N=n)
    assert torch.equal(act.cpu(), ceil_scale(x, E4M3_MAX, ACT_AMAX_FLOOR))
    assert torch.equal(index.cpu(), ceil_scale(x, E2M1_MAX, INDEX_AMAX_FLOOR))
    assert torch.equal(inverse.cpu(), 1.0 / ceil_scale(x, E2M1_MAX, INDEX_AMAX_FLOOR))
