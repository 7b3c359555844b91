"""Tensor parallelism as a table: which published tensor is cut along which axis, in what units.

Owns: the cuts of each family, the sizes that divide a model, shapes and bytes of a rank's part.
Knows nothing of: torch, files, how ranks talk to each other.

A cut is by *rows* (outputs) or *columns* (inputs). Maps that follow one another are cut so that no
exchange lies between them: heads with the output groups they feed, an expert's up rows with its
down columns, hash tables with the columns that read them. Where a result must be whole again, the
last map's `join` says how: `sum` adds the ranks' partial sums, `gather` puts parts side by side.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Literal, Protocol

from deepdraft.arch import V41Args
from deepdraft.errors import ConfigError

GROUP = 32
"""Values of one scale: an axis with scales is cut at multiples of it."""
MAX_RANKS = 64

Join = Literal["none", "sum", "gather"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is split: the axis, the dimension whose units stay whole, the join."""

    axis: int
    dim: str
    join: Join = "none"


ROWS, COLUMNS = 0, 1

V41_CUTS: dict[str, Cut] = {
    "attn.wq_b": Cut(ROWS, "output groups"),
    "attn.attn_sink": Cut(ROWS, "output groups"),
    "attn.wo_a": Cut(ROWS, "output groups"),
    "attn.wo_b": Cut(COLUMNS, "output groups", "sum"),
    "ffn.experts.w1": Cut(ROWS, "expert width"),
    "ffn.experts.w3": Cut(ROWS, "expert width"),
    "ffn.experts.w2": Cut(COLUMNS, "expert width", "sum"),
    "ffn.shared_experts.w1": Cut(ROWS, "expert width"),
    "ffn.shared_experts.w3": Cut(ROWS, "expert width"),
    "ffn.shared_experts.w2": Cut(COLUMNS, "expert width", "sum"),
    "engram.embed": Cut(ROWS, "hash tables"),
    "engram.wkv": Cut(COLUMNS, "hash tables", "sum"),
    "head": Cut(ROWS, "vocabulary", "gather"),
}
"""By name without layer, expert number and the last part (weight or scale). All others are whole on
every rank: embeddings (read row by row), norms, wq_a and wkv, indexers and compressors, routers,
residual mixes, and the drafter's input map and Markov head, which are cheaper to read than to
exchange."""

CUT_FOR_ROWS = frozenset(("engram.embed", "head"))
"""Of those that stay cut, beside the routed experts, where the ranks share a prompt's rows."""

