"""Keys below the top level of a body that no struct has a place for.

Owns: the walk through a body beside the struct that it is read into.
Knows nothing of: what the fields mean. Runs without torch.
"""

import functools
import re
from typing import Any

from msgspec import Struct, inspect

PLAIN_NAME = re.compile(r"[A-Za-z_][\w.]*\Z", re.A)
"""What may stand in a header as it is."""
_MOST = 32


def unknown_keys(value: Any, kind: type[Struct]) -> list[str]:
    """Paths, without indices, of keys that `kind` passes over, each once; of null ones none. A key
    that a header cannot hold is a question mark.

    `value`: the body as plain objects, which `kind` has accepted. Keys of the top level are not
    looked at.
    """
    found: dict[str, None] = {}
    root = _type_of(kind)
    assert isinstance(root, inspect.StructType)
    for field in root.fields:
        if isinstance(value, dict) and field.encode_name in value:
            _walk(value[field.encode_name], field.type, field.encode_name, found)
    return _shown(found)


def unknown_within(value: Any, kind: type[Struct], path: str) -> list[str]:
    """`unknown_keys` of an object that stands at `path`, its own keys too; `type` says its kind."""
    found: dict[str, None] = {}
    _walk(value, _type_of(kind), path, found)
    found.pop(f"{path}.type", None)
    return _shown(found)


def _shown(found: dict[str, None]) -> list[str]:
    return list(dict.fromkeys(n if PLAIN_NAME.match(n) else "?" for n in found))


@functools.cache
def _type_of(kind: type[Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _walk(value: Any, kind: inspect.Type, path: str, found: dict[str, None]) -> None:
    if isinstance(value, list):
        item = _option(kind, inspect.ListType, value)
        if isinstance(item, inspect.ListType):
            for one in value:
                _walk(one, item.item_type, path, found)
    elif isinstance(value, dict):
        struct = _option(kind, inspect.StructType, value)
        if not isinstance(struct, inspect.StructType):
            return
        fields = {field.encode_name: field.type for field in struct.fields}
        for key, inner in value.items():
            if key in fields:
                _walk(inner, fields[key], f"{path}.{key}", found)
            elif inner is not None and key != struct.tag_field and len(found) < _MOST:
                found.setdefault(f"{path}.{key}")


def _option(kind: inspect.Type, wanted: type, value: Any) -> inspect.Type | None:
    """The type among the options of a union that reads this value."""
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    fitting = [option for option in options if isinstance(option, wanted)]
    for option in fitting:
        tag = getattr(option, "tag_field", None)
        if tag is None or value.get(tag) == option.tag:  # type: ignore[union-attr]
            return option
    return None
