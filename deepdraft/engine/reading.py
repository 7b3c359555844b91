"""What is said of a long prompt while it is read.

Owns: when something is said, and the rate. Knows nothing of: how prompts are read, HTTP.
"""

from deepdraft.engine.request import Request
from deepdraft.telemetry import logger
from deepdraft.types import PromptProgress

EVERY_S = 1.0
"""Between two events of one request at least."""
SPACING = 20
"""The next event comes after the 20th part of the time so far: some clients end a stream that
brings 300 lines without data (go-openai does), two of which are one event."""
LOG_EVERY_S = 10.0


class Reading:
    """Progress of prompts. Only the engine's thread calls it."""

    def __init__(self) -> None:
        self._logged = 0.0

    def after(self, request: Request, start: int, now: float) -> PromptProgress | None:
        """The request's prompt was read from `start` on until `now`: what its reader is told, if
        anything. What came from the KV cache does not count towards the rate."""
        since, before = request.told or (request.opened, start)
        request.told = since, before
        done, total = request.num_computed, request.num_context
        spacing_s = max(EVERY_S, (now - request.opened) / SPACING)
        if now - since < spacing_s or now <= since or done <= before:
            return None
        rate = (done - before) / (now - since)
        request.told = now, done
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            logger.info(
                "%s: %d of %d prompt tokens, %.0f a second", request.request_id, done, total, rate
            )
        return PromptProgress(
            done=done, total=total, tokens_per_second=rate, seconds_left=(total - done) / rate
        )
