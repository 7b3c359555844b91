"""Single repairs to try where only logits are known: values of keys, things done to tensors.

Owns: the catalogue. A repair that brings the logits back names the cause. Knows nothing of: trying
them (`diagnose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args, LlamaArgs, V4Args, V41Args
from deepdraft.checkpoint.section import show
from deepdraft.errors import ConfigError
from deepdraft.proof.doctor.accounting import group_of
from deepdraft.proof.parity.target import Target
from deepdraft.proof.parity.tensors import changes

THETAS = (1e4, 1e5, 1e6, 5e5, 5e4, 1.6e5, 8e6)
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 40.0)
ORIGINALS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MSCALES = (0.707, 1.0, 0.0)
EPSES = (1e-6, 1e-5, 1e-12, 1e-20, 1e-8)
SCALES = (1.0, 1.5, 2.5, 16.0, 2.827)
BETAS = (32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Repair:
    """One change to the target. `cause`: the key or tensor group that it corrects."""

    cause: str
    what: str
    """What was wrong, if this repair is right."""
    made: Callable[[], Target]


def key_repairs(target: Target) -> Iterator[Repair]:
    """Other values of keys, most plausible first."""
    for key, values in _keys(target):
        for value in values:
            if _lookup(target, key) == value:
                continue
            try:
                spec = target.spec.replaced(key, value)
            except ConfigError:
                continue
            if not spec.differences(target.spec):
                continue
            what = f"{key} = {show(_lookup(target, key))}, the reference computes as with "
            what += "none" if value is None else show(value)
            yield Repair(key, what, lambda s=spec: target.with_spec(s))


def group_repairs(target: Target) -> Iterator[Repair]:
    """n_group and topk_group together: one of them alone may restore nothing."""
    args: Any = target.spec.args
    if not isinstance(args, DeepseekV2Args | DeepseekV3Args):
        return
    experts = args.router.experts
    for groups in (8, 4, 2, 16):
        for kept in (4, 2, 3, 1):
            if experts % groups or kept >= groups:
                continue
            changes: dict[str, Any] = {"n_group": groups, "topk_group": kept}
            if isinstance(args, DeepseekV2Args):
                changes["topk_method"] = "group_limited_greedy"
            try:
                spec = target.spec.with_keys(changes)
            except ConfigError:
                continue
            if spec.differences(target.spec):
                what = f"the reference limits the choice to {kept} of {groups} groups"
                yield Repair("n_group", what, lambda s=spec: target.with_spec(s))


def _lookup(target: Target, path: str) -> Any:
    value: Any = target.spec.config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


Keys = Iterator[tuple[str, tuple[Any, ...]]]


def _keys(target: Target) -> Keys:
    args: Any = target.spec.args
    at = "text_config." if isinstance(args, V41Args) else ""
    yield f"{at}rope_theta", THETAS
    yield from _scalings(target, at)
    yield f"{at}rms_norm_eps", EPSES
    if isinstance(args, LlamaArgs):
        return
    yield f"{at}routed_scaling_factor", SCALES
    picks = args.num_experts_per_tok if isinstance(args, V41Args) else args.router.picks
    near = (picks - 1, picks + 1, picks - 2, picks + 2, 2 * picks, picks // 2)
    yield f"{at}num_experts_per_tok", tuple(n for n in near if n > 0)
    if isinstance(args, DeepseekV2Args | DeepseekV3Args):
        yield from _mla(args)
    if topk := getattr(args, "index_topk", 0):
        yield f"{at}index_topk", _around(topk)
    if isinstance(args, V4Args | V41Args):
        yield f"{at}compress_rope_theta", THETAS
        yield f"{at}sliding_window", _around(args.sliding_window)
        yield f"{at}swiglu_limit", (10.0, 7.0, 2.0, 1.0, 1e6)
        yield f"{at}hc_sinkhorn_iters", (20, 10, 3, 1)
        yield f"{at}hc_eps", EPSES


def _around(n: int) -> tuple[int, ...]:
    return 2 * n, n // 2 or 1, n + 1, max(1, n - 1), 4 * n


def _mla(args: DeepseekV2Args | DeepseekV3Args) -> Keys:
    flags = (True, False)
    if isinstance(args, DeepseekV2Args):
        yield "topk_method", ("group_limited_greedy", "greedy")
    else:
        yield "norm_topk_prob", flags
        yield "rope_interleave", flags
    experts = args.router.experts
    yield "n_group", tuple(n for n in (1, 2, 4, 8, 16, 3) if experts % n == 0)
    yield "topk_group", (1, 2, 3, 4, 8)


def _scalings(target: Target, at: str) -> Keys:
    scaling = _lookup(target, f"{at}rope_scaling") or {}
    key = f"{at}rope_scaling"
    if not scaling:
        yield key, tuple({"type": "linear", "factor": f} for f in FACTORS[1:])
        for mscale in (0.707, 1.0):
            yield (
                key,
                tuple(
                    {
                        "type": "yarn",
                        "factor": f,
                        "original_max_position_embeddings": n,
                        "beta_fast": 32,
                        "beta_slow": 1,
                        "mscale": mscale,
                        "mscale_all_dim": mscale,
                    }
                    for n in ORIGINALS
                    for f in FACTORS[1:]
                    if n * f == target.spec.args.max_position_embeddings
                ),
            )
        return
    yield f"{key}.factor", FACTORS
    if scaling.get("type", scaling.get("rope_type")) == "yarn":
        yield f"{key}.mscale_all_dim", MSCALES
        yield f"{key}.mscale", MSCALES
        yield f"{key}.original_max_position_embeddings", ORIGINALS
        yield f"{key}.beta_fast", BETAS
        yield f"{key}.beta_slow", BETAS[::-1]
    yield key, (None,)


def tensor_repairs(target: Target) -> Iterator[Repair]:
    """Undoing what conversions do: to a kind of tensor in all layers, then in one layer."""
    names = target.names()
    yield from _exchanges(target, names)
    yield from _single(target, names)
    yield from _rotations(target, names)
    yield from _orders(target, names)
    yield from _ends(target, names)


def _made(target: Target, tensors: dict[str, Callable[[], Tensor]]) -> Callable[[], Target]:
    return lambda: target.with_tensors(tensors)


def _read(target: Target, name: str) -> Callable[[], Tensor]:
    return lambda: target.source.tensor(name, torch.float32)


def _changed(target: Target, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: change(target.source.tensor(name, torch.float32))


_PAIRS = (
    ("gate_proj", "up_proj"),
    ("w1.", "w3."),
    ("k_proj", "v_proj"),
    ("input_layernorm", "post_attention_layernorm"),
    ("attn_norm", "ffn_norm"),
    ("compressor.wkv", "compressor.wgate"),
)
_PLACES = ("experts.", "shared_experts.")


def _exchanges(target: Target, names: list[str]) -> Iterator[Repair]:
    """Two kinds of tensor exchanged: everywhere, by place, and layer by layer."""
    known = set(names)
    for a, b in _PAIRS:
        pairs = [(n, n.replace(a, b)) for n in names if a in n and n.replace(a, b) in known]
        if not pairs:
            continue
        sets = {f"all {a}": pairs}
        for place in _PLACES:
            sets[place] = [p for p in pairs if f".{place}" in p[0]]
        for layer in sorted({_layer(n) for n, _ in pairs}):
            sets[f"layer {layer}"] = [p for p in pairs if _layer(p[0]) == layer]
        for which, members in sets.items():
            if not members:
                continue
            tensors = {x: _read(target, y) for x, y in members}
            tensors |= {y: _read(target, x) for x, y in members}
            what = f"{a.strip('.')} and {b.strip('.')} are exchanged ({which.strip('.')})"
            yield Repair(group_of(members[0][0]), what, _made(target, tensors))


def _layer(name: str) -> int:
    return next((int(p) for p in name.split(".") if p.isdigit()), -1)


_UNDONE = {
    "transposed": "transposed",
    "negated": "negated",
    "1 added": "1 taken away",
    "1 taken away": "1 added",
    "halves of the rows exchanged": "halves of the rows exchanged",
    "heads in reverse order": "heads in reverse order",
    "key and value halves of each head exchanged": "",
}


def _single(target: Target, names: list[str]) -> Iterator[Repair]:
    """One change undone in a kind of tensor, everywhere or in one layer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if ".experts." not in name:
            groups.setdefault(group_of(name), []).append(name)
    for group, members in groups.items():
        options = dict(changes(members[0], target.spec.args))
        shape = tuple(target.source.tensor(members[0], torch.float32).shape)
        for how, undo in _UNDONE.items():
            if how not in options or not _fits(how, group, shape):
                continue
            change = _exchange_back(target.spec.args) if not undo else options[undo]
            for part in (members, *([m] for m in members if len(members) > 1)):
                tensors = {n: _changed(target, n, change) for n in part}
                where = "" if len(part) == len(members) else f" in layer {_layer(part[0])}"
                yield Repair(group, f"{group} is {how}{where}", _made(target, tensors))


