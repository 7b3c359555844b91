"""The published `config.json` of DeepSeek-V4.1 as checked `V41Args`.

Owns: which keys are read, which are accepted because they cannot change the forward pass, and which
values contradict each other. Every message has the key's path, the value and what is supported.
Knows nothing of: tensors, torch, files other than config.json.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from deepdraft.checkpoint.rules import check_args
from deepdraft.checkpoint.section import (
    ACCEPTED_KEYS,
    MAX_CONFIG_BYTES,
    MAX_INT,
    Section,
    read_config,
    refuse_unknown,
)

__all__ = ["ACCEPTED_KEYS", "MAX_CONFIG_BYTES", "load_args", "parse_args", "read_config"]

_MAX_ENGRAM_ROWS = 1 << 40

_VISION_INTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "rope_theta",
    "downsample_ratio",
    "max_image_tokens",
    "min_pixels",
)


def load_args(path: Path, *, accept_unknown: Iterable[str] = ()) -> V41Args:
    """`V41Args` of a config.json file. Raises ConfigError."""
    return parse_args(read_config(path), accept_unknown=accept_unknown)


def parse_args(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> V41Args:
    """`V41Args` of a published config (nested objects).

    Every key is read, listed in `ACCEPTED_KEYS`, or refused; `accept_unknown` names key paths
    (`text_config.some_key`) that may pass unread. Raises ConfigError.
    """
    top = Section(config, "", "a DeepSeek-V4.1")
    top.fixed("model_type", "deepseek_v41")
    if top.has("architectures"):
        top.fixed("architectures", ["DeepseekV41ForCausalLM"])
    sections = [top, *_check_quantization(top)]
    text = top.section("text_config")
    rope = text.section("rope_scaling")
    sections += [text, rope]
    _check_fixed_behaviour(text, rope)
    vision: tuple[tuple[str, int], ...] = ()
    if top.has("vision_config"):
        section = top.section("vision_config")
        sections.append(section)
        vision = _vision(section)
    args = V41Args(vision=vision, **_special_tokens(top), **_sizes(text), **_rope(text, rope))
    refuse_unknown(sections, frozenset(accept_unknown))
    check_args(args)
    return args


def _check_quantization(top: Section) -> list[Section]:
    quant = top.section("quantization_config")
    quant.fixed("quant_method", "fp8")
    quant.fixed("activation_scheme", "dynamic")
    quant.fixed("weight_block_size", [32, 32])
    quant.fixed("scale_fmt", "ue8m0")
    quant.fixed("expert_dtype", "fp4")
    if quant.has("fmt"):
        quant.fixed("fmt", "e4m3")
    return [quant]


def _check_fixed_behaviour(text: Section, rope: Section) -> None:
    text.fixed("model_type", "deepseek_v41_text")
    text.fixed("num_key_value_heads", 1)
    text.fixed("n_shared_experts", 1)
    text.fixed("hidden_act", "silu")
    text.fixed("attention_bias", False)
    text.fixed("tie_word_embeddings", False)
    text.fixed("scoring_func", "sqrtsoftplus")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("norm_topk_prob", True)
    rope.fixed("rope_type", "yarn")
    if rope.has("type"):  # the older name of rope_type
        rope.fixed("type", "yarn")


def _special_tokens(top: Section) -> dict[str, Any]:
    return {
        "bos_token_id": top.integer("bos_token_id"),
        "eos_token_id": top.integer("eos_token_id"),
        "pad_token_id": top.integer("pad_token_id"),
        "image_token_id": _optional_int(top, "image_token_id"),
    }


def _optional_int(section: Section, key: str) -> int | None:
    section.read.add(key)
    return section.integer(key) if section.has(key) else None


def _sizes(text: Section) -> dict[str, Any]:
    positive = {
        name: text.integer(name, low=1)
        for name in (
            "vocab_size",
            "hidden_size",
            "moe_intermediate_size",
            "num_attention_heads",
            "head_dim",
            "qk_rope_head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "o_groups",
            "max_position_embeddings",
            "sliding_window",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "candidate_topk_blocks",
            "candidate_block_size",
            "engram_n_heads",
            "engram_head_dim",
            "engram_compressed_vocab_size",
            "dspark_block_size",
            "dspark_markov_rank",
        )
    }
    bounded = {
        name: text.integer(name, low=low, high=high)
        for name, low, high in (
            ("num_hidden_layers", 1, 1024),
            ("num_nextn_predict_layers", 0, 64),
            ("n_routed_experts", 1, 65536),
            ("num_experts_per_tok", 1, 1024),
            ("dspark_n_routed_experts", 1, 65536),
            ("dspark_num_experts_per_tok", 1, 1024),
            ("hc_mult", 1, 64),
            ("hc_sinkhorn_iters", 1, 1000),
            ("engram_max_ngram_size", 2, 16),
            ("engram_vocab_size", 2, 1 << 28),
            ("candidate_source_layer_id", 0, 1023),
            ("engram_pad_token_id", 0, MAX_INT),
            ("dspark_noise_token_id", 0, MAX_INT),
        )
    }
    lists = {
        name: text.integers(name)
        for name in (
            "compress_ratios",
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "engram_layer_ids",
            "dspark_target_layer_ids",
        )
    }
    lists["engram_num_embeddings"] = text.integers("engram_num_embeddings", high=_MAX_ENGRAM_ROWS)
    gate_temp = text.number("gate_temp", above=True) if text.has("gate_temp") else 1.0
    text.read.add("gate_temp")
    return {
        **positive,
        **bounded,
        **lists,
        "gate_temp": gate_temp,
        "swiglu_limit": text.number("swiglu_limit", above=True),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "routed_scaling_factor": text.number("routed_scaling_factor", above=True),
        "hc_eps": text.number("hc_eps"),
    }


def _rope(text: Section, rope: Section) -> dict[str, Any]:
    return {
        "rope_theta": text.number("rope_theta", low=1.0, above=True),
        "compress_rope_theta": text.number("compress_rope_theta", low=1.0, above=True),
        "rope_factor": rope.number("factor", low=1.0),
        "rope_beta_fast": rope.number("beta_fast", above=True),
        "rope_beta_slow": rope.number("beta_slow", above=True),
        "rope_original_max_positions": rope.integer("original_max_position_embeddings", low=1),
    }


def _vision(vision: Section) -> tuple[tuple[str, int], ...]:
    """Sizes of the vision tower; empty where the tower has no layers (text-only checkpoint)."""
    vision.read.add("max_wh_ratio")
    vision.read.add("model_type")
    sizes = tuple((key, vision.integer(key)) for key in _VISION_INTS)
    return sizes if dict(sizes)["num_hidden_layers"] else ()
