"""`deepdraft inspect` for the families before V4.1: tensors, parameters, bytes, state per token.

Owns: the report. Reads config.json and shard headers, never a weight; imports no torch.
Knows nothing of: which GPUs such a model fits on (no GPU path is built for them).
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from deepdraft.checkpoint import totals
from deepdraft.checkpoint.families import load_model_args, model_table, unread_tensors
from deepdraft.checkpoint.layouts import read_published
from deepdraft.checkpoint.names import SKIP_RULES
from deepdraft.checkpoint.shards import Stored, check_headers

_FLOAT_BYTES = 4


def inspect_family(path: Path, *, accept_keys: Iterable[str] = ()) -> dict[str, Any]:
    """The report as JSON values; sizes are bytes.

    Where only a config.json is given, weights are counted as BF16.
    """
    is_file = path.is_file()
    args = load_model_args(path if is_file else path / "config.json", accept_unknown=accept_keys)
    assert not isinstance(args, V41Args)
    stored: Mapping[str, Stored] = {}
    files = "config only, weights counted as BF16"
    unread: list[str] = []
    if is_file:
        table = model_table(args, stored)
    else:
        found, _ = read_published(path)
        unread = unread_tensors(args, found.stored)
        table = model_table(args, found.stored)
        stored = check_headers(found, table, frozenset(unread))
        shards = len({place.shard for place in found.stored.values()})
        files = f"{shards} shards, every tensor accounted for"
    skipped = {rule: sum(entry.module == rule for entry in table.values()) for rule in SKIP_RULES}
    skipped["mtp"] += len(unread)
    return {
        "path": str(path),
        "family": args.family,
        "files": files,
        "total": _total(totals.total_of(table.values())),
        "groups": _totals(totals.totals_by(table.values(), "group")),
        "dtypes": _totals(totals.totals_by(table.values(), "dtype")),
        "modules": _totals(totals.totals_by(table.values(), "module")),
        "skipped": {
            rule: {"tensors": count, "why": SKIP_RULES[rule]}
            for rule, count in skipped.items()
            if count
        },
        "state": _state(args),
    }


def _total(total: totals.Total) -> dict[str, int]:
    return {"tensors": total.tensors, "params": total.params, "bytes": total.num_bytes}


def _totals(by_key: Mapping[str, totals.Total]) -> dict[str, dict[str, int]]:
    return {key: _total(total) for key, total in by_key.items()}


def _state(args: Any) -> dict[str, Any]:
    """Bytes of a sequence as it is held here, in float32."""
    per_token, constant = Fraction(), 0
    for kind in args.state_kinds:
        row = kind.layers * kind.width * _FLOAT_BYTES
        if kind.ring:
            constant += row * kind.ring
        else:
            per_token += Fraction(row, kind.ratio)
    return {
        "kv_bytes_per_token": int(per_token) if per_token.denominator == 1 else float(per_token),
        "constant_bytes": constant,
        "max_tokens": args.max_position_embeddings,
        "bytes_at_max_tokens": int(per_token * args.max_position_embeddings) + constant,
    }
