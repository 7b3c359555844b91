"""Names the cause of a difference: suspects from the evidence, judged by whether repairing helps.

Owns: the order of trying. Knows nothing of: how a suspect is found or a repair made.

A suspect is a key or a kind of tensor in which the two sides differ; it is the cause if repairing
it alone brings the logits back. Where the reference tells logits only, repairs from a catalogue are
tried, then suspicious values named. Where nothing restores parity, the first wrong layer is all
that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.section import show
from deepdraft.checkpoint.spec import KeyCause, ModelSpec
from deepdraft.errors import DeepdraftError
from deepdraft.ops.elementwise import rms_norm
from deepdraft.proof.doctor.finding import Finding
from deepdraft.proof.doctor.values import value_checks
from deepdraft.proof.parity.bisect import Place
from deepdraft.proof.parity.compare import FLOAT32_TOLERANCE, measure
from deepdraft.proof.parity.reference import Trace
from deepdraft.proof.parity.repairs import Repair, group_repairs, key_repairs, tensor_repairs
from deepdraft.proof.parity.target import Target, try_run
from deepdraft.proof.parity.tensors import Difference, differences

_FIX_KEY = "correct the key where the engine reads it"
_FIX_TENSOR = "correct the weight map, or convert the checkpoint again"
_MAX_SUSPECTS = 12
_ROPES = {"": "rope", "main_": "rope", "compress_": "compress_rope"}
"""transformers' prefix of rotary buffers -> our name."""
_ENOUGH = 1.25
"""Rows for each unknown of a head that is fitted."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Something in which both sides differ, and the target with it repaired."""

    cause: str
    what: str
    evidence: str
    fix: str
    repaired: Target


def suspects(target: Target, reference: Trace) -> list[Suspect]:
    """Differences from the reference, and from the checkpoint that the engine was given."""
    found: list[Suspect] = []
    spec = reference.spec
    if spec is not None:
        found += [_key(target, spec, c, "the reference") for c in target.spec.causes(spec)]
        found += _frequencies(target, reference)
    if reference.weights is not None:
        for d in differences(target, reference.weights):
            found.append(_tensors(target, d, reference.weights, "the reference"))
    if spec is None:
        found += list(_audit(target))
    return found


def _audit(target: Target) -> Iterator[Suspect]:
    """The engine's spec and weights against the checkpoint's own."""
    from deepdraft.checkpoint.section import read_config

    own = ModelSpec.of(read_config(target.checkpoint.path / "config.json"))
    for cause in target.spec.causes(own):
        yield _key(target, own, cause, "config.json")
    if target.source is not target.checkpoint:
        stored = {
            name: target.checkpoint.tensor(name)
            for name in target.names()
            if target.checkpoint.table[name].format not in ("i32", "i64", "ids")
        }
        for d in differences(target, stored):
            yield _tensors(target, d, stored, "the file")


def _key(target: Target, other: ModelSpec, cause: KeyCause, whose: str) -> Suspect:
    try:
        repaired = target.with_spec(target.spec.replaced(cause.key, cause.theirs))
    except DeepdraftError:
        repaired = target.with_spec(other)
    theirs = "absent" if cause.theirs is None else show(cause.theirs)
    ours = "absent" if cause.ours is None else show(cause.ours)
    return Suspect(
        cause.key,
        f"{cause.key} is {ours} here and {theirs} in {whose}",
        f"it decides {', '.join(cause.fields)}",
        _FIX_KEY,
        repaired,
    )


def _frequencies(target: Target, reference: Trace) -> Iterator[Suspect]:
    """Rotary frequencies as the reference holds them in memory, whatever its configuration says."""
    assert reference.spec is not None
    if target.spec.causes(reference.spec):
        return  # the keys say so already
    ours = target.spec.effective
    scaled = bool(target.spec.config.get("rope_scaling"))
    for buffer, theirs in reference.frequencies.items():
        name = _ROPES.get(buffer.removesuffix("inv_freq"))
        mine = ours.get(f"{name}.frequencies")
        if mine is None:
            continue
        same = len(mine) == len(theirs)
        worst = max((abs(a - b) / b for a, b in zip(mine, theirs, strict=False) if b), default=0)
        if not same or worst > 1e-5:
            yield Suspect(
                "rope_scaling" if scaled else "rope_theta",
                "the reference turns by other frequencies, though the configurations agree",
                f"{buffer}: {len(theirs)} pairs to our {len(mine)}, up to {worst:.2g} apart",
                _FIX_KEY,
                target,
            )
    for name, theirs in reference.factors.items():
        rope = _ROPES.get(name.removesuffix("attention_scaling"))
        mine = ours.get(f"{rope}.cos_sin_factor")
        if mine is not None and abs(mine - theirs) > 1e-6 * abs(theirs):
            key = "rope_scaling.attention_factor"
            yield Suspect(
                key,
                "the reference multiplies cos and sin by another factor, though the "
                "configurations agree",
                f"{theirs:.6g} there, {mine:.6g} here",
                "write the factor down in config.json; which one is right: docs/families.md",
                target.with_spec(target.spec.replaced(key, theirs)) if scaled else target,
            )


