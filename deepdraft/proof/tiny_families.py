"""Tiny checkpoints of every family: complete directories with random weights, for any machine.

Owns: the sizes (`KINDS`), values in which every small parameter matters, storage formats, a
tokenizer of 512 tokens. `deepdraft tiny` is in `tiny_write`. Knows nothing of: what they are used
for.

Sizes are such that 384 tokens wrap windows, prune selections and pass the original context three
times. Norm weights are not 1, biases not 0, embeddings small enough for eps to count.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from deepdraft.arch import LlamaArgs, ModelArgs, V4Args, V41Args
from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.names import Entry, tensor_table
from deepdraft.checkpoint.names_decoder import llama_entries, mla_entries
from deepdraft.checkpoint.names_v4 import v4_entries
from deepdraft.errors import ConfigError
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.proof.tiny import tiny_args
from deepdraft.proof.tiny_tokenizer import tiny_tokenizer
from deepdraft.text.tokenizer import Tokenizer, engram_token_map

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
_YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LLAMA = _COMMON | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 176,
    "num_key_value_heads": 2,
    "rope_theta": 100000,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}
_MLA = _COMMON | {
    "num_key_value_heads": 4,
    "intermediate_size": 192,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rope_theta": 10000,
}
_V2 = _MLA | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_V3 = _MLA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_V4 = _COMMON | {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 32,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "sliding_window": 32,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": _YARN | {"factor": 16, "original_max_position_embeddings": 64},
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "v2": _V2,
    "v2-lite": _V2 | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "v3": _V3,
    "v32": _V3
    | {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 16,
    },
    "v4": _V4,
    "v41": {},
}
"""Published configurations by kind; V4.1's is made from `tiny.tiny_args`."""

_DSPARK = {
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 4,
    "dspark_noise_token_id": 508,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
}

_REAL = {
    "llama": {"head_dim": 128},
    "v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "v4": {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
}
"""Sizes that kernels are compiled for, the rest staying tiny."""


def tiny_config(
    kind: str, *, real_latents: bool = False, mtp: bool | Literal["next"] = False
) -> dict[str, Any]:
    """A published config.json of a kind. `mtp`: with a drafter, which is a next-token prediction
    layer (V3, V3.2; V4's if it is `next`) or DSpark layers (V4).

    Raises ConfigError.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is not known; known: {', '.join(KINDS)}")
    if mtp and kind not in ("v3", "v32", "v4"):
        raise ConfigError(f"no drafter is known for {kind} (V4.1 has its own without asking)")
    if kind == "v41":
        return _v41_config(real_latents)
    config = copy.deepcopy(KINDS[kind])
    if real_latents:
        config |= _REAL.get(kind, _REAL["v2"])
        if kind == "v32":
            config["index_head_dim"] = 128
    if mtp:
        dspark = kind == "v4" and mtp != "next"
        config |= _DSPARK if dspark else {"num_nextn_predict_layers": 1}
    return config


def _v41_config(real_latents: bool) -> dict[str, Any]:
    compressed = max(engram_token_map(Tokenizer(tiny_tokenizer(512), "tokenizer"))) + 1
    args = dataclasses.replace(
        tiny_args(),
        vocab_size=512,
        engram_compressed_vocab_size=compressed,
        dspark_noise_token_id=508,
    )
    if real_latents:
        args = dataclasses.replace(args, head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    rows = engram_tables(args).num_embeddings
    text = dataclasses.asdict(dataclasses.replace(args, engram_num_embeddings=rows))
    top = {key: text.pop(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for key in ("image_token_id", "vision"):
        text.pop(key)
    scaling = {
        "rope_type": "yarn",
        "factor": text.pop("rope_factor"),
        "beta_fast": text.pop("rope_beta_fast"),
        "beta_slow": text.pop("rope_beta_slow"),
        "original_max_position_embeddings": text.pop("rope_original_max_positions"),
    }
    fixed = {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_scaling": scaling,
    }
    quant = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    # Through JSON, so that tuples are lists as in a file.
    return json.loads(
        json.dumps(
            {
                "architectures": ["DeepseekV41ForCausalLM"],
                "model_type": "deepseek_v41",
                "dtype": "bfloat16",
                **top,
                "quantization_config": quant,
                "text_config": text | fixed,
            }
        )
    )


def entries_of(args: ModelArgs) -> Iterator[Entry]:
    """Every tensor that a complete checkpoint holds; a tied head and derived copies left out."""
    if isinstance(args, V41Args):
        table = iter(tensor_table(args).values())
    elif isinstance(args, LlamaArgs):
        table = llama_entries(args)
    elif isinstance(args, V4Args):
        table = v4_entries(args)
    else:
        table = mla_entries(args)
    for entry in table:
        if entry.module != "derived" and entry.optional != "tied head":
            yield entry


def tiny_tensors(
    config: dict[str, Any], seed: int = 0, *, embedding_scale: float = 0.02
) -> dict[str, Tensor]:
    """Float32 weights (int64 tables) by published name, each seeded by its name."""
    args: Any = parse_model_args(config)
    tensors = {}
    for entry in entries_of(args):
        if entry.format == "scale":
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{entry.name}".encode()))
        if entry.format == "ids":
            high = args.router.experts
            tensors[entry.name] = torch.randint(high, entry.shape, generator=generator)
            continue
        x = torch.randn(entry.value_shape, generator=generator, dtype=torch.float64)
        tensors[entry.name] = _scaled(entry.name, x, embedding_scale).float()
    return tensors


def _scaled(name: str, x: Tensor, embedding_scale: float) -> Tensor:
    if name.endswith(("embed.weight", "embed_tokens.weight")):
        return x * embedding_scale
    if "norm.bias" in name or name.endswith(("gate.bias", "bias_vl", "correction_bias")):
        return 0.2 * x
    if "norm" in name or name.endswith(("q_weight", "k_weight", "_scale")):
        return 1.0 + 0.3 * x
    return x if x.ndim < 2 else x * x.shape[-1] ** -0.5
