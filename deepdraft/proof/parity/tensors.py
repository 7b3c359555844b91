"""Weights of both sides, tensor by tensor: which differ, and what was done to them.

Owns: the comparison, and the list of what goes wrong in conversions (transposed, swapped, shifted,
turned, rounded, dropped). Knows nothing of: running a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepdraft.arch import LlamaArgs, V4Args, V41Args
from deepdraft.proof.doctor.accounting import group_of
from deepdraft.proof.parity.target import Target

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """Tensors of one kind that differ in the same way."""

    group: str
    """Name with * for numbers."""
    names: tuple[str, ...]
    how: str
    """What was done, as far as it is known."""
    error: float
    """Largest relative difference."""
    known: bool
    """`how` explains the values exactly."""


def differences(target: Target, reference: Weights) -> list[Difference]:
    """Tensors of the target that are not the reference's, by kind."""
    changed: dict[str, Tensor] = {}
    for name in target.names():
        theirs = reference.get(name)
        if theirs is None:
            continue
        ours = target.source.tensor(
            name, torch.int64 if not theirs.is_floating_point() else torch.float32
        )
        if ours.shape != theirs.shape or not torch.equal(ours, theirs.to(ours.dtype)):
            changed[name] = ours
    found: dict[tuple[str, str, bool], list[tuple[str, float]]] = defaultdict(list)
    for name, ours in changed.items():
        error = _error(ours, reference[name])
        other = _found_elsewhere(name, ours, reference)
        if other is not None:
            group, how = _exchanged(name, other)
        else:
            group, how = group_of(name), _explain(name, ours, reference, target.spec.args)
        found[group, how or "other values", bool(how)].append((name, error))
    return [
        Difference(group, tuple(n for n, _ in members), how, max(e for _, e in members), known)
        for (group, how, known), members in found.items()
    ]


def _error(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.double(), theirs.double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def _found_elsewhere(name: str, ours: Tensor, reference: Weights) -> str | None:
    """Another tensor of the reference that has these values."""
    for other, values in reference.items():
        if other != name and values.shape == ours.shape and torch.equal(values, ours):
            return other
    return None


def _exchanged(name: str, other: str) -> tuple[str, str]:
    """Group and description of a tensor that holds another's values. Both sides of an exchange,
    and all parts of an exchanged layer or expert, get the same."""
    a, b = name.split("."), other.split(".")
    apart = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(apart) != 1:
        return group_of(name), f"holds {other}"
    at = apart[0]
    if a[at].isdigit() and b[at].isdigit():
        what = "experts" if "experts" in a[:at] else "layers"
        return group_of(".".join([*a[: at + 1], ""])) + "*", f"{what} under each other's numbers"
    first, second = sorted((a[at], b[at]))
    return (
        group_of(".".join([*a[:at], first, *a[at + 1 :]])),
        f"{first} and {second} are exchanged",
    )


def _explain(name: str, ours: Tensor, reference: Weights, args: Any) -> str:
    """What turns the reference's tensor into ours, "" where nothing known does."""
    theirs = reference[name]
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} instead of {list(theirs.shape)}"
    for how, change in changes(name, args):
        try:
            made = change(theirs)
        except (RuntimeError, ValueError, IndexError):
            continue
        if made.shape == ours.shape and torch.equal(made, ours):
            return how
    if ours.is_floating_point() and ours.ndim > 1:
        if torch.equal(ours.flatten().sort().values, theirs.flatten().sort().values):
            return "the same values in another order"
        if _exponents_as_numbers(ours, theirs):
            return "scales read as whole numbers instead of powers of two"
        ratio = ours / theirs.where(theirs != 0, torch.ones_like(theirs))
        if bool(((ratio - ratio.mean()).abs() < 1e-5 * ratio.mean().abs()).all()):
            return f"{float(ratio.mean()):.6g} times as large"
    return ""


