"""Random JSON schemas, values that they allow, and a validator of our own for what they use."""

import datetime
import json
import re
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

# Names with an escape, outside ASCII, and one that is a part of another.
NAMES = ("a", "ab", "name", "größe", "q\"'\\", "日本 x", "x<y>", "tab\t", "🎲")
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from('ab "\\/\n\t{}[]<>,:é日🎉'),
        st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\x7f"),
    ),
    max_size=8,
)
PATTERNS = {"^[a-c]{2,4}$": "abc", "^\\d+-x$": "7-x", "b": 'a"b', "^(é|🎉)*$": "é🎉"}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXTS)


@st.composite
def integers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "integer"}
    low = draw(st.integers(-300, 300))
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = low + draw(st.integers(0, 500))
    elif draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from((2, 5, 7, 10)))
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "number"}
    low = draw(st.integers(-50, 50)) / 4
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["exclusiveMaximum"] = low + draw(st.sampled_from((0.5, 1, 2.25, 100)))
    return schema


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(("any", "length", "pattern", "date")))
    if kind == "length":
        low = draw(st.integers(0, 3))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(sorted(PATTERNS)))}
    return {"type": "string", "format": "date"} if kind == "date" else {"type": "string"}


def leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        integers(),
        numbers(),
        strings(),
        st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]})),
        st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr).map(lambda v: {"enum": v}),
        SCALARS.map(lambda v: {"const": v}),
    )


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": draw(inner)}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["maxItems"] = schema.get("minItems", 0) + draw(st.integers(0, 3))
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    schema: Schema = {"type": "object", "properties": {n: draw(inner) for n in names}}
    schema["required"] = [n for n in names if draw(st.booleans())]
    more = draw(st.sampled_from(("closed", "open", "typed")))
    if more == "closed":
        schema["additionalProperties"] = False
    elif more == "typed":
        schema["additionalProperties"] = draw(leaves())
    return schema


def schemas() -> st.SearchStrategy[Schema]:
    """Schemas of some depth; `#/$defs/leaf` is among them."""
    inner = st.recursive(
        st.one_of(leaves(), st.just({"$ref": "#/$defs/leaf"})),
        lambda s: st.one_of(
            arrays(s), objects(s), st.lists(s, min_size=1, max_size=3).map(lambda v: {"anyOf": v})
        ),
        max_leaves=6,
    )
    return st.builds(lambda s, leaf: {**s, "$defs": {"leaf": leaf}}, inner, leaves())


def resolved(schema: Any, root: Schema) -> Any:
    if isinstance(schema, dict) and "$ref" in schema:
        return root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


@st.composite
def values(draw: st.DrawFn, schema: Any, root: Schema) -> Any:
    """A value that the schema allows, its properties in the order of the schema."""
    schema = resolved(schema, root)
    if "anyOf" in schema:
        return draw(values(draw(st.sampled_from(schema["anyOf"])), root))
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    kind = schema["type"]
    if isinstance(kind, list):
        kind = draw(st.sampled_from(kind))
    return draw(_value_of(kind, schema, root))


def _value_of(kind: str, schema: Schema, root: Schema) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum"), schema.get("maximum")
            step = schema.get("multipleOf", 1)
            if step > 1:
                least = -(-low // step) if low is not None else -99
                return st.integers(least, max(99, least)).map(lambda k: k * step)
            return st.integers(-999 if low is None else low, 999 if high is None else high)
        case "number":
            low = schema.get("minimum", -20.0)
            high = schema.get("exclusiveMaximum", low + 10)
            return st.integers(0, 7).map(lambda k: low + (high - low) * k / 8)
        case "string":
            return _text_of(schema)
        case "array":
            return _array_of(schema, root)
    return _object_of(schema, root)


def _text_of(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.just(PATTERNS[schema["pattern"]])
    if "format" in schema:
        return st.dates(datetime.date(1000, 1, 1)).map(str)
    low, high = schema.get("minLength", 0), schema.get("maxLength", 8)
    return TEXTS.map(lambda s: (s + "ab" * low)[:high] if len(s) < low else s[:high])


@st.composite
def _array_of(draw: st.DrawFn, schema: Schema, root: Schema) -> list[Any]:
    low = schema.get("minItems", 0)
    size = draw(st.integers(low, schema.get("maxItems", low + 3)))
    kinds = [*schema.get("prefixItems", ())][:size]
    kinds += [schema["items"]] * (size - len(kinds))
    return [draw(values(kind, root)) for kind in kinds]


@st.composite
def _object_of(draw: st.DrawFn, schema: Schema, root: Schema) -> dict[str, Any]:
    value = {
        name: draw(values(kind, root))
        for name, kind in schema["properties"].items()
        if name in schema["required"] or draw(st.booleans())
    }
    more = schema.get("additionalProperties", {"type": "integer"})
    if more is not False and draw(st.booleans()):
        value["other"] = draw(values(more, root))
    return value


# Validation


def same(a: Any, b: Any) -> bool:
    """JSON equality: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b if isinstance(a, str) or isinstance(b, str) else a == b


def is_kind(value: Any, kind: str) -> bool:
    number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": number and _is_whole(value),
        "number": number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }[kind]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or value == value.to_integral_value()


def _decimal(text: str) -> Decimal:
    """A number exactly, but for exponents of more than four digits, which are only large."""
    digits, _, exponent = text.lower().partition("e")
    short = exponent if len(exponent) <= 5 else exponent[:5]
    return Decimal(f"{digits}e{short}" if exponent else digits)


def read(text: str) -> Any:
    """JSON without rounding of fractions, and strictly."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_float=_decimal, parse_constant=refuse)


def valid(value: Any, schema: Any, root: Schema) -> bool:
    """Whether a schema of this module allows a value as `read` gives it."""
    schema = resolved(schema, root)
    if "anyOf" in schema:
        return any(valid(value, option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return any(same(value, option) for option in schema["enum"])
    if "const" in schema:
        return same(value, schema["const"])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_kind(value, kind) for kind in kinds):
        return False
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | Decimal):
        return _valid_number(Decimal(value), schema)
    if isinstance(value, str):
        return _valid_text(value, schema)
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        rest = [schema.get("items", {})] * max(0, len(value) - len(first))
        return (
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        ) and all(
            valid(v, s, root) for v, s in zip(value, [*first, *rest][: len(value)], strict=True)
        )
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    return all(name in value for name in schema.get("required", ())) and all(
        valid(v, properties[n], root)
        if n in properties
        else more is not False and valid(v, more, root)
        for n, v in value.items()
    )


def _valid_number(value: Decimal, schema: Schema) -> bool:
    return (
        value >= Decimal(str(schema.get("minimum", "-Infinity")))
        and value <= Decimal(str(schema.get("maximum", "Infinity")))
        and value < Decimal(str(schema.get("exclusiveMaximum", "Infinity")))
        and ("multipleOf" not in schema or int(value) % schema["multipleOf"] == 0)
    )


def _valid_text(value: str, schema: Schema) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value, re.ASCII):
        return False
    if schema.get("format") == "date":
        try:
            datetime.date.fromisoformat(value if value[:4] != "0000" else "2000" + value[4:])
        except ValueError:
            return False
    return True
