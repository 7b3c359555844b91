"""Bytes of the layout table: sizes, places, formats, and the way back."""

import dataclasses

import numpy as np
import pytest
import torch

from deepdraft.arch import V41Args
from deepdraft.checkpoint.config import parse_args
from deepdraft.errors import ConfigError, StateError
from deepdraft.kv import codec
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import Layout, Span
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.state import StatePool
from deepdraft.proof.tiny import tiny_args
from deepdraft.quant import records, simulate
from tests.checkpoint.tiny import published_config
from tests.kv.conftest import text
from tests.kv.synthetic import RecordPool, fill, holds, spoil


@pytest.fixture(scope="module")
def published() -> V41Args:
    return parse_args(published_config())


def test_published_sizes(published: V41Args) -> None:
    layout = Layout.of(published, packed=True)
    assert layout.block_bytes == 128 * 890 == 113_920
    window = Span(1000, 1128)
    rows = layout.checkpoint_bytes((window, window, window), Span(1126, 1128))
    assert rows == 1_351_680 + 1_351_680 + 202_752 + 2 * 12_288
    assert len(layout.planes) == 8 and [p.ratio for p in layout.planes] == [2] * 6 + [1] * 2


@pytest.mark.parametrize("block_tokens", [0, 1, 7])
def test_a_block_must_be_even(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="even"):
        Layout.of(tiny_args(), packed=False, block_tokens=block_tokens)


def test_a_byte_of_each_plane_lies_where_the_table_says() -> None:
    """Read the bytes with nothing but the numbers of docs/kv-sharing.md."""
    args = tiny_args()
    layout = Layout.of(args, packed=True, block_tokens=8)
    pool = RecordPool(args, num_sequences=1, max_tokens=64)
    state = pool.open()
    fill(state, text(1, 21))
    out = np.full(3 * layout.block_bytes, 9, dtype=np.uint8)
    codec.capture_blocks(layout, state, 0, out)
    c, ci = args.head_dim, args.index_head_dim
    at = 0
    for source in sorted(args.kv_source_layer_ids):
        entries = 8 // args.roles[source].ratio
        live = 21 // args.roles[source].ratio
        for rows, data, scales in (
            (pool.main[source], c // 2, c // 16),
            (pool.index[source], ci // 2, ci // 32),
        ):
            for entry in range(3 * entries):
                block, e = divmod(entry, entries)
                base = block * layout.block_bytes + at
                record = np.concatenate(
                    (
                        out[base + e * data :][:data],
                        out[base + entries * data + e * scales :][:scales],
                    )
                )
                wanted = rows[entry].numpy() if entry < live else np.zeros_like(record)
                assert np.array_equal(record, wanted), (source, entry)
            at += entries * (data + scales)
    assert at == layout.block_bytes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 16, 17, 40, 41])
def test_there_and_back(n: int, packed: bool) -> None:
    args = tiny_args()
    layout = Layout.of(args, packed=packed, block_tokens=8)
    kind = RecordPool if packed else StatePool
    pool = kind(args, num_sequences=3, max_tokens=64)
    pool.open()
    state = pool.open()
    fill(state, text(n, n))
    info = codec.checkpoint_of(layout, state)
    blocks = np.zeros(layout.num_blocks(n) * layout.block_bytes, dtype=np.uint8)
    windows = np.zeros(layout.checkpoint_bytes(info.spans, info.pending), dtype=np.uint8)
    codec.capture_blocks(layout, state, 0, blocks)
    codec.capture_checkpoint(layout, state, info, windows)
    other_pool = kind(args, num_sequences=2, max_tokens=50, slack=5)
    spoil(other_pool)
    other_pool.open()
    other = other_pool.open()
    codec.restore_blocks(layout, other, 0, blocks, n)
    codec.restore_checkpoint(layout, other, info, windows)
    codec.adopt_checkpoint(other, info, state.token_ids, decoder=True, exact=True)
    assert other.token_ids == state.token_ids and holds(other)
    assert other.drafter_tokens == other.decoder_tokens == n
    # And what was restored is captured again as the same bytes.
    again = codec.checkpoint_of(layout, other)
    assert again == info
    copy = np.zeros_like(windows)
    codec.capture_checkpoint(layout, other, again, copy)
    assert np.array_equal(copy, windows)


def test_published_size_state(published: V41Args) -> None:
    """300 tokens of records, 890 bytes a token, 40 + 3 windows."""
    layout = Layout.of(published, packed=True)
    args = dataclasses.replace(published, max_position_embeddings=512)
    pool = RecordPool(args, num_sequences=1, max_tokens=300)
    state = pool.open()
    fill(state, text(5, 299))
    info = codec.checkpoint_of(layout, state)
    blocks = np.zeros(3 * layout.block_bytes, dtype=np.uint8)
    windows = np.zeros(layout.checkpoint_bytes(info.spans, info.pending), dtype=np.uint8)
    codec.capture_blocks(layout, state, 0, blocks)
    codec.capture_checkpoint(layout, state, info, windows)
    spoil(pool)
    codec.restore_blocks(layout, state, 0, blocks, 299)
    codec.restore_checkpoint(layout, state, info, windows)
    assert holds(state)


