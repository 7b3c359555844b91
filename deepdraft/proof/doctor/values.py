"""Checks of weights' values: not finite, scales that are no scales, constants, copies, range.

Owns: one pass over all tensors, in float32. Knows nothing of: running a model.

A finding here is a suspicion, except for values that cannot be right: a router bias that is zero
everywhere is legal, and nearly always a conversion that dropped it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.names import SKIP_RULES, Entry
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import CheckpointError
from deepdraft.proof.doctor.accounting import group_of
from deepdraft.proof.doctor.finding import Finding

FLOAT16_MAX = 65504.0
_EXPONENTS = (64.0, 192.0)
"""E8M0 bytes of factors between 2^-63 and 2^65: where those of weights lie."""
_LEAST_SIDE = 8
"""Smaller matrices may be equal by training."""
_OFTEN_CONSTANT = ("bias_vl",)
"""Zero in models that were trained on text alone."""
_SCALE_FORMATS = ("scale", "block_scale")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one tensor looks like."""

    largest: float
    constant: float | None
    """The value, where all are equal."""
    digest: bytes
    narrow: int
    """The smaller side of a matrix, 0 for vectors."""
    rounded: bool
    """All values are bfloat16 values."""


def value_checks(checkpoint: Checkpoint, source: Any = None) -> list[Finding]:
    """Reads every tensor that the model reads, once; from `source` where an engine's own weights
    are to be judged instead of the file's."""
    source = checkpoint if source is None else source
    findings: list[Finding] = []
    seen: dict[str, Seen] = {}
    for name, entry in checkpoint.table.items():
        drafter = entry.module == "mtp"  # read to draft; holds copies of the model's by design
        if entry.format in _SCALE_FORMATS or (entry.module in SKIP_RULES and not drafter):
            continue
        if entry.format in ("ids", "i32", "i64") or (drafter and source is not checkpoint):
            continue
        findings += _scales(checkpoint, entry)
        try:
            x = source.tensor(name, torch.float32)
            if not drafter:
                seen[name] = look_at(x)
        except CheckpointError as error:
            findings.append(
                Finding("values", name, error.message, "", "fetch the file again from its source")
            )
    findings += _tied(checkpoint, seen)
    findings += _range(seen)
    findings += _constants(seen)
    findings += _copies(seen)
    # Codes times scales are no bfloat16 values, and say nothing about the others.
    plain = {n: s for n, s in seen.items() if checkpoint.table[n].scale_name is None}
    findings += _rounded(plain)
    return findings


def look_at(x: Tensor) -> Seen:
    """Largest magnitude, whether all values are one, digest of the float32 bytes."""
    low, high = float(x.min()), float(x.max())
    digest = hashlib.blake2b(x.contiguous().numpy().tobytes(), digest_size=16).digest()
    constant = low if low == high and x.numel() > 1 else None
    rounded = torch.equal(x.bfloat16().float(), x)
    narrow = min(x.shape) if x.ndim > 1 else 0
    return Seen(max(abs(low), abs(high)), constant, digest, narrow, rounded)


def _scales(checkpoint: Checkpoint, entry: Entry) -> Iterator[Finding]:
    """Float factors that are whole numbers around 127 are exponent bytes cast to numbers."""
    if entry.scale_name is None or checkpoint.table[entry.scale_name].format != "block_scale":
        return
    scales = checkpoint.packed(entry.name).scales
    if scales is None or scales.dtype != torch.float32:
        return
    low, high = _EXPONENTS
    if bool(((scales == scales.round()) & (scales >= low) & (scales <= high)).all()):
        yield Finding(
            "values",
            entry.scale_name,
            "the scales are E8M0 bytes that were converted to numbers instead of powers of two",
            f"all {scales.numel()} factors are whole numbers from {float(scales.min()):g} to "
            f"{float(scales.max()):g}",
            "reinterpret the bytes: the factor of byte b is 2^(b - 127); store F8_E8M0 or U8",
        )


def _tied(checkpoint: Checkpoint, seen: dict[str, Seen]) -> Iterator[Finding]:
    tied = getattr(checkpoint.args, "tie_word_embeddings", False)
    for embed, head in (
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("embed.weight", "head.weight"),
    ):
        if embed not in seen or head not in seen:
            continue
        same = seen[embed].digest == seen[head].digest
        if tied and not same:
            yield Finding(
                "values",
                head,
                f"config.json sets tie_word_embeddings, but {head} differs from {embed}",
                "both are stored",
                "set tie_word_embeddings to false, or remove the one that is wrong",
            )
        if same and not tied:
            yield Finding(
                "values",
                head,
                f"{head} equals {embed}, though tie_word_embeddings is false: the head may have "
                "been tied by mistake",
                "the bytes are the same",
                f"fetch {head} again, or set tie_word_embeddings if the model is tied",
                "warning",
            )


def _range(seen: dict[str, Seen]) -> Iterator[Finding]:
    for group, names in _groups(n for n, s in seen.items() if s.largest > FLOAT16_MAX).items():
        largest = max(seen[n].largest for n in names)
        yield Finding(
            "values",
            group,
            "values are beyond float16",
            f"{names[0]} reaches {largest:.4g}, float16 ends at {FLOAT16_MAX:g}",
            "run the model in bfloat16 or float32",
            "warning",
        )


def _constants(seen: dict[str, Seen]) -> Iterator[Finding]:
    """Groups of tensors that are one value throughout, while the others are not."""
    constant = {
        name: s.constant
        for name, s in seen.items()
        if s.constant is not None and not name.endswith(_OFTEN_CONSTANT)
    }
    if len(constant) > len(seen) / 2:
        return  # an untrained model, or one number repeated: nothing can be told
    members = _groups(seen)
    for group, names in _groups(constant).items():
        value = constant[names[0]]
        part = "all" if len(names) == len(members[group]) else f"{len(names)} of"
        yield Finding(
            "values",
            group,
            f"every value is {value:g}: the tensor was dropped and filled in, or never written",
            f"{part} {len(members[group])} tensors of the kind, such as {names[0]}",
            "fetch or convert these tensors again",
            "warning",
        )


def _copies(seen: dict[str, Seen]) -> Iterator[Finding]:
    """Matrices with the same bytes in different places."""
    places: dict[bytes, list[str]] = defaultdict(list)
    for name, s in seen.items():
        if s.narrow >= _LEAST_SIDE and s.constant is None and "embed" not in name:
            places[s.digest].append(name)
    for names in places.values():
        if len(names) > 1:
            yield Finding(
                "values",
                group_of(names[1]),
                f"{names[1]} is a copy of {names[0]}",
                f"{len(names)} tensors have the same bytes",
                "fetch or convert these tensors again",
                "warning",
            )


def _rounded(seen: dict[str, Seen]) -> Iterator[Finding]:
    """A few matrices of bfloat16 values among float32 ones: a cast that only some went through."""
    matrices = [n for n, s in seen.items() if s.narrow >= 2 and s.constant is None]
    rounded = [n for n in matrices if seen[n].rounded]
    if not 0 < len(rounded) < len(matrices) / 4:
        return
    for group, names in _groups(rounded).items():
        yield Finding(
            "values",
            group,
            "values were rounded to bfloat16 while other matrices have float32 values",
            f"{len(rounded)} of {len(matrices)} matrices, such as {names[0]}",
            "take these tensors from the source in float32",
            "warning",
        )


def _groups(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[group_of(name)].append(name)
    return groups
