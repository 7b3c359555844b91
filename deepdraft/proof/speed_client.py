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
_MAX_LINE = 16 << 20
_MAX_BODY = 4 << 20


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
    """Between chunks that held text."""
    ms_per_step: float | None = None
    accepted_length: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the time from the first content token to the end: the known script's figure.

        Where the answer thinks, from the first token of any kind."""
        return self.tokens / max(1e-9, self.end_s - self.first_s)


class Target:
    """A server to be measured. Only its first model is asked."""

    def __init__(self, name: str, url: str, *, timeout_s: float = 600.0) -> None:
        """Asks for the models. Raises ConfigError for a server that does not answer."""
        self.name, self.url = name, url
        self._parts = urllib.parse.urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(f"{url!r} is no http or https address")
        path = self._parts.path.rstrip("/")
        self._base = path if path.endswith(("/v1", "/beta")) else path + "/v1"
        self._timeout_s = timeout_s
        self._switches = True
        """The server takes the fields that switch thinking."""
        try:
            entry = json.loads(self._get("/models"))["data"][0]
            self.model = str(entry["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"no list of models from {url}: {error}") from error
        self.is_deepdraft = entry.get("owned_by") == "deepdraft"
        self.max_tokens = entry.get("max_model_len")
        self.fingerprint: str | None = None

    def describe(self) -> dict[str, Any]:
        """What the report says of the target; no key, no password of the address."""
        host = self._parts.hostname or ""
        return {
            "name": self.name,
            "host": f"{host}:{self._parts.port}" if self._parts.port else host,
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
        key = os.environ.get(KEY_VARIABLE)
        if key:
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _get(self, path: str) -> bytes:
        connection = self._connect()
        try:
            connection.request("GET", self._base + path, headers=self._headers())
            return connection.getresponse().read(_MAX_BODY)
        finally:
            connection.close()

    def _stream(self, body: dict[str, Any]) -> Sample:
        connection = self._connect()
        begin = time.perf_counter()
        try:
            path = self._base + "/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers())
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(2000).decode("utf-8", "replace")
                raise _Refused(f"{self.name} answered {response.status}: {text}")
            return self._read(response, begin)
        except (OSError, http.client.HTTPException) as error:
            raise DeepdraftError(f"no answer from {self.name}: {error}") from error
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, begin: float) -> Sample:
        sample = Sample()
        chunks, last = 0, 0.0
        while line := response.readline(_MAX_LINE):
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter() - begin
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise DeepdraftError(f"{self.name} broke off: {chunk['error']}")
            self.fingerprint = chunk.get("system_fingerprint") or self.fingerprint
            _take_usage(sample, chunk.get("usage"))
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                content = delta.get("content")
                if choice.get("finish_reason"):
                    sample.finish = choice["finish_reason"]
                    sample.end_s = now
                if thought or content:
                    chunks += 1
                    if sample.first_s:
                        sample.gaps_ms.append(1e3 * (now - last))
                    last = now
                    sample.first_s = sample.first_s or now
                    sample.end_s = now
                if content and not sample.content_s:
                    sample.content_s = now
                report = choice.get("speculation")
                if report:
                    sample.ms_per_step = report["average_iteration_ms"]
                    sample.accepted_length = report["average_accept_length"]
        if not sample.tokens:
            sample.tokens, sample.counted = chunks, False
        if not sample.first_s:
            raise DeepdraftError(f"{self.name} gave an empty answer")
        return sample


class _Refused(DeepdraftError):
    """The server does not take the request."""


def _take_usage(sample: Sample, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    sample.tokens = usage.get("completion_tokens") or sample.tokens
    sample.prompt_tokens = usage.get("prompt_tokens") or sample.prompt_tokens
    details = usage.get("prompt_tokens_details") or {}
    sample.cached_tokens = details.get("cached_tokens") or sample.cached_tokens
