"""The mix: every source with its documents, weights and licence, and the validation split.

Owns: counts, weights and which documents are held out. Knows nothing of token ids.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import sources
from .chat import apps, core, numbers, stories, talk
from .chat.core import Item, Rendered

SEED = 20261129


@dataclass
class Group:
    """One source of the corpus: `weight` is its share of training tokens in percent."""

    name: str
    license: str
    weight: float
    packages: tuple[str, ...] = ()
    train: list[str] = field(default_factory=list)  # whole documents as text with control tokens
    val: list[str] = field(default_factory=list)
    chat: bool = False


CHAT: dict[str, tuple[float, int, Callable[[random.Random, int], Iterator[Item]]]] = {
    "chat-tetris": (8, 3000, lambda r, n: apps.items(r, "tetris", n)),
    "chat-apps": (
        7,
        4400,
        lambda r, n: (i for a in apps.DEFAULTS if a != "tetris" for i in apps.items(r, a, n // 11)),
    ),
    "chat-talk": (7, 16000, talk.items),
    "chat-facts": (6, 14000, talk.fact_items),
    "chat-sums": (5, 16000, numbers.items),
    "chat-stories": (5, 10000, stories.items),
}


def chat_groups(scale: float = 1.0) -> Iterator[tuple[Group, list[Rendered]]]:
    """Rendered synthetic chat, one group per generator, with equal conversations merged."""
    for name, (weight, count, make) in CHAT.items():
        rng = random.Random(f"{SEED} {name}")
        group = Group(name, "Apache-2.0 (own text)", weight, chat=True)
        rendered = []
        seen: dict[str, int] = {}
        for item in make(rng, max(50, int(count * scale))):
            r = core.render(item, rng)
            text = r.prompt + r.answer
            seen[text] = seen.get(text, 0) + 1
            if seen[text] > (60 if item.pinned and item.cls == "tetris" else 3):
                continue
            rendered.append(r)
            (group.val if r.held_out else group.train).append(text)
        yield group, rendered
