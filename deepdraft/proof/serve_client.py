"""One streamed answer of any endpoint under load: its text, when its parts came, or its fault.

Owns: addresses of targets, requests, reading of streams, the names of faults.
Knows nothing of: loads, statistics.

A fault is a result, not an exception: a server under load may refuse, break off or never end, and
that is what is measured. Nothing a server sends can hold the client: a request has a deadline, a
stream a most of bytes and of chunks.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from deepdraft.errors import ConfigError
from deepdraft.proof.speed_client import KEY_VARIABLE

Api = Literal["chat", "completions"]
FaultKind = Literal[
    "connect", "refused", "status", "error", "truncated", "malformed", "endless", "timeout", "limit"
]
"""connect: no connection, or it broke before an answer. refused: 4xx. status: any other status but
200. error: 200 with an error inside. truncated: the stream ended without its end mark. malformed:
no such stream as was asked for. endless: far more than was asked for. timeout: not whole at the
deadline. limit: not sent, too many were under way."""

_MAX_LINE = 1 << 20
_MAX_ANSWER = 64 << 20
_MAX_BODY = 4 << 20
_SPARE_CHUNKS = 64
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a conversation that ends with a user's text."""

    turns: tuple[str, ...]
    """user, assistant, user, ..."""
    max_tokens: int
    name: str = ""
    session: str | None = None
    """Sent as X-Session-ID."""

    def messages(self) -> list[dict[str, str]]:
        """As a chat."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.turns)]

    def prompt(self) -> str:
        """As one text."""
        return "".join(self.turns)


@dataclass(slots=True)
class Answer:
    """What came. Times in seconds from the sending of the request."""

    text: str = ""
    reasoning: str = ""
    first_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks that held text."""
    chunks: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, not computed."""
    cache_source: str | None = None
    """Where they came from, as a deepdraft server says it: gpu, host, disk, peer."""
    replica: str | None = None
    """Which of a fleet answered, where it says so."""
    finish: str | None = None
    counted: bool = False
    """`tokens` is the server's count; else chunks were counted."""
    fault: FaultKind | None = None
    message: str = ""

    @property
    def said(self) -> tuple[str, str]:
        """What must be equal between engines."""
        return self.reasoning, self.text


class _Fault(Exception):
    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


