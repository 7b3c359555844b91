"""From a Messages body to the chat request that asks for the same.

Owns: what each block, tool and setting of the Messages API means.
Knows nothing of: prompts, sampling, the shape of answers.
"""

import json
from collections.abc import Mapping

from deepdraft.errors import RequestError
from deepdraft.server import messages_schema as wire
from deepdraft.server import schema
from deepdraft.server.dialect import AsChat

# Claude Code puts this line in front of its system prompt for its own service. It changes from
# request to request, so that keeping it would throw every cached prefix away.
_BILLING = "x-anthropic-billing-header:"

Part = schema.TextPart | schema.ImageUrlPart | schema.RefusalPart


def read_messages(body: wire.MessagesRequest) -> AsChat:
    """The chat request of a Messages body; `max_tokens` stays with the caller.

    Raises RequestError that names the block.
    """
    read = AsChat(chat=schema.ChatRequest(messages=[]))
    _read_system(body, read)
    for index, message in enumerate(body.messages):
        _read_message(message, f"messages[{index}]", read)
    if not body.messages:
        raise RequestError("messages is empty: send at least one message.", param="messages")
    chat = read.chat
    chat.stream = body.stream
    chat.stop = body.stop_sequences
    for name in ("temperature", "top_p", "top_k", "seed"):
        setattr(chat, name, getattr(body, name))
    _read_tools(body, read)
    _read_thinking(body, read)
    form = body.output_config.format if body.output_config else None
    form = form or body.output_format
    if form is not None:
        chat.response_format = schema.JsonSchemaFormat(
            json_schema=schema.JsonSchemaSpec(schema=form.schema)
        )
    return read


def _add(read: AsChat, place: str, message: schema.ChatMessage) -> None:
    read.chat.messages.append(message)
    read.places.append(place)


def _read_system(body: wire.MessagesRequest, read: AsChat) -> None:
    if body.system is None:
        return
    blocks = [wire.TextBlock(body.system)] if isinstance(body.system, str) else body.system
    kept = [b.text for b in blocks if not b.text.startswith(_BILLING)]
    if len(kept) < len(blocks):
        read.ignore("system.x-anthropic-billing-header")
    text = "\n\n".join(kept)
    _add(read, "system", schema.ChatMessage(role="system", content=text))


def _read_message(message: wire.InputMessage, where: str, read: AsChat) -> None:
    content = message.content
    if isinstance(content, str):
        _add(read, where, schema.ChatMessage(role=message.role, content=content))
    elif message.role == "assistant":
        _add(read, where, _assistant(content, where, read))
    elif not content:
        raise RequestError(
            f"{where}.content is empty: send at least one block.", param=f"{where}.content"
        )
    else:
        _read_turn(message.role, content, where, read)


def _assistant(blocks: list[wire.Block], where: str, read: AsChat) -> schema.ChatMessage:
    """An earlier answer; an empty one is a client's replay of an empty answer."""
    thinking: list[str] = []
    parts: list[Part] = []
    calls: list[schema.SentToolCall] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        match block:
            case wire.ThinkingBlock():
                thinking.append(block.thinking)
            case wire.RedactedThinkingBlock():
                read.ignore("messages.content.redacted_thinking")
            case wire.TextBlock():
                parts.append(schema.TextPart(block.text))
            case wire.ToolUseBlock():
                calls.append(_call(block, place))
            case _:
                raise _misplaced(block, "assistant", place)
    return schema.ChatMessage(
        role="assistant",
        content=list(parts) or None,
        reasoning_content="\n\n".join(thinking) if thinking else None,
        tool_calls=calls or None,
    )


def _call(block: wire.ToolUseBlock, place: str) -> schema.SentToolCall:
    arguments = bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise RequestError(f"{place}.input must be an object.", param=f"{place}.input")
    return schema.SentToolCall(
        id=block.id, function=schema.CalledFunction(name=block.name, arguments=arguments)
    )


def _read_turn(role: str, blocks: list[wire.Block], where: str, read: AsChat) -> None:
    """A user or system message. Results come first: they answer the turn before."""
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if isinstance(block, wire.ToolResultBlock) and role == "user":
            _add(read, place, _result(block, place, read))
        elif isinstance(block, wire.TextBlock | wire.ImageBlock | wire.DocumentBlock):
            parts += _parts(block, place)
        else:
            raise _misplaced(block, role, place)
    if parts:
        message = schema.ChatMessage(role="user" if role == "user" else "system", content=parts)
        _add(read, where, message)


