"""The Messages format: jobs from its bodies, its events and responses from a chat answer's pieces.

Owns: the shape of its answers and streams, its limit of an answer's length, model names.
Knows nothing of: blocks of a request (`messages_read`), sockets, the engine's thread.
"""

import re
import secrets
from dataclasses import replace

import msgspec

from deepdraft.errors import UnknownModel
from deepdraft.server import chat, sampling
from deepdraft.server import messages_schema as schema
from deepdraft.server.dialect import AsChat, DialectJob, errors_in_terms_of, final_arguments
from deepdraft.server.job import Json
from deepdraft.server.messages_read import read_arguments, read_messages
from deepdraft.server.sampling import ModelView
from deepdraft.server.stream import Wire
from deepdraft.server.wire_errors import messages_error_body

_FIELDS = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
_WORDS = {
    "tool_call_id": "tool_use_id",
    "tool_calls": "tool_use",
    "tool message": "tool_result block",
}
_CONTEXT_MARK = re.compile(r"\[[^\]]*\]\Z")


def resolve_model(name: str | None, view: ModelView) -> str:
    """The served name that a Messages request means.

    Names of Anthropic's own models mean the served one: clients use them for side jobs that cannot
    be configured. A mark like `[1m]` at the end is no part of the name. Raises UnknownModel.
    """
    if name is None or name in view.names:
        return name or view.names[0]
    bare = _CONTEXT_MARK.sub("", name)
    if bare in view.names:
        return bare
    if bare.startswith("claude"):
        return view.names[0]
    served = ", ".join(view.names)
    raise UnknownModel(f"no model {name!r} is served here; served: {served}", param="model")


def messages_job(
    body: schema.MessagesRequest, name: str, model: ModelView, ignored: tuple[str, ...] = ()
) -> "MessagesJob":
    """Checks a Messages body and makes its engine request.

    `max_tokens` is an upper bound, cut to the room that the prompt leaves. Raises RequestError or
    PromptTooLong.
    """
    wanted = body.max_tokens
    sampling.check_range(wanted, "max_tokens", 1, float("inf"), "at least 1")
    read = read_messages(body)
    with errors_in_terms_of(read, _FIELDS, _WORDS):
        job = chat.chat_job(read.chat, name, model, ignored, f"msg_{secrets.token_hex(12)}")
    room = model.max_tokens - job.num_prompt
    if wanted is not None:
        job.requests = [replace(r, max_new_tokens=min(wanted, room)) for r in job.requests]
    limit = job.requests[0].max_new_tokens
    return MessagesJob(job, read, window=limit == room and (wanted is None or wanted > room))


def count_tokens(body: schema.MessagesRequest, model: ModelView) -> int:
    """Tokens of the prompt that this body would be answered from. Raises RequestError."""
    read = read_messages(body)
    with errors_in_terms_of(read, _FIELDS, _WORDS):
        return chat.num_prompt_tokens(read.chat, model)


class MessagesWire(Wire):
    """Named events; no end mark."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    done = b""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def frame(self, chunk: Json) -> bytes:
        """One event as bytes."""
        data = msgspec.json.encode(chunk)
        return b"event: " + chunk["type"].encode() + b"\ndata: " + data + b"\n\n"

    def error(self, error: BaseException) -> bytes:
        """An error after the stream has begun."""
        return self.frame(messages_error_body(error, self._request_id))


class MessagesJob(DialectJob):
    """A Messages request."""

    def __init__(self, job: chat.ChatJob, read: AsChat, *, window: bool) -> None:
        """`window`: the answer's length is limited by the context alone."""
        super().__init__(job, read.ignored)
        self._window = window
        self._blocks: list[Json] = []
        self._pieces: list[str] = []
        """Text of the open block; joined when it ends, as a long answer has many."""
        self._open = ""
        self._stop_reason: str | None = None

    def wire(self) -> Wire:
        """How its stream is framed."""
        return MessagesWire(self.id)

    def tell(self, part: Json) -> list[Json]:
        """The events for one choice object of a chat stream."""
        delta, events = part["delta"], []
        if "role" in delta:
            start = {**self._message(), "stop_sequence": None, "usage": self._usage(0, 0)}
            events.append({"type": "message_start", "message": start})
            if delta["reasoning_content"] is not None:
                events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if delta.get("reasoning_content"):
            events += self._text("thinking", delta["reasoning_content"])
        if delta.get("content"):
            events += self._text("text", delta["content"])
        for call in delta.get("tool_calls", ()):
            events += self._call(call)
        if part["finish_reason"] is not None:
            events += self._end()
            self._stop_reason = self._reason(part["finish_reason"])
            ending = {"stop_reason": self._stop_reason, "stop_sequence": self.choice.matched_stop}
            events.append({"type": "message_delta", "delta": ending, "usage": self._usage()})
            events.append({"type": "message_stop"})
        return events

    def _text(self, kind: str, text: str) -> list[Json]:
        events = []
        if self._open != kind:
            block: Json = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            events = self._begin(block)
        self._pieces.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: Json) -> list[Json]:
        events = []
        if "id" in call:
            name = call["function"]["name"]
            events = self._begin({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
        piece = call["function"]["arguments"]
        if piece:
            events.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
        return events

    def _begin(self, block: Json) -> list[Json]:
        events = self._end()
        self._open = block["type"]
        self._blocks.append(block)
        index = len(self._blocks) - 1
        # A copy: the block is filled in when it ends, and events may be encoded later.
        events.append({"type": "content_block_start", "index": index, "content_block": {**block}})
        if index == 0:
            events.append({"type": "ping"})
        return events

    def _end(self) -> list[Json]:
        if not self._open:
            return []
        events = []
        if self._open in ("thinking", "text"):
            self._blocks[-1][self._open], self._pieces = "".join(self._pieces), []
        if self._open == "thinking":
            self._blocks[-1]["signature"] = self.id
            events.append(self._delta({"type": "signature_delta", "signature": self.id}))
        self._open = ""
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _reason(self, finish_reason: str) -> str:
        if self.choice.matched_stop is not None:
            return "stop_sequence"
        if finish_reason == "length":
            return "model_context_window_exceeded" if self._window else "max_tokens"
        return "tool_use" if finish_reason == "tool_calls" else "end_turn"

    def _usage(self, num_tokens: int | None = None, num_thinking: int | None = None) -> Json:
        """Token counts; those of the answer so far where none are given."""
        usage = self.usage()
        if num_tokens is None:
            num_tokens = usage["completion_tokens"]
        if num_thinking is None:
            num_thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_cache_miss_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage["prompt_cache_hit_tokens"],
            **self.cache_details(),
            "output_tokens": num_tokens,
            "output_tokens_details": {"thinking_tokens": num_thinking},
            "service_tier": "standard",
        }

    def _message(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": [],
            "stop_reason": self._stop_reason,
            "stop_sequence": self.choice.matched_stop,
            "usage": self._usage(),
        }

    def response(self) -> Json:
        """The whole response: the blocks that a stream would have told."""
        arguments = iter(final_arguments(self.choice))
        content = []
        for block in self._blocks:
            if block["type"] == "tool_use":
                # As it was written: numbers of any size pass.
                written = read_arguments(next(arguments)).encode()
                block = {**block, "input": msgspec.Raw(written)}
            content.append(block)
        return {**self._message(), "content": content}