_LAYER = re.compile(r"^(layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def stem(name: str) -> str:
    """A published name as the tables have it: layers.3.ffn.experts.7.w1.scale ->
    ffn.experts.w1."""
    name = _EXPERT.sub(".experts.", _LAYER.sub("", name))
    return name.removesuffix(".weight").removesuffix(".scale")


def cut_for_rows(name: str) -> bool:
    """Whether a tensor of `V41_CUTS` stays cut where the ranks share a prompt's rows: the others
    are whole there."""
    return stem(name).startswith("ffn.experts.") or stem(name) in CUT_FOR_ROWS


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension that is split: `units` equal parts that stay whole, and where they come from."""

    units: int
    why: str


def v41_dims(args: V41Args) -> dict[str, Dim]:
    """What a DeepSeek-V4.1 model splits, by the names of `V41_CUTS`."""
    width = args.moe_intermediate_size
    dims = {
        "output groups": Dim(args.o_groups, f"o_groups = {args.o_groups}"),
        "expert width": Dim(
            width // GROUP,
            f"moe_intermediate_size = {width} is {width // GROUP} groups of {GROUP}",
        ),
        "vocabulary": Dim(args.vocab_size, f"vocab_size = {args.vocab_size}"),
    }
    if args.engram_layer_ids:
        orders, heads = args.engram_max_ngram_size - 1, args.engram_n_heads
        dims["hash tables"] = Dim(
            orders * heads,
            f"an Engram layer has {orders * heads} hash tables "
            f"(engram_max_ngram_size - 1 = {orders}, engram_n_heads = {heads})",
        )
    return dims


def sizes_that_divide(args: V41Args) -> list[int]:
    """Numbers of ranks that the model can be split over, ascending, at most MAX_RANKS."""
    common = gcd(*(dim.units for dim in v41_dims(args).values()))
    return [n for n in range(1, min(common, MAX_RANKS) + 1) if common % n == 0]


class StoredEntry(Protocol):
    """What is read of an entry of `deepdraft.checkpoint.names`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...


class ShardPlan:
    """The cuts of one model over `size` ranks."""

    def __init__(
        self, args: V41Args, size: int, table_rows: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """`table_rows`: by Engram layer, the rows of each of its hash tables in order; needed for
        the parts of Engram tables. Raises ConfigError for a size that does not divide the model."""
        self.args, self.size = args, size
        self.dims = v41_dims(args)
        check_size(args, size)
        self._table_rows = dict(table_rows or {})

    def cut(self, name: str) -> Cut | None:
        """The cut of a published tensor or scale; None where every rank holds it whole."""
        return None if self.size == 1 else V41_CUTS.get(stem(name))

    def join(self, name: str) -> Join:
        """How the results of that map become whole on every rank."""
        cut = self.cut(name)
        return "none" if cut is None else cut.join

    def bounds(self, name: str, length: int, rank: int) -> tuple[int, int]:
        """Rank's part [start, stop) of the cut axis, which has `length` stored places (values,
        bytes of two values, or scales)."""
        cut = self.cut(name)
        if cut is None:
            return 0, length
        if stem(name) == "engram.embed":
            return self._own_rows(name, rank)
        if length % self.size:
            raise ConfigError(f"{name}: {length} places do not divide by {self.size} ranks")
        part = length // self.size
        return rank * part, (rank + 1) * part

    def own_tables(self, rank: int) -> tuple[int, int]:
        """The hash tables [first, last) of every Engram layer that a rank holds."""
        units = self.dims["hash tables"].units
        return rank * units // self.size, (rank + 1) * units // self.size

    def _own_rows(self, name: str, rank: int) -> tuple[int, int]:
        layer = int(name.split(".")[1])
        sizes = self._table_rows.get(layer)
        if sizes is None:
            raise ConfigError(f"{name}: the plan was made without the sizes of its hash tables")
        first, last = self.own_tables(rank)
        return sum(sizes[:first]), sum(sizes[:last])

    def shape(self, name: str, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor stored as `shape`."""
        cut = self.cut(name)
        own = list(shape)
        if cut is not None:
            start, stop = self.bounds(name, shape[cut.axis], rank)
            own[cut.axis] = stop - start
        return tuple(own)

    def num_bytes(self, entry: StoredEntry, rank: int) -> int:
        """Bytes of a rank's part of a stored tensor."""
        whole = prod(entry.shape)
        return entry.num_bytes * prod(self.shape(entry.name, entry.shape, rank)) // max(whole, 1)

    def most_bytes(self, entries: Iterable[StoredEntry]) -> int:
        """Bytes of these tensors on the rank that holds most (hash tables differ in size)."""
        entries = list(entries)
        return max(sum(self.num_bytes(e, rank) for e in entries) for rank in range(self.size))

    def local(self, args: Any) -> Any:
        """Sizes as a rank's layers see them: its heads, output groups and expert width."""
        n = self.size
        return dataclasses.replace(
            args,
            num_attention_heads=args.num_attention_heads // n,
            o_groups=args.o_groups // n,
            moe_intermediate_size=args.moe_intermediate_size // n,
        )


def check_size(args: V41Args, size: int) -> None:
    """Raises ConfigError, which names what does not divide and the sizes that would."""
    problems = [dim.why for dim in v41_dims(args).values() if size < 1 or dim.units % size]
    if problems:
        sizes = ", ".join(map(str, sizes_that_divide(args)))
        raise ConfigError(
            f"this model cannot be split over {size} ranks: {'; '.join(problems)}. "
            f"Sizes that work: {sizes}"
        )
