"""The OpenAPI document, made of the structs that bodies are read into.

Owns: paths, what each takes and gives, in OpenAPI's words.
Knows nothing of: how requests are answered. Runs without torch.
"""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from deepdraft import __version__
from deepdraft.server import messages_schema, responses_schema, schema, tokens

Json = dict[str, Any]

REF = "#/components/schemas/{name}"
NO_EFFECT = "Accepted without effect; named in X-Deepdraft-Ignored."

# Request struct: fields without effect, in the APIs of docs/api*.md.
BODIES: dict[type[Struct], frozenset[str]] = {
    schema.ChatRequest: schema.IGNORED_FIELDS,
    schema.CompletionRequest: schema.IGNORED_FIELDS,
    messages_schema.MessagesRequest: messages_schema.IGNORED_FIELDS,
    responses_schema.ResponsesRequest: responses_schema.IGNORED_FIELDS,
    tokens.TokenizeRequest: frozenset(),
    tokens.DetokenizeRequest: frozenset(),
}

# Path: method, name, body, whether it can be streamed, one line.
Operation = tuple[str, str, type[Struct] | None, bool, str]
PATHS: dict[str, tuple[Operation, ...]] = {
    "/v1/chat/completions": (("post", "chat", schema.ChatRequest, True, "Answer a conversation."),),
    "/v1/completions": (
        ("post", "complete", schema.CompletionRequest, True, "Continue a text, or fill a gap."),
    ),
    "/v1/messages": (
        ("post", "message", messages_schema.MessagesRequest, True, "Anthropic's Messages."),
    ),
    "/v1/messages/count_tokens": (
        ("post", "countTokens", messages_schema.MessagesRequest, False, "Tokens of a prompt."),
    ),
    "/v1/responses": (
        ("post", "respond", responses_schema.ResponsesRequest, True, "OpenAI's Responses."),
    ),
    "/v1/responses/input_tokens": (
        ("post", "inputTokens", responses_schema.ResponsesRequest, False, "Tokens of a prompt."),
    ),
    "/v1/responses/{id}": (
        ("get", "keptResponse", None, False, "A response that is still kept."),
        ("delete", "forgetResponse", None, False, "Forget a response."),
    ),
    "/tokenize": (
        ("post", "tokenize", tokens.TokenizeRequest, False, "Tokens of a text or conversation."),
    ),
    "/detokenize": (
        ("post", "detokenize", tokens.DetokenizeRequest, False, "The text of tokens."),
    ),
    "/v1/models": (("get", "models", None, False, "The served names."),),
    "/v1/models/{name}": (("get", "model", None, False, "One served name."),),
    "/healthz": (("get", "health", None, False, "200 while the process can answer."),),
    "/readyz": (("get", "ready", None, False, "200 when requests are served."),),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    structs: list[type] = [*BODIES, *_items()]
    refs, components = msgspec.json.schema_components(structs, ref_template=REF)
    for (body, ignored), ref in zip(BODIES.items(), refs, strict=False):
        _close(components[ref["$ref"].rpartition("/")[2]], ignored)
        if body is responses_schema.ResponsesRequest:
            _describe_items(components[ref["$ref"].rpartition("/")[2]], refs[len(BODIES) :])
    by_body = dict(zip(BODIES, refs, strict=False))
    paths = {
        path: {operation[0]: _operation(path, operation, by_body) for operation in operations}
        for path, operations in PATHS.items()
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "deepdraft",
                "version": __version__,
                "description": "Every /v1 path is also served without /v1 and under /beta.",
            },
            "paths": paths,
            "components": {
                "schemas": {**components, "Error": _ERROR},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )


def _items() -> list[type]:
    return list(dict.fromkeys(responses_schema.ITEMS.values()))


def _close(component: Json, ignored: Iterable[str]) -> None:
    """A body takes its fields and those without effect, and no other."""
    component["additionalProperties"] = False
    for name in sorted(ignored):
        component["properties"][name] = {"description": NO_EFFECT}


def _describe_items(component: Json, refs: Iterable[Json]) -> None:
    """What msgspec is told to leave raw: items are read by their type, each by itself."""
    component["properties"]["input"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [*refs, {"type": "object"}]}},
            {"type": "null"},
        ]
    }
    component["properties"]["tools"] = {
        "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]
    }


def _operation(path: str, operation: Operation, refs: dict[type[Struct], Json]) -> Json:
    _, name, body, streams, text = operation
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    shown: Json = {
        "operationId": name,
        "summary": text,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What was wrong.", "content": error},
        },
    }
    if body is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[body]}},
        }
    if "{" in path:
        parameter = path[path.index("{") + 1 : path.index("}")]
        shown["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return shown
