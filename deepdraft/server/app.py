"""The HTTP application: routes, body limits, errors as responses.

Owns: which path does what, and the status and headers of every answer.
Knows nothing of: prompts, sampling, signals, sockets. Importing it does not import torch.
"""

import asyncio
import codecs
import contextlib
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepdraft import __version__
from deepdraft.errors import DeepdraftError, Overloaded, RequestError
from deepdraft.server import schema
from deepdraft.server.auth import KeyGate, named_keys, tenant
from deepdraft.server.connections import DIRECT_SEND, LEAST_BYTES_PER_S
from deepdraft.server.dialect_routes import dialect_routes
from deepdraft.server.identify import given_id, request_id
from deepdraft.server.limits import Held, Limits, Place, open_limits
from deepdraft.server.metrics import process_text
from deepdraft.server.origins import PageGate
from deepdraft.server.page import PREFIX, page_response
from deepdraft.server.service import Service
from deepdraft.server.session import Sessions
from deepdraft.server.token_routes import token_routes
from deepdraft.server.wire_errors import (
    STOPS,
    body_for_path,
    messages_error_object,
    speaks_messages,
)
from deepdraft.telemetry import Counters, log_event, logger

if TYPE_CHECKING:
    from deepdraft.engine.engine import Engine
    from deepdraft.server.job import Job
    from deepdraft.server.sampling import ModelView
    from deepdraft.server.stream import EventSource, Wire
    from deepdraft.server.traces import Traces

JobT = TypeVar("JobT", bound="Job")
ReadT = TypeVar("ReadT")

PREFIXES = ("/v1", "", "/beta")
_BIG_BODY_BYTES = 32 << 10
_GRAMMAR_FIELDS = re.compile(
    rb'"(response_format|structured_outputs|guided_\w+|json_schema|tool_choice|strict'
    rb'|parallel_tool_calls|disable_parallel_tool_use)"'
)
"""Bodies that name one of these may need a grammar to be compiled."""

_READ_BYTES_PER_S = 256 << 10
"""A body has so much more time to be read, tokenised that is, than its grammar alone."""
_MOST_BODIES = 16
"""So many bodies of the largest size may arrive or wait to be read; others that are big get 503."""
_READ_QUEUE_S = 60.0
"""So long a body may wait for a thread that reads it; then 503."""

Handler = Callable[[Request], Awaitable[ASGIApp]]


class BodyTooLarge(RequestError):
    """The body is larger than the server reads."""

    http_status = 413
    code = "body_too_large"


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class BodyEncoded(RequestError):
    """The body is compressed."""

    http_status = 415
    code = "unsupported_encoding"


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def error_response(error: BaseException, retry_after_s: int, path: str) -> Response:
    """The answer for an error of `path`; 429 and 503 carry Retry-After."""
    status = error.http_status if isinstance(error, DeepdraftError) else 500
    wait_s = max(1, math.ceil(getattr(error, "retry_after_s", retry_after_s)))
    headers = {"retry-after": str(wait_s)} if status in (429, 503) else {}
    if status == 408:
        # A client that sends so slowly is not waited for. Behind other errors the rest of a body is
        # read and dropped, or the client might lose the answer while it still sends.
        headers["connection"] = "close"
    return json_response(body_for_path(error, path), status, headers)


def create_app(service: Service, traces: "Traces | None" = None) -> ASGIApp:
    """The application over a service; its start begins to load, its end closes the service.

    `traces`: instead of those that the settings ask for. Raises ConfigError where these cannot be.
    """
    if traces is None and service.config.server.traces:
        from deepdraft.server.traces import open_traces

        traces = open_traces()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        service.start()
        yield
        handlers.sessions.close()
        await asyncio.to_thread(service.close)
        await limits.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    settings = service.config.server
    keys = named_keys(settings.api_keys, settings.keys)
    limits = open_limits(service.config, keys, service.counters)
    handlers = Handlers(service, traces, limits)
    routes = [
        Route("/", handlers.guard(handlers.page), methods=["GET"]),
        Route(PREFIX + "{name}", handlers.guard(handlers.page), methods=["GET"]),
        Route("/healthz", handlers.guard(handlers.healthz), methods=["GET"]),
        Route("/readyz", handlers.guard(handlers.readyz), methods=["GET"]),
        Route("/metrics", handlers.guard(handlers.metrics), methods=["GET"]),
    ]
    for prefix in PREFIXES:
        for path, handler, method in (
            ("/chat/completions", handlers.chat, "POST"),
            ("/completions", handlers.completions, "POST"),
            ("/models", handlers.models, "GET"),
            ("/models/{name:path}", handlers.model, "GET"),
        ):
            routes.append(Route(prefix + path, handlers.guard(handler), methods=[method]))
    routes += dialect_routes(handlers) + token_routes(handlers)
    app: ASGIApp = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: handlers.http_error},
    )
    if keys:
        app = KeyGate(app, keys, limits)
    else:
        # A page has no key to send.
        app = PageGate(app, settings.cors_origins, settings.host)
    if settings.cors_origins:
        # Outside the gate: a browser asks for leave without a key.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-deepdraft-ignored", "retry-after"],
        )
    return Counted(app, service.counters)


