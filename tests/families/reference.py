"""Makes the reference data of variants that no golden set has, with transformers.

Not a test: run by hand in an environment that has transformers 5.24, which deepdraft's does not.

    python -m tests.families.reference tests/families/data

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


def make(name: str, config: dict[str, Any], directory: Path) -> None:
    """One directory in the format of the golden sets."""
    import torch
    import transformers
    from safetensors.torch import save_file
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
    model.save_pretrained(at / "checkpoint")
    (at / "checkpoint" / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((at / "checkpoint" / "config.json").read_text())
    (at / "checkpoint" / "config-transformers5.json").write_text(json.dumps(saved, indent=1))
    (at / "checkpoint" / "config.json").write_text(json.dumps(config, indent=1))
    with torch.inference_mode():
        prompt = torch.randint(3, config["vocab_size"], (PROMPT,))
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
        "oneshot_logits": whole,
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
