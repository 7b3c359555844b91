"""Operation: request ids, logs, limits of keys and bodies, deadlines, faults of foreign code."""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepdraft.config import ApiKey, ServerConfig, load_config
from deepdraft.errors import ConfigError
from deepdraft.server.auth import named_keys
from deepdraft.server.limits import Bucket
from deepdraft.server.metrics import metrics_text
from deepdraft.telemetry import Histogram, JsonFormatter, configure_logging, log_event, logger

from .conftest import Client

OFF = {"thinking": {"type": "disabled"}}


def key(name: str, secret: str, **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=named_keys([secret])[0].sha256, **limits)


# Ids and logs


def test_request_ids_are_taken_or_made(client: Client) -> None:
    client.toy.say("ok")
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF}
    for stream in (False, True):
        own = client.post("/v1/chat/completions", {**body, "stream": stream})
        given = client.post(
            "/v1/chat/completions", {**body, "stream": stream}, headers={"X-Request-ID": "mine/7"}
        )
        assert own.headers["x-request-id"].startswith("chatcmpl-")
        assert given.headers["x-request-id"] == "mine/7"
        assert given.headers["request-id"].startswith("chatcmpl-")
    for response in (
        client.post("/v1/chat/completions", {}, headers={"X-Request-ID": "mine/8"}),
        client.request("GET", "/v1/models", headers={"X-Request-ID": "mine/8"}),
    ):
        assert response.headers["x-request-id"] == "mine/8"
    for bad in ("a b", "x" * 200, "", "ä"):
        response = client.post(
            "/v1/chat/completions", {}, headers={"X-Request-ID": bad.encode("latin-1")}
        )
        assert response.headers["x-request-id"].startswith("req-")


