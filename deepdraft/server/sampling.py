"""From the sampling fields of a body to the engine's records.

Owns: ranges of sampling fields, defaults, the limit of an answer's length, seeds.
Knows nothing of: prompts, wire formats of answers, the engine's queue.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deepdraft.errors import PromptTooLong, RequestError
from deepdraft.server.schema import SamplingFields
from deepdraft.text.conversation import Family
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams, TokenGrammar

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_DRAFTS = 15
MAX_PRIORITY = 1000
MAX_USER_CHARS = 512
_DRAFTS_RULE = f"from 0 to {MAX_DRAFTS}; more than the server's own number has no effect"
DEFAULT_NEW_TOKENS = 8_192
DEFAULT_NEW_TOKENS_THINKING = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What the wire formats need to know of the model being served."""

    names: tuple[str, ...]
    """Every name that it answers to; the first is the default."""
    tokenizer: Tokenizer
    family: Family
    vocab_size: int
    max_tokens: int
    eos_token_id: int
    bos_token_id: int | None
    more_end_ids: frozenset[int] = frozenset()
    """Other tokens that end an answer."""
    fingerprint: str
    created: int
    defaults: Mapping[str, float] = field(default_factory=dict)
    """The checkpoint's own sampling defaults, by field name."""

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end an answer."""
        return self.more_end_ids | {self.eos_token_id}


def check_range(value: float | None, name: str, low: float, high: float, rule: str) -> None:
    """Raises RequestError unless `value` is None or in [low, high]."""
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be {rule}", param=name)


def check_shared(body: SamplingFields, vocab_size: int) -> None:
    """Raises RequestError for the first shared field that is out of range."""
    check_range(body.temperature, "temperature", 0, 2, "from 0 to 2")
    check_range(body.top_p, "top_p", 5e-324, 1, "above 0 and at most 1")
    check_range(body.top_k, "top_k", -1, 1 << 31, "at least 1, or 0 or -1 for no limit")
    check_range(body.min_p, "min_p", 0, 1, "from 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        check_range(getattr(body, name), name, -2, 2, "from -2 to 2")
    check_range(body.repetition_penalty, "repetition_penalty", 0.01, 100, "from 0.01 to 100")
    check_range(body.n, "n", 1, MAX_CHOICES, f"from 1 to {MAX_CHOICES}")
    check_range(body.max_tokens, "max_tokens", 1, float("inf"), "at least 1")
    check_range(body.seed, "seed", -(1 << 63), (1 << 63) - 1, "a 64-bit signed integer")
    most = MAX_PRIORITY
    check_range(body.priority, "priority", -most, most, f"from {-most} to {most}")
    if len(body.user_id or "") > MAX_USER_CHARS:
        raise RequestError(
            f"user_id has {len(body.user_id or '')} characters; at most {MAX_USER_CHARS} go",
            param="user_id",
        )
    if body.speculation is not None:
        check_range(body.speculation.drafts, "speculation.drafts", 0, MAX_DRAFTS, _DRAFTS_RULE)
        if body.speculation.steps and not body.stream:
            raise RequestError(
                "speculation.steps needs stream: true; speculation.report sums them up",
                param="speculation.steps",
            )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    for token_id in _limited(body.stop_token_ids or (), MAX_STOP_IDS, "stop_token_ids"):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token_id}; token ids run from 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )


def _limited(values: Iterable[int], most: int, name: str) -> list[int]:
    values = list(values)
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries; at most {most} go", param=name)
    return values


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """The stop strings: at most 16, none of them empty."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} entries; at most {MAX_STOPS} go", param="stop")
    for text in stops:
        if not text:
            raise RequestError("stop holds an empty string", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARS} go",
                param="stop",
            )
    return stops


def stop_ids(body: SamplingFields, model: ModelView) -> frozenset[int]:
    """Ids that end the answer: the model's own ones unless `ignore_eos`, and the requested ones."""
    own = frozenset() if body.ignore_eos else model.end_ids
    return own.union(body.stop_token_ids or ())


def _logit_bias(body: SamplingFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} go", param="logit_bias"
        )
    pairs: dict[int, float] = {}
    for key, value in biases.items():
        # isascii: int() would also read other scripts' digits.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias key {key!r} is no token id; ids run from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        check_range(value, f"logit_bias.{key}", -100, 100, "from -100 to 100")
        pairs[int(key)] = value
    return tuple(pairs.items())


def sampling_params(body: SamplingFields, model: ModelView, logprobs: int | None) -> SamplingParams:
    """How the tokens of the first choice are drawn. Fields that are absent take the defaults."""

    def value(name: str, default: float) -> float:
        given = getattr(body, name)
        return model.defaults.get(name, default) if given is None else given

    return SamplingParams(
        temperature=float(value("temperature", 1.0)),
        top_p=float(value("top_p", 1.0)),
        top_k=max(0, int(value("top_k", 0))),
        min_p=float(value("min_p", 0.0)),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        logit_bias=_logit_bias(body, model.vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed % (1 << 64),
        logprobs=logprobs,
    )


def speculation_params(body: SamplingFields) -> SpeculationParams:
    """What the body asks of speculation."""
    asked = body.speculation
    if asked is None:
        return SpeculationParams()
    return SpeculationParams(
        rule=asked.rule,
        num_drafts=asked.drafts,
        report=bool(asked.report),
        steps=bool(asked.steps),
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of one request; choice 0 has the request's own one."""
    return seed ^ (index * 0xD1342543DE82EF95 % (1 << 64))


def num_new_tokens(
    wanted: int | None, num_prompt: int, model: ModelView, default: int, *, field: str = "messages"
) -> int:
    """Length limit of the answer: what was asked for, or a default cut to the room that is left.

    Raises PromptTooLong when the prompt, which came in `field`, or both together do not fit the
    context.
    """
    room = model.max_tokens - num_prompt
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens; this model's context is {model.max_tokens} "
            "tokens for prompt and answer together: shorten the prompt",
            param=field,
        )
    if wanted is None:
        return min(default, room)
    if wanted > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and {wanted} more were asked for; this model's "
            f"context is {model.max_tokens} tokens: ask for at most {room}",
            param="max_tokens",
        )
    return wanted


def generate_requests(
    response_id: str,
    prompts: Iterable[tuple[int, ...]],
    body: SamplingFields,
    params: SamplingParams,
    limits: Iterable[int],
    stops: frozenset[int],
    grammar: TokenGrammar | None = None,
) -> list[GenerateRequest]:
    """One request per choice: `n` for each prompt, named by the response's id and the index."""
    requests, n, speculation = [], body.n or 1, speculation_params(body)
    for prompt_ids, limit in zip(prompts, limits, strict=True):
        for _ in range(n):
            index = len(requests)
            seed = choice_seed(params.seed, index % n)
            requests.append(
                GenerateRequest(
                    request_id=f"{response_id}-{index}",
                    prompt_ids=prompt_ids,
                    sampling=replace(params, seed=seed),
                    max_new_tokens=limit,
                    stop_token_ids=stops,
                    speculation=speculation,
                    grammar=grammar,
                    tenant=body.user_id or "",
                    priority=body.priority or 0,
                )
            )
    return requests