class Target:
    """An endpoint: an OpenAI-compatible server, or a model of a Triton server."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        api: Api = "chat",
        model: str | None = None,
        timeout_s: float = 120.0,
        ignore_eos: bool = False,
    ) -> None:
        """`url`: http(s)://HOST:PORT[/v1], or triton+http://HOST:PORT/MODEL. Raises ConfigError."""
        self.name, self.api, self.timeout_s, self.ignore_eos = name, api, timeout_s, ignore_eos
        scheme, _, rest = url.partition("+")
        self.is_triton = bool(rest) and scheme == "triton"
        self._parts = urllib.parse.urlsplit(rest if self.is_triton else url)
        try:
            port = self._parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address: {error}") from error
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(
                f"{url!r} is no target; write http://HOST:PORT or triton+http://HOST:PORT/MODEL"
            )
        self.host = f"{self._parts.hostname}:{port}" if port else self._parts.hostname
        path = self._parts.path.rstrip("/")
        self._switches = api == "chat"
        if self.is_triton:
            self.model = path.strip("/")
            if not self.model or "/" in self.model:
                raise ConfigError(f"{url!r} names no model; write triton+http://HOST:PORT/MODEL")
            self._base = ""
            self._check_ready()
        else:
            self._base = path if path.endswith(("/v1", "/beta")) else path + "/v1"
            self.model = model or self._first_model(url)

    def describe(self) -> dict[str, Any]:
        """What a record says of it; no key, no password of the address."""
        kind = "triton" if self.is_triton else "openai"
        return {"name": self.name, "kind": kind, "host": self.host, "model": self.model}

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        """Sends one request and reads its stream to the end, or to its fault."""
        answer = self._send(ask, deadline_s)
        if answer.fault == "refused" and self._switches and not self.is_triton:
            # Servers that do not know the switches of thinking are asked without them from now on.
            self._switches = False
            answer = self._send(ask, deadline_s)
        return answer

    def _send(self, ask: Ask, deadline_s: float | None) -> Answer:
        limit_s = self.timeout_s if deadline_s is None else deadline_s
        answer = Answer()
        begin = time.perf_counter()
        connected, late = False, threading.Event()
        try:
            with self._connected(limit_s, late) as connection:
                connected = True
                path, body = self._request(ask)
                headers = self._headers()
                if ask.session is not None:
                    headers["x-session-id"] = ask.session
                connection.request("POST", path, json.dumps(body), headers)
                # A response that ends with its connection is not the connection's to close.
                with connection.getresponse() as response:
                    answer.replica = response.getheader("x-deepdraft-replica")
                    self._check_status(response)
                    self._read(response, answer, begin, ask.max_tokens, late)
        except _Fault as fault:
            answer.fault, answer.message = fault.kind, str(fault)
        except (OSError, http.client.HTTPException, ValueError) as error:
            kind: FaultKind = "truncated" if answer.chunks else "connect"
            if connected and isinstance(error, TimeoutError):
                kind = "timeout"  # the socket's own limit, which can pass just before the timer's
            answer.fault, answer.message = kind, f"{type(error).__name__}: {error}"
        if answer.fault is not None and late.is_set():
            answer.fault, answer.message = "timeout", f"not whole within {limit_s:g} s"
        answer.end_s = answer.end_s or time.perf_counter() - begin
        return answer

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if self.is_triton:
            sampling: dict[str, Any] = {"temperature": 0, "max_tokens": ask.max_tokens}
            if self.ignore_eos:
                sampling["ignore_eos"] = True
            if self._switches:
                sampling["thinking"] = False
            given = (
                {"messages": json.dumps(ask.messages())}
                if self.api == "chat"
                else {"text_input": ask.prompt()}
            )
            body = {**given, "sampling_parameters": json.dumps(sampling), "stream": True}
            return f"/v2/models/{self.model}/generate_stream", body
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": ask.max_tokens,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.api == "completions":
            return f"{self._base}/completions", {**body, "prompt": ask.prompt()}
        if self._switches:
            body["thinking"] = {"type": "disabled"}
            body["chat_template_kwargs"] = {"thinking": False, "enable_thinking": False}
        return f"{self._base}/chat/completions", {**body, "messages": ask.messages()}

    def _check_status(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            text = response.read(2000).decode("utf-8", "replace")
            kind: FaultKind = "refused" if 400 <= response.status < 500 else "status"
            raise _Fault(kind, f"{response.status}: {text}")
        if not (response.getheader("content-type") or "").startswith("text/event-stream"):
            text = response.read(_MAX_LINE).decode("utf-8", "replace")
            error = _error_in(_decoded(text.encode()))
            raise _Fault(
                *(("error", error) if error else ("malformed", f"no stream: {text[:200]}"))
            )

    def _read(
        self,
        response: http.client.HTTPResponse,
        answer: Answer,
        begin: float,
        max_tokens: int,
        late: threading.Event,
    ) -> None:
        taken = _take_triton if self.is_triton else _take_openai
        last, ended = 0.0, False
        for data in _frames(response):
            now = time.perf_counter() - begin
            if data == b"[DONE]":
                ended = True
                break
            chunk = _decoded(data)
            if error := _error_in(chunk):
                raise _Fault("error", error)
            if taken(chunk, answer):
                answer.chunks += 1
                if answer.first_s:
                    answer.gaps_s.append(now - last)
                last = now
                answer.first_s = answer.first_s or now
                answer.end_s = now
            if answer.chunks > 2 * max_tokens + _SPARE_CHUNKS:
                raise _Fault("endless", f"{answer.chunks} chunks for {max_tokens} tokens")
        if late.is_set():
            raise _Fault("timeout", "")
        if not (ended or (self.is_triton and answer.finish)):
            raise _Fault("truncated", "the stream ended without its end mark")
        if not (answer.chunks or answer.finish):
            raise _Fault("malformed", "an answer without text or a reason why it ended")
        if answer.tokens > max_tokens:
            # Figures are made of this count: it must not be more than was asked for.
            raise _Fault(
                "malformed",
                f"usage says {answer.tokens} tokens, and at most {max_tokens} were asked for",
            )
        answer.counted = answer.tokens > 0
        answer.tokens = answer.tokens or answer.chunks

    @contextlib.contextmanager
    def _connected(
        self, limit_s: float, late: threading.Event
    ) -> Generator[http.client.HTTPConnection]:
        """A connection that is cut after `limit_s`, and `late` set: the socket's own limit is for
        each read, so an answer that drips would never end."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=limit_s)
        with contextlib.closing(connection):
            connection.connect()
            watch = threading.Timer(limit_s, _cut, (connection.sock, late))
            watch.daemon = True
            watch.start()
            try:
                yield connection
            finally:
                watch.cancel()

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        key = os.environ.get(KEY_VARIABLE)
        if key and not self.is_triton:
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _get(self, path: str) -> tuple[int, bytes]:
        limit_s, late = min(self.timeout_s, 30.0), threading.Event()
        with self._connected(limit_s, late) as connection:
            connection.request("GET", path, headers=self._headers())
            with connection.getresponse() as response:
                status, body = response.status, response.read(_MAX_BODY)
        if late.is_set():
            raise TimeoutError(f"no whole answer within {limit_s:g} s")
        return status, body

    def _first_model(self, url: str) -> str:
        try:
            return str(json.loads(self._get(f"{self._base}/models")[1])["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"no list of models from {url}: {error}; is a server there? --model-name names one"
            ) from error

    def _check_ready(self) -> None:
        try:
            status, body = self._get(f"/v2/models/{self.model}/ready")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"no Triton server at {self.host}: {error}") from error
        if status != 200:
            text = body[:200].decode("utf-8", "replace")
            raise ConfigError(
                f"Triton at {self.host} has no model {self.model!r} that is ready: {status} {text}"
            )


def _cut(sock: socket.socket | None, late: threading.Event) -> None:
    """Ends a connection from outside; whoever reads from it gets an end or an error."""
    late.set()
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself


def _frames(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events. Raises _Fault for what cannot be one."""
    total = 0
    while line := response.readline(_MAX_LINE + 1):
        total += len(line)
        if len(line) > _MAX_LINE or total > _MAX_ANSWER:
            raise _Fault(
                "endless", f"more than {_MAX_ANSWER if total > _MAX_ANSWER else _MAX_LINE} bytes"
            )
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _Fault("malformed", f"no JSON object: {data[:120].decode('utf-8', 'replace')}")
    return value


def _error_in(chunk: dict[str, Any]) -> str | None:
    error = chunk.get("error")
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]


