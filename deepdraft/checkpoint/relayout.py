"""`deepdraft convert --layout, --dtype`: a checkpoint under other names or in other number formats.

Owns: names of the published and of transformers' layout, the choice of formats, the error that a
format makes, the files. Knows nothing of: ranks (`convert`), how weights are used.

Tensors are read and written one at a time. Without `--dtype` their bytes are copied as they are;
there and back again gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from deepdraft.arch import ModelArgs, V4Args, V41Args
from deepdraft.checkpoint.convert import check_small, copy_small, write_synced
from deepdraft.checkpoint.families import model_table, unread_tensors
from deepdraft.checkpoint.layouts import read_published
from deepdraft.checkpoint.names import Entry
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.shards import (
    DTYPE_BYTES,
    INDEX_NAME,
    Found,
    Stored,
    check_headers,
    write_header,
)
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_maps import transformers_names
from deepdraft.errors import CheckpointError, ConfigError

Layout = Literal["published", "transformers5"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PLAIN = frozenset({"bf16", "f16", "f32", "plain"})
_SCALES = frozenset({"scale", "block_scale"})
SHARD_BYTES = 4 << 30

Progress = Callable[[int, int], None]
Formats = Sequence[tuple[str, str]]


@dataclass(slots=True)
class GroupError:
    """What a change of format did to the tensors of one group."""

    tensors: int = 0
    values: int = 0
    formats: set[str] = field(default_factory=set)
    """"FROM -> TO", as stored."""
    largest: float = 0.0
    """Largest absolute value."""
    worst: float = 0.0
    """Largest absolute difference."""
    squares: float = 0.0
    difference_squares: float = 0.0

    @property
    def relative_rms(self) -> float:
        """Root mean square of the difference over that of the values."""
        return (self.difference_squares / self.squares) ** 0.5 if self.squares else 0.0

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "tensors": self.tensors,
            "values": self.values,
            "formats": sorted(self.formats),
            "max_abs": self.largest,
            "max_abs_error": self.worst,
            "relative_rms_error": self.relative_rms,
        }


@dataclass(slots=True)
class Report:
    """What was written."""

    layout: Layout
    tensors: int = 0
    num_bytes: int = 0
    files: int = 0
    left_out: list[str] = field(default_factory=list)
    """Tensors that the layout has no name for."""
    errors: dict[str, GroupError] = field(default_factory=dict)
    """By group, where a format changed."""

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "layout": self.layout,
            "tensors": self.tensors,
            "bytes": self.num_bytes,
            "files": self.files,
            "left_out": self.left_out,
            "changed": {name: error.as_json() for name, error in self.errors.items()},
        }


@dataclass(frozen=True, slots=True)
class _Written:
    """One tensor of the result. `dtype` None: the stored bytes as they are."""

    name: str
    source: str
    dtype: torch.dtype | None
    stored: str
    shape: tuple[int, ...]
    num_bytes: int


def read_formats(options: Iterable[str]) -> list[tuple[str, str]]:
    """ "bfloat16" (all matrices) or "PATTERN=float32" (names or groups) -> (pattern, dtype).

    Raises ConfigError.
    """
    found = []
    for option in options:
        pattern, mark, dtype = option.rpartition("=")
        if dtype not in DTYPES or (mark and not pattern):
            raise ConfigError(
                f"--dtype {option!r}: give one of {', '.join(DTYPES)}, or PATTERN=DTYPE with a "
                "pattern of tensor names such as '*lm_head*'"
            )
        found.append((pattern, dtype))
    return found


def relayout(
    source: Path,
    out: Path,
    *,
    layout: Layout | None = None,
    formats: Formats = (),
    accept_unknown: Iterable[str] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda *_: None,
) -> Report:
    """Writes the checkpoint `source` into `out`, a new or empty directory.

    `layout`: names and configuration style; None: those of the source. `formats`: the last that
    matches a tensor decides; what none matches keeps its format. Raises ConfigError for a pattern
    that matches nothing, CheckpointError for values that a format cannot hold, a directory that is
    not empty, a full disk.
    """
    check_small(source)
    config = read_config(source / "config.json")
    spec = ModelSpec.of(config, accept_unknown=accept_unknown)
    if isinstance(spec.args, V41Args):
        raise ConfigError("DeepSeek-V4.1 is published in one layout only; --tp converts it")
    opened, was = open_either(source, spec.args)
    report = Report(layout or was)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose another directory")
    plan = _plan(opened, report, formats)
    out.mkdir(parents=True, exist_ok=True)
    shards = list(_split(plan, shard_bytes))
    total = sum(item.num_bytes for item in plan)
    weight_map: dict[str, str] = {}
    for number, items in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / name, opened, items, report, lambda: progress(report.num_bytes, total))
        weight_map |= {item.name: name for item in items}
    report.tensors, report.files = len(plan), len(shards)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_synced(out / INDEX_NAME, json.dumps(index, indent=1).encode() + b"\n")
    copy_small(source, out)
    written = _config(spec, report.layout, opened, plan)
    write_synced(out / "config.json", json.dumps(written, indent=2).encode() + b"\n")
    return report


def open_either(path: Path, args: ModelArgs) -> tuple[Checkpoint, Layout]:
    """A checkpoint in either layout, under published names, and the layout it has."""
    found, _ = read_published(path)
    layout: Layout = "published"
    if isinstance(args, V4Args):
        names = transformers_names(args, found.stored, back=True)
        if names is not None:
            found, layout = _renamed(found, names), "transformers5"
    elif "rope_parameters" in read_config(path / "config.json"):
        layout = "transformers5"
    table = model_table(args, found.stored)
    unread = unread_tensors(args, found.stored)
    places = check_headers(found, table, frozenset(unread))
    # Next-token prediction layers are no less a part of the files.
    table = {n: replace(e, module="text") if e.module == "mtp" else e for n, e in table.items()}
    checkpoint = Checkpoint(path, args, table, places | {n: found.stored[n] for n in unread})
    return checkpoint, layout


def _renamed(found: Found, names: Mapping[str, str]) -> Found:
    stored = {names[n]: replace(place, name=names[n]) for n, place in found.stored.items()}
    weight_map = found.weight_map
    if weight_map is not None:
        weight_map = {names.get(n, n): shard for n, shard in weight_map.items()}
    return replace(found, stored=stored, weight_map=weight_map)


def _plan(source: Checkpoint, report: Report, formats: Formats) -> list[_Written]:
    """What to write, in the order of the files."""
    names = {name: name for name in source.places}
    if isinstance(source.args, V4Args) and report.layout == "transformers5":
        renamed = transformers_names(source.args, source.places)
        assert renamed is not None
        report.left_out = sorted(names.keys() - renamed.keys())
        names = renamed
    used: set[str] = set()
    chosen = {
        name: _format_of(entry, formats, used)
        for name, entry in source.table.items()
        if name in source.places
    }
    missed = [pattern for pattern, _ in formats if pattern not in used]
    if missed:
        raise ConfigError(f"--dtype {missed[0]}=...: no weight or group has such a name")
    dropped = {e.scale_name for n, e in source.table.items() if chosen.get(n) and e.scale_name}
    plan = []
    for name, place in source.places.items():
        if name not in names or name in dropped:
            continue
        dtype = chosen.get(name)
        stored = place.dtype if dtype is None else _STORED[dtype]
        shape = place.shape if dtype is None else source.table[name].value_shape
        size = place.end - place.start
        if dtype is not None:
            size = DTYPE_BYTES[stored] * torch.Size(shape).numel()
        plan.append(_Written(names[name], name, dtype, stored, tuple(shape), size))
    return plan


def _format_of(entry: Entry, formats: Formats, used: set[str]) -> torch.dtype | None:
    """The format that a weight gets, None where it keeps its own."""
    if entry.format in _SCALES or entry.format in ("i32", "i64", "ids"):
        return None
    found = None
    for pattern, dtype in formats:
        named = fnmatchcase(entry.name, pattern) or entry.group == pattern
        if named or (not pattern and len(entry.shape) > 1):
            used.add(pattern)
            found = DTYPES[dtype]
    same = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    return None if same.get(entry.format) == found else found


def _split(plan: Sequence[_Written], most: int) -> Iterator[list[_Written]]:
    shard: list[_Written] = []
    size = 0
    for item in plan:
        if shard and size + item.num_bytes > most:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.num_bytes
    yield shard


def _write_shard(
    path: Path,
    source: Checkpoint,
    items: Sequence[_Written],
    report: Report,
    progress: Callable[[], None],
) -> None:
    items = sorted(items, key=lambda i: (-DTYPE_BYTES[i.stored], i.name))  # all are aligned
    head, _, _ = write_header((i.name, i.stored, i.shape, i.num_bytes) for i in items)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(head)
            for item in items:
                file.write(_bytes(source, item, report))
                report.num_bytes += item.num_bytes
                progress()
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _bytes(source: Checkpoint, item: _Written, report: Report) -> memoryview:
    if item.dtype is None:
        return _raw(source.places[item.source])
    entry = source.table[item.source]
    exact = source.tensor(item.source)
    made = exact.to(item.dtype)
    if not torch.isfinite(made).all():
        raise CheckpointError(
            f"{item.source} has values up to {float(exact.abs().max()):.6g}, which "
            f"{str(item.dtype).removeprefix('torch.')} cannot hold; leave that tensor in bfloat16 "
            "or float32 with --dtype PATTERN=DTYPE"
        )
    _note(report.errors.setdefault(entry.group, GroupError()), exact, made)
    before = source.places[item.source].dtype
    report.errors[entry.group].formats.add(f"{before} -> {item.stored}")
    return made.contiguous().view(-1).view(torch.uint8).numpy().data


def _raw(place: Stored) -> memoryview:
    with place.shard.open("rb") as file:
        file.seek(place.start)
        return memoryview(file.read(place.end - place.start))


def _note(error: GroupError, exact: Tensor, made: Tensor) -> None:
    difference = (made.float() - exact).double()
    error.tensors += 1
    error.values += exact.numel()
    if exact.numel():
        error.largest = max(error.largest, float(exact.abs().max()))
        error.worst = max(error.worst, float(difference.abs().max()))
    error.squares += float(exact.double().square().sum())
    error.difference_squares += float(difference.square().sum())


def _config(
    spec: ModelSpec, layout: Layout, source: Checkpoint, plan: Sequence[_Written]
) -> dict[str, Any]:
    config = spec.written(layout)
    kept = {item.source for item in plan if item.dtype is None}
    quantised = any(
        entry.format not in _PLAIN | _SCALES | {"i32", "i64", "ids"} and name in kept
        for name, entry in source.table.items()
    )
    if not quantised:
        config.pop("quantization_config", None)
        config.pop("expert_dtype", None)
    matrices = {
        item.stored for item in plan if len(item.shape) > 1 and item.stored in _STORED.values()
    }
    if any(item.dtype is not None for item in plan) and len(matrices) == 1 and not quantised:
        (stored,) = matrices
        name = next(n for n, dtype in DTYPES.items() if _STORED[dtype] == stored)
        config["torch_dtype" if layout == "published" else "dtype"] = name
    return config
