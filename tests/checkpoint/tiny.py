"""A checkpoint of the smallest sizes the layout allows, and tools to damage its files."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.checkpoint.writer import write_checkpoint

DATA = Path(__file__).parent / "data"


def published_config() -> dict[str, Any]:
    """The published configuration, fresh to change."""
    return json.loads((DATA / "v41-config.json").read_text())


def tiny_config(**text: Any) -> dict[str, Any]:
    """Four layers (window; ratio 2 with Engram; ratio 1; ratio 1 reindex) and one drafter layer."""
    config = json.loads((DATA / "v41-a-config.json").read_text())
    config["image_token_id"] = 63
    config["text_config"] |= {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 2,
        "candidate_source_layer_id": 2,
        "n_routed_experts": 3,
        "engram_layer_ids": [1],
        "engram_n_heads": 1,
        "engram_num_embeddings": [97 + 101 + 103],
        "engram_compressed_vocab_size": 60,
        "num_nextn_predict_layers": 1,
        "dspark_noise_token_id": 62,
        "dspark_target_layer_ids": [2, 3],
        "dspark_n_routed_experts": 2,
    }
    config["text_config"] |= text
    return config


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Float tensors for every weight of the configuration."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*entry.value_shape, generator=generator) * 0.05
        for name, entry in tensor_table(parse_args(config)).items()
        if entry.format != "scale"
    }


def write_tiny(directory: Path, **text: Any) -> dict[str, torch.Tensor]:
    """Writes a tiny checkpoint of two shards; returns the floats it was made from."""
    config = tiny_config(**text)
    tensors = random_tensors(config)
    write_checkpoint(directory, config, tensors, max_shard_bytes=two_shards(config))
    return tensors


def two_shards(config: dict[str, Any]) -> int:
    """The shard size that splits a checkpoint in two."""
    return sum(e.num_bytes for e in tensor_table(parse_args(config)).values()) * 6 // 10


def shard_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a shard."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path: Path, header: dict[str, Any], data: bytes) -> None:
    """A shard of exactly this header, right or wrong."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def find_shard(directory: Path, name: str) -> Path:
    """The shard that holds a tensor."""
    return next(path for path in shard_paths(directory) if name in read_shard(path)[0])


def patch_tensor(directory: Path, name: str, offset: int, new: bytes) -> None:
    """Overwrites bytes of one stored tensor."""
    path = find_shard(directory, name)
    header, data = read_shard(path)
    start = header[name]["data_offsets"][0] + offset
    write_shard(path, header, data[:start] + new + data[start + len(new) :])


def edit_index(directory: Path, edit) -> None:
    """Applies `edit` to the index's weight_map."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))
