"""Prompts: from a `Conversation` to text, token ids and the parser's start.

Owns: encoding, and the turns of the V4.1 and V4 families, which deepseek-recipe writes, DeepSeek's
own encoder; docs/prompt-format.md lists the few places where we differ from its request conversion,
and why. The turns of older families are written in `older`.
Knows nothing of: HTTP, models, sampling. Requests are checked by `request_rules`, not here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import deepseek_recipe as recipe

from deepdraft.errors import EngineError, RequestError
from deepdraft.text import older
from deepdraft.text.control import (
    ASSISTANT,
    BOS,
    DSML,
    EOS,
    EOT,
    FIM_BEGIN,
    FIM_END,
    FIM_HOLE,
    IMAGE,
    SYSTEM,
    THINK_END,
    THINK_START,
    USER,
    Segment,
)
from deepdraft.text.conversation import (
    EFFORT_BUDGETS,
    TASKS,
    TRAITS,
    Conversation,
    Effort,
    Family,
    ImagePart,
    Message,
    ParseStart,
    RenderedPrompt,
    ResponseFormat,
    TextPart,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    resolve_thinking,
)
from deepdraft.text.tokenizer import Tokenizer

__all__ = [
    "Conversation",
    "Family",
    "ImagePart",
    "Message",
    "ParseStart",
    "RenderedPrompt",
    "ResponseFormat",
    "TextPart",
    "Thinking",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "chat_tokens",
    "end_ids",
    "missing_chat_tokens",
    "render_chat",
    "render_fim",
    "resolve_thinking",
    "tool_parameters",
]

_UNSUPPORTED_IMAGE = "[Unsupported Image]"


def chat_tokens(family: Family) -> tuple[str, ...]:
    """The control tokens without which no chat of this family can be written or read."""
    if not family.startswith("v4"):
        return older.chat_tokens(family)
    common = (BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END, DSML)
    return (*common, SYSTEM) if family == "v4.1" else common


def end_ids(tokenizer: Tokenizer, family: Family) -> frozenset[int]:
    """Tokens that end an answer of this family, beside the model's own."""
    found = tokenizer.id_of(EOT) if family == "coder" else None
    return frozenset() if found is None else frozenset({found})


def missing_chat_tokens(tokenizer: Tokenizer, family: Family) -> tuple[str, ...]:
    """The chat tokens that this tokenizer lacks; such a model gets completions only."""
    return tuple(t for t in chat_tokens(family) if tokenizer.id_of(t) is None)


def render_chat(
    conversation: Conversation,
    tokenizer: Tokenizer,
    family: Family = "v4.1",
    *,
    max_tokens: int | None = None,
) -> RenderedPrompt:
    """Write the prompt of `conversation` and encode it.

    Text that came from the client is encoded without control tokens, whatever it spells. The same
    conversation always gives the same bytes. Raises RequestError where the conversation cannot be
    written: a control token that the tokenizer lacks, text that is not Unicode, a tool schema that
    JSON cannot hold; PromptTooLong as soon as it is clear that it has more than `max_tokens`.
    """
    if not family.startswith("v4"):
        return _render_older(conversation, tokenizer, family, max_tokens)
    sentinel = _image_sentinel(conversation)
    try:
        segments = _render_segments(conversation, family, sentinel)
    except UnicodeEncodeError as error:
        raise RequestError(
            "A message or tool holds a lone surrogate, which is not Unicode text: "
            f"{error.reason} at character {error.start}. Send well-formed text."
        ) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"The tools or the response format cannot be written: {error}") from (
            error
        )
    segments = _with_effort(segments, conversation, family)
    segments = _with_task(segments, conversation)
    segments = [(IMAGE, True) if s == (sentinel, True) else s for s in segments]
    images = tuple(_image_parts(conversation.messages)) if family == "v4.1" else ()
    return RenderedPrompt(
        token_ids=tuple(_encode(segments, tokenizer, family, max_tokens)),
        text="".join(text for text, _ in segments),
        parse_start=_parse_start(conversation),
        images=images,
    )


def _render_older(
    conversation: Conversation, tokenizer: Tokenizer, family: Family, max_tokens: int | None
) -> RenderedPrompt:
    tools = _offered_tools(conversation)
    texts = [_content_text(m, _UNSUPPORTED_IMAGE) for m in conversation.messages]
    try:
        segments = older.render(conversation, texts, tools, family)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RequestError(f"The tools or calls cannot be written: {error}") from error
    start = replace(_parse_start(conversation), in_tool_calls=False)
    if TRAITS[family].calls == "marks" and conversation.messages[-1].role == "tool":
        # Results are answered at once: the prompt ends without a header and its thinking mark.
        start = replace(start, stage="content")
    return RenderedPrompt(
        token_ids=tuple(_encode(segments, tokenizer, family, max_tokens)),
        text="".join(text for text, _ in segments),
        parse_start=start,
    )