def _tensors(target: Target, d: Difference, weights: dict[str, Tensor], whose: str) -> Suspect:
    count = f" and {len(d.names) - 1} more" if len(d.names) > 1 else ""
    return Suspect(
        d.group,
        f"{d.names[0]}{count} against {whose}: {d.how}",
        f"relative difference {d.error:.2g}",
        _FIX_TENSOR,
        target.with_tensors({name: weights[name] for name in d.names}),
    )


def diagnose(
    target: Target, reference: Trace, ours: Trace | str, place: Place | None, *, search: bool = True
) -> list[Finding]:
    """Findings for a target that differs from the reference, the cause first."""
    judge = _Judge(reference, ours)
    found = suspects(target, reference)[:_MAX_SUSPECTS]
    judged = [(judge(s.repaired), s) for s in found]
    restoring = [s for error, s in judged if error <= FLOAT32_TOLERANCE]
    where = place.text if place is not None else ""
    if restoring:
        return [_finding(s, judge, 0.0, where) for s in _ranked(restoring)]
    if len(found) > 1:
        both = _together(target, reference, found)
        error = judge(both)
        if error <= FLOAT32_TOLERANCE:
            judged.sort(key=lambda item: item[0])
            return [_finding(s, judge, None, where) for _, s in judged]
    if search and reference.weights is None and not found:
        repair = try_repairs(target, judge)
        if repair is not None:
            return [_repaired(repair, judge, where)]
        if finding := _fitted_head(target, reference):
            return [finding]
        if odd := _odd_values(target, judge):
            return odd
    rest = [_finding(s, judge, error, where) for error, s in sorted(judged, key=lambda i: i[0])]
    return [*rest, _unexplained(target, reference, ours, judge, place)] if not rest else rest


def _ranked(found: list[Suspect]) -> list[Suspect]:
    """Parts of an object before the whole object."""
    return sorted(found, key=lambda s: any(o.cause.startswith(f"{s.cause}.") for o in found))


def _together(target: Target, reference: Trace, found: list[Suspect]) -> Target:
    """All suspects repaired at once."""
    made = target if reference.spec is None else target.with_spec(reference.spec)
    weights: dict[str, Tensor] = reference.weights or {}
    names = set(target.names())
    tensors = {name: x for name, x in weights.items() if name in names}
    if any(s.repaired.source is not target.source for s in found) and tensors:
        made = made.with_tensors(tensors)
    return made


class _Judge:
    """Error of a repaired target. A prefix that shows the fault is tried before the whole text."""

    def __init__(self, reference: Trace, ours: Trace | str) -> None:
        self.reference = reference
        self.before = torch.inf
        self.prefix = 8
        self.tried = 0
        if isinstance(ours, Trace):
            found = measure(ours.logits[reference.first :], reference.logits[reference.first :])
            self.before = found.dl
            bad = next(
                (i for i, e in enumerate(found.by_position) if e > 10 * FLOAT32_TOLERANCE), 8
            )
            self.prefix = min(len(reference.ids), reference.first + max(8, bad + 1))

    def __call__(self, target: Target) -> float:
        """dl over the whole text, or over the prefix if that already fails."""
        self.tried += 1
        error = self._error(target, self.prefix)
        if error > FLOAT32_TOLERANCE or self.prefix == len(self.reference.ids):
            return error
        return self._error(target, len(self.reference.ids))

    def _error(self, target: Target, count: int) -> float:
        trace = try_run(target, self.reference.ids[:count])
        if isinstance(trace, str):
            return torch.inf
        at = slice(self.reference.first, count)
        theirs = self.reference.logits[at]
        ours = trace.logits[at]
        if self.reference.partial:
            ours = ours.log_softmax(-1)
        # The spread of the whole reference: that of a few rows would move the tolerance.
        spread = self.reference.logits[~self.reference.logits.isnan()].std()
        told = ~theirs.isnan()
        return float(((ours - theirs)[told]).abs().max() / spread)


def try_repairs(target: Target, judge: _Judge) -> Repair | None:
    """The first single repair that restores parity."""
    repairs: Iterable[Repair] = chain(
        key_repairs(target), tensor_repairs(target), group_repairs(target)
    )
    for repair in repairs:
        try:
            made = repair.made()
        except DeepdraftError:
            continue
        if judge(made) <= FLOAT32_TOLERANCE:
            return repair
    return None