def _fits(how: str, group: str, shape: tuple[int, ...]) -> bool:
    if how == "transposed":
        return len(shape) == 2 and shape[0] == shape[1]
    if how in ("1 added", "1 taken away"):
        return "norm" in group and len(shape) == 1
    if how == "negated":
        return "bias" in group or "sink" in group
    if how == "halves of the rows exchanged":
        return len(shape) == 2 and "proj" in group and "kv_b" not in group
    return True


def _exchange_back(args: Any) -> Callable[[Tensor], Tensor]:
    """Undoes the exchange of key and value parts within heads of kv_b_proj."""

    def change(w: Tensor) -> Tensor:
        parts = w.view(args.num_attention_heads, -1, w.shape[1])
        v = args.v_head_dim
        return torch.cat([parts[:, v:], parts[:, :v]], 1).reshape(w.shape)

    return change


def _rotations(target: Target, names: list[str]) -> Iterator[Repair]:
    """Rotary rows in the other layout: queries, keys, or both; index apart from main."""
    turned: dict[str, list[str]] = {}
    for name in names:
        if "rotary rows: pairs read as halves" in dict(changes(name, target.spec.args)):
            turned.setdefault(group_of(name), []).append(name)
    main = [g for g in turned if "indexer" not in g]
    index = [g for g in turned if "indexer" in g]
    sets = [[g] for g in turned] + [s for s in (main, index) if len(s) > 1]
    for groups in sets:
        members = [n for g in groups for n in turned[g]]
        for how, undo in (
            ("pairs read as halves", "rotary rows: halves read as pairs"),
            ("halves read as pairs", "rotary rows: pairs read as halves"),
        ):
            tensors = {
                n: _changed(target, n, dict(changes(n, target.spec.args))[undo]) for n in members
            }
            yield Repair(
                groups[-1], f"rotary rows: {how} ({', '.join(groups)})", _made(target, tensors)
            )