def render_fim(
    prefix: str, suffix: str, tokenizer: Tokenizer, *, max_tokens: int | None = None
) -> RenderedPrompt:
    """Prompt for filling the middle between `prefix` and `suffix` (Coder, V2, V3, V4 layout).

    Raises RequestError where the tokenizer lacks the fill-in-the-middle tokens, PromptTooLong as
    `render_chat` does.
    """
    segments = [
        (BOS, True),
        (FIM_BEGIN, True),
        (prefix, False),
        (FIM_HOLE, True),
        (suffix, False),
        (FIM_END, True),
    ]
    missing = [t for t, special in segments if special and tokenizer.id_of(t) is None]
    if missing:
        raise RequestError(
            f"This model cannot fill in the middle: its tokenizer lacks {', '.join(missing)}. "
            "Leave `suffix` out.",
            param="suffix",
        )
    return RenderedPrompt(
        token_ids=tuple(_encode(segments, tokenizer, None, max_tokens)),
        text="".join(text for text, _ in segments),
        parse_start=ParseStart(stage="content_continuation"),
    )


def _render_segments(conversation: Conversation, family: Family, sentinel: str) -> list[Segment]:
    encoding = recipe.DeepseekV41Encoding() if family == "v4.1" else recipe.DeepseekV4Encoding()
    tools = _offered_tools(conversation)
    response = conversation.response_format
    rendered = encoding.render_conversation(
        recipe.Conversation(
            [
                _recipe_message(m, family, sentinel, thinking=conversation.thinking)
                for m in conversation.messages
            ],
            thinking_mode=conversation.thinking,
            tools=[_recipe_tool(t) for t in tools],
            tool_choice="required" if _opens_calls(conversation) else "auto",
            reasoning_effort=_level(conversation.effort) if conversation.thinking else None,
            response_format="json_object" if response.kind == "json_object" else "text",
            response_schema=response.schema if response.kind == "json_schema" else None,
            response_regex=response.regex if response.kind == "regex" else None,
        )
    )
    segments: list[Segment] = []
    # Read once: the attribute is a new copy of the whole text each time.
    prompt, done = rendered.prompt, 0
    for start, end in rendered.special_ranges:
        if start > done:
            segments.append((prompt[done:start], False))
        segments.append((prompt[start:end], True))
        done = end
    if done < len(prompt):
        segments.append((prompt[done:], False))
    return segments


def _opens_calls(conversation: Conversation) -> bool:
    """The prompt ends inside the block of calls. While the model thinks it cannot: there a call is
    forced by a grammar, after the reasoning."""
    forced = conversation.tool_choice.mode in ("required", "function")
    return forced and bool(_offered_tools(conversation)) and not conversation.thinking


def tool_parameters(tool: Tool) -> Mapping[str, Any] | None:
    """The schema that a tool's arguments are held to: that of a strict tool completed as the prompt
    shows it, and with the keywords that the official completion leaves out.

    Raises RequestError for the schema of a strict tool that cannot be completed.
    """
    if not tool.strict:
        return tool.parameters
    return _with_all_keywords(tool.parameters or {}, _recipe_tool(tool).parameters)


def _with_all_keywords(own: Any, completed: Any) -> Any:
    """`completed`, a schema or a part of one, with what only `own` has at the same place.

    The completion drops what bounds a value, such as the `enum` of a number or `minItems`.
    """
    if isinstance(own, Mapping) and isinstance(completed, Mapping):
        both = {k: _with_all_keywords(own[k], v) if k in own else v for k, v in completed.items()}
        return both | {k: v for k, v in own.items() if k not in completed}
    if isinstance(own, list) and isinstance(completed, list) and len(own) == len(completed):
        return [_with_all_keywords(o, c) for o, c in zip(own, completed, strict=True)]
    return completed


