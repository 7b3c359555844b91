"""Reads the tensors of a checkpoint directory, memory-mapped and one at a time.

Owns: opening (config, accounting of every tensor), mapping byte ranges, dequantising in row chunks.
Knows nothing of: the model that takes the tensors, devices, other storage layouts.
"""

import functools
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import ModelArgs
from deepdraft.checkpoint.families import load_model_args, model_table, unread_tensors
from deepdraft.checkpoint.layouts import read_published
from deepdraft.checkpoint.names import SKIP_RULES, Entry
from deepdraft.checkpoint.shards import Nearest, Stored, check_headers, check_link
from deepdraft.errors import CheckpointError
from deepdraft.quant.blocks import BLOCK, dequantize_fp8_block
from deepdraft.quant.formats import (
    GROUP,
    dequantize_fp8_row,
    dequantize_fp8_tile,
    dequantize_mxfp4,
)

_CHUNK_VALUES = 1 << 20
"""Values dequantised at a time: bounds temporaries to some ten MB whatever the tensor's size."""

_DEQUANTIZE = {
    "fp8_tile": dequantize_fp8_tile,
    "fp8_row": dequantize_fp8_row,
    "mxfp4": dequantize_mxfp4,
    "fp8_block": dequantize_fp8_block,
}
_ROWS_PER_SCALE = {"fp8_tile": GROUP, "fp8_block": BLOCK}
_VIEWS = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "block_scale": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
}


@dataclass(slots=True)
class Packed:
    """A tensor as it is stored: memory-mapped, private to the process (writes reach no file)."""

    values: Tensor
    """uint8 for `fp8_tile`, `fp8_row` (E4M3 codes), `mxfp4` (two codes a byte); else bf16, f32."""
    scales: Tensor | None
    """E8M0 bytes (uint8), None for plain formats."""
    format: str
    """A `Format` of `deepdraft.checkpoint.names`."""


