"""Rules of a chat request that need no HTTP: messages, tools, formats.

Owns: the checks of a `Conversation` before it is rendered; docs/request-checks.md compares them
with the official service.
Knows nothing of: JSON bodies, models, tokenizers. Sampling ranges are checked with the wire format.
"""

import re
from collections.abc import Mapping
from typing import Literal

from deepdraft.errors import RequestError
from deepdraft.text.conversation import (
    ROLES,
    TASKS,
    Conversation,
    ImagePart,
    Message,
    ResponseFormat,
    Tool,
)

MAX_TOOL_NAME = 128
MAX_REGEX = 8192
# Two names with "::" between them: a function of a namespace, as the Responses API has it.
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+(::[a-zA-Z0-9_-]+)?\Z")
_NEEDS_CONTENT = frozenset({"system", "developer", "user", "latest_reminder"})


def check_conversation(
    conversation: Conversation,
    *,
    images: bool = False,
    missing_reasoning: Literal["fill", "reject"] = "fill",
) -> None:
    """Raise RequestError, with `param` naming the place, unless the conversation can be served.

    `images`: whether the model takes images. `missing_reasoning`: "reject" refuses a tool turn of
    the current round whose reasoning was not sent back, as the official service does; "fill"
    renders it with empty reasoning.
    """
    _check_messages(conversation.messages, images=images)
    _check_pairing(conversation.messages)
    _check_prefix(conversation)
    for index, tool in enumerate(conversation.tools):
        _check_tool(index, tool)
    _check_unique_names(conversation.tools)
    _check_tool_choice(conversation)
    _check_response_format(conversation.response_format)
    _check_effort(conversation)
    _check_task(conversation)
    if missing_reasoning == "reject" and conversation.thinking:
        _check_reasoning(conversation.messages)


def _check_messages(messages: tuple[Message, ...], *, images: bool) -> None:
    if not messages:
        raise RequestError("messages is empty: send at least one message.", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{where}.role is {message.role!r}: use one of {', '.join(sorted(ROLES))}.",
                param=f"{where}.role",
            )
        if message.content is None and message.role in _NEEDS_CONTENT:
            raise RequestError(
                f"{where} has no content: a {message.role} message needs some (it may be empty "
                "text).",
                param=f"{where}.content",
            )
        if message.tool_calls and message.role != "assistant":
            raise RequestError(
                f"{where}.tool_calls: only an assistant message can hold calls.",
                param=f"{where}.tool_calls",
            )
        _check_images(where, message, images=images)


def _check_images(where: str, message: Message, *, images: bool) -> None:
    if not isinstance(message.content, tuple):
        return
    for number, part in enumerate(message.content):
        if not isinstance(part, ImagePart):
            continue
        param = f"{where}.content[{number}]"
        if not images:
            raise RequestError(
                f"{param} is an image, and this model reads text only. Leave the image out.",
                param=param,
            )
        if message.role in ("assistant", "latest_reminder"):
            raise RequestError(
                f"{param}: an image cannot stand in a message of role {message.role}.", param=param
            )


def _check_pairing(messages: tuple[Message, ...]) -> None:
    """Each call is answered by one tool message, right after the assistant message."""
    index = 0
    while index < len(messages):
        message = messages[index]
        if message.role == "tool":
            raise RequestError(
                f"messages[{index}]: a tool message must answer a call of the assistant message "
                "before it.",
                param=f"messages[{index}].tool_call_id",
            )
        index += 1
        if message.tool_calls:
            index = _check_results(messages, index - 1)


def _check_results(messages: tuple[Message, ...], caller: int) -> int:
    """Check the results of the calls in messages[caller]; the index of the next message."""
    pending: set[str] = set()
    for number, call in enumerate(messages[caller].tool_calls):
        param = f"messages[{caller}].tool_calls[{number}]"
        if call.id in pending:
            raise RequestError(
                f"{param}.id is {call.id!r}, like another call of this message: call ids must "
                "differ.",
                param=f"{param}.id",
            )
        if not call.name:
            raise RequestError(f"{param} has no function name.", param=f"{param}.function.name")
        pending.add(call.id)
    answered: set[str] = set()
    index = caller + 1
    while index < len(messages) and messages[index].role == "tool" and pending - answered:
        call_id = messages[index].tool_call_id
        if call_id is None or call_id not in pending or call_id in answered:
            raise RequestError(
                f"messages[{index}].tool_call_id is {call_id!r}, which is no unanswered call of "
                f"messages[{caller}] (waiting for: {_listed(pending - answered)}).",
                param=f"messages[{index}].tool_call_id",
            )
        answered.add(call_id)
        index += 1
    if pending - answered:
        raise RequestError(
            f"messages[{caller}].tool_calls: no tool message right after it answers "
            f"{_listed(pending - answered)}. Send one result for each call.",
            param=f"messages[{caller}].tool_calls",
        )
    return index


