"""The OpenAPI document against the routes, the structs and the lists of fields."""

import json
from typing import Any

from starlette.routing import Route

from deepdraft.server import openapi, schema
from deepdraft.server.app import PREFIXES, create_app
from deepdraft.server.page import PREFIX as PAGE

from .conftest import Client


def test_it_is_served_and_every_reference_leads_somewhere(client: Client) -> None:
    response = client.get("/openapi.json")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    document = response.json()
    assert document["openapi"].startswith("3.1")

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    found = references(document)
    assert len(found) > 50
    for reference in found:
        at = document
        for key in reference.removeprefix("#/").split("/"):
            at = at[key]


def test_paths_are_the_routes(client: Client) -> None:
    """Every route is in the document, under its /v1 path or its only one; and the other way."""
    app: Any = create_app(client.toy.service)._app._app  # type: ignore[attr-defined]
    served = set()
    for route in app.routes:
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            served.add((route.path.replace(":path", ""), method.lower()))
    told = {(path, op[0]) for path, ops in openapi.PATHS.items() for op in ops}
    assert told <= served
    other = {"/openapi.json", "/metrics"}
    for path, method in served - told:
        variants = {
            *(prefix + path.removeprefix(p) for p in PREFIXES for prefix in ("/v1", "")),
            path.removeprefix("/anthropic"),
            path.removeprefix("/anthropic/v1"),
            "/v1" + path.removeprefix("/anthropic"),
        }
        page = path == "/" or path.startswith(PAGE)
        assert path in other or page or any((v, method) in told for v in variants), path


def test_bodies_are_the_structs_and_nothing_else() -> None:
    document = json.loads(openapi.document())
    for body, ignored in openapi.BODIES.items():
        component = document["components"]["schemas"][body.__name__]
        assert set(component["properties"]) == schema.field_names(body) | ignored
        assert component["additionalProperties"] is False
        for name in ignored:
            assert component["properties"][name]["description"] == openapi.NO_EFFECT
    assert set(document["components"]["schemas"]["ChatRequest"]["required"]) == {"messages"}
