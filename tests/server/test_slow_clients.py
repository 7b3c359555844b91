"""Clients on real sockets that are slow, silent, too many or malformed; TLS; other pages."""

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepdraft.config import Config, ServerConfig
from deepdraft.errors import ConfigError
from deepdraft.server import connections
from deepdraft.server.connections import LEAST_BYTES_PER_S, connection_class
from deepdraft.server.run import serve
from deepdraft.server.service import Service
from deepdraft.telemetry import Counters

from .conftest import Live
from .test_live import body, num_open, until

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@contextlib.contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """What still comes until the server hangs up."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except TimeoutError:
        raise
    except OSError:
        pass  # it hung up while this side was still sending
    return b"".join(parts)


def serves(live: Live) -> None:
    live.toy.say("ok")
    url, tries = f"{live.url}/v1/chat/completions", 0
    while True:
        try:
            response = httpx.post(url, json=body(), timeout=60)
            break
        except httpx.TransportError:
            # On a busy machine this client may itself be too slow for a short limit.
            tries += 1
            assert tries < 5
    assert response.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("sent", [b"", b"P", CHAT, CHAT + b"x-filler: 1\r\n"])
def test_a_head_that_never_ends(make_live: Callable[..., Live], sent: bytes) -> None:
    live = make_live(server={"header_timeout_s": 0.3})
    with connected(live) as connection:
        connection.sendall(sent)
        assert rest_of(connection) == b""
    serves(live)


def test_a_head_in_drops_is_cut_too(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"header_timeout_s": 0.4})
    with connected(live) as connection, contextlib.suppress(OSError):
        for byte in CHAT * 3:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        raise AssertionError("it was never cut")
    serves(live)


def test_a_quick_head_may_have_a_slow_second_request(make_live: Callable[..., Live]) -> None:
    """The time for the head starts anew with each request of a connection."""
    live = make_live(server={"header_timeout_s": 1.0})
    with connected(live) as connection:
        for _ in range(3):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)
        connection.sendall(b"GET /hea")
        assert rest_of(connection) == b""


def test_a_body_that_does_not_come(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"body_timeout_s": 1.0})
    for sent in (b"", b'{"messages": ['):
        with connected(live) as connection:
            connection.sendall(CHAT + b"content-length: 1000\r\n\r\n" + sent)
            answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b"request_timeout" in answer and f"only {len(sent)} bytes".encode() in answer
    serves(live)


def post(**fields: Any) -> bytes:
    """A whole chat request as bytes."""
    content = json.dumps(body(**fields)).encode()
    return CHAT + f"content-length: {len(content)}\r\n\r\n".encode() + content


def counted(live: Live, name: str) -> int:
    return live.toy.service.counters.get(name)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_reads_one_byte_a_second_or_nothing(
    make_live: Callable[..., Live], reads: bool
) -> None:
    """Others are served meanwhile; it loses its answer when it is too far behind."""
    live = make_live(server={"send_timeout_s": 1.0}, max_tokens=30_000)
    letters = [live.toy.tokenizer.encode_text("x")[0]] * 20_000
    live.toy.runner.script = lambda prompt: letters if len(prompt) > 12 else letters[:2]
    slow = socket.socket()
    # Small buffers of both kernels, and each token with its 20 likeliest ones: they fill soon.
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    live.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    slow.connect(("127.0.0.1", live.port))
    with slow:
        long = [{"role": "user", "content": "a longer prompt"}]
        wanted = {"max_tokens": 20_000, "logprobs": True, "top_logprobs": 20, "messages": long}
        slow.sendall(post(stream=True, **wanted))
        until(lambda: num_open(live) == 1)
        got, end = b"", time.monotonic() + 120
        while reads and num_open(live):
            assert time.monotonic() < end, "it was never cut"
            got += slow.recv(1)
            url = f"{live.url}/v1/chat/completions"
            other = httpx.post(url, json=body(max_tokens=2), timeout=60)
            assert other.json()["usage"]["completion_tokens"] == 2
            time.sleep(1)
        until(lambda: num_open(live) == 0)
        assert b"HTTP/1.1 200".startswith(got[:12]) and len(got) < 60
    assert counted(live, "cut_unread") == 1
    assert live.toy.runner.num_steps < 19_000, "it was written to the end"


class Wire:
    """A transport as a connection's check sees it."""

    def __init__(self) -> None:
        self.unread, self.closing, self.aborted = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("closing", [False, True])
