"""Sums over a configuration: tensors, parameters, bytes, and the size of a sequence's state.

Owns: the arithmetic of architecture notes 1.2, 1.3 and 8.1. Knows nothing of: files, torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from deepdraft.arch import V41Args
from deepdraft.checkpoint.names import Entry

OUTSIDE_BACKBONE = ("Engram tables", "DSpark", "vision tower")
"""Groups that do not count as backbone parameters."""

_E8M0_GROUP = 32
_E4M3_GROUP = 16


@dataclass(frozen=True, slots=True)
class Total:
    """How many tensors, parameters and bytes some entries make."""

    tensors: int = 0
    params: int = 0
    num_bytes: int = 0

    def plus(self, entry: Entry) -> "Total":
        return Total(
            self.tensors + 1, self.params + entry.num_params, self.num_bytes + entry.num_bytes
        )


def total_of(entries: Iterable[Entry]) -> Total:
    """The sum over `entries`."""
    total = Total()
    for entry in entries:
        total = total.plus(entry)
    return total


def totals_by(entries: Iterable[Entry], field: str) -> dict[str, Total]:
    """Sums by `group`, `module` or `dtype`, largest first."""
    totals: dict[str, Total] = {}
    for entry in entries:
        key = getattr(entry, field)
        totals[key] = totals.get(key, Total()).plus(entry)
    return dict(sorted(totals.items(), key=lambda item: -item[1].num_bytes))


def backbone_params(entries: Iterable[Entry]) -> int:
    """Parameters outside the Engram tables, the drafter and the vision tower."""
    return sum(e.num_params for e in entries if e.group not in OUTSIDE_BACKBONE)


def window_record_bytes(args: V41Args) -> int:
    """One window KV entry: E4M3 values and an E8M0 scale per 32."""
    return args.head_dim + args.head_dim // _E8M0_GROUP


def main_record_bytes(args: V41Args) -> int:
    """One main KV entry: E2M1 values and an E4M3 scale per 16."""
    return args.head_dim // 2 + args.head_dim // _E4M3_GROUP


def index_record_bytes(args: V41Args) -> int:
    """One index key: E2M1 values and an E8M0 scale per 32."""
    return args.index_head_dim // 2 + args.index_head_dim // _E8M0_GROUP


def kv_bytes_per_token(args: V41Args) -> Fraction:
    """Bytes by which the global KV grows per token, on average over a group of tokens."""
    entry = main_record_bytes(args) + index_record_bytes(args)
    return sum(
        (Fraction(entry, args.compress_ratios[layer]) for layer in args.kv_source_layer_ids),
        Fraction(),
    )


def constant_state_bytes(args: V41Args) -> int:
    """Bytes of one sequence that do not grow: full windows, drafter rings, open groups."""
    layers = args.num_hidden_layers + args.num_nextn_predict_layers
    windows = layers * args.sliding_window * window_record_bytes(args)
    paired = sum(args.compress_ratios[layer] == 2 for layer in args.kv_source_layer_ids)
    return windows + paired * 2 * args.head_dim * 4
