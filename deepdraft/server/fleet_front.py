"""A front of a fleet: the application of `deepdraft serve` without a model, before many engines.

Owns: what the application asks of a service and of an engine, answered by the router; the model's
tokenizer and view, one for each kind of engine.
Knows nothing of: HTTP, connections, how engines are found and chosen. Runs without torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp

from deepdraft import __version__
from deepdraft.config import Config
from deepdraft.engine.events import AsyncEvents
from deepdraft.errors import ConfigError, DeepdraftError, Overloaded
from deepdraft.server.fleet_config import FleetFile
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_metrics import FleetMetrics
from deepdraft.server.fleet_router import Router
from deepdraft.server.fleet_wire import Identity, Kin, RemoteSession, Times
from deepdraft.server.sampling import ModelView
from deepdraft.server.service import Service, bundled_checkpoint
from deepdraft.telemetry import Histogram, configure_logging, logger
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, TokenEvent

HEADER = b"x-deepdraft-front"


class RemoteEvents(AsyncEvents):
    """The events of a job that runs on some engine."""

    headers: Mapping[str, str] = {}
    """Of the answer: who has taken the job."""

    def take(self, event: TokenEvent) -> None:
        """Takes an event on the reader's loop."""
        self._take_in(event)


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Of an engine's speculation."""

    rule: str


@dataclass(frozen=True, slots=True)
class Drafts:
    """What /models shows of an engine's speculation."""

    block_size: int
    options: DraftOptions


class RemoteEngine:
    """All engines of one kind, as the application asks for one."""

    failure: str | None = None

    def __init__(self, router: Router, identity: Identity) -> None:
        self._router, self._identity = router, identity
        self.speculator = Drafts(identity.drafts, DraftOptions(identity.rule))

    def cancel(self, *request_ids: str) -> None:
        """Ends requests early; unknown and finished ids are fine."""
        self._router.cancel(*request_ids)

    async def open(
        self, requests: Sequence[GenerateRequest], *, streamed: bool = True
    ) -> RemoteEvents:
        """Has an engine queue the requests, and returns their events as they come.

        Raises Overloaded where none takes them, RequestError and others as the engine does.
        """
        ids = [request.request_id for request in requests]
        events = RemoteEvents(self, ids)
        opened: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()

        def on_opened(error: DeepdraftError | None, seat: Seat | None) -> None:
            if opened.done():
                return  # nobody waits any more
            if error is not None:
                opened.set_exception(error)
            elif seat is not None:
                opened.set_result(seat)

        self._router.submit(requests, events.take, on_opened, self._identity, streamed=streamed)
        try:
            seat = await opened
        except asyncio.CancelledError:
            self._router.cancel(*ids)
            raise
        events.headers = {"x-deepdraft-replica": seat.label}
        return events


class RemoteSessions:
    """Conversations are looked up where the request will run."""

    def prepare(self, key: str, token_ids: Sequence[int], trace: str = "") -> RemoteSession:
        """What the engine is to prepare."""
        return RemoteSession(key, trace)


class FrontService(Service):
    """What the application asks of a service."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        digest: str,
        config: Config,
        *,
        sessions: bool = False,
    ) -> None:
        """`digest`: of the tokenizer's file; engines with another one are not used. `sessions`:
        whether engines are told which conversation a request belongs to."""
        super().__init__(_nothing_to_load, config)
        self.router = router
        self._tokenizer, self._digest = tokenizer, digest
        self._views: dict[tuple[tuple[str, str], Kin], tuple[RemoteEngine, ModelView]] = {}
        self._told: set[str] = set()
        self.label = "front"
        """Of this front in metrics."""
        self._metrics = FleetMetrics()
        self._sessions = RemoteSessions() if sessions else None
        self.state = "ready"
        self._loaded.set()

    def start(self) -> None:
        """Nothing is loaded here."""

    def accepts(self, identity: Identity) -> bool:
        """Whether an engine's requests can be made here; one that is not used is named."""
        if identity.tokenizer == self._digest:
            return True
        if identity.incarnation not in self._told:
            self._told.add(identity.incarnation)
            logger.warning(
                "replica %s (deepdraft %s, %s) has another tokenizer than this front and is not "
                "used by it",
                *(identity.label, identity.version, identity.fingerprint),
            )
        return False

    def ready(self) -> tuple[Any, ModelView]:
        """Engines of one kind, drawn by their number, and their model. Raises Overloaded."""
        if self.state == "draining":
            raise Overloaded("the server is shutting down and takes no new requests")
        seats = self.router.ready()
        if not seats:
            quiet = sum(seat.state == "quiet" for seat in self.router.seats)
            raise Overloaded(
                "no replica is ready; try again later"
                + (f" ({quiet} do not answer)" if quiet else "")
            )
        return self._kind(secrets.choice(seats).identity)

    def _kind(self, identity: Identity) -> tuple[RemoteEngine, ModelView]:
        key = (identity.generation, identity.kin)
        if key not in self._views:
            if len(self._views) > 16:
                self._views.clear()
            self._views[key] = (
                RemoteEngine(self.router, identity),
                ModelView(
                    names=identity.names,
                    tokenizer=self._tokenizer,
                    family=cast(Any, identity.family),
                    vocab_size=identity.vocab_size,
                    max_tokens=identity.max_tokens,
                    eos_token_id=identity.eos_token_id,
                    bos_token_id=identity.bos_token_id,
                    more_end_ids=frozenset(identity.more_end_ids),
                    fingerprint=identity.fingerprint,
                    created=identity.created,
                    defaults=identity.defaults,
                ),
            )
        return self._views[key]

    @property
    def fleet(self) -> Any:
        """What prepares conversations."""
        return self._sessions

    @property
    def engine_failure(self) -> str | None:
        """A front has no engine that could fail."""
        return None

    def health(self) -> dict[str, object]:
        """State and engines, for /healthz."""
        states = Counter(seat.state for seat in self.router.seats)
        return {
            "state": self.state,
            "replicas": dict(states),
            "labels": sorted(seat.label for seat in self.router.seats),
            "requests": self.router.num_flights,
            "routed": self.router.counters.snapshot(),
        }

    def stats(self) -> dict[str, int]:
        """This front's counters, and those of all engines together."""
        return {**self._metrics.sums(self.router.seats), **self._own()}

    def _own(self) -> dict[str, int]:
        routed = {f"fleet_{k}": v for k, v in self.router.counters.snapshot().items()}
        return {**routed, **self.counters.snapshot()}

    def metrics_text(self, tasks: int) -> str:
        """Summed over the engines, of each of them, and this front's own."""
        own = {**self._own(), "tasks": tasks}
        return self._metrics.text(self.router.seats, own, self.label, self.histograms())

    def histograms(self) -> dict[str, Histogram]:
        """The engines' times, all together."""
        by_name: dict[str, list[Times]] = {}
        for seat in self.router.seats:
            for name, times in seat.times.items():
                by_name.setdefault(name, []).append(times)
        return {name: cast(Histogram, _Sum(times)) for name, times in by_name.items()}

    def begin_drain(self) -> None:
        """Takes no new requests; those at hand go on."""
        began, self.state = self.state != "draining", "draining"
        if began:
            self.on_drain()

    def cancel_all(self) -> None:
        """Ends every request at hand."""
        self.router.cancel_all()

    def close(self) -> None:
        """Takes no new requests."""
        self.begin_drain()


