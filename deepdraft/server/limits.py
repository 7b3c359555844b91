"""What a key may do: requests and tokens a minute, requests at once; on one server or over a fleet.

Owns: the buckets, the places of running requests and the line before them, their leases, what holds
when the fleet's Redis is away.
Knows nothing of: HTTP, engines, how a key is presented. Runs without torch.

On one server rates are counted here, and who waits is the engine's business. Servers with one
directory (`fleet.directory`) count together in it: each call is one Lua script, so nothing is
counted twice or lost between two of them. A place is a lease that its server renews; those of a
server that died end by themselves. Redis away: rates are divided by the servers last seen, requests
at once are bounded by each engine for itself, nobody is refused for want of Redis.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepdraft.config import ApiKey, Config
from deepdraft.errors import DeepdraftError
from deepdraft.telemetry import Counters, logger
from deepdraft.types import TokenEvent

if TYPE_CHECKING:
    from deepdraft.server.stream import EventSource

LEASE_S = 60.0
"""A place that nobody renews is free again after this."""
_WAIT_LEASE_S = 15.0
"""The same of a place in the line; who waits asks far more often."""
_ASK_S = (0.05, 0.5)
"""Between two questions of one that waits: at first, and at most."""
_RENEW = 3
"""Leases are renewed so many times before they would end."""
_TIMEOUT_S = 1.0


class TooManyRequests(DeepdraftError):
    """A key is used more than it may be (HTTP 429)."""

    http_status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s: float = 1.0
    """Seconds until it may be used again, as far as is known."""

    @classmethod
    def after(cls, message: str, seconds: float) -> "TooManyRequests":
        """With the time to wait."""
        error = cls(message)
        error.retry_after_s = seconds
        return error


class Bucket:
    """So many a minute, and as many at once after a pause. What is only known afterwards may be
    owed; then nothing passes until it is paid."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._most = max(1.0, per_minute)
        self._left, self._seen = self._most, clock()

    def take(self, amount: float = 1.0, *, share: float = 1.0) -> float:
        """Takes `amount` where at least one is left: 0, else the seconds until one is.

        `share`: this server's part of the whole, when it counts alone.
        """
        self._fill(share)
        if self._left < 1:
            return (1 - self._left) * 60 / (self.per_minute * share)
        self._left -= amount
        return 0.0

    def owe(self, amount: float) -> None:
        """Takes what was used, whether it is there or not."""
        self._fill(1.0)
        self._left -= amount

    def _fill(self, share: float) -> None:
        now = self._clock()
        most = max(1.0, self._most * share)
        self._left = min(most, self._left + (now - self._seen) * self.per_minute * share / 60)
        self._seen = now


class Limits:
    """The limits of one server's keys, counted here."""

    def __init__(
        self,
        keys: Iterable[ApiKey],
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
    ) -> None:
        """`counters`: get `limit_...`, what keys met."""
        self.keys = {key.name: key for key in keys}
        self.counters = counters or Counters()
        self.share = 1.0
        """Of the whole that this server may give away while it counts alone."""
        self._requests = {
            name: Bucket(key.requests_per_minute, clock)
            for name, key in self.keys.items()
            if key.requests_per_minute is not None
        }
        self._tokens = {
            name: Bucket(key.tokens_per_minute, clock)
            for name, key in self.keys.items()
            if key.tokens_per_minute is not None
        }

    async def request(self, name: str) -> float:
        """One HTTP request of a key: 0 where it may pass, else the seconds until one may."""
        bucket = self._requests.get(name)
        return 0.0 if bucket is None else bucket.take(share=self.share)

    def bind(self, name: str) -> bool:
        """Whether jobs of this key must `enter` before they begin."""
        return name in self._tokens

    async def enter(self, name: str, count: int, prompt_tokens: int) -> "Place | None":
        """A job of `count` engine requests begins; None where nothing of it need be known at its
        end. Waits until the key may run it. Raises TooManyRequests."""
        if name not in self._tokens:
            return None
        self.refuse(name, self._tokens[name].take(prompt_tokens, share=self.share))
        return Place(self, name)

    def refuse(self, name: str, wait_s: float) -> None:
        """Raises TooManyRequests where there is something to wait for."""
        if wait_s:
            most = self.keys[name].tokens_per_minute
            self.counters.add("limit_tokens_refused")
            raise TooManyRequests.after(
                f"this key may use {most:g} tokens a minute; try again in {wait_s:.0f} s", wait_s
            )

    def leave(self, place: "Place", tokens: int) -> None:
        """A job has ended, after `tokens` tokens of answers."""
        bucket = self._tokens.get(place.name)
        if bucket is not None:
            bucket.owe(tokens)

    async def close(self) -> None:
        """Ends what runs beside requests."""


