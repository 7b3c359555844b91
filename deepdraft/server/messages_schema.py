"""The JSON body of the Messages API.

Owns: its wire structs, and the lists of fields that are ignored or refused (docs/api-messages.md).
Knows nothing of: prompts, the chat format. Runs without torch.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from deepdraft.server.schema import RefusedFields, read_body

# Content


class TextBlock(Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class Base64Source(Struct, tag_field="type", tag="base64"):
    """Bytes in the request itself."""

    media_type: str
    data: str


class UrlSource(Struct, tag_field="type", tag="url"):
    """Something to be fetched."""

    url: str


class FileSource(Struct, tag_field="type", tag="file"):
    """An uploaded file."""

    file_id: str


class TextSource(Struct, tag_field="type", tag="text"):
    """A plain-text document."""

    data: str
    media_type: str = "text/plain"


class ContentSource(Struct, tag_field="type", tag="content"):
    """A document given as blocks."""

    content: str | list[TextBlock]


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource | FileSource


class Citations(Struct):
    """Whether the answer is to cite a document."""

    enabled: bool = False


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document; only text can be read."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer, sent back."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another service has encrypted."""

    data: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of an earlier answer; `input` is kept as it was written."""

    id: str
    name: str
    input: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class InputMessage(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# Tools and settings


class ToolParam(Struct):
    """A tool. `type` is absent or `custom` for those that the client runs by its own schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AutoChoice(Struct, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool"):
    """One tool must be called."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    """No tool may be called."""


class OutputFormat(Struct, tag_field="type", tag="json_schema"):
    """Asks for JSON that a schema allows."""

    schema: Any = None


class OutputConfig(Struct):
    """How hard to think, and the form of the answer."""

    effort: Any = None
    format: OutputFormat | None = None


class MessagesRequest(Struct, kw_only=True):
    """Body of POST /v1/messages and of /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[TextBlock] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    thinking: Any = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    tools: list[ToolParam] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None


# Fields without a place in the struct

IGNORED_FIELDS: frozenset[str] = frozenset(
    """betas cache_control context_management diagnostics inference_geo metadata service_tier speed
    user_profile_id workspace_id""".split()
)
"""Fields that clients send and that change nothing here; named in a header of the answer."""

NESTED_IGNORED: frozenset[str] = frozenset(
    """messages.content.is_error messages.content.redacted_thinking
    system.x-anthropic-billing-header thinking.budget_tokens thinking.display""".split()
)
"""The same below the top level."""

_NO_MEMORY = "nothing is kept between requests; send the whole conversation"

REFUSED_FIELDS: RefusedFields = {
    "compaction": ("conversations are not shortened here; send a shorter one", bool),
    "container": ("there is no container to run code in", bool),
    "fallbacks": ("only one model is served", bool),
    "mcp_servers": ("the server calls no MCP servers; offer their tools in tools", bool),
    "thread": (_NO_MEMORY, bool),
}
"""Fields that would change the answer and cannot be honoured: reason, and which values matter."""


def read(body: bytes) -> tuple[MessagesRequest, tuple[str, ...]]:
    """`schema.read_body` with this API's fields."""
    return read_body(body, MessagesRequest, REFUSED_FIELDS, IGNORED_FIELDS)
