"""Prompts to measure with: the bundled ones, or a file of the same form.

Owns: reading and checking of a prompt file. Knows nothing of: engines, models.

A file is a JSON list of objects with a `domain` and either `text` (control tokens spelled out,
BOS included) or `ids`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepdraft.errors import ConfigError, RequestError
from deepdraft.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).resolve().parent / "prompts.json"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the kind of text it belongs to."""

    domain: str
    ids: tuple[int, ...]


def load_prompts(file: str | Path | None, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a file, or the bundled ones. Raises ConfigError."""
    path = Path(file) if file is not None else BUNDLED
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes")
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must hold a list of prompts")
    prompts = []
    for i, entry in enumerate(entries):
        ok = isinstance(entry, dict) and isinstance(entry.get("domain"), str)
        if ok and isinstance(entry.get("text"), str):
            try:
                ids = tokenizer.encode_with_control(entry["text"])
            except RequestError as error:
                raise ConfigError(f"{path}: prompt {i}: {error.message}") from error
        elif ok and isinstance(entry.get("ids"), list):
            ids = entry["ids"]
            if not all(type(x) is int and 0 <= x < tokenizer.vocab_size for x in ids):
                raise ConfigError(f"{path}: prompt {i} has ids outside this vocabulary")
        else:
            raise ConfigError(f"{path}: prompt {i} needs a domain and a text or ids")
        if not ids:
            raise ConfigError(f"{path}: prompt {i} is empty")
        prompts.append(Prompt(entry["domain"], tuple(ids)))
    return prompts


def evenly(prompts: Iterable[Prompt], num: int | None) -> list[Prompt]:
    """The first `num` prompts, taken from the domains in turn; None: all in their order."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    most = max(map(len, by_domain.values()), default=0)
    turns = [x[i] for i in range(most) for x in by_domain.values() if i < len(x)]
    return turns if num is None else turns[:num]


def context_for(prompts: Iterable[Prompt], num_new: int, limit: int) -> int:
    """The context, an even number of tokens, in which each prompt is answered by `num_new`.

    Raises ConfigError where a model of context `limit` has no room for that.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    size = len(longest.ids) + num_new
    if size > limit:
        raise ConfigError(
            f"a prompt of domain {longest.domain!r} has {len(longest.ids)} tokens; with {num_new} "
            f"of an answer that is more than the model's context of {limit}: leave it out, or ask "
            "for shorter answers"
        )
    return min(size + size % 2, limit)
