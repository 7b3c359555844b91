"""One streamed answer of an OpenAI-compatible server, and when each part of it came.

Owns: the request, the clock, what is read from the stream. Knows nothing of: suites, statistics.

The clock is the client's, which shares the cores with a server on the same machine; reading one
chunk costs about 10 us.
"""

import http.client
import json
import os
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from deepdraft.errors import ConfigError, DeepdraftError

KEY_VARIABLE = "DEEPDRAFT_API_KEY"
_MAX_LINE = 1 << 20
_MAX_STREAM = 256 << 20
_MAX_BODY = 4 << 20
_SHOWN = 300  # characters of another server's words in a message


@dataclass(slots=True)
class Sample:
    """What one answer took. Times in seconds from the sending of the request."""

    first_s: float = 0.0
    """The first token of any kind."""
    content_s: float = 0.0
    """The first token of the content; the known script counts from here."""
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    counted: bool = True
    """`tokens` is the server's count; else chunks were counted."""
    gaps_ms: list[float] = field(default_factory=list)
    """Between chunks that held text: one fewer than there were such chunks."""
    ms_per_step: float | None = None
    accepted_length: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over the time from the first content token to the end: the known script's figure.

        Where the answer thinks, from the first token of any kind. None where the text came in one
        piece: that has no duration."""
        duration_s = self.end_s - self.first_s
        return self.tokens / duration_s if self.gaps_ms and duration_s > 0 else None


class Target:
    """A server to be measured. Only its first model is asked."""

    def __init__(self, name: str, url: str, *, timeout_s: float = 600.0) -> None:
        """Asks for the models. Raises ConfigError for a server that does not answer."""
        self.name, self.url = name, url
        try:
            self._parts = urllib.parse.urlsplit(url)
            port = self._parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no http or https address: {error}") from error
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(f"{url!r} is no http or https address")
        host = self._parts.hostname
        self._host = f"{host}:{port}" if port else host
        path = self._parts.path.rstrip("/")
        self._base = path if path.endswith(("/v1", "/beta")) else path + "/v1"
        self._timeout_s = timeout_s
        self._key = os.environ.get(KEY_VARIABLE, "")
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(f"{KEY_VARIABLE} holds characters that no HTTP header may hold")
        self._switches = True
        """The server takes the fields that switch thinking."""
        entry = self._first_model()
        self.model = str(entry["id"])
        self.is_deepdraft = entry.get("owned_by") == "deepdraft"
        context = entry.get("max_model_len")
        self.max_tokens = context if type(context) is int and context > 0 else None
        self.fingerprint: str | None = None

    def _first_model(self) -> dict[str, Any]:
        # The host alone: an address may hold a password.
        where = f"{self._host}{self._base}/models"
        try:
            status, body = self._get("/models")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"no list of models from {where}: {_said(error)}") from error
        if status != 200:
            raise ConfigError(f"{where} answered {status}: {_said(body)}")
        try:
            entry = json.loads(body)["data"][0]
            if not isinstance(entry["id"], str):
                raise TypeError("the id is no text")
            return entry
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{where} gives no list of models in OpenAI's format: {_said(body)}"
            ) from error

    def describe(self) -> dict[str, Any]:
        """What the report says of the target; no key, no password of the address."""
        return {
            "name": self.name,
            "host": self._host,
            "model": self.model,
            "is_deepdraft": self.is_deepdraft,
            "system_fingerprint": self.fingerprint,
            "context": self.max_tokens,
        }

    def ask(
        self,
        text: str,
        *,
        thinking: bool = False,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Sample:
        """Streams one answer. Raises DeepdraftError where there is none."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": temperature,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if seed is not None:
            body["seed"] = seed
        if self.is_deepdraft:
            body["speculation"] = {"report": True}
        body |= extra or {}
        if self._switches:
            switched = {
                **body,
                "thinking": {"type": "enabled" if thinking else "disabled"},
                "chat_template_kwargs": {"thinking": thinking, "enable_thinking": thinking},
            }
            try:
                return self._stream(switched)
            except _Refused:
                if self.is_deepdraft:
                    raise
                self._switches = False
        return self._stream(body)

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        return headers

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request("GET", self._base + path, headers=self._headers())
            with connection.getresponse() as response:
                return response.status, response.read(_MAX_BODY)
        finally:
            connection.close()

    def _stream(self, body: dict[str, Any]) -> Sample:
        connection = self._connect()
        begin = time.perf_counter()
        try:
            path = self._base + "/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers())
            with connection.getresponse() as response:
                self._check(response)
                return self._read(response, begin)
        except (OSError, http.client.HTTPException) as error:
            raise DeepdraftError(f"no answer from {self.name}: {_said(error)}") from error
        finally:
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            text = f"{self.name} answered {response.status}: {_said(response.read(2000))}"
            # Whoever refuses the request itself may take another; a fault is a fault.
            raise (_Refused if response.status in (400, 422) else DeepdraftError)(text)
        kind = response.headers.get_content_type()
        if kind == "application/json":
            raise DeepdraftError(
                f"{self.name} answered in one piece ({kind}) where a stream was asked for: "
                f"{_said(response.read(2000))}"
            )

    def _read(self, response: http.client.HTTPResponse, begin: float) -> Sample:
        reader = _Reader(self.name)
        size, told_s = 0, 0.0
        while line := response.readline(_MAX_LINE):
            now = time.perf_counter() - begin
            size += len(line)
            if size > _MAX_STREAM:
                raise DeepdraftError(f"{self.name} sent more than {_MAX_STREAM} bytes")
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return reader.end()
                reader.take(_parsed(data, self.name), now)
                self.fingerprint = reader.fingerprint or self.fingerprint
                told_s = now
            elif now - told_s > self._timeout_s:
                # Comments keep a connection alive for ever.
                raise DeepdraftError(f"{self.name} gave no token for {self._timeout_s:g} s")
        if reader.sample.finish is None:
            raise DeepdraftError(f"{self.name} closed the stream before the answer's end")
        return reader.end()


