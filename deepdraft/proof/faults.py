"""The planted faults of the study (docs/parity.md) as data: what is changed, what must be named.

Owns: the table, and the changes of configuration and tensors. `faults_run` plants and judges.
Knows nothing of: references.

Numbers are those of the study. 25 and 28 change no function; the other 52 do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepdraft.proof.parity.tensors import turn

Weights = dict[str, Tensor]
Change = Callable[[Weights, Any], None]
"""Changes tensors in place; gets the clean model's args."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Either `config` (key -> value, None: taken away) or `tensors`."""

    number: int
    kind: str
    """Of `KINDS`."""
    text: str
    causes: tuple[str, ...]
    """Beginnings of causes that are right: a key, or a tensor group with * for numbers."""
    config: dict[str, Any] = field(default_factory=dict)
    tensors: Change | None = None
    silent: bool = False


KINDS: dict[str, dict[str, Any]] = {
    "coder": {"kind": "llama"},
    "v2": {"kind": "v2"},
    "v3": {"kind": "v3"},
    "coder-small": {"kind": "llama", "embedding_scale": 0.02 * 2.0**-7},
    "v2r": {"kind": "v2", "real_latents": True},
}
"""Arguments of `write_tiny` for each kind of the study."""

_L = "model.layers.*."


def each(part: str, change: Callable[[Tensor], Tensor], layer: int | None = None) -> Change:
    """Changes every tensor whose name holds `part`, in one layer or in all."""

    def apply(weights: Weights, args: Any) -> None:
        at = "" if layer is None else f"layers.{layer}."
        names = [name for name in weights if part in name and at in name]
        assert names, part
        for name in names:
            weights[name] = change(weights[name]).contiguous()

    return apply


def exchange(a: str, b: str, layer: int | None = None, *, at: str = "") -> Change:
    """Two kinds of tensor change places, in one layer or in names that hold `at`."""
    at = at if layer is None else f"layers.{layer}."

    def apply(weights: Weights, args: Any) -> None:
        names = [name for name in weights if a in name and at in name]
        assert names, a
        for name in names:
            other = name.replace(a, b)
            weights[name], weights[other] = weights[other], weights[name]

    return apply


def both(*changes: Change) -> Change:
    """One after the other."""

    def apply(weights: Weights, args: Any) -> None:
        for change in changes:
            change(weights, args)

    return apply


def _kv_heads(weights: Weights, args: Any) -> None:
    def reverse(w: Tensor) -> Tensor:
        return w.view(args.num_key_value_heads, -1, w.shape[1]).flip(0).reshape(w.shape)

    both(each("k_proj", reverse), each("v_proj", reverse))(weights, args)


def _tied(weights: Weights, args: Any) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def _random_head(weights: Weights, args: Any) -> None:
    w = weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(99)
    weights["lm_head.weight"] = torch.randn(w.shape, generator=generator) * w.std()


def turned_rows(*parts: str) -> Change:
    """Rotary rows in the other layout, in all layers."""

    def apply(weights: Weights, args: Any) -> None:
        for part in parts:
            if "indexer" in part:
                start, width, head = 0, args.qk_rope_head_dim, args.index_head_dim
            elif "kv_a" in part:
                start, width = args.kv_lora_rank, args.qk_rope_head_dim
                head = start + width
            elif "q_b" in part:
                start, width = args.qk_nope_head_dim, args.qk_rope_head_dim
                head = start + width
            else:
                start, width, head = 0, args.head_dim, args.head_dim
            each(part, lambda w, a=(start, width, head): turn(w, *a))(weights, args)

    return apply


def _rolled_experts(weights: Weights, args: Any) -> None:
    old = dict(weights)
    count = args.router.experts
    for name in old:
        if ".experts." in name:
            stem, rest = name.split(".experts.")
            number, suffix = rest.split(".", 1)
            weights[name] = old[f"{stem}.experts.{(int(number) + 1) % count}.{suffix}"]


