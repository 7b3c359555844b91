"""Keys that the configurations of all families but V4.1 share, in both of their styles.

Owns: special tokens, rotary scaling (`rope_theta` + `rope_scaling` as published, `rope_parameters`
as transformers 5 writes them), FP8 settings, keys without effect.
Knows nothing of: the rest of any family's keys, tensors, torch.
"""

from typing import Any

from deepdraft.arch import Rope
from deepdraft.arch.decoder import yarn_mscale
from deepdraft.checkpoint.section import Section, show
from deepdraft.errors import ConfigError

MAX_LAYERS, MAX_EXPERTS, MAX_END_IDS = 1024, 65536, 64
_MAX_EXPERT_TENSORS = 500_000
"""Several times what the largest published model has; bounds the table of tensors."""

_LEAST_BETA, _MOST_SCALE = 1e-6, 1e6
"""Far beyond any model's; further out, frequencies and products leave floating point."""

_WITHOUT_EFFECT = {
    "aux_loss_alpha": "training only",
    "ep_size": "another program's placement of experts",
    "output_router_logits": "another program's outputs",
    "router_aux_loss_coef": "training only",
    "router_jitter_noise": "training only",
    "seq_aux": "training only",
}
"""Keys of these families that cannot change the forward pass, and why."""


def open_config(config: dict[str, Any], model_type: str, architecture: str) -> Section:
    """The top section, with the checks that every family needs."""
    top = Section(config, "", f"a {model_type}")
    top.fixed("model_type", model_type)
    top.fixed_or_absent("architectures", [architecture])
    top.fixed_or_absent("hidden_act", "silu")
    top.fixed_or_absent("attention_bias", False)
    top.fixed_or_absent("mlp_bias", False)
    top.read.update(_WITHOUT_EFFECT)
    return top


def decoder_fields(top: Section) -> dict[str, Any]:
    """The fields of `DecoderArgs`."""
    fields: dict[str, Any] = {
        name: top.integer(name, low=1)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
        )
    }
    fields["num_hidden_layers"] = top.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    fields["rms_norm_eps"] = top.number("rms_norm_eps")
    fields["tie_word_embeddings"] = top.flag_or("tie_word_embeddings", False)
    fields["bos_token_id"] = top.integer("bos_token_id")
    fields["eos_token_id"], *more = _ends(top)
    fields["more_end_ids"] = tuple(more)
    fields["pad_token_id"] = top.integer_or("pad_token_id", None)
    quant = top.values.get("quantization_config")
    if isinstance(quant, dict) and quant.get("scale_fmt") == "ue8m0":
        fields["scale_fmt"] = "ue8m0"
    named = [("bos_token_id", fields["bos_token_id"])]
    for name, value in named + [("eos_token_id", end) for end in (fields["eos_token_id"], *more)]:
        if value >= fields["vocab_size"]:
            raise ConfigError(f"{name} = {value} must be below vocab_size = {fields['vocab_size']}")
    return fields


def _ends(top: Section) -> tuple[int, ...]:
    """One end token or several, the first of them the one that stands for all."""
    if not isinstance(top.values.get("eos_token_id"), list):
        return (top.integer("eos_token_id"),)
    ends = top.integers("eos_token_id", max_len=MAX_END_IDS)
    if not ends:
        raise ConfigError("eos_token_id must name at least one token, got []")
    return ends


def read_rope(top: Section, *, latent: bool) -> tuple[Rope, list[Section]]:
    """The effective rotary scaling. `latent`: `mscale_all_dim` also scales the softmax (MLA)."""
    if top.has("rope_parameters"):
        section = top.section("rope_parameters")
        theta = section.number("rope_theta", low=1.0, above=True)
        agree(top, "rope_theta", theta, "rope_parameters.rope_theta")
        if top.has("rope_scaling"):
            raise ConfigError(
                "config.json sets both rope_parameters and rope_scaling; remove one of them"
            )
        top.read.add("rope_scaling")
        return scaling(section, theta, latent=latent), [section]
    top.read.add("rope_theta")
    theta = top.number("rope_theta", low=1.0, above=True) if top.has("rope_theta") else 10000.0
    top.read.update(("rope_scaling", "rope_parameters"))
    if not top.has("rope_scaling"):
        return Rope(theta=theta), []
    section = top.section("rope_scaling")
    return scaling(section, theta, latent=latent), [section]


