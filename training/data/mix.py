"""The mix: every source with its documents, weights and licence, and the validation split.

Owns: counts, weights and which documents are held out. Knows nothing of token ids.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import sources
from .chat import apps, code, core, dictionary, misc, numbers, stories, talk, terms
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
    "chat-tetris": (8, 3400, lambda r, n: apps.items(r, "tetris", n)),
    "chat-apps": (
        7,
        5500,
        lambda r, n: (i for a in apps.DEFAULTS if a != "tetris" for i in apps.items(r, a, n // 11)),
    ),
    "chat-talk": (6, 16000, talk.items),
    "chat-facts": (5, 14000, talk.fact_items),
    "chat-sums": (4, 16000, numbers.items),
    "chat-stories": (4, 10000, stories.items),
    "chat-terms": (3.5, 12000, terms.items),
    "chat-code": (3.5, 9000, code.items),
    "chat-misc": (4, 12000, misc.items),
    "chat-tools": (2.5, 3500, misc.tool_items),
}


# Validation of the sources that the first training run saw with another split. Its documents come
# from another seed and are kept only when their request was in neither corpus: either the wording
# is never trained, or the first split held the item out and the request is new.
FRESH: dict[str, tuple[int, bool, Callable[[random.Random, int], Iterator[Item]]]] = {
    "chat-tetris": (200, True, lambda r, n: apps.items(r, "tetris", n, apps.HELD_OUT)),
    "chat-apps": (
        165,
        True,
        lambda r, n: (
            i
            for a in apps.DEFAULTS
            if a != "tetris"
            for i in apps.items(r, a, n // 11, apps.HELD_OUT)
        ),
    ),
    "chat-talk": (16000, False, talk.items),
    "chat-facts": (250, True, talk.held_out_facts),
    "chat-sums": (16000, False, numbers.items),
    "chat-stories": (10000, False, stories.items),
}


def request_of(text: str) -> str:
    """The part of a rendered prompt or document from the first user turn to the answer."""
    return text.split("<｜User｜>", 1)[-1].rsplit("<｜Assistant｜>", 1)[0]


def _plain(text: str) -> str:
    """A request without case, punctuation and polite words."""
    words = re.sub(r"[^\w+*<>-]+", " ", request_of(text).lower()).split()
    return " ".join(w for w in words if w not in ("please", "hi", "hello", "hey"))


def _fresh(name: str, generated: list[Rendered], scale: float) -> list[str]:
    """Validation documents of one source of FRESH; `generated` is everything made for training."""
    count, new_wording, make = FRESH[name]
    rng = random.Random(f"{SEED} {name} validation")
    known = {_plain(r.prompt) for r in generated}
    out = []
    for item in make(rng, max(50, int(count * scale))):
        r = core.render(item, rng)
        first_key = r.key.removeprefix(f"{item.cls} ")
        if item.pinned or _plain(r.prompt) in known:
            continue
        if new_wording or core.held_out(first_key):
            out.append(r.prompt + r.answer)
            known.add(_plain(r.prompt))
    return out


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
        if name in FRESH:
            group.val = _fresh(name, rendered, scale)
        yield group, rendered


LIMITS = {"sympy": 9_000_000, "phaser": 6_000_000, "state-of-the-union": 5_000_000}  # characters
KIND_WEIGHT = {"docs": 17.5, "code": 17.0, "prose": 10.0}
DICTIONARY_WORDS = 60_000


def _split(key: str) -> bool:
    """True for the one document in 50 that is held out."""
    return zlib.crc32(key.encode()) % 50 == 0


def text_groups(where: dict[str, Path], scale: float = 1.0) -> list[tuple[str, Group]]:
    """(kind, group) of each source of running text; weights follow size to the power 0.6."""
    out = []
    for source in sources.plain_sources(where):
        docs = list(source.docs)
        random.Random(f"{SEED} {source.name}").shuffle(docs)
        limit = int(LIMITS.get(source.name, 10**9) * scale if scale == 1.0 else 6_000_000 * scale)
        group = Group(source.name, source.license, 0.0, source.packages)
        taken = 0
        for i, (name, text) in enumerate(docs):
            if taken >= limit:
                break
            taken += len(text)
            (group.val if i == 0 or _split(name) else group.train).append(text)
        out.append((source.kind, group))
    for kind, total in KIND_WEIGHT.items():
        sizes = {g.name: sum(map(len, g.train)) ** 0.6 for k, g in out if k == kind}
        for k, group in out:
            if k == kind:
                group.weight = total * sizes[group.name] / sum(sizes.values())
    return out


def dictionary_group(where: dict[str, Path], scale: float = 1.0) -> tuple[Group, list[Rendered]]:
    """WordNet senses as chat."""
    rng = random.Random(f"{SEED} dictionary")
    group = Group("wordnet-chat", "WordNet-3.0", 8.0, ("wordnet-base",), chat=True)
    senses = sources.wordnet_senses(where["wordnet-base"])
    rendered = []
    for item in dictionary.items(rng, senses, int(DICTIONARY_WORDS * scale)):
        r = core.render(item, rng)
        rendered.append(r)
        if not r.held_out:
            group.train.append(r.prompt + r.answer)
        elif core.held_out(item.key):  # held out by the split of the first training run as well
            group.val.append(r.prompt + r.answer)
    chosen = {r.key for r in rendered}
    for item in dictionary.items(random.Random(f"{SEED} dictionary 2"), senses, 10**6):
        if len(group.val) < 1500 * scale and core.held_out(item.key):
            r = core.render(item, rng)
            if r.key not in chosen:
                group.val.append(r.prompt + r.answer)
    return group, rendered
