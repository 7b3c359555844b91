"""Configurations of the families: what is read, refused, derived; published ones."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args
from deepdraft.checkpoint.families import model_table, parse_model_args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import CheckpointError, ConfigError
from tests.families.conftest import SETS, config_of, merge

YARN40 = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "V2-Lite": COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": YARN40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "V2": COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rope_scaling": YARN40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    "V3": COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "quantization_config": FP8,
        "rope_scaling": YARN40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "Coder-33B": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 32013,
        "eos_token_id": 32014,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 19200,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "num_attention_heads": 56,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "vocab_size": 32256,
    },
}
PUBLISHED["V3.2"] = PUBLISHED["V3"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}

# Billions of parameters, as announced; V3 without its next-token prediction layer.
SIZES = {"V2-Lite": 15.7, "V2": 235.7, "V3": 671.0, "Coder-33B": 33.3}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    args = parse_model_args(PUBLISHED[name])
    table = model_table(args, {})
    text = sum(e.num_params for e in table.values() if e.module == "text")
    if name in SIZES:
        assert round(text / 1e9, 1) == SIZES[name]
    kinds = {"Coder-33B": LlamaArgs, "V2": DeepseekV2Args, "V2-Lite": DeepseekV2Args}
    assert type(args) is kinds.get(name, DeepseekV3Args)


def test_derived_numbers() -> None:
    v3 = parse_model_args(PUBLISHED["V3"])
    assert isinstance(v3, DeepseekV3Args)
    m = 0.1 * math.log(40) + 1
    assert math.isclose(v3.softmax_scale, 192**-0.5 * m * m)
    assert v3.rope.attention_factor == 1.0
    assert v3.family == "deepseek_v3" and v3.index_topk == 0
    assert parse_model_args(PUBLISHED["V3.2"]).family == "deepseek_v32"
    assert [v3.is_dense(layer) for layer in (0, 2, 3)] == [True, True, False]
    lite = parse_model_args(PUBLISHED["V2-Lite"])
    assert isinstance(lite, DeepseekV2Args) and lite.q_lora_rank is None
    assert math.isclose(lite.rope.softmax_factor, (0.0707 * math.log(40) + 1) ** 2)


def yarn(**values: float) -> Any:
    config = copy.deepcopy(PUBLISHED["V3"])
    config["rope_scaling"] = YARN40 | values
    return parse_model_args(config).rope


def test_rotary_factors() -> None:
    m = 0.1 * math.log(40) + 1
    assert math.isclose(yarn().attention_factor, m) and yarn().softmax_factor == 1.0
    only = yarn(mscale=0.5)
    assert math.isclose(only.attention_factor, m) and only.softmax_factor == 1.0
    both = yarn(mscale=0.5, mscale_all_dim=2.0)
    assert math.isclose(both.attention_factor, (1 + 0.05 * math.log(40)) / (1 + 0.2 * math.log(40)))
    assert math.isclose(both.softmax_factor, (1 + 0.2 * math.log(40)) ** 2)
    assert yarn(attention_factor=1.5, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.5


@pytest.mark.parametrize("name", SETS)
def test_every_number_counts(name: str) -> None:
    """Each size or constant changes the arguments, or is refused: none is silently dropped."""
    config = config_of(name)
    base = parse_model_args(config)
    for key, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key in ("initializer_range", "attention_dropout", "pretraining_tp"):
            continue
        # Groups do nothing where the choice is greedy.
        if name == "deepseek-v2-a" and key in ("n_group", "topk_group"):
            continue
        try:
            changed = parse_model_args(config | {key: value * 2 if value else 1})
        except ConfigError as error:
            assert key in error.message
        else:
            assert changed != base, key


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama-a", {"model_type": "gpt2"}, 'model_type = "gpt2" is not supported'),
        ("llama-a", {"model_type": None}, "model_type is missing"),
        ("llama-a", {"model_type": ["llama"]}, "is not supported"),
        ("llama-a", {"new_key": 1}, "new_key = 1"),
        ("llama-a", {"rope_scaling": {"alpha": 1.0}}, "rope_scaling.alpha"),
        ("llama-a", {"rope_scaling": {"type": "dynamic"}}, 'type = "dynamic" is not supported'),
        ("llama-a", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.type"),
        ("llama-a", {"rope_scaling": {"factor": 0.5}}, "factor must be finite and at least 1"),
        ("llama-a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
        ("llama-a", {"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide"),
        ("llama-a", {"head_dim": 31}, "head_dim = 31 must be even"),
        (
            "llama-a",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "must divide hidden_size",
        ),
        ("llama-a", {"hidden_size": -1}, "hidden_size must be in 1.."),
        ("llama-a", {"num_hidden_layers": 10**9}, "num_hidden_layers must be in 1..1024"),
        ("llama-a", {"vocab_size": 1.5}, "vocab_size must be an integer"),
        ("llama-a", {"attention_bias": True}, "attention_bias = true is not supported"),
        ("llama-a", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported'),
        ("llama-a", {"eos_token_id": 512}, "eos_token_id = 512 must be below vocab_size"),
        ("llama-a", {"eos_token_id": []}, "eos_token_id must name at least one token"),
        ("llama-a", {"eos_token_id": [1, "2"]}, "eos_token_id[1] must be an integer"),
        ("llama-a", {"eos_token_id": [1, 512]}, "eos_token_id = 512 must be below vocab_size"),
        ("llama-a", {"eos_token_id": list(range(65))}, "a list of at most 64 integers"),
        ("llama-a", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ("llama-a", {"quantization_config": FP8}, "quantization_config"),
        ("deepseek-v2-a", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2-a", {"scoring_func": "sigmoid"}, "scoring_func"),
        (
            "deepseek-v2-a",
            {"num_key_value_heads": 2},
            "num_key_value_heads = 2 contradicts num_attention_heads",
        ),
        ("deepseek-v2-a", {"head_dim": 48}, "head_dim = 48 contradicts qk_rope_head_dim"),
        ("deepseek-v2-a", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ("deepseek-v3-a", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v3-a", {"n_group": 3}, "n_group = 3 must divide n_routed_experts = 16"),
        ("deepseek-v3-a", {"n_group": 16}, "groups of at least 2"),
        ("deepseek-v3-a", {"topk_group": 5}, "topk_group = 5 must be at most n_group = 4"),
        ("deepseek-v3-a", {"num_experts_per_tok": 9}, "at most the 8 experts"),
        ("deepseek-v3-a", {"rope_scaling": {"beta_slow": 32}}, "beta_fast = 32 must be above"),
        ("deepseek-v3-a", {"rope_scaling": {"truncate": False}}, "truncate = false"),
        (
            "deepseek-v3-a",
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "[64, 64]",
        ),
        ("deepseek-v3-a", {"quantization_config": FP8 | {"quant_method": "awq"}}, "awq"),
        (
            "deepseek-v3-a",
            {"num_hidden_layers": 1000, "n_routed_experts": 65536},
            "makes 196608000 expert tensors; supported: at most 500000",
        ),
        (
            "deepseek-v4-a",
            {
                "num_hidden_layers": 1000,
                "compress_ratios": [0] * 1000,
                "n_routed_experts": 60000,
            },
            "makes 180000000 expert tensors",
        ),
        ("deepseek-v32-a", {"index_topk": 0}, "index_topk must be in 1.."),
        ("deepseek-v32-a", {"index_head_dim": 8}, "index_head_dim = 8 must be at least"),
        ("deepseek-v32-a", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek-v32-a", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
        ("deepseek-v4-a", {"compress_ratios": [0, 4, 128]}, "one entry for each"),
        ("deepseek-v4-a", {"compress_ratios": [0, 4, 64, 4]}, "compress_ratios[2] = 64; supported"),
        ("deepseek-v4-a", {"compress_ratios": [0, 4, True, 4]}, "compress_ratios[2] must be"),
        ("deepseek-v4-a", {"compress_ratios": None}, "compress_ratios is missing"),
        ("deepseek-v4-a", {"layer_types": ["sliding_attention"] * 4}, "contradict each other"),
        ("deepseek-v4-a", {"mlp_layer_types": ["moe"] * 3 + ["hash_moe"]}, "mlp_layer_types"),
        ("deepseek-v4-a", {"num_hash_layers": 5}, "num_hash_layers must be in 0..4"),
        ("deepseek-v4-a", {"o_groups": 3}, "o_groups = 3 must divide"),
        ("deepseek-v4-a", {"qk_rope_head_dim": 34}, "qk_rope_head_dim = 34 must be at most"),
        ("deepseek-v4-a", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 must be at most"),
        ("deepseek-v4-a", {"norm_topk_prob": False}, "norm_topk_prob"),
        (
            "deepseek-v4-a",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5 contradicts",
        ),
    ],
)
def test_refused(name: str, change: dict[str, Any], says: str) -> None:
    config = config_of(name)
    merge(config, change)
    with pytest.raises(ConfigError) as caught:
        parse_model_args(config)
    assert says in caught.value.message


def test_a_key_can_be_accepted_by_name() -> None:
    config = config_of("deepseek-v3-a") | {"new_key": 1}
    assert parse_model_args(config, accept_unknown=["new_key"]) == parse_model_args(
        config_of("deepseek-v3-a")
    )


def test_v4_details() -> None:
    five = config_of("deepseek-v4-a", "config-transformers5.json")
    base = parse_model_args(five)
    assert isinstance(base, V4Args)
    five["compress_rates"]["compressed_sparse_attention"] = 8
    changed = parse_model_args(five)
    assert isinstance(changed, V4Args) and changed.ratio(1) == 8 and changed.ratio(2) == 128
    del five["qk_rope_head_dim"]
    assert parse_model_args(five) == changed
    published = config_of("deepseek-v4-a") | {
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "dspark_markov_rank": 5,
        "expert_dtype": "fp4",
        "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
    }
    drafted = parse_model_args(published)
    assert isinstance(drafted, V4Args)
    assert drafted.attention == base.attention and drafted.num_nextn_predict_layers == 1


def test_old_files_are_refused_with_a_way_out(tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-a")))
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*run code.*weights_only=True"):
        Checkpoint.open(tmp_path)
