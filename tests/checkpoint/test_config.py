"""config.json: what is read, accepted, refused, and which values contradict each other."""

import copy
import json
import re

import pytest

from deepdraft.checkpoint.config import ACCEPTED_KEYS, load_args, parse_args
from deepdraft.errors import ConfigError
from tests.checkpoint.tiny import DATA, published_config, tiny_config


def put(config, path, value):
    """Sets a dotted path; returns the config."""
    *parents, key = path.split(".")
    for parent in parents:
        config = config[parent]
    config[key] = value


def refused(config, *needles, accept=()):
    with pytest.raises(ConfigError) as caught:
        parse_args(config, accept_unknown=accept)
    for needle in needles:
        assert needle in caught.value.message
    return caught.value.message


def test_published_configuration():
    args = load_args(DATA / "v41-config.json")
    assert (args.hidden_size, args.num_hidden_layers, args.n_routed_experts) == (5120, 40, 384)
    assert (args.rope_theta, args.compress_rope_theta, args.rope_factor) == (10000, 160000, 16)
    assert args.rope_original_max_positions == 65536
    assert args.rms_norm_eps == 1e-20
    assert args.gate_temp == 1.0
    assert args.image_token_id == 129264
    assert dict(args.vision)["num_hidden_layers"] == 32
    assert args.decoder_start == 20
    assert [layer for layer, role in enumerate(args.roles) if role.restricted] == [24, 28, 32, 36]


def test_recorded_set_is_text_only():
    args = load_args(DATA / "v41-a-config.json")
    assert args.vision == ()
    assert args.rope_original_max_positions == 64
    assert args.engram_num_embeddings == (1464, 2234)


def test_tiny_configuration_is_valid():
    assert parse_args(tiny_config()).kv_source_layer_ids == (1, 2)


def test_values_reach_their_field():
    """Every number of text_config changes the arguments: none is silently dropped."""
    base = parse_args(tiny_config())
    changes = {
        "swiglu_limit": 3.5,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.0,
        "hc_eps": 1e-5,
        "hc_sinkhorn_iters": 4,
        "hc_mult": 2,
        "gate_temp": 2.0,
        "rope_theta": 5000,
        "compress_rope_theta": 9000.0,
        "max_position_embeddings": 512,
        "sliding_window": 8,
        "index_topk": 8,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "dspark_block_size": 3,
        "dspark_markov_rank": 8,
        "num_experts_per_tok": 1,
        "dspark_num_experts_per_tok": 1,
    }
    for key, value in changes.items():
        changed = parse_args(tiny_config(**{key: value}))
        assert getattr(changed, key) == value
        assert changed != base, key


def test_accepted_keys_do_not_change_anything():
    config = tiny_config()
    for key in ACCEPTED_KEYS:
        config[key] = "anything"
        config["text_config"][key] = ["at", "all"]
    assert parse_args(config) == parse_args(tiny_config())


def test_unknown_keys_are_refused_unless_named():
    config = tiny_config()
    config["text_config"]["attn_logit_softcapping"] = 30.0
    config["rope_factor"] = 4
    config["text_config"]["rope_scaling"]["mscale"] = 0.7
    refused(
        config,
        "text_config.attn_logit_softcapping = 30.0",
        "rope_factor = 4",
        "text_config.rope_scaling.mscale = 0.7",
        "--accept-key",
    )
    names = ("text_config.attn_logit_softcapping", "rope_factor", "text_config.rope_scaling.mscale")
    message = refused(config, "mscale", accept=names[:2])
    assert "softcapping" not in message
    assert parse_args(config, accept_unknown=names) == parse_args(tiny_config())


MISSING = [
    "model_type",
    "bos_token_id",
    "quantization_config",
    "quantization_config.weight_block_size",
    "text_config",
    "text_config.hidden_size",
    "text_config.compress_ratios",
    "text_config.rope_scaling",
    "text_config.rope_scaling.factor",
    "text_config.tie_word_embeddings",
    "text_config.engram_num_embeddings",
]


@pytest.mark.parametrize("path", MISSING)
def test_missing_keys(path):
    config = tiny_config()
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    del section[key]
    refused(config, f"{path} is missing")


