"""`deepdraft tiny`: writes a tiny checkpoint of a family as a directory.

Owns: storage (float32, bfloat16, as published) and shards.
Knows nothing of: sizes and values (`tiny_families`), the tokenizer (`tiny_tokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.shards import INDEX_NAME
from deepdraft.checkpoint.spec_styles import Style, written
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.tiny_families import entries_of, tiny_config, tiny_tensors
from deepdraft.proof.tiny_tokenizer import write_tokenizer
from deepdraft.quant.blocks import BLOCK, quantize_fp8_block
from deepdraft.quant.formats import encode_e4m3, encode_e8m0, quantize_mxfp4

Storage = Literal["float32", "bfloat16", "published"]
STORAGES: tuple[Storage, ...] = get_args(Storage)
_QUANT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def write_tiny(
    out: str | Path,
    kind: str,
    *,
    seed: int = 0,
    style: Style = "published",
    storage: Storage = "float32",
    shards: int = 1,
    real_latents: bool = False,
    mtp: bool | Literal["next"] = False,
    embedding_scale: float = 0.02,
) -> Path:
    """Writes config.json, weights and tokenizer into an empty or new directory; returns its path.

    `published` storage: BF16 for Llama and V2, FP8 blocks for V3 and V3.2, FP8 with E8M0 scales and
    MXFP4 experts for V4; V4.1 has that one only. Raises ConfigError and CheckpointError.
    """
    out = Path(out)
    config = tiny_config(kind, real_latents=real_latents, mtp=mtp)
    tensors = tiny_tensors(config, seed, embedding_scale=embedding_scale)
    if kind == "v41":
        if (style, shards) != ("published", 1) or storage not in ("float32", "published"):
            raise ConfigError("v41 is written as published, in one file: leave these options out")
        write_checkpoint(out, config, tensors)
    else:
        config, tensors = _stored(config, tensors, storage)
        write_directory(out, written(config, style), tensors, shards=shards)
    write_tokenizer(out, config.get("vocab_size", 512))
    return out


def write_directory(
    out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shards: int = 1
) -> None:
    """config.json and the tensors as they are, in one file or in shards with an index."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.safetensors*")):
        raise CheckpointError(f"{out} already holds a checkpoint; choose another directory")
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[number::shards])
            save_file(part, out / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        size = sum(t.numel() * t.itemsize for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n")


def _stored(
    config: dict[str, Any], tensors: dict[str, Tensor], storage: Storage
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and tensors in a storage format."""
    if storage == "float32":
        return config, tensors
    kind = config["model_type"]
    half = {
        name: t.bfloat16() if t.is_floating_point() and "bias" not in name else t
        for name, t in tensors.items()
    }
    if storage == "bfloat16" or kind in ("llama", "deepseek_v2"):
        return config | {"torch_dtype": "bfloat16"}, half
    short = kind == "deepseek_v4"
    config = config | {"torch_dtype": "bfloat16", "quantization_config": dict(_QUANT)}
    if short:
        config["quantization_config"] |= {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for entry in entries_of(parse_model_args(config)):
        if entry.format == "weight" and entry.scale is not None:
            values, scales = _quantised(entry.group, tensors[entry.name], short)
            half[entry.name], half[entry.scale] = values, scales
    return config, half


def _quantised(group: str, x: Tensor, e8m0: bool) -> tuple[Tensor, Tensor]:
    if e8m0 and group == "routed experts":
        values, scales = quantize_mxfp4(x)
        return values.view(torch.int8), scales.view(torch.float8_e8m0fnu)
    values, scales = quantize_fp8_block(x)
    if e8m0:
        scales = torch.exp2(scales.log2().ceil())
        spread = scales.repeat_interleave(BLOCK, 0)[: x.shape[0]]
        spread = spread.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
        values, scales = encode_e4m3(x / spread), encode_e8m0(scales).view(torch.float8_e8m0fnu)
    return values.view(torch.float8_e4m3fn), scales
