"""Cache records: sizes, byte order, and agreement with the quantisers."""

import pytest
import torch

from deepdraft.quant import records, simulate

KINDS = {
    "fp8_group32": (512, 528, records.fp8_record_bytes),
    "fp4_e4m3_group16": (512, 288, records.fp4_record_bytes),
    "mxfp4_group32": (128, 68, records.mxfp4_record_bytes),
}


def functions(kind):
    return (
        getattr(records, f"pack_{kind}"),
        getattr(records, f"unpack_{kind}"),
        getattr(simulate, f"fake_{kind}"),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unpacking_gives_the_quantised_values(kind, dtype):
    dim, size, record_bytes = KINDS[kind]
    pack, unpack, fake = functions(kind)
    x = torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x *= 10 ** torch.linspace(-6, 2, 5, dtype=torch.float64)[:, None]
    x[0, 0] = 0
    x = x.to(dtype)
    packed = pack(x)
    assert packed.shape == (3, 5, size)
    assert packed.dtype == torch.uint8
    assert record_bytes(dim) == size
    assert torch.equal(unpack(packed, dtype), fake(x))
    assert torch.equal(unpack(packed[1:2, 3], dtype), fake(x)[1:2, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_records_keep_the_sign_of_zero(kind):
    pack, unpack, _ = functions(kind)
    x = torch.zeros(32)
    x[0], x[1] = 1.0, -1e-6
    assert torch.signbit(unpack(pack(x)))[:3].tolist() == [False, True, False]


def test_fp8_record_bytes():
    x = torch.zeros(32)
    x[0], x[1] = 448.0, -1.0
    record = records.pack_fp8_group32(x)
    assert record[:3].tolist() == [0x7E, 0xB8, 0]
    assert record[32:].tolist() == [127]


def test_fp4_record_bytes():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 6.0, -1.0, 0.5
    x[16] = 12.0
    record = records.pack_fp4_e4m3_group16(x)
    # 6 is code 7, -1 is code 10; scales 1.0 and 2.0 are E4M3 0x38 and 0x40.
    assert record[:2].tolist() == [0xA7, 0x01]
    assert record[8] == 0x07
    assert record[16:].tolist() == [0x38, 0x40]


def test_mxfp4_record_bytes():
    x = torch.zeros(32)
    x[30], x[31] = 3.0, -24.0
    record = records.pack_mxfp4_group32(x)
    # Scale 4: 3 / 4 is the tie between 0.5 and 1.0, which goes to code 2; -6 is code 15.
    assert record[15] == 0xF2
    assert record[16:].tolist() == [129]
