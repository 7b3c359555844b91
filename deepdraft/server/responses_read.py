"""From a Responses body to the chat request that asks for the same.

Owns: what each input item and setting of the Responses API means.
Knows nothing of: prompts, sampling, the shape of answers.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from deepdraft.errors import RequestError
from deepdraft.server import responses_schema as wire
from deepdraft.server import schema
from deepdraft.server.dialect import AsChat
from deepdraft.server.responses_tools import INPUT, ToolTable, decode_at, read_tools

ChatPart = schema.TextPart | schema.ImageUrlPart | schema.RefusalPart


def read_responses(
    body: wire.ResponsesRequest, earlier: Sequence[msgspec.Raw] = ()
) -> tuple[AsChat, ToolTable, list[msgspec.Raw]]:
    """The chat request of a Responses body, its tools, and all its input items.

    `earlier`: the items of the conversation that the body goes on with. Raises RequestError that
    names the item.
    """
    read = AsChat(chat=schema.ChatRequest(messages=[]))
    if body.instructions:
        read.chat.messages.append(schema.ChatMessage(role="system", content=body.instructions))
        read.places.append("instructions")
    items = [*earlier, *_items(body)]
    if not items and not body.instructions:
        raise RequestError("input is empty: send a text or at least one item.", param="input")
    _read_settings(body, read)
    table = read_tools(body, read)
    turns = _Turns(read, table)
    for index, raw in enumerate(items):
        own = index - len(earlier)
        turns.add(raw, f"input[{own}]" if own >= 0 else f"previous_response[{index}]")
    turns.close()
    return read, table, items


def _items(body: wire.ResponsesRequest) -> list[msgspec.Raw]:
    if body.input is None:
        return []
    if isinstance(body.input, list):
        return body.input
    item = {"type": "message", "role": "user", "content": body.input}
    try:
        return [msgspec.Raw(msgspec.json.encode(item))]
    except UnicodeEncodeError as error:
        raise RequestError("input is not Unicode text.", param="input") from error


def _read_settings(body: wire.ResponsesRequest, read: AsChat) -> None:
    chat = read.chat
    chat.stream = body.stream
    chat.max_tokens = body.max_output_tokens
    for name in (
        "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty thinking "
        "parallel_tool_calls"
    ).split():
        setattr(chat, name, getattr(body, name))
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
        for name in ("summary", "generate_summary"):
            if getattr(body.reasoning, name) is not None:
                read.ignore(f"reasoning.{name}")
    include = set(body.include or ())
    if include - {wire.LOGPROBS, wire.REPLAY}:
        read.ignore("include")
    if wire.LOGPROBS in include or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    if body.text is not None:
        if body.text.verbosity is not None:
            read.ignore("text.verbosity")
        chat.response_format = _format(body.text.format)


def _format(
    form: wire.TextFormat | wire.JsonObjectFormat | wire.JsonSchemaFormat | None,
) -> schema.TextFormat | schema.JsonObjectFormat | schema.JsonSchemaFormat | None:
    if isinstance(form, wire.JsonObjectFormat):
        return schema.JsonObjectFormat()
    if isinstance(form, wire.JsonSchemaFormat):
        spec = schema.JsonSchemaSpec(form.schema, form.name, form.description, form.strict)
        return schema.JsonSchemaFormat(spec)
    return None


class _Kind(msgspec.Struct):
    type: str | None = None


class _Turns:
    """Gathers items into messages: reasoning, text and calls of one answer are one message."""

    def __init__(self, read: AsChat, table: ToolTable) -> None:
        self._read = read
        self._table = table
        self._open: schema.ChatMessage | None = None
        self._parts: list[ChatPart] = []
        self._calls: list[schema.SentToolCall] = []
        self._reasoning: list[str] = []

    def add(self, raw: msgspec.Raw, where: str) -> None:
        kind = decode_at(raw, _Kind, where).type or "message"
        if kind in wire.DROPPED_ITEMS:
            self._read.ignore(f"input.{kind}")
            return
        if kind not in wire.ITEMS:
            raise RequestError(
                f"{where}.type {kind!r} is refused: use one of {', '.join(wire.ITEMS)}.",
                param=f"{where}.type",
            )
        # What an earlier request said has been named in its own answer.
        new = self._read if where.startswith("input[") else None
        item = decode_at(raw, wire.ITEMS[kind], where, new)
        match item:
            case wire.MessageItem(role="assistant"):
                self._begin(where)
                self._parts += _parts(item.content, where)
            case wire.MessageItem():
                self._message(item, where)
            case wire.ReasoningItem():
                if self._parts or self._calls:
                    self.close()
                self._begin(where)
                self._reasoning += [part.text for part in item.content or ()]
            case wire.FunctionCallItem():
                self._begin(where)
                name = self._table.flat(item.name, item.namespace)
                self._calls.append(_call(item.call_id, name, item.arguments))
            case wire.CustomCallItem():
                self._begin(where)
                arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
                self._calls.append(_call(item.call_id, item.name, arguments))
            case wire.FunctionOutputItem():
                self._result(item, where)

    def _begin(self, where: str) -> None:
        if self._open is None:
            self._open = schema.ChatMessage(role="assistant")
            self._read.chat.messages.append(self._open)
            self._read.places.append(where)

    def close(self) -> None:
        """Ends the answer that is being gathered."""
        if self._open is not None:
            self._open.content = self._parts or None
            self._open.tool_calls = self._calls or None
            self._open.reasoning_content = "\n".join(self._reasoning) if self._reasoning else None
        self._open, self._parts, self._calls, self._reasoning = None, [], [], []

    def _message(self, item: wire.MessageItem, where: str) -> None:
        self.close()
        content = item.content
        shown: Any = content if isinstance(content, str) else _parts(content, where)
        self._read.chat.messages.append(schema.ChatMessage(role=item.role, content=shown))
        self._read.places.append(where)

    def _result(self, item: wire.FunctionOutputItem, where: str) -> None:
        self.close()
        output = item.output
        shown: Any = output if isinstance(output, str) else _parts(output, where)
        message = schema.ChatMessage(role="tool", content=shown, tool_call_id=item.call_id)
        self._read.chat.messages.append(message)
        self._read.places.append(where)


def _call(call_id: str, name: str, arguments: str) -> schema.SentToolCall:
    return schema.SentToolCall(
        id=call_id, function=schema.CalledFunction(name=name, arguments=arguments)
    )


def _parts(content: str | list[wire.Part], where: str) -> list[ChatPart]:
    if isinstance(content, str):
        return [schema.TextPart(content)]
    parts: list[ChatPart] = []
    for number, part in enumerate(content):
        if isinstance(part, wire.RefusalPart):
            parts.append(schema.RefusalPart(part.refusal))
        elif not isinstance(part, wire.ImagePart):
            parts.append(schema.TextPart(part.text))
        elif part.image_url is not None:
            parts.append(schema.ImageUrlPart(schema.ImageUrl(part.image_url, part.detail)))
        else:
            place = f"{where}.content[{number}]"
            raise RequestError(
                f"{place}: uploaded files are not served; send the image itself.", param=place
            )
    return parts
