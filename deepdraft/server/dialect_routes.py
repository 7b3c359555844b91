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

from deepdraft.errors import RequestError
from deepdraft.server import messages_schema, responses_schema
from deepdraft.server.auth import owner
from deepdraft.server.responses_store import ResponseStore

if TYPE_CHECKING:
    from deepdraft.server.app import Handlers
    from deepdraft.server.messages import MessagesJob
    from deepdraft.server.responses import ResponsesJob
    from deepdraft.server.sampling import ModelView

MESSAGES_PREFIXES = ("/v1", "", "/beta", "/anthropic/v1", "/anthropic")
RESPONSES_PREFIXES = ("/v1", "", "/beta")


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
    for prefix in RESPONSES_PREFIXES:
        for path, handler, method in (
            ("/responses", dialects.responses, "POST"),
            ("/responses/input_tokens", dialects.input_tokens, "POST"),
            ("/responses/{id}", dialects.response, "GET"),
            ("/responses/{id}", dialects.delete_response, "DELETE"),
        ):
            routes.append(Route(prefix + path, handlers.guard(handler), methods=[method]))
    return routes


class Dialects:
    """What these routes do."""

    def __init__(self, handlers: "Handlers") -> None:
        self._handlers = handlers
        settings = handlers.settings
        self._store = ResponseStore(settings.response_retention_s, settings.response_store_bytes)

    async def messages(self, request: Request) -> ASGIApp:
        """POST /v1/messages."""

        def make(body: bytes, view: "ModelView") -> "MessagesJob":
            from deepdraft.server.messages import messages_job, resolve_model

            fields, ignored = messages_schema.read(body)
            self._handlers.check_count(fields.messages, "messages")
            return messages_job(fields, resolve_model(fields.model, view), view, ignored)

        return await self._handlers.serve(request, make, lambda job: job.wire())

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: the length of the prompt that a body makes."""

        _, view = self._handlers.service.ready()

        def count(body: bytes) -> int:
            from deepdraft.server.messages import count_tokens, resolve_model

            fields, _ = messages_schema.read(body)
            resolve_model(fields.model, view)
            return count_tokens(fields, view)

        num_tokens = await self._handlers.read(request, count)
        return Response(
            msgspec.json.encode({"input_tokens": num_tokens}), media_type="application/json"
        )

    async def responses(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""

        def make(body: bytes, view: "ModelView") -> "ResponsesJob":
            from deepdraft.server.responses import responses_job

            fields, ignored = responses_schema.read(body)
            if isinstance(fields.input, list):
                self._handlers.check_count(fields.input, "input")
            name = self._handlers.service.resolve_name(fields.model, view)
            return responses_job(fields, name, view, self._store, owner(request), ignored)

        return await self._handlers.serve(request, make, lambda job: job.wire())

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: the length of the prompt that a body makes."""
        _, view = self._handlers.service.ready()

        def count(body: bytes) -> int:
            from deepdraft.server.responses import count_tokens

            fields, _ = responses_schema.read(body)
            self._handlers.service.resolve_name(fields.model, view)
            return count_tokens(fields, view, self._store, owner(request))

        num_tokens = await self._handlers.read(request, count)
        body = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def response(self, request: Request) -> Response:
        """GET /v1/responses/{id}: a response that is still kept."""
        if request.query_params.get("stream") in ("true", "1"):
            raise RequestError(
                "stream is refused: a kept response is given as a whole.", param="stream"
            )
        response_id = request.path_params["id"]
        kept = self._store.get(response_id, owner(request))
        if kept is None:
            raise ResponseNotFound(response_id)
        return Response(kept.response, media_type="application/json")

    async def delete_response(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        response_id = request.path_params["id"]
        if not self._store.delete(response_id, owner(request)):
            raise ResponseNotFound(response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")


class ResponseNotFound(RequestError):
    """No such response is kept, or not any more, or not for this client."""

    http_status = 404
    code = "not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"no response {response_id!r} is kept here", param="response_id")
