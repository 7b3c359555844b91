"""Clients on real sockets that are slow, silent, too many or malformed; TLS; other pages."""

import contextlib
import json
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
from deepdraft.server.run import serve
from deepdraft.server.service import Service

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
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def serves(live: Live) -> None:
    live.toy.say("ok")
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body(), timeout=20)
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
    live = make_live(server={"body_timeout_s": 0.2})
    for sent in (b"", b'{"messages": ['):
        with connected(live) as connection:
            connection.sendall(CHAT + b"content-length: 1000\r\n\r\n" + sent)
            answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b"request_timeout" in answer and f"only {len(sent)} bytes".encode() in answer
    serves(live)


def test_a_client_that_reads_nothing_loses_its_answer(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"send_timeout_s": 0.5}, max_tokens=30_000)
    letters = [live.toy.tokenizer.encode_text("x")[0]] * 20_000
    live.toy.runner.script = lambda prompt: letters
    # Each token with its 20 likeliest ones: the buffers of both kernels fill soon.
    wanted = body(stream=True, max_tokens=20_000, logprobs=True, top_logprobs=20)
    content = json.dumps(wanted).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", live.port))
    with connection:
        connection.sendall(CHAT + f"content-length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: num_open(live) == 1)
        until(lambda: num_open(live) == 0, 60)
        assert live.toy.runner.num_steps < 19_000, "it was written to the end"
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
        with contextlib.suppress(ConnectionError):
            connection.sendall(MALFORMED[case])
            connection.shutdown(socket.SHUT_WR)
        answer = rest_of(connection)
    assert not answer or answer[9:10] == b"4", answer[:200]
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
    context = ssl.create_default_context(cafile=cert)
    with connected(live) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as tls:
        tls.sendall(b"GET /heal")
        with contextlib.suppress(ssl.SSLError, OSError):
            assert tls.recv(10) == b""


def test_certificates_that_cannot_be_used(tmp_path: Path, certificate: Any) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for cert, key in ((bad, certificate[1]), (certificate[0], bad)):
        settings = ServerConfig(port=0, tls_cert=str(cert), tls_key=str(key))
        with pytest.raises(ConfigError, match=r"server\.tls_cert and server\.tls_key"):
            serve(Service(lambda: pytest.fail("loaded"), Config(server=settings)))


def test_a_stream_that_is_read_is_never_cut(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"header_timeout_s": 0.2, "send_timeout_s": 0.2})
    live.toy.say("x" * 60)
    live.toy.runner.delay_s = 0.02
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body(stream=True)) as r:
        lines = [line for line in r.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 60
