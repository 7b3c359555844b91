"""Checkpoints of published shapes whose files hold headers and holes."""

import json
import struct
from pathlib import Path
from typing import Any

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.names import Entry
from deepdraft.proof.tiny_families import entries_of


def write_sparse(out: Path, config: dict[str, Any], shards: int, *, index: bool = True) -> int:
    """Writes config.json, index and sparse shards; returns the number of tensors."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    entries = list(entries_of(parse_model_args(config)))
    per = -(-len(entries) // shards)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = entries[number * per : (number + 1) * per]
        write_shard(out / file, part)
        weight_map |= {entry.name: file for entry in part}
    if index:
        (out / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return len(entries)


def write_shard(path: Path, entries: list[Entry]) -> None:
    header, position = {}, 0
    for entry in entries:
        end = position + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + position)
