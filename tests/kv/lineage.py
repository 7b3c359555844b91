"""The oracle of answers that started from a state handed over as it was, or replayed.

Owns: one server that answers a request again from the very state that another says it started from.
Such states depend on how they came to be, so this server keeps all of them, and each turn of a
conversation must be told to it in order. Only exact state may be shared between conversations.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from deepdraft.kv.plan import Plan
from tests.kv.served import Json, Peer


@dataclass(frozen=True)
class Start:
    """Where a server says that a request started, from its `usage`."""

    kind: str
    """cold, checkpoint or replay."""
    position: int
    exact: bool

    @classmethod
    def of(cls, provenance: str, num_cached: int) -> "Start":
        words = provenance.split()
        word, last = words[0], words[-1]
        if word == "replayed":
            # A replay runs tokens before its position again; a checkpoint of replayed state none.
            kind = "checkpoint" if int(last) == num_cached else "replay"
            return cls(kind, int(last), exact=False)
        if word == "whole":
            return cls("checkpoint", num_cached, exact=True)
        assert provenance in ("exact", "none"), provenance
        return cls("cold", 0, exact=True)

    def fits(self, plan: Plan) -> bool:
        """The plan is this start."""
        return (plan.kind, plan.position, plan.exact) == (self.kind, self.position, self.exact)


class Lineage:
    """Around a served model with a cache that allows the same reuse and evicts nothing."""

    def __init__(self, peer: Peer, reuse: str) -> None:
        self.peer, self.lock = peer, threading.Lock()
        self.counts: Counter[str] = Counter()
        self._cache: Any = peer.cache
        self._cache.reuse = reuse
        self._all_plans = self._cache._plans
        self._cache._plans = self._plans
        self._start = Start("cold", 0, exact=True)

    def post(self, path: str, body: Json, provenance: str, num_cached: int) -> httpx.Response:
        """The answer from that start. An exact start is a cold one here: so it must equal it."""
        start = Start.of(provenance, num_cached)
        with self.lock:
            self._start = start
            answer = self.peer.post(path, body)
            self._cache.flush()
        self.counts[f"oracle_{start.kind}"] += 1
        if start.position and not answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
            self.counts["oracle_lacks_the_start"] += 1
        return answer

    def _plans(self, token_ids: Sequence[int] | np.ndarray) -> list[Plan]:
        if not self._start.position:
            return []
        # A match of the longer text hides shorter ones: cut where the replay began.
        text = [*token_ids[: self._start.position], token_ids[-1]]
        found = [p for p in self._all_plans(text) if self._start.fits(p)]
        states = {self._state(p) for p in found}
        self.counts["oracle_ambiguous"] += len(states) > 1
        return found

    def _state(self, plan: Plan) -> tuple[bytes | None, ...]:
        entry = self._cache.memory.entries[plan.entry]
        if entry.exact and plan.kind == "replay":
            return ()  # its global KV follows from the tokens
        for checkpoint in entry.checkpoints:
            if plan.kind == "checkpoint" and checkpoint.info.position == plan.position:
                return tuple(chunk.digest for chunk in checkpoint.chunks)
        return tuple(chunk.digest for chunk in entry.chunks)

    def close(self) -> None:
        self.peer.close()