def events_of(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [r.fields for r in caplog.records if getattr(r, "event", None) == name]  # type: ignore[attr-defined]


def test_log_lines_tell_a_request_but_not_what_it_says(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.toy.say("the answer")
    with caplog.at_level(logging.DEBUG, "deepdraft"):
        body = {"messages": [{"role": "user", "content": "the question"}], **OFF}
        headers = {"X-Request-ID": "mine"}
        client.post("/v1/chat/completions", {**body, "user_id": "u"}, headers=headers)
        client.post("/v1/chat/completions", {**body, "the question": 1}, headers=headers)
    (begin,) = events_of(caplog, "request_begin")
    assert begin["request_id"] == "mine" and begin["path"] == "/v1/chat/completions"
    assert begin["tenant"] == "u" and begin["prompt_tokens"] > 3 and begin["stream"] is False
    (end,) = events_of(caplog, "request_end")
    assert end["request_id"] == begin["response_id"] + "-0"
    assert 0 <= end["queue_ms"] <= end["first_token_ms"] <= end["request_ms"]
    (refused,) = events_of(caplog, "request_refused")
    assert refused["request_id"] == "mine" and refused["status"] == 400
    assert refused["code"] == "invalid_request_error"
    assert "the answer" not in caplog.text
    assert "the question" not in caplog.text.replace("'the question'", "")


def test_json_lines() -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.setFormatter(JsonFormatter())
    kept = logger.handlers[:], logger.level, logger.propagate
    try:
        configure_logging("info", "json")
        assert isinstance(logger.handlers[0].formatter, JsonFormatter)
        logger.handlers[:] = [handler]
        log_event("something", {"request_id": "a\nb", "n": 3})
        logger.info("plain %s", "text\n")
        try:
            raise ValueError("x")
        except ValueError:
            logger.exception("it failed")
        logger.debug("not shown")
    finally:
        logger.handlers[:], logger.level, logger.propagate = kept
        logging.getLogger("uvicorn").handlers.clear()
    first, second, third = map(json.loads, lines)
    assert first["event"] == "something" and first["request_id"] == "a\nb" and first["n"] == 3
    assert first["level"] == "info" and first["time"].endswith("Z") and "message" not in first
    assert second["message"] == "plain text\n"
    assert "ValueError: x" in third["traceback"] and third["level"] == "error"
    assert all("\n" not in line for line in lines)


def test_histograms_in_the_metrics(client: Client) -> None:
    client.toy.say("ok")
    client.chat(**OFF)
    lines = client.get("/metrics").text.splitlines()
    name = "deepdraft_time_to_first_token_seconds"
    assert f"# TYPE {name} histogram" in lines
    assert f"{name}_count 2" in lines, "the warm-up and one request"
    assert f'{name}_bucket{{le="+Inf"}} 2' in lines
    counts = [float(x.split()[-1]) for x in lines if x.startswith(name + "_bucket")]
    assert counts == sorted(counts)
    assert "deepdraft_request_prefill_time_seconds_count 2" in lines
    assert "deepdraft_prefill_parts_total 2" in lines
    assert any(re.fullmatch(r"deepdraft_prefill_seconds_total 0\.\d{6}", x) for x in lines)
    assert not any('part="prompt"' in x for x in lines), "it is no part of a step of decoding"
    assert int(sample(lines, "deepdraft_http_tasks")) >= 1
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == ((2, 1, 1), 12.0)
    text = metrics_text({}, {"queue": histogram})
    assert 'le="1.0"} 2\n' in text and 'le="2.0"} 3\n' in text and "_sum 12.000000" in text


def sample(lines: list[str], name: str) -> str:
    (line,) = (x for x in lines if x.startswith(name + " "))
    return line.split()[-1]


def test_every_metric_is_documented() -> None:
    from deepdraft.server import metrics

    page = Path(__file__).parents[2] / "docs" / "operations.md"
    names = [name for table in (metrics._COUNTERS, metrics._GAUGES) for name, _ in table.values()]
    names += [name for _, name, _, _ in metrics._BY_LABEL]
    names += [name for name, _ in metrics._HISTOGRAMS.values()]
    known = set(re.findall(r"[`{](\w+)", page.read_text()))
    missing = [n for n in names if n not in known and not n.startswith("spec_decode_")]
    assert not missing and len(names) > 20


def test_answers_are_counted_by_status(make_client: Callable[..., Client]) -> None:
    """Those of every layer: the key's check, routes, bodies, the engine."""
    client = make_client(server={"api_keys": ("a",)})
    client.toy.say("ok")
    with_key = {"headers": {"x-api-key": "a"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], **OFF}
    for fields in ({}, {"stream": True}, {"stream": True}, {"n": "x"}):
        client.post("/v1/chat/completions", {**body, **fields}, **with_key)
    client.post("/v1/chat/completions", body)
    client.request("GET", "/nowhere", **with_key)
    client.request("PUT", "/v1/models", **with_key)
    lines = client.get("/metrics").text.splitlines()
    assert [x for x in lines if x.startswith("deepdraft_http_responses_total")] == [
        f'deepdraft_http_responses_total{{status="{status}"}} {num}'
        for status, num in ((200, 3), (400, 1), (401, 1), (404, 1), (405, 1))
    ]
    # What it began with itself is counted when the next one asks.
    assert 'status="200"} 4' in client.get("/metrics").text


# Keys


def test_a_named_key_has_a_rate_of_its_own(make_client: Callable[..., Client]) -> None:
    keys = (key("slow", "a", requests_per_minute=2), key("free", "b"))
    client = make_client(server={"keys": keys, "api_keys": ("c",)})
    client.toy.say("ok")

    def ask(secret: str) -> Any:
        headers = {"x-api-key": secret}
        body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF}
        return client.post("/v1/chat/completions", body, headers=headers)

    assert [ask("a").status_code for _ in range(3)] == [200, 200, 429]
    refused = ask("a")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert [ask(secret).status_code for secret in "bcbcx"] == [200, 200, 200, 200, 401]


def test_a_rate_by_the_clock() -> None:
    now = [0.0]
    rate = Bucket(60, lambda: now[0])
    assert sum(rate.take() == 0 for _ in range(100)) == 60
    assert math.isclose(rate.take(), 1.0)
    now[0] += 2.0
    assert [rate.take() == 0 for _ in range(3)] == [True, True, False]
    now[0] += 1e6
    assert sum(rate.take() == 0 for _ in range(100)) == 60
    slow = Bucket(0.5, lambda: now[0])
    assert slow.take() == 0 and math.isclose(slow.take(), 120.0)


def test_a_key_with_a_full_queue_is_told_429(make_client: Callable[..., Client]) -> None:
    keys = (key("a", "a", max_running=1, max_queue=1), key("b", "b"))
    client = make_client(server={"keys": keys})
    client.toy.say("ok")
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF}

    def ask(secret: str, n: int) -> Any:
        headers = {"x-api-key": secret}
        return client.post("/v1/chat/completions", {**body, "n": n}, headers=headers)

    assert ask("a", 2).status_code == 200
    many = ask("a", 3)
    assert many.status_code == 400 and "at most 2 at once" in many.json()["error"]["message"]
    assert ask("b", 3).status_code == 200
    engine = client.toy.service._engine
    assert engine is not None
    with engine._wake:  # the engine's thread must not meet these
        engine._scheduler._tenants["a"].waiting += [object()] * 2  # type: ignore[list-item]
        full = ask("a", 1)
        engine._scheduler._tenants["a"].waiting.clear()
        engine._scheduler._tenants._active.clear()
    assert full.status_code == 429 and full.headers["retry-after"] == "2"
    assert full.json()["error"]["type"] == "rate_limit_error"
    assert full.headers["x-request-id"].startswith("req-")


