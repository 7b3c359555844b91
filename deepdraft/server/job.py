"""One HTTP request on its way: what to ask the engine, and its events as wire objects.

Owns: the contract between a wire format and the code that sends bytes; usage; log-probability
records that both formats share.
Knows nothing of: sockets, the engine's thread.
"""

import functools
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from deepdraft.errors import DeepdraftError, EngineError, Overloaded, RequestError
from deepdraft.server.sampling import ModelView
from deepdraft.server.steps import StepView
from deepdraft.types import (
    CacheUse,
    DecodeStats,
    FinishReason,
    GenerateRequest,
    TokenEvent,
    TokenLogprob,
)

Json = dict[str, Any]


class Expired(DeepdraftError):
    """The time that a request may take is over (HTTP 504)."""

    http_status = 504
    code = "deadline_exceeded"


def response_id(prefix: str) -> str:
    """A new id for one response."""
    return f"{prefix}-{secrets.token_hex(12)}"


def token_text(model: ModelView, token_id: int) -> tuple[str, list[int]]:
    """A token as text (bytes that are no whole character show as U+FFFD) and as bytes."""
    raw = model.tokenizer.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), list(raw)


def chat_logprob(model: ModelView, entry: TokenLogprob) -> Json:
    """One entry of a chat answer's log-probabilities."""

    def show(token_id: int, logprob: float) -> Json:
        text, raw = token_text(model, token_id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}

    shown = show(entry.token_id, entry.logprob)
    shown["top_logprobs"] = [show(i, p) for i, p in entry.top]
    return shown


class Choice(ABC):
    """One answer of a response while its tokens arrive."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        """Tokens of the answer, as far as it goes: none behind a stop string."""
        self.stats: DecodeStats | None = None
        self.cached: CacheUse | None = None
        """What of the prompt came from the KV cache."""
        self.finish_reason: str | None = None
        self.parts: list[str] = []
        """Where the tokens of the last event went: reasoning, content or control. Kept for an
        event with a step."""

    @property
    def num_reasoning(self) -> int:
        """Tokens that belong to the reasoning."""
        return 0

    @abstractmethod
    def push(self, event: TokenEvent) -> list[Json]:
        """Takes an event; returns the stream's objects for this choice, finish object included."""

    @abstractmethod
    def silence(self) -> Json:
        """A stream object without text."""

    @abstractmethod
    def whole(self) -> Json:
        """The choice of a response that is not streamed, once `finish_reason` is set."""


