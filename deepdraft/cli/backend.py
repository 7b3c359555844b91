"""Where answers come from: a model in this process, or a server.

Owns: both ways behind one call, which takes a request body and yields stream chunks.
Knows nothing of: terminals, what is done with an answer.
"""

import http.client
import json
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from deepdraft.config import Config
from deepdraft.errors import DeepdraftError, RequestError

Json = dict[str, Any]
KEY_VARIABLE = "DEEPDRAFT_API_KEY"
# A line of a stream is one chunk; far more than any chunk we know of.
_MAX_LINE = 16 << 20


class Backend(Protocol):
    """Answers request bodies. `kind` is "chat" or "completions".

    The chunks are those of the HTTP streams. Closing the iterator early ends the answer. Raises
    DeepdraftError.
    """

    def answer(self, kind: str, body: Json) -> Iterator[Json]:
        """Chunks of one answer, the one with the usage last."""
        ...

    def close(self) -> None:
        """Frees what the backend holds."""
        ...


class LocalBackend:
    """A model loaded into this process."""

    def __init__(self, path: Path, name: str, config: Config) -> None:
        from deepdraft.server.service import Service

        def load() -> Any:
            from deepdraft.engine.load import load_engine

            return load_engine(path, config.engine, name=name)

        self._service = Service(load, config)
        self._service.start()
        self._service.wait()
        if self._service.failure is not None:
            raise self._service.failure

    def answer(self, kind: str, body: Json) -> Iterator[Json]:
        """Chunks of one answer."""
        from deepdraft.server import schema
        from deepdraft.server.chat import chat_job
        from deepdraft.server.completions import completion_job

        engine, view = self._service.ready()
        raw = json.dumps(body).encode()
        if kind == "chat":
            chat, _ = schema.read_body(raw, schema.ChatRequest)
            job: Any = chat_job(chat, view.names[0], view)
        else:
            completion, _ = schema.read_body(raw, schema.CompletionRequest)
            job = completion_job(completion, view.names[0], view)
        assert len(job.requests) == 1, "one answer at a time"
        events = engine.generate(job.requests[0])
        try:
            for event in events:
                yield from job.push(event)
                if job.finished:
                    break
            last = job.last_chunk()
            if last is not None:
                yield last
        finally:
            events.close()

    def close(self) -> None:
        """Ends the engine."""
        self._service.close()


class RemoteBackend:
    """A server that speaks the OpenAI or DeepSeek format at `url`, with or without /v1."""

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is no http or https address")
        path = parts.path.rstrip("/")
        self._base = path if path.endswith(("/v1", "/beta")) else path + "/v1"
        self._parts = parts
        self._model = model
        self._timeout_s = timeout_s

    def answer(self, kind: str, body: Json) -> Iterator[Json]:
        """Chunks of one answer."""
        path = "/chat/completions" if kind == "chat" else "/completions"
        if self._model is not None:
            body = {**body, "model": self._model}
        connection = self._connect()
        try:
            headers = {"content-type": "application/json"}
            key = os.environ.get(KEY_VARIABLE)
            if key:
                headers["authorization"] = f"Bearer {key}"
            connection.request("POST", self._base + path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read(1 << 20))
            yield from _chunks(response)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise DeepdraftError(f"no answer from {self._parts.netloc}: {reason}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def close(self) -> None:
        """Nothing is held between answers."""


def _chunks(response: http.client.HTTPResponse) -> Iterator[Json]:
    while line := response.readline(_MAX_LINE):
        text = line.decode("utf-8", "replace").strip()
        if not text.startswith("data:"):
            continue
        data = text[5:].strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise DeepdraftError("the server sent a chunk that is not JSON") from error
        if "error" in chunk:
            raise DeepdraftError(_message(chunk))
        yield chunk


def _refusal(status: int, raw: bytes) -> DeepdraftError:
    try:
        message = _message(json.loads(raw))
    except (ValueError, AttributeError):
        message = "no reason given"
    return RequestError(f"the server answered {status}: {message}")


def _message(body: Json) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