def agree(section: Section, key: str, value: object, source: str) -> None:
    """Raises ConfigError where `key` is there with another value than `source` makes it."""
    section.read.add(key)
    if section.has(key) and section.values[key] != value:
        raise ConfigError(
            f"{section.where(key)} = {show(section.values[key])} contradicts {source}, which makes "
            f"it {show(value)}; correct one of them"
        )


def scaling(
    section: Section, theta: float, *, latent: bool, attention_factor: float | None = None
) -> Rope:
    """A `Rope` from one scaling object; `rope_type` and its older name `type` must agree.

    `attention_factor`: the family's own value where the object has none (YaRN derives it).
    """
    kinds = [k for k in ("rope_type", "type") if section.has(k)]
    section.read.update(("rope_type", "type"))
    if not kinds:
        raise ConfigError(f"{section.where('rope_type')} is missing; supported: {_KINDS}")
    kind = section.value(kinds[0])
    if not isinstance(kind, str) or kind not in _KINDS:
        supported = " or ".join(show(k) for k in _KINDS)
        raise ConfigError(
            f"{section.where(kinds[0])} = {show(kind)} is not supported; supported: {supported}"
        )
    agree(section, kinds[-1], kind, section.where("rope_type"))
    if kind == "default":
        return Rope(theta=theta)
    factor = section.number("factor", low=1.0)
    if kind == "linear":
        section.integer_or("original_max_position_embeddings", None, low=1)
        return Rope(theta=theta, kind="linear", factor=factor)
    original = section.integer("original_max_position_embeddings", low=1)
    if kind == "llama3":
        low = section.number("low_freq_factor", above=True)
        high = section.number("high_freq_factor", low=low, above=True)
        return Rope(
            theta=theta,
            kind="llama3",
            factor=factor,
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    fast = section.number_or("beta_fast", 32.0) or 32.0
    slow = section.number_or("beta_slow", 1.0) or 1.0
    if slow < _LEAST_BETA:
        raise ConfigError(
            f"{section.where('beta_slow')} = {slow:g} must be at least {_LEAST_BETA:g} turns"
        )
    if fast <= slow:
        raise ConfigError(
            f"{section.where('beta_fast')} = {fast:g} must be above beta_slow = {slow:g}"
        )
    section.fixed_or_absent("truncate", True)
    mscale = section.number_or("mscale", 0.0)
    mscale_all_dim = section.number_or("mscale_all_dim", 0.0)
    if section.has("attention_factor"):
        scale = section.number("attention_factor", above=True)
    elif attention_factor is not None:
        scale = attention_factor
    elif mscale and mscale_all_dim:
        scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        scale = yarn_mscale(factor)
    section.read.add("attention_factor")
    softmax = yarn_mscale(factor, mscale_all_dim) ** 2 if latent and mscale_all_dim else 1.0
    if not 1.0 / _MOST_SCALE <= scale <= _MOST_SCALE or softmax > _MOST_SCALE:
        raise ConfigError(
            f"{section.path} scales cos and sin by {scale:g} and the softmax by {softmax:g}; "
            f"supported: at most {_MOST_SCALE:g}. Compare factor, mscale, mscale_all_dim and "
            "attention_factor with the published config.json"
        )
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scale,
        softmax_factor=softmax,
    )


_KINDS = ("default", "linear", "yarn", "llama3")


def read_quantization(top: Section) -> list[Section]:
    """Checks quantization_config where there is one: FP8 in blocks of 128 x 128.

    Which tensors are quantised is read from the files.
    """
    top.read.add("quantization_config")
    if not top.has("quantization_config"):
        return []
    quant = top.section("quantization_config")
    quant.fixed("quant_method", "fp8")
    quant.fixed_or_absent("activation_scheme", "dynamic")
    quant.fixed("weight_block_size", [128, 128])
    quant.fixed_or_absent("fmt", "e4m3")
    quant.fixed_or_absent("scale_fmt", "ue8m0", "float")
    quant.fixed_or_absent("expert_dtype", "fp4", "fp8")
    quant.read.add("modules_to_not_convert")
    return [quant]


def check_expert_count(layers: int, experts: int) -> None:
    """Refuses sizes whose table of tensors would not be of this world."""
    count = 3 * layers * experts
    if count > _MAX_EXPERT_TENSORS:
        raise ConfigError(
            f"num_hidden_layers = {layers} with n_routed_experts = {experts} makes {count} expert "
            f"tensors; supported: at most {_MAX_EXPERT_TENSORS}"
        )


def require_even(name: str, value: int) -> None:
    """Rotary widths consist of pairs."""
    if value % 2:
        raise ConfigError(f"{name} = {value} must be even: rotary channels turn in pairs")
