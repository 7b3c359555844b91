"""Trained shards -> a checkpoint in the published layout and storage formats.

Owns: the published `config.json` of the demo model and the split of stacked experts.
Run: `python -m training.export --weights DIR --model model.json --tokenizer DIR --out DIR`.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.reader import Checkpoint, Packed
from deepdraft.checkpoint.writer import write_checkpoint
from training.prepare import read_model_file
from training.quantise import WEIGHT_QUANTISERS
from training.spec import Param, parameter_table
from training.store import read_weights

_SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "swiglu_limit",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "sliding_window",
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


def published_config(args: V41Args) -> dict[str, Any]:
    """The nested `config.json` for these sizes (text only)."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(value)
        return int(value) if isinstance(value, float) and value == int(value) > 1000 else value

    text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
    text |= {name: plain(getattr(args, name)) for name in _SAME_NAMES}
    text |= {
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": False,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": plain(args.rope_factor),
            "beta_fast": plain(args.rope_beta_fast),
            "beta_slow": plain(args.rope_beta_slow),
            "original_max_position_embeddings": args.rope_original_max_positions,
        },
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": args.bos_token_id,
        "eos_token_id": args.eos_token_id,
        "pad_token_id": args.pad_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
    if args.image_token_id is not None:
        config["image_token_id"] = args.image_token_id
    return config


def published_tensors(args: V41Args, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked training tensors under published names, float32."""
    out: dict[str, Tensor] = {}
    for p in parameter_table(args):
        value = weights[p.name].float()
        if len(p.published) == 1 and p.published[0] == p.name:
            out[p.name] = value
        else:
            out |= dict(zip(p.published, value.unbind(0), strict=True))
    return out


def worst_change(args: V41Args, weights: dict[str, Tensor], checkpoint: Checkpoint) -> float:
    """Largest relative difference between the written weights and the training quantiser's."""
    worst = 0.0
    for p in parameter_table(args):
        want = trained_value(p, weights[p.name].float())
        parts = [checkpoint.tensor(name) for name in p.published]
        got = torch.stack(parts) if want.dim() > parts[0].dim() else parts[0]
        scale = float(want.abs().max())
        if scale:
            worst = max(worst, float((got - want).abs().max()) / scale)
    return worst


def trained_value(p: Param, value: Tensor) -> Tensor:
    """What the forward pass used for this tensor during quantisation-aware training."""
    if p.fmt in WEIGHT_QUANTISERS:
        return WEIGHT_QUANTISERS[p.fmt](value)
    return value if p.fmt == "f32" else value.bfloat16().float()


def drafter_of(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> dict[str, Tensor | Packed]:
    """The drafter from `tensors`, and everything else as it is stored in `checkpoint`.

    ValueError where a tensor that is not the drafter's has other values there.
    """
    out: dict[str, Tensor | Packed] = {}
    for name, value in tensors.items():
        if name.startswith("mtp."):
            out[name] = value
        elif torch.equal(checkpoint.tensor(name), value):
            out[name] = checkpoint.packed(name)
        else:
            raise ValueError(f"{name} is not as in {checkpoint.path}; only drafters may differ")
    return out


def export(
    weights: Path, model_file: Path, tokenizer: Path, out: Path, target: Path | None = None
) -> tuple[float, int]:
    """Write the checkpoint; returns the worst relative change and the bytes written.

    `target`: a checkpoint that all but the drafter is copied from, byte for byte.
    """
    args, _, _ = read_model_file(model_file)
    tensors = read_weights(weights)
    source: Mapping[str, Tensor | Packed] = published_tensors(args, tensors)
    if target is not None:
        source = drafter_of(Checkpoint.open(target), published_tensors(args, tensors))
    write_checkpoint(out, published_config(args), source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).exists() and not (out / name).exists():
            shutil.copyfile(tokenizer / name, out / name)
    size = sum(f.stat().st_size for f in out.iterdir() if f.is_file())
    return worst_change(args, tensors, Checkpoint.open(out)), size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("weights", "model", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="checkpoint whose target is kept")
    o = parser.parse_args()
    worst, size = export(o.weights, o.model, o.tokenizer, o.out, o.target)
    print(f"{o.out}: {size} bytes; worst change against the training quantiser {worst:.2e}")
    return int(worst > 0 or size > 20_000_000)


if __name__ == "__main__":
    sys.exit(main())