def _exponents_as_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Whether each value is the right one times byte / 2^(byte - 127) for some scale byte."""
    at = theirs != 0
    byte = torch.arange(64, 193, dtype=torch.float64)
    wrong, _ = (byte / 2.0 ** (byte - 127)).sort()
    ratio = ours[at].double() / theirs[at].double()
    place = torch.searchsorted(wrong, ratio).clamp(1, len(wrong) - 1)
    near = torch.minimum((wrong[place] - ratio).abs(), (wrong[place - 1] - ratio).abs())
    return bool(len(ratio) and (near <= 1e-5 * ratio).all())


Named = Iterator[tuple[str, Callable[[Tensor], Tensor]]]


def changes(name: str, args: Any) -> Named:
    """What conversions do to a tensor of this name, by mistake."""
    yield "transposed", lambda w: w.t()
    yield "filled with 1", torch.ones_like
    yield "filled with 0", torch.zeros_like
    yield "negated", torch.neg
    yield "1 added", lambda w: w + 1
    yield "1 taken away", lambda w: w - 1
    yield "rounded to bfloat16", lambda w: w.bfloat16().to(w.dtype)
    yield "rounded to float16", lambda w: w.half().to(w.dtype)
    yield "rows shifted by one", lambda w: w.roll(1, 0)
    yield "rows shifted back by one", lambda w: w.roll(-1, 0)
    yield "halves of the rows exchanged", lambda w: torch.cat(w.chunk(2)[::-1])
    yield from rotary_changes(name, args)
    yield from head_changes(name, args)


def rotary_changes(name: str, args: Any) -> Named:
    """The two layouts of rotary pairs, each read as the other."""
    for start, width, head in rotary_rows(name, args):
        yield "rotary rows: pairs read as halves", lambda w, a=(start, width, head): turn(w, *a)
        yield (
            "rotary rows: halves read as pairs",
            lambda w, a=(start, width, head): turn(w, *a, back=True),
        )


def rotary_rows(name: str, args: Any) -> Iterator[tuple[int, int, int]]:
    """(start, width, rows of a head) of rotary rows in a map to queries or keys."""
    if isinstance(args, V41Args):
        return
    if isinstance(args, LlamaArgs):
        if "q_proj" in name or "k_proj" in name:
            yield 0, args.head_dim, args.head_dim
        return
    rope = args.qk_rope_head_dim
    if "indexer.wq_b" in name or "indexer.wk" in name:
        start = args.index_head_dim - rope if isinstance(args, V4Args) else 0
        yield start, rope, args.index_head_dim
    elif isinstance(args, V4Args):
        if "attn.wq_b" in name or name.endswith("attn.wkv.weight"):
            yield args.head_dim - rope, rope, args.head_dim
    elif "q_b_proj" in name or "q_proj" in name:
        yield args.qk_nope_head_dim, rope, args.qk_nope_head_dim + rope
    elif "kv_a_proj_with_mqa" in name:
        yield args.kv_lora_rank, rope, args.kv_lora_rank + rope


def turn(w: Tensor, start: int, width: int, head: int, *, back: bool = False) -> Tensor:
    """Rows of adjacent pairs as half-split ones in every head; `back`: the other way."""
    heads = w.view(-1, head, *w.shape[1:]).clone()
    part = heads[:, start : start + width]
    if back:
        first, second = part.chunk(2, 1)
        made = torch.stack([first, second], 2).flatten(1, 2)
    else:
        made = torch.cat([part[:, 0::2], part[:, 1::2]], 1)
    heads[:, start : start + width] = made
    return heads.view(w.shape)


def head_changes(name: str, args: Any) -> Named:
    """Heads in another order, and the key and value parts of a head exchanged."""
    if isinstance(args, LlamaArgs):
        if "k_proj" in name or "v_proj" in name or "q_proj" in name:
            c = args.head_dim
            yield (
                "heads in reverse order",
                lambda w: w.view(-1, c, w.shape[1]).flip(0).view(w.shape),
            )
        return
    if "kv_b_proj" in name:
        nope, heads = args.qk_nope_head_dim, args.num_attention_heads

        def exchange(w: Tensor) -> Tensor:
            parts = w.view(heads, -1, w.shape[1])
            return torch.cat([parts[:, nope:], parts[:, :nope]], 1).reshape(w.shape)

        yield "key and value halves of each head exchanged", exchange
