"""Sixty-odd JSON schemas, answered by the bundled model and judged by the `jsonschema` package.

python -m tests.server.schema_suite [--out FILE]: all of them, thinking on and off, drafted and
plain; about five minutes. The tests run a part of it.
"""

import argparse
import asyncio
import datetime
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from deepdraft.config import Config, EngineConfig
from deepdraft.engine.load import load_engine
from deepdraft.proof.bench import commit, machine
from deepdraft.server.app import create_app
from deepdraft.server.service import Service, bundled_checkpoint

Schema = dict[str, Any]
STR: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 12}
INT: Schema = {"type": "integer"}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
BOOL: Schema = {"type": "boolean"}


def obj(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Schema, low: int = 0, high: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def union(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


POINT = obj(x=INT, y=INT)
ADDRESS = obj(street=SHORT, number=DIGIT, city=SHORT)
TREE: Schema = {
    "$defs": {
        "node": obj(
            name={"enum": ["a", "b", "c"]},
            children=array({"$ref": "#/$defs/node"}, 0, 2),
        )
    },
    "$ref": "#/$defs/node",
}
LIST: Schema = {
    "$defs": {"cell": union({"type": "null"}, obj(head=DIGIT, tail={"$ref": "#/$defs/cell"}))},
    "type": "object",
    "properties": {"list": {"$ref": "#/$defs/cell"}},
    "required": ["list"],
    "additionalProperties": False,
}
EXPRESSION: Schema = {
    "$defs": {
        "value": union(
            DIGIT,
            obj(op={"enum": ["+", "*"]}, left=DIGIT, right={"$ref": "#/$defs/value"}),
        )
    },
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/value"}},
    "required": ["value"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, Schema] = {
    # Scalars
    "string": STR,
    "short string": SHORT,
    "string of length": {"type": "string", "minLength": 3, "maxLength": 5},
    "integer": INT,
    "integer in a range": {"type": "integer", "minimum": -20, "maximum": 1000},
    "integer above": {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 200},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": BOOL,
    "null": {"type": "null"},
    "const": {"const": {"a": [1, "x", None]}},
    "enum": {"enum": ["red", "green", 3, None, [1, 2]]},
    "types": {"type": ["integer", "null"]},
    # Strings of a form
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    "pattern of words": {"type": "string", "pattern": "^(foo|bar)( baz){0,3}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    # Arrays
    "array": array(DIGIT),
    "array of strings": array(SHORT, 1, 3),
    "array of arrays": array(array(DIGIT, 1, 2), 1, 3),
    "array of objects": array(POINT, 1, 3),
    "empty array": array(STR, 0, 0),
    "exact array": array(BOOL, 3, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [DIGIT, SHORT, BOOL],
        "items": False,
        "minItems": 3,
    },
    "tuple with a rest": {
        "type": "array",
        "prefixItems": [{"enum": ["start"]}],
        "items": DIGIT,
        "minItems": 1,
        "maxItems": 4,
    },
    "array of unions": array(union(DIGIT, {"enum": ["a", "b"]}, {"type": "null"}), 1, 4),
    # Objects
    "point": POINT,
    "person": obj(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": obj(["a"], a=DIGIT, b=DIGIT, c=BOOL),
    "all optional": obj([], a=DIGIT, b=BOOL),
    "nested": obj(person=obj(name=SHORT, address=ADDRESS), active=BOOL),
    "nested deep": obj(a=obj(b=obj(c=obj(d=obj(e=obj(f=DIGIT)))))),
    "many fields": obj(**{f"field_{i}": DIGIT for i in range(20)}),
    "names that need escapes": obj(**{'q"uote': DIGIT, "back\\slash": DIGIT, "größe": BOOL}),
    "map": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 3},
    "known and free fields": {
        "type": "object",
        "properties": {"id": DIGIT},
        "required": ["id"],
        "additionalProperties": BOOL,
        "maxProperties": 3,
    },
    "enum fields": obj(size={"enum": ["S", "M", "L"]}, color={"enum": ["red", "blue"]}),
    "const field": obj(kind={"const": "circle"}, radius=DIGIT),
    "nullable fields": obj(
        a={"type": ["string", "null"], "maxLength": 5}, b=union(DIGIT, {"type": "null"})
    ),
    "matrix": obj(rows=array(array(DIGIT, 2, 2), 2, 2)),
    "title and description": {
        "title": "Thing",
        "description": "A thing.",
        **obj(n={"type": "integer", "description": "How many.", "minimum": 0, "maximum": 5}),
    },
    "defaults": obj(
        ["n"],
        n={"type": "integer", "default": 3, "maximum": 9, "minimum": 0},
        s={**SHORT, "default": "x"},
    ),
    # Unions
    "union of scalars": union(DIGIT, SHORT, BOOL),
    "union of objects": union(
        obj(kind={"const": "circle"}, radius=DIGIT),
        obj(kind={"const": "square"}, side=DIGIT),
        obj(kind={"const": "none"}),
    ),
    "union in a field": obj(value=union(DIGIT, obj(text=SHORT), array(BOOL, 1, 2))),
    "one of": {"oneOf": [obj(a=DIGIT), obj(b=DIGIT)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"properties": {"b": BOOL}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    # References and recursion
    "references": {
        "$defs": {"point": POINT, "name": SHORT},
        **obj(
            start={"$ref": "#/$defs/point"},
            end={"$ref": "#/$defs/point"},
            name={"$ref": "#/$defs/name"},
        ),
    },
    "definitions": {
        "definitions": {"d": DIGIT},
        **obj(a={"$ref": "#/definitions/d"}, b=array({"$ref": "#/definitions/d"}, 1, 2)),
    },
    "tree": TREE,
    "linked list": LIST,
    "expression": EXPRESSION,
    # As people use them
    "tool call": obj(name={"enum": ["get_weather", "get_time"]}, arguments=obj(city=SHORT)),
    "classification": obj(
        label={"enum": ["spam", "ham"]}, score={"type": "number", "minimum": 0, "maximum": 1}
    ),
    "extraction": obj(
        people=array(obj(name=SHORT, role={"enum": ["author", "editor"]}), 0, 2),
        date={"type": "string", "format": "date"},
        topics=array({"enum": ["art", "news", "sport"]}, 1, 3),
    ),
    "recipe": obj(
        title=SHORT,
        minutes={"type": "integer", "minimum": 1, "maximum": 240},
        steps=array(SHORT, 1, 2),
        vegan=BOOL,
    ),
    "order": obj(
        id={"type": "string", "pattern": "^ORD-[0-9]{4}$"},
        lines=array(obj(sku={"type": "string", "pattern": "^[A-Z]{3}$"}, qty=DIGIT), 1, 2),
        total={"type": "number", "minimum": 0, "maximum": 10000},
    ),
    "chain of thought": obj(
        steps=array(obj(explanation=SHORT, output=SHORT), 1, 2), final_answer=SHORT
    ),
}
MAX_TOKENS = 700


def _formats() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker()

    @checker.checks("date-time")
    def date_time(value: object) -> bool:
        if not isinstance(value, str):
            return True
        text = value.upper().replace("Z", "+00:00")
        head, _, zone = text.rpartition("+" if "+" in text[10:] else "-")
        try:
            # A leap second is a second that `datetime` does not know.
            datetime.datetime.fromisoformat(head[:19].replace(":60", ":59"))
            datetime.time.fromisoformat(zone)
        except ValueError:
            return False
        return head[10] in "T "

    @checker.checks("time")
    def time_of_day(value: object) -> bool:
        return not isinstance(value, str) or date_time("2000-01-01T" + value)

    return checker


FORMATS = _formats()


def problem(schema: Schema, text: str) -> str | None:
    """Why a text does not satisfy a schema."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return next((f"{e.json_path}: {e.message}" for e in validator.iter_errors(value)), None)


def serving(**options: Any) -> Service:
    """The bundled model behind an application."""
    config = EngineConfig(
        **{"max_running": 16, "max_context": 2048, "schedule": "all", "kv_memory": 0, **options}
    )
    service = Service(
        lambda: load_engine(bundled_checkpoint(), config, name="demo"), Config(engine=config)
    )
    service.start()
    assert service.wait(120) and service.failure is None, service.failure
    return service


async def answers(service: Service, names: list[str], thinking: bool, seed: int) -> Counter[str]:
    """Asks for all schemas at once; how the answers ended, and what was wrong with them."""
    outcome: Counter[str] = Counter()
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://demo") as client:

        async def ask(i: int, name: str) -> None:
            schema = SCHEMAS[name]
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {
                "messages": [{"role": "user", "content": f"Give me one example: {name}."}],
                "response_format": form,
                "max_tokens": MAX_TOKENS,
                "temperature": (0.0, 0.7, 1.0)[(i + seed) % 3],
                "seed": seed,
                "thinking": {"type": "enabled" if thinking else "disabled"},
            }
            response = await client.post("/v1/chat/completions", json=body, timeout=900)
            if response.status_code != 200:
                outcome[f"wrong: {name}: {response.text[:300]}"] += 1
                return
            choice = response.json()["choices"][0]
            if choice["finish_reason"] != "stop":
                outcome[f"cut: {name}"] += 1
                return
            fault = problem(schema, choice["message"]["content"])
            outcome["valid" if fault is None else f"wrong: {name}: {fault}"] += 1

        await asyncio.gather(*(ask(i, name) for i, name in enumerate(names)))
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="JSON schemas, answered and validated")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "what": "json schemas",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "schemas": len(SCHEMAS),
        "runs": {},
    }
    ok = True
    for drafts in (None, 0):
        service = serving(drafts=drafts)
        for thinking in (False, True):
            found = asyncio.run(answers(service, list(SCHEMAS), thinking, seed=1))
            name = (
                f"{'plain' if drafts == 0 else 'drafted'}, thinking {'on' if thinking else 'off'}"
            )
            cut = sum(n for what, n in found.items() if what.startswith("cut"))
            wrong = [what for what in found if what.startswith("wrong")]
            report["runs"][name] = {"valid": found["valid"], "cut": cut, "wrong": wrong}
            report["runs"][name]["cut_ones"] = sorted(w for w in found if w.startswith("cut"))
            ok = ok and not wrong and cut <= 0.05 * len(SCHEMAS)
            print(name, report["runs"][name], file=sys.stderr, flush=True)
        service.close()
    report["ok"] = ok
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