def _kv_halves(weights: Weights, args: Any) -> None:
    nope, heads = args.qk_nope_head_dim, args.num_attention_heads

    def change(w: Tensor) -> Tensor:
        parts = w.view(heads, -1, w.shape[1])
        return torch.cat([parts[:, nope:], parts[:, :nope]], 1).reshape(w.shape)

    each("kv_b_proj", change)(weights, args)


def _half(w: Tensor) -> Tensor:
    return w.bfloat16().float()


_ROPE = ("rope_scaling", "rope_scaling.factor", "rope_scaling.type")
_BIAS = (f"{_L}mlp.gate.e_score_correction_bias",)
_GATE_UP = (f"{_L}mlp.gate_proj", f"{_L}mlp.up_proj")
_SCALE = "routed_scaling_factor"
_ORIGINAL = "rope_scaling.original_max_position_embeddings"
_ALL_DIM, _MSCALE = "rope_scaling.mscale_all_dim", "rope_scaling.mscale"
_FAST, _SLOW = "rope_scaling.beta_fast", "rope_scaling.beta_slow"


def _key(number: int, kind: str, key: str, value: Any, *also: str, silent: bool = False) -> Fault:
    return Fault(number, kind, f"{key} -> {value}", (key, *also), {key: value}, silent=silent)


def _weights(number: int, kind: str, text: str, causes: tuple[str, ...], change: Change) -> Fault:
    return Fault(number, kind, text, causes, tensors=change)