class Job(ABC):
    """A request turned into engine requests, and their events into a response."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        model: ModelView,
        *,
        id: str,
        name: str,
        stream: bool,
        include_usage: bool,
        ignored: tuple[str, ...],
        num_prompt: int,
        requests: list[GenerateRequest],
        choices: list[Choice],
    ) -> None:
        self.model = model
        self.id = id
        self.name = name
        self.stream = stream
        self.include_usage = include_usage
        self.ignored = ignored
        self.num_prompt = num_prompt
        self.requests = requests
        self.choices = choices
        self.multi_turn = False
        """The prompt holds an earlier answer."""
        self.created = int(time.time())
        self._by_request = {r.request_id: c for r, c in zip(requests, choices, strict=True)}
        self._steps: dict[str, StepView] = {}

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        # Asked for every token: no generator for that.
        for choice in self.choices:
            if choice.finish_reason is None:
                return False
        return True

    def push(self, event: TokenEvent) -> list[Json]:
        """Takes an engine event; returns stream chunks.

        Raises EngineError when the engine failed on it, RequestError when that was the request's
        own fault, Overloaded when it was told to stop. A choice that ended by a stop string
        ignores what the engine still sends.
        """
        choice = self._by_request[event.request_id]
        if choice.finish_reason is not None or event.progress is not None:
            return []
        if event.finish_reason is not None:
            _check_end(event)
        choice.cached = event.cached or choice.cached
        choice.stats = event.stats or choice.stats
        parts = choice.push(event)
        if event.step is not None:
            parts = parts or [choice.silence()]
            view = self._steps.get(event.request_id)
            if view is None:
                view = self._steps[event.request_id] = StepView(self.model)
            parts[-1]["step"] = view.show(event.step, event.token_ids, choice.parts)
        if parts and parts[-1]["finish_reason"] is not None:
            parts[-1] |= self._report(choice)
        return [self._chunk([part]) for part in parts]

    def _report(self, choice: Choice) -> Json:
        """The counters of a choice's speculation, where they were asked for."""
        if not self.requests[0].speculation.report:
            return {}
        stats = choice.stats
        return {"speculation": None if stats is None else spec_record(stats)}

    def ended_early(self, event: TokenEvent) -> bool:
        """The choice of this event has ended although the engine would go on with it."""
        choice = self._by_request[event.request_id]
        return choice.finish_reason is not None and event.finish_reason is None

    def last_chunk(self) -> Json | None:
        """The chunk with the usage, when the client asked for it."""
        if not self.include_usage:
            return None
        return {**self._chunk([]), "usage": self.usage()}

    def response(self) -> Json:
        """The whole response of a request that is not streamed."""
        return {
            **self._head(self.kind),
            "choices": [c.whole() | self._report(c) for c in self.choices],
            "usage": self.usage(),
        }

    def usage(self) -> Json:
        """Token counts, in the spellings of OpenAI and of DeepSeek. A prompt counts once."""
        num_completion = sum(c.num_tokens for c in self.choices)
        uses = self._cache_uses()
        num_cached = sum(use.num_tokens for use in uses)
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": self.num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached, **self.cache_details()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.num_reasoning for c in self.choices)
            },
            "prompt_cache_hit_tokens": num_cached,
            "prompt_cache_miss_tokens": self.num_prompt - num_cached,
        }

    def _cache_uses(self) -> list[CacheUse]:
        """What each prompt took from the cache: of the choices of one prompt the first counts."""
        firsts: dict[int, CacheUse | None] = {}
        for request, choice in zip(self.requests, self.choices, strict=True):
            firsts.setdefault(id(request.prompt_ids), choice.cached)
        return [use for use in firsts.values() if use is not None]

    def cache_details(self) -> Json:
        """Where cached tokens came from and what they are worth; nothing where there are none."""
        uses = self._cache_uses()
        if not uses:
            return {}
        return {
            "cache_source": "+".join(dict.fromkeys(use.source for use in uses)),
            "cache_provenance": "+".join(dict.fromkeys(use.provenance for use in uses)),
        }

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "system_fingerprint": self.model.fingerprint,
        }

    @functools.cached_property
    def _chunk_head(self) -> Json:
        return self._head(self.chunk_kind)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._chunk_head, "choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk


def _check_end(event: TokenEvent) -> None:
    """Raises for the last event of an answer that did not end by itself."""
    if event.finish_reason == "error":
        message = event.error or "the engine failed"
        raise RequestError(message) if event.at_fault else EngineError(message)
    if event.finish_reason == "abort":
        raise Overloaded("the server is shutting down; the answer was cut off")
    if event.finish_reason == "timeout":
        raise Expired(
            "the time that this request may take is over; ask for less, or try again when the "
            "server is less busy"
        )


def spec_record(stats: DecodeStats) -> Json:
    """The counters of one answer's speculation."""
    return {
        "rule": stats.rule,
        "steps": stats.steps,
        "drafted_steps": stats.drafted_steps,
        "drafts": stats.drafts,
        "verified_drafts": stats.verified,
        "accepted_drafts": stats.accepted,
        "drafts_cut_by_confidence": stats.cut,
        "accepted_drafts_histogram": list(stats.histogram),
        "average_accept_length": round(stats.average_accept_length, 4),
        "average_iteration_ms": round(stats.average_iteration_ms, 4),
    }


def engine_reason(event: TokenEvent) -> FinishReason | None:
    """`stop` or `length` where the engine ended the answer by itself."""
    return event.finish_reason if event.finish_reason in ("stop", "length") else None
