"""Routes of the Messages API and of the Responses API.

Owns: their paths, and what each does with a request.
Knows nothing of: fields, events. Importing it does not import torch.
"""

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deepdraft.server import messages_schema, schema

if TYPE_CHECKING:
    from deepdraft.server.app import Handlers
    from deepdraft.server.messages import MessagesJob
    from deepdraft.server.sampling import ModelView

MESSAGES_PREFIXES = ("/v1", "", "/beta", "/anthropic/v1", "/anthropic")


def dialect_routes(handlers: "Handlers") -> list[Route]:
    """The routes, for the application that `handlers` belong to."""
    dialects = Dialects(handlers)
    routes = []
    for prefix in MESSAGES_PREFIXES:
        for path, handler in (
            ("/messages", dialects.messages),
            ("/messages/count_tokens", dialects.count_tokens),
        ):
            routes.append(Route(prefix + path, handlers.guard(handler), methods=["POST"]))
    return routes


class Dialects:
    """What these routes do."""

    def __init__(self, handlers: "Handlers") -> None:
        self._handlers = handlers

    async def messages(self, request: Request) -> ASGIApp:
        """POST /v1/messages."""

        def make(body: bytes, view: "ModelView") -> "MessagesJob":
            from deepdraft.server.messages import messages_job, resolve_model

            fields, ignored = schema.read_body(
                body, messages_schema.MessagesRequest, messages_schema.REFUSED_FIELDS
            )
            return messages_job(fields, resolve_model(fields.model, view), view, ignored)

        return await self._handlers.serve(request, make, lambda job: job.wire())

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: the length of the prompt that a body makes."""

        _, view = self._handlers.service.ready()

        def count(body: bytes) -> int:
            from deepdraft.server.messages import count_tokens, resolve_model

            fields, _ = schema.read_body(
                body, messages_schema.MessagesRequest, messages_schema.REFUSED_FIELDS
            )
            resolve_model(fields.model, view)
            return count_tokens(fields, view)

        num_tokens = await self._handlers.read(request, count)
        return Response(
            msgspec.json.encode({"input_tokens": num_tokens}), media_type="application/json"
        )
