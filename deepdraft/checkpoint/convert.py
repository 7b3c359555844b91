"""`deepdraft convert`: a published checkpoint into the pre-sharded layout of some ranks.

Owns: the order of work, finished files and their digests, going on after an interruption.
Knows nothing of: the engine, devices.

Every file is written beside its name, synced and renamed, then noted with its digest in a journal;
a second start keeps what the journal names. The manifest comes last, so that half a conversion is
never taken for a whole one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from deepdraft.checkpoint.names import Entry
from deepdraft.checkpoint.presharded import (
    MANIFEST,
    Manifest,
    rank_entries,
    read_manifest,
    shard_plan,
    stack_of,
    stacked,
    unit_file,
    unit_of,
)
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.shards import check_link, write_header
from deepdraft.errors import CheckpointError
from deepdraft.parallel.plan import ShardPlan
from deepdraft.parallel.shards import cut_tensor

JOURNAL = ".convert.jsonl"
ALIGNMENT = 4096
"""Tensors start at multiples of this where their sizes allow, so that direct reads need no
copies."""
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "speculation.json",
    "README.md",
    "LICENSE",
)
_MAX_COPIED_BYTES = 256 << 20

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


def convert(
    source: Checkpoint, out: Path, size: int, *, progress: Progress = lambda *_: None
) -> Manifest:
    """Writes `source` for `size` ranks into `out`, which is new, empty, or an unfinished conversion
    of the same checkpoint.

    Raises ConfigError for a size that does not divide, CheckpointError for a full disk, a directory
    that holds something else, and NaN in a weight.
    """
    check_small(source.path)
    plan = shard_plan(source.args, size)
    origin = source_digest(source)
    out.mkdir(parents=True, exist_ok=True)
    done = _journal(out, origin, size)
    if done is None:
        manifest = read_manifest(out)
        progress(1, 1)
        return manifest
    work = _work(plan)
    total = sum(nbytes for _, _, nbytes in work)
    written = sum(nbytes for rank, unit, nbytes in work if unit_file(rank, unit) in done)
    _check_room(out, total - written)
    progress(written, total)
    with (out / JOURNAL).open("a", encoding="utf-8") as journal:
        for rank, unit, nbytes in work:
            name = unit_file(rank, unit)
            if name in done:
                continue
            done[name] = _write_unit(source, plan, rank, unit, out / name)
            journal.write(json.dumps({"file": name, "bytes_and_digest": done[name]}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            written += nbytes
            progress(written, total)
    copy_small(source.path, out)
    manifest = Manifest(size, origin, done)
    write_synced(out / MANIFEST, json.dumps(manifest.to_json(), indent=1).encode() + b"\n")
    (out / JOURNAL).unlink()
    return manifest


def verify(directory: Path, *, progress: Progress = lambda *_: None) -> int:
    """Reads every file of a conversion and compares its digest; returns the bytes read.

    Raises CheckpointError that names the first file that differs.
    """
    manifest = read_manifest(directory)
    total, read = sum(n for n, _ in manifest.files.values()), 0
    for name, (size, digest) in manifest.files.items():
        path = directory / name
        found = blake3(max_threads=blake3.AUTO)
        try:
            with path.open("rb") as file:
                while block := file.read(16 << 20):
                    found.update(block)
                    read += len(block)
                    progress(read, total)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if path.stat().st_size != size or found.hexdigest() != digest:
            raise CheckpointError(f"{path} is not what {MANIFEST} says; convert again")
    return read


def source_digest(source: Checkpoint) -> str:
    """Tells one checkpoint from another: configuration, and each shard's size, header and last
    MiB."""
    digest = blake3((source.path / "config.json").read_bytes())
    for shard in sorted({place.shard for place in source.places.values()}):
        with shard.open("rb") as file:
            size = shard.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            digest.update(f"{shard.name}\n{size}\n".encode() + file.read(length))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()


def _journal(out: Path, origin: str, size: int) -> dict[str, tuple[int, str]] | None:
    """Files that an earlier start finished; None where the whole conversion is there."""
    head = {"source": origin, "ranks": size}
    other = CheckpointError(
        f"{out} holds a conversion of another checkpoint or for another number of ranks; "
        "choose another directory"
    )
    if (out / MANIFEST).is_file():
        manifest = read_manifest(out)
        if (manifest.source, manifest.size) != (origin, size):
            raise other
        return None
    path = out / JOURNAL
    if not path.is_file():
        if any(out.iterdir()):
            raise CheckpointError(f"{out} is not empty; choose another directory")
        write_synced(path, json.dumps(head).encode() + b"\n")
        return {}
    first, *lines = path.read_text(encoding="utf-8").splitlines() or ["{}"]
    if json.loads(first) != head:
        raise other
    done: dict[str, tuple[int, str]] = {}
    for line in lines:
        try:
            note = json.loads(line)
            name, (nbytes, digest) = note["file"], note["bytes_and_digest"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off by the interruption: that file is written again
        if (out / name).is_file() and (out / name).stat().st_size == nbytes:
            done[name] = nbytes, digest
    return done


def _work(plan: ShardPlan) -> list[tuple[int, str, int]]:
    """Rank, unit and bytes of every file; the ranks' parts of one layer after another, so that the
    layer is read from the disk once."""
    sizes: dict[tuple[str, int], int] = {}
    for rank in range(plan.size):
        for name, entry in rank_entries(plan, rank).items():
            key = (unit_of(name), rank)
            sizes[key] = sizes.get(key, 0) + entry.num_bytes
    units = dict.fromkeys(unit for unit, _ in sizes)
    return [(rank, u, sizes[u, rank]) for u in units for rank in range(plan.size)]


def _check_room(out: Path, wanted: int) -> None:
    free = shutil.disk_usage(out).free
    if wanted > free:
        raise CheckpointError(
            f"the conversion still takes {wanted / 1e9:.1f} GB, {out} has {free / 1e9:.1f} GB "
            "free; make room or choose another disk, then start again: finished files are kept"
        )


def _write_unit(
    source: Checkpoint, plan: ShardPlan, rank: int, unit: str, path: Path
) -> tuple[int, str]:
    """Bytes and digest of the file written."""
    entries = [e for e in rank_entries(plan, rank).values() if unit_of(e.name) == unit]
    by_stack: dict[str, list[Entry]] = {}
    for entry in entries:
        by_stack.setdefault(stack_of(entry.name)[0], []).append(entry)
    order = sorted(stacked(entries).values(), key=_by_alignment)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    digest, size = blake3(max_threads=blake3.AUTO), 0
    try:
        with partial.open("wb") as file:
            for block in _blocks(source, plan, rank, order, by_stack):
                file.write(block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return size, digest.hexdigest()


def _by_alignment(entry: Entry) -> tuple[int, str]:
    """Sizes that are multiples of a page first, then of half a page, and so on: every tensor then
    starts at a multiple of the largest power of two, up to a page, that divides its size."""
    size = entry.num_bytes
    return -min(size & -size, ALIGNMENT), entry.name


def _blocks(
    source: Checkpoint,
    plan: ShardPlan,
    rank: int,
    order: list[Entry],
    by_stack: dict[str, list[Entry]],
) -> Iterator[memoryview | bytes]:
    dtypes = [source.places[by_stack[entry.name][0].name].dtype for entry in order]
    tensors = ((e.name, d, e.shape, e.num_bytes) for e, d in zip(order, dtypes, strict=True))
    yield write_header(tensors, alignment=ALIGNMENT)[0]
    for entry in order:
        for part in by_stack[entry.name]:  # experts in ascending number
            own = cut_tensor(plan, part.name, source.stored(part.name), rank).contiguous()
            _check_sound(source, part, own)
            yield own.view(torch.uint8).reshape(-1).numpy().data


def _check_sound(source: Checkpoint, entry: Entry, values: Tensor) -> None:
    """A NaN or infinity is an error here, as it is when a model reads the weight itself."""
    if entry.format == "scale":
        bad = values.view(torch.uint8) == 255
    elif entry.format in ("fp8_tile", "fp8_row"):
        bad = (values.view(torch.uint8) & 127) == 127
    elif values.is_floating_point():
        bad = ~torch.isfinite(values)
    else:
        return
    if bad.any():
        raise CheckpointError(
            f"{entry.name} in {source.places[entry.name].shard} holds NaN or infinity: "
            f"{int(bad.sum())} values; the file is damaged or its training failed"
        )


def check_small(source: Path) -> None:
    """Raises CheckpointError where a file that `copy_small` takes is a link out of `source`."""
    for name in ("config.json", *_COPIED):
        check_link(source, source / name)


def copy_small(source: Path, out: Path) -> None:
    """Configuration, tokenizer and licence beside the weights."""
    for name in _COPIED:
        file = source / name
        if file.is_file() and file.stat().st_size <= _MAX_COPIED_BYTES:
            write_synced(out / name, file.read_bytes())
    write_synced(out / "config.json", (source / "config.json").read_bytes())


def write_synced(path: Path, raw: bytes) -> None:
    """A whole file or none, on the disk when this returns."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
