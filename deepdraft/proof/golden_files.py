"""A golden directory on disk: recorded arrays, the texts they belong to, and checks of both.

Owns: file names, JSON and safetensors reading, the modes that are present.
Knows nothing of: the model, tolerances.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from deepdraft.arch import ModelArgs, V41Args
from deepdraft.errors import CheckpointError

MODES = ("exact", "qsim", "quant")
_MAX_JSON_BYTES = 64 << 20
_MAX_ARRAY_BYTES = 4 << 30
_MAX_TOKENS = 1 << 20

_MODE_FILE = re.compile(r"(?P<stem>.+)-(?P<mode>exact|qsim|quant)\.safetensors")


@dataclass(frozen=True, slots=True)
class Texts:
    """tokens.json: what was run. `prefix` and `shorts` carry their published names' numbers."""

    prompt: list[int]
    prefix: list[int]
    prefix_label: str
    shorts: list[list[int]]
    short_label: str
    greedy: dict[str, list[int]]
    next_after_last: dict[str, int]
    replay_greedy: list[int]


@dataclass(slots=True)
class GoldenDir:
    """An opened golden directory."""

    path: Path
    texts: Texts
    modes: list[str]
    """Modes that any file or greedy continuation belongs to."""
    hash_tables: dict[str, Any] | None
    """engram-hash.json, None where it is missing."""
    _cache: dict[str, dict[str, Tensor] | None] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, args: V41Args) -> GoldenDir:
        """Reads tokens.json and engram-hash.json; CheckpointError says what is wrong with which."""
        texts = _read_texts(path / "tokens.json", args)
        modes = set(texts.greedy)
        for file in path.glob("*.safetensors"):
            match = _MODE_FILE.fullmatch(file.name)
            if match is None:
                raise CheckpointError(
                    f"{file.name}: not a file of a golden directory (WHAT-MODE.safetensors with "
                    f"MODE one of {', '.join(MODES)}); remove it or name it so"
                )
            modes.add(match["mode"])
        lacking = sorted(modes - set(texts.greedy))
        if lacking:
            raise CheckpointError(
                f"tokens.json: greedy_tokens has no entry for mode {lacking[0]}, but there are "
                f"files of that mode"
            )
        tables = path / "engram-hash.json"
        return cls(
            path,
            texts,
            [m for m in MODES if m in modes],
            read_json(tables) if tables.is_file() else None,
        )

    def arrays(self, stem: str, mode: str) -> dict[str, Tensor] | None:
        """All arrays of one file, None where there is no such file; read once."""
        name = f"{stem}-{mode}.safetensors"
        if name not in self._cache:
            self._cache[name] = read_arrays(self.path / name)
        return self._cache[name]

    def stems(self, mode: str) -> list[str]:
        """What precedes the mode in the names of the files that are there."""
        matches = [_MODE_FILE.fullmatch(f.name) for f in self.path.glob(f"*-{mode}.safetensors")]
        return sorted(m["stem"] for m in matches if m is not None)


def read_consistency(path: Path) -> dict[str, Any]:
    """consistency.json (measurements quoted by the quant mode's tolerances), {} where missing."""
    file = path / "consistency.json"
    return read_json(file) if file.is_file() else {}


def read_arrays(file: Path) -> dict[str, Tensor] | None:
    """All arrays of a safetensors file, None where there is none. CheckpointError if damaged."""
    if not file.is_file():
        return None
    if file.stat().st_size > _MAX_ARRAY_BYTES:
        raise CheckpointError(f"{file.name} is larger than {_MAX_ARRAY_BYTES >> 30} GiB")
    try:
        with safetensors.safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file.name} is damaged or truncated ({error}); fetch it again"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size. CheckpointError if it is missing or damaged."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file.name} is larger than {_MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} has no {file.name}; is it a golden directory?"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.name}: expected an object, got {type(value).__name__}")
    return value


def _read_texts(file: Path, args: V41Args) -> Texts:
    data = read_json(file)
    prefix_key = _numbered_key(data, "prompt", file)
    short_key = _numbered_key(data, "short", file)
    greedy = _entry(data, "greedy_tokens", dict, file)
    after = data.get("next_after_last", {})
    if not isinstance(after, dict):
        raise CheckpointError(f"{file.name}: next_after_last must be an object")
    unknown = sorted(set(greedy) - set(MODES))
    if unknown:
        raise CheckpointError(
            f"{file.name}: greedy_tokens has mode {unknown[0]!r}; known are {', '.join(MODES)}"
        )
    shorts = _entry(data, short_key, list, file)
    texts = Texts(
        prompt=read_ids(data.get("prompt"), "prompt", args, file),
        prefix=read_ids(data[prefix_key], prefix_key, args, file),
        prefix_label=prefix_key.removeprefix("prompt"),
        shorts=[read_ids(t, f"{short_key}[{i}]", args, file) for i, t in enumerate(shorts)],
        short_label=short_key.removeprefix("short"),
        greedy={m: read_ids(t, f"greedy_tokens.{m}", args, file) for m, t in greedy.items()},
        next_after_last={
            m: read_ids([t], f"next_after_last.{m}", args, file)[0] for m, t in after.items()
        },
        replay_greedy=read_ids(
            data.get("replay_greedy_tokens_exact", []),
            "replay_greedy_tokens_exact",
            args,
            file,
            empty=True,
        ),
    )
    if texts.prompt[: len(texts.prefix)] != texts.prefix:
        raise CheckpointError(f"{file.name}: {prefix_key} is not the beginning of prompt")
    if len({len(t) for t in texts.shorts}) != 1:
        raise CheckpointError(
            f"{file.name}: {short_key} must hold one or more prompts of one length"
        )
    longest = max(len(texts.prompt) + len(t) for t in [*texts.greedy.values(), []])
    if longest > args.max_position_embeddings:
        raise CheckpointError(
            f"{file.name}: {longest} tokens of text, but the model's positions end at "
            f"{args.max_position_embeddings} (max_position_embeddings)"
        )
    return texts


def _numbered_key(data: dict[str, Any], word: str, file: Path) -> str:
    keys = [k for k in data if re.fullmatch(rf"{word}\d+", k)]
    if len(keys) != 1:
        raise CheckpointError(
            f"{file.name}: expected exactly one key like {word}16, got {sorted(keys) or 'none'}"
        )
    return keys[0]


def _entry(data: dict[str, Any], key: str, kind: type, file: Path) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or not value:
        raise CheckpointError(f"{file.name}: {key} must be a {kind.__name__} that is not empty")
    return value


def read_ids(
    value: object, key: str, args: ModelArgs, file: Path, *, empty: bool = False
) -> list[int]:
    """A list of token ids of this model. CheckpointError names the file and what is wrong."""
    if not isinstance(value, list) or len(value) > _MAX_TOKENS or (not value and not empty):
        raise CheckpointError(f"{file.name}: {key} must be a list of 1 to {_MAX_TOKENS} token ids")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < args.vocab_size:
            raise CheckpointError(
                f"{file.name}: {key} holds {item!r}; token ids lie in 0..{args.vocab_size - 1}"
            )
    return value


def as_positions(value: Tensor | None, limit: int, what: str) -> list[int]:
    """A recorded list of positions, ascending in 0..limit-1, [] where it is missing."""
    if value is None:
        return []
    places = value.flatten().to(torch.int64).tolist()
    if places != sorted(set(places)) or not places or places[0] < 0 or places[-1] >= limit:
        raise CheckpointError(
            f"{what} must hold ascending positions below {limit}, got {places[:8]}"
        )
    return places
