"""Weight maps: every tensor once, inverses give the same bits, and what does not fit is said."""

import pytest
import torch
from torch import Tensor

from deepdraft.checkpoint.families import parse_model_args
from deepdraft.checkpoint.spec_maps import (
    engine_fused,
    expert_stacks,
    transformers_modules,
    transformers_saved,
)
from deepdraft.checkpoint.spec_weights import (
    Plan,
    Rows,
    Rule,
    Transpose,
    WeightMap,
    halves_from_pairs,
)
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.tiny_families import KINDS, tiny_config, tiny_tensors

FAMILIES = [kind for kind in KINDS if kind != "v41"]
Tensors = dict[str, Tensor]


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def mapped(weights: WeightMap, tensors: Tensors) -> tuple[Plan, Tensors]:
    plan = weights.plan(shapes(tensors))
    return plan, {name: plan.read(name, tensors.__getitem__) for name in plan.pieces}


def comes_back(weights: WeightMap, tensors: Tensors) -> Tensors:
    plan, out = mapped(weights, tensors)
    assert sorted(plan.owner) == sorted(tensors)
    assert sum(t.numel() for t in out.values()) == sum(t.numel() for t in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(plan.undo(name, out.__getitem__), tensor), name
    return out


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_maps_come_back(kind: str) -> None:
    config = tiny_config(kind)
    args, tensors = parse_model_args(config), tiny_tensors(config)
    saved = comes_back(transformers_saved(args), tensors)
    assert (saved.keys() == tensors.keys()) == (kind != "v4")
    modules = comes_back(transformers_modules(args), tensors)
    stacked = comes_back(expert_stacks(), modules)
    assert len(stacked) < len(modules) or kind == "llama"
    if kind != "v4":
        fused = comes_back(engine_fused(args), tensors)
        assert len(fused) < len(tensors)


def test_names_that_transformers_uses_for_v4() -> None:
    config = tiny_config("v4")
    args, tensors = parse_model_args(config), tiny_tensors(config)
    _, saved = mapped(transformers_saved(args), tensors)
    assert {
        "head.weight",
        "model.hc_head.hc_base",
        "model.layers.1.attn.norm.weight",
        "model.layers.1.attn.indexer.compressor.norm.weight",
        "model.layers.2.ffn.experts.3.w2.weight",
    } <= saved.keys()
    _, modules = mapped(transformers_modules(args), tensors)
    assert {
        "lm_head.weight",
        "model.layers.0.mlp.gate.tid2eid",
        "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight",
        "model.layers.3.ffn_hc.scale",
    } <= modules.keys()


def test_fused_rows_follow_each_other() -> None:
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    _, fused = mapped(engine_fused(parse_model_args(config)), tensors)
    q, k, v = (tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv")
    whole = fused["model.layers.0.self_attn.qkv_proj.weight"]
    assert torch.equal(whole[:128], q) and torch.equal(whole[128:192], k)
    assert torch.equal(whole[192:], v)


def test_stacks_are_experts_with_gate_before_up() -> None:
    config = tiny_config("v2")
    tensors = tiny_tensors(config)
    _, out = mapped(expert_stacks(), tensors)
    stack = out["model.layers.1.mlp.experts.gate_up_proj"]
    assert stack.shape == (8, 64, 128)
    stem = "model.layers.1.mlp.experts.5"
    assert torch.equal(stack[5, :32], tensors[f"{stem}.gate_proj.weight"])
    assert torch.equal(stack[5, 32:], tensors[f"{stem}.up_proj.weight"])


def test_changes() -> None:
    x = torch.arange(24.0).view(8, 3)
    assert torch.equal(Transpose().forward(x), x.t())
    turned = halves_from_pairs(4, 0, 4)
    assert turned.forward(x)[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    tail = halves_from_pairs(8, 0, 4, tail=True)
    assert tail.forward(x)[:, 0].tolist() == [0, 3, 6, 9, 12, 18, 15, 21]
    for change in (Transpose(), turned, tail, Rows(lambda n: [*range(1, n), 0])):
        assert torch.equal(change.back(change.forward(x)), x)
        assert not torch.equal(change.forward(x), x)


def test_changes_are_undone_in_reverse() -> None:
    roll = Rows(lambda n: [*range(1, n), 0])
    weights = WeightMap([Rule.rename("a", "b", roll, Transpose())])
    x = torch.arange(6.0).view(2, 3)
    plan, out = mapped(weights, {"a": x})
    assert torch.equal(out["b"], x.flip(0).t())
    assert torch.equal(plan.undo("a", out.__getitem__), x)


def refused(rules: list[Rule], names: list[str], **options: list[str]) -> str:
    expected = options.pop("expected", None)
    with pytest.raises(CheckpointError) as error:
        WeightMap(rules, **options).plan(dict.fromkeys(names, (1, 1)), expected)  # type: ignore
    return error.value.message


def test_what_does_not_fit_is_listed() -> None:
    both = Rule(("x.{n}.a", "x.{n}.b"), "x.{n}.ab", "concat")
    stack = Rule(("e.{i}.w",), "e.w", "stack", over="i")
    assert "no rule takes: y" in refused([both], ["y"])
    assert "made in part: x.0.ab" in refused([both], ["x.0.a"])
    assert "made in part: e.w" in refused([stack], ["e.0.w", "e.2.w"])
    twice = [Rule.rename("a", "t"), Rule.rename("b", "t")]
    assert "made twice: t" in refused(twice, ["a", "b"])
    message = refused([both], ["x.0.a", "x.0.b"], expected=["x.0.ba"])
    assert "missing: x.0.ba (nearest made: x.0.ab)" in message
    assert "not expected: x.0.ab" in message
    plan = WeightMap([both], left_out=["y.{*}"]).plan({"y.z.w": (1,)})
    assert not plan.pieces


def test_a_target_of_another_size_is_refused() -> None:
    both = Rule(("a", "b"), "ab", "concat")
    plan = WeightMap([both]).plan({"a": (2, 1), "b": (3, 1)})
    with pytest.raises(CheckpointError, match=r"ab has 4 rows on axis 0; its parts have \[2, 3\]"):
        plan.undo("b", lambda name: torch.zeros(4, 1))
    with pytest.raises(CheckpointError, match="the map makes no tensor of c"):
        plan.undo("c", lambda name: torch.zeros(4, 1))


def test_no_fused_map_of_v4() -> None:
    with pytest.raises(ConfigError, match="no fused map"):
        engine_fused(parse_model_args(tiny_config("v4")))
