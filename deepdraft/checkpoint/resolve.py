"""Settles what the configuration leaves open: in which format each tensor is stored.

Owns: turning `plain`, `weight` and `ids` entries into stored formats by the headers, adding the
scales that quantised weights need, and leaving out optional groups that are absent.
Knows nothing of: values, files beyond their headers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deepdraft.checkpoint.names import Entry, Format
from deepdraft.checkpoint.shards import Stored

_PLAIN: dict[str, Format] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_IDS: dict[str, Format] = {"I32": "i32", "I64": "i64"}
_BLOCK, _GROUP = 128, 32


def resolve(table: Iterable[Entry], stored: Mapping[str, Stored]) -> dict[str, Entry]:
    """Name -> entry with a definite format. What is absent or of another dtype keeps its open
    format, so that the accounting reports it."""
    entries = list(table)
    present = {e.optional for e in entries if e.optional and e.name in stored}
    resolved: dict[str, Entry] = {}
    for entry in entries:
        if entry.optional and entry.optional not in present:
            continue
        assert entry.name not in resolved, entry.name
        for settled in _settle(entry, stored):
            resolved[settled.name] = settled
    return resolved


def _settle(entry: Entry, stored: Mapping[str, Stored]) -> list[Entry]:
    place = stored.get(entry.name)
    if place is None:
        return [replace(entry, scale=None)]
    plain = _IDS if entry.format == "ids" else _PLAIN
    if place.dtype in plain:
        return [replace(entry, format=plain[place.dtype], scale=None)]
    if entry.format != "weight" or entry.scale is None:
        return [replace(entry, scale=None)]
    out, width = entry.shape
    if place.dtype == "F8_E4M3":
        scale = _scale(entry, (-(-out // _BLOCK), -(-width // _BLOCK)), stored)
        return [replace(entry, format="fp8_block"), scale]
    if place.dtype in ("I8", "U8") and "experts" in entry.group and width % _GROUP == 0:
        packed = replace(entry, format="mxfp4", shape=(out, width // 2))
        rows = (out, width // _GROUP)
        return [packed, Entry(entry.scale, rows, "scale", entry.group, entry.module)]
    return [replace(entry, scale=None)]


def _scale(entry: Entry, shape: tuple[int, int], stored: Mapping[str, Stored]) -> Entry:
    assert entry.scale is not None
    place = stored.get(entry.scale)
    e8m0 = place is not None and place.dtype in ("F8_E8M0", "U8")
    return Entry(entry.scale, shape, "scale" if e8m0 else "block_scale", entry.group, entry.module)
