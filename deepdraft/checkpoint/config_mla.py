"""Configurations of the MLA families (V2, V3, V3.2) as checked args."""

from collections.abc import Iterable
from typing import Any

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, Router
from deepdraft.checkpoint.config_decoder import (
    MAX_EXPERTS,
    MAX_LAYERS,
    agree,
    check_expert_count,
    decoder_fields,
    open_config,
    read_quantization,
    read_rope,
    require_even,
)
from deepdraft.checkpoint.section import Section, refuse_unknown
from deepdraft.errors import ConfigError


def parse_v2(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> DeepseekV2Args:
    """V2, V2-Lite, Coder-V2. Raises ConfigError."""
    top = open_config(config, "deepseek_v2", "DeepseekV2ForCausalLM")
    fields, sections = _shared(top)
    top.fixed_or_absent("topk_method", "greedy", "group_limited_greedy")
    top.fixed_or_absent("scoring_func", "softmax")
    # No effect on this family in its reference; other engines read it.
    top.flag_or("norm_topk_prob", False)
    grouped = top.values.get("topk_method") == "group_limited_greedy"
    router = _router(top, scoring="softmax", grouped=grouped, normalise=False, group_best=1)
    args = DeepseekV2Args(**fields, rope_interleave=True, router=router)
    refuse_unknown([top, *sections], frozenset(accept_unknown))
    return args


def parse_v3(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> DeepseekV3Args:
    """V3, R1, V3.1. Raises ConfigError."""
    top = open_config(config, "deepseek_v3", "DeepseekV3ForCausalLM")
    return _v3(top, {}, frozenset(accept_unknown))


def parse_v32(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> DeepseekV3Args:
    """V3.2: V3 with an indexer in every layer. Raises ConfigError."""
    top = open_config(config, "deepseek_v32", "DeepseekV32ForCausalLM")
    index = {n: top.integer(n, low=1) for n in ("index_n_heads", "index_head_dim", "index_topk")}
    layers = top.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    top.fixed_or_absent("layer_types", ["indexed_attention"] * layers)
    dense = min(top.integer("first_k_dense_replace", high=MAX_LAYERS), layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    top.fixed_or_absent("mlp_layer_types", kinds)
    rotary = top.integer("qk_rope_head_dim", low=1)
    if index["index_head_dim"] < rotary:
        raise ConfigError(
            f"index_head_dim = {index['index_head_dim']} must be at least "
            f"qk_rope_head_dim = {rotary}, the part of it that is rotated"
        )
    if top.integer_or("q_lora_rank", None) is None:
        raise ConfigError("q_lora_rank is missing; the indexer of V3.2 reads the query latent")
    return _v3(top, index, frozenset(accept_unknown))


def _v3(top: Section, index: dict[str, Any], accepted: frozenset[str]) -> DeepseekV3Args:
    fields, sections = _shared(top)
    # transformers 5 leaves the first two out where it saves a model.
    top.fixed_or_absent("topk_method", "noaux_tc")
    top.fixed_or_absent("scoring_func", "sigmoid")
    args = DeepseekV3Args(
        **fields,
        **index,
        rope_interleave=top.flag_or("rope_interleave", True),
        num_nextn_predict_layers=top.integer_or("num_nextn_predict_layers", 0, high=16) or 0,
        router=_router(
            top,
            scoring="sigmoid",
            grouped=True,
            normalise=top.flag_or("norm_topk_prob", True),
            group_best=2,
        ),
    )
    refuse_unknown([top, *sections], accepted)
    return args


def _shared(top: Section) -> tuple[dict[str, Any], list[Section]]:
    """The fields of `MlaArgs` but routing."""
    rope, sections = read_rope(top, latent=True)
    sections += read_quantization(top)
    fields = decoder_fields(top)
    fields |= {
        name: top.integer(name, low=1)
        for name in (
            "intermediate_size",
            "moe_intermediate_size",
            "n_shared_experts",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    }
    fields["first_k_dense_replace"] = top.integer("first_k_dense_replace", high=MAX_LAYERS)
    fields["q_lora_rank"] = top.integer_or("q_lora_rank", None, low=1)
    top.fixed_or_absent("moe_layer_freq", 1)
    require_even("qk_rope_head_dim", fields["qk_rope_head_dim"])
    nope, rotary = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
    agree(top, "num_key_value_heads", fields["num_attention_heads"], "num_attention_heads")
    agree(top, "head_dim", rotary, "qk_rope_head_dim")
    agree(top, "qk_head_dim", nope + rotary, "qk_nope_head_dim + qk_rope_head_dim")
    return fields | {"rope": rope}, sections


def _router(
    top: Section, *, scoring: Any, grouped: bool, normalise: bool, group_best: int
) -> Router:
    experts = top.integer("n_routed_experts", low=1, high=MAX_EXPERTS)
    picks = top.integer("num_experts_per_tok", low=1, high=MAX_EXPERTS)
    groups = top.integer_or("n_group", 1, low=1) or 1
    kept = top.integer_or("topk_group", 1, low=1) or 1
    if not grouped:
        groups = kept = 1
    check_expert_count(top.integer("num_hidden_layers", high=MAX_LAYERS), experts)
    if experts % groups or experts // groups < group_best:
        raise ConfigError(
            f"n_group = {groups} must divide n_routed_experts = {experts} into groups of at least "
            f"{group_best}"
        )
    if kept > groups:
        raise ConfigError(f"topk_group = {kept} must be at most n_group = {groups}")
    if picks > kept * (experts // groups):
        raise ConfigError(
            f"num_experts_per_tok = {picks} must be at most the {kept * (experts // groups)} "
            f"experts that the kept groups hold"
        )
    return Router(
        scoring=scoring,
        experts=experts,
        picks=picks,
        scale=top.number("routed_scaling_factor", above=True),
        biased=scoring == "sigmoid",
        normalise=normalise,
        groups=groups,
        kept_groups=kept,
        group_best=group_best,
    )
