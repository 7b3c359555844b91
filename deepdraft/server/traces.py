"""OpenTelemetry: one span for each request that is answered.

Owns: the attributes of that span, and setting up the exporter (docs/operations.md).
Knows nothing of: HTTP, the engine's thread. The packages are imported only where traces are asked
for. Prompts and answers are in no span.
"""

import time
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepdraft import __version__
from deepdraft.errors import ConfigError
from deepdraft.server.job import Job
from deepdraft.server.stream import EventSource
from deepdraft.types import TokenEvent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_FAILURES = {"error": "the model failed", "timeout": "the request ran out of time"}


class Traces:
    """Makes spans with a provider of OpenTelemetry's."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("deepdraft", __version__)

    def watch(
        self, job: Job, events: EventSource, *, path: str, headers: Mapping[str, str], id: str
    ) -> EventSource:
        """The same events; the span of the request ends when they are closed. `headers`: of the
        request, which may name a parent (W3C `traceparent`). `id`: the X-Request-Id."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            f"POST {path}",
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.provider.name": "deepdraft",
                "gen_ai.request.model": job.name,
                "gen_ai.response.id": job.id,
                "gen_ai.usage.input_tokens": job.num_prompt,
                "deepdraft.request_id": id,
                "deepdraft.tenant": job.requests[0].tenant,
                "deepdraft.stream": job.stream,
                "deepdraft.answers": len(job.requests),
            },
        )
        return _Watched(job, events, span)

    def close(self) -> None:
        """Sends what is left."""
        end = getattr(self._provider, "shutdown", None)
        if end is not None:
            end()


class _Watched:
    """Events on their way, and the span that they fill in."""

    def __init__(self, job: Job, events: EventSource, span: "Span") -> None:
        self._job, self._events, self._span = job, events, span
        self._begin = time.perf_counter()
        self._reasons: dict[str, str] = {}
        self._error: str | None = None
        self._answered = self._closed = False

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        event = await self._events.__anext__()
        self._see(event)
        return event

    async def batch(self, patience_s: float) -> list[TokenEvent]:
        events = await self._events.batch(patience_s)
        for event in events:
            self._see(event)
        return events

    def cancel(self, request_id: str) -> None:
        self._events.cancel(request_id)

    def _see(self, event: TokenEvent) -> None:
        if event.token_ids and not self._answered:
            self._answered = True
            ms = 1e3 * (time.perf_counter() - self._begin)
            self._span.set_attribute("deepdraft.first_token_ms", round(ms, 3))
            self._span.add_event("first token")
        if event.finish_reason is not None:
            self._reasons[event.request_id] = event.finish_reason
            self._error = self._error or _FAILURES.get(event.finish_reason)

    def close(self) -> None:
        self._events.close()
        if self._closed:
            return
        self._closed = True
        self._span.set_attributes(self._outcome())
        if self._error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, self._error))
        self._span.end()

    def _outcome(self) -> dict[str, Any]:
        job, usage = self._job, self._job.usage()
        # A choice that a stop string ended, or that nobody waited for, has no reason from the
        # engine.
        reasons = [
            choice.finish_reason or self._reasons.get(request.request_id, "abort")
            for request, choice in zip(job.requests, job.choices, strict=True)
        ]
        found: dict[str, Any] = {
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.response.finish_reasons": reasons,
            "deepdraft.cached_tokens": usage["prompt_cache_hit_tokens"],
        }
        stats = [choice.stats for choice in job.choices if choice.stats is not None]
        if stats:
            found |= {
                "deepdraft.steps": sum(s.steps for s in stats),
                "deepdraft.drafts": sum(s.drafts for s in stats),
                "deepdraft.verified_drafts": sum(s.verified for s in stats),
                "deepdraft.accepted_drafts": sum(s.accepted for s in stats),
                "deepdraft.rule": stats[0].rule,
            }
        return found


def open_traces() -> Traces:
    """Traces to where OpenTelemetry's own environment variables say, by OTLP over HTTP.

    A provider that the process already has, as under `opentelemetry-instrument`, is used instead.
    Raises ConfigError where packages are missing.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        present = trace.get_tracer_provider()
        if isinstance(present, TracerProvider):
            return Traces(present)
        exporter = import_module(_EXPORTER).OTLPSpanExporter()
    except ImportError as error:
        raise ConfigError(
            "server.traces needs OpenTelemetry, which is not installed "
            f"(no module {error.name}): pip install 'deepdraft[traces]'"
        ) from error
    # OTEL_SERVICE_NAME wins over the name given here.
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "deepdraft"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)
