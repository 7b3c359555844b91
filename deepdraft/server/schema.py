"""The JSON bodies that the server reads: types of fields, and what becomes of every other field.

Owns: the wire structs, the lists of fields that are ignored or refused, and the wording of errors
in a body.
Knows nothing of: prompts, sampling, the engine. Runs without torch.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from deepdraft.errors import RequestError
from deepdraft.server.nested import PLAIN_NAME, unknown_keys

# Messages


class TextPart(Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A refusal of an earlier answer, sent back by a client; read as text."""

    refusal: str


class ImageUrl(Struct):
    """Where an image is: a data URL or an http(s) URL."""

    url: str
    detail: Literal["low", "high", "original", "auto"] = "high"


class ImageUrlPart(Struct, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl | str


class CalledFunction(Struct):
    """Name and JSON arguments of an earlier call."""

    name: str
    arguments: str = ""


class SentToolCall(Struct):
    """A call of an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[TextPart | ImageUrlPart | RefusalPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None


# Tools and formats


class FunctionSpec(Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct):
    """A tool; only functions exist."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """The name in a named tool choice."""

    name: str


class NamedToolChoice(Struct):
    """Asks for a call of one function."""

    function: FunctionName
    type: Literal["function"] = "function"


AnyToolChoice = Literal["auto", "none", "required"] | NamedToolChoice | None


class TextFormat(Struct, tag_field="type", tag="text"):
    """No form is asked for."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Asks for a JSON object."""


class JsonSchemaSpec(Struct):
    """A named schema."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """Asks for JSON that a schema allows."""

    json_schema: JsonSchemaSpec


class RegexFormat(Struct, tag_field="type", tag="regex"):
    """Asks for text that a pattern matches."""

    regex: str


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """A form of the answer, as vLLM spells it."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: Any = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    """Without effect: there is one way to enforce a form."""


class StreamOptions(Struct):
    """What a stream holds besides text."""

    include_usage: bool | None = None


class SpeculationFields(Struct):
    """How this answer's drafts are made and verified; absent fields: as the server does."""

    rule: Literal["token", "block", "coupled"] | None = None
    drafts: int | None = None
    report: bool | None = None
    steps: bool | None = None


# Requests


class SamplingFields(Struct, kw_only=True):
    """Fields that both request kinds share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: AnyFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    speculation: SpeculationFields | None = None
    priority: int | None = None
    user_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: AnyToolChoice = None
    parallel_tool_calls: bool | None = None
    task: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """One text, several texts, one list of token ids, or several; never a mixture."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


# Fields without a place in the structs

IGNORED_FIELDS: frozenset[str] = frozenset(
    """cache_salt guided_decoding_backend include_reasoning metadata moderation prediction
    prompt_cache_key prompt_cache_retention request_id safety_identifier separate_reasoning
    service_tier session_id skip_special_tokens spaces_between_special_tokens store
    stream_reasoning user verbosity vllm_xargs""".split()
)
"""Fields that clients send and that change nothing here; named in a header of the answer."""

_NO_GRAMMAR = "use response_format, or structured_outputs with json, regex or choice"
_NO_OLD_CALLS = "the old function interface is not served; use tools and tool_choice"
_OTHER_SEARCH = "only sampling token by token is served"

REFUSED_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "add_generation_prompt": (
        "the prompt always opens an answer; to continue one, mark the last message with "
        '"prefix": true',
        lambda v: v is False,
    ),
    "audio": ("only text is produced", bool),
    "continue_final_message": (
        'to continue an answer, mark the last message with "prefix": true',
        bool,
    ),
    "function_call": (_NO_OLD_CALLS, bool),
    "functions": (_NO_OLD_CALLS, bool),
    "ebnf": (_NO_GRAMMAR, bool),
    "guided_grammar": (_NO_GRAMMAR, bool),
    "guided_whitespace_pattern": (_NO_GRAMMAR, bool),
    "json_schema": (_NO_GRAMMAR, bool),
    "length_penalty": (_OTHER_SEARCH, lambda v: v != 1),
    "min_tokens": ("an answer cannot be kept from ending yet; leave it out", bool),
    "modalities": ("only text is produced", lambda v: v != ["text"]),
    "prompt_logprobs": ("probabilities of the prompt's tokens are not served", bool),
    "regex": (_NO_GRAMMAR, bool),
    "structural_tag": (_NO_GRAMMAR, bool),
    "use_beam_search": (_OTHER_SEARCH, bool),
    "web_search_options": ("the server has no web search", lambda v: v is not None),
}
"""Fields that would change the answer and cannot be honoured: reason, and which values matter."""


RefusedFields = Mapping[str, tuple[str, Callable[[Any], bool]]]
RequestT = TypeVar("RequestT", bound=Struct)


@functools.cache
def _decoder(kind: type[RequestT]) -> "msgspec.json.Decoder[RequestT]":
    return msgspec.json.Decoder(kind)


def field_names(kind: type[Struct]) -> frozenset[str]:
    """The fields that a request struct honours."""
    return frozenset(kind.__struct_fields__)


def read_body(
    body: bytes,
    kind: type[RequestT],
    refused: RefusedFields = REFUSED_FIELDS,
    without_effect: frozenset[str] = IGNORED_FIELDS,
) -> tuple[RequestT, tuple[str, ...]]:
    """The request in a JSON body, and the names of its fields that have no effect.

    Raises RequestError that names the place: the field's path, or the byte for broken JSON. A field
    that is in no list is refused, as nobody knows what it would mean; null is always accepted. Keys
    below the top level that no struct has a place for are named as well.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
        ) from error
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        ignored = _sort_out(fields, field_names(kind), refused, without_effect)
        request = _decoder(kind).decode(body)
        ignored += tuple(unknown_keys(msgspec.json.decode(body), kind))
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    return request, ignored


def _sort_out(
    fields: dict[str, msgspec.Raw],
    honoured: frozenset[str],
    refused: RefusedFields,
    without_effect: frozenset[str],
) -> tuple[str, ...]:
    ignored = []
    for name, raw in fields.items():
        if name in honoured or bytes(raw).strip() == b"null":
            continue
        if name in refused:
            reason, matters = refused[name]
            if matters(msgspec.json.decode(raw)):
                raise RequestError(f"{name} is refused: {reason}", param=name)
        elif name not in without_effect:
            raise _unknown(name, honoured)
        ignored.append(name)
    return tuple(ignored)


def _unknown(name: str, honoured: frozenset[str]) -> RequestError:
    shown = name if PLAIN_NAME.match(name) else repr(name[:64])
    near = difflib.get_close_matches(name[:64], honoured, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return RequestError(f"{shown} is no field of this request; {hint}", param=shown)


def _field_error(text: str) -> RequestError:
    """msgspec says `Expected ... - at `$.a.b``; we say the path first, without the root."""
    what, _, where = text.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if not path:
        return RequestError(f"the body is wrong: {what[:1].lower()}{what[1:]}")
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}", param=path)