UNSUPPORTED = [
    ("model_type", "deepseek_v4", "deepseek_v41"),
    ("architectures", ["DeepseekV4ForCausalLM"], ["DeepseekV41ForCausalLM"]),
    ("quantization_config.quant_method", "awq", "fp8"),
    ("quantization_config.weight_block_size", [128, 128], [32, 32]),
    ("quantization_config.scale_fmt", "float", "ue8m0"),
    ("quantization_config.expert_dtype", "fp8", "fp4"),
    ("quantization_config.activation_scheme", "static", "dynamic"),
    ("quantization_config.fmt", "e5m2", "e4m3"),
    ("text_config.model_type", "deepseek_v3", "deepseek_v41_text"),
    ("text_config.num_key_value_heads", 2, 1),
    ("text_config.n_shared_experts", 2, 1),
    ("text_config.hidden_act", "gelu", "silu"),
    ("text_config.attention_bias", True, False),
    ("text_config.tie_word_embeddings", True, False),
    ("text_config.scoring_func", "sigmoid", "sqrtsoftplus"),
    ("text_config.topk_method", "group_limited_greedy", "noaux_tc"),
    ("text_config.norm_topk_prob", False, True),
    ("text_config.rope_scaling.rope_type", "linear", "yarn"),
    ("text_config.rope_scaling.type", "linear", "yarn"),
]


@pytest.mark.parametrize("path, value, supported", UNSUPPORTED)
def test_unsupported_behaviour_names_path_value_and_support(path, value, supported):
    config = tiny_config()
    put(config, path, value)
    refused(config, f"{path} = {json.dumps(value)}", f"supported: {json.dumps(supported)}")


WRONG_TYPES = [
    ("text_config.hidden_size", "64", "an integer"),
    ("text_config.hidden_size", 64.0, "an integer"),
    ("text_config.hidden_size", True, "an integer"),
    ("text_config.hidden_size", None, "an integer"),
    ("text_config.hidden_size", -32, "in 1.."),
    ("text_config.hidden_size", 1 << 40, "in 1.."),
    ("text_config.num_hidden_layers", 0, "in 1.."),
    ("text_config.num_hidden_layers", 100_000, "in 1..1024"),
    ("text_config.engram_vocab_size", 1 << 40, "in 2.."),
    ("text_config.engram_max_ngram_size", 1, "in 2..16"),
    ("text_config.swiglu_limit", "10", "a number"),
    ("text_config.swiglu_limit", 0, "above 0"),
    ("text_config.swiglu_limit", True, "a number"),
    ("text_config.rms_norm_eps", -1e-6, "at least 0"),
    ("text_config.gate_temp", 0.0, "above 0"),
    ("text_config.rope_scaling.factor", 0.5, "at least 1"),
    ("text_config.compress_ratios", 2, "a list"),
    ("text_config.compress_ratios", [0] * 5000, "at most 4096"),
    ("text_config.kv_source_layer_ids", [1, "2"], "an integer"),
    ("text_config", [], "a JSON object"),
    ("text_config.rope_scaling", None, "a JSON object"),
    ("vision_config", "none", "a JSON object"),
    ("image_token_id", -1, "in 0.."),
]


@pytest.mark.parametrize("path, value, rule", WRONG_TYPES)
def test_wrong_types_and_sizes(path, value, rule):
    config = tiny_config()
    put(config, path, value)
    refused(config, path, rule)


