"""A front's connections to the engines of its fleet.

Owns: finding engines, dialling them again and again, the proof that each knows the secret, reading
what they say, the clock of the router.
Knows nothing of: requests, HTTP, Ray. All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import ssl
import time
from collections.abc import Callable

from deepdraft.server import fleet_wire as wire
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_registry import Entry, Registry
from deepdraft.server.fleet_router import Router
from deepdraft.telemetry import logger

LOOK_S = 0.5
TICK_S = 0.25
ALIVE_EVERY = 4
"""Ticks of which one sends a sign of life."""
DIAL_S = 5.0
_LONGEST_PAUSE_S = 2.0
FORGET_S = 120.0
"""An engine that could not be reached for so long is taken out of the registry; one that lives puts
itself in again."""
REFUSED_S = 10.0
"""Likewise where its machine says that nobody listens there any more."""


class Links:
    """All connections of one front."""

    def __init__(
        self,
        router: Router,
        registry: Registry,
        *,
        name: str,
        accepts: Callable[[wire.Identity], bool] = lambda identity: True,
        tls: ssl.SSLContext | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        """`name`: this front's. `accepts`: whether an engine's requests can be made here."""
        self._router, self._registry, self._name = router, registry, name
        self._accepts, self._tls, self._look_s = accepts, tls, look_s
        self._secret = b""
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to look for engines."""
        self._secret = await asyncio.to_thread(self._registry.secret)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._look())]

    async def close(self) -> None:
        """Ends all connections."""
        tasks = [*self._tasks, *self._kept.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        for number in itertools.count():
            try:
                self._router.tick()
                if number % ALIVE_EVERY == 0:
                    for seat in self._router.seats:
                        seat.post(wire.Alive())
            except Exception:
                logger.exception("the router's clock")
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        while True:
            try:
                entries = await asyncio.to_thread(self._registry.entries)
            except Exception as error:
                # What is connected goes on; new engines are found later.
                logger.warning("the fleet's registry does not answer: %s", type(error).__name__)
            else:
                self._known = {entry.incarnation for entry in entries}
                for entry in entries:
                    if entry.incarnation not in self._kept:
                        task = asyncio.create_task(self._keep(entry))
                        self._kept[entry.incarnation] = task
            await asyncio.sleep(self._look_s)

    async def _keep(self, entry: Entry) -> None:
        """Holds a connection to an engine until it is taken out of the registry."""
        pause_s, reached, why = 0.1, time.monotonic(), ""
        try:
            while entry.incarnation in self._known:
                limit_s = FORGET_S
                try:
                    used = await self._talk(entry)
                    pause_s, reached = 0.1 if used else pause_s, time.monotonic()
                except (OSError, EOFError) as error:
                    why = type(error).__name__
                    if isinstance(error, ConnectionRefusedError):
                        limit_s = REFUSED_S
                    logger.debug("replica %s: %s", entry.label, why)
                except wire.WireError as error:
                    why = error.message
                    logger.warning("replica %s is not used: %s", entry.label, why)
                    pause_s = _LONGEST_PAUSE_S
                if (missed_s := time.monotonic() - reached) > limit_s:
                    logger.warning(
                        "replica %s could not be used for %.0f s at %s:%d (%s): it is forgotten "
                        "until it says again where it is",
                        *(entry.label, missed_s, entry.host, entry.port, why),
                    )
                    await asyncio.to_thread(self._registry.drop, entry.incarnation)
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        except Exception:
            logger.exception("the connection to replica %s", entry.label)
        finally:
            del self._kept[entry.incarnation]

    async def _talk(self, entry: Entry) -> bool:
        """One connection, from its beginning to its end; whether the engine was used."""
        host = entry.host if self._tls is not None else None
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(
                entry.host, entry.port, ssl=self._tls, server_hostname=host
            )
        try:
            async with asyncio.timeout(2 * DIAL_S):
                identity = await self._greet(reader, writer)
            if identity.incarnation != entry.incarnation:
                raise wire.WireError("another process listens where it did")
            if not self._accepts(identity):
                await asyncio.sleep(_LONGEST_PAUSE_S)
                return False
            await self._listen(identity, reader, writer)
            return True
        finally:
            writer.transport.abort()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> wire.Identity:
        greeting = await wire.read_to_front(reader, wire.MOST_BYTES_BEFORE)
        if not isinstance(greeting, wire.Greet):
            raise wire.WireError("it does not greet")
        if greeting.protocol != wire.PROTOCOL:
            raise wire.WireError(
                f"it speaks protocol {greeting.protocol}, this front {wire.PROTOCOL}: another "
                "version of deepdraft"
            )
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        mine = wire.proof(self._secret, "front", nonce, greeting.nonce)
        writer.write(wire.frame(wire.Prove(self._name, nonce, mine)))
        said = await wire.read_to_front(reader, wire.MOST_BYTES_WELCOME)
        if not isinstance(said, wire.Welcome):
            raise wire.WireError("it does not prove itself")
        expected = wire.proof(self._secret, "engine", greeting.nonce, nonce)
        if not hmac.compare_digest(said.proof, expected):
            raise wire.WireError("it does not know the fleet's secret")
        return said.identity

    async def _listen(
        self,
        identity: wire.Identity,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        def post(message: wire.ToEngine) -> None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write(wire.frame(message))

        seat = Seat(identity, post, writer.transport.abort)
        self._router.join(seat)
        logger.info("replica %s is connected (%s)", seat.label, identity.fingerprint)
        why = "has ended"
        try:
            while seat.state != "gone":
                message = await wire.read_to_front(reader)
                if isinstance(message, wire.Greet | wire.Welcome):
                    raise wire.WireError("it greets twice")
                self._router.hear(seat, message)
        except wire.WireError as error:
            why = f"says what it must not ({error.message})"
            raise
        finally:
            self._router.leave(seat, why)