def _result(block: wire.ToolResultBlock, place: str, read: AsChat) -> schema.ChatMessage:
    if block.is_error:
        read.ignore("messages.content.is_error")
    content: str | list[Part] = ""
    if isinstance(block.content, list):
        content = []
        for number, inner in enumerate(block.content):
            content += _parts(inner, f"{place}.content[{number}]")
    elif block.content is not None:
        content = block.content
    return schema.ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)


def _parts(block: wire.TextBlock | wire.ImageBlock | wire.DocumentBlock, place: str) -> list[Part]:
    if isinstance(block, wire.TextBlock):
        return [schema.TextPart(block.text)]
    if isinstance(block, wire.DocumentBlock):
        return _document(block, place)
    match block.source:
        case wire.Base64Source(media_type=kind, data=data):
            url = f"data:{kind};base64,{data}"
        case wire.UrlSource(url=url):
            pass
        case wire.FileSource():
            raise RequestError(
                f"{place}.source: uploaded files are not served; send the image itself.",
                param=f"{place}.source",
            )
    return [schema.ImageUrlPart(schema.ImageUrl(url))]


def _document(block: wire.DocumentBlock, place: str) -> list[Part]:
    if block.citations is not None and block.citations.enabled:
        raise RequestError(
            f"{place}.citations is refused: answers have no citations.", param=f"{place}.citations"
        )
    texts = [text for text in (block.title, block.context) if text]
    match block.source:
        case wire.TextSource(data=data):
            texts.append(data)
        case wire.ContentSource(content=str() as text):
            texts.append(text)
        case wire.ContentSource(content=list() as blocks):
            texts += [b.text for b in blocks]
        case _:
            raise RequestError(
                f"{place}.source: only documents given as text can be read.",
                param=f"{place}.source",
            )
    return [schema.TextPart(text) for text in texts]


def _misplaced(block: wire.Block, role: str, place: str) -> RequestError:
    kind = block.__struct_config__.tag
    return RequestError(
        f"{place}: a block of type {kind} cannot stand in a message of role {role}.", param=place
    )


def _read_tools(body: wire.MessagesRequest, read: AsChat) -> None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise RequestError(
                f"{place}.type {tool.type!r} is refused: tools that a service provides are not "
                "served. Describe the tool by an input_schema, or leave it out.",
                param=f"{place}.type",
            )
        if tool.input_schema is None:
            raise RequestError(
                f"{place} has no input_schema: describe its arguments.",
                param=f"{place}.input_schema",
            )
        tools.append(
            schema.ToolSpec(
                schema.FunctionSpec(
                    # The official rendering writes an empty description where there is none.
                    tool.name,
                    tool.description or "",
                    tool.input_schema,
                    tool.strict,
                )
            )
        )
        read.tool_places.append(place)
    read.chat.tools = tools or None
    match body.tool_choice:
        case wire.NamedChoice(name=name):
            read.chat.tool_choice = schema.NamedToolChoice(schema.FunctionName(name))
        case wire.AnyChoice():
            read.chat.tool_choice = "required"
        case wire.NoChoice():
            read.chat.tool_choice = "none"
        case _:
            read.chat.tool_choice = "auto"
    if getattr(body.tool_choice, "disable_parallel_tool_use", None):
        read.chat.parallel_tool_calls = False


def _read_thinking(body: wire.MessagesRequest, read: AsChat) -> None:
    chat = read.chat
    chat.thinking = body.thinking
    chat.reasoning_effort = body.output_config.effort if body.output_config else None
    if isinstance(body.thinking, Mapping):
        if body.thinking.get("budget_tokens") is not None:
            read.ignore("thinking.budget_tokens")
        if body.thinking.get("display") not in (None, "summarized"):
            read.ignore("thinking.display")


def read_arguments(text: str) -> str:
    """A JSON object from the arguments of a call: all of it, or the parameters that are complete.

    The text may have been cut anywhere, as an answer is that ran into its limit.
    """
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    try:
        if isinstance(decoder.decode(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    pairs: list[str] = []
    at = 1 if text.startswith("{") else len(text)
    try:
        while at < len(text):
            _, key_end = decoder.raw_decode(text, at)
            value_at = text.index(":", key_end) + 1
            value_at += len(text[value_at:]) - len(text[value_at:].lstrip())
            _, end = decoder.raw_decode(text, value_at)
            if end == len(text) and text[-1] not in '"]}':
                break  # a number or a word may go on
            pairs.append(text[at:end])
            at = text.index(",", end) + 1
            at += len(text[at:]) - len(text[at:].lstrip())
    except (ValueError, RecursionError):
        pass
    return "{" + ", ".join(pairs) + "}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
