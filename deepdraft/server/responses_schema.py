"""The JSON body of the Responses API.

Owns: its wire structs, and the lists of fields, items and tools that are ignored or refused
(docs/api-responses.md).
Knows nothing of: prompts, the chat format. Runs without torch.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from deepdraft.server.schema import RefusedFields, read_body

# Input items


class TextPart(Struct, tag_field="type", tag="input_text"):
    """A piece of text."""

    text: str


class PlainTextPart(Struct, tag_field="type", tag="text"):
    """The same, in the spelling of chat completions."""

    text: str


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    """A piece of an earlier answer."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer; read as text."""

    refusal: str


class ImagePart(Struct, tag_field="type", tag="input_image"):
    """An image."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "original", "auto"] = "high"


Part = TextPart | PlainTextPart | OutputTextPart | RefusalPart | ImagePart


class MessageItem(Struct):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningText(Struct):
    """A piece of reasoning."""

    text: str = ""
    type: Literal["reasoning_text", "text"] = "reasoning_text"


class ReasoningItem(Struct):
    """Reasoning of an earlier answer; only its content can be read."""

    content: list[ReasoningText] | None = None


class FunctionCallItem(Struct):
    """A call of an earlier answer."""

    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None


class FunctionOutputItem(Struct):
    """The result of a call."""

    call_id: str
    output: str | list[Part] = ""


class CustomCallItem(Struct):
    """A call of a custom tool; its input is plain text."""

    call_id: str
    name: str
    input: str = ""


ITEMS: dict[str, type[Struct]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionOutputItem,
}
"""The items that are read, by type."""

DROPPED_ITEMS: frozenset[str] = frozenset(
    """image_generation_call local_shell_call local_shell_call_output tool_search_call
    tool_search_output web_search_call""".split()
)
"""Items of the tools in DROPPED_TOOLS, which an earlier server may have left in a conversation."""

# Tools


class FunctionTool(Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Struct):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"] = "text"
    syntax: Any = None
    definition: Any = None


class CustomTool(Struct):
    """A tool whose input is plain text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Struct):
    """Functions under a common name."""

    name: str
    tools: list[msgspec.Raw]
    description: str | None = None


TOOLS: dict[str, type[Struct]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
}
"""The tools that are served, by type."""

DROPPED_TOOLS: frozenset[str] = frozenset(
    """image_generation local_shell tool_search web_search web_search_2025_08_26 web_search_preview
    web_search_preview_2025_03_11""".split()
)
"""Tools that agents always declare: the model is not told of them, and the rest is served."""

# Settings


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """Asks for JSON that a schema allows."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """No form is asked for."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Asks for a JSON object."""


class TextConfig(Struct):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct):
    """How hard to think."""

    effort: Any = None
    summary: str | None = None
    generate_summary: str | None = None


class ToolChoice(Struct):
    """A tool choice that is an object: one tool, or a selection."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking: Any = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


# Fields without a place in the struct

IGNORED_FIELDS: frozenset[str] = frozenset(
    """access_programs client_metadata context_management max_tool_calls moderation
    prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier
    stream_options truncation user""".split()
)
"""Fields that clients send and that change nothing here; named in a header of the answer."""

LOGPROBS = "message.output_text.logprobs"
REPLAY = "reasoning.encrypted_content"

NESTED_IGNORED: frozenset[str] = frozenset(
    f"""include reasoning.generate_summary reasoning.summary text.verbosity tools.format
    {" ".join(f"tools.{t}" for t in sorted(DROPPED_TOOLS))}
    {" ".join(f"input.{t}" for t in sorted(DROPPED_ITEMS))}""".split()
)
"""The same below the top level."""

REFUSED_FIELDS: RefusedFields = {
    "background": ("answers are not made in the background; use stream", bool),
    "conversation": (
        "conversations are not kept; send the input, or previous_response_id",
        bool,
    ),
    "image": ("only text is produced", bool),
    "prompt": ("prompt templates are not kept; send instructions and input", bool),
}
"""Fields that would change the answer and cannot be honoured: reason, and which values matter."""


def read(body: bytes) -> tuple[ResponsesRequest, tuple[str, ...]]:
    """`schema.read_body` with this API's fields."""
    return read_body(body, ResponsesRequest, REFUSED_FIELDS, IGNORED_FIELDS)
