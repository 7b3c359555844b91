"""Turns of the families before V4 (docs/prompt-format.md, section Older families).

Owns: what stands between the texts of a conversation. The forms are those of the published chat
templates and, for V3.2, of its published encoder; no template of a checkpoint is executed.
Knows nothing of: token ids, requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from deepdraft.errors import RequestError
from deepdraft.text.control import (
    ASSISTANT,
    BOS,
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    EOS,
    EOT,
    OUTPUT_BEGIN,
    OUTPUT_END,
    OUTPUTS_BEGIN,
    OUTPUTS_END,
    THINK_END,
    THINK_START,
    USER,
    Segment,
)
from deepdraft.text.conversation import TRAITS, Conversation, Family, Message, Tool, ToolCall

_TURNS = (BOS, EOS, USER, ASSISTANT)
_THINKING = (THINK_START, THINK_END)
_CHAT_TOKENS: dict[Family, tuple[str, ...]] = {
    "v3.2": (*_TURNS, *_THINKING, DSML),
    "v3.1": (*_TURNS, *_THINKING),
    "r1": (*_TURNS, *_THINKING),
    "v3": _TURNS,
    "v2": (BOS, EOS),
    "coder": (BOS, EOT),
}


def chat_tokens(family: Family) -> tuple[str, ...]:
    """The control tokens without which no chat of this family can be written."""
    return _CHAT_TOKENS[family]


def render(
    conversation: Conversation, texts: Sequence[str], tools: Sequence[Tool], family: Family
) -> list[Segment]:
    """The prompt's segments. `texts`: of each message; `tools`: those that are offered.

    Raises RequestError for what the family cannot express, ValueError or TypeError for tools and
    arguments that JSON cannot hold.
    """
    _check(conversation, tools, family)
    turns = list(zip(conversation.messages, texts, strict=True))
    if family == "v2":
        written = _plain_turns(turns)
    elif family == "coder":
        written = _coder_turns(turns)
    elif family == "v3.2":
        written = _v32_turns(conversation, turns, tools)
    else:
        written = _marked_turns(conversation, turns, tools, family)
    segments: list[Segment] = [(BOS, True)]
    for text, control in written:
        if not control and not segments[-1][1]:
            # Text between control tokens is encoded as one.
            segments[-1] = (segments[-1][0] + text, False)
        elif text:
            segments.append((text, control))
    return segments


def _check(conversation: Conversation, tools: Sequence[Tool], family: Family) -> None:
    traits = TRAITS[family]
    calls = any(m.tool_calls or m.role == "tool" for m in conversation.messages)
    if traits.calls is None and (tools or calls):
        raise RequestError(
            "this model's prompt format has no tools; leave tools and calls out", param="tools"
        )
    if conversation.task is not None:
        raise RequestError("this model's prompt format has no tasks", param="task")
    for index, message in enumerate(conversation.messages):
        if message.role == "latest_reminder":
            raise RequestError(
                "this model's prompt format has no latest_reminder; use a user message",
                param=f"messages[{index}].role",
            )


Turns = list[tuple[Message, str]]


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _open_end(turns: Turns) -> bool:
    """The last message is an answer to be continued."""
    return turns[-1][0].role == "assistant" and turns[-1][0].prefix


# ---- V2, V2-Lite, Coder-V2, LLM: words, no control tokens between turns -------------------------


def _plain_turns(turns: Turns) -> Iterator[Segment]:
    for message, text in turns:
        if _is_system(message):
            yield f"{text}\n\n", False
        elif message.role == "user":
            yield f"User: {text}\n\n", False
        else:
            yield f"Assistant: {text}", False
            if not message.prefix:
                yield EOS, True
    if not _open_end(turns):
        # A blank behind the colon would not be the token that answers begin with.
        yield "Assistant:", False


# ---- Coder -------------------------------------------------------------------------------------

_CODER_SYSTEM = (
    "You are an AI programming assistant, utilizing the Deepseek Coder model, developed by "
    "Deepseek Company, and you only answer questions related to computer science. For politically "
    "sensitive questions, security and privacy issues, and other non-computer science questions, "
    "you will refuse to answer\n"
)
"""The published default; the model was trained with it."""


def _coder_turns(turns: Turns) -> Iterator[Segment]:
    if not any(_is_system(message) for message, _ in turns):
        yield _CODER_SYSTEM, False
    for message, text in turns:
        if _is_system(message):
            yield text, False
        elif message.role == "user":
            yield f"### Instruction:\n{text}\n", False
        elif message.prefix:
            yield f"### Response:\n{text}", False
        else:
            yield f"### Response:\n{text}\n", False
            yield EOT, True
            yield "\n", False
    if not _open_end(turns):
        yield "### Response:\n", False


# ---- V3, R1, V3.1 ------------------------------------------------------------------------------


def _marked_turns(
    conversation: Conversation, turns: Turns, tools: Sequence[Tool], family: Family
) -> Iterator[Segment]:
    yield "\n\n".join(text for message, text in turns if _is_system(message)), False
    if tools:
        yield from _marked_tools(tools, named=family == "v3.1")
    opened = True  # an assistant header is due; not behind results, which V3.x answers directly
    results = 0
    rest = [turn for turn in turns if not _is_system(turn[0])]
    for index, (message, text) in enumerate(rest):
        if message.role == "tool":
            yield from _output(text, first=results == 0, grouped=family != "v3.1")
            results, opened = results + 1, False
            continue
        if results and family != "v3.1":
            yield OUTPUTS_END, True
        results = 0
        if message.role == "user":
            yield USER, True
            yield text, False
            opened = True
            continue
        continued = message.prefix and index == len(rest) - 1
        thinks = continued and conversation.thinking
        if opened:
            yield ASSISTANT, True
            yield from _thinking_mark(family, thinks, message.reasoning, ended=bool(text))
        yield text if continued else text.split(THINK_END)[-1], False
        if message.tool_calls:
            yield from _marked_calls(message.tool_calls, family)
        if not continued:
            yield EOS, True
        opened = True
    if results and family != "v3.1":
        yield OUTPUTS_END, True
    if not _open_end(turns) and opened:
        yield ASSISTANT, True
        if family == "v3.1":
            yield (THINK_START if conversation.thinking else THINK_END), True
        elif family == "r1":
            yield from ((THINK_START, True), ("\n", False))


def _thinking_mark(
    family: Family, thinks: bool, reasoning: str | None, *, ended: bool
) -> Iterator[Segment]:
    """What follows the header of an answer that stands in the prompt: reasoning is kept only where
    the answer is to be continued (`thinks`)."""
    if not thinks:
        if family == "v3.1":
            yield THINK_END, True
        return
    gap = "\n" if family == "r1" else ""
    yield from ((THINK_START, True), (gap + (reasoning or ""), False))
    if ended:
        yield from ((gap, False), (THINK_END, True), (gap * 2, False))


def _output(text: str, *, first: bool, grouped: bool) -> Iterator[Segment]:
    if grouped:
        yield (OUTPUTS_BEGIN, True) if first else ("\n", False)
    yield OUTPUT_BEGIN, True
    yield text, False
    yield OUTPUT_END, True


def _marked_calls(calls: Sequence[ToolCall], family: Family) -> Iterator[Segment]:
    yield CALLS_BEGIN, True
    for number, call in enumerate(calls):
        arguments = call.arguments if call.arguments.strip() else "{}"
        if family == "v3.1":
            parts = [(call.name, False), (CALL_SEP, True), (arguments, False)]
        else:
            if number:
                yield "\n", False
            fenced = f"{call.name}\n```json\n{arguments}\n```"
            parts = [("function", False), (CALL_SEP, True), (fenced, False)]
        yield from ((CALL_BEGIN, True), *parts, (CALL_END, True))
    yield CALLS_END, True


def _marked_tools(tools: Sequence[Tool], *, named: bool) -> Iterator[Segment]:
    """The section that V3.1 describes tools with; V3 and R1 were published without one, and get the
    same with the form of their calls."""
    lines = ["\n\n## Tools\nYou have access to the following tools:\n\n"]
    for tool in tools:
        parameters = _json(dict(tool.parameters) if tool.parameters is not None else {})
        lines.append(
            f"### {tool.name}\nDescription: {tool.description or ''}\n\nParameters: {parameters}"
            "\n\n"
        )
    yield "".join(lines) + "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n", False
    yield from ((CALLS_BEGIN, True), (CALL_BEGIN, True))
    if named:
        yield from (("tool_call_name", False), (CALL_SEP, True), ("tool_call_arguments", False))
    else:
        yield from (("function", False), (CALL_SEP, True))
        yield "tool_call_name\n```json\ntool_call_arguments\n```", False
    yield from ((CALL_END, True), ("{additional_tool_calls}", False), (CALLS_END, True))
    chain = "directly without separators or spaces" if named else "with a newline between them"
    yield (
        "\n\nWhere:\n- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
        f"Schema\n- For multiple tool calls, chain them {chain}",
        False,
    )


# ---- V3.2 --------------------------------------------------------------------------------------


def _v32_turns(
    conversation: Conversation, turns: Turns, tools: Sequence[Tool]
) -> Iterator[Segment]:
    if (tools or _schema(conversation)) and not (turns and _is_system(turns[0][0])):
        turns = [(Message(role="system", content=""), ""), *turns]
    last_user = max((i for i, (m, _) in enumerate(turns) if m.role == "user"), default=-1)
    results = 0
    for index, (message, text) in enumerate(turns):
        current = conversation.thinking and index >= last_user
        mark = (THINK_START if current else THINK_END, True)
        ends = index == len(turns) - 1 or turns[index + 1][0].role != "tool"
        if _is_system(message):
            yield text, False
            if index == 0:
                yield from _v32_tools(tools)
                yield _schema(conversation), False
        elif message.role == "user":
            yield from ((USER, True), (text, False), (ASSISTANT, True), mark)
        elif message.role == "tool":
            yield (
                ("" if results else "\n\n<function_results>") + f"\n<result>{text}</result>",
                False,
            )
            results = 0 if ends else results + 1
            if ends:
                yield from (("\n</function_results>\n\n", False), mark)
        else:
            continued = message.prefix and index == len(turns) - 1
            if current:
                yield message.reasoning or "", False
                if text or not continued:
                    yield THINK_END, True
            yield text, False
            if message.tool_calls:
                yield from _v32_calls(message.tool_calls)
            if not continued:
                yield EOS, True


def _schema(conversation: Conversation) -> str:
    form = conversation.response_format
    if form.kind != "json_schema":
        return ""
    return (
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        + _json(form.schema)
    )


def _tag(text: str, *, closing: bool = False) -> tuple[Segment, ...]:
    return ("</" if closing else "<", False), (DSML, True), (text, False)


def _v32_calls(calls: Sequence[ToolCall]) -> Iterator[Segment]:
    yield "\n\n", False
    yield from _tag("function_calls>\n")
    for call in calls:
        yield from _tag(f'invoke name="{call.name}">\n')
        for key, value in _arguments(call).items():
            string = "true" if isinstance(value, str) else "false"
            shown = value if isinstance(value, str) else _json(value)
            yield from _tag(f'parameter name="{key}" string="{string}">{shown}')
            yield from _tag("parameter>\n", closing=True)
        yield from _tag("invoke>\n", closing=True)
    yield from _tag("function_calls>", closing=True)


def _arguments(call: ToolCall) -> dict[str, object]:
    if not call.arguments.strip():
        return {}
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        raise RequestError(
            f"the arguments of the call {call.id!r} are not JSON: {error}", param="messages"
        ) from error
    if not isinstance(arguments, dict):
        raise RequestError(
            f"the arguments of the call {call.id!r} are no JSON object", param="messages"
        )
    return arguments


def _v32_tools(tools: Sequence[Tool]) -> Iterator[Segment]:
    if not tools:
        return
    yield (
        "\n\n## Tools\n"
        "You have access to a set of tools you can use to answer the user's question.\n"
        'You can invoke functions by writing a "',
        False,
    )
    yield from _tag(
        'function_calls>" block like the following as part of your reply to the user:\n'
    )
    yield from _tag("function_calls>\n")
    yield from _tag('invoke name="$FUNCTION_NAME">\n')
    yield from _tag('parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE')
    yield from _tag("parameter>\n", closing=True)
    yield "...\n", False
    yield from _tag("invoke>\n", closing=True)
    yield from _tag('invoke name="$FUNCTION_NAME2">\n...\n')
    yield from _tag("invoke>\n", closing=True)
    yield from _tag("function_calls>\n", closing=True)
    yield (
        "String and scalar parameters should be specified as is without any escaping or quotes, "
        'while lists and objects should use JSON format. The "string" attribute should be set to '
        '"true" for string type parameters and "false" for other types (numbers, booleans, arrays, '
        "objects).\nIf the thinking_mode is enabled, then after function results you should "
        "strongly consider outputting a thinking block. Here is an example:\n",
        False,
    )
    yield from _tag("function_calls>\n...\n")
    yield from _tag("function_calls>\n", closing=True)
    yield "<function_results>\n...\n</function_results>\n", False
    yield from ((THINK_START, True), ("...thinking about results", False), (THINK_END, True))
    listed = "\n".join(
        _json(
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": dict(tool.parameters) if tool.parameters is not None else {},
            }
        )
        for tool in tools
    )
    yield (
        "\nHere are the functions available in JSONSchema format:\n"
        f"<functions>\n{listed}\n</functions>\n",
        False,
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
