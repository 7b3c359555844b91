"""The plain completions format: a body to engine requests, token events to its answers.

Owns: the reading of a completions body, the shape of its answers.
Knows nothing of: chat, sockets, the engine's thread.
"""

from collections.abc import Sequence

from deepdraft.errors import RequestError
from deepdraft.server import sampling, schema
from deepdraft.server.job import Choice, Job, Json, engine_reason, response_id, token_text
from deepdraft.server.sampling import ModelView
from deepdraft.server.structured import completion_enforcement
from deepdraft.text.parse import StopMatcher
from deepdraft.text.prompt import render_fim
from deepdraft.types import TokenEvent, TokenLogprob

MAX_PROMPTS = 64


class CompletionJob(Job):
    """A plain completion request."""

    kind = "text_completion"
    chunk_kind = "text_completion"


def completion_job(
    body: schema.CompletionRequest, name: str, model: ModelView, ignored: tuple[str, ...] = ()
) -> CompletionJob:
    """Checks a completions body and makes one engine request per prompt and choice.

    Raises RequestError or PromptTooLong, with the field's path where there is one.
    """
    sampling.check_shared(body, model.vocab_size)
    _check_own_fields(body)
    prompts = _prompts(body, model)
    n, stops = body.n or 1, sampling.stop_strings(body)
    limits = [
        sampling.num_new_tokens(
            body.max_tokens, len(ids), model, sampling.DEFAULT_NEW_TOKENS, field="prompt"
        )
        for ids in prompts
    ]
    end_ids = sampling.stop_ids(body, model)
    enforced = completion_enforcement(body, model)
    id = response_id("cmpl")
    requests = sampling.generate_requests(
        id,
        prompts,
        body,
        sampling.sampling_params(body, model, body.logprobs),
        limits,
        end_ids,
        enforced.grammar,
    )
    choices: list[Choice] = [
        TextChoice(
            i,
            model=model,
            echo=_echo_text(body, prompts, i // n, model) if body.echo else "",
            stops=stops,
            hidden_ids=end_ids | model.end_ids,
            logprobs=body.logprobs is not None,
        )
        for i in range(len(requests))
    ]
    return CompletionJob(
        model,
        id=id,
        name=name,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=ignored + enforced.ignored,
        num_prompt=sum(len(ids) for ids in prompts),
        requests=requests,
        choices=choices,
    )


def _check_own_fields(body: schema.CompletionRequest) -> None:
    most = sampling.MAX_LOGPROBS
    sampling.check_range(body.logprobs, "logprobs", 0, most, f"from 0 to {most}")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is refused unless it equals n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs is refused: probabilities of the prompt's tokens are not served",
            param="echo",
        )
    if body.suffix is not None and not isinstance(body.prompt, str):
        raise RequestError("suffix needs a prompt that is one string", param="suffix")
    if body.suffix is not None and body.echo:
        raise RequestError("suffix cannot be combined with echo", param="suffix")


def _prompts(body: schema.CompletionRequest, model: ModelView) -> list[tuple[int, ...]]:
    prompt = body.prompt
    if body.suffix is not None:
        assert isinstance(prompt, str)
        fim = render_fim(prompt, body.suffix, model.tokenizer, max_tokens=model.max_tokens)
        return [fim.token_ids]
    many: list[str | list[int]]
    if isinstance(prompt, str):
        many = [prompt]
    elif not prompt:
        raise RequestError("prompt is empty", param="prompt")
    elif all(isinstance(p, int) for p in prompt):
        many = [[p for p in prompt if isinstance(p, int)]]
    elif all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) for p in prompt):
        many = [p for p in prompt if not isinstance(p, int)]
    else:
        raise RequestError("prompt mixes texts, token ids and lists; send one kind", param="prompt")
    if len(many) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(many)} entries; at most {MAX_PROMPTS} go", param="prompt"
        )
    return [_encode(one, body, model) for one in many]


def _encode(
    prompt: str | list[int], body: schema.CompletionRequest, model: ModelView
) -> tuple[int, ...]:
    if isinstance(prompt, list):
        bad = [i for i in prompt if not 0 <= i < model.vocab_size]
        if bad:
            raise RequestError(
                f"prompt holds token id {bad[0]}; ids run from 0 to {model.vocab_size - 1}",
                param="prompt",
            )
        ids = prompt
    else:
        encode = model.tokenizer.encode_text
        if body.parse_special:
            encode = model.tokenizer.encode_with_control
        model.tokenizer.check_fits(prompt, model.max_tokens, param="prompt")
        ids = encode(prompt)
        bos = model.bos_token_id
        wants_bos = body.add_special_tokens is not False
        if bos is not None and wants_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
    if not ids:
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    return tuple(ids)


def _echo_text(
    body: schema.CompletionRequest, prompts: list[tuple[int, ...]], index: int, model: ModelView
) -> str:
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    # A flat list of ids is one prompt: its entries are no texts.
    one = prompt[index] if len(prompts) == len(prompt) else None
    return one if isinstance(one, str) else model.tokenizer.decode(prompts[index])


class TextChoice(Choice):
    """One completion."""

    def __init__(
        self,
        index: int,
        *,
        model: ModelView,
        echo: str,
        stops: Sequence[str],
        hidden_ids: frozenset[int],
        logprobs: bool,
    ) -> None:
        super().__init__(index)
        self._model = model
        self._decoder = model.tokenizer.incremental()
        self._matcher = StopMatcher(stops)
        self._hidden_ids = hidden_ids
        self._with_logprobs = logprobs
        self._unsent_echo = echo
        self._text: list[str] = []
        # Offsets count in the answer with its echo, as clients cut their own prompt off by them.
        self._offset = len(echo)
        self._logprobs = _no_logprobs()
        self._unsent_logprobs = _no_logprobs()

    def push(self, event: TokenEvent) -> list[Json]:
        """Takes an event; returns the stream's objects for this choice."""
        pieces = [self._unsent_echo]
        self._unsent_echo = ""
        self.parts = []
        for i, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            hidden = token_id in self._hidden_ids
            if event.step is not None:
                self.parts.append("control" if hidden else "content")
            if hidden:
                continue
            pieces.append(self._matcher.push(self._decoder.push(token_id)))
            if self._with_logprobs and event.logprobs:
                self._note(event.logprobs[i])
            if self._matcher.matched is not None:
                break
        reason = engine_reason(event)
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif reason is not None:
            pieces.append(self._matcher.push(self._decoder.flush()))
            pieces.append("" if self._matcher.matched else self._matcher.flush())
            self.finish_reason = reason
        text = "".join(pieces)
        self._text.append(text)
        if not text and self.finish_reason is None:
            return []
        logprobs = None
        if self._with_logprobs:
            logprobs, self._unsent_logprobs = self._unsent_logprobs, _no_logprobs()
        return [self._shape(text, logprobs)]

    def _note(self, entry: TokenLogprob) -> None:
        text, _ = token_text(self._model, entry.token_id)
        top = {token_text(self._model, i)[0]: p for i, p in reversed(entry.top)}
        for record in (self._logprobs, self._unsent_logprobs):
            record["tokens"].append(text)
            record["token_logprobs"].append(max(entry.logprob, -9999.0))
            record["top_logprobs"].append(top)
            record["text_offset"].append(self._offset)
        self._offset += len(text)

    def silence(self) -> Json:
        """A stream object without text."""
        return self._shape("", None)

    def whole(self) -> Json:
        """The choice of a response that is not streamed."""
        return self._shape("".join(self._text), self._logprobs if self._with_logprobs else None)

    def _shape(self, text: str, logprobs: Json | None) -> Json:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
