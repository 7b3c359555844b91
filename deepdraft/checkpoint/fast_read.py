"""Files to tensors at the speed of the storage: many threads, direct reads, pinned buffers.

Owns: cutting files into aligned chunks, reading them past the page cache where the file system
allows it, and copying the pieces to where they belong, on the CPU or a GPU.
Knows nothing of: what the tensors are.

Each thread reads a chunk into one of its buffers while the copy of its other buffer to the device
is under way. `scratch` leaves the copies out: what the storage and this reader give at most.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepdraft.errors import CheckpointError

ALIGN = 4096
CHUNK_BYTES = 16 << 20
THREADS = 16
_BUFFERS = 2

Progress = Callable[[int], None]
"""Called with the bytes just read, from any thread, never two at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + tensor.numel()) of a file go to a uint8 tensor."""

    start: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read did."""

    num_bytes: int
    """Of the pieces."""
    direct: bool
    """Every file was read past the page cache."""


class _File:
    """One open file and its pieces in ascending order."""

    def __init__(self, path: Path, pieces: Iterable[Piece], *, direct: bool) -> None:
        self.path = path
        self.pieces = sorted(pieces, key=lambda p: p.start)
        self.starts = [p.start for p in self.pieces]
        self.direct = False
        try:
            self.size = path.stat().st_size
            if direct:
                self._fd = self._open_direct()
            if not self.direct:
                self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        last = max((p.start + p.tensor.numel() for p in self.pieces), default=0)
        if last > self.size:
            os.close(self._fd)
            raise CheckpointError(f"{path} is shorter than its header says; it was cut off")

    def _open_direct(self) -> int:
        """O_DIRECT, where one aligned read works (not on tmpfs and some network file systems)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:
            return -1
        probe = mmap.mmap(-1, ALIGN)
        try:
            os.preadv(fd, [probe], 0)
        except OSError:
            os.close(fd)
            return -1
        finally:
            probe.close()
        self.direct = hasattr(os, "O_DIRECT")
        return fd

    def close(self) -> None:
        os.close(self._fd)

    def chunks(self, size: int) -> list[int]:
        """Starts of the aligned chunks that hold any piece."""
        starts: dict[int, None] = {}
        for piece in self.pieces:
            end = piece.start + piece.tensor.numel()
            for at in range(piece.start // size * size, end, size):
                starts[at] = None
        return list(starts)

    def fill(self, buffer: memoryview, at: int) -> int:
        """Bytes read from `at` on; short only at the end of the file."""
        wanted = min(len(buffer), self.size - at)
        done = 0
        while done < wanted:
            try:
                n = os.preadv(self._fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
            if n == 0:
                raise CheckpointError(f"{self.path} shrank while it was read")
            done += n
            if done < wanted and self.direct and done % ALIGN:
                done -= done % ALIGN  # go on from a whole block
        return wanted

    def within(self, at: int, length: int) -> list[tuple[Piece, int, int, int]]:
        """Pieces that overlap [at, at + length): piece, place in it, place in the chunk, bytes."""
        found = []
        first = max(0, bisect.bisect_right(self.starts, at) - 1)
        for piece in self.pieces[first:]:
            if piece.start >= at + length:
                break
            start = max(at, piece.start)
            stop = min(at + length, piece.start + piece.tensor.numel())
            if stop > start:
                found.append((piece, start - piece.start, start - at, stop - start))
        return found


class _Worker:
    """Buffers of one thread, and the stream on which they are copied."""

    def __init__(self, chunk: int, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.buffers = []
        for _ in range(_BUFFERS):
            raw = torch.empty(chunk + ALIGN, dtype=torch.uint8, pin_memory=self.on_gpu)
            skip = -raw.data_ptr() % ALIGN
            self.buffers.append(raw[skip : skip + chunk])
        self.views = [memoryview(b.numpy()) for b in self.buffers]
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self.turn = 0

    def read(self, file: _File, at: int, *, scratch: bool) -> int:
        """Bytes of pieces in the chunk at `at`."""
        self.turn = (self.turn + 1) % _BUFFERS
        event = self.copied[self.turn]
        if event is not None:
            event.synchronize()
        length = file.fill(self.views[self.turn], at)
        pieces = file.within(at, length)
        if not scratch:
            self._copy(pieces)
        return sum(n for *_, n in pieces)

    def _copy(self, pieces: Sequence[tuple[Piece, int, int, int]]) -> None:
        buffer = self.buffers[self.turn]
        if self.stream is None:
            for piece, to, start, n in pieces:
                piece.tensor[to : to + n].copy_(buffer[start : start + n])
            return
        with torch.cuda.stream(self.stream):
            for piece, to, start, n in pieces:
                piece.tensor[to : to + n].copy_(buffer[start : start + n], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
            self.copied[self.turn] = event

    def finish(self) -> None:
        """Waits for this thread's copies."""
        if self.stream is not None:
            self.stream.synchronize()


class ParallelReader:
    """Threads and buffers that are kept from file to file."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = True,
        scratch: bool = False,
    ) -> None:
        """`direct`: read past the page cache where it works. `scratch`: read, but copy nothing."""
        if threads < 1 or chunk_bytes < ALIGN or chunk_bytes % ALIGN:
            raise ValueError(f"{threads} threads, chunks of {chunk_bytes} (multiples of {ALIGN})")
        self._device, self._chunk = torch.device(device), chunk_bytes
        self._direct, self._scratch = direct, scratch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="deepdraft-read")
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _worker(self) -> _Worker:
        worker = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _Worker(self._chunk, self._device)
            with self._lock:
                self._workers.append(worker)
        return worker

    def read(
        self, files: Sequence[tuple[Path, Sequence[Piece]]], *, progress: Progress | None = None
    ) -> ReadResult:
        """Fills the pieces' tensors, which are contiguous uint8 of one axis; returns when all is on
        the device. Raises CheckpointError for a file that cannot be read to its end."""
        opened: list[_File] = []

        def one(file: _File, at: int) -> int:
            count = self._worker().read(file, at, scratch=self._scratch)
            if progress is not None:
                with self._lock:
                    progress(count)
            return count

        try:
            for path, pieces in files:
                opened.append(_File(path, pieces, direct=self._direct))
            jobs = [
                self._pool.submit(one, file, at)
                for file in opened
                for at in file.chunks(self._chunk)
            ]
            try:
                total = sum(job.result() for job in as_completed(jobs))
            finally:
                for job in jobs:
                    job.cancel()
                for job in jobs:
                    if not job.cancelled():
                        job.exception()  # waits: no thread may use a file that is closed
            for worker in self._workers:
                worker.finish()
            return ReadResult(total, all(file.direct for file in opened))
        finally:
            for file in opened:
                file.close()
