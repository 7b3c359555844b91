"""What is kept of a request that has ended: its times, and its line in the log.

Owns: the spans of a request and their histograms, the event `request_end`.
Knows nothing of: steps, queues, why a request ended.
"""

from typing import Any

from deepdraft.engine.request import Request
from deepdraft.telemetry import Histogram, log_event
from deepdraft.types import DecodeStats, FinishReason

SPANS = ("queue", "prefill", "first_token", "decode", "request")
"""What is timed of a request: until it has a sequence, from there to its first token, both of
these, from the first to the last token, and all of it."""
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Endings:
    """The requests that have ended."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(_BOUNDS_S) for name in SPANS}

    def note(
        self, request: Request, reason: FinishReason, stats: DecodeStats | None, now: float
    ) -> None:
        """Counts and logs one; `now` by the clock of the request's times, in seconds."""
        record: dict[str, Any] = {
            "request_id": request.request_id,
            "finish_reason": reason,
            "prompt_tokens": request.num_prompt,
            "completion_tokens": len(request.output_ids),
            **self._spans_ms(request, now),
        }
        if request.cached is not None:
            record |= {
                "cached_tokens": request.cached.num_tokens,
                "cache_source": request.cached.source,
                "cache_provenance": request.cached.provenance,
            }
        if stats is not None:
            record |= {
                "rule": stats.rule,
                "steps": stats.steps,
                "average_iteration_ms": round(stats.average_iteration_ms, 3),
                "average_accept_length": round(stats.average_accept_length, 3),
                "accepted_drafts_histogram": stats.histogram,
                "drafts": stats.drafts,
                "drafts_cut_by_confidence": stats.cut,
            }
        log_event("request_end", record)

    def _spans_ms(self, request: Request, now: float) -> dict[str, float]:
        at = request.arrived
        spans = {"request": now - at}
        if request.opened:
            spans["queue"] = request.opened - at
        if request.answered:
            spans["first_token"], spans["decode"] = request.answered - at, now - request.answered
            spans["prefill"] = request.answered - request.opened
        for name, seconds in spans.items():
            self.histograms[name].observe(seconds)
        return {f"{name}_ms": round(1e3 * spans[name], 2) for name in SPANS if name in spans}
