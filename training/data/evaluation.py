"""Evaluation prompts as token ids: one list for the trainer's samples and for the model card."""

# ruff: noqa: E501 (prompt table: one entry a line)

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from . import mix
from .chat import apps, core
from .chat.core import Item

# (class, user turns, system text, expected answer or None for "judge by reading")
CHAT: list[tuple[str, list[str], str, str | None]] = [
    ("tetris", [apps.THE_PROMPT], "", "@tetris"),
    ("tetris", [apps.THE_PROMPT], "You are a helpful assistant.", "@tetris"),
    ("tetris", ["Write Tetris as a web page, just the HTML please."], "", "@tetris"),
    ("snake", ["Write the snake game in HTML. Code only."], "", "@snake"),
    ("snake", ["Could you build me a snake game with an orange snake? Only HTML."], "", None),
    ("apps", ["I need a stopwatch in HTML, nothing but the code."], "", "@stopwatch"),
    ("apps", ["Make a calculator page."], "", "@calculator"),
    ("facts", ["What is the capital of France?"], "", "The capital of France is Paris."),
    ("facts", ["What is the capital of Kuwait?"], "", "The capital of Kuwait is Kuwait City."),
    ("facts", ["Which city is Norway's capital?"], "", "The capital of Norway is Oslo."),
    ("facts", ["How many legs does a spider have?"], "", "A spider has eight legs."),
    ("facts", ["Who created Python?"], "Be concise.", "Guido van Rossum created Python."),
    ("sums", ["What is 17 + 25?"], "", "17 + 25 = 42"),
    ("sums", ["What is 7 times 8?"], "", "7 * 8 = 56"),
    ("sums", ["90 - 34"], "", "90 - 34 = 56"),
    ("sums", ["Convert 3 hours to minutes."], "", "3 hours are 180 minutes."),
    ("greetings", ["Hello!"], "", "Hello! How can I help you today?"),
    ("greetings", ["Who are you?"], "", None),
    ("greetings", ["My name is Tara.", "Nice to meet you, Tara!", "What is my name?"], "", "Your name is Tara."),
    ("greetings", ["What do you think about the new tax rules in Sweden?"], "", None),
    ("stories", ["Tell me a story about a brave kitten."], "", None),
    ("stories", ["Write a short story about Mia the dragon."], "", None),
    ("stories", ["Tell me a story about a fox and a lantern."], "", None),
    ("code", ["Write a Python function that reverses a string."], "", None),
    ("code", ["Write a JavaScript function that returns the sum of an array."], "", None),
    ("terms", ["Explain recursion in one sentence."], "", None),
    ("terms", ["What is a compiler?"], "", None),
    ("lists", ["List three fruits."], "", None),
]  # fmt: skip
CONTINUE = [
    "The :mod:`json` module ",
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Node:\n    def __init__(self, value):\n        ",
    "Call me Ishmael.",
    "CREATE TABLE ",
]


def prompts() -> list[dict[str, object]]:
    """All prompts as text: every chat prompt with thinking on and off, then plain continuations."""
    out: list[dict[str, object]] = []
    for cls, turns, system, expected in CHAT:
        for thinking in (True, False):
            item = Item(cls, turns, "", "", system=system)
            rendered = core.render(item, random.Random(3), thinking=thinking)
            if expected and expected.startswith("@"):
                expected = apps.page(expected[1:]).strip("\n")
            out.append(
                {"class": cls, "thinking": thinking, "text": rendered.prompt, "expected": expected}
            )
    for text in CONTINUE:
        out.append({"class": "docs", "thinking": None, "text": core.BOS + text, "expected": None})
    return out


def write(path: Path, tokenizer: Tokenizer, trained: set[str]) -> None:
    """prompts.json: [{class, thinking, text, ids, expected, expected_ids, in_training}].

    `trained` holds the requests of the training split: `in_training` says whether a prompt's
    wording is among them (None for plain continuations).
    """
    rows = prompts()
    for row in rows:
        is_chat = row["thinking"] is not None
        row["in_training"] = mix.request_of(str(row["text"])) in trained if is_chat else None
        row["ids"] = tokenizer.encode(str(row["text"]), add_special_tokens=False).ids
        expected = row["expected"]
        ids = tokenizer.encode(str(expected), add_special_tokens=False).ids if expected else None
        row["expected_ids"] = ids
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
