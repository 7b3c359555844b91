"""The weight maps: published tensors -> how other programs name, join and lay them out.

Owns: transformers' V4 files, transformers in memory, fused maps of serving engines.
Knows nothing of: how a map is applied (`spec_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, ModelArgs, V4Args
from deepdraft.checkpoint.spec_weights import Rule, WeightMap
from deepdraft.errors import ConfigError

rename = Rule.rename
_L, _M = "layers.{layer}", "model.layers.{layer}"
_BELOW = [".".join(f"{{{c}}}" for c in "abcdef"[:n]) for n in range(1, 7)]

# Published V4 -> as transformers 5.24 saves it.
_V4_SAVED = (
    rename("embed.weight", "model.embed_tokens.weight"),
    rename("norm.weight", "model.norm.weight"),
    rename("head.weight", "head.weight"),
    *(rename(f"hc_head_{n}", f"model.hc_head.hc_{n}") for n in ("fn", "base", "scale")),
    rename("layers.{layer}.attn.kv_norm.weight", "model.layers.{layer}.attn.norm.weight"),
    *(rename(f"{_L}.{below}", f"{_M}.{below}") for below in _BELOW),
)
_V4_ATTENTION = {
    "attn_sink": "sinks",
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
}
_V4_COMPRESSOR = {
    "ape": "position_bias",
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "kv_norm.weight",
}
_V4_MODULES = (
    rename("embed.weight", "model.embed_tokens.weight"),
    rename("norm.weight", "model.norm.weight"),
    rename("head.weight", "lm_head.weight"),
    *(rename(f"hc_head_{n}", f"model.hc_head.hc_{n}") for n in ("fn", "base", "scale")),
    rename(f"{_L}.attn_norm.weight", f"{_M}.input_layernorm.weight"),
    rename(f"{_L}.ffn_norm.weight", f"{_M}.post_attention_layernorm.weight"),
    *(
        rename(f"{_L}.hc_{part}_{n}", f"{_M}.{part}_hc.{n}")
        for part in ("attn", "ffn")
        for n in ("fn", "base", "scale")
    ),
    *(rename(f"{_L}.attn.{a}", f"{_M}.self_attn.{b}") for a, b in _V4_ATTENTION.items()),
    *(
        rename(f"{_L}.attn.{at}compressor.{a}", f"{_M}.self_attn.compressor.{to}{b}")
        for at, to in (("", ""), ("indexer.", "indexer."))
        for a, b in _V4_COMPRESSOR.items()
    ),
    rename(f"{_L}.ffn.gate.weight", f"{_M}.mlp.gate.weight"),
    rename(f"{_L}.ffn.gate.bias", f"{_M}.mlp.gate.e_score_correction_bias"),
    rename(f"{_L}.ffn.gate.tid2eid", f"{_M}.mlp.gate.tid2eid"),
    *(
        rename(f"{_L}.ffn.shared_experts.{a}.weight", f"{_M}.mlp.shared_experts.{b}_proj.weight")
        for a, b in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
    *(
        rename(f"{_L}.ffn.experts.{{e}}.{a}.weight", f"{_M}.mlp.experts.{{e}}.{b}_proj.weight")
        for a, b in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)

_FUSED = (
    Rule(
        tuple(f"{_M}.self_attn.{n}_proj.weight" for n in "qkv"),
        f"{_M}.self_attn.qkv_proj.weight",
        "concat",
    ),
    Rule(
        tuple(f"{_M}.mlp.{n}_proj.weight" for n in ("gate", "up")),
        f"{_M}.mlp.gate_up_proj.weight",
        "concat",
    ),
)
_FUSED_LATENT = (
    Rule(
        (f"{_M}.self_attn.q_a_proj.weight", f"{_M}.self_attn.kv_a_proj_with_mqa.weight"),
        f"{_M}.self_attn.fused_qkv_a_proj.weight",
        "concat",
    ),
)
_FUSED_EXPERTS = (
    Rule(
        tuple(f"{_M}.mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up")),
        f"{_M}.mlp.shared_experts.gate_up_proj.weight",
        "concat",
    ),
    Rule(
        tuple(f"{_M}.mlp.experts.{{e}}.{n}_proj.weight" for n in ("gate", "up")),
        f"{_M}.mlp.experts.{{e}}.gate_up_proj.weight",
        "concat",
    ),
)
_SAME = (
    rename("model.{a}.weight", "model.{a}.weight"),
    rename("model.hc_head.{a}", "model.hc_head.{a}"),
    rename("lm_head.weight", "lm_head.weight"),
    *(rename(f"{_M}.{below}", f"{_M}.{below}") for below in _BELOW),
)
_ROTARY = f"{_M}.self_attn.rotary_emb.inv_freq"


def transformers_saved(args: ModelArgs) -> WeightMap:
    """Published names -> files that transformers 5.24 saves. Another layout for V4 only."""
    if isinstance(args, V4Args):
        return WeightMap(_V4_SAVED, left_out=("mtp.{*}",))
    return WeightMap(_SAME, left_out=(_ROTARY,))


def transformers_names(
    args: V4Args, names: Iterable[str], *, back: bool = False
) -> dict[str, str] | None:
    """Published name -> name in the files that transformers saves, or back; None where these names
    are not of the layout that is read. Tensors that it has no name for (`mtp.*`) are left out."""
    names = list(names)
    if back and not any(name.startswith("model.") for name in names):
        return None
    rules = _V4_SAVED
    if back:
        rules = tuple(rename(rule.target, rule.sources[0]) for rule in rules)
    whole = WeightMap(rules, left_out=() if back else ("mtp.{*}",))
    plan = whole.plan({name: () for name in names})
    return plan.owner


def transformers_modules(args: ModelArgs) -> WeightMap:
    """Published names -> parameters of transformers' classes, each expert by itself (in memory its
    gate and up maps are one stack: `expert_stacks`)."""
    if isinstance(args, V4Args):
        return WeightMap(_V4_MODULES, left_out=("mtp.{*}",))
    left_out = [_ROTARY]
    left_out += [
        f"model.layers.{args.num_hidden_layers + n}.{{*}}"
        for n in range(getattr(args, "num_nextn_predict_layers", 0))
    ]
    return WeightMap(_SAME, left_out=left_out)


def expert_stacks() -> WeightMap:
    """Experts one by one -> transformers' stacks in memory: [E, 2 F, D] and [E, D, F]."""
    stem, whole = f"{_M}.mlp.experts.{{e}}", f"{_M}.mlp.experts"
    both = (f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight")
    return WeightMap(
        (
            Rule(both, f"{whole}.gate_up_proj", "stack", over="e"),
            Rule((f"{stem}.down_proj.weight",), f"{whole}.down_proj", "stack", over="e"),
            *_SAME,
        )
    )


def engine_fused(args: ModelArgs) -> WeightMap:
    """Published names -> the joined maps that serving engines keep."""
    if isinstance(args, LlamaArgs):
        return WeightMap((*_FUSED, *_SAME), left_out=(_ROTARY,))
    if not isinstance(args, DeepseekV2Args | DeepseekV3Args):
        raise ConfigError(f"no fused map is described for {type(args).__name__}")
    latent = _FUSED_LATENT if args.q_lora_rank is not None else ()
    return WeightMap((_FUSED[1], *latent, *_FUSED_EXPERTS, *_SAME))
