"""What a request costs an engine, as measured: the tables that a simulated fleet runs on.

Owns: their fields, checks, interpolation, file form; how a text trace becomes one of tokens.
Knows nothing of: how they are measured (`fleet_calibrate`), events (`fleet_sim`). Runs without
torch.
"""

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

_MAX_FILE = 4 << 20
UNBOUNDED = 1e15
"""Bytes a second of a fetch whose bytes cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds are those of one process that has its core (or GPUs) for itself."""

    name: str = ""
    """Of what, measured where."""
    request_s: float = 0.0
    """Of the engine for each request, however short its prompt is."""
    path_s: float = 0.0
    """What a first token takes beside its engine's time where nothing else is at hand: way there,
    way back."""
    resume_s: float = 0.0
    """Of a start from a stored conversation, beside its new tokens."""
    prefill_s: tuple[tuple[float, float], ...]
    """(tokens, seconds): a prompt from its start to so many tokens, read in parts of `chunk`,
    rising; (0, 0) is implied."""
    decode_s: tuple[tuple[float, float], ...]
    """(streams, seconds): a round that gives each of so many streams one token; where drafts
    stand, the mean of them."""
    max_running: int = 16
    chunk: int = 256
    """Rows of a part of a prompt."""
    joint_rows: int = 96
    """Of short parts of several prompts that are computed as one."""
    part_s: tuple[tuple[float, float], ...] = ()
    """(rows, seconds): a part of so many rows at a prompt's start, which need not be less than a
    larger one; without it a part takes its share of a whole one, which is in `prefill_s`."""
    max_stall_s: float = 0.1
    """What a part may take while others wait for their next token."""
    gap_tokens: int = 0
    """Of a known conversation, at its end, that are computed again."""
    gaps: tuple[int, ...] = ()
    """The same where it differs from turn to turn: as often as it was seen."""
    kv_token_bytes: float = 0.0
    kv_base_bytes: float = 0.0
    """Of a turn beside its tokens: checkpoints."""
    kv_most_turns: int = 1
    """Turns whose checkpoints are kept."""
    fetch_overhead_s: float = 0.0
    fetch_bytes_per_s: float = UNBOUNDED
    side_request_s: float = 0.0
    """Of a core, by the processes beside the engine (proxy, front, client), for a request."""
    side_token_s: float = 0.0
    """The same for a token of an answer."""
    side_idle: float = 0.0
    """The same while nothing is asked, as a share of a core."""
    capacity: tuple[float, ...] = (1.0, 2.0)
    """What a machine does with 1, 2, ... busy processes, in what one does; the last for more."""
    alone_s: float = 0.0
    """Of an engine for a first turn, alone, when this was measured; 0: not known."""
    chars_per_token: float = 4.0
    turn_tokens: float = 0.0
    """Of the chat format, around a user's text."""

    def __post_init__(self) -> None:
        for name in ("prefill_s", "decode_s", "part_s"):
            table = getattr(self, name)
            ok = (
                (len(table) > 0 or name == "part_s")
                and all(len(p) == 2 and p[0] > 0 and p[1] > 0 for p in table)
                and all(
                    a[0] < b[0] and (a[1] <= b[1] or name == "part_s")
                    for a, b in itertools.pairwise(table)
                )
            )
            if not ok:
                raise ConfigError(
                    f"{name} of a cost table must be pairs above 0, both rising, got {table!r}"
                )
        if not self.capacity or min(self.capacity) <= 0:
            raise ConfigError(f"capacity of a cost table must be above 0, got {self.capacity!r}")
        for name in ("fetch_bytes_per_s", "chars_per_token", "max_running", "chunk", "max_stall_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a cost table must be above 0")

    def prefill(self, tokens: float) -> float:
        """Seconds from a prompt's start to `tokens` tokens; beyond the table as its last part."""
        return _between(((0.0, 0.0), *self.prefill_s), tokens)

    def read_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """Seconds of one step's parts of prompts, each from a token on so many rows. By how much
        few rows take more than their share is not a matter of where they stand."""
        share = sum(self.prefill(start + rows) - self.prefill(start) for start, rows in parts)
        rows = sum(rows for _, rows in parts)
        if not self.part_s or not rows:
            return share
        few = self.part_s[0]
        table = self.part_s if len(self.part_s) > 1 else ((0.0, 0.0), few)
        own = max(_between(table, rows), few[1] * min(1.0, rows / few[0]))
        return share * (own / rows) / (_between(table, self.chunk) / self.chunk)

    def round_s(self, streams: int) -> float:
        """Seconds of one token for each of so many streams."""
        first = self.decode_s[0]
        if streams <= first[0] or len(self.decode_s) == 1:
            return first[1]
        return _between(self.decode_s, streams)

    def kv_bytes(self, tokens: float, turns: int = 1) -> float:
        """Bytes of a stored conversation, or of what so many turns have added to one."""
        return min(turns, self.kv_most_turns) * self.kv_base_bytes + tokens * self.kv_token_bytes

    def fetch_s(self, size: float) -> float:
        """Seconds until so many bytes of a peer's are here and verified."""
        return self.fetch_overhead_s + size / self.fetch_bytes_per_s

    def slower(self, factor: float) -> "Costs":
        """On a machine that takes so many times as long for everything that is computed."""
        names = ("request_s", "path_s", "resume_s", "side_request_s", "side_token_s", "alone_s")
        changed: dict[str, Any] = {name: factor * getattr(self, name) for name in names}
        for name in ("prefill_s", "decode_s", "part_s"):
            changed[name] = tuple((x, factor * y) for x, y in getattr(self, name))
        return replace(self, **changed)

    def as_dict(self) -> dict[str, Any]:
        """As in a file."""
        return asdict(self)


def _between(table: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between the points of a table; outside of it as its first or last part goes."""
    place = bisect.bisect_left(table, at, key=lambda p: p[0])
    place = min(max(place, 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[place - 1], table[place]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def read_costs(file: str | Path) -> Costs:
    """A cost table from a file: itself, or a record of `bench fleet` with `costs` in it. Raises
    ConfigError, which says what is wrong."""
    path = Path(file)
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ConfigError(f"{file} is larger than {_MAX_FILE >> 20} MiB: no cost table")
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the cost table {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the cost table {file} is no JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("costs"), dict):
        data = data["costs"]
    if not isinstance(data, dict):
        raise ConfigError(f"the cost table {file} must be an object")
    return costs_of(data, str(file))


def costs_of(data: dict[str, Any], where: str) -> Costs:
    """A table from its file form. Raises ConfigError."""
    known = {f.name for f in fields(Costs)}
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"{where} has unknown entries {unknown}; known: {sorted(known)}")
    values = dict(data)
    try:
        for name in ("prefill_s", "decode_s", "part_s"):
            if name in values:
                values[name] = tuple((float(x), float(y)) for x, y in values[name])
        if "capacity" in values:
            values["capacity"] = tuple(float(x) for x in values["capacity"])
        if "gaps" in values:
            values["gaps"] = tuple(int(x) for x in values["gaps"])
        for name, value in values.items():
            if name in ("name", "prefill_s", "decode_s", "part_s", "capacity", "gaps"):
                continue
            whole = name in (
                *("max_running", "chunk", "joint_rows", "gap_tokens", "kv_most_turns"),
            )
            values[name] = int(value) if whole else float(value)
        return Costs(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} is no cost table: {error}") from error
