"""Element codes and weight storage: every code, every tie, scale choice, both directions."""

import math

import pytest
import torch

from deepdraft.quant import formats
from deepdraft.quant.rounding import E2M1_MAX, E4M3_MAX, ceil_scale
from tests.quant.grids import E2M1_POSITIVE, E4M3_POSITIVE, e4m3_value, nearest

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
def test_every_e4m3_code_decodes_to_its_bit_fields(dtype):
    expected = torch.tensor([e4m3_value(code) for code in range(256)], dtype=dtype)
    decoded = formats.decode_e4m3(ALL_BYTES, dtype)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert math.copysign(1, decoded[0x80]) == -1


@DTYPES
def test_e4m3_codes_survive_decoding_and_encoding(dtype):
    codes = ALL_BYTES[(ALL_BYTES & 127) != 127]
    assert torch.equal(formats.encode_e4m3(formats.decode_e4m3(codes, dtype)), codes)


def test_e4m3_encodes_nan_as_nan_and_clips_the_rest():
    x = torch.tensor([float("nan"), 449.0, 1e30, float("inf"), -1e9])
    assert formats.decode_e4m3(formats.encode_e4m3(x)).nan_to_num(7).tolist() == [
        7,
        448,
        448,
        448,
        -448,
    ]


@DTYPES
@pytest.mark.parametrize(
    "grid, encode, decode",
    [
        (E4M3_POSITIVE, formats.encode_e4m3, formats.decode_e4m3),
        (E2M1_POSITIVE, formats.encode_e2m1, formats.decode_e2m1),
    ],
    ids=["e4m3", "e2m1"],
)
def test_ties_go_to_even_and_one_ulp_decides(grid, encode, decode, dtype):
    values = torch.tensor(grid, dtype=dtype)
    middle = (values[1:] + values[:-1]) / 2
    even = torch.tensor([grid[i + i % 2] for i in range(len(grid) - 1)], dtype=dtype)
    above = torch.nextafter(middle, torch.tensor(1e9, dtype=dtype))
    below = torch.nextafter(middle, torch.tensor(-1e9, dtype=dtype))
    assert torch.equal(decode(encode(middle), dtype), even)
    assert torch.equal(decode(encode(-middle), dtype), -even)
    assert torch.equal(decode(encode(above), dtype), values[1:])
    assert torch.equal(decode(encode(below), dtype), values[:-1])


@DTYPES
def test_every_e8m0_byte_is_reinterpreted(dtype):
    expected = torch.tensor([math.ldexp(1, b - 127) for b in range(255)], dtype=dtype)
    decoded = formats.decode_e8m0(ALL_BYTES, dtype)
    assert torch.equal(decoded[:255], expected)
    assert decoded[255].isnan()
    as_stored = ALL_BYTES.view(torch.float8_e8m0fnu)
    assert torch.equal(formats.decode_e8m0(as_stored, dtype)[:255], expected)


def test_e8m0_is_exact_in_bfloat16():
    decoded = formats.decode_e8m0(ALL_BYTES[:255], torch.bfloat16)
    assert torch.equal(decoded.double(), formats.decode_e8m0(ALL_BYTES[:255], torch.float64))


@DTYPES
def test_e8m0_encoding_inverts_decoding(dtype):
    codes = ALL_BYTES[1:255]
    assert torch.equal(formats.encode_e8m0(formats.decode_e8m0(codes, dtype)), codes)


@DTYPES
def test_every_e2m1_code(dtype):
    codes = ALL_BYTES[:16]
    decoded = formats.decode_e2m1(codes, dtype)
    assert decoded.tolist() == [*E2M1_POSITIVE, *(-v for v in E2M1_POSITIVE)]
    assert torch.equal(formats.encode_e2m1(decoded), codes)
    assert torch.equal(torch.signbit(decoded), codes >= 8)


def test_low_nibble_comes_first():
    packed = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)
    codes = formats.unpack_nibbles(packed)
    assert codes.tolist() == [[1, 2, 8, 15]]
    assert torch.equal(formats.pack_nibbles(codes), packed)
    assert torch.equal(formats.unpack_nibbles(packed.view(torch.int8)), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_pairs_of_every_byte(dtype):
    packed = ALL_BYTES.view(2, 128)
    expected = formats.decode_e2m1(formats.unpack_nibbles(packed), dtype)
    pairs = formats.decode_e2m1_pairs(packed, dtype)
    assert pairs.dtype == dtype
    assert torch.equal(pairs, expected)
    assert torch.equal(torch.signbit(pairs), torch.signbit(expected))


def test_published_bytes_of_a_real_weight():
    # Layer 0 wkv, row 0, of the published checkpoint (architecture notes 7.2).
    values = torch.zeros(32, 32, dtype=torch.uint8)
    values[0, :4] = torch.tensor([0xD8, 0x71, 0xF2, 0x79], dtype=torch.uint8)
    scales = torch.tensor([[0x73]], dtype=torch.uint8)
    row = formats.dequantize_fp8_tile(values, scales)[0, :4]
    assert row.tolist() == [-0.00390625, 0.03515625, -0.0390625, 0.0703125]


def test_each_fp8_tile_has_its_own_scale():
    values = formats.encode_e4m3(torch.ones(64, 96))
    scales = torch.tensor([[127, 128, 129], [126, 125, 124]], dtype=torch.uint8)
    x = formats.dequantize_fp8_tile(values, scales)
    expected = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 0.125]])
    assert torch.equal(x, expected.repeat_interleave(32, 0).repeat_interleave(32, 1))


