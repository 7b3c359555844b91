"""The portable form of a stored conversation, to the byte.

Owns: the manifest, its checks, the file format, the fingerprint.
Knows nothing of: pools, slabs, which prefix to reuse.

A snapshot (all integers little-endian):

    offset  bytes  what
    0       8      magic, ASCII "DDKVSNAP"
    8       4      format version, 1
    12      4      bytes of the manifest, m
    16      32     root: BLAKE3-256 of bytes 0..16 and the manifest
    48      m      manifest: MessagePack map of `Manifest`, fields in the order of the class
    48 + m  ...    chunks of global KV in order, then the chunks of each checkpoint in order

Chunks lie back to back; their lengths and BLAKE3-256 digests stand in the manifest, so the root
vouches for every byte, and any single chunk can be checked alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from blake3 import blake3

from deepdraft.kv.codec import Checkpoint
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import Layout
from deepdraft.kv.prefix import token_array

MAGIC = b"DDKVSNAP"
VERSION = 1
HEAD_BYTES = 48
MAX_MANIFEST_BYTES = 64 << 20
MAX_CHECKPOINTS = 256
DIGEST_BYTES = 32


def digest(*parts: bytes | memoryview | np.ndarray) -> bytes:
    """BLAKE3-256 of the parts, one after another."""
    state = blake3()
    for part in parts:
        state.update(part.data if isinstance(part, np.ndarray) else part)
    return state.digest()


def fingerprint(fields: Mapping[str, str | int | bool]) -> bytes:
    """BLAKE3-256 of the canonical JSON of everything that can change a byte of state.

    Two servers may exchange snapshots only when all 32 bytes agree.
    """
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return digest(b"deepdraft kv fingerprint\0" + text.encode())


class ChunkRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Length and BLAKE3-256 of one chunk."""

    length: int
    digest: bytes


class StoredCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint and the chunks that hold its bytes."""

    info: Checkpoint
    chunks: tuple[ChunkRef, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a snapshot but its state."""

    format: int
    fingerprint: bytes
    exact: bool
    """Global KV equals a cold run's; otherwise an encoder replay approximated some of it."""
    layout: Layout
    chunk_blocks: int
    tokens: bytes
    """uint32, little-endian."""
    chunks: tuple[ChunkRef, ...]
    checkpoints: tuple[StoredCheckpoint, ...]
    """By rising position."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation."""
        return len(self.tokens) // 4

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of the conversation, uint32, not copied."""
        return np.frombuffer(self.tokens, dtype="<u4")

    @property
    def data_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(c.length for c in self.all_chunks())

    def all_chunks(self) -> list[ChunkRef]:
        """Chunks in stored order."""
        return [*self.chunks, *(c for cp in self.checkpoints for c in cp.chunks)]


def encode_tokens(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as the manifest holds them."""
    return token_array(token_ids).astype("<u4", copy=False).tobytes()


def encode_manifest(manifest: Manifest) -> bytes:
    """Head and manifest of a snapshot."""
    body = msgspec.msgpack.encode(manifest)
    start = MAGIC + VERSION.to_bytes(4, "little") + len(body).to_bytes(4, "little")
    return b"".join((start, digest(start, body), body))


def manifest_size(head: bytes | memoryview) -> int:
    """Bytes of the manifest that follows these 48 bytes. Raises SnapshotError."""
    if len(head) != HEAD_BYTES or head[:8] != MAGIC:
        raise SnapshotError("these bytes are no deepdraft snapshot (magic differs)")
    version = int.from_bytes(head[8:12], "little")
    if version != VERSION:
        raise SnapshotError(f"snapshot format {version}, this program reads {VERSION}")
    size = int.from_bytes(head[12:16], "little")
    if size > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"a manifest of {size} bytes is over the cap, {MAX_MANIFEST_BYTES}")
    return size


def decode_manifest(
    data: bytes | memoryview, *, layout: Layout | None = None, expected: bytes | None = None
) -> Manifest:
    """Head and manifest, checked against the root, the layout and the fingerprint; without those
    against itself, which is enough to look at it.

    Raises SnapshotError; sizes and positions of what it returns are consistent.
    """
    size = manifest_size(data[:HEAD_BYTES])
    body = memoryview(data)[HEAD_BYTES:]  # a manifest of a million tokens has 4 MB
    if len(body) != size:
        raise SnapshotError(f"a manifest of {size} bytes was announced, {len(body)} came")
    if digest(data[:16], body) != data[16:HEAD_BYTES]:
        raise SnapshotError("the manifest does not have the digest in its head: damaged or forged")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"the manifest is not as documented: {error}") from None
    try:
        check_manifest(
            manifest,
            layout=manifest.layout if layout is None else layout,
            expected=manifest.fingerprint if expected is None else expected,
        )
    except (ArithmeticError, ValueError) as error:  # by a layout of its own: blocks of 0 tokens
        raise SnapshotError(f"the manifest's layout contradicts itself: {error}") from None
    return manifest