class Checkpoint:
    """An opened checkpoint directory whose tensors are all accounted for."""

    def __init__(
        self, path: Path, args: ModelArgs, table: dict[str, Entry], stored: dict[str, Stored]
    ) -> None:
        self.path = path
        self.args: Any = args
        """A `ModelArgs`. Callers know the family, or ask `models.model_class`."""
        self.table = table
        self._stored = stored
        self._unread: list[str] = []
        self.progress: Callable[[int, int], None] | None = None
        """Called with the bytes of the weights asked for so far, and of all."""
        self._num_read = 0

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, accept_unknown: Iterable[str] = ()
    ) -> "Checkpoint":
        """Checks config.json and every shard header against each other; reads no weights.

        `accept_unknown` names config keys that may pass unread. Raises ConfigError and
        CheckpointError.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory; give the checkpoint's directory")
        config = path / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{path} has no config.json; is it a checkpoint's directory?")
        check_link(path, config)
        args = load_model_args(config, accept_unknown=accept_unknown)
        found, _ = read_published(path)
        table = model_table(args, found.stored)
        unread = unread_tensors(args, found.stored)
        checkpoint = cls(path, args, table, check_headers(found, table, frozenset(unread)))
        checkpoint._unread = unread
        return checkpoint

    @property
    def tokenizer_file(self) -> Path:
        """Path of tokenizer.json; raises CheckpointError where there is none."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no tokenizer.json; download it too")
        return file

    @property
    def skipped(self) -> dict[str, list[str]]:
        """Rule (a key of `SKIP_RULES`) -> tensors that it leaves unread."""
        skipped = {
            rule: [name for name, entry in self.table.items() if entry.module == rule]
            for rule in SKIP_RULES
        }
        skipped["mtp"] += self._unread
        return skipped

    def tensor(
        self, name: str, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
    ) -> Tensor:
        """Dequantised tensor [out, in] as published, in memory of its own.

        `out` (of the same shape) receives it instead of a new tensor. Raises CheckpointError for a
        value that is not finite.
        """
        entry = self._entry(name)
        shape = entry.value_shape
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        assert tuple(out.shape) == shape, f"{name}: {tuple(out.shape)} is not {shape}"
        rows = shape[0]
        unit = BLOCK if entry.format == "fp8_block" else GROUP
        step = max(1, _CHUNK_VALUES * rows // max(1, out.numel()) // unit) * unit
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = out[start:stop]
            self._read_rows(entry, start, stop, chunk)
            self._check_finite(entry, chunk, start)
        self._note(entry)
        return out

    def _note(self, entry: Entry) -> None:
        if self.progress is None:
            return
        self._num_read += entry.num_bytes
        if entry.scale_name is not None:
            self._num_read += self.table[entry.scale_name].num_bytes
        total = self._num_bytes
        self.progress(min(self._num_read, total), total)

    @functools.cached_property
    def _num_bytes(self) -> int:
        """Of all weights that may be asked for, scales included."""
        unread = set(SKIP_RULES) - {"mtp"}  # those are read to draft
        return sum(e.num_bytes for e in self.table.values() if e.module not in unread)

    def packed(self, name: str) -> Packed:
        """The stored bytes of a weight and its scales, memory-mapped, unchecked."""
        entry = self._entry(name)
        rows = entry.shape[0]
        scales = None
        if entry.scale_name is not None:
            scale = self.table[entry.scale_name]
            scales = self._map_rows(scale, 0, scale.shape[0])
        self._note(entry)
        return Packed(self._map_rows(entry, 0, rows), scales, entry.format)

    @property
    def places(self) -> Mapping[str, Stored]:
        """Where every stored tensor lies, scales too."""
        return self._stored

    def stored(self, name: str) -> Tensor:
        """The stored bytes of one tensor or scale, memory-mapped, unchecked."""
        entry = self.table[name]
        return self._map_rows(entry, 0, entry.shape[0])

    def _entry(self, name: str) -> Entry:
        entry = self.table.get(name)
        if entry is None:
            hint = Nearest(self.table).hint(name, "names")
            raise CheckpointError(f"{self.path} has no tensor {name}{hint}")
        if entry.format in ("scale", "block_scale"):
            raise CheckpointError(f"{name} is read together with its weight; ask for the weight")
        if entry.module in SKIP_RULES and entry.module != "mtp":  # those are read to draft
            raise CheckpointError(f"{name} is not read: {SKIP_RULES[entry.module]}")
        return entry

    def _check_finite(self, entry: Entry, chunk: Tensor, first_row: int) -> None:
        finite = torch.isfinite(chunk)
        if finite.all():
            return
        bad = int((~finite).sum())
        row, *rest = (~finite).nonzero()[0].tolist()
        raise CheckpointError(
            f"{entry.name} in {self._stored[entry.name].shard} holds NaN or infinity: {bad} values "
            f"of rows {first_row}..{first_row + chunk.shape[0] - 1}, the first at "
            f"{[first_row + row, *rest]}; the file is damaged or its training failed"
        )

    def _read_rows(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        values = self._map_rows(entry, start, stop)
        if entry.scale_name is None:
            out.copy_(values)
            return
        scale = self.table[entry.scale_name]
        per_row = _ROWS_PER_SCALE.get(entry.format, 1)
        scales = self._map_rows(scale, start // per_row, -(-stop // per_row))
        out.copy_(_DEQUANTIZE[entry.format](values, scales, out.dtype))

    def _map_rows(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a stored tensor, mapped from its file."""
        place = self._stored[entry.name]
        row_bytes = (place.end - place.start) // entry.shape[0]
        raw = _map_bytes(place.shard, place.start + start * row_bytes, (stop - start) * row_bytes)
        view = _VIEWS.get(entry.format)
        if view is not None:
            # Foreign writers may leave tensors unaligned; such ones are copied.
            raw = (raw if raw.data_ptr() % view.itemsize == 0 else raw.clone()).view(view)
        return raw.view(stop - start, *entry.shape[1:])


def _map_bytes(path: Path, start: int, length: int) -> Tensor:
    """uint8 view of a file range. Unmapped when the last tensor that uses it goes away."""
    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start + length:
                raise CheckpointError(f"{path} shrank after it was opened")
            # Copy-on-write, so that a stray write can neither crash nor reach the file.
            mapped = mmap.mmap(
                file.fileno(), start - aligned + length, access=mmap.ACCESS_COPY, offset=aligned
            )
    except OSError as error:
        raise CheckpointError(f"cannot map {path}: {error.strerror}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8, count=length, offset=start - aligned)
