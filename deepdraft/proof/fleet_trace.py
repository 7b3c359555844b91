"""Conversations for a fleet: Poisson arrivals, 2 to 20 turns, made from a seed.

Owns: how many turns, how long texts and pauses are. Knows nothing of: servers, tokens, times of
answers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepdraft.errors import ConfigError
from deepdraft.proof.serve_load import Conversation, Turn, arrivals
from deepdraft.proof.suite import document

_FEWEST = 2
_HEAD_CHARS = 25
"""That a document has before its text."""
_QUESTIONS = (
    "What does the text say about {}?",
    "And who else spoke of {}?",
    "Was there more than one {}?",
    "Say it again in a few words, with {} in it.",
    "How would {} have ended?",
)
_THINGS = "the road|a letter|copper bells|the price of grain|the harbour|the council|the old map"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """What users do. The same plan is the same trace, to the character."""

    conversations: int = 60
    rate: float = 1.0
    """Conversations that begin in a second, on average."""
    mean_turns: float = 6.7
    """Turns are 2 to `most_turns`, the longer the rarer (geometric)."""
    most_turns: int = 20
    document_chars: int = 2400
    """Of the text that a conversation begins with, on average; from half of it to half more."""
    max_tokens: int = 24
    pause_s: float = 1.0
    """From an answer to the next question, on average (exponential)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("conversations", 1),
            ("mean_turns", _FEWEST),
            ("most_turns", _FEWEST),
            ("document_chars", 1),
            ("max_tokens", 1),
            ("pause_s", 0),
        ):
            value = getattr(self, name)
            if not least <= value < 1 << 24:
                raise ConfigError(f"{name} of a trace must be {least} or more, got {value}")
        if not 0 < self.rate < 1e6:
            raise ConfigError(f"the rate of a trace must be above 0, got {self.rate}")


def fleet_trace(plan: TracePlan) -> list[Conversation]:
    """The plan's conversations in the order of their beginnings. No two begin with the same text,
    so what a turn finds in a cache is what its own conversation left there."""
    return list(_each(plan, document))


def lengths(plan: TracePlan) -> Iterator[tuple[float, list[tuple[int, Turn]]]]:
    """When each conversation of the same trace begins, and the characters of its turns; no text is
    written for that, so a trace may be long."""
    for conversation in _each(plan, lambda chars, seed: " " * (chars + _HEAD_CHARS)):
        yield conversation.at_s, [(len(turn.text), turn) for turn in conversation.turns]


def _each(plan: TracePlan, write: Callable[[int, int], str]) -> Iterator[Conversation]:
    """`write` makes a text of so many characters of a seed."""
    rng = random.Random(f"fleet {plan.seed}")
    for number, at_s in enumerate(arrivals(plan.conversations, plan.rate, plan.seed)):
        yield Conversation(at_s, _turns(plan, rng, number, write))


def _turns(
    plan: TracePlan, rng: random.Random, number: int, write: Callable[[int, int], str]
) -> tuple[Turn, ...]:
    # Of the turns after the second each follows with this probability.
    go_on = 1 - 1 / (1 + plan.mean_turns - _FEWEST)
    count = _FEWEST
    while count < plan.most_turns and rng.random() < go_on:
        count += 1
    chars = max(1, round(plan.document_chars * rng.uniform(0.5, 1.5)))
    first = write(chars, plan.seed * 1_000_003 + number)
    turns = [Turn(f"{first}\n{_question(rng)}", plan.max_tokens)]
    for _ in range(count - 1):
        pause_s = rng.expovariate(1 / plan.pause_s) if plan.pause_s else 0.0
        turns.append(Turn(_question(rng), plan.max_tokens, pause_s))
    return tuple(turns)


def _question(rng: random.Random) -> str:
    return rng.choice(_QUESTIONS).format(rng.choice(_THINGS.split("|")))


def num_turns(trace: Sequence[Conversation]) -> int:
    """Of all conversations together."""
    return sum(len(c.turns) for c in trace)
