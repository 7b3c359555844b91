"""`deepdraft inspect`: what a checkpoint holds, what a token costs, what fits on which GPUs.

Owns: the report and its JSON form. Reads config.json and shard headers, never a weight; imports no
torch. Knows nothing of: devices of this machine, the engine.
"""

import functools
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepdraft.arch import V41Args
from deepdraft.checkpoint import totals
from deepdraft.checkpoint.config import load_args, read_config
from deepdraft.checkpoint.names import SKIP_RULES, Entry, tensor_table
from deepdraft.checkpoint.shards import locate_tensors
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.plan import V41_CUTS, stem, v41_dims
from deepdraft.proof.inspect_family import inspect_family

DEFAULT_GPUS = (1, 2, 4, 8)
DEFAULT_GPU_GB = 141.0
RESERVED_SHARE = 0.06
"""Part of a GPU's memory that is never planned for."""
WORKSPACE_BYTES = 2_000_000_000

_DTYPE_REMARKS = {"I8": "two FP4 values a byte", "F8_E8M0": "scales"}


def main(
    path: str | os.PathLike[str],
    as_json: bool = False,
    gpus: int | None = None,
    gpu_gb: float | None = None,
    accept_keys: Iterable[str] = (),
) -> int:
    """Prints the report on a checkpoint directory or a config.json; returns the exit status 0.

    Raises ConfigError and CheckpointError, whose messages say what is wrong.
    """
    report = inspect(path, gpus=gpus, gpu_gb=gpu_gb, accept_keys=accept_keys)
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 0


def inspect(
    path: str | os.PathLike[str],
    *,
    gpus: int | None = None,
    gpu_gb: float | None = None,
    accept_keys: Iterable[str] = (),
) -> dict[str, Any]:
    """The report as JSON values. Sizes are bytes, `gb` and `gpu_gb` are 10**9 bytes."""
    if gpus is not None and not 1 <= gpus <= 4096:
        raise ConfigError(f"the number of GPUs must be in 1..4096, got {gpus}")
    size_gb = DEFAULT_GPU_GB if gpu_gb is None else gpu_gb
    if not 0 < size_gb <= 100_000:
        raise ConfigError(f"the GPU's size must be in 0..100000 GB, got {size_gb:g}")
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a checkpoint directory or a config.json"
        )
    is_file = path.is_file()
    config = path if is_file else path / "config.json"
    if read_config(config).get("model_type") != "deepseek_v41":
        if gpus is not None or gpu_gb is not None:
            raise ConfigError("what fits on GPUs is known for DeepSeek-V4.1 only; leave --gpus out")
        return inspect_family(path, accept_keys=accept_keys)
    args = load_args(config, accept_unknown=accept_keys)
    table = tensor_table(args)
    shards = 0
    if not is_file:
        shards = len({place.shard for place in locate_tensors(path, table).values()})
    weights = _Weights.of(table.values())
    return {
        "path": str(path),
        "files": "config only" if is_file else f"{shards} shards, every tensor accounted for",
        "total": _total(totals.total_of(table.values())),
        "backbone_params": totals.backbone_params(table.values()),
        "groups": _totals(totals.totals_by(table.values(), "group")),
        "dtypes": _totals(totals.totals_by(table.values(), "dtype")),
        "modules": _totals(totals.totals_by(table.values(), "module")),
        "skipped": {
            rule: {"tensors": count, "why": why}
            for rule, why in SKIP_RULES.items()
            if (count := sum(entry.module == rule for entry in table.values()))
        },
        "state": _state(args),
        **({"ranks": _ranks(table.values(), gpus)} if gpus else {}),
        "fits": [
            _fit(args, weights, count, size_gb, engram_on_gpu=on_gpu)
            for count in ((gpus,) if gpus else DEFAULT_GPUS)
            for on_gpu in ((True, False) if args.engram_layer_ids else (True,))
        ],
    }


def _total(total: totals.Total) -> dict[str, int]:
    return {"tensors": total.tensors, "params": total.params, "bytes": total.num_bytes}


def _totals(by_key: Mapping[str, totals.Total]) -> dict[str, dict[str, int]]:
    return {key: _total(total) for key, total in by_key.items()}