def check_manifest(manifest: Manifest, *, layout: Layout, expected: bytes) -> None:
    """Raises SnapshotError where a manifest contradicts itself or is not for this server."""
    if manifest.format != VERSION:
        raise SnapshotError(f"manifest format {manifest.format}, this program reads {VERSION}")
    if manifest.fingerprint != expected:
        raise SnapshotError(
            "the snapshot was made by another model, numerics or build (fingerprints differ)"
        )
    if manifest.layout != layout:
        raise SnapshotError("the snapshot's layout table differs from this server's")
    n = manifest.num_tokens
    if not n or len(manifest.tokens) % 4:
        raise SnapshotError(f"{len(manifest.tokens)} bytes of token ids")
    if manifest.chunk_blocks < 1:
        raise SnapshotError(f"chunks of {manifest.chunk_blocks} blocks")
    blocks, per = layout.num_blocks(n), manifest.chunk_blocks
    sizes = [min(per, blocks - at) * layout.block_bytes for at in range(0, blocks, per)]
    if [c.length for c in manifest.chunks] != sizes:
        raise SnapshotError(f"{n} tokens need chunks of other sizes than the manifest lists")
    if any(len(c.digest) != DIGEST_BYTES for c in manifest.all_chunks()):
        raise SnapshotError("a chunk's digest does not have 32 bytes")
    if len(manifest.checkpoints) > MAX_CHECKPOINTS:
        raise SnapshotError(f"{len(manifest.checkpoints)} checkpoints, at most {MAX_CHECKPOINTS}")
    last = 0
    for stored in manifest.checkpoints:
        _check_checkpoint(stored, layout, n)
        if stored.info.position <= last:
            raise SnapshotError("the checkpoints are not in rising order")
        last = stored.info.position


def _check_checkpoint(stored: StoredCheckpoint, layout: Layout, num_tokens: int) -> None:
    info = stored.info
    m = info.position
    if not 0 < m <= num_tokens:
        raise SnapshotError(f"a checkpoint at {m} of {num_tokens} tokens")
    oldest = max(0, m - layout.window)
    for group, span, floor in zip(layout.windows, info.spans, info.floors, strict=True):
        empty = span.first == span.end == 0
        whole = span.end == m and span.first == max(oldest, floor) and group.layers > 0
        if not (empty or whole) or not 0 <= floor <= m:
            raise SnapshotError(f"the {group.name} rows of the checkpoint at {m} are not its last")
    if not len(info.spans[0]) and layout.windows[0].layers:
        raise SnapshotError(f"the checkpoint at {m} lacks its encoder rows")
    first = max(0, m - layout.pending_rows) if layout.pending else 0
    if (info.pending.first, info.pending.end) != (first, m if layout.pending else 0):
        raise SnapshotError(f"the compressor rows of the checkpoint at {m} are not its last")
    lengths = [c.length for c in stored.chunks]
    if sum(lengths) != layout.checkpoint_bytes(info.spans, info.pending) or min(lengths) < 1:
        raise SnapshotError(f"the chunks of the checkpoint at {m} do not add up to its size")


# ---- files ---------------------------------------------------------------------------------


@dataclass(slots=True)
class SnapshotFile:
    """A snapshot on disk: its manifest is checked, its chunks are when they are read."""

    path: Path
    manifest: Manifest
    offset: int
    """Of the first chunk."""

    @classmethod
    def open(
        cls, path: Path, *, layout: Layout | None = None, expected: bytes | None = None
    ) -> SnapshotFile:
        """Read and check the manifest and the file's length, see `decode_manifest`. Raises
        SnapshotError."""
        try:
            if not path.is_file() and path.exists():
                raise SnapshotError("not a file")  # opening a pipe would wait for a writer
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
                data = head + file.read(manifest_size(head))
                size = os.fstat(file.fileno()).st_size
            manifest = decode_manifest(data, layout=layout, expected=expected)
        except OSError as error:
            raise SnapshotError(f"{path.name} cannot be read: {error.strerror}") from None
        except SnapshotError as error:
            raise SnapshotError(f"{path.name}: {error.message}") from None
        if size != len(data) + manifest.data_bytes:
            raise SnapshotError(
                f"{path.name} has {size} bytes, its manifest says {len(data) + manifest.data_bytes}"
            )
        return cls(path, manifest, len(data))

    def reader(self) -> Callable[[int], np.ndarray]:
        """A function that reads chunk i (in stored order) and checks it. Raises SnapshotError."""
        refs = self.manifest.all_chunks()
        offsets = np.cumsum([self.offset, *(r.length for r in refs)])

        def read(i: int) -> np.ndarray:
            out = np.empty(refs[i].length, dtype=np.uint8)
            try:
                with self.path.open("rb") as file:
                    file.seek(int(offsets[i]))
                    got = file.readinto(out.data)
            except OSError as error:
                raise SnapshotError(f"{self.path.name}: {error.strerror}") from None
            if got != len(out) or digest(out) != refs[i].digest:
                raise SnapshotError(f"{self.path.name}: chunk {i} is damaged")
            return out

        return read


def write_snapshot(file: BinaryIO, manifest: Manifest, chunks: Iterable[np.ndarray]) -> int:
    """Write a snapshot; returns its size. Chunks in stored order."""
    head = encode_manifest(manifest)
    file.write(head)
    size = len(head)
    for ref, chunk in zip(manifest.all_chunks(), chunks, strict=True):
        assert ref.length == chunk.nbytes, f"{ref.length=} {chunk.nbytes=}"
        file.write(chunk.data)
        size += ref.length
    return size
