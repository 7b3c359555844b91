"""Spans of requests, by OpenTelemetry's exporter into memory; prompts in the log."""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deepdraft.config import ServerConfig, load_config
from deepdraft.errors import ConfigError
from deepdraft.server.app import create_app
from deepdraft.server.traces import Traces, open_traces

from .conftest import Client

OFF = {"thinking": {"type": "disabled"}}
SECRET = "a word that nobody may read"


class Traced(Client):
    """A client of an application whose spans are kept."""

    def __init__(self, client: Client) -> None:
        self.toy = toy = client.toy
        self.kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self._app = create_app(toy.service, Traces(provider))

    def span(self) -> ReadableSpan:
        [span] = self.kept.get_finished_spans()
        self.kept.clear()
        return span


@pytest.fixture
def traced(client: Client) -> Traced:
    return Traced(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span(traced: Traced, stream: bool) -> None:
    traced.toy.say("One two.")
    answer = traced.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": SECRET}],
            "temperature": 0,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
            **OFF,
        },
        headers={"X-Request-Id": "mine/1"},
    )
    lines = [x[6:] for x in answer.text.splitlines() if x.startswith("data: {")]
    usage = json.loads(lines[-1])["usage"] if stream else answer.json()["usage"]
    span = traced.span()
    found: dict[str, Any] = dict(span.attributes or {})
    assert span.name == "POST /v1/chat/completions" and span.kind == SpanKind.SERVER
    assert span.parent is None and span.status.status_code == StatusCode.UNSET
    assert found["deepdraft.request_id"] == "mine/1"
    assert found["gen_ai.response.id"] == answer.headers["request-id"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] > 1
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["deepdraft.stream"] is stream and found["deepdraft.answers"] == 1
    assert found["deepdraft.steps"] == usage["completion_tokens"] - 1
    assert found["deepdraft.drafts"] == 0
    assert found["deepdraft.first_token_ms"] > 0
    assert [event.name for event in span.events] == ["first token"]
    assert SECRET not in span.to_json()


def test_a_span_has_the_parent_that_the_client_names(traced: Traced) -> None:
    traced.toy.say("ok")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"prompt": "Hi", "n": 2, "temperature": 0, "max_tokens": 2}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert traced.post("/v1/completions", body, headers=headers).status_code == 200
    span = traced.span()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == trace and f"{span.parent.span_id:016x}" == parent
    assert span.attributes["deepdraft.answers"] == 2
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2  # type: ignore[arg-type]


def test_a_failed_request_has_a_failed_span(traced: Traced) -> None:
    traced.toy.say("One two three four five six.")
    headers = {"X-Request-Timeout": "0.000001"}
    body = {"prompt": "Hi", "temperature": 0}
    assert traced.post("/v1/completions", body, headers=headers).status_code == 504
    span = traced.span()
    assert span.attributes is not None and span.status.status_code == StatusCode.ERROR
    assert span.status.description == "the request ran out of time"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("timeout",)


def test_a_refused_request_has_no_span(traced: Traced) -> None:
    assert traced.post("/v1/completions", {"prompt": 7}).status_code == 400
    assert traced.kept.get_finished_spans() == ()


def test_missing_packages_are_named(
    make_toy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'deepdraft\[traces\]'"):
        open_traces()
    with pytest.raises(ConfigError, match=r"server\.traces needs"):
        create_app(make_toy(server={"traces": True}).service)
    create_app(make_toy().service)  # off: not looked for


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_when_asked_for(
    make_client: Callable[..., Client], caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    client = make_client(server={"log_prompts": asked})
    client.toy.say("ok")
    with caplog.at_level(logging.DEBUG, "deepdraft"):
        assert client.chat(SECRET, n=2, **OFF).status_code == 200
    found: dict[str, list[Any]] = {}
    for record in caplog.records:
        fields = getattr(record, "fields", {})
        if not str(fields.get("request_id")).startswith("warm-up"):  # may end only now
            found.setdefault(getattr(record, "event", ""), []).append(fields)
    assert len(found["request_begin"]) == 1 and len(found["request_end"]) == 2
    if not asked:
        assert "request_prompt" not in found and SECRET not in caplog.text
        return
    [prompt] = found["request_prompt"]
    assert SECRET in prompt["prompt"] and prompt["prompt"] != SECRET
    assert prompt["request_id"] == found["request_begin"][0]["request_id"]


def test_the_flags_are_booleans() -> None:
    for name in ("traces", "log_prompts"):
        assert getattr(ServerConfig(), name) is False
        with pytest.raises(ConfigError, match=name):
            load_config(server={name: "yes"})
