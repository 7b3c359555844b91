"""Tokens of texts and conversations, and back: /tokenize, /detokenize, /responses/input_tokens.

Owns: their bodies and answers.
Knows nothing of: the engine, sockets.
"""

from typing import Any

from msgspec import Struct

from deepdraft.errors import PromptTooLong, RequestError
from deepdraft.server import chat, schema
from deepdraft.server.sampling import ModelView
from deepdraft.text import prompt as text
from deepdraft.text.request_rules import check_conversation

Json = dict[str, Any]

MOST_CONTEXTS = 8
"""A text to be counted may fill the context so many times."""


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation as /chat/completions takes it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    messages: list[schema.ChatMessage] | None = None
    tools: list[schema.ToolSpec] | None = None
    tool_choice: schema.AnyToolChoice = None
    response_format: schema.AnyFormat | None = None
    thinking: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    task: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def read_tokenize(body: bytes) -> TokenizeRequest:
    """The body of /tokenize. Raises RequestError."""
    return schema.read_body(body, TokenizeRequest, {}, frozenset())[0]


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """The body of /detokenize. Raises RequestError."""
    return schema.read_body(body, DetokenizeRequest, {}, frozenset())[0]


def tokenize(body: TokenizeRequest, model: ModelView) -> Json:
    """The tokens that the model would see; longer than its context is fine. Raises RequestError."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    token_ids = _of_text(body, model) if body.messages is None else _of_chat(body, model)
    answer: Json = {
        "count": len(token_ids),
        "max_model_len": model.max_tokens,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.decode((i,)) for i in token_ids]
    return answer


def _of_text(body: TokenizeRequest, model: ModelView) -> list[int]:
    assert body.prompt is not None
    tokenizer = model.tokenizer
    encode = tokenizer.encode_with_control if body.parse_special else tokenizer.encode_text
    _check_size(body.prompt, model)
    token_ids = encode(body.prompt)
    bos = model.bos_token_id
    if bos is not None and body.add_special_tokens is not False and token_ids[:1] != [bos]:
        return [bos, *token_ids]
    return token_ids


def _check_size(prompt: str, model: ModelView) -> None:
    """Encoding megabytes for nothing would keep others waiting."""
    try:
        model.tokenizer.check_fits(prompt, MOST_CONTEXTS * model.max_tokens, param="prompt")
    except PromptTooLong as error:
        raise PromptTooLong(
            f"a text of {len(prompt)} characters is more than {MOST_CONTEXTS} contexts of this "
            "model: send it in parts",
            param="prompt",
        ) from error


def _of_chat(body: TokenizeRequest, model: ModelView) -> list[int]:
    assert body.messages is not None
    chat.check_chat_tokens(model)
    conversation = chat.read_conversation(
        schema.ChatRequest(
            messages=body.messages,
            tools=body.tools,
            tool_choice=body.tool_choice,
            response_format=body.response_format,
            thinking=body.thinking,
            reasoning_effort=body.reasoning_effort,
            chat_template_kwargs=body.chat_template_kwargs,
            task=body.task,
        ),
        model.family,
    )
    check_conversation(conversation, images=False)
    most = MOST_CONTEXTS * model.max_tokens
    rendered = text.render_chat(conversation, model.tokenizer, model.family, max_tokens=most)
    return list(rendered.token_ids)


def detokenize(body: DetokenizeRequest, model: ModelView) -> Json:
    """The text of token ids, control tokens spelled out. Raises RequestError."""
    for token_id in body.tokens:
        if not 0 <= token_id < model.vocab_size:
            raise RequestError(
                f"tokens holds {token_id}; token ids run from 0 to {model.vocab_size - 1}",
                param="tokens",
            )
    return {"prompt": model.tokenizer.decode(body.tokens)}