class Counted:
    """Counts answers by their status, and leaves the server's own `send` in the scope."""

    def __init__(self, app: ASGIApp, counters: Counters) -> None:
        self._app, self._counters = app, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.add(f"http_{message['status']}")
            await send(message)

        scope[DIRECT_SEND] = send
        await self._app(scope, receive, counted)


class Handlers:
    """What the routes do."""

    def __init__(
        self, service: Service, traces: "Traces | None" = None, limits: Limits | None = None
    ) -> None:
        self.service, self.traces = service, traces
        self.limits = limits or Limits(())
        self.settings = service.config.server
        self.sessions = Sessions(service)
        self._held = 0
        """Bytes of the bodies that are not whole, or not read yet."""
        self._bodies: set[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = set()
        """Their loop and what ends them."""
        service.on_drain = self.end_bodies

    def guard(self, handler: Handler) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Turns every error of a handler into an answer."""

        async def guarded(request: Request) -> ASGIApp:
            try:
                response = await handler(request)
            except ClientDisconnect:
                return _nobody
            except HTTPException as error:
                return await self.http_error(request, error)
            except DeepdraftError as error:
                response = self.error(error, request)
            except STOPS:
                raise
            except BaseException as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                response = self.error(error, request)
            if isinstance(response, Response) and "x-request-id" not in response.headers:
                response.headers["x-request-id"] = request_id(request)
            return response

        return guarded

    def error(self, error: BaseException, request: Request) -> Response:
        """The answer for an error."""
        if isinstance(error, DeepdraftError):
            # Without the message, which may quote the request.
            log_event(
                "request_refused",
                {
                    "request_id": request_id(request),
                    "path": request.url.path,
                    "status": error.http_status,
                    "code": error.code,
                    "param": error.param,
                },
            )
        return error_response(error, self.settings.retry_after_s, request.url.path)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods, in the same error shape."""
        assert isinstance(error, HTTPException)
        messages = {
            404: f"there is no {request.url.path} here",
            405: f"{request.url.path} does not take {request.method}",
        }
        status, headers = error.status_code, dict(error.headers or {})
        headers["x-request-id"] = request_id(request)
        message = messages.get(status, error.detail)
        if speaks_messages(request.url.path):
            return json_response(messages_error_object(status, message), status, headers)
        body = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found" if status == 404 else "invalid_request_error",
        }
        return json_response({"error": body}, status, headers)

    async def page(self, request: Request) -> Response:
        """The page and its files."""
        response = page_response(request)
        if response is None:
            raise HTTPException(404)
        return response

    async def healthz(self, request: Request) -> Response:
        """200 while the process can answer, 503 once the model cannot come back by itself."""
        body = {**self.service.health(), "version": __version__}
        return json_response(body, 503 if body["state"] == "failed" else 200)

    async def readyz(self, request: Request) -> Response:
        """200 only after loading and a warm-up step, and not while draining."""
        self.service.ready()
        return json_response({"state": "ready"})

    async def metrics(self, request: Request) -> Response:
        """The counters, for Prometheus."""
        tasks = len(asyncio.all_tasks())
        return Response(
            self.service.metrics_text(tasks) + process_text(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def models(self, request: Request) -> Response:
        """The names that are served."""
        engine, view = self.service.ready()
        models = [_model(engine, view, name) for name in view.names]
        return json_response({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One served name."""
        engine, view = self.service.ready()
        name = self.service.resolve_name(request.path_params["name"], view)
        return json_response(_model(engine, view, name))

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""

        def make(body: bytes, view: "ModelView") -> "Job":
            from deepdraft.server.chat import chat_job

            fields, ignored = schema.read_body(body, schema.ChatRequest)
            self.check_count(fields.messages, "messages")
            name = self.service.resolve_name(fields.model, view)
            return chat_job(fields, name, view, ignored)

        return await self.serve(request, make)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""

        def make(body: bytes, view: "ModelView") -> "Job":
            from deepdraft.server.completions import completion_job

            fields, ignored = schema.read_body(body, schema.CompletionRequest)
            name = self.service.resolve_name(fields.model, view)
            return completion_job(fields, name, view, ignored)

        return await self.serve(request, make)

    async def serve(
        self,
        request: Request,
        make: "Callable[[bytes, ModelView], JobT]",
        wire: "Callable[[JobT], Wire] | None" = None,
    ) -> ASGIApp:
        """Makes a job of the body and answers with that."""
        engine, view = self.service.ready()
        deadline_s = self.deadline_s(request)
        job = await self.read(request, lambda body: make(body, view))
        whose = tenant(request)
        if whose is not None or deadline_s is not None:
            job.requests = [
                replace(r, tenant=whose or r.tenant, deadline_s=deadline_s) for r in job.requests
            ]
        await self.sessions.prepare(request, job, whose or "")
        return await self.answer(request, engine, job, wire(job) if wire else None)

    def deadline_s(self, request: Request) -> float | None:
        """Seconds that this request may take: what it asks for, at most the server's own limit."""
        most, asked = self.settings.request_timeout_s, request.headers.get("x-request-timeout")
        if asked is None:
            return most
        try:
            seconds = float(asked)
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds < 1e9:
            raise RequestError(
                "the header X-Request-Timeout must hold a number of seconds above 0",
                param="X-Request-Timeout",
            )
        return seconds if most is None else min(seconds, most)

    def check_count(self, messages: Sized, name: str) -> None:
        """Raises RequestError for a request of more messages or items than the server reads."""
        most = self.settings.max_messages
        if len(messages) > most:
            raise RequestError(
                f"{name} has {len(messages)} entries; this server reads at most {most}", param=name
            )

    async def read(self, request: Request, make: Callable[[bytes], ReadT]) -> ReadT:
        """What `make` makes of the body.

        A body that takes long to read goes to a worker thread, or it would stall every stream:
        a big one, which must be tokenised, and one that may need a grammar.
        """
        body = await self.body(request)
        if len(body) > _BIG_BODY_BYTES or _GRAMMAR_FIELDS.search(body):
            return await self._read_apart(body, make)
        return make(body)

    async def _read_apart(self, body: bytes, make: Callable[[bytes], ReadT]) -> ReadT:
        """Reads in a worker thread. Raises RequestError where that takes too long, Overloaded where
        no thread is free for long: its time counts from when it begins, or a crowd of good requests
        would be told that they are too much."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def run() -> ReadT:
            loop.call_soon_threadsafe(begun.set)
            return make(body)

        def ended(work: "asyncio.Future[ReadT]") -> None:
            self._held -= len(body)
            if not work.cancelled():
                work.exception()  # nobody may be there any more to hear of it

        self._held += len(body)
        work = loop.run_in_executor(None, run)
        work.add_done_callback(ended)
        try:
            await asyncio.wait_for(begun.wait(), _READ_QUEUE_S)
        except TimeoutError:
            raise Overloaded("too many large requests wait to be read; try again later") from None
        finally:
            if not begun.is_set():
                work.cancel()
        limit_s = self.settings.compile_timeout_s + len(body) // _READ_BYTES_PER_S
        await asyncio.wait({work}, timeout=limit_s)
        if not work.done():
            raise RequestError(
                f"reading this request took more than {limit_s:g} s: its schema, pattern or "
                "text is too much for this server now"
            )
        return work.result()

    async def answer(
        self, request: Request, engine: Any, job: "Job", wire: "Wire | None" = None
    ) -> ASGIApp:
        """Queues a job and answers with its stream, or with its whole response."""
        from deepdraft.server.stream import StreamResponse, collect, frames, until_disconnect

        # The second spelling is the one that Anthropic's clients read.
        headers = {"x-request-id": given_id(request) or job.id, "request-id": job.id}
        if job.ignored:
            headers["x-deepdraft-ignored"] = ", ".join(job.ignored)
        there, place = await self.admit(request, job)
        if not there:
            return _nobody
        events: EventSource
        try:
            events = await _opened(engine, job)
            headers |= getattr(events, "headers", {})
        except BaseException:
            if place is not None:
                place.leave(-job.num_prompt)  # what it did not use
            raise
        if place is not None:
            events = Held(events, place, lambda: sum(c.num_tokens for c in job.choices))
        path, id = request.url.path, headers["x-request-id"]
        if self.traces is not None:
            events = self.traces.watch(job, events, path=path, headers=request.headers, id=id)
        log_event(
            "request_begin",
            {
                "request_id": id,
                "response_id": job.id,
                "path": path,
                "tenant": job.requests[0].tenant,
                "stream": job.stream,
                "prompt_tokens": job.num_prompt,
                "answers": len(job.requests),
            },
        )
        if self.settings.log_prompts:
            for prompt in dict.fromkeys(r.prompt_ids for r in job.requests):
                text = job.model.tokenizer.decode(prompt)
                log_event("request_prompt", {"request_id": id, "prompt": text})
        if job.stream:
            return StreamResponse(
                frames(job, events, self.settings.keep_alive_s, wire), events.close, headers
            )
        work = asyncio.ensure_future(collect(job, events))
        try:
            done = await until_disconnect(request.receive, work)
        finally:
            work.cancel()
            events.close()
        return json_response(work.result(), headers=headers) if done else _nobody

    async def admit(self, request: Request, job: "Job") -> "tuple[bool, Place | None]":
        """Waits until the request's key may run the job: whether the client is still there, and
        the place that the job holds. Raises TooManyRequests, Expired."""
        from deepdraft.server.job import Expired
        from deepdraft.server.stream import until_disconnect

        whose, begin = tenant(request), time.monotonic()
        if whose is None or not self.limits.bind(whose):
            return True, None
        entered = self.limits.enter(whose, len(job.requests), job.num_prompt)
        work = asyncio.ensure_future(entered)
        try:
            async with asyncio.timeout(job.requests[0].deadline_s):
                if not await until_disconnect(request.receive, work):
                    _drop(work)
                    return False, None
        except TimeoutError:
            _drop(work)
            raise Expired(
                "the time that this request may take is over before its key may run it"
            ) from None
        except BaseException:
            _drop(work)
            raise
        waited_s = time.monotonic() - begin
        job.requests = [
            r if r.deadline_s is None else replace(r, deadline_s=max(1e-3, r.deadline_s - waited_s))
            for r in job.requests
        ]
        return True, work.result()

    async def body(self, request: Request) -> bytes:
        """The request's body. Raises BodyTooLarge before more than the limit is held, BodyTooSlow
        where it does not arrive, BodyEncoded where it is compressed."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise BodyEncoded(
                f"bodies are read as they are, not with content-encoding {encoding[:40]!r}; send "
                "the JSON text itself"
            )
        limit = self.settings.max_body_bytes
        error = BodyTooLarge(f"the body is larger than the {limit} bytes this server reads")
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise error
        body, patience_s = bytearray(), self.settings.body_timeout_s
        loop = asyncio.get_running_loop()
        begin, patience = loop.time(), asyncio.timeout(patience_s)
        one = loop, patience
        self._bodies.add(one)
        try:
            async with patience:
                async for part in request.stream():
                    if len(body) + len(part) > limit:
                        raise error
                    body += part
                    self._held += len(part)
                    if len(body) > _BIG_BODY_BYTES and self._held > _MOST_BODIES * limit:
                        raise Overloaded("too many large requests arrive at once; try again later")
                    patience.reschedule(begin + patience_s + len(body) / LEAST_BYTES_PER_S)
        except TimeoutError:
            if self.service.state == "draining":
                self.service.ready()  # raises
            raise BodyTooSlow(
                f"only {len(body)} bytes of the body came in {patience_s:g} s; send it faster"
            ) from None
        finally:
            self._held -= len(body)
            self._bodies.discard(one)
        # Some clients of Windows begin texts with a mark.
        return bytes(body).removeprefix(codecs.BOM_UTF8)

    def end_bodies(self) -> None:
        """Answers the requests that are not whole yet, which would be refused anyway."""

        def end(one: tuple[asyncio.AbstractEventLoop, asyncio.Timeout]) -> None:
            if one in self._bodies:
                one[1].reschedule(one[0].time())

        for one in tuple(self._bodies):
            one[0].call_soon_threadsafe(end, one)


def _drop(work: "asyncio.Task[Place | None]") -> None:
    """Ends the wait for a place; one that was given in the same moment is given back."""

    def ended(work: "asyncio.Task[Place | None]") -> None:
        if not work.cancelled() and work.exception() is None and (place := work.result()):
            place.leave(0)

    work.cancel()
    work.add_done_callback(ended)


async def _opened(engine: Any, job: "Job") -> "EventSource":
    """The events of a job's requests, once they are queued."""
    if hasattr(engine, "open"):  # another process's: it takes time, and may say no
        return await engine.open(job.requests, streamed=job.stream)
    return engine.stream(job.requests)


async def _nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer for a client that has left: nothing is sent."""


def _model(engine: "Engine", view: "ModelView", name: str) -> dict[str, Any]:
    speculator = engine.speculator
    return {
        "id": name,
        "object": "model",
        "created": view.created,
        "owned_by": "deepdraft",
        "max_model_len": view.max_tokens,
        # What a request gets that says nothing of it.
        "sampling_defaults": dict(view.defaults),
        "speculation": {"drafts": speculator.block_size, "rule": speculator.options.rule},
    }
