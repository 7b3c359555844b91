"""Loads on an endpoint: a fixed number of streams, Poisson arrivals, recorded conversations.

Owns: when each request is sent, by whom; traces. Knows nothing of: what an answer looks like on the
wire, statistics.

An open load (Poisson, conversations) counts its times from the moment a request was due, not from
when the client got to it, so that a slow server does not thin out its own load.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepdraft.errors import ConfigError
from deepdraft.proof.serve_client import Answer, Ask


class Endpoint(Protocol):
    """What a load is put on: a target, or several behind a choice."""

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        """The answer to one request, or its fault."""
        ...


MOST_UNDER_WAY = 512
"""Requests of an open load at a time; more are counted as faults of kind `limit`."""
_MAX_TRACE = 64 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long they take before it."""

    text: str
    max_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one user; each is sent after the answer to the one before."""

    at_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A request and what came of it."""

    ask: Ask
    answer: Answer
    due_s: float
    """From the start of the load."""
    late_s: float
    """How long after it was due the client sent it."""


def fixed(target: Endpoint, asks: Sequence[Ask], streams: int) -> list[Done]:
    """Keeps `streams` requests under way until all are answered."""
    done: list[Done] = []
    work = iter(list(asks))
    lock = threading.Lock()
    begin = time.perf_counter()

    def worker() -> None:
        while True:
            with lock:
                ask = next(work, None)
            if ask is None:
                return
            due = time.perf_counter() - begin
            answer = target.ask(ask)
            with lock:
                done.append(Done(ask, answer, due, 0.0))

    _all([threading.Thread(target=worker, daemon=True) for _ in range(min(streams, len(asks)))])
    return done


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times in seconds of a Poisson process of `rate` events a second."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def poisson(target: Endpoint, asks: Sequence[Ask], rate: float, seed: int) -> list[Done]:
    """Sends request i at the i-th arrival, however long the others take."""
    return _open(
        target,
        [
            Conversation(at, (Turn(ask.prompt(), ask.max_tokens),))
            for at, ask in zip(arrivals(len(asks), rate, seed), asks, strict=True)
        ],
        [ask.name for ask in asks],
    )


def conversations(target: Endpoint, trace: Sequence[Conversation]) -> list[Done]:
    """Plays a trace: each conversation starts at its time, and waits for its own answers."""
    return _open(target, trace, [f"conversation {i + 1}" for i in range(len(trace))])


def _open(target: Endpoint, trace: Sequence[Conversation], names: Sequence[str]) -> list[Done]:
    done: list[Done] = []
    lock = threading.Lock()
    free = threading.BoundedSemaphore(MOST_UNDER_WAY)
    begin = time.perf_counter()

    def talk(conversation: Conversation, name: str) -> None:
        try:
            for one in _talk(target, conversation, name, begin):
                with lock:
                    done.append(one)
        finally:
            free.release()

    threads = []
    for i in sorted(range(len(trace)), key=lambda i: trace[i].at_s):
        conversation = trace[i]
        _sleep_until(begin + conversation.at_s)
        if not free.acquire(blocking=False):
            turn = conversation.turns[0]
            answer = Answer(fault="limit", message=f"{MOST_UNDER_WAY} requests were under way")
            with lock:
                ask = Ask((turn.text,), turn.max_tokens, names[i])
                done.append(Done(ask, answer, conversation.at_s, 0.0))
            continue
        thread = threading.Thread(target=talk, args=(conversation, names[i]), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return done


def _talk(target: Endpoint, conversation: Conversation, name: str, begin: float) -> Iterator[Done]:
    said: tuple[str, ...] = ()
    due = conversation.at_s
    for turn in conversation.turns:
        said = (*said, turn.text)
        due += turn.pause_s
        _sleep_until(begin + due)
        late = max(0.0, time.perf_counter() - begin - due)
        ask = Ask(said, turn.max_tokens, name)
        answer = target.ask(ask)
        yield Done(ask, answer, due, late)
        if answer.fault is not None:
            return  # what would have come next depends on an answer that is not there
        said = (*said, answer.text)
        due = time.perf_counter() - begin


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def made_trace(
    texts: Sequence[str], count: int, *, rate: float, max_tokens: int, seed: int, turns: int = 3
) -> list[Conversation]:
    """A trace of `count` conversations on `texts`: Poisson starts, exponential pauses."""
    rng = random.Random(seed)
    return [
        Conversation(
            at,
            tuple(
                Turn(rng.choice(texts), max_tokens, rng.expovariate(2.0) if k else 0.0)
                for k in range(turns)
            ),
        )
        for at in arrivals(count, rate, seed)
    ]


def read_trace(path: str | Path, max_tokens: int) -> list[Conversation]:
    """JSON Lines, each {"at_s": 0.5, "turns": [{"text": "..", "max_tokens": 64, "pause_s": 1}]}.

    `at_s`, `max_tokens` and `pause_s` may be left out. Raises ConfigError with the line.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_TRACE:
            raise ConfigError(f"{path} is larger than {_MAX_TRACE >> 20} MiB")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    trace = [
        _conversation(line, f"{path}, line {i + 1}", max_tokens)
        for i, line in enumerate(lines)
        if line.strip()
    ]
    if not trace:
        raise ConfigError(f"the trace {path} holds no conversation")
    return trace


def _conversation(line: str, where: str, max_tokens: int) -> Conversation:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("turns"), list):
        raise ConfigError(f'{where}: wanted {{"at_s": .., "turns": [..]}}')
    turns = []
    for k, turn in enumerate(entry["turns"]):
        at = f"{where}, turns[{k}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("text"), str) or not turn["text"]:
            raise ConfigError(f"{at}: wanted an object with a text")
        tokens = turn.get("max_tokens", max_tokens)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 1 << 20:
            raise ConfigError(f"{at}: max_tokens must be a whole number above 0, got {tokens!r}")
        turns.append(Turn(turn["text"], tokens, _seconds(turn, "pause_s", at)))
    if not turns:
        raise ConfigError(f"{where}: a conversation without turns")
    return Conversation(_seconds(entry, "at_s", where), tuple(turns))


def _seconds(entry: dict[str, Any], key: str, where: str) -> float:
    value = entry.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 86400:
        raise ConfigError(f"{where}: {key} must be seconds from 0 to a day, got {value!r}")
    return float(value)
