"""Settings of a running deepdraft: frozen records, and how a file and flags become them.

Owns: the fields, their defaults, ranges and error messages.
Knows nothing of: tensors, HTTP, click. Everything here runs without torch.

Order of precedence: default, then the TOML file, then a flag. An unknown key is an error.
"""

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from deepdraft.errors import ConfigError
from deepdraft.types import Rule

Numerics = Literal["exact", "qsim", "quant"]
Prefill = Literal["full", "encoder"]
ScheduleName = Literal["cost", "threshold", "all"]


def parse_bytes(name: str, text: str) -> int:
    """Bytes of a size such as 512MiB, 2g or 4096. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15})(?:([kmgt])(?:i?b)?|b)?", text.strip().lower())
    if found is None:
        raise ConfigError(f'{name} must be a size such as 512MiB, 4GiB or 0, got "{text}"')
    return int(found[1]) << (10 * (" kmgt".index(found[2] or " ")))


def memory_of_machine() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return total
    return min(total, limit)


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine loads and runs a model."""

    numerics: Numerics = "exact"
    prefill: Prefill = "full"
    max_context: int | None = None
    """Tokens of prompt and answer together; None: what the checkpoint allows."""
    max_running: int = 4
    """Sequences that are decoded together."""
    max_queue: int = 256
    """Requests that may wait; one more is answered 503."""
    prefill_chunk: int = 256
    """Prompt tokens between two looks at cancellations and at other requests."""
    drafts: int | None = None
    """Drafts of one sequence in a step at most; None: what its drafter was trained for; 0: none."""
    rule: Rule = "coupled"
    """How drafts are verified where a request does not say (docs/speculation.md)."""
    schedule: ScheduleName = "cost"
    """How many drafts are verified: by measured costs, by a threshold, or all."""
    draft_threshold: float = 0.3
    """The threshold, on the running product of confidences."""
    cost_table: str | None = None
    """A file of measured costs (`deepdraft bench costs`); None: measured at the start."""
    threads: int | None = None
    """CPU threads of one operator; None: 1 for a model under 1 GB, else torch's own choice."""
    kv_memory: int | Literal["auto"] = "auto"
    """Bytes of host memory for conversations (docs/kv-sharing.md); "auto": an eighth of the
    machine's, at most 16 GiB; 0: nothing is kept. A file may say "512MiB"."""
    kv_spill: str | None = None
    """A directory for conversations that memory has no room for, kept over restarts."""
    kv_spill_bytes: int = 16 << 30
    """What lies in that directory at most."""
    accept_keys: tuple[str, ...] = ()
    """Paths of unknown config.json keys to accept, e.g. text_config.my_key."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("numerics", Numerics),
            ("prefill", Prefill),
            ("rule", Rule),
            ("schedule", ScheduleName),
        ):
            value = getattr(self, name)
            choices = get_args(kind)
            _require(value in choices, f"engine.{name}", value, "one of " + ", ".join(choices))
        for name in ("max_running", "max_queue", "prefill_chunk"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"engine.{name}", value, "an integer >= 1")
        ok = self.drafts is None or (_is_int(self.drafts) and self.drafts >= 0)
        _require(ok, "engine.drafts", self.drafts, "an integer >= 0, or absent")
        value = self.draft_threshold
        ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        _require(ok, "engine.draft_threshold", value, "a number from 0 to 1")
        ok = self.cost_table is None or (isinstance(self.cost_table, str) and bool(self.cost_table))
        _require(ok, "engine.cost_table", self.cost_table, "a file name, or absent")
        self._check_cache()
        for name in ("max_context", "threads"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and value >= 1)
            _require(ok, f"engine.{name}", value, "an integer >= 1, or absent")
        keys = self.accept_keys
        ok = isinstance(keys, tuple) and all(isinstance(k, str) and k for k in keys)
        _require(ok, "engine.accept_keys", keys, "a list of key paths")

    def _check_cache(self) -> None:
        for name in ("kv_memory", "kv_spill_bytes"):
            value = getattr(self, name)
            if isinstance(value, str) and not (name == "kv_memory" and value == "auto"):
                value = parse_bytes(f"engine.{name}", value)
                object.__setattr__(self, name, value)
            ok = value == "auto" or (_is_int(value) and value >= 0)
            _require(ok, f"engine.{name}", value, 'bytes, or a size such as "512MiB"')
        value = self.kv_spill
        ok = value is None or (isinstance(value, str) and bool(value))
        _require(ok, "engine.kv_spill", value, "a directory, or absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server behaves."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names beside the model's own one; the first one given is listed first."""
    max_body_bytes: int = 16 << 20
    keep_alive_s: float = 10.0
    """Seconds of silence in a stream after which a comment line is sent."""
    drain_s: float = 25.0
    """Seconds that running requests get to finish after SIGTERM."""
    retry_after_s: int = 2
    """Value of Retry-After on a 503."""
    log_level: str = "info"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which a request must bring one; none: every request passes. Never shown."""
    response_retention_s: float = 3600.0
    """Seconds that a response of the Responses API can be asked for again; 0: not at all."""
    response_store_bytes: int = 64 << 20
    """Memory for these responses; the oldest go first."""

    def __post_init__(self) -> None:
        _require(isinstance(self.host, str) and bool(self.host), "server.host", self.host, "a name")
        ok = _is_int(self.port) and 0 <= self.port <= 65535
        _require(ok, "server.port", self.port, "an integer in 0..65535")
        names = self.served_model_names
        ok = isinstance(names, tuple) and all(isinstance(n, str) and n.strip() for n in names)
        _require(ok, "server.served_model_names", names, "a list of names, none of them empty")
        ok = _is_int(self.max_body_bytes) and self.max_body_bytes >= 1024
        _require(ok, "server.max_body_bytes", self.max_body_bytes, "an integer >= 1024")
        for name, least in (("keep_alive_s", 0.01), ("drain_s", 0.0), ("retry_after_s", 1)):
            value = getattr(self, name)
            ok = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
            _require(ok, f"server.{name}", value, f"a number >= {least}")
        value = self.response_retention_s
        ok = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        _require(ok, "server.response_retention_s", value, "a number >= 0")
        ok = _is_int(self.response_store_bytes) and self.response_store_bytes >= 0
        _require(ok, "server.response_store_bytes", self.response_store_bytes, "an integer >= 0")
        keys = self.api_keys
        if not isinstance(keys, tuple) or not all(map(_is_key, keys)):
            raise ConfigError(
                "server.api_keys must be a list of keys of printable ASCII without spaces"
            )
        ok = self.log_level in ("debug", "info", "warning", "error")
        _require(ok, "server.log_level", self.log_level, "one of debug, info, warning, error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything `deepdraft serve` can be told."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and bool(value) and all("!" <= c <= "~" for c in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _build(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {section}.{near[0]}?" if near else f"; known: {sorted(known)}"
            raise ConfigError(f"unknown setting {section}.{key}{hint}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def load_config(
    file: str | Path | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
) -> Config:
    """Settings from an optional TOML file (tables `engine` and `server`) and from flags.

    A flag of value None was not given. Raises ConfigError, which names the setting and the rule.
    """
    tables: dict[str, Any] = {}
    if file is not None:
        try:
            with open(file, "rb") as stream:
                tables = tomllib.load(stream)
        except OSError as error:
            raise ConfigError(f"cannot read the settings file {file}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the settings file {file} is not valid TOML: {error}") from error
    for name, table in tables.items():
        if name not in ("engine", "server"):
            raise ConfigError(f"unknown table [{name}] in {file}; known: [engine], [server]")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} in {file} must be a table, got {table!r}")
    flags = {"engine": engine or {}, "server": server or {}}
    merged = {
        name: {**tables.get(name, {}), **{k: v for k, v in flags[name].items() if v is not None}}
        for name in ("engine", "server")
    }
    return Config(
        engine=_build(EngineConfig, "engine", merged["engine"]),
        server=_build(ServerConfig, "server", merged["server"]),
    )
