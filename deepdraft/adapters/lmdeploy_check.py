"""`deepdraft lmdeploy check`: what LMDeploy makes of a checkpoint, without a GPU.

Owns: what its parameters, rotary tables and routers must be, from the weight maps and the spec.
Knows nothing of: how they are got (`lmdeploy_child`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepdraft.adapters import child, lmdeploy_child
from deepdraft.adapters.environments import clean_environ, ready
from deepdraft.adapters.lmdeploy_launch import Launch, write_map
from deepdraft.arch import LlamaArgs
from deepdraft.checkpoint.layouts import stacks
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.shards import read_headers
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_maps import engine_fused
from deepdraft.checkpoint.spec_weights import Rule, WeightMap, halves_from_pairs
from deepdraft.checkpoint.stacks import Splitter
from deepdraft.errors import ConfigError
from deepdraft.ops.routing import choose, expert_scores, expert_weights

_TIMEOUT_S = 600.0
_POSITIONS = (0, 1, 7, 100, 300)
_ROWS = 64
_MOST_BYTES = 2 << 30
_TABLE = 1e-4
"""cos and sin: the angle of position 300 is rounded to 3e-5."""
_WEIGHT = 1e-5


@dataclass(slots=True)
class Checked:
    """What was found. `problems`: what makes it no faithful copy of the checkpoint's model."""

    version: str
    model_class: str
    parameters: int = 0
    equal: int = 0
    """Parameters that are bit for bit what the weight map makes."""
    fused: int = 0
    """Those of them that join or re-order stored tensors."""
    table_difference: float = 0.0
    """Of cos and sin, at most."""
    routers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Layer -> share of rows with the same experts, largest difference of their weights."""
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def check(launch: Launch) -> Checked:
    """Has LMDeploy load the checkpoint and compares. Raises EngineError, ConfigError."""
    size = sum(p.stat().st_size for p in launch.checkpoint.glob("*.safetensors"))
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{launch.checkpoint} has {size / 1e9:.1f} GB of weights, which are loaded twice for "
            f"this check; it takes up to {_MOST_BYTES >> 30} GiB. Check a tiny checkpoint of the "
            "same family (`deepdraft tiny`), the map is the same"
        )
    config = read_config(launch.checkpoint / "config.json")
    spec = ModelSpec.of(config)
    stored = {
        name: value
        for shard in {p.shard for p in read_headers(launch.checkpoint).stored.values()}
        for name, value in load_file(shard).items()
    }
    published = dict(Splitter(stacks()).published(stored.items()))
    with tempfile.TemporaryDirectory(prefix="deepdraft-lmdeploy-") as name:
        folder, maps = Path(name) / "child", Path(name) / "map"
        folder.mkdir()
        order = {
            "checkpoint": str(launch.checkpoint.resolve()),
            "overrides": launch.hf_overrides,
            "map": str(write_map(maps)) if launch.stacked else None,
            "words": [*launch.words(), *launch.server_words(23333, "m")],
            "rows": _ROWS,
            "positions": _POSITIONS,
        }
        answer = child.ask(
            f"LMDeploy on {launch.checkpoint}",
            ready("lmdeploy").python,
            lmdeploy_child.__file__,
            order,
            folder=folder,
            environ=clean_environ(
                TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
            ),
            timeout_s=_TIMEOUT_S,
        )
        weights = load_file(folder / "weights.safetensors")
        probes = load_file(folder / "probes.safetensors")
    made = Checked(answer["version"], answer["class"], len(weights), options=answer["options"])
    made.problems += [f"{name} was not loaded" for name in answer["unloaded"]]
    made.problems += _options(launch, answer)
    made.problems += _weights(made, spec, published, weights)
    made.problems += _numbers(made, spec, answer, probes)
    made.problems += _routers(made, spec, published, probes)
    return made


def expected(args: Any) -> WeightMap:
    """Published names -> LMDeploy's parameters: joined, and rotary channels in halves."""
    if isinstance(args, LlamaArgs):
        return engine_fused(args)
    layer = "model.layers.{layer}"
    head = args.qk_nope_head_dim + args.qk_rope_head_dim
    query = halves_from_pairs(head, args.qk_nope_head_dim, args.qk_rope_head_dim)
    latent = halves_from_pairs(0, 0, args.qk_rope_head_dim, tail=True)
    own = [
        Rule.rename(name, name, change)
        for name, change in (
            (f"{layer}.self_attn.q_proj.weight", query),
            (f"{layer}.self_attn.q_b_proj.weight", query),
            (f"{layer}.self_attn.kv_a_proj_with_mqa.weight", latent),
        )
    ]
    for below in ("mlp", "mlp.shared_experts"):
        stem = f"{layer}.{below}"
        both = (f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight")
        own.append(Rule(both, f"{stem}.gate_up_proj.weight", "concat"))
    stem, whole = f"{layer}.mlp.experts.{{e}}", f"{layer}.mlp.experts"
    both = (f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight")
    own.append(Rule(both, f"{whole}.gate_up.weight", "stack", over="e"))
    own.append(Rule((f"{stem}.down_proj.weight",), f"{whole}.down.weight", "stack", over="e"))
    left_out = [
        f"model.layers.{args.num_hidden_layers + n}.{{*}}"
        for n in range(getattr(args, "num_nextn_predict_layers", 0))
    ]
    # Their names are kept; `{*}` of a rename stands for nothing, so each depth is a rule.
    parts = ("a", "b", "c", "d", "e")
    same = [".".join(f"{{{p}}}" for p in parts[:n]) for n in range(1, 6)]
    own += [Rule.rename(f"{layer}.{name}", f"{layer}.{name}") for name in same]
    own += [Rule.rename(n, n) for n in ("model.{a}.weight", "lm_head.weight")]
    return WeightMap(own, left_out=left_out)


def _derived(args: Any, published: dict[str, Tensor]) -> dict[str, Tensor]:
    """What it computes from kv_b_proj for its absorbed products."""
    if isinstance(args, LlamaArgs):
        return {}
    made = {}
    for number in range(args.num_hidden_layers):
        stem = f"model.layers.{number}.self_attn"
        weight = published[f"{stem}.kv_b_proj.weight"]
        heads = weight.unflatten(0, (args.num_attention_heads, -1))
        key, value = heads.split([args.qk_nope_head_dim, args.v_head_dim], 1)
        made[f"{stem}.kc.weight"] = key
        made[f"{stem}.vc.weight"] = value.transpose(1, 2)
    return made


def _weights(
    made: Checked, spec: ModelSpec, published: dict[str, Tensor], weights: dict[str, Tensor]
) -> Iterator[str]:
    derived = _derived(spec.args, published)
    shapes = {name: tuple(value.shape) for name, value in published.items()}
    plan = expected(spec.args).plan(shapes, weights.keys() - derived.keys())
    for name, value in weights.items():
        if name in derived:
            wanted, joined = derived[name], True
        else:
            wanted, piece = plan.read(name, published.__getitem__), plan.pieces[name]
            joined = len(piece.sources) > 1 or bool(piece.rule.changes)
        if torch.equal(value, wanted.to(value.dtype)):
            made.equal += 1
            made.fused += joined
        else:
            yield f"{name} is not what the weight map makes of the checkpoint"


def _numbers(
    made: Checked, spec: ModelSpec, answer: dict[str, Any], probes: dict[str, Tensor]
) -> Iterator[str]:
    effective = spec.effective
    frequencies = torch.tensor(effective["rope.frequencies"], dtype=torch.float64)
    angles = torch.tensor(_POSITIONS, dtype=torch.float64)[:, None] * frequencies
    factor = effective["rope.cos_sin_factor"]
    for name, function in (("cos", torch.cos), ("sin", torch.sin)):
        wanted = function(angles).mul(factor).repeat(1, 2)
        if wanted.shape != probes[name].shape:
            yield f"it turns {probes[name].shape[1]} channels, the model {wanted.shape[1]}"
            return
        difference = float((probes[name].double() - wanted).abs().max())
        made.table_difference = max(made.table_difference, difference)
    if made.table_difference > _TABLE:
        yield f"its rotary tables differ by {made.table_difference:.2g}: theta or scaling is other"
    scale, wanted = answer["softmax_scale"], effective.get("softmax_scale")
    if scale is not None and wanted is not None and not math.isclose(scale, wanted, rel_tol=1e-6):
        yield f"its softmax scale is {scale}, the model's {wanted}"
    wanted_eps = effective["rms_norm_eps"]
    for name, eps in answer["eps"].items():
        if eps != wanted_eps:
            yield f"{name} has eps {eps}, config.json {wanted_eps}"


def _routers(
    made: Checked, spec: ModelSpec, published: dict[str, Tensor], probes: dict[str, Tensor]
) -> Iterator[str]:
    """Its choice of experts against ours, on random rows."""
    args: Any = spec.args
    for key in probes:
        layer, _, part = key.partition(".")
        if part != "x":
            continue
        stem = f"model.layers.{layer}.mlp.gate"
        bias = published.get(f"{stem}.e_score_correction_bias")
        scores = expert_scores(probes[key] @ published[f"{stem}.weight"].float().T, args.router)
        picks = choose(scores, bias, args.router)
        weights = expert_weights(scores, picks, args.router)
        ours = torch.zeros_like(scores).scatter_(1, picks, weights)
        theirs = torch.zeros_like(scores).scatter_(
            1, probes[f"{layer}.experts"], probes[f"{layer}.weights"]
        )
        same = ((ours != 0) == (theirs != 0)).all(-1)
        worst = float((ours - theirs)[same].abs().max()) if bool(same.any()) else 0.0
        share = float(same.double().mean())
        made.routers[layer] = {"same_experts": share, "most_difference": worst}
        if share < 1 or worst > _WEIGHT:
            yield (
                f"layer {layer}: its router picks the same experts for {share:.0%} of the rows, "
                f"with weights up to {worst:.2g} apart"
            )


def _options(launch: Launch, answer: dict[str, Any]) -> Iterator[str]:
    """What its parser and its choice of an engine say against ours."""
    options = answer["options"]
    read = (options["backend"], options["session_len"], options["hf_overrides"] or {})
    server = (options["server_name"], options["server_port"], options["model_name"])
    wanted = (launch.engine, launch.session_len, launch.hf_overrides)
    if read != wanted or server != ("127.0.0.1", 23333, "m"):
        yield f"its parser read {options}"
    if answer["turbomind"] != (launch.engine == "turbomind"):
        yield f"TurboMind {'takes' if answer['turbomind'] else 'does not take'} this architecture"


def render(found: Checked) -> str:
    """For a terminal."""
    lines = [
        f"LMDeploy {found.version}, {found.model_class}",
        f"  {found.equal} of {found.parameters} parameters bit for bit as the weight map "
        f"makes them, {found.fused} of them joined or re-ordered",
        f"  rotary tables at most {found.table_difference:.1e} apart",
    ]
    if found.routers:
        worst = max(own["most_difference"] for own in found.routers.values())
        share = min(own["same_experts"] for own in found.routers.values())
        lines.append(
            f"  routers: same experts for {share:.0%} of the rows, weights {worst:.1e} apart"
        )
    lines += [f"error: {problem}" for problem in found.problems]
    return "\n".join([*lines, "FAILED" if found.problems else "passed"])