class _Refused(DeepdraftError):
    """The server does not take the request."""


def _said(what: bytes | BaseException) -> str:
    """Another's words, made fit for one line of a message."""
    text = what.decode("utf-8", "replace") if isinstance(what, bytes) else str(what)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "") or "nothing"


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DeepdraftError(f"{name} sent what is no JSON: {_said(data)}") from error
    if not isinstance(chunk, dict):
        raise DeepdraftError(f"{name} sent what is no chunk of an answer: {_said(data)}")
    return chunk


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _positive(value: Any) -> float | None:
    """A finite number above zero; None for anything else."""
    number = type(value) in (int, float) and 0 < value < 1e15
    return float(value) if number else None


class _Reader:
    """Makes a Sample of chunks. Fields of another kind than expected count as absent."""

    def __init__(self, name: str) -> None:
        self.sample = Sample()
        self.fingerprint: str | None = None
        self._name = name
        self._chunks, self._last = 0, 0.0

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """One chunk, which came `now` seconds after the request went out."""
        if chunk.get("error"):
            error = _object(chunk["error"]).get("message") or chunk["error"]
            raise DeepdraftError(f"{self._name} broke off: {_said(str(error).encode())}")
        fingerprint = chunk.get("system_fingerprint")
        self.fingerprint = fingerprint if isinstance(fingerprint, str) else self.fingerprint
        self._usage(_object(chunk.get("usage")))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._choice(_object(choice), now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        sample, delta = self.sample, _object(choice.get("delta"))
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        content = delta.get("content")
        if choice.get("finish_reason"):
            sample.finish = str(choice["finish_reason"])
            sample.end_s = now
        if thought or content:
            if self._chunks:
                sample.gaps_ms.append(1e3 * (now - self._last))
            self._chunks += 1
            self._last = sample.end_s = now
            sample.first_s = sample.first_s or now
        if content and not sample.content_s:
            sample.content_s = now
        report = _object(choice.get("speculation"))
        sample.ms_per_step = _positive(report.get("average_iteration_ms")) or sample.ms_per_step
        length = _positive(report.get("average_accept_length"))
        sample.accepted_length = length or sample.accepted_length

    def _usage(self, usage: dict[str, Any]) -> None:
        sample = self.sample
        sample.tokens = _count(usage.get("completion_tokens")) or sample.tokens
        sample.prompt_tokens = _count(usage.get("prompt_tokens")) or sample.prompt_tokens
        details = _object(usage.get("prompt_tokens_details"))
        sample.cached_tokens = _count(details.get("cached_tokens")) or sample.cached_tokens

    def end(self) -> Sample:
        """The sample. Raises DeepdraftError for a stream that held no answer."""
        sample = self.sample
        if not sample.tokens:
            sample.tokens, sample.counted = self._chunks, False
        if not sample.first_s:
            # A token may have no text: the end token, or a part of a character.
            if not sample.tokens or sample.finish is None:
                raise DeepdraftError(f"{self._name} gave an empty answer")
            sample.first_s = sample.end_s
        return sample
