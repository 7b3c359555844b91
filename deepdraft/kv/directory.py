"""Who has the newest cache of a conversation: ownership records, one process or Redis.

Owns: records (epoch, sequence, owner, fingerprint), claims, their time limits, the breaker.
Knows nothing of: bytes, leases, sessions' names (keys are digests). Runs without torch.

The directory is a hint. What is fetched is verified by manifest, tokens and digests, so a wrong
record costs time, never an answer; and no directory means no sharing, never an error.

A claim presents the epoch and sequence that a lookup gave and fails as STALE when either differs.
An epoch is a random UUID made when the directory is empty; sequences come from a counter that lies
in the same record as the epoch, so both are lost together and a sequence never comes back within an
epoch. Every call offers a fresh UUID: one kept by a process would bring a lost epoch back.

A claim by `moved` hands a conversation on as it is: who has seen it before may still claim, so a
turn that was under way elsewhere meanwhile becomes the owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deepdraft.errors import ConfigError, RequestError
from deepdraft.kv.directory_scripts import SCRIPTS, STALE

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)
MOST_LOOKUPS = 512
"""Of one call."""
ClaimResult = Literal["ok", "stale", "unknown", "unavailable"]
_RECORD = re.compile(r"([0-9]{1,18}) (\S*) (\S*)")
_MEMBER = re.compile(r"(\S+) ([0-9]{1,18})")
_MOVED = re.compile(r"(\S+) (\S+) ([0-9]{1,18}) (\S+)")
_SESSION_ID = re.compile(r"[!-~]{1,256}")


def session_key(tenant: str, session_id: str, name: str = "X-Session-ID") -> str:
    """SHA-256 over tenant and session id, hexadecimal. Raises RequestError (400) for bad ids.

    Ids are 1 to 256 visible ASCII characters; neither part is ever logged or stored.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise RequestError(
            f"the session id in {name} must be 1 to 256 visible ASCII characters", param=name
        )
    return hashlib.sha256(tenant.encode() + b"\0" + session_id.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Record:
    """`sequence` 0: nobody owns this conversation."""

    epoch: str
    sequence: int
    owner: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """`sequence` is the new one when `result` is ok. unknown: the reply was lost and the record
    does not show it; unavailable: there is no directory now. Neither may be retried blindly."""

    result: ClaimResult
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """Someone claimed a conversation. At most once and possibly never: a hint to evict first."""

    key: str
    epoch: str
    sequence: int
    owner: str


@dataclass(frozen=True, slots=True)
class Member:
    """A server that is there: its name and address as in records, its free memory in bytes."""

    owner: str
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings:
    """Times in seconds."""

    record_s: float = 24 * 3600.0
    member_s: float = 15.0
    """A server that has not announced itself for so long is taken for gone."""
    timeout_s: float = 0.2
    breaker_failures: int = 3
    breaker_s: float = 2.0
    connections: int = 32

    def __post_init__(self) -> None:
        times = (self.record_s, self.member_s, self.timeout_s, self.breaker_s)
        if min(times) <= 0 or self.connections < 1:
            raise ConfigError("the KV directory's times and connections must be above 0")


class Directory(Protocol):
    """Both kinds. None and `unavailable` mean: no directory now."""

    settings: DirectorySettings

    async def lookup(self, key: str) -> Record | None:
        """The record of a conversation; renews it."""
        ...

    async def claim(
        self, key: str, seen: Record, owner: str, fingerprint: str, *, moved: bool = False
    ) -> Claim:
        """Become the owner if the record is still as `seen`, but for claims by `moved`."""
        ...

    async def check(self, key: str, mine: Record) -> bool | None:
        """The record is still exactly this one; renews it then."""
        ...

    async def release(self, key: str, mine: Record) -> None:
        """Give up ownership if it is still mine."""
        ...

    async def announce(self, owner: str, room: int | None) -> list[Member] | None:
        """This server is there for the next `member_s`, with `room` bytes free; None: it leaves.
        Returns the others."""
        ...

    async def close(self) -> None:
        """End connections."""
        ...


class LocalDirectory:
    """Records of one process: the default, no service needed."""

    def __init__(
        self,
        settings: DirectorySettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or DirectorySettings()
        self.clock = clock
        self.epoch = str(uuid.uuid4())
        self._generation = 0
        self._records: dict[str, tuple[Record, float]] = {}
        self._handed: dict[str, tuple[int, int]] = {}
        """Of records claimed by `moved`: their sequence and that of the state they stand for."""
        self._members: dict[str, tuple[int, float]] = {}

    def _live(self, key: str) -> Record:
        record, until = self._records.get(key, (Record(self.epoch, 0), 0.0))
        if record.sequence and until <= self.clock():
            del self._records[key]
            return Record(self.epoch, 0)
        return record

    def _keep(self, key: str, record: Record) -> None:
        self._records[key] = (record, self.clock() + self.settings.record_s)

    async def lookup(self, key: str) -> Record | None:
        """See `Directory`."""
        record = self._live(key)
        if record.sequence:
            self._keep(key, record)
        return record

    async def claim(
        self, key: str, seen: Record, owner: str, fingerprint: str, *, moved: bool = False
    ) -> Claim:
        """See `Directory`."""
        now = self._live(key)
        sequence, state = self._handed.get(key, (0, 0))
        state = state if sequence and sequence == now.sequence else now.sequence
        if now.epoch != seen.epoch or seen.sequence not in (now.sequence, state):
            return Claim("stale")
        self._generation += 1
        self._keep(key, Record(self.epoch, self._generation, owner, fingerprint))
        self._handed.pop(key, None)
        if moved:
            self._handed[key] = (self._generation, state)
        return Claim("ok", self._generation)

    async def check(self, key: str, mine: Record) -> bool | None:
        """See `Directory`."""
        now = self._live(key)
        same = (now.epoch, now.sequence, now.owner) == (mine.epoch, mine.sequence, mine.owner)
        if same and now.sequence:
            self._keep(key, now)
        return same and now.sequence > 0

    async def release(self, key: str, mine: Record) -> None:
        """See `Directory`."""
        if await self.check(key, mine):
            del self._records[key]

    async def announce(self, owner: str, room: int | None) -> list[Member] | None:
        """See `Directory`."""
        now = self.clock()
        self._members.pop(owner, None)
        if room is not None:
            self._members[owner] = (room, now + self.settings.member_s)
        members = self._members.items()
        return [Member(o, r) for o, (r, until) in members if until > now and o != owner]

    async def close(self) -> None:
        """See `Directory`."""


@dataclass(slots=True)
class Breaker:
    """After some failures in a row nobody is kept waiting: one call in `pause_s` may try."""

    failures: int
    pause_s: float
    clock: Callable[[], float] = time.monotonic
    _count: int = 0
    _next: float = 0.0

    def allows(self) -> bool:
        """A call may be made now."""
        if self._count < self.failures:
            return True
        if self.clock() < self._next:
            return False
        self._next = self.clock() + self.pause_s
        return True

    def note(self, ok: bool) -> None:
        """How a call ended."""
        self._count = 0 if ok else self._count + 1
        if not ok:
            self._next = self.clock() + self.pause_s


@dataclass(slots=True)
class RedisDirectory:
    """Records of a fleet in Redis or Valkey 6 or newer, each operation one Lua script.

    The server should keep nothing on disk: a restart from an old copy brings old sequences back
    (docs/kv-sharing.md). `namespace` names the fleet; the fingerprint belongs into it.
    """

    client: Redis
    namespace: str
    settings: DirectorySettings = field(default_factory=DirectorySettings)
    counters: Counter[str] = field(default_factory=Counter)
    breaker: Breaker = field(init=False)
    _scripts: dict[str, Any] = field(init=False)
    _waiting: list[tuple[str, asyncio.Future[Record | None]]] = field(default_factory=list)
    _looking: asyncio.Task[None] | None = None
    _epoch: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.namespace):
            raise ConfigError(
                f"the KV directory's namespace must be 1 to 64 of A-Z a-z 0-9 _ . -, got "
                f"{self.namespace!r}"
            )
        self.breaker = Breaker(self.settings.breaker_failures, self.settings.breaker_s)
        self._scripts = {n: self.client.register_script(s) for n, s in SCRIPTS.items()}

    @classmethod
    def connect(
        cls, url: str, namespace: str, settings: DirectorySettings | None = None
    ) -> RedisDirectory:
        """A directory at redis://, rediss:// or unix://. Connects at the first call.

        Raises ConfigError for a wrong address (which may hold a password and is not repeated) and
        where the redis package is missing.
        """
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ConfigError(
                "a KV directory in Redis needs the package redis: pip install 'deepdraft[kv]'"
            ) from None
        settings = settings or DirectorySettings()
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=settings.connections,
                timeout=settings.timeout_s,
                socket_timeout=settings.timeout_s,
                socket_connect_timeout=settings.timeout_s,
                # A claim must not be sent twice; who may try again is decided here.
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
            )
        except ValueError:
            raise ConfigError(
                "the KV directory's address must start with redis://, rediss:// or unix://"
            ) from None
        return cls(Redis(connection_pool=pool), namespace, settings)

    @property
    def channel(self) -> str:
        """Where claims are announced."""
        return f"{{{self.namespace}}}:own"

    async def _call(self, name: str, keys: Sequence[str], *args: str) -> Any:
        """One script over these conversations. Raises _Unavailable, and _Stale for a claim that was
        refused."""
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import RedisError, ResponseError

        if not self.breaker.allows():
            self.counters["breaker_open"] += 1
            raise _Unavailable(sent=False)
        space = f"{{{self.namespace}}}"
        names = [f"{space}:meta", *(f"{space}:s:{key}" for key in keys)]
        if name == "announce":
            names = [f"{space}:members"]
        argv = [str(uuid.uuid4()), str(int(self.settings.record_s * 1000)), *args]
        tries = 1 if name in ("claim", "release") else 2
        task = asyncio.current_task()
        assert task is not None
        began, cancels = time.perf_counter(), task.cancelling()
        while True:
            tries -= 1
            try:
                # The pool, the connection and the reply may each take a time-out; all together
                # must not take more than two.
                async with asyncio.timeout(2 * self.settings.timeout_s):
                    answer = await self._scripts[name](keys=names, args=argv)
            except ResponseError as error:
                if str(error) == STALE:
                    self.breaker.note(ok=True)
                    raise _Stale from None
                self.breaker.note(ok=False)
                self.counters["error"] += 1
                logger.warning("the KV directory refused %s: %s", name, type(error).__name__)
                raise _Unavailable(sent=False) from None
            except (RedisError, OSError) as error:
                # A connection that a restarted server closed fails at once: read-only calls go
                # over a new one.
                if tries and isinstance(error, RedisConnectionError):
                    continue
                self.breaker.note(ok=False)
                self.counters["unreachable"] += 1
                raise _Unavailable(sent=True) from None
            self.breaker.note(ok=True)
            if task.cancelling() > cancels:  # redis-py's `wait_for` may keep it (Python 3.11)
                raise asyncio.CancelledError
            self.counters["answers"] += 1
            self.counters["microseconds"] += round(1e6 * (time.perf_counter() - began))
            return answer

    async def lookup(self, key: str) -> Record | None:
        """See `Directory`. Those that come while one is under way go together in the next call."""
        future: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, future))
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return await future

    async def _look(self) -> None:
        try:
            await asyncio.sleep(0)  # whoever runs in this round of the loop comes along
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_LOOKUPS], self._waiting[MOST_LOOKUPS:]
                found: Sequence[Record | None] = [None] * len(batch)
                try:
                    text = await self._call("lookup", [key for key, _ in batch])
                    found = _records(text, len(batch))
                    self._note_epoch(found[0])
                except (_Unavailable, ValueError, TypeError, AttributeError):
                    pass
                except Exception:
                    logger.exception("the KV directory's lookup failed")
                for (_, future), record in zip(batch, found, strict=True):
                    if not future.done():  # cancelled meanwhile
                        future.set_result(record)
        finally:
            self._looking = None

    def _note_epoch(self, record: Record | None) -> None:
        """The directory lost its data where its epoch is another one."""
        if record is None:
            return
        if self._epoch not in (None, record.epoch):
            self.counters["epoch_changes"] += 1
            logger.info("the KV directory begins anew: what was owned is stale")
        self._epoch = record.epoch

    async def claim(
        self, key: str, seen: Record, owner: str, fingerprint: str, *, moved: bool = False
    ) -> Claim:
        """See `Directory`. A lost reply is resolved by a lookup: am I the owner?"""
        try:
            new = await self._call(
                "claim",
                [key],
                seen.epoch,
                str(seen.sequence),
                owner,
                fingerprint,
                self.channel,
                key,
                str(int(moved)),
            )
        except _Stale:
            self.counters["claim_stale"] += 1
            return Claim("stale")
        except _Unavailable as error:
            if not error.sent:
                return Claim("unavailable")
            now = await self.lookup(key)
            if now is None:
                return Claim("unknown")
            if now.owner == owner and now.epoch == seen.epoch and now.sequence > seen.sequence:
                self.counters["claim_ok"] += 1
                return Claim("ok", now.sequence)
            same = (now.epoch, now.sequence) == (seen.epoch, seen.sequence)
            return Claim("unknown" if same else "stale")
        self.counters["claim_ok"] += 1
        return Claim("ok", int(new))

    async def check(self, key: str, mine: Record) -> bool | None:
        """See `Directory`."""
        try:
            return bool(
                await self._call("check", [key], mine.epoch, str(mine.sequence), mine.owner)
            )
        except _Unavailable:
            return None

    async def release(self, key: str, mine: Record) -> None:
        """See `Directory`."""
        try:
            await self._call("release", [key], mine.epoch, str(mine.sequence), mine.owner)
        except _Unavailable:
            logger.info("a conversation was not given up: no KV directory")

    async def announce(self, owner: str, room: int | None) -> list[Member] | None:
        """See `Directory`."""
        for_ms = str(int(self.settings.member_s * 1000))
        try:
            text = await self._call(
                "announce", [], owner, "" if room is None else str(room), for_ms
            )
            return _members(text)
        except (_Unavailable, ValueError, TypeError, AttributeError):
            return None

    async def moved(self) -> AsyncIterator[Moved | None]:
        """Claims of others as they come, for ever. Some may be missed; None: the connection was
        lost and is there again, so some were."""
        from redis.exceptions import RedisError

        lost = False
        while True:
            try:
                async with self.client.pubsub(ignore_subscribe_messages=True) as listener:
                    await listener.subscribe(self.channel)
                    if lost:
                        yield None
                    while True:
                        message = await listener.get_message(timeout=self.settings.breaker_s)
                        if message is not None and (moved := _moved(message["data"])):
                            yield moved
            except (RedisError, OSError, ValueError):  # the last: bytes that are no text
                lost = True
                self.counters["listener_lost"] += 1
                await asyncio.sleep(min(self.settings.timeout_s, self.settings.breaker_s))

    async def close(self) -> None:
        """See `Directory`."""
        await self.client.aclose()
        await self.client.connection_pool.disconnect()


class _Unavailable(Exception):
    def __init__(self, *, sent: bool) -> None:
        self.sent = sent


class _Stale(Exception):
    pass


def _records(text: str, count: int) -> list[Record]:
    epoch, *lines = text.split("\n")
    if len(lines) != count:
        raise ValueError(f"{len(lines)} records for {count} keys")
    # One that makes no sense must not keep the others from being found.
    found = (_RECORD.fullmatch(line) for line in lines)
    return [Record(epoch, int(r[1]), r[2], r[3]) if r else Record(epoch, 0) for r in found]


def _members(text: str) -> list[Member]:
    found = (_MEMBER.fullmatch(line) for line in text.split("\n"))
    return [Member(m[1], int(m[2])) for m in found if m]


def _moved(data: str | None) -> Moved | None:
    found = _MOVED.fullmatch(data or "")
    return None if found is None else Moved(found[1], found[2], int(found[3]), found[4])