CONTRADICTIONS = [
    ({"hidden_size": 48}, "text_config.hidden_size = 48", "multiple of 32"),
    ({"moe_intermediate_size": 40}, "moe_intermediate_size = 40", "multiple of 32"),
    ({"head_dim": 40}, "head_dim = 40", "multiple of 32"),
    ({"q_lora_rank": 33}, "q_lora_rank = 33", "multiple of 32"),
    ({"o_lora_rank": 16}, "o_lora_rank = 16", "multiple of 32"),
    ({"index_head_dim": 16}, "index_head_dim = 16", "multiple of 32"),
    ({"engram_head_dim": 8}, "engram_head_dim = 8", "multiple of 32"),
    ({"o_groups": 3}, "o_groups = 3", "num_attention_heads = 2"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15", "even"),
    ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64", "head_dim = 32"),
    ({"max_position_embeddings": 2048}, "max_position_embeddings = 2048", "1024"),
    ({"compress_ratios": [0, 2, 1, 1]}, "compress_ratios has 4 entries", "5 in all"),
    ({"compress_ratios": [0, 2, 1, 4, 0]}, "compress_ratios[3] = 4", "unknown layer role"),
    ({"compress_ratios": [0, 128, 1, 1, 0]}, "compress_ratios[1] = 128", "supported: 0"),
    ({"compress_ratios": [0, 2, 1, 1, 1]}, "compress_ratios[4] = 1", "drafter layer"),
    ({"compress_ratios": [2, 2, 1, 1, 0]}, "compress_ratios[0] = 2", "comes before it"),
    ({"compress_ratios": [0, 2, 1, 2, 0]}, "compress_ratios[3] = 2", "layer 2 with ratio 1"),
    ({"compress_ratios": [0, 0, 1, 1, 0]}, "kv_source_layer_ids[0] = 1", "window-only"),
    ({"compress_ratios": [0, 2, 2, 2, 0]}, "compress_ratios[2] = 2", "supported: 1"),
    ({"compress_ratios": [0, 2, 1, 0, 0]}, "index_source_layer_ids[2] = 3", "window-only"),
    ({"kv_source_layer_ids": []}, "kv_source_layer_ids is empty", "at least one"),
    ({"kv_source_layer_ids": [1, 9]}, "kv_source_layer_ids[1] = 9", "num_hidden_layers is 4"),
    ({"kv_source_layer_ids": [2, 1]}, "kv_source_layer_ids[1] = 1", "above the entry before"),
    ({"index_source_layer_ids": [2, 3]}, "kv_source_layer_ids[0] = 1", "index_source_layer_ids"),
    ({"index_source_layer_ids": [1, 2, 4]}, "index_source_layer_ids[2] = 4", "out of range"),
    ({"candidate_source_layer_id": 0}, "candidate_source_layer_id = 0", "[2, 3]"),
    ({"candidate_source_layer_id": 1}, "candidate_source_layer_id = 1", "[2, 3]"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok = 4", "n_routed_experts = 3"),
    ({"dspark_num_experts_per_tok": 3}, "dspark_num_experts_per_tok = 3", "_experts = 2"),
    ({"engram_layer_ids": [4]}, "engram_layer_ids[0] = 4", "out of range"),
    ({"engram_layer_ids": [1, 2]}, "engram_num_embeddings has 1", "engram_layer_ids has 2"),
    ({"engram_num_embeddings": [300]}, "engram_num_embeddings = [300]", "[301]"),
    ({"engram_vocab_size": 98}, "engram_num_embeddings = [301]", "engram_vocab_size = 98"),
    ({"engram_n_heads": 5000}, "engram_n_heads = 5000", "at most 4096"),
    ({"engram_compressed_vocab_size": 65}, "engram_compressed_vocab_size = 65", "vocab_size = 64"),
    ({"engram_pad_token_id": 64}, "engram_pad_token_id = 64", "vocab_size = 64"),
    ({"dspark_noise_token_id": 64}, "dspark_noise_token_id = 64", "vocab_size = 64"),
    ({"dspark_target_layer_ids": [3, 4]}, "dspark_target_layer_ids[1] = 4", "out of range"),
    ({"dspark_target_layer_ids": [0, 2]}, "dspark_target_layer_ids", "in the decoder"),
    ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids is empty", "at least one"),
]


@pytest.mark.parametrize("text, value, rule", CONTRADICTIONS)
def test_contradictions_name_path_value_and_rule(text, value, rule):
    message = refused(tiny_config(**text), value, rule)
    assert message.startswith("text_config.")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
def test_special_tokens_lie_in_the_vocabulary(key):
    config = tiny_config()
    config[key] = 64
    refused(config, f"{key} = 64", "vocab_size = 64")


def test_rope_betas_and_vision_rules():
    config = tiny_config()
    config["text_config"]["rope_scaling"]["beta_fast"] = 1
    refused(config, "rope_scaling.beta_fast = 1", "beta_slow = 1")
    config = published_config()
    config["vision_config"]["num_attention_heads"] = 15
    refused(config, "vision_config.num_attention_heads = 15", "hidden_size = 1024")
    config = published_config()
    config["vision_config"]["patch_size"] = 0
    refused(config, "vision_config.patch_size = 0", "at least 1")
    config = published_config()
    del config["image_token_id"]
    refused(config, "image_token_id is missing", "vision")


def test_a_model_without_drafter_or_engram():
    config = tiny_config(
        num_nextn_predict_layers=0,
        compress_ratios=[0, 2, 1, 1],
        dspark_target_layer_ids=[],
        engram_layer_ids=[],
        engram_num_embeddings=[],
    )
    del config["vision_config"]
    config["image_token_id"] = None
    args = parse_args(config)
    assert not any(role.tap or role.engram for role in args.roles)
    assert args.image_token_id is None


def test_parsing_does_not_change_the_config():
    config = tiny_config()
    before = copy.deepcopy(config)
    parse_args(config)
    assert config == before


BAD_FILES = [
    (b"{", "not valid JSON"),
    (b"[]", "must hold a JSON object"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": {"b": 1, "b": 2}}', "sets b twice"),
    (b"[" * 100_000, "not valid JSON"),
    (b" " * ((1 << 20) + 1), "larger than"),
]


@pytest.mark.parametrize("content, needle", BAD_FILES, ids=[n for _, n in BAD_FILES])
def test_bad_files(tmp_path, content, needle):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(needle)):
        load_args(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_args(tmp_path / "config.json")
