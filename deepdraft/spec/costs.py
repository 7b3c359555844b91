"""What a step costs, by the number of its rows and by load, and what a draft costs.

Owns: the measured tables and reading between their points. Knows nothing of: requests.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any, Protocol

from deepdraft.errors import ConfigError

SHORT = 2
"""The smallest block that is drafted for several sequences."""


class Costs(Protocol):
    """What steps cost (`CostTable`, `spec.live`)."""

    def step_ms(self, num_rows: int, load: float = 0.0) -> float:
        """Milliseconds of a step of `num_rows` rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """ms[l][r]: milliseconds of a step of rows[r] rows at load loads[l].

    A load is any one number that steps slow down with and that is known before a step; the engine's
    is the number of sequences. With a single load it is ignored. Between points the table is read
    linearly; outside the loads it is held, beyond the rows its last slope goes on. With `padded`, a
    step of some rows costs what the next measured count costs, as with captured graphs, and more
    rows than the last count cannot be run. Raises ConfigError for a table that makes no sense.
    """

    rows: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    loads: tuple[float, ...] = (0.0,)
    padded: bool = False

    def __post_init__(self) -> None:
        _rising("rows", self.rows)
        _rising("loads", self.loads)
        if self.rows[0] < 1:
            raise ConfigError(f"cost table: rows start at 1 or more, not at {self.rows[0]}")
        if len(self.ms) != len(self.loads) or any(len(x) != len(self.rows) for x in self.ms):
            raise ConfigError(
                f"cost table: ms must hold {len(self.loads)} loads of {len(self.rows)} times each"
            )
        for line in self.ms:
            for value in line:
                if not 0.0 < value < float("inf"):
                    raise ConfigError(f"cost table: a step takes more than 0 ms, got {value}")

    def step_ms(self, num_rows: int, load: float = 0.0) -> float:
        """Milliseconds of a step of `num_rows` rows; infinity if it cannot be run."""
        low, high, part = _between(self.loads, load)
        ms = self._at(self.ms[low], num_rows)
        return ms if not part else ms + part * (self._at(self.ms[high], num_rows) - ms)

    def _at(self, line: Sequence[float], num_rows: int) -> float:
        rows = self.rows
        i = bisect_left(rows, num_rows)
        if i == len(rows):
            if self.padded:
                return float("inf")
            if i == 1:
                return line[0]
            slope = (line[-1] - line[-2]) / (rows[-1] - rows[-2])
            return line[-1] + max(0.0, slope) * (num_rows - rows[-1])
        if self.padded or i == 0 or rows[i] == num_rows:
            return line[i]
        part = (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1])
        return line[i - 1] + part * (line[i] - line[i - 1])

    @classmethod
    def from_samples(
        cls, samples: Iterable[tuple[int, float, float]], *, padded: bool = False
    ) -> "CostTable":
        """The median ms of each (rows, load) from samples (rows, load, ms)."""
        cells: dict[tuple[float, int], list[float]] = defaultdict(list)
        for num_rows, load, ms in samples:
            cells[load, num_rows].append(ms)
        loads = tuple(sorted({load for load, _ in cells}))
        rows = tuple(sorted({num_rows for _, num_rows in cells}))
        missing = [(r, x) for x in loads for r in rows if (x, r) not in cells]
        if missing:
            raise ConfigError(
                f"cost table: no sample of {missing[0][0]} rows at load {missing[0][1]}"
            )
        table = tuple(tuple(float(median(cells[x, r])) for r in rows) for x in loads)
        return cls(rows=rows, ms=table, loads=loads, padded=padded)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {
            "rows": list(self.rows),
            "loads": list(self.loads),
            "ms": [list(line) for line in self.ms],
            "padded": self.padded,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostTable":
        """The inverse of `to_dict`. Raises ConfigError."""
        try:
            return cls(
                rows=tuple(int(r) for r in values["rows"]),
                loads=tuple(float(x) for x in values.get("loads", (0.0,))),
                ms=tuple(tuple(float(v) for v in line) for line in values["ms"]),
                padded=bool(values.get("padded", False)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"cost table: rows, loads and ms are needed: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a machine takes for the parts of a drafted step, in ms.

    `verify`: a step by its rows, greedy choice included. `draft`: a block of drafts by the number
    of sequences. `sampled_row`, `sampled_draft`: what a row and a draft cost more at a temperature.
    `short_draft`: what a block of `SHORT` drafts of the most sequences takes, as a part of a whole
    one; 1 where that was not measured.
    """

    verify: CostTable
    draft: CostTable
    sampled_row: float = 0.0
    sampled_draft: float = 0.0
    short_draft: float = 1.0

    def draft_ms(self, num_sequences: int, size: int, block_size: int) -> float:
        """A block of `size` drafts each, where whole blocks have `block_size`."""
        whole = self.draft.step_ms(num_sequences)
        if size >= block_size:
            return whole
        return whole * (1 - (1 - self.short_draft) * (block_size - size) / (block_size - SHORT))

    def __post_init__(self) -> None:
        if not 0.0 < self.short_draft <= 1.0:
            raise ConfigError(f"costs: short_draft must lie in (0, 1], got {self.short_draft}")
        for name in ("sampled_row", "sampled_draft"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"costs: {name} must be >= 0 ms, got {getattr(self, name)}")

    def sampled(self) -> CostTable:
        """`verify` with the choice at a temperature in it."""
        table = self.verify
        ms = tuple(
            tuple(ms + n * self.sampled_row for n, ms in zip(table.rows, line, strict=True))
            for line in table.ms
        )
        return CostTable(rows=table.rows, ms=ms, loads=table.loads, padded=table.padded)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verify": self.verify.to_dict(),
            "draft": self.draft.to_dict(),
            "sampled_row": self.sampled_row,
            "sampled_draft": self.sampled_draft,
            "short_draft": self.short_draft,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StepCosts":
        """The inverse of `to_dict`. Raises ConfigError."""
        try:
            return cls(
                verify=CostTable.from_dict(values["verify"]),
                draft=CostTable.from_dict(values["draft"]),
                sampled_row=float(values.get("sampled_row", 0.0)),
                sampled_draft=float(values.get("sampled_draft", 0.0)),
                short_draft=float(values.get("short_draft", 1.0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"costs: tables verify and draft are needed: {error!r}") from error


def _rising(name: str, values: Sequence[float]) -> None:
    if not values or not all(map(isfinite, values)) or any(a >= b for a, b in pairwise(values)):
        raise ConfigError(f"cost table: {name} must rise, be finite and not be empty, got {values}")


def _between(points: Sequence[float], x: float) -> tuple[int, int, float]:
    """Neighbours of x and how far it is from the first to the second; held outside."""
    i = bisect_left(points, x)
    if i == 0:
        return 0, 0, 0.0
    if i == len(points):
        return i - 1, i - 1, 0.0
    return i - 1, i, (x - points[i - 1]) / (points[i] - points[i - 1])
