"""The portable form: read by hand, damaged in every place, forged, of other versions."""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.kv.cache import KvCache
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.snapshot import (
    HEAD_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    SnapshotFile,
    decode_manifest,
    digest,
    encode_manifest,
    fingerprint,
    write_snapshot,
)
from deepdraft.models.state import StatePool
from deepdraft.proof.tiny import tiny_args
from tests.kv.conftest import text
from tests.kv.synthetic import fill

FINGERPRINT = b"f" * 32


@dataclass
class Made:
    """A snapshot's bytes, and what they were made from."""

    data: bytes
    manifest: Manifest
    layout: Layout
    tokens: list[int]
    chunks: list[bytes]

    def decode(self, data: bytes) -> Manifest:
        return decode_manifest(data, layout=self.layout, expected=FINGERPRINT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """37 tokens, blocks of 8, chunks of 2 blocks, one checkpoint; 16-token windows."""
    args = tiny_args()
    layout = Layout.of(args, packed=False, block_tokens=8)
    pool = StatePool(args, num_sequences=1, max_tokens=64)
    cache = KvCache(
        pool,
        expected=FINGERPRINT,
        layout=layout,
        max_bytes=1 << 23,
        settings=StoreSettings(chunk_blocks=2, min_tokens=1),
    )
    state, tokens = pool.open(), text(1, 37)
    fill(state, tokens)
    assert cache.store(state)
    (entry,) = cache.memory.entries.values()
    manifest = cache.manifest(entry)
    path = tmp_path_factory.mktemp("made") / "snapshot"
    chunks = [c.copy() for c in cache.chunks_of(entry)]
    with path.open("wb") as file:
        size = write_snapshot(file, manifest, chunks)
    assert size == path.stat().st_size
    return Made(path.read_bytes(), manifest, layout, tokens, [c.tobytes() for c in chunks])


def test_the_format_read_by_hand(made: Made) -> None:
    data = made.data
    assert data[:8] == b"DDKVSNAP"
    assert int.from_bytes(data[8:12], "little") == 1
    size = int.from_bytes(data[12:16], "little")
    body = data[48 : 48 + size]
    assert data[16:48] == blake3(data[:16] + body).digest()
    fields = msgspec.msgpack.decode(body)
    assert list(fields) == [
        *("format", "fingerprint", "exact", "layout", "chunk_blocks"),
        *("tokens", "chunks", "checkpoints"),
    ]
    assert np.frombuffer(fields["tokens"], "<u4").tolist() == made.tokens
    at = 48 + size
    listed = [*fields["chunks"], *(c for cp in fields["checkpoints"] for c in cp["chunks"])]
    assert len(fields["chunks"]) == 3 and len(listed) > 3
    for (length, value), chunk in zip(listed, made.chunks, strict=True):
        assert data[at : at + length] == chunk and blake3(chunk).digest() == value
        at += length
    assert at == len(data)


def test_manifest_there_and_back(made: Made) -> None:
    head = encode_manifest(made.manifest)
    assert made.decode(head) == made.manifest
    assert made.manifest.token_ids.tolist() == made.tokens


def test_every_bit_of_head_and_manifest_counts(made: Made) -> None:
    head = encode_manifest(made.manifest)
    rng = random.Random(0)
    places = {*range(HEAD_BYTES), *rng.sample(range(HEAD_BYTES, len(head)), 300)}
    for at in places:
        damaged = bytearray(head)
        damaged[at] ^= 1 << rng.randrange(8)
        with pytest.raises(SnapshotError):
            made.decode(bytes(damaged))


@pytest.mark.parametrize("keep", [0, 1, 8, 47, 48, 49, 200, -1])
def test_a_torn_manifest(made: Made, keep: int) -> None:
    with pytest.raises(SnapshotError):
        made.decode(encode_manifest(made.manifest)[:keep])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_junk_is_no_manifest(junk: bytes) -> None:
    layout = Layout.of(tiny_args(), packed=False)
    for data in (junk, with_root(junk)):
        with pytest.raises(SnapshotError):
            decode_manifest(data, layout=layout, expected=FINGERPRINT)


def with_root(body: bytes) -> bytes:
    """A head whose digest is right for any body: what a forger can make."""
    start = b"DDKVSNAP" + (1).to_bytes(4, "little") + len(body).to_bytes(4, "little")
    return start + digest(start + body) + body


def test_a_huge_manifest_is_refused_by_its_head() -> None:
    head = b"DDKVSNAP" + (1).to_bytes(4, "little") + (MAX_MANIFEST_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(SnapshotError, match="cap"):
        decode_manifest(head + b"0" * 32, layout=Layout.of(tiny_args(), packed=False), expected=b"")


def forged(made: Made, **changes: object) -> bytes:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(made.manifest))
    for name, value in changes.items():
        *path, last = name.split("__")
        target = fields
        for part in path:
            target = target[int(part) if part.isdigit() else part]
        target[int(last) if isinstance(target, list) else last] = value
    return with_root(msgspec.msgpack.encode(fields))


FORGERIES = {
    "format": ({"format": 2}, "format 2"),
    "fingerprint": ({"fingerprint": b"g" * 32}, "fingerprints differ"),
    "fingerprint short": ({"fingerprint": b"f"}, "fingerprints differ"),
    "window": ({"layout__window": 17}, "layout"),
    "plane width": ({"layout__planes__0__width": 63}, "layout"),
    "plane format": ({"layout__planes__0__format": "f64"}, "layout"),
    "unknown format": ({"layout__planes__0__format": "pickle"}, "as documented"),
    "block": ({"layout__block_tokens": 128}, "layout"),
    "no tokens": ({"tokens": b""}, "0 bytes"),
    "odd tokens": ({"tokens": b"12345"}, "5 bytes"),
    "more tokens": ({"tokens": b"\0" * 4 * 70}, "other sizes"),
    "a token less is a checkpoint too far": ({"tokens": b"\0" * 4 * 36}, "checkpoint at 37"),
    "chunk of no blocks": ({"chunk_blocks": 0}, "0 blocks"),
    "chunk of minus one block": ({"chunk_blocks": -1}, "-1 blocks"),
    "other chunks": ({"chunk_blocks": 3}, "other sizes"),
    "chunk length": ({"chunks__0": [1 << 40, b"d" * 32]}, "other sizes"),
    "short digest": ({"chunks__0__1": b"d"}, "32 bytes"),
    "digest type": ({"chunks__0__1": 5}, "as documented"),
    "position": ({"checkpoints__0__info__position": 38}, "checkpoint at 38"),
    "position 0": ({"checkpoints__0__info__position": 0}, "checkpoint at 0"),
    "window span": ({"checkpoints__0__info__spans__0": [20, 37]}, "encoder rows"),
    "no encoder": ({"checkpoints__0__info__spans__0": [0, 0]}, "encoder rows"),
    "decoder span": ({"checkpoints__0__info__spans__1": [21, 36]}, "decoder rows"),
    "floor": ({"checkpoints__0__info__floors__0": -1}, "encoder rows"),
    "pending": ({"checkpoints__0__info__pending": [0, 37]}, "compressor rows"),
    "checkpoint without chunks": ({"checkpoints__0__chunks": []}, "add up"),
    "checkpoint chunk negative": (
        {"checkpoints__0__chunks": [[-5, b"d" * 32], [5, b"d" * 32]]},
        "add up",
    ),
    "surplus field": ({"note": "x"}, "as documented"),
    "surplus field inside": ({"checkpoints__0__info__note": 1}, "as documented"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_manifests_with_a_right_root(made: Made, name: str) -> None:
    changes, message = FORGERIES[name]
    assert made.decode(forged(made)) == made.manifest  # the forger's tool makes right ones too
    with pytest.raises(SnapshotError, match=message):
        made.decode(forged(made, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout__block_tokens": 0},
        {"layout__block_tokens": -8},
        {"layout__planes__0__ratio": 0},
        {"layout__windows": []},
        {"layout__windows__0__layers": -1},
        {"layout__pending__0__rows": -(1 << 60)},
    ],
)
def test_forged_layouts_are_refused_where_none_is_expected(
    made: Made, changes: dict[str, object]
) -> None:
    """As `deepdraft kv inspect` reads them."""
    assert decode_manifest(forged(made)) == made.manifest
    with pytest.raises(SnapshotError):
        decode_manifest(forged(made, **changes))


def test_checkpoints_must_rise_and_be_few(made: Made) -> None:
    one = msgspec.to_builtins(made.manifest.checkpoints[0], builtin_types=(bytes,))
    with pytest.raises(SnapshotError, match="rising"):
        made.decode(forged(made, checkpoints=[one, one]))
    with pytest.raises(SnapshotError, match="at most"):
        made.decode(forged(made, checkpoints=[one] * 257))


# ---- files ---------------------------------------------------------------------------------


def opened(made: Made, path: Path) -> SnapshotFile:
    return SnapshotFile.open(path, layout=made.layout, expected=FINGERPRINT)


def test_a_file_gives_its_chunks(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(made.data)
    read = opened(made, path).reader()
    for i in reversed(range(len(made.chunks))):
        assert read(i).tobytes() == made.chunks[i]


def test_every_damaged_chunk_is_seen(made: Made, tmp_path: Path) -> None:
    path, rng = tmp_path / "s", random.Random(1)
    offset = len(made.data) - sum(map(len, made.chunks))
    for number, chunk in enumerate(made.chunks):
        for at in (0, len(chunk) - 1, rng.randrange(len(chunk))):
            damaged = bytearray(made.data)
            damaged[offset + at] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            read = opened(made, path).reader()
            for i in range(len(made.chunks)):
                if i == number:
                    with pytest.raises(SnapshotError, match="damaged"):
                        read(i)
                else:
                    read(i)
        offset += len(chunk)


def test_exchanged_chunks_are_seen(made: Made, tmp_path: Path) -> None:
    path, size = tmp_path / "s", len(made.chunks[0])
    offset = len(made.data) - sum(map(len, made.chunks))
    a, b = made.chunks[0], made.chunks[1]
    path.write_bytes(made.data[:offset] + b + a + made.data[offset + 2 * size :])
    with pytest.raises(SnapshotError, match="chunk 0"):
        opened(made, path).reader()(0)


@pytest.mark.parametrize("change", [-1, 1, -5000, 5000])
def test_a_file_of_another_length(made: Made, tmp_path: Path, change: int) -> None:
    path = tmp_path / "s"
    path.write_bytes(made.data[:change] if change < 0 else made.data + b"\0" * change)
    with pytest.raises(SnapshotError, match="bytes"):
        opened(made, path)


def test_files_that_go_away(made: Made, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        opened(made, tmp_path / "none")
    path = tmp_path / "s"
    path.write_bytes(made.data)
    read = opened(made, path).reader()
    path.unlink()
    with pytest.raises(SnapshotError):
        read(0)


def test_fingerprints() -> None:
    fields: dict[str, str | int | bool] = {"weights": "a", "numerics": "quant", "gpus": 1}
    base = fingerprint(fields)
    assert len(base) == 32
    assert fingerprint(dict(reversed(fields.items()))) == base
    for name in fields:
        assert fingerprint({**fields, name: "other"}) != base
    assert fingerprint({"a": "1"}) != fingerprint({"a": 1})
