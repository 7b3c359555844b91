"""The chat format: a body to engine requests, token events to chat chunks and responses.

Owns: the reading of a chat body, the shape of chat answers, stop strings in their content.
Knows nothing of: prompt text, sockets, the engine's thread.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from deepdraft.errors import RequestError
from deepdraft.server import sampling, schema
from deepdraft.server.job import Choice, Job, Json, chat_logprob, engine_reason, response_id
from deepdraft.server.sampling import ModelView
from deepdraft.server.structured import chat_enforcement
from deepdraft.text import prompt as text
from deepdraft.text.conversation import Family, TextPart
from deepdraft.text.parse import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    StopMatcher,
    ToolCallDelta,
)
from deepdraft.text.parse_marks import make_parser
from deepdraft.text.request_rules import check_conversation
from deepdraft.types import TokenEvent, TokenLogprob


class ChatJob(Job):
    """A chat request."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"


def chat_job(
    body: schema.ChatRequest,
    name: str,
    model: ModelView,
    ignored: tuple[str, ...] = (),
    id: str | None = None,
) -> ChatJob:
    """Checks a chat body, renders its prompt and makes one engine request per choice.

    Raises RequestError or PromptTooLong, with the field's path where there is one.
    """
    check_chat_tokens(model)
    sampling.check_shared(body, model.vocab_size)
    num_logprobs = _num_logprobs(body)
    sampling.check_range(
        body.max_completion_tokens, "max_completion_tokens", 1, float("inf"), "at least 1"
    )
    conversation = read_conversation(body, model.family)
    check_conversation(conversation, images=False)
    rendered = text.render_chat(
        conversation, model.tokenizer, model.family, max_tokens=model.max_tokens
    )
    enforced = chat_enforcement(body, conversation, rendered.parse_start, model)
    parse_start = rendered.parse_start
    if enforced.form:
        # Nothing but the form can come, so there is nothing to look for in it.
        parse_start = replace(parse_start, json_output=False)
    wanted = body.max_completion_tokens
    thinking = conversation.thinking
    limit = sampling.num_new_tokens(
        body.max_tokens if wanted is None else wanted,
        len(rendered.token_ids),
        model,
        sampling.DEFAULT_NEW_TOKENS_THINKING if thinking else sampling.DEFAULT_NEW_TOKENS,
    )
    stops = sampling.stop_strings(body)
    more_ends = text.end_ids(model.tokenizer, model.family)
    end_ids = sampling.stop_ids(body, model) | (frozenset() if body.ignore_eos else more_ends)
    hidden_ids = end_ids | more_ends | model.end_ids
    id, n = id or response_id("chatcmpl"), body.n or 1
    requests = sampling.generate_requests(
        id,
        [rendered.token_ids],
        body,
        sampling.sampling_params(body, model, num_logprobs),
        [limit],
        end_ids,
        enforced.grammar,
    )
    choices: list[Choice] = [
        ChatChoice(
            i,
            model=model,
            parser=make_parser(parse_start, model.tokenizer, model.family),
            thinking=thinking,
            stops=stops,
            hidden_ids=hidden_ids,
            logprobs=num_logprobs is not None,
        )
        for i in range(n)
    ]
    job = ChatJob(
        model,
        id=id,
        name=name,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=ignored + enforced.ignored,
        num_prompt=len(rendered.token_ids),
        requests=requests,
        choices=choices,
    )
    job.multi_turn = any(m.role == "assistant" for m in conversation.messages)
    return job


def check_chat_tokens(model: ModelView) -> None:
    """Raises RequestError unless the tokenizer has what chats are written with."""
    missing = text.missing_chat_tokens(model.tokenizer, model.family)
    if missing:
        raise RequestError(
            "this model cannot chat: its tokenizer lacks the tokens " + ", ".join(missing) + "; "
            "use /v1/completions",
            param="model",
        )


def num_prompt_tokens(body: schema.ChatRequest, model: ModelView) -> int:
    """Tokens of the prompt that a chat body would be answered from. Raises RequestError."""
    check_chat_tokens(model)
    conversation = read_conversation(body, model.family)
    check_conversation(conversation, images=False)
    return len(text.render_chat(conversation, model.tokenizer, model.family).token_ids)


