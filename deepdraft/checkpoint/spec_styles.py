"""The styles in which a family's config.json is written, as tables of what moves where.

Owns: published style <-> the style of transformers 5, and keys that other engines need. Styles say
the same thing: `ModelSpec.of(written(c, s))` has the effective values of `ModelSpec.of(c)`.
Knows nothing of: what a key means for the model.

V4.1 has one style only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepdraft.errors import ConfigError

Style = Literal["published", "transformers5", "vllm", "lmdeploy"]
STYLES: tuple[Style, ...] = get_args(Style)
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Move:
    """Keys of the published style that are other keys in transformers 5."""

    published: tuple[str, ...]
    five: tuple[str, ...]
    to_five: Callable[[Config], Config]
    """Published values (absent ones left out) -> values of `five`."""
    to_published: Callable[[Config], Config]


_KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
_RATIOS = {name: ratio for ratio, name in _KINDS.items()}
_NO_SCALING = {"rope_type": "default"}


def _rope_five(values: Config) -> Config:
    if not values:
        return {}
    theta, scaling = values.get("rope_theta", 10000.0), values.get("rope_scaling")
    return {"rope_parameters": {"rope_theta": theta, **_typed(scaling)}}


def _typed(scaling: Config | None) -> Config:
    """A scaling object with the newer name of its kind."""
    if not scaling:
        return _NO_SCALING
    rest = {k: v for k, v in scaling.items() if k not in ("type", "rope_type")}
    return {"rope_type": scaling.get("rope_type", scaling.get("type")), **rest}


def _untyped(scaling: Config, *leave_out: str) -> Config | None:
    rest = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", *leave_out)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return None if kind == "default" else {"type": kind, **rest}


def _rope_published(values: Config) -> Config:
    both = values.get("rope_parameters")
    if not both:
        return {}
    scaling = _untyped(both, "rope_theta")
    return {"rope_theta": both["rope_theta"]} | ({"rope_scaling": scaling} if scaling else {})


def _ropes_five(values: Config) -> Config:
    # Repeated here, as transformers takes the rotary width from it.
    share = {"partial_rotary_factor": values["qk_rope_head_dim"] / values["head_dim"]}
    main = {"rope_theta": values["rope_theta"], **share, **_NO_SCALING}
    scaling = values.get("rope_scaling")
    compress = {"rope_theta": values["compress_rope_theta"], **share, **_typed(scaling)}
    if compress["rope_type"] == "yarn":
        compress.setdefault("attention_factor", 1.0)  # there YaRN's own is not the default
    return {"rope_parameters": {"main": main, "compress": compress}}


def _ropes_published(values: Config) -> Config:
    parts = values.get("rope_parameters")
    if not parts:
        return {}
    if _untyped(parts["main"], "rope_theta", "partial_rotary_factor"):
        raise ConfigError(
            "rope_parameters.main has a scaling of its own, which the published style cannot say"
        )
    scaling = _untyped(parts["compress"], "rope_theta", "partial_rotary_factor")
    return {
        "rope_theta": parts["main"]["rope_theta"],
        "compress_rope_theta": parts["compress"]["rope_theta"],
    } | ({"rope_scaling": scaling} if scaling else {})


def _layers_five(values: Config) -> Config:
    if "compress_ratios" not in values:
        return {}
    ratios = values["compress_ratios"][: values["num_hidden_layers"]]
    return {"layer_types": [_KINDS[r] for r in ratios]}


def _layers_published(values: Config) -> Config:
    if "layer_types" not in values:
        return {}
    for name, ratio in values.get("compress_rates", {}).items():
        if _RATIOS.get(name) != ratio:
            raise ConfigError(
                f"compress_rates.{name} = {ratio}: the published style has {_RATIOS.get(name)} only"
            )
    return {"compress_ratios": [_RATIOS[n] for n in values["layer_types"]]}


def _hash_five(values: Config) -> Config:
    count, layers = values["num_hash_layers"], values["num_hidden_layers"]
    return {"mlp_layer_types": ["hash_moe"] * count + ["moe"] * (layers - count)}


def _hash_published(values: Config) -> Config:
    kinds = values.get("mlp_layer_types")
    return {} if kinds is None else {"num_hash_layers": kinds.count("hash_moe")}


def _renamed(old: str, new: str) -> Move:
    return Move(
        (old,),
        (new,),
        lambda v: {new: v[old]} if old in v else {},
        lambda v: {old: v[new]} if new in v else {},
    )


def _same_width(values: Config) -> Config:
    return {k: v for k, v in values.items() if k == "qk_rope_head_dim"}


def _width_published(values: Config) -> Config:
    """Channels that turn, where only their share is written."""
    share = values.get("partial_rotary_factor")
    if share is None or "qk_rope_head_dim" in values:
        return {}
    return {"qk_rope_head_dim": int(values["head_dim"] * share)}


_DTYPE = _renamed("torch_dtype", "dtype")
_ROPE = Move(("rope_theta", "rope_scaling"), ("rope_parameters",), _rope_five, _rope_published)
_V4 = (
    Move(
        ("rope_theta", "compress_rope_theta", "rope_scaling"),
        ("rope_parameters",),
        _ropes_five,
        _ropes_published,
    ),
    Move(("compress_ratios",), ("layer_types", "compress_rates"), _layers_five, _layers_published),
    Move(("num_hash_layers",), ("mlp_layer_types",), _hash_five, _hash_published),
    Move(("qk_rope_head_dim",), ("partial_rotary_factor",), _same_width, _width_published),
    _DTYPE,
)
MOVES: dict[str, tuple[Move, ...]] = {
    "llama": (_ROPE, _DTYPE),
    "deepseek_v2": (_ROPE, _DTYPE),
    "deepseek_v3": (_ROPE, _DTYPE),
    "deepseek_v32": (_ROPE, _DTYPE),
    "deepseek_v4": _V4,
    "deepseek_v41": (),
}
_REPEATED = ("num_hidden_layers", "qk_rope_head_dim", "head_dim")
"""Keys that a move reads beside its own."""

_DERIVED = {
    "deepseek_v2": ("head_dim", "qk_head_dim"),
    "deepseek_v3": ("head_dim", "qk_head_dim"),
    "deepseek_v32": ("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types"),
    "deepseek_v4": ("partial_rotary_factor",),
}
"""Keys of transformers 5 that repeat what others say."""

_V3_NEEDS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
ENGINE_NEEDS: dict[str, dict[str, Config]] = {
    "vllm": {"deepseek_v3": _V3_NEEDS, "deepseek_v32": _V3_NEEDS},
    "lmdeploy": {"deepseek_v3": _V3_NEEDS, "deepseek_v32": _V3_NEEDS},
}
"""Keys without which another engine fails or loses a tensor, though the family has one value only;
transformers leaves them out when it saves."""


def missing_for(engine: str, config: Config) -> Config:
    """Keys that `engine` needs and `config` lacks, with their values."""
    needed = ENGINE_NEEDS.get(engine, {}).get(config.get("model_type", ""), {})
    return {key: value for key, value in needed.items() if config.get(key) is None}


def to_published(config: Config) -> Config:
    """A configuration of any style in published keys. The input has been checked by its reader."""
    config = copy.deepcopy(config)
    kind = config.get("model_type", "")
    for move in MOVES[kind]:
        values = {k: config[k] for k in (*move.five, *_REPEATED) if config.get(k) is not None}
        new = move.to_published(values)
        if new:
            for key in move.five:
                config.pop(key, None)
            config |= new
    for key in _DERIVED.get(kind, ()):
        config.pop(key, None)
    return {k: v for k, v in config.items() if v is not None}


def written(published: Config, style: Style) -> Config:
    """A published configuration in `style`."""
    if style == "published":
        return copy.deepcopy(published)
    if style in ENGINE_NEEDS:
        return copy.deepcopy(published) | missing_for(style, published)
    if style not in STYLES:
        raise ConfigError(f"style {style!r} is not known; known: {', '.join(STYLES)}")
    config = copy.deepcopy(published)
    for move in MOVES[config["model_type"]]:
        values = {k: config[k] for k in (*move.published, *_REPEATED) if config.get(k) is not None}
        new = move.to_five(values)
        for key in move.published:
            config.pop(key, None)
        config |= new
    return config
