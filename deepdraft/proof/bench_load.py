"""`deepdraft bench load`: weights on the device against the same reads into a scratch buffer.

Owns: the two ways of reading, their alternation, the figures. Knows nothing of: models.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from deepdraft.checkpoint.device_source import DeviceSource
from deepdraft.checkpoint.fast_read import ParallelReader, Piece
from deepdraft.checkpoint.presharded import open_rank, read_manifest, stack_of, unit_of
from deepdraft.checkpoint.reader import Checkpoint

PAIRS = 3


def to_device(checkpoint: Checkpoint, device: torch.device, **reader: Any) -> float:
    """Seconds until every file's tensors were on the device; freed file by file."""
    first_of: dict[str, str] = {}
    for name, entry in checkpoint.table.items():
        if entry.format not in ("scale", "block_scale"):
            first_of.setdefault(unit_of(name), name)
    begin = time.monotonic()
    with DeviceSource(checkpoint, device, **reader) as source:
        for name in first_of.values():
            source.packed(name)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - begin


def to_scratch(checkpoint: Checkpoint, device: torch.device, **reader: Any) -> tuple[float, bool]:
    """Seconds of the same reads into the reader's own buffers, and whether they were direct."""
    ends: dict[tuple[Path, str], list[int]] = {}
    for name, place in checkpoint.places.items():
        ends.setdefault((place.shard, stack_of(name)[0]), []).extend((place.start, place.end))
    files: dict[Path, list[Piece]] = {}
    for (path, _), places in ends.items():
        # A tensor without memory: nothing is copied to it.
        length = max(places) - min(places)
        piece = Piece(min(places), torch.empty(length, dtype=torch.uint8, device="meta"))
        files.setdefault(path, []).append(piece)
    direct = True
    begin = time.monotonic()
    with ParallelReader(device, scratch=True, **reader) as reads:
        for path, pieces in files.items():  # file by file, as the other way
            direct &= reads.read([(path, pieces)]).direct
    return time.monotonic() - begin, direct


def compare(
    checkpoint: Checkpoint, device: torch.device, *, runs: int = PAIRS, **reader: Any
) -> dict[str, Any]:
    """Alternating pairs; medians, GB/s (10**9 bytes) and the share of the scratch reads' rate."""
    total = sum(entry.num_bytes for entry in checkpoint.table.values())
    device_s, scratch_s, direct = [], [], True
    for _ in range(runs):
        device_s.append(to_device(checkpoint, device, **reader))
        seconds, direct = to_scratch(checkpoint, device, **reader)
        scratch_s.append(seconds)
    a, b = statistics.median(device_s), statistics.median(scratch_s)
    return {
        "gb": round(total / 1e9, 3),
        "direct_reads": direct,
        "device_s": [round(s, 4) for s in device_s],
        "scratch_s": [round(s, 4) for s in scratch_s],
        "device_gb_s": round(total / a / 1e9, 3),
        "scratch_gb_s": round(total / b / 1e9, 3),
        "share": round(b / a, 3),
    }


def main(directory: Path, *, rank: int = 0, runs: int = PAIRS) -> dict[str, Any]:
    """One rank of a converted checkpoint. Raises CheckpointError for anything else."""
    size = read_manifest(directory).size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_rank(directory, rank, size)
    result = compare(checkpoint, device, runs=runs)
    return {"what": "load", "ranks": size, "rank": rank, "device": str(device), **result}
