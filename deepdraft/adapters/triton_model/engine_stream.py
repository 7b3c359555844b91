"""One request to an OpenAI-compatible engine, read as a stream with faults that have names.

Owns: the request body, retries before the first byte, limits on what an engine may send.
Knows nothing of: Triton. Standard library only; part of a written model repository.
"""

import http.client
import json
import socket
import threading
import time
import urllib.parse

_MAX_LINE = 1 << 20
_MAX_ANSWER = 64 << 20
_MAX_ERROR = 4096
_SPARE_CHUNKS = 64
_RETRIED = (429, 502, 503)
_OWN = ("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "echo")


class Fault(Exception):
    """Why a request has no whole answer. `kind`: invalid, not_found, unavailable, cancelled,
    deadline, internal."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class Piece:
    """What one response carries."""

    def __init__(self, text="", reasoning="", finish=None, usage=None):
        self.text, self.reasoning, self.finish, self.usage = text, reasoning, finish, usage


class Settings:
    """The parameters of config.pbtxt."""

    def __init__(self, url):
        self.url = url
        self.model = None
        self.ready_path = "/readyz"
        self.sampling = {}
        self.max_in_flight = 256
        self.deadline_s = 600.0
        self.connect_s = 2.0
        self.retries = 2
        self.retry_wait_s = 0.1
        self.max_tokens = 65536
        self.key = None

    @classmethod
    def read(cls, values):
        """From texts. Raises ValueError that names the parameter."""
        settings = cls(values["engine_url"])
        settings.model = values.get("engine_model") or None
        settings.ready_path = values.get("ready_path", settings.ready_path)
        for name, kind in (
            ("max_in_flight", int), ("deadline_s", float), ("connect_s", float),
            ("retries", int), ("retry_wait_s", float), ("max_tokens", int),
        ):  # fmt: skip
            if name in values:
                try:
                    setattr(settings, name, kind(values[name]))
                except ValueError as error:
                    raise ValueError(f"parameter {name}: {error}") from error
        settings.sampling = json.loads(values.get("sampling_parameters") or "{}")
        if not isinstance(settings.sampling, dict):
            raise ValueError("parameter sampling_parameters is no JSON object")
        return settings


def _connection(settings, timeout_s):
    parts = urllib.parse.urlsplit(settings.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout_s), parts.path.rstrip("/")


def is_ready(settings):
    """Whether the engine answers its readiness path with 200 within the time for connecting."""
    connection, base = _connection(settings, settings.connect_s)
    try:
        connection.request("GET", base + settings.ready_path, headers=_headers(settings))
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _headers(settings):
    headers = {"content-type": "application/json"}
    if settings.key:
        headers["authorization"] = "Bearer " + settings.key
    return headers


def body(settings, text, messages, sampling):
    """The body of the engine's request. Raises Fault of kind invalid."""
    fields = dict(settings.sampling)
    if sampling:
        fields.update(_object(sampling, "sampling_parameters", dict))
    for name in _OWN:
        if name in fields:
            raise Fault("invalid", f"sampling_parameters: {name} is not to be set here")
    if (text is None) == (messages is None):
        raise Fault("invalid", "give either text_input or messages")
    fields.setdefault("max_tokens", 256)
    most = fields["max_tokens"]
    if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= settings.max_tokens:
        raise Fault("invalid", f"max_tokens must be from 1 to {settings.max_tokens}, got {most!r}")
    if settings.model:
        fields["model"] = settings.model
    fields["stream"] = True
    fields["stream_options"] = {"include_usage": True}
    if messages is not None:
        fields["messages"] = _object(messages, "messages", list)
    else:
        fields["prompt"] = text
    return fields


def _object(text, name, kind):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault("invalid", f"{name} is no JSON: {error}") from error
    if not isinstance(value, kind):
        raise Fault("invalid", f"{name} is no JSON {'object' if kind is dict else 'list'}")
    return value


class Stream:
    """A request under way. `cut` may come from another thread at any time."""

    def __init__(self, settings, fields, deadline_s, whole=False):
        self._settings, self._fields, self._whole = settings, fields, whole
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._socket = None
        self._cut = None
        self._wake = threading.Event()

    def cut(self, kind, message):
        """Ends the request with a fault; closes the connection, which ends it in the engine."""
        with self._lock:
            if self._cut is None:
                self._cut = Fault(kind, message)
            sock = self._socket
        self._wake.set()
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def pieces(self):
        """The answer piece by piece; with `whole` as one. Raises Fault."""
        if not self._whole:
            yield from self._read()
            return
        whole = Piece()
        for piece in self._read():
            whole.text += piece.text
            whole.reasoning += piece.reasoning
            whole.finish = piece.finish or whole.finish
            whole.usage = piece.usage or whole.usage
        yield whole

    def _read(self):
        connection, response = self._open()
        try:
            yield from self._frames(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._check_cut()
            raise Fault("unavailable", f"the engine's stream broke: {error}") from error
        finally:
            with self._lock:
                self._socket = None
            # A response that ends with its connection is no longer the connection's to close.
            response.close()
            connection.close()

    def _check_cut(self):
        with self._lock:
            if self._cut is not None:
                raise self._cut

    def _open(self):
        """Sends the request; tries again only while the engine has sent nothing of an answer."""
        wait = self._settings.retry_wait_s
        for attempt in range(self._settings.retries + 1):
            self._check_cut()
            last = attempt == self._settings.retries
            try:
                return self._send()
            except _Again as again:
                self._check_cut()
                if last:
                    raise Fault("unavailable", f"{again}, {attempt + 1} times in a row") from again
            self._wake.wait(min(wait, max(0.0, self.deadline - time.monotonic())))
            wait *= 3
        raise Fault("unavailable", "no attempt was made")

    def _send(self):
        settings = self._settings
        connection, base = _connection(settings, settings.connect_s)
        try:
            connection.connect()
            # From here on the watcher cuts what takes too long.
            connection.sock.settimeout(self.deadline_s + 5.0)
            with self._lock:
                self._socket = connection.sock
            self._check_cut()
            path = "/chat/completions" if "messages" in self._fields else "/completions"
            root = base if base.endswith("/v1") else base + "/v1"
            data = json.dumps(self._fields)
            connection.request("POST", root + path, data, _headers(settings))
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._check_cut()
            raise _Again(f"no answer from the engine: {type(error).__name__} {error}") from error
        except Fault:
            connection.close()
            raise
        if response.status != 200:
            text = response.read(_MAX_ERROR).decode("utf-8", "replace")
            response.close()
            connection.close()
            raise _refusal(response.status, text)
        return connection, response

    def _frames(self, response):
        kind = response.getheader("content-type") or ""
        if not kind.startswith("text/event-stream"):
            text = response.read(_MAX_ERROR)
            self._check_cut()
            raise Fault("internal", f"the engine sent no stream: {_said(text)}")
        total = chunks = 0
        most = 2 * self._fields["max_tokens"] + _SPARE_CHUNKS
        finish, usage, ended = None, None, False
        while not ended:
            line = response.readline(_MAX_LINE + 1)
            self._check_cut()
            if not line:
                raise Fault("unavailable", "the engine's stream ended without its end mark")
            total += len(line)
            if len(line) > _MAX_LINE or total > _MAX_ANSWER:
                raise Fault(
                    "internal", f"the engine sent more than {min(total, _MAX_ANSWER)} bytes"
                )
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            piece = _piece(data)
            finish, usage = piece.finish or finish, piece.usage or usage
            if piece.text or piece.reasoning:
                chunks += 1
                if chunks > most:
                    raise Fault("internal", f"the engine does not end: {chunks} pieces")
                yield Piece(piece.text, piece.reasoning)
        if finish is None:
            raise Fault("internal", "the engine's stream has no finish_reason")
        yield Piece(finish=finish, usage=usage)


class _Again(Exception):
    """The engine has sent nothing of an answer; the request may be sent once more."""


def _refusal(status, text):
    message = f"the engine answered {status}: {_said(text.encode())}"
    if status in _RETRIED:
        return _Again(message)
    if status == 404:
        return Fault("not_found", message)
    if status in (400, 413, 415, 422):
        return Fault("invalid", message)
    return Fault("internal", message)


def _said(data):
    """The message in an error body, or its beginning."""
    text = data.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError):
        return text[:200]


def _piece(data):
    """A frame of the engine's stream. Raises Fault for an error inside, and for what is none."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise Fault("internal", f"the engine sent no JSON object: {data[:120]!r}")
    if chunk.get("error"):
        raise Fault("internal", f"the engine failed: {_said(data)}")
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        raise Fault("internal", f"the engine sent a frame without choices: {data[:120]!r}")
    piece = Piece(usage=chunk.get("usage"))
    for choice in choices:
        try:
            delta = choice.get("delta") or {}
            piece.text += delta.get("content") or choice.get("text") or ""
            piece.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            piece.finish = choice.get("finish_reason") or piece.finish
        except (AttributeError, TypeError) as error:
            raise Fault("internal", f"the engine sent a choice that is none: {error}") from error
    return piece