def _finding(s: Suspect, judge: _Judge, after: float | None, where: str) -> Finding:
    if after == 0.0:
        proof = f"repairing it alone brings dl from {judge.before:.3g} to within tolerance"
    elif after is None:
        proof = "repairing it together with the other findings restores parity"
    else:
        proof = f"repairing it alone leaves dl at {after:.3g} (before: {judge.before:.3g})"
    first = f"; first wrong: {where}" if where else ""
    return Finding("parity", s.cause, s.what, f"{proof}; {s.evidence}{first}", s.fix)


def _repaired(repair: Repair, judge: _Judge, where: str) -> Finding:
    first = f"; first wrong: {where}" if where else ""
    return Finding(
        "parity",
        repair.cause,
        repair.what,
        f"of {judge.tried} single repairs tried this one brings dl from {judge.before:.3g} to "
        f"within tolerance{first}",
        _FIX_KEY if "=" in repair.what else _FIX_TENSOR,
    )


def _odd_values(target: Target, judge: _Judge) -> list[Finding]:
    """What looks wrong about the weights themselves: values that no repair can bring back."""
    return [
        replace(
            finding,
            check="parity",
            evidence=f"{finding.evidence}; none of {judge.tried} repairs restores parity, and "
            "these values are odd",
            severity="error",
        )
        for finding in value_checks(target.checkpoint, target.source)
    ]


def _fitted_head(target: Target, reference: Trace) -> Finding | None:
    """Whether some other head on our last hidden states gives the reference's logits."""
    if reference.partial:
        return None
    try:
        model = target.model()
        sequence = model.new_pool(1, len(reference.ids), slack=len(reference.ids)).open()
        hidden = model.step([(sequence, reference.ids)]).hidden
    except (DeepdraftError, RuntimeError, AttributeError):
        return None
    if hidden is None:
        return None
    h = rms_norm(hidden, model.norm, model.eps).double()
    count = int(_ENOUGH * h.shape[1])
    if len(h) < count + 16:
        return None
    theirs = reference.logits.double()
    head = torch.linalg.lstsq(h[:count], theirs[:count]).solution
    error = float((h[count:] @ head - theirs[count:]).abs().max() / theirs.std())
    if error > 10 * FLOAT32_TOLERANCE:
        return None
    name = model.names[2]
    return Finding(
        "parity",
        name,
        f"{name} is another matrix than the reference's: the hidden states are right",
        f"a head fitted to {count} positions gives the other {len(h) - count} to {error:.2g}",
        "fetch or convert the head again; check tie_word_embeddings",
    )


def _unexplained(
    target: Target, reference: Trace, ours: Trace | str, judge: _Judge, place: Place | None
) -> Finding:
    if isinstance(ours, str):
        return Finding("parity", "load", "the engine cannot run this", ours, "see the message")
    if place is not None and (leak := _bias_in_weights(target, reference, ours, place)):
        return leak
    cause = "engine" if place is None else _place_cause(place)
    known = "weights and configuration agree with the reference: the arithmetic differs"
    if reference.weights is None:
        known = f"none of {judge.tried} single repairs restores parity"
    return Finding(
        "parity",
        cause,
        f"our logits differ (dl {judge.before:.3g})"
        + (f", first in {place.text}" if place else ""),
        known,
        "compare this sublayer's code with docs/families.md"
        if place
        else "use a reference that tells more: hf, or native on the clean directory",
    )


def _place_cause(place: Place) -> str:
    return f"engine: {place.text.split(';')[0]}"


def _bias_in_weights(target: Target, reference: Trace, ours: Trace, place: Place) -> Finding | None:
    """The selection bias among the experts' weights: right picks, wrong weights."""
    if "same experts" not in place.router or place.layer < 0:
        return None
    note = ours.layers.get(f"L{place.layer}", {})
    if "scores_router" not in note:
        return None
    args: Any = target.spec.args
    router = args.router
    base = note["scores_router"].double()
    names = [
        n
        for n in target.names()
        if f"layers.{place.layer}." in n and n.endswith(("correction_bias", "gate.bias"))
    ]
    if not names:
        return None
    biased = base + target.source.tensor(names[0], torch.float32).double()
    got = note["weights"].double()
    picked = biased.gather(-1, note["experts"])
    if router.normalise:
        picked = picked / picked.sum(-1, keepdim=True)
    if float((picked * router.scale - got).abs().max()) > 1e-4 * float(got.abs().max()):
        return None
    return Finding(
        "parity",
        names[0].replace(f".{place.layer}.", ".*.", 1),
        "the selection bias is part of the experts' weights; it belongs into the choice only",
        f"{place.text}: our weights are those of score plus bias",
        "take the weights from the scores without the bias",
    )
