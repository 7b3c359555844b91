"""Where the tensors of a checkpoint directory lie: index, safetensors headers, strict accounting.

Owns: the file format as far as headers go, and the comparison of what is stored with what must be.
Knows nothing of: tensor values, torch. A header is data to be checked; nothing in it is executed.
"""

import difflib
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from deepdraft.checkpoint.names import STORED_DTYPES, Entry
from deepdraft.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
_MAX_INDEX_BYTES = 256 << 20
_MAX_SHARDS = 4096
_MAX_DIMS = 8
_MAX_FILE_NAME = 200  # characters; no file system takes many more
_MAX_LISTED = 6
"""Problems shown of each kind."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a shard; `start` and `end` are offsets in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    start: int
    end: int


def write_header(
    tensors: Iterable[tuple[str, str, Collection[int], int]], *, alignment: int = 8
) -> tuple[bytes, dict[str, int], int]:
    """Start of a safetensors file whose tensors (name, dtype, shape, bytes) follow in this order.

    Gives it with each tensor's offset behind it and the bytes of all. The data begin at a multiple
    of `alignment`, which must be one of 8, too.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    at = 0
    for name, dtype, shape, num_bytes in tensors:
        places[name], end = at, at + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text, places, at


def read_header(path: Path) -> dict[str, Stored]:
    """Checked header of one safetensors file: name -> place. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            _check_header_size(path, size, length)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) != length:
        raise CheckpointError(f"{path} is truncated inside its header; download it again")
    header = _parse_json(path, raw, "header")
    header.pop("__metadata__", None)
    data_start = 8 + length
    stored = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    _check_layout(path, stored.values(), data_start, size)
    return stored


def _check_header_size(path: Path, size: int, length: int) -> None:
    if length < 0:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes hold no safetensors header; download it again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file or corrupt: its header claims {length} bytes, "
            f"the format allows {MAX_HEADER_BYTES}"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is truncated: its header takes {length} bytes, the file has {size}; "
            "download it again"
        )


def _parse_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = [name for name, count in Counter(k for k, _ in pairs).items() if count > 1]
            raise CheckpointError(f"{path}: its {what} names {twice[0]!r} twice")
        return values

    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: its {what} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is corrupt: its {what} is not a JSON object")
    return values


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 50


def _entry(path: Path, name: str, value: object, data_start: int) -> Stored:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or len(shape) > _MAX_DIMS
        or not all(_is_count(n) for n in (*shape, *offsets))
    ):
        raise CheckpointError(f"{path} is corrupt: the header entry of {name!r} is malformed")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: {name!r} has the unknown dtype {dtype[:40]!r}")
    start, end = offsets
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{path} is corrupt: {name!r} of shape {shape} and dtype {dtype} takes "
            f"{prod(shape) * DTYPE_BYTES[dtype]} bytes, its offsets {offsets} hold {end - start}"
        )
    return Stored(name, dtype, tuple(shape), path, data_start + start, data_start + end)


def _check_layout(path: Path, stored: Iterable[Stored], position: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap and end where the file ends."""
    before = "the header"
    ordered = sorted(stored, key=lambda s: (s.start, s.end))
    last = max(ordered, key=lambda s: s.end, default=None)
    if last is not None and last.end > size:
        raise CheckpointError(
            f"{path} is truncated or corrupt: {last.name!r} ends at byte {last.end}, the file has "
            f"{size}; download it again"
        )
    before = "the header"
    for item in ordered:
        if item.start != position:
            problem = "overlaps" if item.start < position else "leaves a gap after"
            raise CheckpointError(f"{path} is corrupt: {item.name!r} {problem} {before}")
        position, before = item.end, repr(item.name)
    if position < size:
        raise CheckpointError(f"{path} is corrupt: {size - position} bytes follow {before}")


def find_shards(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Shard files of a checkpoint directory, and the index's name -> file map if there is one."""
    files = sorted(p for p in directory.glob("*.safetensors") if p.is_file())
    index = directory / INDEX_NAME
    for path in (*files, index):
        check_link(directory, path)
    if not index.is_file():
        if not files:
            raise CheckpointError(f"{directory} holds no .safetensors file{_old_files(directory)}")
        if len(files) > 1:
            raise CheckpointError(
                f"{directory} holds {len(files)} .safetensors files but no {INDEX_NAME}; "
                "download the index too, it says which shards belong to the checkpoint"
            )
        return files, None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        plain = Path(name).name == name and len(name) <= _MAX_FILE_NAME
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name[:80]!r}, which is no shard of {directory}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{directory} lacks {', '.join(missing[:3])}{more} of the {len(names)} shards that "
            f"{INDEX_NAME} names; download them"
        )
    extra = [p.name for p in files if p.name not in names]
    if extra:
        raise CheckpointError(
            f"{directory} holds {extra[0]}, which {INDEX_NAME} does not name; move it away"
        )
    return [directory / name for name in names], weight_map


def check_link(directory: Path, path: Path) -> None:
    """Raises CheckpointError for a symbolic link that leads out of the checkpoint's directory.

    The layout of the hub's cache (snapshots/REVISION/FILE -> ../../blobs/HASH) is accepted.
    """
    if not path.is_symlink():
        return
    try:
        home, real = directory.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is a link that leads nowhere or in a circle; replace it by the file"
        ) from error
    cached = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not real.is_relative_to(home) and not cached:
        raise CheckpointError(
            f"{path} is a link out of the checkpoint's directory, to {real}; put the file itself "
            "there, or give the directory that holds it"
        )


