"""Planted faults: each mistake of adapters and loaders makes `deepdraft golden` fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.checkpoint import reader
from deepdraft.models import experts, mla, v4_layers
from deepdraft.ops import rope, routing
from deepdraft.proof.golden import main
from deepdraft.quant import blocks, formats
from tests.families.conftest import Tensors, golden_copy
from tests.families.stored import quantised_golden

Patch = pytest.MonkeyPatch


def every(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """Changes all tensors whose name holds `part`."""

    def apply(tensors: Tensors) -> None:
        names = [name for name in tensors if part in name]
        assert names, part
        for name in names:
            tensors[name] = change(tensors[name])

    return apply


def swapped(a: str, b: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        names = [name for name in tensors if a in name]
        assert names, a
        for name in names:
            other = name.replace(a, b)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return apply


def halves(width: int) -> Callable[[Tensor], Tensor]:
    """Adjacent rotary pairs written as half-split ones, in the last rows."""

    def change(w: Tensor) -> Tensor:
        turned = w[-width:]
        return torch.cat([w[:-width], turned[0::2], turned[1::2]])

    return change


def yarn(**values: float) -> dict[str, Any]:
    return {"rope_scaling": values}


CONFIG_FAULTS = [
    ("llama-a", {"rope_theta": 10000}),
    ("llama-a", {"rope_scaling": {"factor": 2.0}}),
    ("llama-a", {"rope_scaling": None}),
    ("llama-a", {"rms_norm_eps": 1e-3}),
    ("llama-tied-llama3", {"rope_scaling": {"low_freq_factor": 2.0}}),
    ("llama-gqa-yarn", {"rms_norm_eps": 1e-6}),
    ("llama-gqa-yarn", yarn(attention_factor=1.0)),
    ("deepseek-v2-a", {"rope_theta": 50000}),
    ("deepseek-v2-a", yarn(mscale=0.9)),
    ("deepseek-v2-a", yarn(mscale_all_dim=1.0, mscale=1.0)),
    ("deepseek-v2-a", yarn(original_max_position_embeddings=64)),
    ("deepseek-v2-a", yarn(factor=2)),
    ("deepseek-v2-a", {"num_experts_per_tok": 2}),
    ("deepseek-v2-a", {"routed_scaling_factor": 2.0}),
    ("v2-groups", {"topk_method": "greedy"}),
    ("v2-groups", {"n_group": 6}),
    ("v2-groups", {"rms_norm_eps": 1e-6}),
    ("deepseek-v3-a", {"routed_scaling_factor": 1.0}),
    ("deepseek-v3-a", {"norm_topk_prob": False}),
    ("deepseek-v3-a", {"topk_group": 4}),
    ("deepseek-v3-a", {"rope_interleave": False}),
    ("v3-plain-halves", {"rope_interleave": True}),
    ("v32-whole", {"index_topk": 6}),
    ("deepseek-v32-a", {"index_topk": 12}),
    ("deepseek-v4-a", {"rope_theta": 20000}),
    ("deepseek-v4-a", {"compress_rope_theta": 10000}),
    ("deepseek-v4-a", {"index_topk": 15}),
    ("deepseek-v4-a", {"sliding_window": 31}),
    ("deepseek-v4-a", {"swiglu_limit": 10.0}),
    ("deepseek-v4-a", {"hc_sinkhorn_iters": 1}),
    ("deepseek-v4-a", yarn(factor=8)),
    ("v4-other", {"rms_norm_eps": 1e-6}),
    ("v4-other", {"hc_eps": 1e-6}),
    ("v4-other", {"index_topk": 6}),
    ("v4-other", {"sliding_window": 10}),
]


@pytest.mark.parametrize(("name", "config"), CONFIG_FAULTS, ids=lambda v: str(v))
def test_wrong_configuration(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert main(str(golden_copy(name, tmp_path, config=config))) == 1


SILENT = [
    ("deepseek-v2-a", {"norm_topk_prob": True}),
    ("deepseek-v2-a", {"n_group": 4, "topk_group": 2}),
    ("deepseek-v3-a", {"topk_method": None, "scoring_func": None, "moe_layer_freq": None}),
    ("llama-a", {"num_key_value_heads": None}),
    ("deepseek-v4-a", {"transformers_version": "4.0", "norm_topk_prob": None}),
]


@pytest.mark.parametrize(("name", "config"), SILENT, ids=lambda v: str(v))
def test_changes_without_effect_stay_silent(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    assert main(str(golden_copy(name, tmp_path, config=config))) == 0


TENSOR_FAULTS: list[tuple[str, str, Callable[[Tensors], object]]] = [
    ("llama-a", "q_proj transposed", every("q_proj", lambda w: w.t())),
    ("llama-a", "gate and up swapped", swapped("gate_proj", "up_proj")),
    ("llama-a", "norms swapped", swapped("input_layernorm", "post_attention_layernorm")),
    ("llama-a", "rows shifted", every("embed_tokens", lambda w: w.roll(1, 0))),
    (
        "llama-gqa-yarn",
        "kv heads",
        every("v_proj", lambda w: w.view(2, -1, 32).flip(0).flatten(0, 1)),
    ),
    ("deepseek-v2-a", "rotary layout", every("kv_a_proj", halves(16))),
    ("deepseek-v2-a", "no latent norm", every("kv_a_layernorm", torch.ones_like)),
    ("v2-groups", "no query norm", every("q_a_layernorm", torch.ones_like)),
    ("v2-groups", "no shared expert", every("shared_experts.down", torch.zeros_like)),
    (
        "deepseek-v2-a",
        "kv halves",
        every("kv_b_proj", lambda w: w.view(4, 2, 32, -1).flip(1).reshape(w.shape)),
    ),
    ("deepseek-v3-a", "no router bias", every("e_score_correction_bias", torch.zeros_like)),
    ("deepseek-v3-a", "negated bias", every("e_score_correction_bias", torch.neg)),
    ("deepseek-v3-a", "experts rolled", swapped("experts.1.", "experts.2.")),
    ("deepseek-v32-a", "index key bias", every("k_norm.bias", torch.zeros_like)),
    ("deepseek-v32-a", "index heads", every("weights_proj", torch.neg)),
    ("deepseek-v4-a", "no position bias", every("compressor.ape", torch.zeros_like)),
    ("deepseek-v4-a", "sinks", every("attn_sink", torch.zeros_like)),
    ("deepseek-v4-a", "hash table", every("tid2eid", lambda t: t.flip(0))),
    ("deepseek-v4-a", "head mix", every("hc_head_base", torch.neg)),
    ("deepseek-v4-a", "router bias", every("gate.bias", torch.zeros_like)),
]


@pytest.mark.parametrize(
    ("name", "what", "change"), TENSOR_FAULTS, ids=[f[1] for f in TENSOR_FAULTS]
)
def test_wrong_tensors(
    name: str, what: str, change: Callable[[Tensors], object], tmp_path: Path
) -> None:
    assert main(str(golden_copy(name, tmp_path, tensors=change))) == 1


def bias_in_weights(patch: Patch) -> None:
    right = routing.expert_weights
    bias = torch.linspace(-0.2, 0.2, 16)
    patch.setattr(experts, "expert_weights", lambda s, p, r: right(s + bias, p, r))


def groups_by_one_best(patch: Patch) -> None:
    right = routing.choose
    patch.setattr(experts, "choose", lambda s, b, r: right(s, b, replace(r, group_best=1)))


def latent_eps(patch: Patch) -> None:
    patch.setattr(mla, "_LATENT_EPS", 1e-5)


def whole_rotation(patch: Patch) -> None:
    right = rope.frequencies
    patch.setattr(rope, "frequencies", lambda r, width: right(r, width).flip(0))


def no_overlap(patch: Patch) -> None:
    right = v4_layers.Compressor._pool

    def wrong(self: Any, groups: Any, rows: Any) -> Tensor:
        members = groups.members.copy()
        if self.overlap:
            members[:, : self.ratio] = -1
        return right(self, v4_layers.Groups(groups.rows, members, groups.first), rows)

    patch.setattr(v4_layers.Compressor, "_pool", wrong)


def entry_at_its_end(patch: Patch) -> None:
    right = v4_layers.Compressor._groups

    def wrong(self: Any, step: Any) -> Any:
        groups = right(self, step)
        return v4_layers.Groups(groups.rows, groups.members, groups.first + 1)

    patch.setattr(v4_layers.Compressor, "_groups", wrong)


CODE_FAULTS = [
    ("deepseek-v3-a", bias_in_weights),
    ("deepseek-v3-a", groups_by_one_best),
    ("v32-whole", latent_eps),
    ("v2-groups", whole_rotation),
    ("deepseek-v4-a", no_overlap),
    ("deepseek-v4-a", entry_at_its_end),
]


@pytest.mark.parametrize(("name", "fault"), CODE_FAULTS, ids=[f[1].__name__ for f in CODE_FAULTS])
def test_wrong_code(
    name: str, fault: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    directory = golden_copy(name, tmp_path)
    assert main(str(directory)) == 0
    fault(monkeypatch)
    assert main(str(directory)) == 1


def no_scale(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return formats.decode_e4m3(values, dtype)


def divided(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.dequantize_fp8_block(values, 1.0 / scales, dtype)


def transposed(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.dequantize_fp8_block(values, scales.flip(-1), dtype)


@pytest.mark.parametrize("wrong", [no_scale, divided, transposed])
def test_scales_misread(wrong: Callable[..., Tensor], tmp_path: Path, monkeypatch: Patch) -> None:
    directory = quantised_golden("deepseek-v3-a", tmp_path)
    assert main(str(directory)) == 0
    monkeypatch.setattr(reader, "_DEQUANTIZE", reader._DEQUANTIZE | {"fp8_block": wrong})
    assert main(str(directory)) == 1


def test_exponents_read_as_numbers(tmp_path: Path, monkeypatch: Patch) -> None:
    directory = quantised_golden("deepseek-v4-a", tmp_path, e8m0=True)
    assert main(str(directory)) == 0

    def wrong(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return blocks.dequantize_fp8_block(values, scales.to(dtype), dtype)

    monkeypatch.setattr(reader, "_DEQUANTIZE", reader._DEQUANTIZE | {"fp8_block": wrong})
    assert main(str(directory)) == 1