def test_an_answer_that_is_written_whole_must_be_read_too(closing: bool) -> None:
    """What is too small for the writer to be told to wait would else be held for ever; and a large
    one that is read at a fair rate is not cut."""
    wire, counters = Wire(), Counters()
    settings = ServerConfig(send_timeout_s=10)
    one = connection_class(settings, counters).__new__(connection_class(settings, counters))
    one.settings, one.counters = settings, counters
    now = [0.0]
    one.loop = type("Loop", (), {"time": lambda self: now[0]})()
    one.cycle = None  # type: ignore[assignment]
    one.transport = wire  # type: ignore[assignment]

    def at(seconds: float, unread: int) -> bool:
        now[0], wire.unread, wire.closing = seconds, unread, closing
        one.check(seconds)
        return wire.aborted

    assert not at(0, 0) and not at(100, 500) and not at(109, 400) and not at(115, 0)
    large = 100 * LEAST_BYTES_PER_S
    assert not at(200, large) and not at(300, large // 10) and not at(309, 5)
    assert at(311, 5) and counters.get("cut_unread") == 1


def test_line_ends_do_not_keep_a_connection(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin no request, so no time of a head would run, and the idle timer is off."""
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.2)
    live = make_live(server={"header_timeout_s": 0.3})
    with connected(live) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert rest_of(connection) == b""
    assert counted(live, "cut_head") == 1


def test_a_head_without_end_is_refused_early(make_live: Callable[..., Live]) -> None:
    live, sent = make_live(), 0
    with connected(live) as connection, contextlib.suppress(OSError):
        connection.sendall(CHAT + b"x-a: ")
        for _ in range(4000):
            connection.sendall(b"a" * 10_000)
            sent += 10_000
    assert sent < 30_000_000
    until(lambda: counted(live, "http_431") == 1)
    serves(live)


def test_one_connection_too_many(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"max_connections": 2})
    with connected(live), connected(live) as second:
        with connected(live) as third:
            assert rest_of(third) == b""
        second.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
    until(lambda: not live.server.server_state.connections)
    serves(live)


def test_pipelined_requests_are_answered_in_order(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say(lambda prompt: "first" if "<1>" in prompt else "second")
    requests = b""
    for i in (1, 2):
        content = json.dumps(body(messages=[{"role": "user", "content": f"<{i}>"}])).encode()
        requests += CHAT + f"content-length: {len(content)}\r\n".encode()
        requests += (b"connection: close\r\n" if i == 2 else b"") + b"\r\n" + content
    with connected(live) as connection:
        connection.sendall(requests)
        answer = rest_of(connection)
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.index(b"first") < answer.index(b"second")


def test_requests_far_ahead(make_live: Callable[..., Live]) -> None:
    live = make_live()
    one = b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connected(live) as connection:
        connection.sendall(one * 150 + last)
        assert rest_of(connection).count(b"HTTP/1.1 200") == 151
    with connected(live) as connection, contextlib.suppress(OSError):
        connection.sendall(one * 5000)
        rest_of(connection)
    until(lambda: counted(live, "cut_pipelined") == 1)
    serves(live)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_another_request_behind(
    make_live: Callable[..., Live], stream: bool
) -> None:
    live = make_live(max_tokens=30_000)
    live.toy.say("x" * 20_000)
    live.toy.runner.delay_s = 0.005
    with connected(live) as connection:
        connection.sendall(post(stream=stream))
        until(lambda: num_open(live) == 1)
        connection.sendall(post(max_tokens=1))
        time.sleep(0.1)  # so that the first one is not stopped by the second's coming
    until(lambda: num_open(live) == 0)
    assert live.toy.runner.num_steps < 19_000


OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAAAB\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_ignored(
    make_live: Callable[..., Live], chunked: bool, pieces: int
) -> None:
    """Java's client makes one with every request, and its bodies got lost."""
    live = make_live()
    live.toy.say("ok")
    content = json.dumps(body()).encode()
    one = CHAT + OFFER
    if chunked:
        one += b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    else:
        one += b"content-length: %d\r\n\r\n%s" % (len(content), content)
    sent = one + b"GET /readyz HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n"
    sent += CHAT + b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
    size = -(-len(sent) // pieces)
    with connected(live) as connection:
        for i in range(0, len(sent), size):
            connection.sendall(sent[i : i + size])
            time.sleep(0.02)
        answer = rest_of(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"400"], answer
    assert b'"ok"' in answer and b'{"state":"ready"}' in answer


def test_garbage_behind_a_request_does_not_get_into_its_answer(
    make_live: Callable[..., Live],
) -> None:
    live = make_live(max_tokens=30_000)
    live.toy.say("x" * 20_000)
    live.toy.runner.delay_s = 0.005
    with connected(live) as connection:
        connection.sendall(post(stream=True))
        answer = connection.recv(4096)
        connection.sendall(b"\x00garbage\r\n\r\n")
        answer += rest_of(connection)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"no valid" not in answer
    until(lambda: num_open(live) == 0)
    assert counted(live, "http_400") == 1


# Large bodies


def test_a_body_over_the_limit_is_answered_while_it_still_comes(
    make_live: Callable[..., Live],
) -> None:
    live = make_live(server={"max_body_bytes": 20_000})
    live.toy.say("ok")
    url = f"{live.url}/v1/chat/completions"
    text = [{"role": "user", "content": "x" * 8_000_000}]
    with httpx.Client(timeout=60) as client:
        for content in (json.dumps(body(messages=text)).encode(),) * 2:
            assert client.post(url, content=content).json()["error"]["code"] == "body_too_large"
            chunks = (content[i : i + 100_000] for i in range(0, len(content), 100_000))
            assert client.post(url, content=chunks).status_code == 413
        assert client.post(url, json=body()).status_code == 200
    until(lambda: counted(live, "http_413") == 4)


PROMPTS = {
    "/v1/chat/completions": lambda text: body(messages=[{"role": "user", "content": text}]),
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": text}],
    },
    "/v1/responses": lambda text: {"input": text},
}


TEXTS = ("a few words " * 900_000, "x" * 10_000_000, "\U0001f30a" * 2_600_000)


def test_prompts_of_ten_megabytes(make_live: Callable[..., Live]) -> None:
    live = make_live(max_tokens=30_000)
    live.toy.say("x" * 20_000)
    live.toy.runner.delay_s = 0.002
    with connected(live) as other:
        other.sendall(post(stream=True))
        until(lambda: num_open(live) == 1)
        for (path, made), text in zip(PROMPTS.items(), (*TEXTS, TEXTS[0]), strict=True):
            content = json.dumps(made(text), ensure_ascii=False).encode()
            assert 10_000_000 < len(content) < 16 << 20
            response = httpx.post(f"{live.url}{path}", content=content, timeout=60)
            assert response.status_code == 400, response.text
            assert "context is 30000 tokens" in response.json()["error"]["message"]
        assert num_open(live) == 1, "the other stream was to go on"
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: num_open(live) == 0)


def test_only_so_many_large_bodies_at_a_time(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"max_body_bytes": 100_000})
    text = [{"role": "user", "content": "x" * 99_000}]
    large = post(messages=text)
    with contextlib.ExitStack() as stack:
        for _ in range(17):
            connection = stack.enter_context(connected(live))
            connection.sendall(large[:-500])
        with connected(live) as last:
            last.sendall(large.replace(b"host: x", b"host: x\r\nconnection: close"))
            answer = rest_of(last)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer
        serves(live)  # small ones pass
    until(lambda: not live.server.server_state.tasks)
    answer = httpx.post(
        f"{live.url}/v1/chat/completions", json=body(messages=text), timeout=60
    ).json()
    assert answer["error"]["code"] == "context_length_exceeded"


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS to a plain port": bytes.fromhex("1603010200010001fc0303") + b"\0" * 40,
    "two lengths": CHAT + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
    "negative length": CHAT + b"content-length: -5\r\n\r\n",
    "length and chunks": CHAT + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": CHAT + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "control character": CHAT + b"x-a: \x01\x00\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "escapes in the path": b"GET /v1/models/%ff%00%zz HTTP/1.1\r\nhost: x\r\n\r\n",
    "very long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "very long header": CHAT + b"x-a: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": CHAT + b"a: b\r\n" * 20_000 + b"\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_leave_the_server_whole(
    make_live: Callable[..., Live], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    live = make_live(server={"header_timeout_s": 0.5, "body_timeout_s": 0.5})
    with connected(live) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(MALFORMED[case])
            connection.shutdown(socket.SHUT_WR)
        answer = rest_of(connection)
    assert not answer or answer[9:10] == b"4", answer[:200]
    if answer:
        assert json.loads(answer.split(b"\r\n\r\n")[-1])["error"]["message"]
    serves(live)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "a/b;;;"])
