"""Declarative weight maps: rename, fuse, split, permute, transpose; strict, and invertible.

Owns: rules, their matching against the names that are there, and applying a map or its inverse one
tensor at a time. The maps themselves are in `spec_maps`. Knows nothing of: files, families.

A rule takes source tensors to one target. Every source must be used exactly once (or be left out by
name), every target be made once. The inverse of a map needs no rules of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, Protocol

from deepdraft.checkpoint.shards import Nearest
from deepdraft.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[[str], "Tensor"]
_MAX_LISTED = 6


class Change(Protocol):
    """A reversible change of one tensor."""

    def forward(self, x: Tensor) -> Tensor: ...

    def back(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Transpose:
    """[out, in] <-> [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t()

    def back(self, x: Tensor) -> Tensor:
        return x.t()


@dataclass(frozen=True, slots=True)
class Rows:
    """Puts rows in another order: row i of the result is row `order(rows)[i]`."""

    order: Callable[[int], Sequence[int]]

    def forward(self, x: Tensor) -> Tensor:
        return x[list(self.order(x.shape[0]))]

    def back(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        out[list(self.order(x.shape[0]))] = x
        return out


def halves_from_pairs(head: int, start: int, width: int, *, tail: bool = False) -> Rows:
    """Rotary rows of adjacent pairs become half-split ones: in each head of `head` rows, `width`
    rows from `start` on. `tail`: only the last `width` rows of all (one key for all heads)."""

    def order(rows: int) -> list[int]:
        index = list(range(rows))
        heads = [rows - width] if tail else [at + start for at in range(0, rows, head)]
        for at in heads:
            part = index[at : at + width]
            index[at : at + width] = part[0::2] + part[1::2]
        return index

    return Rows(order)


@dataclass(frozen=True, slots=True)
class Rule:
    """`sources` -> `target`, by patterns in which {name} stands for one dotted part.

    one: a single source. concat: the sources side by side along `axis`. stack: the same for each
    value 0, 1, ... of the field `over`, the results along a new first axis.
    """

    sources: tuple[str, ...]
    target: str
    join: Literal["one", "concat", "stack"] = "one"
    axis: int = 0
    over: str = ""
    changes: tuple[Change, ...] = ()

    @staticmethod
    def rename(source: str, target: str, *changes: Change) -> Rule:
        """One tensor under another name."""
        return Rule((source,), target, changes=changes)


@dataclass(frozen=True, slots=True)
class Piece:
    """One target, with the sources it is made of."""

    rule: Rule
    target: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A map applied to the names and shapes that are there."""

    pieces: dict[str, Piece]
    shapes: Mapping[str, Shape]
    """Of the sources."""
    owner: dict[str, str] = field(default_factory=dict)
    """Source -> target."""

    def read(self, target: str, source: Read) -> Tensor:
        """A target tensor, from tensors of the sources."""
        import torch

        piece = self.pieces[target]
        parts = [self._forward(piece.rule, source(name)) for name in piece.sources]
        if piece.rule.join == "one":
            return parts[0]
        if piece.rule.join == "concat":
            return torch.cat(parts, piece.rule.axis)
        each = len(piece.rule.sources)
        places = [parts[at : at + each] for at in range(0, len(parts), each)]
        return torch.stack([torch.cat(place, piece.rule.axis) for place in places])

    def undo(self, source: str, target: Read) -> Tensor:
        """A source tensor, from tensors of the targets: the inverse map."""
        if source not in self.owner:
            raise CheckpointError(f"the map makes no tensor of {source}")
        piece = self.pieces[self.owner[source]]
        rule, whole = piece.rule, target(piece.target)
        place, number = divmod(piece.sources.index(source), len(rule.sources))
        beside = piece.sources[place * len(rule.sources) :][: len(rule.sources)]
        if rule.join == "stack":
            whole = whole[place]
        if rule.join != "one":
            sizes = [self.shapes[name][rule.axis] for name in beside]
            if sum(sizes) != whole.shape[rule.axis]:
                raise CheckpointError(
                    f"{piece.target} has {whole.shape[rule.axis]} rows on axis {rule.axis}; its "
                    f"parts have {sizes}"
                )
            whole = whole.split(sizes, rule.axis)[number]
        for change in reversed(rule.changes):
            whole = change.back(whole)
        return whole

    @staticmethod
    def _forward(rule: Rule, x: Tensor) -> Tensor:
        for change in rule.changes:
            x = change.forward(x)
        return x

    @property
    def values(self) -> int:
        """Values that the sources hold in all."""
        return sum(prod(self.shapes[name]) for name in self.owner)


class WeightMap:
    """A list of rules; the first that matches a name takes it."""

    def __init__(self, rules: Iterable[Rule], *, left_out: Iterable[str] = ()) -> None:
        """`left_out`: patterns of source names that make no target."""
        self.rules = tuple(rules)
        self._patterns = [
            (rule, number, _pattern(source))
            for rule in self.rules
            for number, source in enumerate(rule.sources)
        ]
        self._left_out = [_pattern(name) for name in left_out]

    def plan(self, shapes: Mapping[str, Shape], expected: Iterable[str] | None = None) -> Plan:
        """The map for these source tensors. `expected`: the targets that must come out.

        Raises one CheckpointError that lists sources no rule takes, targets made twice or in part,
        and targets missing or not expected.
        """
        groups: dict[tuple[int, str], dict[tuple[int, int], list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )
        left_over = []
        for name in shapes:
            found = self._match(name)
            if found is None:
                if not any(p.fullmatch(name) for p in self._left_out):
                    left_over.append(name)
                continue
            rule, number, fields = found
            place = int(fields.pop(rule.over)) if rule.over else 0
            target = rule.target.format(**fields)
            groups[self.rules.index(rule), target][place, number].append(name)
        pieces: dict[str, Piece] = {}
        problems = {"no rule takes": left_over, "made in part": [], "made twice": []}
        for (rule_number, target), members in groups.items():
            rule = self.rules[rule_number]
            keys = sorted(members)
            if target in pieces or any(len(names) > 1 for names in members.values()):
                problems["made twice"].append(target)
            places = 1 if not rule.over else keys[-1][0] + 1
            if keys != [(p, n) for p in range(places) for n in range(len(rule.sources))]:
                problems["made in part"].append(target)
            pieces[target] = Piece(rule, target, tuple(members[k][0] for k in keys))
        if expected is not None:
            wanted = set(expected)
            near = Nearest(pieces)
            problems["missing"] = [
                name + near.hint(name, "made") for name in sorted(wanted - pieces.keys())
            ]
            problems["not expected"] = sorted(pieces.keys() - wanted)
        _refuse(problems)
        owner = {source: p.target for p in pieces.values() for source in p.sources}
        return Plan(pieces, dict(shapes), owner)

    def _match(self, name: str) -> tuple[Rule, int, dict[str, str]] | None:
        for rule, number, pattern in self._patterns:
            if found := pattern.fullmatch(name):
                return rule, number, found.groupdict()
        return None


def _refuse(problems: Mapping[str, list[str]]) -> None:
    count = sum(map(len, problems.values()))
    if not count:
        return
    lines = [f"the weight map does not fit these tensors ({count} problems):"]
    for kind, names in problems.items():
        lines += [f"  {kind}: {name}" for name in names[:_MAX_LISTED]]
        if len(names) > _MAX_LISTED:
            lines.append(f"  {kind}: {len(names) - _MAX_LISTED} more")
    raise CheckpointError("\n".join(lines))


def _pattern(text: str) -> re.Pattern[str]:
    """{name} matches one dotted part, {*} anything."""
    parts = re.split(r"(\{[a-z_*]+\})", text)
    seen: Counter[str] = Counter()
    out = []
    for part in parts:
        if part == "{*}":
            out.append(".+")
        elif part.startswith("{"):
            name = part[1:-1]
            seen[name] += 1
            out.append(f"(?P={name})" if seen[name] > 1 else f"(?P<{name}>[^.]+)")
        else:
            out.append(re.escape(part))
    return re.compile("".join(out))