def test_keys_of_a_file(tmp_path: Any) -> None:
    digest = named_keys(["secret"])[0].sha256
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[[server.keys]]\nname = "team"\nsha256 = "{digest.upper()}"\nmax_running = 2\n'
        f'[[server.keys]]\nname = "other"\nsha256 = "{"0" * 64}"\nweight = 2.5\n'
    )
    first, second = load_config(file).server.keys
    assert first == ApiKey(name="team", sha256=digest, max_running=2) and second.weight == 2.5
    assert digest not in repr(first)
    good = f'name = "a"\nsha256 = "{digest}"'
    for text, message in (
        ('name = "a"', "sha256"),
        ('name = "a"\nsha256 = "secret"', "64 hex digits"),
        (f'name = "a b"\nsha256 = "{digest}"', "server.keys.name"),
        (f"{good}\nmax_run = 1", r"unknown setting server.keys.max_run; did you mean"),
        (f"{good}\nmax_running = 0", "server.keys.max_running"),
        (f"{good}\nrequests_per_minute = -1", "requests_per_minute"),
        (f"{good}\n[[server.keys]]\n{good}", "different names and digests"),
    ):
        file.write_text(f"[[server.keys]]\n{text}\n")
        with pytest.raises(ConfigError, match=message) as error:
            load_config(file)
        assert "secret" not in error.value.message


# Limits of a request


def test_too_many_messages_are_refused(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"max_messages": 3})
    client.toy.say("ok")
    many = [{"role": "user", "content": "Hi"}] * 4
    for path, body in (
        ("/v1/chat/completions", {"messages": many}),
        ("/v1/messages", {"messages": many}),
        ("/v1/responses", {"input": many}),
        ("/tokenize", {"messages": many}),
    ):
        response = client.post(path, body)
        assert response.status_code == 400
        assert "has 4 entries; this server reads at most 3" in response.text
    assert client.chat(messages=many[:3], **OFF).status_code == 200


