"""Stacked tensors -> the published ones, one at a time.

A stack is described as {"target": pattern, "sources": [patterns], "over": field}: along its first
axis lie the values 0, 1, ... of the field, and in each of them the sources one after the other,
all of one size. {name} in a pattern stands for one dotted part. Standard library only.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Form = tuple[int, ...]
MAX_PARTS = 500_000
"""Published tensors in one stack: several times what the largest published model has in all."""


class Splitter:
    """Knows some stacks."""

    def __init__(self, stacks: Sequence[Mapping[str, Any]]) -> None:
        self._stacks = [(_pattern(stack["target"]), stack) for stack in stacks]

    def match(self, name: str) -> tuple[Mapping[str, Any], dict[str, str]] | None:
        """The stack that a name belongs to, and what its fields are."""
        for pattern, stack in self._stacks:
            if found := pattern.fullmatch(name):
                return stack, found.groupdict()
        return None

    def parts(self, name: str, shape: Form) -> list[tuple[str, Form]] | None:
        """Names and shapes of the published tensors in one that is stored, in the order of their
        bytes; None for one that is no stack. Raises ValueError for a stack of another form."""
        if (found := self.match(name)) is None:
            return None
        stack, fields = found
        sources: Sequence[str] = stack["sources"]
        if len(shape) != 3 or not all(shape) or shape[1] % len(sources):
            raise ValueError(
                f"{name} has the shape {list(shape)}; wanted [{stack['over']}, rows, columns], "
                f"none of them 0, with rows that are {len(sources)} equal parts"
            )
        if shape[0] * len(sources) > MAX_PARTS:
            raise ValueError(
                f"{name} has the shape {list(shape)}: a stack of more than {MAX_PARTS} tensors; "
                "its header is damaged, fetch the file again"
            )
        form = (shape[1] // len(sources), shape[2])
        return [
            (source.format(**fields, **{stack["over"]: number}), form)
            for number in range(shape[0])
            for source in sources
        ]

    def published(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Published tensors; those that are no stacks pass as they are."""
        for name, tensor in weights:
            parts = self.parts(name, tuple(tensor.shape))
            if parts is None:
                yield name, tensor
                continue
            rows = tensor.flatten(0, 1)
            for i, (own, form) in enumerate(parts):
                yield own, rows[i * form[0] : (i + 1) * form[0]]


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", text)
    return re.compile(
        "".join(f"(?P<{p}>[^.]+)" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    )
