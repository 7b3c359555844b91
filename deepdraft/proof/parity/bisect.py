"""The first layer and sublayer that goes another way than the reference.

Owns: errors by layer and sublayer, the first that is beyond tolerance, what a router did.
Knows nothing of: repairs, weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepdraft.proof.parity.reference import Trace

TOLERANCE = 1e-4
_PARTS = (("stream_in", "input"), ("attn_out", "attention"), ("ffn_out", "MLP"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where two models part."""

    layer: int
    part: str
    """input (embedding, or what lies between layers), attention, MLP, or head."""
    error: float
    """max |difference| over the deviation of the reference's values."""
    position: int
    """First token at which it is beyond tolerance."""
    router: str = ""
    """What the router did there, where it is the MLP."""

    @property
    def text(self) -> str:
        """In words."""
        if self.layer < 0:
            return "the head or the last norm: all layers agree"
        what = f"layer {self.layer}, {self.part}"
        if self.part == "input" and self.layer == 0:
            what = "the embedding"
        return what + (f"; {self.router}" if self.router else "")


def layer_errors(ours: Trace, theirs: Trace) -> list[dict[str, Any]]:
    """One row per layer: errors of its parts, and the reference's size of them."""
    rows = []
    for number in range(min(len(ours.layers), len(theirs.layers))):
        a, b = ours.layers[f"L{number}"], theirs.layers[f"L{number}"]
        row: dict[str, Any] = {"layer": number}
        for key, part in _PARTS:
            if key in a and key in b and a[key].shape == b[key].shape:
                by_position = _errors(a[key], b[key])
                row[part] = float(by_position.max())
                bad = (by_position > TOLERANCE).nonzero()
                row[f"{part} position"] = int(bad[0]) if len(bad) else None
        row["router"] = _router(a, b)
        rows.append(row)
    return rows


def _errors(a: Tensor, b: Tensor) -> Tensor:
    """[N]: largest difference of each row over the deviation of `b`."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    return ((a - b).abs().amax(-1) / b.std().clamp_min(1e-30)).nan_to_num(nan=torch.inf)


def first_wrong(rows: list[dict[str, Any]], logits_wrong: bool) -> Place | None:
    """The first part beyond tolerance; the head where all layers agree and logits do not.

    A sublayer is judged on its own input: once an input is off, everything after it is.
    """
    for row in rows:
        for _, part in _PARTS:
            if row.get(part, 0.0) > TOLERANCE:
                router = row["router"] if part == "MLP" else ""
                return Place(row["layer"], part, row[part], row[f"{part} position"], router)
    if rows and logits_wrong:
        return Place(-1, "head", 0.0, 0)
    return None


def _router(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """How two routers differ: their picks, or their weights."""
    if "experts" not in a or "experts" not in b:
        return ""
    x, order_x = a["experts"].sort(-1)
    y, order_y = b["experts"].sort(-1)
    if x.shape != y.shape:
        return f"{x.shape[1]} experts a token instead of {y.shape[1]}"
    other = float((x != y).any(-1).double().mean())
    if other > 0.02:
        return f"other experts for {other:.0%} of the tokens"
    same = (x == y).all(-1)
    u, v = a["weights"].gather(-1, order_x)[same], b["weights"].gather(-1, order_y)[same]
    if not len(u) or bool((u - v).abs().max() <= TOLERANCE * v.abs().max()):
        return "router agrees"
    ratio = u.double() / v.double().clamp_min(1e-12)
    if float(ratio.std()) < 1e-3 * float(ratio.mean().abs()):
        return f"same experts, weights {float(ratio.mean()):.4g} times as large"
    return "same experts, other weights"
