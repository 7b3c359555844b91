"""Engines and clients of a fleet in one process: they answer, die, hang, leave and repeat
themselves as they are told. Without Ray, sockets and threads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepdraft.errors import DeepdraftError, Overloaded
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_router import Router
from deepdraft.server.fleet_wire import (
    Accepted,
    Ask,
    Beat,
    Cancel,
    Event,
    Events,
    Identity,
    Load,
    Submit,
    ToEngine,
    refusal,
)
from deepdraft.types import (
    GenerateRequest,
    SamplingParams,
    TokenEvent,
)

IDENTITY = Identity(
    label="",
    incarnation="",
    version="1",
    code="c",
    fingerprint="fp_a",
    tokenizer="t",
    names=("m",),
    family="v4.1",
    vocab_size=1000,
    max_tokens=4096,
    eos_token_id=1,
    bos_token_id=0,
    more_end_ids=(),
    created=0,
    defaults={},
    drafts=0,
    rule="coupled",
)


def token_at(prompt: Sequence[int], position: int) -> int:
    """What every engine chooses there."""
    return (31 * sum(prompt) + 7 * position) % 997


class FakeEngine:
    """An engine that does what a test says, and its connection."""

    def __init__(self, name: str, fingerprint: str = "fp_a", room: int = 100) -> None:
        identity = {"label": name, "incarnation": name, "fingerprint": fingerprint}
        fields = {n: getattr(IDENTITY, n) for n in Identity.__struct_fields__}
        self.seat = Seat(Identity(**{**fields, **identity}), self.take, self.cut)
        self.inbox: list[ToEngine] = []
        self.asks: dict[str, Ask] = {}
        self.standing: dict[str, list[int]] = {}
        self.closed = False
        self.room = room
        self.last: dict[str, Event] = {}

    def take(self, message: ToEngine) -> None:
        self.inbox.append(message)

    def cut(self) -> None:
        self.closed = True

    def read(self, router: Router) -> None:
        """Looks at what has come, and answers."""
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            if isinstance(message, Cancel):
                for id in message.ids:
                    self.asks.pop(id, None)
            elif isinstance(message, Submit):
                ids = tuple(a.id for a in message.asks)
                if len(self.asks) + len(ids) > self.room:
                    router.hear(self.seat, refusal(ids, Overloaded("the queue is full")))
                    continue
                self.asks |= {a.id: a for a in message.asks}
                self.standing |= {a.id: list(a.generated_ids) for a in message.asks}
                router.hear(self.seat, Accepted(ids))

    def step(self, router: Router, num: int = 1, **fields: Any) -> None:
        """Up to `num` tokens for each request, all in one message."""
        events = [self.advance(id, num, **fields) for id in list(self.asks)]
        if events:
            router.hear(self.seat, Events(tuple(events)))

    def advance(self, id: str, num: int, **fields: Any) -> Event:
        ask, so_far = self.asks[id], self.standing[id]
        at, n = len(so_far), len(ask.prompt_ids)
        new = [token_at(ask.prompt_ids, n + i) for i in range(at, at + num)]
        new = new[: ask.max_new_tokens - at]
        so_far += new
        reason = "length" if len(so_far) == ask.max_new_tokens else None
        if reason:
            del self.asks[id]
        self.last[id] = Event(id=id, at=at, token_ids=tuple(new), finish_reason=reason, **fields)
        return self.last[id]

    def end(self, router: Router, reason: Any, **fields: Any) -> None:
        """Every request ends here without being finished."""
        events = [Event(id, len(self.standing[id]), finish_reason=reason, **fields)
                  for id in self.asks]  # fmt: skip
        self.asks.clear()
        router.hear(self.seat, Events(tuple(events)))

    def beat(self, router: Router, state: str = "ready", **load: Any) -> None:
        router.hear(self.seat, Beat(state, Load(**load)))


@dataclass
class Client:
    """Reads the events of one job."""

    requests: list[GenerateRequest]
    streamed: bool = True
    opened: list[DeepdraftError | Seat] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, TokenEvent] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)
    cancelled: bool = False

    def take(self, event: TokenEvent) -> None:
        id = event.request_id
        assert id not in self.ends, "an event behind the last one"
        assert self.opened, "an event before the request was taken"
        self.events.append(event)
        self.tokens.setdefault(id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            self.ends[id] = event

    def open(self, error: DeepdraftError | None, seat: Seat | None) -> None:
        assert not self.opened
        answer = error or seat
        assert answer is not None
        self.opened.append(answer)

    @property
    def over(self) -> bool:
        refused = bool(self.opened) and isinstance(self.opened[0], DeepdraftError)
        return refused or self.cancelled or len(self.ends) == len(self.requests)

    def reason(self) -> str | None:
        [event] = self.ends.values()
        return event.finish_reason

    def error(self) -> str:
        [event] = self.ends.values()
        assert event.finish_reason == "error"
        return event.error or ""


class World:
    """A router, a clock, engines and clients."""

    def __init__(self, *, resume: bool = True, engines: int = 2, sticky: bool = False) -> None:
        self.now = 100.0
        self.router = Router(
            resume=resume,
            quiet_s=5.0,
            hang_s=60.0,
            patience_s=30.0,
            clock=lambda: self.now,
            chance=random.Random(0),
            sticky=sticky,
        )
        self.engines: list[FakeEngine] = []
        self.clients: list[Client] = []
        self.numbers = 0
        for _ in range(engines):
            self.add()

    def add(self, **options: Any) -> FakeEngine:
        self.numbers += 1
        engine = FakeEngine(f"e{self.numbers}", **options)
        self.engines.append(engine)
        self.router.join(engine.seat)
        return engine

    def ask(self, *, n: int = 1, length: int = 6, streamed: bool = True, **fields: Any) -> Client:
        self.numbers += 1
        fields.setdefault("sampling", SamplingParams(temperature=0.0))
        requests = [
            GenerateRequest(
                request_id=f"r{self.numbers}-{i}",
                max_new_tokens=length,
                **{"prompt_ids": (self.numbers, i + 1), **fields},
            )
            for i in range(n)
        ]
        client = Client(requests, streamed)
        self.clients.append(client)
        self.router.submit(requests, client.take, client.open, IDENTITY, streamed=streamed)
        return client

    def read(self) -> None:
        for engine in self.engines:
            engine.read(self.router)

    def die(self, engine: FakeEngine) -> None:
        self.engines.remove(engine)
        self.router.leave(engine.seat, "has died")

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            self.router.tick()

    def on(self, client: Client) -> FakeEngine:
        """Where a client's only request is."""
        [engine] = [
            e
            for e in self.engines
            if any(f.source is client.requests[0] for f in e.seat.flights.values())
        ]
        return engine

    def finish(self) -> None:
        for _ in range(20):
            self.read()
            for engine in self.engines:
                engine.step(self.router, 3)
        self.router.check()

    def check_text(self, client: Client) -> None:
        """What a client has is what it should have, as far as it goes."""
        for request in client.requests:
            got = client.tokens.get(request.request_id, [])
            n = len(request.prompt_ids)
            assert got == [token_at(request.prompt_ids, n + i) for i in range(len(got))]
            end = client.ends.get(request.request_id)
            if end is not None and end.finish_reason == "length":
                assert len(got) == request.max_new_tokens
