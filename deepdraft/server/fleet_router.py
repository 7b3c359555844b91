"""Which engine a request runs on, and where it goes on when that one cannot.

Owns: the engines of a fleet as one front sees them, the requests on their way, the choice of an
engine, retries, resumed streams, and that no token reaches a client twice.
Knows nothing of: sockets, HTTP, how engines are found. There is no I/O here and no waiting: frames
come in by `hear`, time by `tick`. All calls come from one thread.

A request without a token may run anywhere. One with tokens goes on only where the answer will be
the same: on an engine of the same fingerprint, at temperature 0 or by the rule `coupled`, whose
noise is keyed by position. Every attempt has an id of its own, so what an engine says late of one
that was taken from it is nobody's.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from deepdraft.errors import DeepdraftError, EngineError, Overloaded
from deepdraft.server.fleet_flights import (
    Deliver,
    Flight,
    Opened,
    Opening,
    Seat,
    continues,
    sum_stats,
)
from deepdraft.server.fleet_wire import (
    Accepted,
    Beat,
    Cancel,
    Event,
    Events,
    Identity,
    Kin,
    Refused,
    RemoteSession,
    Submit,
    ask_of,
    error_of,
    token_event,
)
from deepdraft.telemetry import Counters, logger
from deepdraft.types import GenerateRequest, TokenEvent

MOST_LOSSES = 3
"""A request that was on so many engines when they were lost may be what they died of."""
LEAVING_S = 5.0
"""So long a request waits for an engine where all that are known are leaving."""

OWN_PAUSE_S = 2.0
"""Between two calls of `tick`; more, and the silence was this process's own."""


