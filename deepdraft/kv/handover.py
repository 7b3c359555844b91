"""A server that leaves gives its conversations to its peers: the order, the limits, the account.

Owns: which conversation is offered to whom and when no more, one connection to each peer.
Knows nothing of: the directory, how a peer fetches and claims (`fleet`).

A peer is told to fetch and claim; it answers when it owns the conversation, so whoever dies in the
middle leaves a record that is right or one whose owner is gone: then the next turn is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deepdraft.kv import wire
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.fetch import Peer

logger = logging.getLogger(__name__)
AT_A_TIME = 8
"""Peers that fetch at the same time."""
GRACE_S = 1.0
"""After the deadline, for all of them together, to let go."""
_NOT_ANY_MORE = frozenset(("stale", "miss"))
"""Nobody needs to be offered the conversation again: it has moved on, or is gone."""
_NOT_THIS_PEER = frozenset(("leaving", "incompatible", "unavailable", "none"))
"""Nor the peer another one."""


@dataclass(slots=True)
class Offered:
    """One conversation, as the directory has it, and its size in bytes."""

    key: str
    epoch: str
    sequence: int
    num_bytes: int
    tried: set[Peer] = field(default_factory=set)


@dataclass(slots=True)
class Report:
    """What became of the conversations of a server that left."""

    offered: int = 0
    moved: int = 0
    num_bytes: int = 0
    """Of those that moved, what peers had already included."""
    left: int = 0
    """Neither moved nor stale: computed by whoever is asked next."""
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    """What peers said, and how often."""


class HandOver:
    """Offers conversations to peers until all are gone, no peer takes any, or time is up."""

    def __init__(
        self,
        offered: Iterable[Offered],
        peers: Sequence[Peer],
        *,
        connect: Callable[[Peer], wire.Link],
        fingerprint: bytes,
        deadline_s: float,
        taken: Callable[[Offered], None] = lambda offered: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`offered`, `peers`: the first ones first. `taken` is called for each that moved."""
        self._queue = deque(offered)
        self._peers = deque(peers)
        self._connect, self._fingerprint, self._taken = connect, fingerprint, taken
        self._clock, self._began = clock, clock()
        self._until = self._began + deadline_s
        self._changed = threading.Condition()
        self._links: set[wire.Link] = set()
        self._asked = 0
        """Conversations that a peer was offered and has not answered."""
        self.report = Report(offered=len(self._queue), left=len(self._queue))

    def run(self) -> Report:
        """Blocks, at most until the deadline; never raises for what a peer can do."""
        threads = [
            threading.Thread(target=self._work, name="deepdraft-kv-leave", daemon=True)
            for _ in range(min(len(self._peers), AT_A_TIME))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._rest()))
        with self._changed:
            links = list(self._links)
        for link in links:  # whoever has not answered yet, or only a part
            link.abort()
        for thread in threads:
            thread.join(max(0.0, self._rest() + GRACE_S))
        self.report.seconds = self._clock() - self._began
        return self.report

    def _rest(self) -> float:
        return self._until - self._clock()

    def _work(self) -> None:
        while self._rest() > 0:
            with self._changed:
                if not self._peers or not self._queue:
                    return
                peer = self._peers.popleft()
            try:
                self._offer_to(peer)
            except (OSError, SnapshotError) as error:
                self._note("unreachable")
                logger.info("a peer takes no conversations: %s: %s", peer.name, error)

    def _note(self, answer: str) -> None:
        with self._changed:
            self.report.answers[answer] += 1

    def _offer_to(self, peer: Peer) -> None:
        """All that this peer takes, one after the other."""
        most: float = float("inf")
        link = self._connect(peer)
        with self._changed:
            self._links.add(link)
        try:
            while (one := self._next(peer, most)) is not None:
                answer = ""
                try:
                    answer = self._ask(link, one)
                finally:
                    self._settle(one, answer)
                if answer in _NOT_THIS_PEER:
                    return
                if answer == "full":
                    most = one.num_bytes - 1
        finally:
            with self._changed:
                self._links.discard(link)
            link.close()

    def _next(self, peer: Peer, most: float) -> Offered | None:
        """The first one that the peer was not offered yet; waits for those that others may still
        refuse."""
        with self._changed:
            while (rest := self._rest()) > 0:
                for one in self._queue:
                    if peer not in one.tried and one.num_bytes <= most:
                        self._queue.remove(one)
                        one.tried.add(peer)
                        self._asked += 1
                        return one
                if not self._asked:
                    break
                self._changed.wait(rest)
        return None

    def _ask(self, link: wire.Link, one: Offered) -> str:
        link.limit(max(0.001, self._rest()))
        fields = (one.key, one.epoch, one.sequence)
        link.send(wire.Offer(wire.PROTOCOL, self._fingerprint, *fields))
        reply = link.reply()
        if not isinstance(reply, wire.Taken):
            raise SnapshotError("it answered something else than was asked")
        return reply.outcome

    def _settle(self, one: Offered, answer: str) -> None:
        if answer == "taken":
            self._taken(one)
        with self._changed:
            self._asked -= 1
            if answer:
                self.report.answers[answer] += 1
            if answer == "taken":
                self.report.moved += 1
                self.report.num_bytes += one.num_bytes
            if answer == "taken" or answer in _NOT_ANY_MORE:
                self.report.left -= 1
            else:
                self._queue.append(one)
            self._changed.notify_all()