def test_other_content_types_are_read_as_json(make_live: Callable[..., Live], kind: str) -> None:
    live = make_live()
    live.toy.say("ok")
    headers = {"content-type": kind}
    url = f"{live.url}/v1/chat/completions"
    assert httpx.post(url, content=json.dumps(body()), headers=headers).status_code == 200
    assert httpx.post(url, content=b"a=b&c=d", headers=headers).status_code == 400


def test_headers_given_twice(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say("ok")
    headers = [("x-request-id", "a"), ("x-request-id", "b"), ("content-type", "a/b")] * 3
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body(), headers=headers)
    assert response.status_code == 200 and response.headers["x-request-id"] in ("a", "b")


# Pages of other origins


def test_no_other_page_may_call_unless_it_is_named(make_live: Callable[..., Live]) -> None:
    origin, asked = "https://page.example", "access-control-allow-origin"
    preflight = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    for origins, allowed in ((), False), ((origin,), True), (("https://other.example",), False):
        live = make_live(server={"cors_origins": origins, "api_keys": ("secret",)})
        url = f"{live.url}/v1/chat/completions"
        response = httpx.options(url, headers=preflight)
        assert (asked in response.headers) == allowed
        assert (response.status_code == 200) == allowed
        headers = {"origin": origin, "x-api-key": "secret"}
        answer = httpx.post(url, json=body(stream=True), headers=headers)
        assert answer.status_code == 200 and (asked in answer.headers) == allowed


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not there to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_https(make_live: Callable[..., Live], certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    live = make_live(server={"tls_cert": cert, "tls_key": key})
    live.toy.say("ok")
    url = f"https://127.0.0.1:{live.port}/v1/chat/completions"
    context = ssl.create_default_context(cafile=cert)
    streamed = httpx.post(url, json=body(stream=True), verify=context)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    with pytest.raises(httpx.ConnectError):
        httpx.post(url, json=body())
    with pytest.raises(httpx.TransportError):
        httpx.post(url.replace("https", "http"), json=body())


def test_a_slow_handshake_or_head_over_tls(
    make_live: Callable[..., Live], certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    live = make_live(server={"tls_cert": cert, "tls_key": key, "header_timeout_s": 0.3})
    with connected(live) as silent:
        assert silent.recv(10) == b""
    context = ssl.create_default_context(cafile=cert)
    with connected(live) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as tls:
        with contextlib.suppress(ssl.SSLError, OSError):
            tls.sendall(b"GET /heal")
            assert tls.recv(10) == b""


def test_certificates_that_cannot_be_used(tmp_path: Path, certificate: Any) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for cert, key in ((bad, certificate[1]), (certificate[0], bad)):
        settings = ServerConfig(port=0, tls_cert=str(cert), tls_key=str(key))
        with pytest.raises(ConfigError, match=r"server\.tls_cert and server\.tls_key"):
            serve(Service(lambda: pytest.fail("loaded"), Config(server=settings)))


def test_a_stream_that_is_read_is_never_cut(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"header_timeout_s": 1.0, "send_timeout_s": 0.2})
    live.toy.say("x" * 60)
    live.toy.runner.delay_s = 0.02
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body(stream=True)) as r:
        lines = [line for line in r.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 60
