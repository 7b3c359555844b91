"""One server among several: who has a conversation, bringing it here, saying that it is ours now.

Owns: the order lookup - fetch - verify - run - claim, what is done when a server leaves, and the
thread in which the directory is talked to. Knows nothing of: HTTP, scheduling, how bytes move.

A claim comes after the fetch was verified and after this server stored a state of its own, so a
fetch that fails leaves the old owner in place. Every fault means: compute.

A server that leaves (`hand_over`) offers its conversations to those that have announced themselves;
who takes one fetches it, verifies it and claims it as any other, but into free memory only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.cache import KvCache
from deepdraft.kv.costs import Costs
from deepdraft.kv.directory import Directory, Record, RedisDirectory
from deepdraft.kv.fetch import Fetched, Fetcher, Peer
from deepdraft.kv.handover import HandOver, Offered, Report
from deepdraft.kv.prefix import token_array
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.sidecar import Sidecar
from deepdraft.kv.snapshot import Manifest
from deepdraft.kv.transfer import Exporter
from deepdraft.telemetry import Counters

logger = logging.getLogger(__name__)
FetchRule = Literal["auto", "always", "never"]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OWNER = re.compile(r"([A-Za-z0-9_.-]{1,64})@(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]{1,253}):(\d{1,5})")
_ANNOUNCEMENTS = 3
"""Within the time after which a server that says nothing is taken for gone."""
_T = TypeVar("_T")


def owner_of(name: str, host: str, port: int) -> str:
    """How a server stands in the directory. Raises ConfigError for a wrong name."""
    owner = f"{name}@{f'[{host}]' if ':' in host else host}:{port}"
    if not _NAME.fullmatch(name) or not _OWNER.fullmatch(owner):
        raise ConfigError(
            f"a server of a fleet needs a name of 1 to 64 of A-Z a-z 0-9 _ . - and an address that "
            f"peers can reach, got {owner!r}"
        )
    return owner


def peer_of(owner: str) -> Peer | None:
    """Where an owner of the directory listens; None where the record makes no sense."""
    found = _OWNER.fullmatch(owner)
    if found is None or not 0 < int(found[3]) < 65536:
        return None
    return Peer(found[2].strip("[]"), int(found[3]), found[1])


@dataclass(slots=True)
class Session:
    """A conversation of the directory, as one request knows it."""

    fleet: Fleet
    key: str
    seen: Record | None
    """What the directory said; a claim presents it. None: there was no directory."""
    fetched: Fetched | None = None

    def stored(self, entry: int) -> None:
        """This server has a state of its own now. May be called from any thread."""
        self.fleet.claim(self, entry)


class Fleet:
    """This server's part of a fleet. `start` begins to listen; `close` gives everything up."""

    def __init__(
        self,
        cache: KvCache,
        directory: Callable[[], Directory],
        *,
        name: str,
        rule: FetchRule = "auto",
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        fleet_key: bytes | None = None,
        settings: TransferSettings | None = None,
        costs: Costs | None = None,
        sidecar: Sidecar | None = None,
    ) -> None:
        """`directory` is called in the fleet's own thread. `sidecar` is started and closed here."""
        self.cache, self.name, self.rule = cache, name, rule
        self.costs = costs or Costs()
        self.counters = Counters()
        self.sidecar = sidecar
        self.exporter = Exporter(
            cache,
            tls=server_tls,
            fleet_key=fleet_key,
            settings=settings,
            still_mine=self._still_mine,
            take=self._take,
            sidecar=sidecar,
        )
        self.fetcher = Fetcher(
            cache,
            tls=client_tls,
            fleet_key=fleet_key,
            settings=settings,
            worth_it=self._worth_it,
            sidecar=sidecar,
        )
        self.owner = ""
        self.directory: Directory | None = None
        self._make_directory = directory
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._tasks: list[Future[None]] = []
        self._leaving = self._closed = False
        self._lock = threading.Lock()
        self._taking: set[str] = set()
        """Conversations that are offered and fetched now."""

    def start(self, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> int:
        """Listens for peers on `host`, which know this server as `advertise`. Returns the port.

        Raises ConfigError.
        """
        owner_of(self.name, advertise or host, port)  # a wrong name is told before anything runs
        port = self.exporter.start(host, port)
        self.owner = owner_of(self.name, advertise or host, port)
        if self.sidecar is not None:
            self.sidecar.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="deepdraft-kv-fleet", daemon=True)
        self._thread.start()
        self._call(self._open_directory())
        self._tasks = [self._submit(self._listen()), self._submit(self._announce())]
        return port

    def close(self) -> None:
        """Gives up ownership, ends connections. May be called twice."""
        closed, self._closed = self._closed, True
        if closed or self._thread is None:
            self._close_transfer()
            return
        try:
            self._call(self._leave(), timeout_s=5.0)
        except Exception:
            logger.warning("the KV directory was not told that this server leaves", exc_info=True)
        self._close_transfer()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _close_transfer(self) -> None:
        self.fetcher.close()
        self.exporter.close()
        if self.sidecar is not None:
            self.sidecar.close()

    def hand_over(self, deadline_s: float) -> Report:
        """Gives what is owned here to peers, what was used last first, and takes nothing more.

        Blocks, at most `deadline_s` and a little; never raises; a second call does nothing. What is
        left is still owned.
        """
        again, self._leaving = self._leaving, True
        if again or self._closed or self._thread is None or deadline_s <= 0:
            return Report()
        try:
            return self._hand_over(deadline_s)
        except Exception:
            logger.exception("conversations could not be handed over")
            return Report()

    def _hand_over(self, deadline_s: float) -> Report:
        assert self.directory is not None
        self.flush()
        others = self._call(self.directory.announce(self.owner, None))
        if others is None:
            logger.warning("the KV directory does not answer: no conversation is handed over")
            return Report()
        # Who has just come has most room, and will stay longest.
        others.sort(key=lambda member: -member.room)
        peers = [p for p in (peer_of(m.owner) for m in others) if p is not None]
        memory, owned = self.cache.memory, []
        for key, (epoch, sequence, number) in self.exporter.owned().items():
            entry = memory.entries.get(number)
            if entry is not None:
                size = sum(c.length for c in entry.all_chunks())
                owned.append((entry.last_used, Offered(key, epoch, sequence, size)))
        owned.sort(key=lambda pair: -pair[0])
        report = HandOver(
            (offered for _, offered in owned),
            peers,
            connect=self._connect,
            fingerprint=self.cache.expected,
            deadline_s=deadline_s,
            taken=lambda one: self.exporter.disown(one.key, one.epoch, one.sequence),
        ).run()
        self.counters.add("handed_over", report.moved)
        self.counters.add("handed_over_bytes", report.num_bytes)
        self.counters.add("hand_over_left", report.left)
        logger.info(
            "%d of %d conversations (%d MiB) were handed to %d peers in %.1f s, %d are left (%s)",
            *(report.moved, report.offered, report.num_bytes >> 20, len(peers), report.seconds),
            *(
                report.left,
                ", ".join(f"{n} {a}" for a, n in report.answers.items()) or "no answers",
            ),
        )
        return report

    def _connect(self, peer: Peer) -> wire.Link:
        try:
            return self.fetcher.connect(peer)
        except ConfigError as error:
            raise OSError(error.message) from None

    def _take(self, offer: wire.Offer) -> str:
        """A peer leaves and offers a conversation. How that ended, for `handover`; never raises."""
        with self._lock:
            if offer.key in self._taking:
                return "busy"  # it was offered again meanwhile
            self._taking.add(offer.key)
        try:
            return self._taken(offer)
        except Exception:
            logger.exception("a conversation that was offered could not be taken")
            return "failed"
        finally:
            with self._lock:
                self._taking.discard(offer.key)

    def _taken(self, offer: wire.Offer) -> str:
        if self._leaving or self._closed:
            return "leaving"
        if self.rule == "never":
            return "none"
        if offer.fingerprint != self.cache.expected:
            return "incompatible"
        if not self.cache.memory.num_unused:
            return "full"
        assert self.directory is not None
        seen = self._call(self.directory.lookup(offer.key))
        if seen is None:
            return "unavailable"
        peer = peer_of(seen.owner)
        same = (seen.epoch, seen.sequence) == (offer.epoch, offer.sequence)
        if not same or peer is None or seen.owner == self.owner:
            return "stale"
        fetched = self.fetcher.fetch(peer, offer.key, seen, None)
        if fetched.entry is None:
            return fetched.outcome
        fp = self.cache.expected.hex()
        claim = self._call(self.directory.claim(offer.key, seen, self.owner, fp, moved=True))
        if claim.result != "ok":
            self.cache.memory.supersede(fetched.entry)  # nobody will be sent here for it
            return claim.result
        record = Record(seen.epoch, claim.sequence, self.owner, fp)
        self.exporter.own(offer.key, record, fetched.entry)
        self.counters.add("taken_over")
        return "taken"

    # ---- what requests call -----------------------------------------------------------------

    def prepare(self, key: str, token_ids: Sequence[int], trace: str = "") -> Session:
        """Looks a conversation up and brings it here where that pays. Blocks, never raises.
        `trace`: id of the request, for this server's log and the owner's (`wire.TRACE`)."""
        session = Session(self, key, None)
        try:
            assert self.directory is not None
            session.seen = self._call(self.directory.lookup(key))
            self.counters.add("lookup_none" if session.seen is None else "lookup_ok")
            if session.seen is not None:
                session.fetched = self._bring(key, session.seen, token_array(token_ids), trace)
        except Exception:
            self.counters.add("prepare_failed")
            logger.exception("a conversation could not be looked up")
        return session

    def claim(self, session: Session, entry: int) -> None:
        """After a state of this server's own was stored: from now on it is the owner."""
        if session.seen is not None and not self._closed:
            self._submit(self._claim(session, entry))

    def flush(self) -> None:
        """Waits until what was asked of the directory so far is done."""

        async def others() -> None:
            mine = asyncio.current_task()
            tasks = [t for t in asyncio.all_tasks() if t is not mine and t.get_name() == "claim"]
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(others())

    def _bring(self, key: str, seen: Record, token_ids: np.ndarray, trace: str) -> Fetched | None:
        if not seen.sequence or seen.owner == self.owner or self.rule == "never":
            return None
        if seen.fingerprint != self.cache.expected.hex():
            self.counters.add("fetch_incompatible")
            return None
        peer = peer_of(seen.owner)
        if peer is None or self.cache.saved(token_ids) >= len(token_ids) - 1:
            self.counters.add("fetch_unneeded")
            return None
        try:
            fetched = self.fetcher.fetch(peer, key, seen, token_ids, trace)
        except ConfigError as error:  # an address that may not be used without TLS
            logger.warning("a peer of the KV directory is not asked: %s", error.message)
            return None
        if fetched.outcome == "hit" and fetched.num_bytes:
            self.costs.note_fetch(fetched.num_bytes, fetched.seconds)
        return fetched

    def _worth_it(self, wanted: Manifest, token_ids: np.ndarray) -> bool:
        here = self.cache.saved(token_ids)
        gain = self.cache.saved(token_ids, wanted) - here
        if gain <= 0:
            return False
        if self.rule == "always":
            return True
        decision = self.costs.decide(wanted.data_bytes, gain)
        logger.info(
            "KV fetch of %d bytes for %d tokens: %s (fetch %s, compute %s)",
            wanted.data_bytes,
            gain,
            "yes" if decision.fetch else "no",
            _ms(decision.fetch_s),
            _ms(decision.compute_s),
        )
        return decision.fetch

    # ---- the fleet's thread -----------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Awaitable[_T], timeout_s: float | None = 5.0) -> _T:
        async def run() -> _T:
            return await work

        return self._submit(run()).result(timeout_s)

    async def _open_directory(self) -> None:
        self.directory = self._make_directory()

    async def _claim(self, session: Session, entry: int) -> None:
        task = asyncio.current_task()
        assert task is not None and self.directory is not None and session.seen is not None
        task.set_name("claim")
        fp = self.cache.expected.hex()
        claim = await self.directory.claim(session.key, session.seen, self.owner, fp)
        self.counters.add(f"claim_{claim.result}")
        if claim.result != "ok":
            return  # someone moved on, or there is no directory: what is here stays, unowned
        record = Record(session.seen.epoch, claim.sequence, self.owner, fp)
        session.seen = record
        self.exporter.own(session.key, record, entry)

    def _still_mine(self, key: str, epoch: str, sequence: int) -> bool | None:
        """Asked before a peer may read. None: the directory does not answer."""
        if self._closed:
            return None
        try:
            return self._call(self._check(key, epoch, sequence))
        except Exception:
            return None

    async def _check(self, key: str, epoch: str, sequence: int) -> bool | None:
        assert self.directory is not None
        fp = self.cache.expected.hex()
        mine = await self.directory.check(key, Record(epoch, sequence, self.owner, fp))
        self.counters.add({True: "check_ok", False: "check_stale", None: "check_none"}[mine])
        return mine

    async def check_all(self) -> None:
        """Whether what is here is still ours, one conversation after the other: announcements
        may have been missed. What is not goes first from now on."""
        for key, (epoch, sequence, _) in self.exporter.owned().items():
            mine = await self._check(key, epoch, sequence)
            if mine is None:
                return  # no directory: the next interruption asks again
            if not mine:
                self.exporter.disown(key, epoch, sequence)

    async def _listen(self) -> None:
        """Claims of others mark what is here: it goes first. A hint, some may be missed; after
        an interruption all are checked."""
        if not isinstance(self.directory, RedisDirectory):
            return
        checking: asyncio.Task[None] | None = None
        async for moved in self.directory.moved():
            if moved is None:
                if checking is None or checking.done():
                    checking = asyncio.create_task(self.check_all())
            elif moved.owner != self.owner:
                self.exporter.outdated(moved.key, moved.epoch, moved.sequence)

    async def _announce(self) -> None:
        """Says again and again that this server is there and how much room it has."""
        assert self.directory is not None
        memory, every_s = self.cache.memory, self.directory.settings.member_s / _ANNOUNCEMENTS
        while not self._leaving:
            room = memory.num_unused * memory.slab.slot_bytes
            await self.directory.announce(self.owner, room)
            await asyncio.sleep(every_s)

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.directory is None:
            return
        if not self._leaving:
            await self.directory.announce(self.owner, None)
        self._leaving = True
        for key, (epoch, sequence, _) in self.exporter.owned().items():
            record = Record(epoch, sequence, self.owner, self.cache.expected.hex())
            await self.directory.release(key, record)
        await self.directory.close()

    # ---- books ------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters of lookups, claims, fetches and exports."""
        out = self.counters.snapshot()
        out |= {f"fetch_{name}": n for name, n in self.fetcher.counters.snapshot().items()}
        out["fetch_peers_backing_off"] = self.fetcher.num_backing_off
        out |= {f"export_{name}": n for name, n in self.exporter.counters.snapshot().items()}
        if self.sidecar is not None:
            out |= {f"sidecar_{name}": n for name, n in self.sidecar.counters.snapshot().items()}
        directory = self.directory
        if isinstance(directory, RedisDirectory):
            out |= {f"directory_{name}": n for name, n in dict(directory.counters).items()}
        return out


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.1f} ms"