def _count(usage: dict[str, Any], name: str) -> int:
    """A number of tokens; 0 where there is none. Raises _Fault for what is no such number."""
    value = usage.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_TOKENS:
        raise _Fault("malformed", f"{name} is no number of tokens: {str(value)[:80]}")
    return value


def _take_openai(chunk: dict[str, Any], answer: Answer) -> bool:
    """Adds a chunk to the answer; whether it held text. Raises _Fault."""
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if isinstance(usage, dict):
        answer.tokens = _count(usage, "completion_tokens")
        answer.prompt_tokens = _count(usage, "prompt_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            answer.cached_tokens = _count(details, "cached_tokens")
            answer.cache_source = (
                str(details["cache_source"])[:20] if details.get("cache_source") else None
            )
    if not isinstance(choices, list):
        raise _Fault("malformed", f"a chunk without choices: {json.dumps(chunk)[:200]}")
    held = False
    for choice in choices:
        if not isinstance(choice, dict):
            raise _Fault("malformed", "a choice that is no object")
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise _Fault("malformed", "a delta that is no object")
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or choice.get("text") or ""
        if not (isinstance(thought, str) and isinstance(text, str)):
            raise _Fault("malformed", "a text that is none")
        answer.reasoning += thought
        answer.text += text
        answer.finish = choice.get("finish_reason") or answer.finish
        held = held or bool(thought or text)
    return held


def _take_triton(chunk: dict[str, Any], answer: Answer) -> bool:
    text, thought = chunk.get("text_output"), chunk.get("reasoning_output") or ""
    if not (isinstance(text, str) and isinstance(thought, str)):
        raise _Fault("malformed", f"a response without text_output: {json.dumps(chunk)[:200]}")
    answer.text += text
    answer.reasoning += thought
    answer.finish = chunk.get("finish_reason") or answer.finish
    if usage := chunk.get("usage"):
        counts = _decoded(str(usage).encode())
        answer.tokens = _count(counts, "completion_tokens")
        answer.prompt_tokens = _count(counts, "prompt_tokens")
    return bool(text or thought)
