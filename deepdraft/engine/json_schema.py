"""JSON schemas before they become grammars.

Owns: limits of size, and the few places where the grammar library would be wrong, would refuse what
asks for nothing, or would not come to an end. What it cannot enforce it refuses itself.
Knows nothing of: tokens, grammars, HTTP. Runs without torch.
"""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from deepdraft.errors import RequestError

Schema = Mapping[str, Any] | bool

MAX_BYTES = 256 << 10
MAX_DEPTH = 64
MAX_PROPERTIES = 1000
MAX_MULTIPLE = 10_000
"""Bound of the least common multiple of all `multipleOf` of a schema. A grammar needs as many
states; the library took minutes and gigabytes for ten million of them."""

MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties", "contains"})
SCHEMAS |= {"unevaluatedItems", "unevaluatedProperties", "propertyNames", "not"}
SCHEMAS |= {"if", "then", "else"}

_MOST = (1 << 63) - (1 << 10)
"""The largest integer below 2**63 that a double holds: the library reckons bounds in doubles."""
_INTEGER_FORMATS = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32)
} | {"int64": (-_MOST, _MOST), "uint64": (0, _MOST)}
_ANY_NUMBER_FORMATS = frozenset({"float", "double"})


def clean(schema: object) -> Schema:
    """A schema that allows the same values, in the terms that the grammar library enforces.

    Keywords that ask for nothing (`uniqueItems: false`) go, integer formats become bounds. Raises
    RequestError for one that is too large or that the library would enforce wrongly.
    """
    _check_size(schema)
    multiples: list[int] = []
    cleaned = _clean(schema, multiples, root=True)
    if math.lcm(*multiples) > MAX_MULTIPLE:
        raise RequestError(
            "multipleOf: the least common multiple of all of them in the schema is "
            f"{math.lcm(*multiples)}; at most {MAX_MULTIPLE} can be enforced"
        )
    return cleaned


def _check_size(schema: object) -> None:
    layer, depth = [schema], 0
    while layer:
        depth += 1
        if depth > 2 * MAX_DEPTH:  # a schema in a schema is two levels of JSON
            raise RequestError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        inner: list[object] = []
        for node in layer:
            if isinstance(node, Mapping):
                inner.extend(node.values())
            elif isinstance(node, list | tuple):
                inner.extend(node)
        layer = inner
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise RequestError("the schema holds a lone surrogate, which is not Unicode") from error
    except (TypeError, ValueError) as error:
        raise RequestError(f"the schema is not JSON: {error}") from error
    if size > MAX_BYTES:
        raise RequestError(f"the schema has {size} bytes; at most {MAX_BYTES} go")


def _clean(schema: object, multiples: list[int], *, root: bool = False) -> Schema:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise RequestError("a schema must be an object or a boolean")
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if _asks_for_nothing(key, value):
            continue
        if key == "x-guidance":
            raise RequestError("x-guidance is refused; leave it out")
        if key == "$id":
            if root:
                continue  # only this schema's own references are served, and they do not need it
            raise RequestError("$id below the root of a schema is refused")
        out[key] = map_schemas(key, value, lambda inner: _clean(inner, multiples))
    _check_object(out)
    _check_reference(out)
    _bound_integers(out)
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = out.get(name)
        if isinstance(bound, int) and (abs(bound) > _MOST or float(bound) != bound):
            raise RequestError(f"{name} is {bound}, which cannot be enforced exactly")
    if _is_number(out.get("multipleOf")):
        multiples.append(_whole(out["multipleOf"]))
    return out


def map_schemas(key: str, value: Any, function: Callable[[Any], Any]) -> Any:
    """The value of a keyword with `function` applied to the schemas directly within."""
    if key in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
        return {name: function(inner) for name, inner in value.items()}
    if key in LISTS_OF_SCHEMAS | {"items"} and isinstance(value, list):
        return [function(inner) for inner in value]
    return function(value) if key in SCHEMAS else value


def _asks_for_nothing(key: str, value: object) -> bool:
    if key in ("uniqueItems", "not"):
        return value is False
    if key in ("unevaluatedItems", "unevaluatedProperties"):
        return value is True or value == {}
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return key in ("dependentRequired", "dependentSchemas", "dependencies") and value == {}


def _check_object(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties")
    num_properties = len(properties) if isinstance(properties, Mapping) else 0
    if num_properties > MAX_PROPERTIES:
        raise RequestError(
            f"an object has {num_properties} properties; at most {MAX_PROPERTIES} go"
        )
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least - num_properties > 1:
        # Names of properties that the schema does not list may repeat, and count once then.
        raise RequestError(
            f"minProperties is {least} where {num_properties} properties are listed; at most one "
            "more than are listed can be enforced"
        )


def _check_reference(schema: Mapping[str, Any]) -> None:
    target = schema.get("$ref")
    if isinstance(target, str) and target != "#" and not target.startswith("#/"):
        raise RequestError(
            f"$ref {target!r} is refused: only paths within the schema, like #/$defs/name, go"
        )


def _bound_integers(schema: dict[str, Any]) -> None:
    """Formats of numbers, which the library passes over in silence, as bounds."""
    name, kinds = schema.get("format"), schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    kinds = {kind for kind in kinds if isinstance(kind, str)}
    if not isinstance(name, str) or not kinds or "string" in kinds:
        return
    if name in _INTEGER_FORMATS and not kinds - {"integer", "null"}:
        low, high = _INTEGER_FORMATS[name]
        for key, bound, pick in (("minimum", low, max), ("maximum", high, min)):
            given = schema.get(key)
            schema[key] = _pick(pick, given, bound)
    elif name not in _ANY_NUMBER_FORMATS and kinds & {"integer", "number"}:
        raise RequestError(f"format {name!r} of a number cannot be enforced")
    del schema["format"]


def _pick(pick: Callable[..., Any], given: object, bound: int) -> Any:
    return pick(given, bound) if _is_number(given) else bound


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: float) -> int:
    """The digits of a number as an integer: what a grammar of its multiples counts by."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    number = int("".join(map(str, digits)))
    if number <= 0:
        raise RequestError(f"multipleOf is {value}; it must be above 0")
    if exponent > 20:
        raise RequestError(f"multipleOf is {value}; at most {MAX_MULTIPLE} can be enforced")
    return number * 10**exponent if exponent > 0 else number


# References


def resolve(root: Schema, reference: str) -> Schema:
    """The schema that a path within `root` names. Raises RequestError where there is none."""
    node: Any = root
    for part in reference.lstrip("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            raise RequestError(f"$ref {reference!r} names nothing in the schema")
    if not isinstance(node, Mapping | bool):
        raise RequestError(f"$ref {reference!r} names something that is no schema")
    return node


def standalone(part: Schema, root: Schema) -> Schema:
    """A part of a cleaned schema `root` as a schema of its own, its references included."""
    if isinstance(part, bool) or '"$ref"' not in json.dumps(part):
        return part
    moved = _move(part)
    assert isinstance(moved, dict)
    return {**moved, "$defs": {**moved.get("$defs", {}), _ROOT: _move(root)}}


_ROOT = "deepdraft-root"


def _move(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            out[key] = f"#/$defs/{_ROOT}{value[1:]}"
        else:
            out[key] = map_schemas(key, value, _move)
    return out
