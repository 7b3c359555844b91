"""A config.json as sections that remember which keys were read.

Owns: reading the file, typed access with messages that name the key's path, refusing keys that
nobody read. Knows nothing of: any family's keys, tensors, torch.
"""

import json
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
MAX_INT = 1 << 24
MAX_NUMBER = 3.4e38
"""Numbers are computed with in float32."""
_MAX_LIST = 4096

ACCEPTED_KEYS: dict[str, str] = {
    "dtype": "storage types are read from the files",
    "torch_dtype": "storage types are read from the files",
    "transformers_version": "which release wrote the file",
    "_name_or_path": "where the file came from",
    "_attn_implementation": "another program's kernel choice",
    "_commit_hash": "which revision the file came from",
    "auto_map": "remote code, which is never run",
    "use_cache": "a state is always kept",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "pretraining_tp": "training only",
    "output_attentions": "another program's outputs",
    "output_hidden_states": "another program's outputs",
    "return_dict": "another program's outputs",
    "is_encoder_decoder": "not a setting of this architecture",
    "chunk_size_feed_forward": "another program's memory setting",
    "id2label": "classification heads only",
    "label2id": "classification heads only",
    "problem_type": "classification heads only",
}
"""Keys of any section that cannot change the forward pass, and why. Their values are not read."""


class Section:
    """One JSON object of the file; remembers which of its keys were read."""

    def __init__(self, values: object, path: str, model: str = "this model's") -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{path or 'config.json'} must be a JSON object, got {show(values)}")
        self.values: dict[str, Any] = values
        self.path, self.model = path, model
        self.read: set[str] = set()

    def where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def value(self, key: str) -> Any:
        self.read.add(key)
        if key not in self.values:
            raise ConfigError(f"{self.where(key)} is missing; {self.model} config.json sets it")
        return self.values[key]

    def section(self, key: str) -> "Section":
        return Section(self.value(key), self.where(key), self.model)

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int:
        return self._integer(self.value(key), self.where(key), low, high)

    def integers(
        self, key: str, *, low: int = 0, high: int = MAX_INT, max_len: int = _MAX_LIST
    ) -> tuple[int, ...]:
        values = self.value(key)
        if not isinstance(values, list) or len(values) > max_len:
            raise ConfigError(
                f"{self.where(key)} must be a list of at most {max_len} integers, "
                f"got {show(values)}"
            )
        return tuple(
            self._integer(v, f"{self.where(key)}[{i}]", low, high) for i, v in enumerate(values)
        )

    def number(self, key: str, *, low: float = 0.0, above: bool = False) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where(key)} must be a number, got {show(value)}")
        # Compared as it is: an integer may be too large for any float.
        if not abs(value) <= MAX_NUMBER or value < low or (above and value == low):
            rule = f"above {low:g}" if above else f"at least {low:g}"
            raise ConfigError(
                f"{self.where(key)} must be finite and {rule} (in float32), got {show(value)}"
            )
        return float(value)

    def integer_or(
        self, key: str, default: int | None, *, low: int = 0, high: int = MAX_INT
    ) -> int | None:
        """The integer, or `default` where the key is absent or null."""
        self.read.add(key)
        return self.integer(key, low=low, high=high) if self.has(key) else default

    def number_or(self, key: str, default: float, *, low: float = 0.0) -> float:
        """The number, or `default` where the key is absent or null."""
        self.read.add(key)
        return self.number(key, low=low) if self.has(key) else default

    def flag_or(self, key: str, default: bool) -> bool:
        """The boolean, or `default` where the key is absent or null."""
        self.read.add(key)
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where(key)} must be true or false, got {show(value)}")
        return value

    def fixed_or_absent(self, key: str, *supported: object) -> None:
        """As `fixed`, but the key may be absent or null."""
        self.read.add(key)
        if self.has(key):
            self.fixed(key, *supported)

    def fixed(self, key: str, *supported: object) -> None:
        """The key must hold one of `supported`: the only behaviours that are built."""
        value = self.value(key)
        if not any(type(value) is type(s) and value == s for s in supported):
            names = " or ".join(show(s) for s in supported)
            raise ConfigError(
                f"{self.where(key)} = {show(value)} is not supported; supported: {names}"
            )

    def unknown(self) -> list[str]:
        return [
            self.where(key)
            for key in self.values
            if key not in self.read and key not in ACCEPTED_KEYS
        ]

    def _integer(self, value: object, where: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where} must be an integer, got {show(value)}")
        if not low <= value <= high:
            raise ConfigError(f"{where} must be in {low}..{high}, got {value}")
        return value


def show(value: object) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reject_constant(name: str) -> float:
    raise ConfigError(f"config.json holds {name}, which is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"config.json sets {', '.join(twice)} twice in one object")
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, a file of at most 1 MiB without repeated keys."""
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise ConfigError(f"{path} is not a plain file; put the model's config.json there")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    try:
        values = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {show(values)}")
    return values


def refuse_unknown(sections: list[Section], accepted: frozenset[str]) -> None:
    unknown = [path for section in sections for path in section.unknown()]
    refused = [path for path in unknown if path not in accepted]
    if refused:
        shown = ", ".join(
            f"{path} = {show(_lookup(sections[0].values, path))}" for path in refused[:8]
        )
        more = f" and {len(refused) - 8} more" if len(refused) > 8 else ""
        raise ConfigError(
            f"config.json has keys that are not known and might change the model: {shown}{more}; "
            "accept them by name if they cannot (accept_unknown, --accept-key)"
        )


def _lookup(values: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values
