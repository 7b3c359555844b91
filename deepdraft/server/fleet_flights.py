"""What a front knows of the engines of its fleet and of the requests on their way.

Owns: the records, what an engine's load is worth, which requests can go on elsewhere.
Knows nothing of: how they change (`fleet_router`), sockets, HTTP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepdraft.errors import DeepdraftError
from deepdraft.server.fleet_wire import Identity, Kin, Load, Times, ToEngine
from deepdraft.types import DecodeStats, GenerateRequest, TokenEvent

ANSWER_TOKENS = 64
"""For the estimate of what a request at hand still costs."""

Deliver = Callable[[TokenEvent], None]
Opened = Callable[["DeepdraftError | None", "Seat | None"], None]


class Seat:
    """One engine, over one connection. A new connection is a new seat."""

    def __init__(
        self,
        identity: Identity,
        post: Callable[[ToEngine], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`post` sends a message and never raises; `close` ends the connection."""
        self.identity, self.post, self.close = identity, post, close
        self.state = "ready"
        """ready, quiet (nothing was heard for a while), draining, gone."""
        self.load = Load()
        self._foreign = self._foreign_to_read = 0
        """Requests that other fronts have there, and the tokens of their prompts."""
        self.stats: dict[str, int] = {}
        """The engine's counters, as it last told them."""
        self.times: dict[str, Times] = {}
        self.heard = 0.0
        self.flights: dict[str, Flight] = {}
        """By the id of the attempt."""
        self.rows = 0
        """That this front's requests took there: tokens of prompts computed, tokens answered."""

    @property
    def label(self) -> str:
        """The replica's name."""
        return self.identity.label

    def report(self, load: Load) -> None:
        """Takes what the engine says. Of this front's own requests it is always late, so only what
        is beyond them counts."""
        self.load = load
        self._foreign = max(0, load.running + load.waiting - len(self.flights))
        self._foreign_to_read = max(0, load.to_read - self._to_read)

    @property
    def _to_read(self) -> int:
        return sum(len(f.source.prompt_ids) for f in self.flights.values() if not f.tokens)

    @property
    def cost(self) -> float:
        """Milliseconds, roughly, until a new request would have a few tokens: what is to be read
        before it, and the steps that it shares."""
        load = self.load
        active = self._foreign + len(self.flights)
        reading = (self._foreign_to_read + self._to_read) * (load.prompt_us or 1.0)
        queue = max(0, active - load.running - load.free) if load.free or load.running else 0
        return 1e-3 * (reading + (active + queue) * (load.row_us or 1.0) * ANSWER_TOKENS)


@dataclass(eq=False)
class Flight:
    """One request on its way."""

    source: GenerateRequest
    deliver: Deliver
    streamed: bool
    """Its client sees tokens as they come."""
    begun: float
    kin: Kin
    generation: tuple[str, str]
    """Of the engines that it is for, or has tokens from."""
    seat: Seat | None = None
    attempt: str = ""
    tokens: list[int] = field(default_factory=list)
    """Those delivered."""
    losses: int = 0
    """Engines that were lost under it."""
    faults: int = 0
    """Failures of its own elsewhere."""
    opening: Opening | None = None
    waits_until: float = 0.0
    """It has no engine, and is given up then."""
    stats: DecodeStats | None = None
    """Of the attempts before this one, as far as they are known."""
    last_stats: DecodeStats | None = None
    step_base: int = 0
    last_step: int = 0
    done: bool = False

    @property
    def num_standing(self) -> int:
        """Tokens of the answer so far."""
        return len(self.source.generated_ids) + len(self.tokens)

    def request(self, now: float) -> GenerateRequest:
        """What is to be asked now: behind the tokens that stand, in the time that is left."""
        source = self.source
        left = source.deadline_s
        if left is not None:
            left = max(0.001, left - (now - self.begun))
        standing = (*source.generated_ids, *self.tokens)
        return replace(source, generated_ids=standing, deadline_s=left)

    def expired(self, now: float) -> bool:
        """Its own time is up."""
        limit = self.source.deadline_s
        return limit is not None and now - self.begun >= limit


@dataclass(eq=False)
class Opening:
    """The requests of one job, until an engine has taken them."""

    flights: list[Flight]
    opened: Opened
    fresh: bool
    """Nobody has been told yet that they run."""
    refused: set[str] = field(default_factory=set)
    """Engines (incarnations) that would not."""
    error: DeepdraftError | None = None
    """What the last of them said."""


def continues(request: GenerateRequest, rule: str) -> bool:
    """Whether another engine chooses the same tokens behind those that stand; `rule`: the engines'
    own."""
    asked = request.speculation.rule or rule
    return request.sampling.temperature == 0.0 or asked == "coupled"


def sum_stats(first: DecodeStats, second: DecodeStats) -> DecodeStats:
    """The record of an answer that two engines gave one after the other."""
    steps = first.steps + second.steps
    accepted = first.accepted + second.accepted
    pairs = itertools.zip_longest(first.histogram, second.histogram, fillvalue=0)
    ms = first.steps * first.average_iteration_ms + second.steps * second.average_iteration_ms
    return DecodeStats(
        rule=second.rule,
        steps=steps,
        drafted_steps=first.drafted_steps + second.drafted_steps,
        drafts=first.drafts + second.drafts,
        verified=first.verified + second.verified,
        accepted=accepted,
        histogram=tuple(a + b for a, b in pairs),
        average_iteration_ms=ms / steps,
        average_accept_length=1 + accepted / steps,
    )