def _listed(ids: set[str]) -> str:
    shown = sorted(ids)[:4]
    return ", ".join(map(repr, shown)) + (", ..." if len(ids) > len(shown) else "")


def _check_prefix(conversation: Conversation) -> None:
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages):
        if not message.prefix:
            continue
        param = f"messages[{index}].prefix"
        if index != last or message.role != "assistant":
            raise RequestError(
                f"{param}: only the last message can be continued, and only if its role is "
                "assistant.",
                param=param,
            )
        if conversation.tools or message.tool_calls:
            raise RequestError(
                f"{param}: a prefix cannot be combined with tools. Leave one of them out.",
                param=param,
            )


def _check_tool(index: int, tool: Tool) -> None:
    where = f"tools[{index}].function"
    if not _TOOL_NAME.match(tool.name):
        raise RequestError(
            f"{where}.name is {tool.name!r}: use letters, digits, '_' and '-' only.",
            param=f"{where}.name",
        )
    if len(tool.name) > MAX_TOOL_NAME:
        raise RequestError(
            f"{where}.name has {len(tool.name)} characters; at most {MAX_TOOL_NAME} are allowed.",
            param=f"{where}.name",
        )
    if tool.parameters is None:
        return
    if not isinstance(tool.parameters, Mapping):
        raise RequestError(
            f"{where}.parameters must be a JSON schema object.", param=f"{where}.parameters"
        )
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise RequestError(
            f"{where}.parameters.type is {kind!r}: the arguments of a function are an object.",
            param=f"{where}.parameters.type",
        )


def _check_unique_names(tools: tuple[Tool, ...]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(
                f"tools[{index}].function.name: {tool.name!r} is declared twice.",
                param=f"tools[{index}].function.name",
            )
        seen.add(tool.name)


def _check_tool_choice(conversation: Conversation) -> None:
    choice = conversation.tool_choice
    if choice.mode not in ("required", "function"):
        return
    if not conversation.tools:
        raise RequestError(
            "tool_choice asks for a call, but the request has no tools.", param="tool_choice"
        )
    if choice.mode == "function" and choice.name not in {t.name for t in conversation.tools}:
        raise RequestError(
            f"tool_choice names {choice.name!r}, which is not among the tools.", param="tool_choice"
        )


def _check_response_format(response_format: ResponseFormat) -> None:
    if response_format.kind == "json_schema" and not isinstance(
        response_format.schema, Mapping | bool
    ):
        raise RequestError(
            "response_format.json_schema.schema must be a JSON schema (an object).",
            param="response_format.json_schema.schema",
        )
    if response_format.kind == "regex":
        if not response_format.regex:
            raise RequestError(
                "response_format.regex must be a non-empty pattern.", param="response_format.regex"
            )
        if len(response_format.regex) > MAX_REGEX:
            raise RequestError(
                f"response_format.regex has {len(response_format.regex)} characters; at most "
                f"{MAX_REGEX} are allowed.",
                param="response_format.regex",
            )


def _check_effort(conversation: Conversation) -> None:
    effort = conversation.effort
    if isinstance(effort, int) and not 1 <= effort <= 100:
        raise RequestError(
            f"reasoning_effort is {effort}: a budget runs from 1 to 100.", param="reasoning_effort"
        )


def _check_task(conversation: Conversation) -> None:
    if conversation.task is None:
        return
    if conversation.task not in TASKS:
        raise RequestError(
            f"task is {conversation.task!r}: use one of {', '.join(sorted(TASKS))}.", param="task"
        )
    if conversation.messages[-1].role != "user":
        raise RequestError("task: the last message must come from the user.", param="task")
    if conversation.tool_choice.mode in ("required", "function"):
        raise RequestError("task cannot be combined with a forced call.", param="task")


def _check_reasoning(messages: tuple[Message, ...]) -> None:
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role == "user":
            return
        if message.role == "assistant" and message.tool_calls and message.reasoning is None:
            raise RequestError(
                f"messages[{index}]: the `reasoning_content` of a tool turn must be sent back "
                "while the model thinks.",
                param=f"messages[{index}].reasoning_content",
            )