class Router:
    """All engines and all requests of one front."""

    def __init__(
        self,
        *,
        resume: bool,
        sticky: bool = False,
        quiet_s: float = 5.0,
        hang_s: float = 60.0,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """`resume`: streams under way go on elsewhere. `sticky`: a conversation stays where it is
        while it can. `quiet_s`: silence of an engine after which
        requests that can leave it do; `hang_s`: after which it is given up; `patience_s`: how long
        a request that lost its engine waits for another one."""
        self.resume, self.quiet_s, self.hang_s = resume, quiet_s, hang_s
        self._sticky = sticky
        self.patience_s = patience_s
        self.counters = Counters()
        self.seats: list[Seat] = []
        self._clock, self._chance = clock, chance or random.Random()
        self._flights: dict[str, Flight] = {}
        """By the id that their reader knows."""
        self._homeless: list[Opening] = []
        """Those that wait for an engine."""
        self._numbers = itertools.count(1)
        self._ticked = self._clock()

    # Engines

    def join(self, seat: Seat) -> None:
        """An engine can be used."""
        seat.heard = self._clock()
        # As much as the one that did least: a new one is not to get all that comes.
        seat.rows = min((s.rows for s in self.seats), default=0)
        self.seats.append(seat)
        self._place_homeless()

    def leave(self, seat: Seat, why: str) -> None:
        """An engine cannot be used any more, nor can this connection to it."""
        if seat.state == "gone":
            return
        seat.state = "gone"
        self.seats.remove(seat)
        seat.close()
        flights, seat.flights = list(seat.flights.values()), {}
        if flights:
            self.counters.add("engines_lost")
            logger.warning("replica %s %s; %d requests move", seat.label, why, len(flights))
        for opening in _openings(flights):
            for flight in opening.flights:
                flight.seat = None
                flight.losses += 1
            self._again(opening)
        for flight in flights:
            if flight.seat is seat:
                flight.losses += 1
                self._move(flight, f"the replica that ran this request {why}")

    def ready(self, kin: Kin | None = None) -> list[Seat]:
        """Engines that take requests; those of one kind."""
        ready = [seat for seat in self.seats if seat.state == "ready"]
        return ready if kin is None else [s for s in ready if s.identity.kin == kin]

    # Requests

    def submit(
        self,
        requests: Sequence[GenerateRequest],
        deliver: Deliver,
        opened: Opened,
        identity: Identity,
        *,
        streamed: bool,
    ) -> None:
        """Finds an engine for the requests of a job, preferably of the generation of `identity`.
        `opened` is called once: with the engine that has taken them, or with why none does. Then
        `deliver` gets their events."""
        now, generation = self._clock(), identity.generation
        flights = [Flight(r, deliver, streamed, now, identity.kin, generation) for r in requests]
        self._flights |= {f.source.request_id: f for f in flights}
        self._open(Opening(flights, opened, fresh=True))

    def cancel(self, *request_ids: str) -> None:
        """Ends requests; unknown and finished ids are fine. Their last event says "abort". A job
        that no engine has taken yet is to be cancelled as a whole."""
        for id in request_ids:
            flight = self._flights.get(id)
            if flight is not None:
                opening = flight.opening
                self._take_off(flight)
                if opening is None or not opening.fresh:
                    self._end(flight, TokenEvent(request_id=id, finish_reason="abort"))
                    continue
                self._drop(flight)
                if not opening.flights:
                    opening.opened(Overloaded("the request was cancelled"), None)

    def cancel_all(self) -> None:
        """Ends every request."""
        self.cancel(*self._flights)

    @property
    def num_flights(self) -> int:
        """Requests on their way."""
        return len(self._flights)

    @property
    def num_homeless(self) -> int:
        """Of them, those without an engine."""
        return sum(len(o.flights) for o in self._homeless)

    # What engines say

    def hear(self, seat: Seat, message: Accepted | Refused | Events | Beat) -> None:
        """Takes a message of an engine."""
        if seat.state == "gone":
            return
        seat.heard = self._clock()
        woke = seat.state == "quiet"
        if woke:
            seat.state = "ready"
        if isinstance(message, Events):
            for event in message.events:
                self._event(seat, event)
        elif isinstance(message, Beat):
            self._beat(seat, message)
        elif isinstance(message, Accepted):
            for opening in _openings(self._of(seat, message.ids)):
                self._accepted(opening, seat)
        else:
            for opening in _openings(self._of(seat, message.ids)):
                self._refused(opening, seat, message)
        if woke and seat.state == "ready":
            self._place_homeless()

    def tick(self) -> None:
        """To be called a few times a second: what silence means."""
        now = self._clock()
        pause_s = now - self._ticked
        if pause_s > OWN_PAUSE_S:
            # This process itself was stopped: what engines said meanwhile is still to be read, and
            # nobody looked for an engine.
            for seat in self.seats:
                seat.heard = now
            for flight in (f for opening in self._homeless for f in opening.flights):
                flight.waits_until += pause_s
        self._ticked = now
        for seat in list(self.seats):
            silence = now - seat.heard
            if silence >= self.hang_s:
                self.leave(seat, f"has not answered for {silence:.0f} s")
            elif silence >= self.quiet_s and seat.state != "gone":
                if seat.state == "ready":
                    logger.warning("replica %s is quiet", seat.label)
                    seat.state = "quiet"
                self._leave_quiet(seat)
        for opening in list(self._homeless):
            for flight in list(opening.flights):
                if flight.expired(now):
                    self._take_off(flight)
                    id = flight.source.request_id
                    self._end(flight, TokenEvent(request_id=id, finish_reason="timeout"))
                elif now >= self._limit(flight, now):
                    self._take_off(flight)
                    self._fail(flight, "no replica can go on with this request; ask again")
        self._place_homeless()

    # Placing

    def _choose(self, flights: Sequence[Flight], but: Iterable[str]) -> Seat | None:
        """Of two engines drawn at random the one with less to do, where both have nothing the one
        that did less so far; or the conversation's own."""
        kin, generation, not_these = flights[0].kin, flights[0].generation, set(but)
        every = [s for s in self.ready(kin) if s.identity.incarnation not in not_these]
        seats = [s for s in every if s.identity.generation == generation]
        if not seats and not any(f.tokens for f in flights):
            seats = every
        if not seats:
            return None
        session = flights[0].source.session
        if self._sticky and isinstance(session, RemoteSession):
            # The largest of all digests: it moves only where its engine goes, or one comes.
            return max(seats, key=lambda seat: _digest(session.key, seat.identity.incarnation))
        drawn = self._chance.sample(seats, min(2, len(seats)))
        return min(drawn, key=lambda seat: (seat.cost, seat.rows))

    def _open(self, opening: Opening) -> None:
        """Sends requests to an engine that has not refused them; without one they wait, or, where
        nobody was told yet that they run, are refused."""
        if not opening.flights:
            return
        if opening.flights[0].losses >= MOST_LOSSES:
            self._give_up(opening, _died_of(opening.flights[0]))
            return
        now = self._clock()
        seat = self._choose(opening.flights, opening.refused)
        if seat is None:
            if opening.fresh:
                self._give_up(opening, opening.error or Overloaded("no replica is ready"))
            elif opening not in self._homeless:
                self._homeless.append(opening)
                for flight in opening.flights:
                    flight.opening = opening
                    flight.waits_until = flight.waits_until or now + self.patience_s
            return
        asks = []
        for flight in opening.flights:
            flight.attempt = f"{flight.source.request_id}~{next(self._numbers)}"
            flight.seat, flight.opening = seat, opening
            seat.flights[flight.attempt] = flight
            asks.append(ask_of(flight.request(now), flight.attempt))
        self.counters.add("placed", len(asks))
        seat.post(Submit(tuple(asks)))

    def _again(self, opening: Opening) -> None:
        """As `_open`, for requests that were sent to an engine already."""
        self.counters.add("retried", len(opening.flights))
        self._open(opening)

    def _give_up(self, opening: Opening, error: DeepdraftError) -> None:
        """Nobody takes these requests."""
        flights, opening.flights = opening.flights, []
        for flight in flights:
            if opening.fresh:
                self._drop(flight)
            else:
                self._fail(flight, error.message)
        if opening.fresh:
            self.counters.add("refused", len(flights))
            opening.opened(error, None)

    def _accepted(self, opening: Opening, seat: Seat) -> None:
        for flight in opening.flights:
            flight.opening, flight.waits_until = None, 0.0
            flight.generation = seat.identity.generation
        if opening.fresh:
            opening.fresh = False
            opening.opened(None, seat)

    def _refused(self, opening: Opening, seat: Seat, message: Refused) -> None:
        for flight in opening.flights:
            seat.flights.pop(flight.attempt, None)
            flight.seat = None
        opening.error = error_of(message)
        if not message.elsewhere:
            self._give_up(opening, opening.error)
            return
        opening.refused.add(seat.identity.incarnation)
        self._open(opening)

    def _place_homeless(self) -> None:
        waiting, self._homeless = self._homeless, []
        for opening in waiting:
            opening.refused.clear()  # a queue that was full may have room
            self._open(opening)

    def _limit(self, flight: Flight, now: float) -> float:
        """When a request without an engine is given up."""
        if self.seats and all(seat.state == "draining" for seat in self.seats):
            return min(flight.waits_until, flight.waits_until - self.patience_s + LEAVING_S)
        return flight.waits_until

    def _leave_quiet(self, seat: Seat) -> None:
        """Takes from a silent engine what can run elsewhere."""
        flights = list(seat.flights.values())
        for opening in _openings(flights):
            if self._choose(opening.flights, opening.refused) is not None:
                self._take_back(seat, opening.flights)
                self._again(opening)
        for flight in flights:
            if flight.seat is not seat or flight.opening is not None:
                continue
            if self._may_move(flight) and self._choose([flight], ()) is not None:
                self._take_back(seat, [flight])
                self._move(flight, "the replica that ran this request does not answer")

    def _take_back(self, seat: Seat, flights: Sequence[Flight]) -> None:
        for flight in flights:
            seat.flights.pop(flight.attempt, None)
            flight.seat = None
        seat.post(Cancel(tuple(flight.attempt for flight in flights)))

    # Events

    def _of(self, seat: Seat, ids: Sequence[str]) -> list[Flight]:
        found = [seat.flights[id] for id in ids if id in seat.flights]
        if len(found) < len(ids):
            self.counters.add("late", len(ids) - len(found))
        return found

    def _event(self, seat: Seat, event: Event) -> None:
        for flight in self._of(seat, (event.id,)):
            if flight.opening is not None:
                self._accepted(flight.opening, seat)
            if event.at > flight.num_standing:
                self.leave(seat, "has lost a part of an answer")
                return
            reason = event.finish_reason
            if reason == "abort":
                # Not by us: the engine leaves.
                self._take_off(flight, tell=False)
                but = (seat.identity.incarnation,)
                self._move(flight, "the replica that ran this request was shut down", but)
            elif reason == "error" and not event.at_fault and self._elsewhere(flight, event):
                continue
            else:
                self._deliver(flight, event)

    def _elsewhere(self, flight: Flight, event: Event) -> bool:
        """Whether a request that failed is tried on another engine."""
        if not event.lost:
            flight.faults += 1
        if flight.faults > 1 or not self._may_move(flight):
            return False
        but = (flight.seat.identity.incarnation,) if flight.seat else ()
        if not event.lost and self._choose([flight], but) is None:
            return False
        self._take_off(flight)
        flight.losses += event.lost
        self._move(flight, event.error or "the replica that ran this request failed", but)
        return True

    def _deliver(self, flight: Flight, event: Event) -> None:
        if flight.tokens and event.progress is not None:
            return  # its prompt is read again
        if event.at < flight.num_standing:
            self.counters.add("late")
            return
        told = token_event(event, flight.source.request_id)
        changes: dict[str, Any] = {}
        if flight.tokens and told.cached is not None:
            changes["cached"] = None  # of the first attempt it was told
        if told.stats is not None:
            flight.last_stats = told.stats
            if flight.stats is not None:
                changes["stats"] = flight.last_stats = sum_stats(flight.stats, told.stats)
        if told.step is not None:
            flight.last_step = told.step.index + flight.step_base
            if flight.step_base:
                changes["step"] = replace(told.step, index=flight.last_step)
        if changes:
            told = replace(told, **changes)
        if flight.seat is not None:
            flight.seat.rows += _rows(flight, event)
        flight.tokens += told.token_ids
        if told.finish_reason is not None:
            self._take_off(flight, tell=False)
            self._end(flight, told)
        else:
            flight.deliver(told)

    def _beat(self, seat: Seat, beat: Beat) -> None:
        seat.report(beat.load)
        seat.stats = seat.stats if beat.stats is None else beat.stats
        seat.times = seat.times if beat.times is None else beat.times
        if beat.state == "failed":
            self.leave(seat, "has failed")
        elif beat.state == "draining" and seat.state != "draining":
            logger.info("replica %s leaves", seat.label)
            seat.state = "draining"

    # Moving

    def _may_move(self, flight: Flight) -> bool:
        """Whether another engine may go on with a request."""
        if not flight.tokens or not flight.streamed:
            # Nobody has seen a token: another draw of the same law is as good.
            return True
        return self.resume and continues(flight.source, flight.kin.rule)

    def _move(self, flight: Flight, why: str, but: Sequence[str] = ()) -> None:
        """A request that has no engine any more goes on elsewhere, or ends with an error."""
        flight.seat = None
        if flight.losses >= MOST_LOSSES:
            self._fail(flight, _died_of(flight).message)
            return
        if not self._may_move(flight):
            rule = " (it draws by a rule that cannot be taken up elsewhere)" if self.resume else ""
            self.counters.add("cut")
            self._fail(flight, f"{why} in the middle of its answer{rule}; ask again")
            return
        self.counters.add("resumed" if flight.tokens else "retried")
        flight.stats = flight.last_stats
        flight.step_base = flight.last_step
        opening = Opening([flight], _nobody, fresh=False, refused=set(but))
        flight.opening = opening
        self._open(opening)

    def _take_off(self, flight: Flight, *, tell: bool = True) -> None:
        """A request leaves its engine, or those that wait for one."""
        seat, flight.seat = flight.seat, None
        if seat is not None:
            del seat.flights[flight.attempt]
            if tell:
                seat.post(Cancel((flight.attempt,)))
        opening, flight.opening = flight.opening, None
        if opening is not None:
            opening.flights.remove(flight)
            if not opening.flights and opening in self._homeless:
                self._homeless.remove(opening)

    def _drop(self, flight: Flight) -> None:
        flight.done, flight.seat, flight.opening = True, None, None
        self._flights.pop(flight.source.request_id, None)

    def _fail(self, flight: Flight, message: str) -> None:
        self.counters.add("failed")
        id = flight.source.request_id
        self._end(flight, TokenEvent(request_id=id, finish_reason="error", error=message))

    def _end(self, flight: Flight, event: TokenEvent) -> None:
        if not flight.done:
            self._drop(flight)
            flight.deliver(event)

    def check(self) -> None:
        """Raises AssertionError where the books are wrong."""
        on_seats = [f for seat in self.seats for f in seat.flights.values()]
        waiting = [f for opening in self._homeless for f in opening.flights]
        assert len({id(f) for f in (*on_seats, *waiting)}) == len(on_seats) + len(waiting)
        assert {id(f) for f in (*on_seats, *waiting)} == {id(f) for f in self._flights.values()}
        for seat in self.seats:
            assert seat.state != "gone"
            assert all(f.seat is seat and f.attempt == a for a, f in seat.flights.items())
        assert all(f.seat is None and f.opening is not None for f in waiting)
        assert not any(f.done for f in (*on_seats, *waiting))


def _rows(flight: Flight, event: Event) -> int:
    """What an event's tokens took; with the first one comes what its prompt took."""
    rows = len(event.token_ids)
    if rows and not flight.tokens:
        rows += len(flight.source.prompt_ids) - (event.cached.num_tokens if event.cached else 0)
    return rows


def _digest(session: str, incarnation: str) -> bytes:
    return hashlib.sha256(f"{session} {incarnation}".encode()).digest()


def _openings(flights: Iterable[Flight]) -> list[Opening]:
    """The jobs that these requests are the opening of."""
    return list(dict.fromkeys(f.opening for f in flights if f.opening is not None))


def _nobody(error: DeepdraftError | None, seat: Seat | None) -> None:
    """Of a request that is known to run already."""


def _died_of(flight: Flight) -> EngineError:
    return EngineError(
        f"{flight.losses} replicas were lost while they ran this request; it is not tried again"
    )
