"""Weights between training runs: bf16/float32 safetensors shards that fit the device's file limit.

Owns: writing and reading shards. Knows nothing of: the published layout (see `export.py`).
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import Base

SHARD_BYTES = 14 * 1024 * 1024


def save_weights(model: Base, out: Path, note: dict[str, object]) -> list[Path]:
    """Write `weights-<k>-of-<n>.safetensors`; each file appears complete or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for p in model.table.values():
        dtype = torch.float32 if p.fmt == "f32" else torch.bfloat16
        t = model.params[p.name].detach().to("cpu", dtype).contiguous()
        size = t.numel() * t.element_size()
        if used and used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][p.name] = t
        used += size
    paths = []
    meta = {"note": json.dumps(note)}
    for k, shard in enumerate(shards):
        path = out / f"weights-{k + 1}-of-{len(shards)}.safetensors"
        temporary = path.with_suffix(".tmp")
        save_file(shard, temporary, metadata=meta)
        os.replace(temporary, path)
        paths.append(path)
    return paths


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the shards in a folder."""
    paths = sorted(folder.glob("weights-*-of-*.safetensors"))
    if not paths or len(paths) != int(paths[0].stem.rpartition("-")[2]):
        raise FileNotFoundError(f"{folder} holds no complete set of weights-*.safetensors shards")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors.update(load_file(path))
    return tensors


@torch.no_grad()
def load_weights(model: Base, folder: Path) -> None:
    """Fill the model; every tensor must be there with its shape."""
    tensors = read_weights(folder)
    for p in model.table.values():
        value = tensors.pop(p.name, None)
        if value is None or tuple(value.shape) != p.shape:
            raise ValueError(f"{folder}: tensor {p.name} is missing or not of shape {p.shape}")
        model.params[p.name].copy_(value)
    if tensors:
        raise ValueError(f"{folder}: left over: {sorted(tensors)[:5]}")
