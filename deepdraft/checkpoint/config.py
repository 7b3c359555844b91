"""The published `config.json` of DeepSeek-V4.1 as checked `V41Args`.

Owns: which keys are read, which are accepted because they cannot change the forward pass, and which
values contradict each other. Every message has the key's path, the value and what is supported.
Knows nothing of: tensors, torch, files other than config.json.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from deepdraft.checkpoint.rules import check_args
from deepdraft.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
_MAX_INT = 1 << 24
_MAX_ENGRAM_ROWS = 1 << 40
_MAX_LIST = 4096

ACCEPTED_KEYS: dict[str, str] = {
    "dtype": "storage types are read from the files",
    "torch_dtype": "storage types are read from the files",
    "transformers_version": "which release wrote the file",
    "_name_or_path": "where the file came from",
    "_attn_implementation": "another program's kernel choice",
    "_commit_hash": "which revision the file came from",
    "auto_map": "remote code, which is never run",
    "use_cache": "a state is always kept",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "pretraining_tp": "training only",
    "output_attentions": "another program's outputs",
    "output_hidden_states": "another program's outputs",
    "return_dict": "another program's outputs",
    "is_encoder_decoder": "not a setting of this architecture",
    "chunk_size_feed_forward": "another program's memory setting",
    "id2label": "classification heads only",
    "label2id": "classification heads only",
    "problem_type": "classification heads only",
}
"""Keys of any section that cannot change the forward pass, and why. Their values are not read."""

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


class _Section:
    """One JSON object of the file; remembers which of its keys were read."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{path or 'config.json'} must be a JSON object, got {_show(values)}")
        self.values: dict[str, Any] = values
        self.path = path
        self.read: set[str] = set()

    def where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def value(self, key: str) -> Any:
        self.read.add(key)
        if key not in self.values:
            raise ConfigError(f"{self.where(key)} is missing; a DeepSeek-V4.1 config.json sets it")
        return self.values[key]

    def section(self, key: str) -> "_Section":
        return _Section(self.value(key), self.where(key))

    def integer(self, key: str, *, low: int = 0, high: int = _MAX_INT) -> int:
        return self._integer(self.value(key), self.where(key), low, high)

    def integers(
        self, key: str, *, low: int = 0, high: int = _MAX_INT, max_len: int = _MAX_LIST
    ) -> tuple[int, ...]:
        values = self.value(key)
        if not isinstance(values, list) or len(values) > max_len:
            raise ConfigError(
                f"{self.where(key)} must be a list of at most {max_len} integers, "
                f"got {_show(values)}"
            )
        return tuple(
            self._integer(v, f"{self.where(key)}[{i}]", low, high) for i, v in enumerate(values)
        )

    def number(self, key: str, *, low: float = 0.0, above: bool = False) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where(key)} must be a number, got {_show(value)}")
        if not math.isfinite(value) or value < low or (above and value == low):
            rule = f"above {low:g}" if above else f"at least {low:g}"
            raise ConfigError(f"{self.where(key)} must be finite and {rule}, got {_show(value)}")
        return float(value)

    def fixed(self, key: str, *supported: object) -> None:
        """The key must hold one of `supported`: the only behaviours that are built."""
        value = self.value(key)
        if not any(type(value) is type(s) and value == s for s in supported):
            names = " or ".join(_show(s) for s in supported)
            raise ConfigError(
                f"{self.where(key)} = {_show(value)} is not supported; supported: {names}"
            )

    def unknown(self) -> list[str]:
        return [
            self.where(key)
            for key in self.values
            if key not in self.read and key not in ACCEPTED_KEYS
        ]

    def _integer(self, value: object, where: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where} must be an integer, got {_show(value)}")
        if not low <= value <= high:
            raise ConfigError(f"{where} must be in {low}..{high}, got {value}")
        return value


def _show(value: object) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reject_constant(name: str) -> float:
    raise ConfigError(f"config.json holds {name}, which is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"config.json sets {', '.join(twice)} twice in one object")
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, a file of at most 1 MiB without repeated keys."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    try:
        values = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {_show(values)}")
    return values


def load_args(path: Path, *, accept_unknown: Iterable[str] = ()) -> V41Args:
    """`V41Args` of a config.json file. Raises ConfigError."""
    return parse_args(read_config(path), accept_unknown=accept_unknown)


def parse_args(config: dict[str, Any], *, accept_unknown: Iterable[str] = ()) -> V41Args:
    """`V41Args` of a published config (nested objects).

    Every key is read, listed in `ACCEPTED_KEYS`, or refused; `accept_unknown` names key paths
    (`text_config.some_key`) that may pass unread. Raises ConfigError.
    """
    top = _Section(config, "")
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
    _refuse_unknown(sections, frozenset(accept_unknown))
    check_args(args)
    return args


def _refuse_unknown(sections: list[_Section], accepted: frozenset[str]) -> None:
    unknown = [path for section in sections for path in section.unknown()]
    refused = [path for path in unknown if path not in accepted]
    if refused:
        shown = ", ".join(
            f"{path} = {_show(_lookup(sections[0].values, path))}" for path in refused[:8]
        )
        more = f" and {len(refused) - 8} more" if len(refused) > 8 else ""
        raise ConfigError(
            f"config.json has keys that are not known and might change the model: {shown}{more}; "
            "accept them by name if they cannot (accept_unknown, --accept-key)"
        )


def _lookup(values: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def _check_quantization(top: _Section) -> list[_Section]:
    quant = top.section("quantization_config")
    quant.fixed("quant_method", "fp8")
    quant.fixed("activation_scheme", "dynamic")
    quant.fixed("weight_block_size", [32, 32])
    quant.fixed("scale_fmt", "ue8m0")
    quant.fixed("expert_dtype", "fp4")
    if quant.has("fmt"):
        quant.fixed("fmt", "e4m3")
    return [quant]


def _check_fixed_behaviour(text: _Section, rope: _Section) -> None:
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


def _special_tokens(top: _Section) -> dict[str, Any]:
    return {
        "bos_token_id": top.integer("bos_token_id"),
        "eos_token_id": top.integer("eos_token_id"),
        "pad_token_id": top.integer("pad_token_id"),
        "image_token_id": _optional_int(top, "image_token_id"),
    }


def _optional_int(section: _Section, key: str) -> int | None:
    section.read.add(key)
    return section.integer(key) if section.has(key) else None


def _sizes(text: _Section) -> dict[str, Any]:
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
            ("engram_pad_token_id", 0, _MAX_INT),
            ("dspark_noise_token_id", 0, _MAX_INT),
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


def _rope(text: _Section, rope: _Section) -> dict[str, Any]:
    return {
        "rope_theta": text.number("rope_theta", low=1.0, above=True),
        "compress_rope_theta": text.number("compress_rope_theta", low=1.0, above=True),
        "rope_factor": rope.number("factor", low=1.0),
        "rope_beta_fast": rope.number("beta_fast", above=True),
        "rope_beta_slow": rope.number("beta_slow", above=True),
        "rope_original_max_positions": rope.integer("original_max_position_embeddings", low=1),
    }


def _vision(vision: _Section) -> tuple[tuple[str, int], ...]:
    """Sizes of the vision tower; empty where the tower has no layers (text-only checkpoint)."""
    vision.read.add("max_wh_ratio")
    vision.read.add("model_type")
    sizes = tuple((key, vision.integer(key)) for key in _VISION_INTS)
    return sizes if dict(sizes)["num_hidden_layers"] else ()