def _offered_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that the prompt describes: none, all, or the one that must be called."""
    choice = conversation.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "function":
        return tuple(t for t in conversation.tools if t.name == choice.name)
    return conversation.tools


def _recipe_message(
    message: Message, family: Family, sentinel: str, *, thinking: bool
) -> recipe.Message:
    placeholder = sentinel if family == "v4.1" else _UNSUPPORTED_IMAGE
    text = _content_text(message, placeholder)
    sources: list[recipe.ImageSource] | None = None
    if family == "v4.1":
        sources = [recipe.UrlImageSource(p.source, p.detail) for p in _image_parts([message])]
    match message.role:
        case "system" | "developer":
            return recipe.SystemMessage(text, sources or None, image_token=sentinel)
        case "user":
            return recipe.UserMessage(text, sources or None, image_token=sentinel)
        case "tool":
            return recipe.ToolMessage(
                text, message.tool_call_id, sources or None, image_token=sentinel
            )
        case "assistant":
            # Some clients replay a call without arguments as an empty string.
            calls = [
                recipe.ToolCall(c.id, c.name, c.arguments if c.arguments.strip() else "{}")
                for c in message.tool_calls
            ]
            # Many clients never send reasoning back; an empty one keeps the turn's usual form.
            reasoning = "" if thinking and message.reasoning is None else message.reasoning
            return recipe.AssistantMessage(text, reasoning, calls or None, message.prefix)
        case "latest_reminder":
            return recipe.LatestReminderMessage(text)
    raise RequestError(f"No message can have the role {message.role!r}.", param="messages")


def _recipe_tool(tool: Tool) -> recipe.ToolDefinition:
    parameters = dict(tool.parameters) if tool.parameters is not None else {}
    if not tool.strict:
        return recipe.ToolDefinition(tool.name, tool.description, parameters, tool.strict)
    # Only the request conversion completes the schema of a strict tool the official way, so it is
    # used for that and nothing else.
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters or {"type": "object"},
        "strict": True,
    }
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": ""}],
        "tools": [{"type": "function", "function": function}],
    }
    try:
        converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    except recipe.ConversionError as error:
        raise RequestError(
            f"The schema of the strict tool {tool.name!r} is not usable: {error}", param="tools"
        ) from error
    return converted.conversation.tools[0]


def _content_text(message: Message, placeholder: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    pieces = [p.text if isinstance(p, TextPart) else placeholder for p in message.content]
    return "\n\n".join(pieces)


def _image_parts(messages: Iterable[Message]) -> list[ImagePart]:
    return [
        part
        for message in messages
        if isinstance(message.content, tuple)
        for part in message.content
        if isinstance(part, ImagePart)
    ]


def _image_sentinel(conversation: Conversation) -> str:
    """A placeholder that no text of the conversation contains.

    With it, text that spells the image token can never take the place of an image.
    """
    sentinel = "\x00image\x00"
    texts = [_content_text(m, "") for m in conversation.messages]
    while any(sentinel in t for t in texts):
        sentinel += "\x00"
    return sentinel


def _level(effort: Effort) -> Literal["low", "high", "max"]:
    """The level nearest to a budget: 50, 75 or 100 (ties go up)."""
    if not isinstance(effort, int):
        return effort
    if effort * 2 < EFFORT_BUDGETS["low"] + EFFORT_BUDGETS["high"]:
        return "low"
    return "high" if effort * 2 < EFFORT_BUDGETS["high"] + EFFORT_BUDGETS["max"] else "max"


def _with_effort(
    segments: list[Segment], conversation: Conversation, family: Family
) -> list[Segment]:
    """Write an integer budget into V4.1's effort line, which opens the first system turn."""
    effort = conversation.effort
    if family != "v4.1" or not conversation.thinking or not isinstance(effort, int):
        return segments
    head = f"Reasoning Effort: {EFFORT_BUDGETS[_level(effort)]} ("
    if len(segments) < 3 or segments[1] != (SYSTEM, True) or not segments[2][0].startswith(head):
        raise EngineError(
            "deepseek-recipe wrote no effort line where one belongs; this version is not supported."
        )
    line = f"Reasoning Effort: {effort} (" + segments[2][0][len(head) :]
    return [*segments[:2], (line, False), *segments[3:]]


def _with_task(segments: list[Segment], conversation: Conversation) -> list[Segment]:
    """Put the token of a one-shot task in place of the assistant header (`action`: after it)."""
    task = conversation.task
    if task is None:
        return segments
    if task not in TASKS:
        raise RequestError(
            f"task is {task!r}: use one of {', '.join(sorted(TASKS))}.", param="task"
        )
    token: Segment = (f"<｜{task}｜>", True)
    if task == "action":
        return [*segments, token]
    return [*segments[:-2], token]


def _parse_start(conversation: Conversation) -> ParseStart:
    if conversation.task is not None:
        return ParseStart(stage="content")
    tools = bool(_offered_tools(conversation))
    json_output = conversation.response_format.kind == "json_object"
    last = conversation.messages[-1] if conversation.messages else None
    if last is not None and last.role == "assistant" and last.prefix:
        if _content_text(last, ""):
            stage = "content_continuation"
        elif conversation.thinking:
            stage = "reasoning_continuation" if last.reasoning else "reasoning"
        else:
            stage = "content"
    else:
        stage = "reasoning" if conversation.thinking else "content"
    return ParseStart(
        stage=stage,
        tool_calls=tools,
        in_tool_calls=_opens_calls(conversation),
        json_output=json_output,
    )


def _encode(
    segments: list[Segment], tokenizer: Tokenizer, family: Family | None, max_tokens: int | None
) -> list[int]:
    ids: list[int] = []
    for text, special in segments:
        if not special:
            if max_tokens is not None:
                field = "messages" if family else "prompt"
                tokenizer.check_fits(text, max_tokens, before=len(ids), param=field)
            ids.extend(tokenizer.encode_text(text))
            continue
        token_id = tokenizer.id_of(text)
        if token_id is None:
            raise RequestError(_missing_token_message(text, tokenizer, family))
        ids.append(token_id)
    return ids


def _missing_token_message(text: str, tokenizer: Tokenizer, family: Family | None) -> str:
    missing = missing_chat_tokens(tokenizer, family) if family else ()
    if missing:
        return (
            f"This model has no chat format: its tokenizer lacks {', '.join(missing)}. "
            "Use /v1/completions."
        )
    if text == IMAGE:
        return f"This model takes no images: its tokenizer lacks {IMAGE}. Send text only."
    return f"This model's tokenizer lacks {text}, which this request needs."
