"""Writes a checkpoint directory in the published layout: shards, index, config.json.

Owns: quantising each tensor as the table says, the distribution over shards, the bytes of a
safetensors file. Knows nothing of: where the weights come from, tokenizer files.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.names import Entry, tensor_table
from deepdraft.checkpoint.reader import Packed
from deepdraft.checkpoint.shards import INDEX_NAME, Nearest, write_header
from deepdraft.errors import CheckpointError
from deepdraft.quant.formats import quantize_fp8_row, quantize_fp8_tile, quantize_mxfp4

_FILE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
"""Within a file tensors go by dtype, then by name, as the safetensors library writes them; wider
types come first, so that all are aligned."""

_QUANTIZE = {
    "fp8_tile": quantize_fp8_tile,
    "fp8_row": quantize_fp8_row,
    "mxfp4": quantize_mxfp4,
}
_PLAIN = {"bf16": torch.bfloat16, "f32": torch.float32}

Source = Mapping[str, Tensor | Packed] | Callable[[str], Tensor | Packed]


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: dict[str, Any],
    tensors: Source,
    *,
    max_shard_bytes: int = 4 << 30,
    accept_unknown: Iterable[str] = (),
) -> None:
    """Writes the tensors of `config` (a published config.json) into an empty or new directory.

    `tensors` gives, for each weight name of the table (no scales), a float tensor of the
    dequantised shape, which is quantised as the table says, or a `Packed`, which is written as it
    is. Tensors are taken one at a time. Raises ConfigError, and CheckpointError for a missing,
    unknown, misshapen or non-finite tensor.
    """
    directory = Path(directory)
    table = tensor_table(parse_args(config, accept_unknown=accept_unknown))
    if isinstance(tensors, Mapping):
        _check_names(table, tensors)
        tensors = tensors.__getitem__
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors*")):
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another directory")
    shards = list(_split(table.values(), max_shard_bytes))
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    try:
        for name, entries in zip(names, shards, strict=True):
            _write_shard(directory / name, table, entries, tensors)
    except BaseException:
        for name in names:
            (directory / name).unlink(missing_ok=True)
        raise
    weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entry in table.values())},
        "weight_map": weight_map,
    }
    # Last, so that a killed export is not taken for a checkpoint.
    _write_json(directory / INDEX_NAME, index)
    _write_json(directory / "config.json", config)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _check_names(table: Mapping[str, Entry], tensors: Mapping[str, object]) -> None:
    weights = {name for name, entry in table.items() if entry.format != "scale"}
    missing = sorted(weights - tensors.keys())
    unknown = sorted(tensors.keys() - weights)
    if unknown:
        hint = Nearest(missing or weights).hint(unknown[0], "expected")
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in this configuration, first: {unknown[0]}{hint}"
        )
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, first: {missing[0]}")


def _split(entries: Iterable[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    """Consecutive entries of at most `max_shard_bytes`; a weight and its scales stay together."""
    shard: list[Entry] = []
    size = 0
    for unit in _units(entries):
        unit_bytes = sum(entry.num_bytes for entry in unit)
        if shard and size + unit_bytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard += unit
        size += unit_bytes
    yield shard


def _units(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    unit: list[Entry] = []
    for entry in entries:
        if unit and entry.format != "scale":
            yield unit
            unit = []
        unit.append(entry)
    yield unit


def _write_shard(
    path: Path, table: Mapping[str, Entry], entries: list[Entry], tensor: Callable[[str], Any]
) -> None:
    order = sorted(entries, key=lambda e: (_FILE_ORDER.index(e.dtype), e.name))
    head, places, size = write_header((e.name, e.dtype, e.shape, e.num_bytes) for e in order)
    with path.open("wb") as file:
        file.write(head)
        start = len(head)
        file.truncate(start + size)
        for entry in entries:
            if entry.format == "scale":
                continue
            values, scales = _encode(entry, tensor(entry.name))
            _put(file, start + places[entry.name], entry, values)
            if entry.scale_name is not None:
                _put(file, start + places[entry.scale_name], table[entry.scale_name], scales)


def _encode(entry: Entry, value: object) -> tuple[Tensor, Tensor | None]:
    """The stored form of one weight: values and scale bytes."""
    if isinstance(value, Packed):
        if value.format != entry.format:
            raise CheckpointError(
                f"{entry.name} is packed as {value.format}, it is stored as {entry.format}"
            )
        return value.values, value.scales
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{entry.name} must be a float tensor or a Packed, got {type(value)}")
    if tuple(value.shape) != entry.value_shape:
        raise CheckpointError(
            f"{entry.name} has shape {list(value.shape)}, config.json makes it "
            f"{list(entry.value_shape)}"
        )
    value = value.detach().cpu()
    if not torch.isfinite(value).all():
        raise CheckpointError(f"{entry.name} holds NaN or infinity; it was not written")
    plain = _PLAIN.get(entry.format)
    if plain is not None:
        return value.to(plain), None
    if value.dtype != torch.float64:
        value = value.float()
    return _QUANTIZE[entry.format](value.contiguous())


def _put(file: BinaryIO, position: int, entry: Entry, data: Tensor | None) -> None:
    if data is None or data.numel() * data.itemsize != entry.num_bytes:
        raise CheckpointError(f"{entry.name}: the packed bytes do not make {list(entry.shape)}")
    file.seek(position)
    file.write(data.contiguous().view(torch.uint8).numpy().data)
