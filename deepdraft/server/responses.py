"""The Responses format: jobs from its bodies, its events and responses from a chat answer's pieces.

Owns: the shape of its answers and streams, what is kept for later.
Knows nothing of: input items (`responses_read`), sockets, the engine's thread.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from deepdraft.errors import RequestError
from deepdraft.server import chat
from deepdraft.server import responses_schema as schema
from deepdraft.server.dialect import DialectJob, errors_in_terms_of, final_arguments
from deepdraft.server.job import Json
from deepdraft.server.responses_read import read_responses
from deepdraft.server.responses_store import ResponseStore
from deepdraft.server.responses_tools import RawInput, ToolTable
from deepdraft.server.sampling import ModelView
from deepdraft.server.stream import Wire
from deepdraft.server.wire_errors import shown_error

_FIELDS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_WORDS = {
    "tool_call_id": "call_id",
    "tool_calls": "function_call",
    "tool message": "function_call_output item",
}

Keep = Callable[[Json, Sequence[msgspec.Raw]], None]


class UnknownResponse(RequestError):
    """The response to go on with is not kept (any more)."""

    code = "previous_response_not_found"


def responses_job(
    body: schema.ResponsesRequest,
    name: str,
    model: ModelView,
    store: ResponseStore,
    owner: bytes = b"",
    ignored: tuple[str, ...] = (),
) -> "ResponsesJob":
    """Checks a Responses body and makes its engine request.

    `owner`: whose kept responses it may go on with. Raises RequestError or PromptTooLong.
    """
    earlier = _earlier(body.previous_response_id, store, owner)
    read, table, items = read_responses(body, earlier)
    with errors_in_terms_of(read, _FIELDS, _WORDS):
        job = chat.chat_job(read.chat, name, model, ignored, f"resp_{secrets.token_hex(16)}")
    keeps = store.enabled and body.store is not False

    def keep(response: Json, output: Sequence[msgspec.Raw]) -> None:
        if keeps:
            conversation = [*items, *output]
            num_new = len(conversation) - len(earlier)
            encoded = msgspec.json.encode(response)
            store.put(job.id, encoded, conversation, num_new=num_new, owner=owner)

    echo = _echo(body, job, keeps)
    return ResponsesJob(job, read.ignored, table, echo, keep)


def count_tokens(
    body: schema.ResponsesRequest, model: ModelView, store: ResponseStore, owner: bytes = b""
) -> int:
    """Tokens of the prompt that this body would be answered from. Raises RequestError."""
    read, _, _ = read_responses(body, _earlier(body.previous_response_id, store, owner))
    with errors_in_terms_of(read, _FIELDS, _WORDS):
        return chat.num_prompt_tokens(read.chat, model)


def _earlier(
    response_id: str | None, store: ResponseStore, owner: bytes
) -> tuple[msgspec.Raw, ...]:
    if response_id is None:
        return ()
    kept = store.get(response_id, owner)
    if kept is None:
        raise UnknownResponse(
            f"previous_response_id {response_id!r} is not kept here: send the whole conversation "
            "as input.",
            param="previous_response_id",
        )
    return kept.items


def _echo(body: schema.ResponsesRequest, job: chat.ChatJob, keeps: bool) -> Json:
    """The settings of a request that its responses repeat."""
    sampling = job.requests[0].sampling
    text = body.text or schema.TextConfig()
    return {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": job.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": keeps,
        "temperature": sampling.temperature,
        "text": {"format": text.format or schema.TextFormat(), "verbosity": text.verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": None,
        "metadata": body.metadata or {},
    }


class ResponsesWire(Wire):
    """Named events with sequence numbers; no end mark."""

    done = b""

    def __init__(self, job: "ResponsesJob") -> None:
        self._job = job

    def opening(self) -> list[Json]:
        """The response before anything has been said."""
        return self._job.opening()

    def frame(self, chunk: Json) -> bytes:
        """One event as bytes."""
        data = msgspec.json.encode(chunk)
        return b"event: " + chunk["type"].encode() + b"\ndata: " + data + b"\n\n"

    def error(self, error: BaseException) -> bytes:
        """An error after the stream has begun: the response has failed."""
        return self.frame(self._job.failed(error))


class ResponsesJob(DialectJob):
    """A Responses request."""

    def __init__(
        self,
        job: chat.ChatJob,
        ignored: Sequence[str],
        table: ToolTable,
        echo: Json,
        keep: Keep,
    ) -> None:
        """`keep` is called with the finished response and its output items."""
        super().__init__(job, ignored)
        self._table = table
        self._echo = echo
        self._keep = keep
        self._output: list[Json] = []
        self._open: str | None = None
        self._raw = RawInput()
        self._pieces: list[str] = []
        """What the open item has told so far; joined when it ends, as a long answer has many."""
        self._arguments: list[str] = []
        self._logprobs: list[Json] = []
        self._unsent_logprobs: list[Json] = []
        self._num_events = 0
        self._final: Json | None = None

    def wire(self) -> Wire:
        """How its stream is framed."""
        return ResponsesWire(self)

    def opening(self) -> list[Json]:
        """The first events, which need no token."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def failed(self, error: BaseException) -> Json:
        """The last event of a stream that broke off."""
        number = self._num_events
        self._end("incomplete")
        self._num_events = number  # the events of that end are not told
        shown = {"code": "server_error", "message": shown_error(error).message}
        response = {**self._response("failed"), "error": shown}
        return self._event("response.failed", response=response)

    def tell(self, part: Json) -> list[Json]:
        """The events for one choice object of a chat stream."""
        delta, events = part["delta"], []
        if part["logprobs"] is not None:
            fresh = part["logprobs"]["content"] or []
            self._logprobs += fresh
            self._unsent_logprobs += fresh
        if delta.get("reasoning_content"):
            events += self._reasoning(delta["reasoning_content"])
        if delta.get("content"):
            events += self._text(delta["content"])
        for call in delta.get("tool_calls", ()):
            events += self._call(call)
        if part["finish_reason"] is not None:
            events += self._finish(part["finish_reason"])
        return events

    def response(self) -> Json:
        """The whole response."""
        assert self._final is not None
        return self._final

    # Items

    def _reasoning(self, text: str) -> list[Json]:
        events = []
        if self._open != "reasoning":
            fields = {"content": [], "summary": [], "encrypted_content": f"{self.id}-0"}
            events = self._begin("reasoning", "rs", **fields)
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._at("response.content_part.added", content_index=0, part=part))
            self._item["content"] = [{**part}]
        self._pieces.append(text)
        return [*events, self._at("response.reasoning_text.delta", content_index=0, delta=text)]

    def _text(self, text: str) -> list[Json]:
        events = []
        if self._open != "message":
            fields = {"role": "assistant", "phase": "final_answer", "content": []}
            events = self._begin("message", "msg", **fields)
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
            events.append(self._at("response.content_part.added", content_index=0, part=part))
            self._item["content"] = [{**part}]
        self._pieces.append(text)
        logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        told = self._at(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )
        return [*events, told]

    def _call(self, call: Json) -> list[Json]:
        events = []
        if "id" in call:
            events = self._begin_call(call["id"], call["function"]["name"])
        piece = call["function"]["arguments"]
        if not piece:
            return events
        self._arguments.append(piece)
        if self._open == "custom_tool_call":
            return [*events, *self._tell_input(self._raw.push(piece))]
        self._pieces.append(piece)
        return [*events, self._at("response.function_call_arguments.delta", delta=piece)]

    def _begin_call(self, call_id: str, name: str) -> list[Json]:
        if self._open == "message":
            self._item["phase"] = "commentary"
        self._arguments = []
        if name in self._table.custom:
            self._raw = RawInput()
            fields = {"call_id": call_id, "name": name, "input": ""}
            return self._begin("custom_tool_call", "ctc", **fields)
        fields = {"call_id": call_id, "name": name}
        if name in self._table.namespaces:
            fields["namespace"], fields["name"] = self._table.namespaces[name]
        return self._begin("function_call", "fc", **fields, arguments="")

    def _tell_input(self, text: str) -> list[Json]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._at("response.custom_tool_call_input.delta", delta=text)]

    @property
    def _item(self) -> Json:
        return self._output[-1]

    def _begin(self, kind: str, prefix: str, **fields: Any) -> list[Json]:
        events = self._end("completed")
        self._open = kind
        item_id = f"{prefix}_{self.id.removeprefix('resp_')}_{len(self._output)}"
        self._output.append({"type": kind, "id": item_id, "status": "in_progress", **fields})
        # A copy: the item is filled in when it ends, and events may be encoded later.
        added = self._event(
            "response.output_item.added",
            output_index=len(self._output) - 1,
            item={**self._item},
        )
        return [*events, added]

    def _end(self, status: str) -> list[Json]:
        """Closes the open item."""
        if self._open is None:
            return []
        item, kind, self._open = self._item, self._open, None
        item["status"] = status
        events = []
        if kind in ("reasoning", "message"):
            part = item["content"][0]
            part["text"] = self._told()
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            done = {"content_index": 0, "text": part["text"]}
            if kind == "message":
                part["logprobs"] = done["logprobs"] = self._logprobs
                self._logprobs, self._unsent_logprobs = [], []
            events.append(self._at(f"response.{name}.done", **done))
            events.append(self._at("response.content_part.done", content_index=0, part={**part}))
        elif kind == "custom_tool_call":
            events += self._tell_input(self._raw.finish("".join(self._arguments)))
            item["input"] = self._told()
            events.append(self._at("response.custom_tool_call_input.done", input=item["input"]))
        else:
            item["arguments"] = self._told()
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._at("response.function_call_arguments.done", **done))
        index = len(self._output) - 1
        events.append(self._event("response.output_item.done", output_index=index, item={**item}))
        return events

    def _told(self) -> str:
        text, self._pieces = "".join(self._pieces), []
        return text

    # The response

    def _finish(self, finish_reason: str) -> list[Json]:
        cut = finish_reason == "length"
        events = self._end("incomplete" if cut else "completed")
        calls = [i for i in self._output if i["type"] in ("function_call", "custom_tool_call")]
        for item, arguments in zip(calls, final_arguments(self.choice), strict=True):
            if "arguments" in item:
                item["arguments"] = arguments
        status = "incomplete" if cut else "completed"
        self._final = self._response(status)
        output = [msgspec.Raw(msgspec.json.encode(item)) for item in self._output]
        self._keep(self._final, output)
        return [*events, self._event(f"response.{status}", response=self._final)]

    def _response(self, status: str) -> Json:
        done = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": int(time.time()) if done else None,
            "error": None,
            "incomplete_details": reason,
            "output": [{**item} for item in self._output],
            "usage": self._usage() if done else None,
            **self._echo,
        }

    def _usage(self) -> Json:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_cache_hit_tokens"],
                "cache_write_tokens": 0,
                **self.cache_details(),
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _at(self, kind: str, **fields: Any) -> Json:
        """An event about the last item."""
        index = len(self._output) - 1
        return self._event(kind, item_id=self._item["id"], output_index=index, **fields)