@dataclass(slots=True, eq=False)
class Place:
    """What a job holds of its key's limits until it ends."""

    limits: Limits
    name: str
    ids: tuple[str, ...] = ()
    """Its leases in Redis."""
    counted: bool = False
    """Its tokens are counted in Redis."""
    left: bool = False

    def leave(self, tokens: int) -> None:
        """The job has ended; the second time nothing happens."""
        if not self.left:
            self.left = True
            self.limits.leave(self, tokens)


class Held:
    """Events of a job that gives its place up when they are closed. Nothing lies between a reader
    and the engine's events but that."""

    def __init__(self, events: "EventSource", place: Place, tokens: Callable[[], int]) -> None:
        """`tokens`: of the answers so far."""
        self._events, self._place, self._tokens = events, place, tokens
        self.batch, self.cancel = events.batch, events.cancel

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._events.__aiter__()

    async def __anext__(self) -> TokenEvent:
        return await self._events.__anext__()

    def close(self) -> None:
        """Ends every request that still runs, and gives the place up."""
        try:
            self._events.close()
        finally:
            self._place.leave(self._tokens())


_SPEND = """
local per, cost, need = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local t = redis.call('TIME')
local now = t[1] + t[2] / 1e6
local most = math.max(1, per)
local b = redis.call('HMGET', KEYS[1], 'left', 'at')
local left = most
if b[1] and b[2] then
  left = math.min(most, b[1] + math.max(0, now - b[2]) * per / 60)
end
if need > 0 and left < need then return tostring((need - left) * 60 / per) end
left = math.min(most, left - cost)
redis.call('HSET', KEYS[1], 'left', string.format('%.6f', left), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil((most - left) * 60000 / per) + 1000)
return '0'
"""
# KEYS: running, waiting (by time), waiting (by end of lease). Expired leases of all three go first.
_PURGE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now)) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
end
"""
# ARGV: id, places, most running, most waiting, lease, lease of a waiting one (ms). 1: may run,
# 0: waits, -1: the line is full. Who came first runs first.
_ENTER = (
    _PURGE
    + """
local id, need = ARGV[1], math.min(tonumber(ARGV[2]), tonumber(ARGV[3]))
local rank = redis.call('ZRANK', KEYS[2], id)
local ahead = rank or redis.call('ZCARD', KEYS[2])
if ahead == 0 and redis.call('ZCARD', KEYS[1]) + need <= tonumber(ARGV[3]) then
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  for i = 1, need do redis.call('ZADD', KEYS[1], now + ARGV[5], id .. '/' .. i) end
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  return 1
end
if not rank then
  if ahead >= tonumber(ARGV[4]) then return -1 end
  redis.call('ZADD', KEYS[2], t[1] * 1e6 + t[2], id)
