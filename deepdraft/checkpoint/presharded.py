"""The pre-sharded layout: one directory per rank, one file per layer, experts stacked.

Owns: which tensor lies in which file, the names and shapes of a rank's part, the manifest, and
opening a rank's part as a `Checkpoint` under the published names.
Knows nothing of: how files are made (`convert`), devices.

    config.json, tokenizer.json, ...   as published
    sharded.json                       version, ranks, digest of each file
    rank-0/layers.0.safetensors        rank 0's part of layer 0, published formats and byte order
    rank-0/engram.1.safetensors        its rows of layer 1's Engram table
    rank-0/mtp.0.safetensors, ...      drafter layers
    rank-0/rest.safetensors            embedding, head, last norm

An expert's maps lie one after another in one stored tensor: ffn.experts.w1.weight [E, F/n, D/2].
Bytes are those of the published formats, not the kernels' tiles: re-tiling on the device runs at
73 GB/s (H200), under the reading of the next layer, and a tile plan may change without a new
conversion.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from deepdraft.checkpoint.config import load_args
from deepdraft.checkpoint.names import SKIP_RULES, Entry, tensor_table
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.shards import Found, Stored, check_headers, read_header
from deepdraft.errors import CheckpointError
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.plan import ShardPlan

MANIFEST = "sharded.json"
VERSION = 1
_MAX_MANIFEST_BYTES = 4 << 20
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def shard_plan(args: V41Args, size: int) -> ShardPlan:
    """The plan of a model over `size` ranks. Raises ConfigError for a size that does not divide."""
    rows = {}
    if args.engram_layer_ids and size > 1:
        primes = engram_tables(args).primes
        flat = primes.reshape(len(args.engram_layer_ids), -1).tolist()
        rows = dict(zip(args.engram_layer_ids, flat, strict=True))
    return ShardPlan(args, size, rows)


def unit_of(name: str) -> str:
    """The file, without rank and suffix, that holds a published tensor."""
    parts = name.split(".")
    if parts[0] in ("layers", "mtp"):
        table = parts[2:4] == ["engram", "embed"]
        return f"engram.{parts[1]}" if table else f"{parts[0]}.{parts[1]}"
    return "rest"


def stack_of(name: str) -> tuple[str, int]:
    """A published name -> the stored tensor and the place in it; -1 for one that is no expert's."""
    found = _EXPERT.search(name)
    if found is None:
        return name, -1
    return f"{name[: found.start()]}.experts.{name[found.end() :]}", int(found[1])


def read_entries(args: V41Args) -> dict[str, Entry]:
    """Entries of the published table that are ever read."""
    return {n: e for n, e in tensor_table(args).items() if e.module not in SKIP_RULES}


def rank_entries(plan: ShardPlan, rank: int) -> dict[str, Entry]:
    """Published name -> entry with the shape of the rank's part."""
    return {
        name: replace(entry, shape=plan.shape(name, entry.shape, rank))
        for name, entry in read_entries(plan.args).items()
    }


def stacked(entries: Iterable[Entry]) -> dict[str, Entry]:
    """The tensors as a rank's files hold them: experts as one tensor with a leading axis."""
    stacks: dict[str, Entry] = {}
    for entry in entries:
        name, number = stack_of(entry.name)
        if number < 0:
            stacks[name] = entry
        else:
            stacks[name] = replace(entry, name=name, shape=(number + 1, *entry.shape))
    return stacks


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `sharded.json` says."""

    size: int
    """Ranks."""
    source: str
    """Digest of the checkpoint it was made from."""
    files: Mapping[str, tuple[int, str]]
    """Path below the directory -> bytes and BLAKE3."""

    def to_json(self) -> dict[str, Any]:
        files = {name: list(value) for name, value in self.files.items()}
        return {"version": VERSION, "ranks": self.size, "source": self.source, "files": files}


def is_presharded(directory: Path) -> bool:
    """Whether a directory holds a finished conversion."""
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError for a manifest that is missing or malformed."""
    path = directory / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; convert again") from error
    try:
        version, size, files = values["version"], values["ranks"], values["files"]
        source = values["source"]
        checked = {str(name): (int(n), str(digest)) for name, (n, digest) in files.items()}
        sound = isinstance(size, int) and size >= 1 and isinstance(source, str)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed ({error!r}); convert again") from error
    if version != VERSION or not sound:
        raise CheckpointError(f"{path} is of version {version!r}, this reads {VERSION}")
    for name in checked:
        parts = Path(name).parts
        if len(parts) != 2 or ".." in parts or Path(name).is_absolute():
            raise CheckpointError(f"{path} names {name[:80]!r}, which is no file of this directory")
    return Manifest(size, source, checked)


def open_rank(
    directory: str | os.PathLike[str],
    rank: int,
    size: int,
    *,
    accept_unknown: Iterable[str] = (),
) -> Checkpoint:
    """One rank's part of a converted checkpoint, every tensor accounted for; reads no weights.

    Its tensors have the published names and the part's shapes. Raises CheckpointError and
    ConfigError.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    args = load_args(directory / "config.json", accept_unknown=accept_unknown)
    if manifest.size != size:
        raise CheckpointError(
            f"{directory} was converted for {manifest.size} ranks, not {size}: give --tp "
            f"{manifest.size}, or convert the published checkpoint again"
        )
    entries = rank_entries(shard_plan(args, size), rank)
    stored = _headers(directory, rank, manifest, sorted({unit_of(name) for name in entries}))
    check_headers(Found(directory, stored, [], None), stacked(entries.values()))
    return Checkpoint(directory, args, entries, by_published_name(entries, stored))


def unit_file(rank: int, unit: str) -> str:
    """Path of a rank's file below the directory."""
    return f"rank-{rank}/{unit}.safetensors"


def _headers(
    directory: Path, rank: int, manifest: Manifest, units: Iterable[str]
) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for unit in units:
        name = unit_file(rank, unit)
        told = manifest.files.get(name)
        path = directory / name
        if told is None or not path.is_file():
            raise CheckpointError(f"{directory} lacks {name}; convert again")
        if path.stat().st_size != told[0]:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {told[0]}; convert again"
            )
        stored |= read_header(path)
    return stored


def by_published_name(
    entries: Mapping[str, Entry], stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Where each expert's map lies within its stack."""
    places = {}
    for name, entry in entries.items():
        stack, number = stack_of(name)
        place = stored[stack]
        if number >= 0:
            size = (place.end - place.start) // place.shape[0]
            start = place.start + number * size
            place = replace(place, name=name, shape=entry.shape, start=start, end=start + size)
        places[name] = place
    return places
