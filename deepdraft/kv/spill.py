"""Snapshots on local disk: written when memory runs out, found again after a restart.

Owns: one directory per fingerprint, its size, the order of removal.
Knows nothing of: the slab, tensors, which prefix to reuse.

A file is complete or absent: it is written under another name, flushed to the device, then
renamed. Its name is its root digest. Anything that is not a whole, matching snapshot is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from deepdraft.errors import ConfigError
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import Layout
from deepdraft.kv.snapshot import (
    HEAD_BYTES,
    Manifest,
    SnapshotFile,
    encode_manifest,
    write_snapshot,
)

logger = logging.getLogger(__name__)
SUFFIX, PARTIAL = ".ddkv", ".partial"
Opener = Callable[[Path], BinaryIO]


def _open_private(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o600), "wb")


class SpillDir:
    """Snapshots of one fingerprint below a directory. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        layout: Layout,
        expected: bytes,
        max_bytes: int,
        opener: Opener = _open_private,
    ) -> None:
        """`opener` is for tests that make the disk fail."""
        if max_bytes < 1:
            raise ConfigError(f"the KV spill directory needs a size above 0, got {max_bytes}")
        self.path = path / expected.hex()[:32]
        self.layout, self.expected, self.max_bytes = layout, expected, max_bytes
        self.counters: Counter[str] = Counter()
        self._opener = opener
        self.files: dict[Path, SnapshotFile] = {}
        """Least recently used first."""
        self.total_bytes = 0
        """Of all files."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"the KV spill directory cannot be made: {error.strerror}; choose another"
            ) from None
        self._scan()

    def _scan(self) -> None:
        for stale in self.path.glob(f"*{PARTIAL}"):
            self._unlink(stale)
        found = sorted(self.path.glob(f"*{SUFFIX}"), key=lambda p: p.lstat().st_mtime_ns)
        for path in found:
            try:
                file = SnapshotFile.open(path, layout=self.layout, expected=self.expected)
            except SnapshotError as error:
                logger.warning("removing a spilled snapshot: %s", error)
                self.counters["damaged"] += 1
                self._unlink(path)
            else:
                self._add(file)

    def _add(self, file: SnapshotFile) -> None:
        self.files[file.path] = file
        self.total_bytes += file.offset + file.manifest.data_bytes

    def write(
        self, manifest: Manifest, chunks: Iterable[np.ndarray]
    ) -> tuple[SnapshotFile | None, list[SnapshotFile]]:
        """Keep a snapshot. Returns its file, None when the disk refused, and the files that went
        to make room. Never raises for what a disk can do."""
        head = encode_manifest(manifest)
        size = len(head) + manifest.data_bytes
        if size > self.max_bytes:
            self.counters["too_large"] += 1
            return None, []
        path = self.path / f"{head[16:HEAD_BYTES].hex()}{SUFFIX}"
        if path in self.files:
            return self.files[path], []
        gone = []
        while self.files and self.total_bytes + size > self.max_bytes:
            gone.append(self.remove(next(iter(self.files.values()))))
        partial = path.with_suffix(PARTIAL)
        try:
            with self._opener(partial) as file:
                write_snapshot(file, manifest, chunks)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, SnapshotError) as error:
            logger.warning("spilling a snapshot failed: %s", error)
            self.counters["write_failed"] += 1
            self._unlink(partial)
            return None, gone
        self.counters["written"] += 1
        self._add(SnapshotFile(path, manifest, len(head)))
        return self.files[path], gone

    def touch(self, file: SnapshotFile) -> None:
        """The file was used: it goes last."""
        if self.files.pop(file.path, None) is not None:
            self.files[file.path] = file
            with contextlib.suppress(OSError):
                os.utime(file.path)

    def remove(self, file: SnapshotFile) -> SnapshotFile:
        """Delete a snapshot."""
        if self.files.pop(file.path, None) is not None:
            self.total_bytes -= file.offset + file.manifest.data_bytes
        self._unlink(file.path)
        return file

    @staticmethod
    def _unlink(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
