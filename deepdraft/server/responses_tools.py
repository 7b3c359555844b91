"""Tools of the Responses API as functions, and their calls on the way back.

Owns: flattening of namespaces, custom tools as functions of one text, `ToolTable`, `RawInput`.
Knows nothing of: messages, events.
"""

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe
import msgspec

from deepdraft.errors import RequestError
from deepdraft.server import responses_schema as wire
from deepdraft.server import schema
from deepdraft.server.dialect import AsChat
from deepdraft.server.nested import unknown_within

_INDEX = re.compile(r"\[\d+\]")
PATCH = "apply_patch"
NAMESPACE_MARK = "::"
INPUT = "input"
"""The one parameter of a custom tool."""


@dataclass(slots=True)
class ToolTable:
    """What the names that the model sees stand for."""

    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Flat name to namespace and local name."""

    def flat(self, name: str, namespace: str | None) -> str:
        """The name that the model sees."""
        return name if namespace is None else f"{namespace}{NAMESPACE_MARK}{name}"


def decode_at(raw: Any, kind: type[Any], where: str, read: AsChat | None = None) -> Any:
    """A nested object as a struct; `read` notes the keys that it has no place for.

    Raises RequestError with its path under `where`.
    """
    try:
        found = msgspec.json.decode(raw, type=kind)
        if read is not None:
            path = _INDEX.sub("", where)
            for name in unknown_within(msgspec.json.decode(raw), kind, path):
                read.ignore(name)
        return found
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        place = where + path.rstrip("`")
        message = f"{place}: {what[:1].lower()}{what[1:]}"
        raise RequestError(message, param=place) from error


class _Typed(msgspec.Struct):
    type: str


def read_tools(body: wire.ResponsesRequest, read: AsChat) -> ToolTable:
    """Fills in the chat request's tools and tool choice. Raises RequestError naming the tool."""
    table = ToolTable()
    tools: list[schema.ToolSpec] = []
    for index, raw in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        kind = decode_at(raw, _Typed, where).type
        if kind in wire.DROPPED_TOOLS:
            read.ignore(f"tools.{kind}")
            continue
        if kind not in wire.TOOLS:
            raise RequestError(
                f"{where}.type {kind!r} is refused: use one of {', '.join(wire.TOOLS)}.",
                param=f"{where}.type",
            )
        tool = decode_at(raw, wire.TOOLS[kind], where, read)
        if kind == "namespace":
            for local, spec in _namespaced(tool, where, read):
                table.namespaces[spec.function.name] = (tool.name, local)
                tools.append(spec)
                read.tool_places.append(where)
            continue
        if kind == "custom":
            table.custom.add(tool.name)
        tools.append(_custom(tool, where, read) if kind == "custom" else _function(tool))
        read.tool_places.append(where)
    read.chat.tools = tools or None
    _read_choice(body, read, table)
    return table


def _function(tool: wire.FunctionTool, name: str | None = None) -> schema.ToolSpec:
    # The official rendering writes an empty description where there is none.
    return schema.ToolSpec(
        schema.FunctionSpec(
            name or tool.name, tool.description or "", tool.parameters or {}, tool.strict
        )
    )


def _namespaced(
    tool: wire.NamespaceTool, where: str, read: AsChat
) -> list[tuple[str, schema.ToolSpec]]:
    found = []
    for index, raw in enumerate(tool.tools):
        place = f"{where}.tools[{index}]"
        kind = decode_at(raw, _Typed, place).type
        if kind != "function":
            raise RequestError(
                f"{place}.type {kind!r} is refused: a namespace holds functions only.",
                param=f"{place}.type",
            )
        inner = decode_at(raw, wire.FunctionTool, place, read)
        spec = _function(inner, f"{tool.name}{NAMESPACE_MARK}{inner.name}")
        texts = [text for text in (tool.description, inner.description) if text]
        spec.function.description = "\n".join(texts)
        found.append((inner.name, spec))
    return found