# ---- formats -------------------------------------------------------------------------------

FAKE = {
    "fp8_group32": (simulate.fake_fp8_group32, records.unpack_fp8_group32),
    "fp4_e4m3_group16": (simulate.fake_fp4_e4m3_group16, records.unpack_fp4_e4m3_group16),
    "mxfp4_group32": (simulate.fake_mxfp4_group32, records.unpack_mxfp4_group32),
}


@pytest.mark.parametrize("row_format", FAKE)
@pytest.mark.parametrize("power", [-140, -40, -12, -9, -8, -7, -6, -4, 0, 5, 9, 12, 60])
def test_rows_on_the_grid_are_stored_exactly(row_format: str, power: int) -> None:
    fake, unpack = FAKE[row_format]
    g = torch.Generator().manual_seed(power + 200)
    x = torch.randn(200, 64, generator=g) * 2.0**power
    x *= torch.exp2(torch.randint(-6, 1, (200, 4), generator=g)).repeat_interleave(16, 1)
    x[0], x[1, ::2] = 0.0, 0.0
    rows = fake(x)
    data, scales = codec.encode_rows(rows, row_format)  # type: ignore[arg-type]
    back = codec.decode_rows(data, scales, row_format, torch.float32)  # type: ignore[arg-type]
    assert torch.equal(back.view(torch.int32), rows.view(torch.int32))
    record = torch.from_numpy(np.concatenate((data, scales), 1))
    assert torch.equal(unpack(record), rows)


def test_every_small_scale_is_found() -> None:
    """Subnormal E4M3 scales: the values of a group do not always give their own scale back."""
    amax = torch.linspace(0.05, 70.0, 2000)[:, None] * 2.0**-9
    shape = torch.rand(2000, 16, generator=torch.Generator().manual_seed(3)) * 2 - 1
    shape[:, 0] = 1.0
    rows = simulate.fake_fp4_e4m3_group16(amax * shape)
    assert not torch.equal(simulate.fake_fp4_e4m3_group16(rows), rows)  # packing alone would fail
    data, scales = codec.encode_rows(rows, "fp4_e4m3_group16")
    back = codec.decode_rows(data, scales, "fp4_e4m3_group16", torch.float32)
    assert torch.equal(back, rows)


@pytest.mark.parametrize("row_format", FAKE)
@pytest.mark.parametrize("value", [1.0 + 2.0**-20, float("nan"), float("inf")])
def test_rows_off_the_grid_are_refused(row_format: str, value: float) -> None:
    rows = torch.ones(3, 64)
    rows[1, 5] = value
    with pytest.raises(SnapshotError, match="grid"):
        codec.encode_rows(rows, row_format)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_broken_plain_rows_are_refused(value: float) -> None:
    rows = torch.ones(3, 64)
    rows[1, 5] = value
    with pytest.raises(SnapshotError, match="NaN"):
        codec.encode_rows(rows, "f32")


def test_plain_rows_must_have_the_layouts_width() -> None:
    with pytest.raises(SnapshotError, match="f32"):
        codec.encode_rows(torch.zeros(2, 8, dtype=torch.float64), "f32")
    with pytest.raises(SnapshotError, match="f64"):
        codec.decode_rows(np.zeros((2, 64), np.uint8), np.zeros((2, 0)), "f64", torch.float32)


# ---- what may be captured ------------------------------------------------------------------


def test_states_that_cannot_be_stored(model: DeepseekV41) -> None:
    layout = Layout.of(model.args, packed=False)
    state = model.new_pool(1, 100, slack=4).open()
    with pytest.raises(StateError, match="empty"):
        codec.checkpoint_of(layout, state)
    model.prefill(state, text(1, 40))
    assert codec.checkpoint_of(layout, state).position == 40
    state.keep_global(20)
    with pytest.raises(StateError, match="windows"):
        codec.checkpoint_of(layout, state)


def test_a_drafter_that_is_behind_is_left_out(model: DeepseekV41) -> None:
    layout = Layout.of(model.args, packed=False)
    state = model.new_pool(1, 100).open()
    model.prefill(state, text(1, 40), feed_drafter=True)
    assert codec.checkpoint_of(layout, state).has_drafter
    model.step([(state, [5])])
    info = codec.checkpoint_of(layout, state)
    assert info.has_decoder and not info.has_drafter and info.spans[2] == Span(0, 0)


def test_in_the_middle_of_an_encoder_prefill_only_the_encoder_is_there(model: DeepseekV41) -> None:
    layout = Layout.of(model.args, packed=False)
    state = model.new_pool(1, 100).open()
    model.prefill(state, text(1, 40), mode="encoder", final=False)
    info = codec.checkpoint_of(layout, state)
    assert info.spans == (Span(24, 40), Span(0, 0), Span(0, 0))
