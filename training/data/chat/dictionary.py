"""Dictionary questions from WordNet senses."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from . import terms
from .core import Item, pick

ASK = (
    "What does {w} mean?", "Define {w}.", "What is the meaning of {w}?", 'What does "{w}" mean?', "Explain the word {w}.",
    "define {w}", "meaning of {w}", "What is the definition of {w}?", "Give me the definition of {w}.",
)  # fmt: skip
UNWANTED = re.compile(
    r"offensive|slur|vulgar|obscene|disparag|genital|coit|sexual|prostitut|nigg|derog", re.I
)


def items(
    rng: random.Random, senses: list[tuple[str, str, str, str, list[str]]], count: int
) -> Iterator[Item]:
    """At most `count` words with up to three senses each."""
    explained = {terms.bare_name(line.split("=")[0]) for line in terms.TABLE.strip().split("\n")}
    by_word: dict[str, list[tuple[str, str, str]]] = {}
    for word, part, gloss, example, _ in senses:
        if not UNWANTED.search(f"{word} {gloss} {example}") and word.isascii():
            by_word.setdefault(word, []).append((part, gloss, example))
    words = sorted(set(by_word) - explained)
    rng.shuffle(words)
    for word in words[:count]:
        found = by_word[word][:3]
        if len(found) == 1:
            part, gloss, example = found[0]
            answer = f"{word} ({part}): {gloss}."
            if example:
                answer += f" Example: {example[0].upper() + example[1:]}."
        else:
            answer = "\n".join(f"{i}. ({p}) {g}." for i, (p, g, _) in enumerate(found, 1))
        think = f"The user asks what {word} means."
        yield Item("dictionary", [pick(rng, ASK).format(w=word)], answer, think, key=f"word {word}")
