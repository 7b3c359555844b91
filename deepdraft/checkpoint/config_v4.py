"""A DeepSeek-V4 configuration as checked `V4Args`, in both of its styles.

Published: `compress_ratios`, `num_hash_layers`, `rope_theta`, `compress_rope_theta`,
`rope_scaling`. transformers 5: `layer_types`, `compress_rates`, `mlp_layer_types` and
`rope_parameters` with a part for each of the two rotary bases.
"""

from collections.abc import Iterable
from typing import Any

from deepdraft.arch import Rope, Router, V4Args
from deepdraft.arch.v4 import AttentionKind
from deepdraft.checkpoint.config_decoder import (
    MAX_EXPERTS,
    agree,
    check_expert_count,
    decoder_fields,
    open_config,
    read_quantization,
    require_even,
    scaling,
)
from deepdraft.checkpoint.section import Section, refuse_unknown, show
from deepdraft.errors import ConfigError

_BY_RATIO: dict[int, AttentionKind] = {0: "window", 4: "csa", 128: "hca"}
_BY_NAME: dict[str, AttentionKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


def parse_v4(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> V4Args:
    """Every key is read, without effect, or refused. Raises ConfigError."""
    top = open_config(config, "deepseek_v4", "DeepseekV4ForCausalLM")
    fields = decoder_fields(top)
    top.fixed_or_absent("num_key_value_heads", 1)
    top.fixed_or_absent("n_shared_experts", 1)
    top.fixed_or_absent("scoring_func", "sqrtsoftplus")
    top.fixed_or_absent("topk_method", "noaux_tc")
    top.fixed_or_absent("norm_topk_prob", True)
    top.fixed_or_absent("n_group", 1)
    top.fixed_or_absent("topk_group", 1)
    top.fixed_or_absent("moe_layer_freq", 1)
    top.fixed_or_absent("expert_dtype", "fp4", "fp8")
    layers, drafter = (
        fields["num_hidden_layers"],
        top.integer_or("num_nextn_predict_layers", 0, high=16),
    )
    assert drafter is not None
    fields |= {
        name: top.integer(name, low=1)
        for name in (
            "moe_intermediate_size",
            "head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "o_groups",
            "sliding_window",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
        )
    }
    fields["hc_mult"] = top.integer("hc_mult", low=1, high=64)
    fields["hc_sinkhorn_iters"] = top.integer("hc_sinkhorn_iters", low=1, high=1000)
    fields |= _drafter(top, fields, drafter)
    sections = read_quantization(top)
    kinds, csa_ratio, hca_ratio, more = _attention(top, layers, drafter)
    sections += more
    rotary = _rotary_width(top, fields["head_dim"])
    rope, compress_rope, more = _ropes(top, rotary / fields["head_dim"])
    sections += more
    args = V4Args(
        **fields,
        qk_rope_head_dim=rotary,
        n_shared_experts=1,
        swiglu_limit=top.number("swiglu_limit", above=True),
        hc_eps=top.number("hc_eps"),
        attention=kinds,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        num_hash_layers=_hash_layers(top, layers),
        rope=rope,
        compress_rope=compress_rope,
        num_nextn_predict_layers=drafter,
        router=Router(
            scoring="sqrtsoftplus",
            experts=top.integer("n_routed_experts", low=1, high=MAX_EXPERTS),
            picks=top.integer("num_experts_per_tok", low=1, high=MAX_EXPERTS),
            scale=top.number("routed_scaling_factor", above=True),
            biased=True,
            normalise=True,
        ),
    )
    refuse_unknown([top, *sections], frozenset(accept_unknown))
    _check(args)
    return args


def _drafter(top: Section, fields: dict[str, Any], drafter: int) -> dict[str, Any]:
    """Sizes of DSpark layers; where `dspark_block_size` is missing, drafter layers predict the
    next token."""
    top.read.update(key for key in top.values if key.startswith("dspark_"))
    if not drafter:
        return {}
    layers, vocabulary = fields["num_hidden_layers"], fields["vocab_size"]
    ratios = top.values.get("compress_ratios")
    compresses = isinstance(ratios, list) and any(ratios[layers:])
    if not top.has("dspark_block_size"):
        return {"drafter_compresses": compresses}
    if compresses:
        raise ConfigError(
            f"compress_ratios[{layers}:] = {show(ratios[layers:])} must be 0: DSpark layers have "
            "windows only"
        )
    targets = top.integers("dspark_target_layer_ids")
    if not targets or list(targets) != sorted(set(targets)) or targets[-1] >= layers:
        raise ConfigError(
            f"dspark_target_layer_ids = {show(list(targets))} must rise and lie in 0..{layers - 1}"
        )
    return {
        "dspark_block_size": top.integer("dspark_block_size", low=1, high=64),
        "dspark_noise_token_id": top.integer("dspark_noise_token_id", high=vocabulary - 1),
        "dspark_target_layer_ids": tuple(targets),
        "dspark_markov_rank": top.integer("dspark_markov_rank", low=1, high=MAX_EXPERTS),
    }


def _attention(
    top: Section, layers: int, drafter: int
) -> tuple[tuple[AttentionKind, ...], int, int, list[Section]]:
    """Kind of each layer, and the two ratios."""
    ratios, sections = {"csa": 4, "hca": 128}, []
    top.read.update(("compress_ratios", "layer_types", "compress_rates"))
    if top.has("compress_rates"):
        section = top.section("compress_rates")
        sections.append(section)
        for name, kind in _BY_NAME.items():
            if kind != "window":
                value = section.integer_or(name, ratios[kind], low=1)
                assert value is not None
                ratios[kind] = value
    found: list[tuple[AttentionKind, ...]] = []
    if top.has("compress_ratios"):
        values = top.integers("compress_ratios")
        found.append(tuple(_lookup("compress_ratios", values, _BY_RATIO, layers, drafter)))
    if top.has("layer_types"):
        names = top.value("layer_types")
        found.append(tuple(_lookup("layer_types", names, _BY_NAME, layers, 0)))
    if not found:
        raise ConfigError("compress_ratios is missing; it says which layers compress their past")
    if found[0] != found[-1]:
        raise ConfigError("compress_ratios and layer_types contradict each other; remove one")
    return found[0], ratios["csa"], ratios["hca"], sections


def _lookup(
    key: str, values: Any, table: dict[Any, AttentionKind], layers: int, drafter: int
) -> list[AttentionKind]:
    if not isinstance(values, list | tuple) or len(values) not in (layers, layers + drafter):
        raise ConfigError(
            f"{key} must have one entry for each of num_hidden_layers = {layers} layers, "
            f"got {show(values)}"
        )
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str) or value not in table:
            supported = ", ".join(show(k) for k in table)
            raise ConfigError(f"{key}[{index}] = {show(value)}; supported: {supported}")
    return [table[value] for value in values[:layers]]


def _hash_layers(top: Section, layers: int) -> int:
    top.read.update(("num_hash_layers", "mlp_layer_types"))
    if not top.has("mlp_layer_types"):
        return top.integer("num_hash_layers", high=layers)
    kinds = top.value("mlp_layer_types")
    hashed = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        raise ConfigError(
            f"mlp_layer_types must be hash_moe for the first layers and moe for the rest of the "
            f"{layers}, got {show(kinds)}"
        )
    agree(top, "num_hash_layers", hashed, "mlp_layer_types")
    return hashed


def _rotary_width(top: Section, head_dim: int) -> int:
    width = top.integer_or("qk_rope_head_dim", None, low=1)
    if width is None:
        share = top.number("partial_rotary_factor", above=True)
        width = int(head_dim * share)
    require_even("qk_rope_head_dim", width)
    agree(top, "partial_rotary_factor", width / head_dim, "qk_rope_head_dim / head_dim")
    return width


def _ropes(top: Section, share: float) -> tuple[Rope, Rope, list[Section]]:
    """Rotation of window-only layers, and of those that compress."""
    top.read.update(("rope_parameters", "rope_scaling"))
    if top.has("rope_parameters"):
        both = top.section("rope_parameters")
        parts = [both.section("main"), both.section("compress")]
        ropes = []
        for part, key in zip(parts, ("rope_theta", "compress_rope_theta"), strict=True):
            theta = part.number("rope_theta", low=1.0, above=True)
            agree(top, key, theta, part.where("rope_theta"))
            agree(part, "partial_rotary_factor", share, "qk_rope_head_dim / head_dim")
            ropes.append(scaling(part, theta, latent=False, attention_factor=1.0))
        return ropes[0], ropes[1], [both, *parts]
    main = Rope(theta=top.number("rope_theta", low=1.0, above=True))
    theta = top.number("compress_rope_theta", low=1.0, above=True)
    if not top.has("rope_scaling"):
        return main, Rope(theta=theta), []
    section = top.section("rope_scaling")
    return main, scaling(section, theta, latent=False, attention_factor=1.0), [section]


def _check(args: V4Args) -> None:
    layers = args.num_hidden_layers + args.num_nextn_predict_layers
    check_expert_count(layers, args.router.experts)
    if args.num_attention_heads % args.o_groups:
        raise ConfigError(
            f"o_groups = {args.o_groups} must divide num_attention_heads = "
            f"{args.num_attention_heads}"
        )
    if args.qk_rope_head_dim > min(args.head_dim, args.index_head_dim):
        raise ConfigError(
            f"qk_rope_head_dim = {args.qk_rope_head_dim} must be at most head_dim = "
            f"{args.head_dim} and index_head_dim = {args.index_head_dim}"
        )
    if args.router.picks > args.router.experts:
        raise ConfigError(
            f"num_experts_per_tok = {args.router.picks} must be at most n_routed_experts = "
            f"{args.router.experts}"
        )