def _custom(tool: wire.CustomTool, where: str, read: AsChat) -> schema.ToolSpec:
    """A custom tool as a function of one text."""
    if tool.format is not None and tool.format.type == "grammar":
        if tool.name != PATCH:
            raise RequestError(
                f"{where}.format of type grammar is refused: the input of a custom tool is free "
                "text. Describe its form in the description.",
                param=f"{where}.format",
            )
        read.ignore("tools.format")
    if tool.name == PATCH:
        description, parameters = _patch_tool()
    else:
        description, parameters = tool.description or "", _TEXT_INPUT
    return schema.ToolSpec(schema.FunctionSpec(tool.name, description, parameters, None))


_TEXT_INPUT = {
    "type": "object",
    "additionalProperties": False,
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
}


@functools.cache
def _patch_tool() -> tuple[str, dict[str, Any]]:
    """Description and parameters that DeepSeek gives its models for Codex's patch tool."""
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "input": "",
        "tools": [{"type": "custom", "name": PATCH}],
    }
    request = recipe.ResponsesRequest(body).convert(recipe.ConversionOptions())
    tool = request.conversation.tools[0]
    return tool.description or "", tool.parameters


def _read_choice(body: wire.ResponsesRequest, read: AsChat, table: ToolTable) -> None:
    choice, chat = body.tool_choice, read.chat
    if not isinstance(choice, wire.ToolChoice):
        chat.tool_choice = choice or "auto"
    elif choice.type in ("function", "custom") and choice.name is not None:
        name = table.flat(choice.name, choice.namespace)
        chat.tool_choice = schema.NamedToolChoice(schema.FunctionName(name))
    elif choice.type == "allowed_tools":
        allowed = [_allowed_name(tool, table) for tool in choice.tools or ()]
        names = [t.function.name for t in chat.tools or ()]
        places = dict(zip(names, read.tool_places, strict=True))
        unknown = [name for name in allowed if name not in places]
        if unknown:
            raise RequestError(
                f"tool_choice.tools names {unknown[0]!r}, which is not among the tools.",
                param="tool_choice.tools",
            )
        chat.tools = [t for t in chat.tools or () if t.function.name in allowed] or None
        read.tool_places[:] = [places[t.function.name] for t in chat.tools or ()]
        chat.tool_choice = choice.mode
    else:
        raise RequestError(
            f"tool_choice of type {choice.type!r} is refused: name a function or a custom tool, or "
            "use auto, none, required or allowed_tools.",
            param="tool_choice",
        )


def _allowed_name(tool: dict[str, Any], table: ToolTable) -> str:
    name, namespace = tool.get("name"), tool.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise RequestError(
            "tool_choice.tools must hold objects with a name.", param="tool_choice.tools"
        )
    return table.flat(name, namespace)


class RawInput:
    """The plain text of a custom tool's call, out of pieces of its JSON arguments.

    The text comes in pieces as it is written. Where the model passed something else than one text
    named `input`, `finish` gives the arguments as they are.
    """

    _HEAD = re.compile(r'\{\s*"input"\s*:\s*"')
    _BODY = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._told = False
        self._closed = False

    def push(self, piece: str) -> str:
        """More argument text; returns more of the plain text."""
        if self._closed:
            return ""
        self._held += piece
        if not self._inside:
            head = self._HEAD.match(self._held)
            if head is None:
                return ""
            self._inside, self._held = True, self._held[head.end() :]
        body = self._BODY.match(self._held)
        assert body is not None
        text, self._held = body[0], self._held[body.end() :]
        if self._held.startswith('"'):
            self._closed = True
        self._told = True
        return json.loads(f'"{text}"') if text else ""

    def finish(self, arguments: str) -> str:
        """What is still to be told at the end of a call with these arguments."""
        if self._told:
            return ""
        try:
            value = json.loads(arguments).get(INPUT)
        except (ValueError, AttributeError, RecursionError):
            value = None
        if isinstance(value, str):
            return value
        return "" if arguments in ("", "{}") else arguments
