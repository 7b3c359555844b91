"""Loading on a GPU host: weights on the device against the same reads into a scratch buffer.

    python3 bench/load_gpu.py --json FILE --dir DIR [--seconds 150] [--gb 20]

Writes layers of a random pre-sharded checkpoint of the published shape (384 experts, 7.4 GB a layer
at one rank) into DIR, as many as fit --gb and a third of the time, then reads them: alternately
into the device's tensors and into pinned scratch buffers alone, three pairs each, from the disk
past the page cache, and again from memory (DIR's file system against /dev/shm), which shows the
reader's own limit. Also: re-tiling of a layer's experts on the device, threads and chunk sizes.
Writes FILE after every part. `--dry-run`: tiny files, on the CPU.
"""

import argparse
import json
import os
import shutil
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from deepdraft.checkpoint.config import load_args  # noqa: E402
from deepdraft.checkpoint.names import Entry  # noqa: E402
from deepdraft.checkpoint.presharded import (  # noqa: E402
    by_published_name,
    rank_entries,
    shard_plan,
    stacked,
    unit_of,
)
from deepdraft.checkpoint.reader import Checkpoint  # noqa: E402
from deepdraft.checkpoint.shards import read_header  # noqa: E402
from deepdraft.proof.bench_load import compare  # noqa: E402

CONFIG = ROOT / "tests/checkpoint/data/v41-config.json"
SMALL = ROOT / "tests/checkpoint/data/v41-a-config.json"
BLOCK = 64 << 20
ALIGNMENT = 4096


def log(text: str) -> None:
    print(f"[load {time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Files:
    """Layers of one rank with random bytes below 128: no NaN code, no NaN scale."""

    def __init__(self, config: Path) -> None:
        self.args = load_args(config)
        table = rank_entries(shard_plan(self.args, 1), 0)
        self.units: dict[str, dict[str, Entry]] = {}
        for name, entry in table.items():
            self.units.setdefault(unit_of(name), {})[name] = entry
        self.block = torch.randint(0, 128, (BLOCK,), dtype=torch.uint8).numpy()

    def names(self) -> list[str]:
        """Layers alike: window or shared KV, no Engram."""
        return [u for u in self.units if u.startswith("layers.")][2:]

    def num_bytes(self, unit: str) -> int:
        return sum(e.num_bytes for e in self.units[unit].values())

    def write(self, directory: Path, unit: str) -> float:
        """Seconds that writing and syncing one layer took."""
        begin = time.monotonic()
        order = sorted(
            stacked(self.units[unit].values()).values(),
            key=lambda e: -min(e.num_bytes & -e.num_bytes, ALIGNMENT),
        )
        header, at = {}, 0
        for entry in order:
            end = at + entry.num_bytes
            header[entry.name] = {
                "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]
            }  # fmt: skip
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        start = 8 + len(text)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{unit}.safetensors"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.truncate(fd, start + at)
        os.pwrite(fd, struct.pack("<Q", len(text)) + text, 0)

        def put(place: int) -> None:
            view = memoryview(self.block)[: min(BLOCK, at - place)]
            while view:
                n = os.pwrite(fd, view, start + place)
                view, place = view[n:], place + n

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, range(0, at, BLOCK)))
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return time.monotonic() - begin

    def open(self, directory: Path, units: list[str]) -> Checkpoint:
        table = {n: e for unit in units for n, e in self.units[unit].items()}
        stored = {}
        for unit in units:
            stored |= read_header(directory / f"{unit}.safetensors")
        return Checkpoint(directory, self.args, table, by_published_name(table, stored))


def retile(files: Files, device: torch.device) -> dict:
    """A layer's experts into the kernels' tiles, on the device, 16 at a time."""
    from deepdraft.kernels import layout

    args = files.args
    d, f, n = args.hidden_size, args.moe_intermediate_size, min(16, args.n_routed_experts)
    kinds = {"up": (2 * f, d), "down": (d, f)}
    seconds = moved = 0.0
    for rows, cols in kinds.values():
        values = torch.randint(0, 128, (n, rows, cols // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(100, 120, (n, rows, cols // 32), dtype=torch.uint8, device=device)
        layout.tile_mxfp4(values, scales)
        for _ in range(3):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            layout.tile_mxfp4(values, scales)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds += time.perf_counter() - begin
            moved += values.nbytes + scales.nbytes
    return {"gb_s": round(moved / seconds / 1e9, 1), "experts": n}


class Run:
    """The report, the time left, and the files in hand."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin = options, time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.files = Files(SMALL if options.dry_run else CONFIG)
        self.report: dict = {
            "torch": torch.__version__, "device": str(self.device), "cpus": os.cpu_count(),
            "written": {},
        }  # fmt: skip
        if self.device.type == "cuda":
            self.report["gpu"] = torch.cuda.get_device_name()
            torch.zeros(1, device=self.device)

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.begin)

    def note(self, name: str, work) -> None:
        """Runs one part; what goes wrong is noted."""
        if self.left() < 8:
            self.report[name] = {"skipped": "no time left"}
        else:
            try:
                self.report[name] = work()
            except Exception as error:
                self.report[name] = {"error": f"{type(error).__name__}: {error}"}
        log(f"{name}: {self.report[name]}")
        self.save()

    def save(self) -> None:
        self.report["wall_s"] = round(time.monotonic() - self.begin, 1)
        self.options.json.parent.mkdir(parents=True, exist_ok=True)
        self.options.json.write_text(json.dumps(self.report, indent=1) + "\n")

    def write(self, directory: Path, gb: float, seconds: float) -> list[str]:
        """Writes layers while they fit; their names."""
        units, spent, size = [], 0.0, self.files.num_bytes(self.files.names()[0])
        for unit in self.files.names():
            expected = spent / len(units) if units else 0.0
            room = shutil.disk_usage(directory.parent).free * 0.8
            fits = (len(units) + 1) * size <= max(gb * 1e9, size) and room > size
            if not fits or spent + expected > seconds:
                break
            spent += self.files.write(directory, unit)
            units.append(unit)
        self.report["written"][str(directory)] = {
            "layers": len(units),
            "gb_s": round(len(units) * size / max(spent, 1e-9) / 1e9, 2),
        }
        log(f"written: {self.report['written'][str(directory)]}")
        return units

    def compare(self, name: str, directory: Path, units: list[str], **reader) -> None:
        """Three alternating pairs."""
        self.note(name, lambda: compare(self.files.open(directory, units), self.device, **reader))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    disk, memory = options.dir / "load-bench", Path("/dev/shm/load-bench")
    run = Run(options)
    try:
        # From memory first: one or two layers, always quick.
        units = run.write(memory, 15.0, 15.0)
        run.compare("from_memory", memory, units)
        for threads, chunk in ((4, 8), (16, 8), (8, 32), (16, 32)):
            how = {"threads": threads, "chunk_bytes": chunk << 20}
            name = f"from_memory, {threads} threads, chunks of {chunk} MiB"
            run.compare(name, memory, units[:1], **how)
        shutil.rmtree(memory, ignore_errors=True)
        run.note("retile_experts", lambda: retile(run.files, run.device))
        units = run.write(disk, options.gb, run.left() / 3)
        run.compare("from_disk", disk, units)
        run.compare("from_disk, buffered", disk, units[:1], direct=False)
        run.compare("from_disk, 32 threads", disk, units[:1], threads=32, chunk_bytes=16 << 20)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
        run.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
