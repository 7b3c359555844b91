"""Routes that answer without the model: tokens of texts, the OpenAPI document.

Owns: their paths. Knows nothing of: fields, what is in the document. Importing it does not import
torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from deepdraft.server.app import Handlers
    from deepdraft.server.sampling import ModelView


def token_routes(handlers: "Handlers") -> list[Route]:
    """The routes, for the application that `handlers` belong to."""

    async def respond(request: Request, make: "Callable[[bytes, ModelView], Any]") -> Response:
        _, view = handlers.service.ready()
        answer = await handlers.read(request, lambda body: make(body, view))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def tokenize(request: Request) -> Response:
        """POST /tokenize."""

        def make(body: bytes, view: "ModelView") -> Any:
            from deepdraft.server import tokens

            fields = tokens.read_tokenize(body)
            handlers.service.resolve_name(fields.model, view)
            handlers.check_count(fields.messages or (), "messages")
            return tokens.tokenize(fields, view)

        return await respond(request, make)

    async def detokenize(request: Request) -> Response:
        """POST /detokenize."""

        def make(body: bytes, view: "ModelView") -> Any:
            from deepdraft.server import tokens

            fields = tokens.read_detokenize(body)
            handlers.service.resolve_name(fields.model, view)
            return tokens.detokenize(fields, view)

        return await respond(request, make)

    async def openapi(request: Request) -> Response:
        """GET /openapi.json."""
        from deepdraft.server.openapi import document

        return Response(document(), media_type="application/json")

    routes = [Route("/openapi.json", handlers.guard(openapi), methods=["GET"])]
    for prefix in ("", "/v1"):
        routes.append(Route(prefix + "/tokenize", handlers.guard(tokenize), methods=["POST"]))
        routes.append(Route(prefix + "/detokenize", handlers.guard(detokenize), methods=["POST"]))
    return routes