class _Sum:
    """Histograms of several processes as one."""

    def __init__(self, parts: Sequence[Times]) -> None:
        self.bounds = parts[0].bounds
        self._parts = [p for p in parts if p.bounds == self.bounds]

    def snapshot(self) -> tuple[tuple[int, ...], float]:
        """As `Histogram.snapshot`."""
        columns = zip(*(p.counts for p in self._parts), strict=True)
        return tuple(sum(column) for column in columns), sum(p.total_s for p in self._parts)


def tokenizer_of(path: Path) -> tuple[Tokenizer, str]:
    """A checkpoint's tokenizer, and the digest that engines tell. Raises CheckpointError."""
    return Tokenizer.load(path), tokenizer_digest(path)


def tokenizer_digest(path: Path) -> str:
    """SHA-256 of what makes tokens of text in a checkpoint directory."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = path / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _nothing_to_load() -> Any:
    raise AssertionError("a front loads no model")


class Front:
    """What Ray Serve makes `replicas.fronts` of. `__init__` returns when it has found an engine."""

    async def __init__(self, fleet: FleetFile, version: str, replicas: Any = None) -> None:
        """`version`: of the deepdraft that started the fleet; `replicas`: Ray's handle of the
        engines, so that they belong to one application.

        Raises ConfigError or CheckpointError; then Ray counts a failed start.
        """
        from deepdraft.server.fleet_link import Links
        from deepdraft.server.fleet_registry import RayRegistry

        if version != __version__:
            raise ConfigError(
                f"the fleet was started by deepdraft {version}, this node has {__version__}; "
                "install the same on every node"
            )
        server = fleet.config.server
        configure_logging(server.log_level, server.log_format)
        self.label = f"{socket.gethostname()[:40]}-{secrets.token_hex(3)}"
        path = bundled_checkpoint() if fleet.model is None else Path(fleet.model)
        tokenizer, digest = await asyncio.to_thread(tokenizer_of, path)
        replica = fleet.replicas
        self.router = Router(
            resume=replica.resume,
            sticky=replica.sticky,
            quiet_s=replica.quiet_s,
            hang_s=replica.hang_s,
        )
        sessions = replica.sticky or fleet.config.fleet.directory is not None
        self.service = FrontService(self.router, tokenizer, digest, fleet.config, sessions=sessions)
        self.service.label = self.label
        self.links = Links(
            self.router,
            RayRegistry(fleet.name),
            name=self.label,
            accepts=self.service.accepts,
            tls=client_tls(fleet.config),
        )
        await self.links.start()
        # Ray sends requests here as soon as this returns, also in place of an older front.
        until = time.monotonic() + fleet.ray.start_s
        while not self.router.ready() and time.monotonic() < until:
            await asyncio.sleep(0.1)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray Serve after `__init__`."""
        from deepdraft.server.app import create_app
        from deepdraft.server.fleet_replica import with_label

        return with_label(create_app(self.service), HEADER, self.label)

    async def check_health(self) -> None:
        """Called by Ray Serve: a front is well as long as its loop turns."""

    async def __del__(self) -> None:
        """Called and awaited by Ray Serve when no request is left."""
        await self.links.close()


def client_tls(config: Config) -> Any:
    """What a front shows to engines, where the fleet has certificates. Raises ConfigError."""
    if config.fleet.files is None:
        return None
    from deepdraft.kv.fleet_files import load_fleet

    return load_fleet(Path(config.fleet.files)).client_tls