end
redis.call('ZADD', KEYS[3], now + ARGV[6], id)
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
return 0
"""
)
# ARGV: lease, ids of running ones.
_RENEW_SCRIPT = (
    _PURGE
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('ZCARD', KEYS[1])
"""
)
_LEAVE = """
for i = 1, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i])
  redis.call('ZREM', KEYS[3], ARGV[i])
end
return 1
"""
# KEYS: servers. ARGV: lease (ms), this one, and whether it stays. How many there are.
_MEMBERS = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[2])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZCARD', KEYS[1])
"""


_SCRIPTS = {
    "spend": _SPEND,
    "enter": _ENTER,
    "renew": _RENEW_SCRIPT,
    "leave": _LEAVE,
    "members": _MEMBERS,
}


class _Away(Exception):
    """Redis did not answer, or not well."""


class FleetLimits(Limits):
    """The limits of keys over all servers with one Redis."""

    def __init__(
        self,
        keys: Iterable[ApiKey],
        client: Any,
        namespace: str,
        *,
        most_waiting: int = 256,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
    ) -> None:
        """`client`: of redis.asyncio; `most_waiting`: of a key that says nothing of it."""
        from deepdraft.kv.directory import Breaker

        super().__init__(keys, clock, counters)
        self.lease_s = lease_s
        self._client, self._namespace, self._most_waiting = client, namespace, most_waiting
        self._id = uuid.uuid4().hex
        self._places: dict[str, Place] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._closed = False
        self._breaker = Breaker(3, 2.0, clock)
        self._scripts = {name: client.register_script(text) for name, text in _SCRIPTS.items()}

    async def request(self, name: str) -> float:
        """See `Limits`."""
        most = self.keys[name].requests_per_minute
        if most is None:
            return 0.0
        self._keep_renewing()
        try:
            return await self._spend(name, "requests", most, 1, 1)
        except _Away:
            return await super().request(name)

    def bind(self, name: str) -> bool:
        """See `Limits`."""
        key = self.keys.get(name)
        return key is not None and (
            key.tokens_per_minute is not None or key.max_running is not None
        )

    async def enter(self, name: str, count: int, prompt_tokens: int) -> Place | None:
        """See `Limits`. Who waits is asked for again and again, so that a line of a server that
        died moves on."""
        if not self.bind(name):
            return None
        key = self.keys[name]
        self._keep_renewing()
        place = Place(self, key.name)
        if key.max_running is not None:
            await self._wait(key, place, count)
        most = key.tokens_per_minute
        if most is None:
            return place
        try:
            try:
                wait_s = await self._spend(key.name, "tokens", most, prompt_tokens, 1)
                place.counted = True
            except _Away:
                wait_s = self._tokens[key.name].take(prompt_tokens, share=self.share)
            self.refuse(key.name, wait_s)
        except BaseException:
            place.leave(0)
            raise
        return place

    async def _wait(self, key: ApiKey, place: Place, count: int) -> None:
        """Until the key may run `count` requests more. Raises TooManyRequests."""
        assert key.max_running is not None
        id, pause_s = uuid.uuid4().hex, _ASK_S[0]
        most = key.max_queue if key.max_queue is not None else self._most_waiting
        line = (id, count, key.max_running, most, _ms(self.lease_s), _ms(_WAIT_LEASE_S))
        names = [f"{id}/{i + 1}" for i in range(min(count, key.max_running))]
        try:
            while True:
                try:
                    answer = int(await self._call("enter", self._line(key.name), *line))
                except _Away:
                    return  # each engine bounds what it runs of a tenant by itself
                if answer == 1:
                    place.ids = tuple(names)
                    self._places[id] = place
                    return
                if answer < 0:
                    self.counters.add("limit_running_refused")
                    raise TooManyRequests.after(
                        f"this key may have {key.max_running} requests running and {most} waiting "
                        "in this fleet; wait for one of them to end",
                        1.0,
                    )
                self.counters.add("limit_waits")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _ASK_S[1])
        except asyncio.CancelledError:
            # The last question may have been answered with a place.
            self._later(self._give_up(key.name, [id, *names]))
            raise

    def leave(self, place: Place, tokens: int) -> None:
        """See `Limits`. Returns at once."""
        if place.ids:
            self._places.pop(place.ids[0].partition("/")[0], None)
            self._later(self._give_up(place.name, place.ids))
        most = self.keys[place.name].tokens_per_minute
        if most is None or not tokens:
            return
        if place.counted:
            self._later(self._owe(place, most, tokens))
        else:
            super().leave(place, tokens)

    async def _owe(self, place: Place, most: float, tokens: int) -> None:
        try:
            await self._spend(place.name, "tokens", most, tokens, 0)
        except _Away:
            super().leave(place, tokens)

    async def _give_up(self, name: str, ids: Sequence[str]) -> None:
        try:
            await self._call("leave", self._line(name), *ids)
        except _Away:
            pass  # the leases end by themselves

    async def _spend(self, name: str, what: str, most: float, amount: int, need: int) -> float:
        key = f"{{{self._namespace}}}:limits:{name}:{what}"
        return float(await self._call("spend", [key], most, amount, need))

    def _line(self, name: str) -> list[str]:
        begin = f"{{{self._namespace}}}:limits:{name}"
        return [f"{begin}:running", f"{begin}:waiting", f"{begin}:patience"]

    async def _call(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        """Raises _Away."""
        if not self._breaker.allows():
            raise _Away
        try:
            # Not wait_for: that of Python 3.11 can swallow a cancellation.
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._scripts[script](keys=keys, args=args)
        except Exception as error:
            self._breaker.note(ok=False)
            self.counters.add("limit_away")
            logger.warning(
                "limits are counted here: the directory fails (%s)", type(error).__name__
            )
            raise _Away from error
        else:
            self._breaker.note(ok=True)
        finally:
            # The client has been seen to swallow a cancellation; who goes must go.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
        return answer

    # ---- beside requests --------------------------------------------------------------------

    def _later(self, work: Any) -> None:
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:  # the loop has ended: so will the leases
            work.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _keep_renewing(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """From the first request to the end: renews places, counts the servers."""
        while not self._closed:
            await self.renew()
            await asyncio.sleep(self.lease_s / _RENEW)

    async def renew(self) -> None:
        """Renews every place of this server once, and learns how many servers there are."""
        try:
            await self.see_members()
            by_name: dict[str, list[str]] = {}
            for place in tuple(self._places.values()):
                by_name.setdefault(place.name, []).extend(place.ids)
            for name, ids in by_name.items():
                await self._call("renew", self._line(name), _ms(self.lease_s), *ids)
                # One that ended meanwhile must not be renewed for ever.
                gone = [i for i in ids if i.partition("/")[0] not in self._places]
                if gone:
                    await self._give_up(name, gone)
        except _Away:
            pass

    async def see_members(self, *, stays: bool = True) -> int:
        """Counts the servers of the fleet, this one among them. Raises _Away."""
        key = f"{{{self._namespace}}}:limits:servers"
        count = await self._call("members", [key], _ms(self.lease_s), self._id, int(stays))
        self.share = 1 / max(1, int(count))
        return int(count)

    async def close(self) -> None:
        """Gives up what is held, as far as Redis answers."""
        if self._closed:
            return
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for place in tuple(self._places.values()):
            place.leave(0)
        try:
            await self.see_members(stays=False)
        except _Away:
            pass
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await self._client.connection_pool.disconnect()


def _ms(seconds: float) -> int:
    return math.ceil(1e3 * seconds)


def open_limits(config: Config, keys: Sequence[ApiKey], counters: Counters | None = None) -> Limits:
    """The limits of `keys`: over the fleet where there is a directory and a key that has any.

    Raises ConfigError for an address that is none; Redis itself need not be there.
    """
    limited = any(
        k.requests_per_minute is not None
        or k.tokens_per_minute is not None
        or k.max_running is not None
        for k in keys
    )
    if config.fleet.directory is None or not limited:
        return Limits(keys, counters=counters)
    from deepdraft.kv.directory import DirectorySettings, RedisDirectory

    space = config.fleet.namespace
    settings = DirectorySettings(timeout_s=_TIMEOUT_S)
    client = RedisDirectory.connect(config.fleet.directory, space, settings).client
    most = config.engine.max_queue
    return FleetLimits(keys, client, space, most_waiting=most, counters=counters)