def test_ten_thousand_messages(client: Client) -> None:
    many = [{"role": ("user", "assistant")[i % 2], "content": "Hi"} for i in range(10_000)]
    assert "10000 entries" in client.chat(messages=many).json()["error"]["message"]
    response = client.chat(messages=many[:8000])
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_takes_too_long_to_read(
    make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that would compile for ever: an answer in time, and the server goes on."""
    import threading

    client = make_client(server={"compile_timeout_s": 0.05})
    client.toy.say('{"a": 1}')
    gate = threading.Event()
    from deepdraft.engine.grammar import GrammarCompiler

    compile_it = GrammarCompiler.compile

    def slow(self: Any, source: Any) -> Any:
        gate.wait(10)
        return compile_it(self, source)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)

    try:
        # The client's loop waits for its threads; the answer is there before.
        threading.Timer(0.3, gate.set).start()
        response = client.chat(response_format={"type": "json_object"}, **OFF)
    finally:
        gate.set()
    assert response.status_code == 400 and "took more than 0.05 s" in response.text
    assert client.chat(**OFF).status_code == 200


def test_deadlines_of_the_server_and_of_a_request(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"request_timeout_s": 30.0})
    client.toy.say("x" * 3000)
    client.toy.runner.delay_s = 0.01
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF}
    headers = {"X-Request-Timeout": "0.2"}
    response = client.post("/v1/chat/completions", body, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    streamed = client.post("/v1/chat/completions", {**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200 and "deadline_exceeded" in streamed.text
    assert streamed.text.rstrip().endswith("data: [DONE]")
    told = client.post("/v1/messages", {**body, "max_tokens": 2000}, headers=headers)
    assert told.status_code == 504 and told.json()["error"]["type"] == "timeout_error"
    for bad in ("soon", "0", "-1", "nan", "inf"):
        response = client.post("/v1/chat/completions", body, headers={"X-Request-Timeout": bad})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("fields", [{"priority": 1001}, {"user_id": "u" * 513}, {"priority": "a"}])
def test_bad_priorities_and_users(client: Client, fields: dict[str, Any]) -> None:
    response = client.chat(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] in fields


def test_users_and_priorities_reach_the_scheduler(make_client: Callable[..., Client]) -> None:
    client = make_client(server={"keys": (key("team", "a"),)})
    client.toy.say("ok")
    seen: list[tuple[str, int]] = []
    engine = client.toy.service._engine
    assert engine is not None
    submit = engine.submit

    def note(requests: Any, sinks: Any) -> None:
        seen.extend((r.tenant, r.priority) for r in requests)
        submit(requests, sinks)

    engine.submit = note  # type: ignore[method-assign]
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF}
    body |= {"priority": -3, "user_id": "u"}
    client.post("/v1/chat/completions", body, headers={"x-api-key": "a"})
    assert seen == [("team", -3)], "a key is the tenant, whatever user is named"


# Faults of foreign code


class Panic(BaseException):
    """As a library written in Rust raises it."""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_is_an_error_like_any_other(
    client: Client, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepdraft.text.parse import OutputParser

    client.toy.say("good")
    body: dict[str, Any] = {"stream": stream, **OFF}
    body |= {"input": "Hi"} if "responses" in path else {"messages": [USER], "max_tokens": 9}

    def panic(self: Any, ids: Any) -> Any:
        raise Panic("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(OutputParser, "push", panic)
        response = client.post(path, body)
    assert "internal error" in response.text and "secret" not in response.text
    if stream:
        assert response.status_code == 200
        last = [x for x in response.text.split("\n\n") if x][-1]
        assert last == "data: [DONE]" or "error" in last or "failed" in last
    else:
        assert response.status_code == 500
    assert client.post(path, body).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr("deepdraft.server.chat.check_conversation", panic)
        assert client.post(path, body).status_code == 500
    assert client.post(path, body).status_code == 200


USER = {"role": "user", "content": "Hi"}


def test_cancellation_is_not_taken_for_a_fault() -> None:
    from deepdraft.server.wire_errors import STOPS

    assert asyncio.CancelledError in STOPS and KeyboardInterrupt in STOPS
    assert not issubclass(Panic, STOPS)


# Settings


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tls_cert": "/no/such/file"}, "server.tls_cert must be the path of a PEM file"),
        ({"tls_cert": __file__}, "go together"),
        ({"cors_origins": ("page.example",)}, "server.cors_origins"),
        ({"cors_origins": ("https://a.example/path",)}, "server.cors_origins"),
        ({"log_format": "xml"}, "server.log_format must be text or json"),
        ({"header_timeout_s": 0}, "server.header_timeout_s must be a number from 0.01 to"),
        ({"max_connections": 0}, "server.max_connections must be an integer >= 1"),
        ({"max_messages": 1.5}, "server.max_messages"),
        ({"request_timeout_s": 0}, "server.request_timeout_s"),
        ({"keys": ("a",)}, "server.keys must be a list of tables"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**fields)
