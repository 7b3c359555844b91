"""Makes the reference data of variants that no golden set has, with transformers.

Not a test: run by hand in an environment that has transformers 5.24, which deepdraft's does not.

    python -m tests.families.reference tests/families/data

V4 is written in the published layout, which transformers reads but does not write; its tensors'
names and shapes come from deepdraft's table, their values from the generator.

Every small parameter is made to matter: norm weights and biases are random, index and window are
shorter than the text, positions pass the original context.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16,
    "beta_slow": 1,
}
MLA = {
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "routed_scaling_factor": 4.0,
    "n_group": 4,
    "topk_group": 2,
}
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 40,
    "rope_theta": 5000.0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-gqa-yarn": COMMON | LLAMA | {"rope_scaling": YARN},
    "llama-tied-llama3": COMMON
    | LLAMA
    | {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "v2-groups": COMMON
    | MLA
    | {
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": True,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    },
    "v3-plain-halves": COMMON
    | MLA
    | {
        "model_type": "deepseek_v3",
        "norm_topk_prob": False,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
    },
    "v32-whole": COMMON
    | MLA
    | {
        "model_type": "deepseek_v32",
        "norm_topk_prob": True,
        "index_n_heads": 12,
        "index_head_dim": 12,
        "index_topk": 5,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
PROMPT, STEPS = 40, 12
V4_PROMPT = 70
V4: dict[str, Any] = COMMON | {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 10,
    "o_lora_rank": 18,
    "o_groups": 4,
    "moe_intermediate_size": 14,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 1.0,
    "sliding_window": 9,
    "compress_ratios": [4, 0, 4, 0],
    "compress_rope_theta": 3000,
    "rope_theta": 500,
    "index_n_heads": 12,
    "index_head_dim": 10,
    "index_topk": 5,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "num_nextn_predict_layers": 0,
}


def make(name: str, config: dict[str, Any], directory: Path) -> None:
    """One directory in the format of the golden sets."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, name)))
    torch.set_num_threads(1)
    parsed = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key:
                continue
            if value.ndim == 1:
                centre = 0.0 if "bias" in key else 1.0
                value.copy_(centre + 0.3 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    at = directory / name
    at.mkdir(parents=True)
    model.save_pretrained(at / "checkpoint")
    (at / "checkpoint" / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((at / "checkpoint" / "config.json").read_text())
    (at / "checkpoint" / "config-transformers5.json").write_text(json.dumps(saved, indent=1))
    (at / "checkpoint" / "config.json").write_text(json.dumps(config, indent=1))
    record(name, model, config, at, PROMPT)


def make_v4(name: str, config: dict[str, Any], directory: Path) -> None:
    """As `make`, from a checkpoint in the published layout."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from deepdraft.checkpoint.families import model_table, parse_model_args

    torch.manual_seed(4)
    torch.set_num_threads(1)
    at = directory / name
    (at / "checkpoint").mkdir(parents=True)
    tensors = {}
    for key, entry in model_table(parse_model_args(config), {}).items():
        if entry.format == "ids":
            tensors[key] = torch.randint(0, config["n_routed_experts"], entry.shape)
        elif len(entry.shape) == 1:
            centre = 1.0 if "norm" in key or "scale" in key else 0.0
            tensors[key] = centre + 0.3 * torch.randn(entry.shape)
        else:
            tensors[key] = torch.randn(entry.shape) * entry.shape[-1] ** -0.5
    save_file(tensors, at / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    (at / "checkpoint" / "config.json").write_text(json.dumps(config, indent=1))
    model, info = AutoModelForCausalLM.from_pretrained(
        at / "checkpoint",
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    saved = model.config.to_dict()
    (at / "checkpoint" / "config-transformers5.json").write_text(json.dumps(saved, indent=1))
    record(name, model.eval(), config, at, V4_PROMPT)


def record(name: str, model: Any, config: dict[str, Any], at: Path, length: int) -> None:
    """Runs the model and writes logits and tokens."""
    import torch
    import transformers
    from safetensors.torch import save_file

    with torch.inference_mode():
        prompt = torch.randint(3, config["vocab_size"], (length,))
        out = model(prompt[None], use_cache=True)
        cache, first, decoded, greedy = out.cache, out.logits[0], [], []
        last = first[-1]
        for _ in range(STEPS):
            greedy.append(int(last.argmax()))
            out = model(torch.tensor([greedy[-1:]]), cache=cache, use_cache=True)
            last = out.logits[0, -1]
            decoded.append(last)
        whole = model(torch.cat([prompt, torch.tensor(greedy)])[None], use_cache=False).logits[0]
    arrays = {
        "prompt_logits": first,
        "decode_logits": torch.stack(decoded),
    }
    save_file({k: v.contiguous() for k, v in arrays.items()}, at / "logits.safetensors")
    tokens = {
        "prompt": prompt.tolist(),
        "greedy_tokens": greedy,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    (at / "tokens.json").write_text(json.dumps(tokens) + "\n")
    error = float((torch.cat([first, arrays["decode_logits"]]) - whole).abs().max())
    print(f"{name}: one-shot and decode differ by {error / float(whole.abs().max()):.1e}")


if __name__ == "__main__":
    for variant, values in VARIANTS.items():
        make(variant, values, Path(sys.argv[1]))
    make_v4("v4-other", V4, Path(sys.argv[1]))