FAULTS: tuple[Fault, ...] = (
    _key(1, "coder", "rope_theta", 10000),
    _key(2, "coder", "rope_theta", 1000000),
    _key(3, "coder", "rope_scaling", None, *_ROPE),
    _key(4, "coder", "rope_scaling.factor", 2.0),
    _key(5, "coder", "rms_norm_eps", 1e-5),
    _key(6, "coder", "rms_norm_eps", 1e-12),
    _weights(
        7,
        "coder",
        "q_proj transposed",
        (f"{_L}self_attn.q_proj",),
        each("q_proj", lambda w: w.t(), 1),
    ),
    _weights(
        8,
        "coder",
        "o_proj transposed",
        (f"{_L}self_attn.o_proj",),
        each("o_proj", lambda w: w.t(), 1),
    ),
    _weights(9, "coder", "gate and up swapped", _GATE_UP, exchange("gate_proj", "up_proj")),
    _weights(
        10,
        "coder",
        "input and post norm swapped",
        (f"{_L}input_layernorm", f"{_L}post_attention_layernorm"),
        exchange("input_layernorm", "post_attention_layernorm"),
    ),
    _weights(
        11,
        "coder",
        "k and v swapped (1 layer)",
        (f"{_L}self_attn.k_proj", f"{_L}self_attn.v_proj"),
        exchange("k_proj", "v_proj", 1),
    ),
    _weights(
        12,
        "coder",
        "kv heads in wrong order",
        (f"{_L}self_attn.k_proj", f"{_L}self_attn.v_proj"),
        _kv_heads,
    ),
    _weights(13, "coder", "lm_head := embedding", ("lm_head", "tie_word"), _tied),
    _weights(14, "coder", "lm_head left random", ("lm_head",), _random_head),
    _weights(
        15,
        "coder",
        "rope layout permuted (q, k)",
        (f"{_L}self_attn.q_proj", f"{_L}self_attn.k_proj"),
        turned_rows("q_proj", "k_proj"),
    ),
    _weights(
        16,
        "coder",
        "rope layout permuted (k only)",
        (f"{_L}self_attn.k_proj",),
        turned_rows("k_proj"),
    ),
    _weights(
        17,
        "coder",
        "layers 1 and 2 swapped",
        ("model.layers.*",),
        exchange("layers.1.", "layers.2."),
    ),
    _weights(
        18,
        "coder",
        "vocabulary rows shifted by one",
        ("model.embed_tokens",),
        each("embed_tokens", lambda w: w.roll(1, 0)),
    ),
    _weights(19, "coder", "norm weight + 1", ("model.norm",), each("model.norm", lambda w: w + 1)),
    _key(20, "v2", _ALL_DIM, 0),
    _key(21, "v2", _MSCALE, 1.0),
    _key(22, "v2", "rope_scaling.factor", 1.0, *_ROPE),
    _key(23, "v2", "rope_scaling", None, *_ROPE),
    _key(24, "v2", _ORIGINAL, 512),
    _key(25, "v2", _FAST, 8, silent=True),
    _key(26, "v2", "topk_method", "greedy", "n_group", "topk_group"),
    _key(27, "v2", _SCALE, 16.0),
    _key(28, "v2", "norm_topk_prob", True, silent=True),
    _key(29, "v2", "num_experts_per_tok", 3),
    _key(30, "v2", "n_group", 4),
    _weights(
        31,
        "v2",
        "kv_a_layernorm skipped",
        (f"{_L}self_attn.kv_a_layernorm",),
        each("kv_a_layernorm", torch.ones_like),
    ),
    _weights(
        32,
        "v2",
        "q_a_layernorm skipped",
        (f"{_L}self_attn.q_a_layernorm",),
        each("q_a_layernorm", torch.ones_like),
    ),
    _weights(
        33,
        "v2",
        "expert gate and up halves swapped",
        (f"{_L}mlp.experts.*.",),
        exchange(".gate_proj", ".up_proj", at=".experts."),
    ),
    _weights(34, "v2", "experts rolled by one", (f"{_L}mlp.experts.*",), _rolled_experts),
    _weights(
        35,
        "v2",
        "shared expert dropped",
        (f"{_L}mlp.shared_experts",),
        each("shared_experts", torch.zeros_like),
    ),
    _weights(
        36, "v2", "kv_b key and value halves swapped", (f"{_L}self_attn.kv_b_proj",), _kv_halves
    ),
    _weights(
        37,
        "v2",
        "rope layout permuted (q_b, kv_a)",
        (f"{_L}self_attn.q_b_proj", f"{_L}self_attn.kv_a_proj"),
        turned_rows("q_b_proj", "kv_a_proj"),
    ),
    _weights(
        38,
        "v2",
        "rope layout permuted (kv_a only)",
        (f"{_L}self_attn.kv_a_proj",),
        turned_rows("kv_a_proj"),
    ),
    _weights(
        39,
        "v3",
        "router bias missing (0)",
        _BIAS,
        each("e_score_correction_bias", torch.zeros_like),
    ),
    _weights(40, "v3", "router bias negated", _BIAS, each("e_score_correction_bias", torch.neg)),
    _key(41, "v3", _SCALE, 1.0),
    _key(42, "v3", "norm_topk_prob", False),
    Fault(
        43,
        "v3",
        "n_group, topk_group off",
        ("n_group", "topk_group"),
        {"topk_group": 1, "n_group": 1},
    ),
    _key(44, "v3", "rope_interleave", False),
    _key(45, "v3", _ALL_DIM, 0),
    _key(46, "v3", "rope_theta", 100000),
    _key(47, "v3", "first_k_dense_replace", 0),
    _weights(
        48, "v3", "gate weight in bf16", (f"{_L}mlp.gate.weight",), each("mlp.gate.weight", _half)
    ),
    _weights(49, "v3", "lm_head in bf16", ("lm_head",), each("lm_head", _half)),
    _key(50, "coder-small", "rms_norm_eps", 1e-5),
    _key(51, "coder-small", "rms_norm_eps", 1e-12),
    _key(52, "v2r", _FAST, 8),
    _key(53, "v2r", _SLOW, 4),
    _key(54, "v2r", _ALL_DIM, 0),
)