def _old_files(directory: Path) -> str:
    """What to say of the files that were used before safetensors."""
    old = sorted(p.name for p in directory.glob("*.bin")) + sorted(
        p.name for pattern in ("*.pt", "*.pth") for p in directory.glob(pattern)
    )
    if not old:
        return ""
    return (
        f", but {old[0]}: files of that kind are pickles, which can run code when they are read, "
        "so they are refused; fetch the model's safetensors files, or convert these in a sandbox "
        "with torch.load(file, weights_only=True) and safetensors.torch.save_file "
        "(docs/families.md has the few lines)"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_INDEX_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    weight_map = _parse_json(path, raw, "content").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    if not all(isinstance(value, str) for value in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
    if len(set(weight_map.values())) > _MAX_SHARDS:
        raise CheckpointError(f"{path} names more than {_MAX_SHARDS} shards")
    return weight_map


@dataclass(frozen=True, slots=True)
class Found:
    """What the files of a directory hold, by their headers."""

    directory: Path
    stored: dict[str, Stored]
    twice: list[str]
    """Remarks on names that lie in two shards."""
    weight_map: dict[str, str] | None


def read_headers(directory: Path) -> Found:
    """Every tensor of a checkpoint directory. Raises CheckpointError for files that are damaged."""
    shards, weight_map = find_shards(directory)
    stored: dict[str, Stored] = {}
    twice: list[str] = []
    for shard in shards:
        for name, place in read_header(shard).items():
            if name in stored:
                twice.append(f"{name} is in {stored[name].shard.name} and {shard.name}")
            stored.setdefault(name, place)
    return Found(directory, stored, twice, weight_map)


def locate_tensors(directory: Path, table: Mapping[str, Entry]) -> dict[str, Stored]:
    """Place of every tensor of `table`; the files must hold these tensors and no others.

    Raises one CheckpointError that lists what is missing, left over, stored twice, of wrong shape
    or dtype, or elsewhere than the index says, with the nearest names.
    """
    return check_headers(read_headers(directory), table)


def check_headers(
    found: Found, table: Mapping[str, Entry], unread: Collection[str] = ()
) -> dict[str, Stored]:
    """`locate_tensors` of headers that were read before; `unread` names tensors that may be there
    in any form."""
    stored = {name: place for name, place in found.stored.items() if name not in unread}
    weight_map = found.weight_map
    problems = {
        **_name_problems(table, stored),
        "stored twice": found.twice,
        **_form_problems(table, stored),
        "index": _index_problems(weight_map, found.stored) if weight_map is not None else [],
    }
    count = sum(map(len, problems.values()))
    if count:
        lines = [
            f"{found.directory} does not hold the tensors of its config.json ({count} problems):"
        ]
        for kind, remarks in problems.items():
            lines += [f"  {kind}: {remark}" for remark in remarks[:_MAX_LISTED]]
            if len(remarks) > _MAX_LISTED:
                lines.append(f"  {kind}: {len(remarks) - _MAX_LISTED} more")
        raise CheckpointError("\n".join(lines))
    return stored


def _name_problems(
    table: Mapping[str, Entry], stored: Mapping[str, Stored]
) -> dict[str, list[str]]:
    missing = [name for name in table if name not in stored]
    left_over = [name for name in stored if name not in table]
    if not missing and not left_over:
        return {}
    # Names are compared only for the lines that are shown.
    near_missing, near_extra = Nearest(missing or table), Nearest(left_over)
    return {
        "missing": [
            f"{name} {list(table[name].shape)}"
            + (near_extra.hint(name, "left over") if i < _MAX_LISTED else "")
            for i, name in enumerate(missing)
        ],
        "left over": [
            f"{name} in {stored[name].shard.name}"
            + (near_missing.hint(name, "expected") if i < _MAX_LISTED else "")
            for i, name in enumerate(left_over)
        ],
    }


def _form_problems(
    table: Mapping[str, Entry], stored: Mapping[str, Stored]
) -> dict[str, list[str]]:
    shapes, dtypes = [], []
    for name, entry in table.items():
        place = stored.get(name)
        if place is None:
            continue
        if place.shape != entry.shape:
            shapes.append(
                f"{name} is {list(place.shape)} in {place.shard.name}, "
                f"config.json makes it {list(entry.shape)}"
            )
        supported = STORED_DTYPES[entry.format]
        if place.dtype not in supported:
            dtypes.append(
                f"{name} is {place.dtype} in {place.shard.name}, "
                f"it must be {' or '.join(supported)}"
            )
    return {"wrong shape": shapes, "wrong dtype": dtypes}


def _index_problems(weight_map: Mapping[str, str], stored: Mapping[str, Stored]) -> list[str]:
    problems = []
    for name, file in weight_map.items():
        place = stored.get(name)
        if place is None:
            problems.append(f"puts {name} in {file}, no shard holds it")
        elif place.shard.name != file:
            problems.append(f"puts {name} in {file}, it lies in {place.shard.name}")
    problems += [
        f"does not name {name}, which lies in {place.shard.name}"
        for name, place in stored.items()
        if name not in weight_map
    ]
    return problems


class Nearest:
    """Finds similar names among many: a cheap filter on dotted parts, then difflib."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_part: dict[str, list[str]] = defaultdict(list)
        for name in names:
            for part in set(name.split(".")):
                self._by_part[part].append(name)

    def matches(self, name: str, count: int = 3) -> list[str]:
        """At most `count` similar names, best first."""
        shared: Counter[str] = Counter()
        for part in set(name.split(".")):
            shared.update(self._by_part.get(part, ()))
        candidates = [other for other, _ in shared.most_common(64)]
        return difflib.get_close_matches(name, candidates, n=count, cutoff=0.6)

    def hint(self, name: str, what: str) -> str:
        """A bracketed remark with the nearest names, or nothing."""
        found = self.matches(name)
        return f" (nearest {what}: {', '.join(found)})" if found else ""