def _orders(target: Target, names: list[str]) -> Iterator[Repair]:
    """Layers and experts under each other's numbers, KV heads in another order."""
    args: Any = target.spec.args
    known = set(names)
    prefix = "layers." if isinstance(args, V4Args | V41Args) else "model.layers."
    for first in range(args.num_hidden_layers - 1):
        a, b = f"{prefix}{first}.", f"{prefix}{first + 1}."
        pairs = {n: b + n[len(a) :] for n in names if n.startswith(a)}
        if all(m in known for m in pairs.values()) and len(pairs) == sum(
            n.startswith(b) for n in names
        ):
            both = pairs | {m: n for n, m in pairs.items()}
            tensors = {n: _read(target, m) for n, m in both.items()}
            what = f"layers {first} and {first + 1} are exchanged"
            yield Repair(f"{prefix}*", what, _made(target, tensors))
    if isinstance(args, LlamaArgs) and args.num_key_value_heads < args.num_attention_heads:
        yield from _kv_heads(target, names)
    yield from _experts(target, names)


def _kv_heads(target: Target, names: list[str]) -> Iterator[Repair]:
    args: Any = target.spec.args
    c = args.head_dim
    members = [n for n in names if "k_proj" in n or "v_proj" in n]
    for shift in range(1, args.num_key_value_heads):
        tensors = {n: _changed(target, n, partial(_roll_heads, c, shift)) for n in members}
        yield Repair(
            group_of(members[0]), f"KV heads are shifted by {shift}", _made(target, tensors)
        )


def _roll_heads(c: int, shift: int, w: Tensor) -> Tensor:
    return w.view(-1, c, w.shape[1]).roll(shift, 0).reshape(w.shape)


def _roll(shift: int, w: Tensor) -> Tensor:
    return w.roll(shift, 0)


def _experts(target: Target, names: list[str]) -> Iterator[Repair]:
    numbers = [n.split(".experts.")[1].split(".")[0] for n in names if ".experts." in n]
    count = max(map(int, numbers), default=-1) + 1
    if count < 2:
        return
    members = [n for n in names if ".experts." in n]
    layers = sorted({_layer(n) for n in members})
    for part in (None, *layers):
        for shift in (1, -1):
            tensors = {}
            for name in members:
                if part is not None and _layer(name) != part:
                    continue
                before, after = name.split(".experts.")
                number, suffix = after.split(".", 1)
                other = (int(number) + shift) % count
                tensors[name] = _read(target, f"{before}.experts.{other}.{suffix}")
            where = "" if part is None else f" in layer {part}"
            what = f"experts are shifted by {-shift}{where}"
            yield Repair(group_of(members[0]), what, _made(target, tensors))


def _ends(target: Target, names: list[str]) -> Iterator[Repair]:
    """Embedding and head."""
    args: Any = target.spec.args
    short = "embed.weight" in names
    embed, head = (
        ("embed.weight", "head.weight")
        if short
        else (
            "model.embed_tokens.weight",
            "lm_head.weight",
        )
    )
    pairs = [n for n in (embed, head) if n in names]
    for part in (pairs, *([n] for n in pairs)):
        for shift in (1, -1):
            tensors = {n: _changed(target, n, partial(_roll, shift)) for n in part}
            what = f"rows of {' and '.join(part)} are shifted by {-shift}"
            yield Repair(part[0], what, _made(target, tensors))
    if len(pairs) == 2 and not getattr(args, "tie_word_embeddings", False):
        tensors = {embed: _read(target, head), head: _read(target, embed)}
        yield Repair(head, "embedding and head are exchanged", _made(target, tensors))
