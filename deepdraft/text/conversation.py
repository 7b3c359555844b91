"""A conversation as every wire format sees it, and what its prompt came out as.

Owns: the records that server dialects fill in and that `prompt` renders, and `resolve_thinking`,
the one reading of all thinking switches.
Knows nothing of: HTTP, tokenizers, how a family writes its prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepdraft.errors import RequestError

Family = Literal["v4.1", "v4", "v3.2", "v3.1", "r1", "v3", "v2", "coder"]
"""How a model's conversations are written: named after the first model that does it so."""
Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
Stage = Literal["reasoning", "reasoning_continuation", "content", "content_continuation"]
Effort = int | Literal["low", "high", "max"]

ROLES: frozenset[str] = frozenset(
    {"system", "developer", "user", "assistant", "tool", "latest_reminder"}
)
TASKS: frozenset[str] = frozenset({"action", "query", "authority", "domain", "title", "read_url"})

EFFORT_NAMES: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
"""Every accepted `reasoning_effort` name but `none`, and the level that it stands for."""

EFFORT_BUDGETS: dict[str, int] = {"low": 50, "high": 75, "max": 100}
"""The number that V4.1 writes for a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a family's conversations can hold.

    `thinking`: a `switch` of each request, `always` or `never`; `default`: where a request is
    silent. `calls`: written with DSML tags, with marks (control tokens), or not at all. `extras`:
    effort, one-shot tasks, reminders.
    """

    thinking: Literal["switch", "always", "never"] = "never"
    default: bool = False
    calls: Literal["dsml", "marks"] | None = None
    extras: bool = False


TRAITS: dict[Family, Traits] = {
    "v4.1": Traits(thinking="switch", default=True, calls="dsml", extras=True),
    "v4": Traits(thinking="switch", default=True, calls="dsml", extras=True),
    "v3.2": Traits(thinking="switch", calls="dsml"),
    "v3.1": Traits(thinking="switch", calls="marks"),
    "r1": Traits(thinking="always", default=True, calls="marks"),
    "v3": Traits(calls="marks"),
    "v2": Traits(),
    "coder": Traits(),
}


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message: a data URL, an http(s) URL or a file id, not fetched yet."""

    source: str
    detail: Literal["low", "high", "original", "auto"] = "high"


ContentPart = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. `arguments` is JSON text of an object, as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Fields that its role does not have keep their defaults.

    `content` None means that the client sent none. `reasoning` is `reasoning_content` or
    `reasoning` of the wire format.
    """

    role: Role
    content: str | tuple[ContentPart, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, None where absent."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`auto`, `none`, `required` (some call), or `function` (a call of `name`)."""

    mode: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The form asked of the answer; `schema` with `json_schema`, `regex` with `regex`."""

    kind: Literal["text", "json_object", "json_schema", "regex"] = "text"
    schema: Any = None
    regex: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """All that decides a prompt.

    `effort` counts only while thinking is on: a level, or a budget 1..100 (V4 rounds it to a
    level). `task` asks for one of the internal one-shot tasks instead of an answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    thinking: bool = True
    effort: Effort = "high"
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseStart:
    """Where the output parser stands after the prompt.

    `tool_calls`: look for calls at all. `in_tool_calls`: the prompt opened the block already.
    `json_output`: keep only the JSON value of the content.
    """

    stage: Stage = "content"
    tool_calls: bool = False
    in_tool_calls: bool = False
    json_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt as token ids [T] and as text; the images in the order of their placeholders."""

    token_ids: tuple[int, ...]
    text: str
    parse_start: ParseStart
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The outcome of all thinking switches of one request."""

    enabled: bool
    effort: Effort


def resolve_thinking(
    *,
    thinking: object = None,
    reasoning_effort: object = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    default: bool = True,
    family: Family | None = None,
) -> Thinking:
    """Read every spelling of the thinking switch; the values are those of the JSON body.

    On or off, first that is given: `thinking` ({"type": enabled|adaptive|disabled} or a boolean),
    `chat_template_kwargs.thinking`, `chat_template_kwargs.enable_thinking`, an effort of "none"
    (off), else `default`. Effort, first that is given: `reasoning_effort`,
    `chat_template_kwargs.reasoning_effort`, else "high". An effort of "none" under an explicit
    "on" counts as not given. A `family` that always or never thinks does so whatever the switches
    say; its default is the one taken. Raises RequestError naming the field.
    """
    traits = TRAITS[family] if family is not None else None
    kwargs = chat_template_kwargs or {}
    efforts = [
        _read_effort(reasoning_effort, "reasoning_effort"),
        _read_effort(kwargs.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort"),
    ]
    switches = [
        _read_switch(thinking, "thinking"),
        _read_switch(kwargs.get("thinking"), "chat_template_kwargs.thinking"),
        _read_switch(kwargs.get("enable_thinking"), "chat_template_kwargs.enable_thinking"),
    ]
    effort = next((e for e in efforts if e is not None), None)
    enabled = next((s for s in switches if s is not None), None)
    if traits is not None:
        default = traits.default
    if traits is not None and traits.thinking != "switch":
        enabled = default
    elif enabled is None:
        # A level of effort asks for thinking only where thinking has levels.
        levels = effort is not None and (traits is None or traits.extras or effort == "none")
        enabled = effort != "none" if levels else default
    if effort is None or effort == "none":
        effort = "high"
    return Thinking(enabled=enabled, effort=effort)


def _read_switch(value: object, where: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind in ("enabled", "adaptive"):
            return True
        if kind == "disabled":
            return False
        raise RequestError(
            f"{where}.type is {kind!r}: use 'enabled', 'adaptive' or 'disabled'.",
            param=f"{where}.type",
        )
    raise RequestError(
        f'{where} must be a boolean or an object like {{"type": "disabled"}}.', param=where
    )


def _read_effort(value: object, where: str) -> Effort | Literal["none"] | None:
    if value is None:
        return None
    if isinstance(value, str):
        if value == "none":
            return "none"
        if value in EFFORT_NAMES:
            return EFFORT_NAMES[value]
    elif isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return value
    names = ", ".join(["none", *EFFORT_NAMES])
    raise RequestError(
        f"{where} is {value!r}: use one of {names}, or an integer from 1 to 100.", param=where
    )