def _num_logprobs(body: schema.ChatRequest) -> int | None:
    sampling.check_range(
        body.top_logprobs,
        "top_logprobs",
        0,
        sampling.MAX_LOGPROBS,
        f"from 0 to {sampling.MAX_LOGPROBS}",
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def read_conversation(body: schema.ChatRequest, family: Family) -> text.Conversation:
    """The conversation of a chat body, in the form that prompts are rendered from."""
    thinking = text.resolve_thinking(
        thinking=body.thinking,
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
        family=family,
    )
    return text.Conversation(
        messages=tuple(_message(m) for m in body.messages),
        tools=tuple(_tool(t.function) for t in body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.response_format),
        thinking=thinking.enabled,
        effort=thinking.effort,
        task=body.task,
    )


def _message(message: schema.ChatMessage) -> text.Message:
    content = message.content
    if isinstance(content, list):
        content = tuple(_part(p) for p in content)
    reasoning = message.reasoning_content
    return text.Message(
        role=message.role,
        content=content,
        reasoning=message.reasoning if reasoning is None else reasoning,
        tool_calls=tuple(
            text.ToolCall(c.id, c.function.name, c.function.arguments)
            for c in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        prefix=bool(message.prefix),
    )


def _part(
    part: schema.TextPart | schema.ImageUrlPart | schema.RefusalPart,
) -> TextPart | text.ImagePart:
    if isinstance(part, schema.TextPart):
        return TextPart(part.text)
    if isinstance(part, schema.RefusalPart):
        return TextPart(part.refusal)
    image = part.image_url
    if isinstance(image, str):
        return text.ImagePart(image)
    return text.ImagePart(image.url, image.detail)


def _tool(function: schema.FunctionSpec) -> text.Tool:
    return text.Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=function.strict,
    )


def _tool_choice(choice: str | schema.NamedToolChoice | None) -> text.ToolChoice:
    if isinstance(choice, schema.NamedToolChoice):
        return text.ToolChoice(mode="function", name=choice.function.name)
    if choice == "none":
        return text.ToolChoice(mode="none")
    return text.ToolChoice(mode="required" if choice == "required" else "auto")


def _response_format(
    form: schema.AnyFormat | None,
) -> text.ResponseFormat:
    if isinstance(form, schema.JsonObjectFormat):
        return text.ResponseFormat(kind="json_object")
    if isinstance(form, schema.JsonSchemaFormat):
        return text.ResponseFormat(kind="json_schema", schema=form.json_schema.schema)
    if isinstance(form, schema.RegexFormat):
        return text.ResponseFormat(kind="regex", regex=form.regex)
    return text.ResponseFormat()


class ChatChoice(Choice):
    """One chat answer: splits it, finds stop strings in the content, keeps both for `whole`."""

    def __init__(
        self,
        index: int,
        *,
        model: ModelView,
        parser: OutputParser,
        thinking: bool,
        stops: Sequence[str],
        hidden_ids: frozenset[int],
        logprobs: bool,
    ) -> None:
        super().__init__(index)
        self._model = model
        self._parser = parser
        self._thinking = thinking
        self._stops = bool(stops)
        self._matcher = StopMatcher(stops)
        self._hidden_ids = hidden_ids
        self._with_logprobs = logprobs
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: dict[str, list[Json]] = {"content": [], "reasoning_content": []}
        self._unsent_logprobs: dict[str, list[Json]] = {"content": [], "reasoning_content": []}
        self._started = False

    @property
    def num_reasoning(self) -> int:
        """Tokens that belong to the reasoning."""
        return self._parser.num_reasoning_tokens

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.matched

    def push(self, event: TokenEvent) -> list[Json]:
        """Takes an event; returns the stream's objects for this choice."""
        parts = []
        if not self._started:
            self._started = True
            parts.append(self._part({"role": "assistant", **_texts(self._thinking, "")}))
        deltas = self._read(event)
        reason = engine_reason(event)
        if reason is not None and self._matcher.matched is None:
            deltas += self._filter(self._parser.finish(reason))
            if self._matcher.matched is None:
                tail = self._matcher.flush()
                deltas += [ContentDelta(tail)] if tail else []
        for delta in _joined(deltas) if len(deltas) > 1 else deltas:
            parts += self._show(delta)
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif reason is not None:
            called = reason == "stop" and bool(self._calls)
            self.finish_reason = "tool_calls" if called else reason
        if self.finish_reason is not None:
            parts.append(self._part(_texts(False, ""), self.finish_reason))
        return parts

    def _read(self, event: TokenEvent) -> list[Delta]:
        self.parts = []
        watched = event.step is not None
        if not (watched or self._stops or self._with_logprobs):
            ids = event.token_ids
            self.num_tokens += len(ids)
            if not self._hidden_ids.isdisjoint(ids):
                ids = tuple(i for i in ids if i not in self._hidden_ids)
            return self._parser.push(ids)
        deltas: list[Delta] = []
        for i, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if token_id in self._hidden_ids:
                if watched:
                    self.parts.append("control")
                continue
            before = self._parser.num_reasoning_tokens
            deltas += self._filter(self._parser.push((token_id,)))
            reasoning = self._parser.num_reasoning_tokens > before
            if self._with_logprobs and event.logprobs:
                self._note(event.logprobs[i], reasoning)
            if watched:
                control = token_id in self._model.tokenizer.control_ids
                text = "reasoning" if reasoning else "content"
                self.parts.append("control" if control else text)
            if self._matcher.matched is not None:
                break
        return deltas

    def _note(self, entry: TokenLogprob, reasoning: bool) -> None:
        shown = chat_logprob(self._model, entry)
        key = "reasoning_content" if reasoning else "content"
        self._logprobs[key].append(shown)
        self._unsent_logprobs[key].append(shown)

    def _filter(self, deltas: list[Delta]) -> list[Delta]:
        """Passes content through the stop matcher; nothing comes after a match."""
        if not self._stops:
            return deltas
        kept: list[Delta] = []
        for delta in deltas:
            if self._matcher.matched is not None:
                break
            if isinstance(delta, ContentDelta):
                safe = self._matcher.push(delta.text)
                kept += [ContentDelta(safe)] if safe else []
                continue
            if isinstance(delta, ToolCallDelta):
                # No content follows a call, so what was held back cannot become a stop string.
                held = self._matcher.flush()
                kept += [ContentDelta(held)] if held else []
            kept.append(delta)
        return kept

    def _show(self, delta: Delta) -> list[Json]:
        """Keeps a delta for `whole` and returns its stream object."""
        if isinstance(delta, ContentDelta):
            self._content.append(delta.text)
            return [self._part(_texts(False, delta.text))]
        if isinstance(delta, ReasoningDelta):
            self._reasoning.append(delta.text)
            return [self._part(_texts(True, delta.text))]
        if delta.index == len(self._calls):
            function = {"name": delta.name or "", "arguments": delta.arguments}
            call_id = f"call_{delta.index:02d}_{secrets.token_urlsafe(18)}"
            self._calls.append({"id": call_id, "type": "function", "function": dict(function)})
            shown = {"index": delta.index, "id": call_id, "type": "function", "function": function}
        else:
            self._calls[delta.index]["function"]["arguments"] += delta.arguments
            shown = {"index": delta.index, "function": {"arguments": delta.arguments}}
        return [self._part({"tool_calls": [shown]})]

    def silence(self) -> Json:
        """A stream object without text."""
        return self._part(_texts(False, ""))

    def _part(self, delta: Json, finish_reason: str | None = None) -> Json:
        logprobs = None
        if self._with_logprobs and any(self._unsent_logprobs.values()):
            logprobs = _shown_logprobs(self._unsent_logprobs)
            self._unsent_logprobs = {"content": [], "reasoning_content": []}
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def whole(self) -> Json:
        """The choice of a response that is not streamed."""
        message: Json = {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning_content": "".join(self._reasoning) if self._thinking else None,
        }
        if self._calls:
            # The streamed pieces repeat a repeated parameter; a whole answer gives its last value.
            for call, parsed in zip(self._calls, self._parser.tool_calls, strict=True):
                call["function"]["arguments"] = parsed.arguments
            message["tool_calls"] = self._calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": _shown_logprobs(self._logprobs) if self._with_logprobs else None,
            "finish_reason": self.finish_reason,
        }


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind of text as one: a step of several tokens is one chunk."""
    joined = deltas[:1]
    for delta in deltas[1:]:
        last = joined[-1]
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def _shown_logprobs(entries: dict[str, list[Json]]) -> Json:
    """The lists of both kinds of text; null for one without tokens, as DeepSeek's API has it."""
    return {kind: kept or None for kind, kept in entries.items()}


def _texts(reasoning: bool, value: str) -> Json:
    """Both text keys of a delta, one of them null."""
    if reasoning:
        return {"content": None, "reasoning_content": value}
    return {"content": value, "reasoning_content": None}
