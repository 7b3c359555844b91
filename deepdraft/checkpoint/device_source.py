"""Weights of one rank straight from the pre-sharded files to the device, layer by layer.

Owns: which file is read next, the tensors of the files in hand, reading ahead by one file.
Knows nothing of: what the weights become.

A consumer that goes through the layers in order finds the next layer there or on its way while it
re-tiles the last one. At most two layers and the `rest` file are held at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.fast_read import ParallelReader, Piece
from deepdraft.checkpoint.presharded import stack_of, unit_of
from deepdraft.checkpoint.reader import Checkpoint, Packed
from deepdraft.errors import CheckpointError
from deepdraft.quant.formats import dequantize_fp8_row, dequantize_fp8_tile, dequantize_mxfp4

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_DEQUANTIZE = {
    "fp8_tile": dequantize_fp8_tile,
    "fp8_row": dequantize_fp8_row,
    "mxfp4": dequantize_mxfp4,
}
_KEPT = "rest"


class DeviceSource:
    """A source of weights (`models.layers.WeightSource`) whose tensors lie on a device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        *,
        tables_on_host: bool = True,
        progress: Callable[[int, int], None] | None = None,
        **reader: Any,
    ) -> None:
        """`checkpoint`: a rank's part (`presharded.open_rank`). `tables_on_host`: Engram rows go to
        pinned host memory. `progress`: bytes so far, bytes in all. `reader`: of ParallelReader."""
        self._checkpoint, self.device = checkpoint, torch.device(device)
        self._tables_on_host = tables_on_host
        self._order: list[str] = []
        self._stacks: dict[str, dict[str, list[str]]] = {}
        for name in checkpoint.table:
            unit = unit_of(name)
            if unit not in self._stacks:
                self._order.append(unit)
            self._stacks.setdefault(unit, {}).setdefault(stack_of(name)[0], []).append(name)
        self._order.sort(key=lambda unit: unit == _KEPT)  # stable: read where it is asked for
        self._units: dict[str, Future[dict[str, Tensor]]] = {}
        self._begun: set[str] = set()
        self._reader = ParallelReader(self.device, **reader)
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="deepdraft-ahead")
        self._lock = threading.Lock()
        self._progress, self._done = progress, 0
        self.total_bytes = sum(entry.num_bytes for entry in checkpoint.table.values())

    @property
    def args(self) -> Any:
        """The model's sizes."""
        return self._checkpoint.args

    @property
    def path(self) -> Path:
        """The converted checkpoint's directory."""
        return self._checkpoint.path

    @property
    def tokenizer_file(self) -> Path:
        """Path of tokenizer.json; raises CheckpointError where there is none."""
        return self._checkpoint.tokenizer_file

    def close(self) -> None:
        """Ends the threads; tensors that were given out stay."""
        self._ahead.shutdown(cancel_futures=True)
        self._reader.close()
        self._units.clear()

    def __enter__(self) -> DeviceSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def packed(self, name: str) -> Packed:
        """Stored values and scales of a published name, on the device."""
        entry = self._entry(name)
        scales = None if entry.scale_name is None else self._part(entry.scale_name)
        return Packed(self._part(name), scales, entry.format)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantised tensor [out, in] on the device."""
        entry, packed = self._entry(name), self.packed(name)
        if packed.scales is None:
            return packed.values.to(dtype)
        return _DEQUANTIZE[entry.format](packed.values, packed.scales, dtype)

    def stack(self, name: str) -> tuple[Tensor, Tensor]:
        """All experts' maps at once: name as layers.3.ffn.experts.w1.weight -> values [E, ...],
        scales [E, ...], not copied."""
        scale = name.removesuffix("weight") + "scale"
        unit = self._unit(unit_of(name))
        return unit[name], unit[scale]

    def _entry(self, name: str) -> Any:
        entry = self._checkpoint.table.get(name)
        if entry is None:
            raise CheckpointError(f"{self._checkpoint.path} has no tensor {name}")
        return entry

    def _part(self, name: str) -> Tensor:
        stack, number = stack_of(name)
        whole = self._unit(unit_of(name))[stack]
        return whole if number < 0 else whole[number]

    def _unit(self, unit: str) -> dict[str, Tensor]:
        with self._lock:
            if unit not in self._units:
                self._begin(unit)
            at = self._order.index(unit)
            following = self._order[at + 1 : at + 2] if unit != _KEPT else self._order[:1]
            for name in following:
                if name not in self._units and name not in self._begun and name != _KEPT:
                    self._begin(name)
            number = unit.rpartition(".")[2]  # a layer and its table are wanted together
            for name in list(self._units):
                kept = name in (_KEPT, *following) or name.rpartition(".")[2] == number
                if not kept and self._units[name].done():
                    del self._units[name]
            future = self._units[unit]
        return future.result()

    def _begin(self, unit: str) -> None:
        self._begun.add(unit)
        self._units[unit] = self._ahead.submit(self._load, unit)

    def _load(self, unit: str) -> dict[str, Tensor]:
        on_host = self._tables_on_host and unit.startswith("engram.")
        pinned = on_host and self.device.type == "cuda"
        tensors: dict[str, Tensor] = {}
        files: dict[Path, list[Piece]] = {}
        for stack, names in self._stacks[unit].items():
            first, last = (self._checkpoint.places[n] for n in (names[0], names[-1]))
            size = last.end - first.start
            flat = torch.empty(
                size,
                dtype=torch.uint8,
                device="cpu" if on_host else self.device,
                pin_memory=pinned,
            )
            files.setdefault(first.shard, []).append(Piece(first.start, flat))
            entry = self._checkpoint.table[names[0]]
            stacked = stack_of(names[0])[1] >= 0
            shape = (len(names), *entry.shape) if stacked else entry.shape
            tensors[stack] = flat.view(_DTYPES.get(entry.format, torch.uint8)).view(shape)
        if self.device.type == "cuda":
            # Memory of an earlier consumer's stream may be handed out again: wait for it.
            torch.cuda.current_stream(self.device).synchronize()
        self._reader.read(list(files.items()), progress=self._note)
        return tensors

    def _note(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self.total_bytes)
