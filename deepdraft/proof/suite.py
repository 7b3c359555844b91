"""The fixed questions of `deepdraft bench speed`, in classes, and the documents of long prompts.

Owns: `suite.json`, made-up documents of a wanted length. Knows nothing of: servers, times.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepdraft.errors import ConfigError

FILE = Path(__file__).resolve().parent / "suite.json"
TETRIS = "implement the tetris game. output HTML code directly - no explanation."
"""The one prompt whose speed is published for the reference engine."""
_CHARS_A_TOKEN = 4.0

_SUBJECTS = "The harbour|A new engine|The council|Her grandmother|The old map|Every winter".split(
    "|"
)
_VERBS = "measured|forgot|rebuilt|described|sold|remembered".split("|")
_OBJECTS = "the northern road|a letter from the coast|seven copper bells|the price of grain".split(
    "|"
)
_ENDS = "before the snow came|without asking anyone|for the third time|in the spring of that year"


@dataclass(frozen=True, slots=True)
class Question:
    """One chat question of the suite."""

    name: str
    """Its class and number."""
    text: str
    thinking: bool = False


def document(num_chars: int, seed: int) -> str:
    """English sentences in chapters, about `num_chars` characters; another seed, another text from
    the first word on, so that no cache of prompts knows it."""
    rng = random.Random(seed)
    parts, length, chapter = [], 0, 0
    while length < num_chars:
        if length >= chapter * 1200:
            chapter += 1
            line = f"\n\nChapter {chapter}, entry {rng.randrange(10**6)}.\n\n"
        else:
            ends = _ENDS.split("|")
            line = (
                f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} "
                f"{rng.choice(ends)}, as page {rng.randrange(1000)} says. "
            )
        parts.append(line)
        length += len(line)
    return f"{rng.getrandbits(64):016x}: notes. " + "".join(parts)[:num_chars].strip()


def chars_for(num_tokens: int, chars_a_token: float = _CHARS_A_TOKEN) -> int:
    """How long a document of `num_tokens` tokens is, roughly; usage tells what it was."""
    return max(1, round(num_tokens * chars_a_token))


def load_suite(
    classes: Sequence[str] | None = None, *, long_tokens: int = 1500
) -> dict[str, list[Question]]:
    """The questions of the wanted classes (None: all). Raises ConfigError for an unknown class."""
    entries = json.loads(FILE.read_text())["classes"]
    wanted = list(entries) if classes is None else list(classes)
    unknown = [name for name in wanted if name not in entries]
    if unknown:
        raise ConfigError(
            f"the suite has no class {unknown[0]!r}; its classes: {', '.join(entries)}"
        )
    suite = {}
    for name in wanted:
        questions = []
        for i, entry in enumerate(entries[name]):
            text = entry["text"]
            if entry.get("document"):
                text = f"{document(chars_for(long_tokens), i + 1)}\n\n{text}"
            questions.append(Question(f"{name} {i + 1}", text, bool(entry.get("thinking"))))
        suite[name] = questions
    return suite