def _state(args: V41Args) -> dict[str, Any]:
    per_token = totals.kv_bytes_per_token(args)
    return {
        "kv_bytes_per_token": int(per_token) if per_token.denominator == 1 else float(per_token),
        "main_record_bytes": totals.main_record_bytes(args),
        "index_record_bytes": totals.index_record_bytes(args),
        "window_record_bytes": totals.window_record_bytes(args),
        "constant_bytes": totals.constant_state_bytes(args),
        "max_tokens": args.max_position_embeddings,
        "bytes_at_max_tokens": int(per_token * args.max_position_embeddings)
        + totals.constant_state_bytes(args),
    }


def is_split(name: str) -> bool:
    """Whether tensor parallelism splits the tensor (or scale) of that name; each GPU holds all
    others whole."""
    return stem(name) in V41_CUTS


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of the text model and drafter by where they lie; skipped modules are not counted."""

    tables: int
    """Engram tables, which may stay in host memory."""
    split: int
    whole: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "_Weights":
        tables = split = whole = 0
        for entry in entries:
            if entry.module in SKIP_RULES:
                continue
            if entry.group == "Engram tables":
                tables += entry.num_bytes
            elif is_split(entry.name):
                split += entry.num_bytes
            else:
                whole += entry.num_bytes
        return cls(tables, split, whole)


def _fit(
    args: V41Args, weights: _Weights, gpus: int, gpu_gb: float, *, engram_on_gpu: bool
) -> dict[str, Any]:
    """Weights and context of one model split over `gpus`; every GPU holds the whole KV."""
    per_gpu = weights.whole + -(-weights.split // gpus)
    if engram_on_gpu:
        per_gpu += _most_table_bytes(args, gpus)
    usable = int(gpu_gb * 1e9 * (1 - RESERVED_SHARE)) - WORKSPACE_BYTES
    for_tokens = usable - per_gpu - totals.constant_state_bytes(args)
    problem = ""
    uneven = [dim.why for dim in v41_dims(args).values() if dim.units % gpus]
    if uneven:
        problem = f"{uneven[0]} does not divide by {gpus}"
    elif for_tokens <= 0:
        problem = "weights do not fit"
    return {
        "gpus": gpus,
        "gpu_gb": gpu_gb,
        "engram_tables": "gpu" if engram_on_gpu else "host",
        "weight_bytes_per_gpu": per_gpu,
        "host_bytes": 0 if engram_on_gpu else weights.tables,
        "usable_bytes_per_gpu": usable,
        "fits": not problem,
        "problem": problem,
        "context_tokens": 0 if problem else int(for_tokens / totals.kv_bytes_per_token(args)),
    }


@functools.lru_cache(maxsize=1)
def _table_rows(args: V41Args) -> npt.NDArray[np.int64]:
    """Rows of every hash table, [layers, tables]. The search for primes takes a moment."""
    return engram_tables(args).primes.reshape(len(args.engram_layer_ids), -1)


def _most_table_bytes(args: V41Args, ranks: int) -> int:
    """Engram bytes of the rank that holds most: hash tables stay whole and differ in size."""
    if not args.engram_layer_ids:
        return 0
    primes = _table_rows(args)
    count, row = primes.shape[1], args.engram_head_dim + args.engram_head_dim // 32
    cuts = [count * rank // ranks for rank in range(ranks + 1)]
    parts = [int(primes[:, a:b].sum()) for a, b in itertools.pairwise(cuts)]
    return max(parts) * row


def _ranks(entries: Iterable[Entry], gpus: int) -> dict[str, Any]:
    """By group: bytes in all, and on one of `gpus` (on average, where hash tables differ)."""
    rows: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry.module in SKIP_RULES:
            continue
        row = rows.setdefault(entry.group, {"bytes": 0, "split_bytes": 0})
        row["bytes"] += entry.num_bytes
        row["split_bytes"] += entry.num_bytes if is_split(entry.name) else 0
    for row in rows.values():
        row["bytes_per_gpu"] = row["bytes"] - row["split_bytes"] + -(-row["split_bytes"] // gpus)
    return dict(sorted(rows.items(), key=lambda item: -item[1]["bytes"]))


def render(report: Mapping[str, Any]) -> str:
    """The report as text."""
    if "family" in report:
        return _render_family(report)
    total, state = report["total"], report["state"]
    lines = [
        f"{report['path']} ({report['files']})",
        f"{total['tensors']:,} tensors, {total['params']:,} parameters, {total['bytes']:,} bytes",
        f"{report['backbone_params']:,} backbone parameters",
        "",
        *_table("group", report["groups"], {}),
        "",
        *_table("dtype", report["dtypes"], _DTYPE_REMARKS),
    ]
    for rule, skipped in report["skipped"].items():
        lines.append(f"skipped by rule '{rule}': {skipped['tensors']:,} tensors; {skipped['why']}")
    per_token = state["kv_bytes_per_token"]
    lines += [
        "",
        f"KV {per_token:,} B/token; records: main {state['main_record_bytes']}, "
        f"index {state['index_record_bytes']}, window {state['window_record_bytes']} B",
        f"one sequence: {state['constant_bytes']:,} B constant, {state['bytes_at_max_tokens']:,} B "
        f"at {state['max_tokens']:,} tokens",
        "",
        f"What fits, tensor-parallel (GB = 10**9 bytes; {RESERVED_SHARE:.0%} and "
        f"{WORKSPACE_BYTES / 1e9:g} GB of each GPU kept free; KV whole on every GPU)",
        f"{'GPUs':>4} {'each GB':>8} {'Engram tables':>14} {'weights/GPU GB':>15} "
        f"{'host GB':>8}  context tokens",
    ]
    for fit in report["fits"]:
        tokens = fit["problem"] or f"{fit['context_tokens']:,}"
        lines.append(
            f"{fit['gpus']:>4} {fit['gpu_gb']:>8g} {fit['engram_tables']:>14} "
            f"{fit['weight_bytes_per_gpu'] / 1e9:>15.3f} {fit['host_bytes'] / 1e9:>8.3f}  {tokens}"
        )
    if "ranks" in report:
        gpus = report["fits"][0]["gpus"]
        lines += ["", f"{'group':<30} {'GB':>9} {'split':>6} {f'GB on each of {gpus}':>16}"]
        for group, row in report["ranks"].items():
            share = row["split_bytes"] / row["bytes"] if row["bytes"] else 0.0
            lines.append(
                f"{group:<30} {row['bytes'] / 1e9:>9.3f} {share:>6.0%} "
                f"{row['bytes_per_gpu'] / 1e9:>16.3f}"
            )
    return "\n".join(lines)


def _render_family(report: Mapping[str, Any]) -> str:
    total, state = report["total"], report["state"]
    lines = [
        f"{report['path']}: {report['family']} ({report['files']})",
        f"{total['tensors']:,} tensors, {total['params']:,} parameters, {total['bytes']:,} bytes",
        "",
        *_table("group", report["groups"], {}),
        "",
        *_table("dtype", report["dtypes"], _DTYPE_REMARKS),
    ]
    for rule, skipped in report["skipped"].items():
        lines.append(f"skipped by rule '{rule}': {skipped['tensors']:,} tensors; {skipped['why']}")
    per_token, constant = state["kv_bytes_per_token"], state["constant_bytes"]
    lines += [
        "",
        f"state, float32: {per_token:,} B/token and {constant:,} B constant; "
        f"{state['bytes_at_max_tokens']:,} B at {state['max_tokens']:,} tokens",
    ]
    return "\n".join(lines)


def _table(
    title: str, rows: Mapping[str, Mapping[str, int]], remarks: Mapping[str, str]
) -> list[str]:
    width = max(len(title), *(len(key) for key in rows))
    lines = [f"{title:<{width}} {'tensors':>8} {'parameters':>19} {'bytes':>19}"]
    for key, row in rows.items():
        remark = f"  {remarks[key]}" if key in remarks else ""
        lines.append(
            f"{key:<{width}} {row['tensors']:>8,} {row['params']:>19,} {row['bytes']:>19,}{remark}"
        )
    return lines
