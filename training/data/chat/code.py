"""Short programs on request, from the snippet file beside this module."""

# ruff: noqa: E501 (sentence tables: one entry a line)

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from .core import Item, pick, vary

LANGUAGE = {
    "python": "Python", "javascript": "JavaScript", "c": "C", "sql": "SQL", "bash": "shell", "html": "HTML", "css": "CSS",
}  # fmt: skip
ASK_FUNCTION = (
    "Write a {l} function that {d}.", "Write a function in {l} that {d}.", "Give me a {l} function that {d}.",
    "I need a {l} function that {d}.", "Can you write a {l} function that {d}?", "Show me a {l} function which {d}.",
    "Implement a function that {d} in {l}.", "{l} function that {d}", "Write {l} code that {d}.", "How do I write {l} code that {d}?",
    "Create a {l} function called {n} that {d}.", "Write the function {n} in {l}: it {d}.",
)  # fmt: skip
ASK_CODE = (
    "Write {l} code that {d}.", "Give me {l} code that {d}.", "Show me {l} code that {d}.", "{l} code that {d}",
    "I need {l} code that {d}.", "How do I write {l} code that {d}?", "Can you write {l} code that {d}?",
)  # fmt: skip
BARE = (" Code only.", " Only the code, please.", " No explanation.", " Just code.")


def snippets() -> list[tuple[str, str, str, str]]:
    """(language, description, name, code) of each snippet."""
    text = Path(__file__).with_name("snippets.txt").read_text(encoding="utf-8")
    out = []
    for block in text.split("### ")[1:]:
        head, code = block.split("\n", 1)
        language, description, name = head.split("|")
        out.append((language, description, name, code.rstrip("\n")))
    return out


def items(rng: random.Random, count: int) -> Iterator[Item]:
    """`count` requests for code; Python when the request names no language."""
    table = snippets()
    for _ in range(count):
        language, description, name, code = pick(rng, table)
        function = re.match(r"def |function |class |import |from |async |long |void |int ", code)
        ask = pick(rng, ASK_FUNCTION if function and name.lower() in code.lower() else ASK_CODE)
        spoken = LANGUAGE[language]
        text = ask.format(l=spoken, d=description, n=name)
        if spoken == "SQL" and text.startswith("Write a SQL"):
            text = text.replace("a SQL", "an SQL", 1)
        bare = rng.random() < 0.15
        text = vary(rng, text)
        if bare:
            text += pick(rng, BARE)
        answer = code if bare else f"```{language}\n{code}\n```"
        think = f"The user wants {spoken} code that {description}."
        yield Item("code", [text], answer, think, key=text.lower())