def test_each_mxfp4_and_row_group_has_its_own_scale():
    scales = torch.tensor([[127, 130], [120, 127]], dtype=torch.uint8)
    expected = formats.decode_e8m0(scales).repeat_interleave(32, 1)
    ones = torch.full((2, 32), 0x22, dtype=torch.uint8)
    assert torch.equal(formats.dequantize_mxfp4(ones, scales), expected)
    ones = formats.encode_e4m3(torch.ones(2, 64))
    assert torch.equal(formats.dequantize_fp8_row(ones, scales), expected)


@DTYPES
@pytest.mark.parametrize("largest", [E4M3_MAX, E2M1_MAX])
@pytest.mark.parametrize("power", [-90, -12, 0, 7, 60])
def test_scale_is_exact_on_powers_of_two(dtype, largest, power):
    amax = torch.tensor([largest * 2.0**power], dtype=dtype)
    above = torch.nextafter(amax, torch.tensor([float("inf")], dtype=dtype))
    below = torch.nextafter(amax, torch.zeros(1, dtype=dtype))
    scales = [ceil_scale(a, largest, 2.0**-100).item() for a in (below, amax, above)]
    assert scales == [2.0**power, 2.0**power, 2.0 ** (power + 1)]


def wide_random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-8, 8, (shape[0], 1), generator=generator).double()
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 2**spread).float()


WEIGHTS = [
    (formats.quantize_fp8_tile, formats.dequantize_fp8_tile, E4M3_POSITIVE, 2**-4, 2**-10),
    (formats.quantize_fp8_row, formats.dequantize_fp8_row, E4M3_POSITIVE, 2**-4, 2**-10),
    (formats.quantize_mxfp4, formats.dequantize_mxfp4, E2M1_POSITIVE, 2**-2, 2**-2),
]


@pytest.mark.parametrize("quantize, dequantize, grid, relative, absolute", WEIGHTS)
def test_weight_round_trip(quantize, dequantize, grid, relative, absolute):
    x = wide_random(64, 96, seed=3)
    x[:32, 32:64] = 0
    values, scales = quantize(x)
    assert values.dtype == scales.dtype == torch.uint8
    back = dequantize(values, scales)
    scale = formats.decode_e8m0(scales).repeat_interleave(32, 1)
    scale = scale if scale.shape[0] == 64 else scale.repeat_interleave(32, 0)
    # The stated worst error, and exactly the nearest value of the grid.
    assert ((back - x).abs() <= torch.maximum(relative * x.abs(), absolute * scale)).all()
    sample = slice(30, 34)
    assert torch.equal(
        back[sample].double(), nearest((x / scale)[sample], grid) * scale[sample].double()
    )
    # The scale is the smallest that clips nothing.
    grouped = x.abs().unflatten(1, (-1, 32)).amax(-1)
    if scales.shape[0] == 2:
        grouped = grouped.unflatten(0, (-1, 32)).amax(1)
    used = formats.decode_e8m0(scales)
    assert (grouped <= used * grid[-1]).all()
    assert ((grouped > used * grid[-1] / 2) | (grouped == 0)).all()


@pytest.mark.parametrize("quantize, dequantize, grid, relative, absolute", WEIGHTS)
@DTYPES
def test_dequantised_weights_are_kept(quantize, dequantize, grid, relative, absolute, dtype):
    values, scales = quantize(wide_random(64, 64, seed=5))
    x = dequantize(values, scales, dtype)
    again, same = quantize(x, scales)
    assert torch.equal(again, values)
    assert torch.equal(same, scales)
    # Without the old scales a group may come out at half of its scale, with the same values.
    assert torch.equal(dequantize(*quantize(x), dtype), x)


def test_packed_width_of_mxfp4():
    values, scales = formats.quantize_mxfp4(torch.ones(3, 64))
    assert values.shape == (3, 32)
    assert scales.shape == (3, 2)
    # 1.0 needs no larger scale than 2**-2: 4 = code 6, 0x66 twice a byte.
    assert values.unique().tolist() == [0x66]
    assert scales.unique().tolist() == [125]


def test_tiles_need_whole_groups():
    with pytest.raises(ValueError, match="multiples of 32"):
        formats.quantize_fp8_tile(torch.zeros(33, 32))
