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

Numerics = Literal["exact", "bf16", "fp16", "qsim", "quant"]
Prefill = Literal["full", "encoder"]
Device = Literal["cpu", "cuda"]
Load = Literal["checkpoint", "dummy"]
ScheduleName = Literal["cost", "threshold", "all"]
FetchRule = Literal["auto", "always", "never"]
SessionPolicy = Literal["optional", "require"]
MOST = 1e9
"""Of numbers that may have a fraction, seconds most of them: clocks count no further."""
_MOST_SHOWN = 200


def parse_bytes(name: str, text: str) -> int:
    """Bytes of a size such as 512MiB, 2g or 4096. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15})(?:([kmgt])(?:i?b)?|b)?", text.strip().lower())
    if found is None:
        require(False, name, text, "a size such as 512MiB, 4GiB or 0")
    assert found is not None
    return int(found[1]) << (10 * (" kmgt".index(found[2] or " ")))


def memory_of_machine() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return total
    return min(total, limit)


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises ConfigError where a setting does not hold; a long value is shown in part."""
    if not ok:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        raise ConfigError(f"{name} must be {rule}, got {shown}")


def require_number(name: str, value: object, least: float, most: float = MOST) -> None:
    """Raises ConfigError unless the value is a number from `least` to `most`."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    require(ok, name, value, f"a number from {least:g} to {most:g}")


def is_int(value: object, least: int = -(1 << 63)) -> bool:
    """Whether it is an integer of 64 bits, not less than `least`."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    return ok and least <= value < 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine loads and runs a model."""

    numerics: Numerics = "exact"
    prefill: Prefill = "full"
    device: Device = "cpu"
    """Where the model runs. On a GPU: DeepSeek-V4.1, quant numerics."""
    load: Load = "checkpoint"
    """`dummy`: random weights of the checkpoint's sizes, for measurements on a GPU."""
    expert_pool: int | None = None
    """`dummy`: routed experts of a layer at most."""
    max_context: int | None = None
    """Tokens of prompt and answer together; None: what the checkpoint allows."""
    max_running: int = 16
    """Sequences that are decoded together, as far as `state_memory` has room for them."""
    state_memory: int | Literal["auto"] = "auto"
    """Bytes for the state of running sequences; "auto": a quarter of the machine's memory."""
    max_parked: int = 4
    """Preempted sequences kept in host memory at most; 0: nothing is preempted."""
    preempt_after_s: float = 2.0
    """How long a tenant without its share of the running requests waits before one makes room."""
    tenant_running: int | None = None
    """Running requests of one tenant (API key or user_id) at most; None: all places."""
    tenant_queue: int | None = None
    """Waiting requests of one tenant; one more is answered 429. None: the whole queue."""
    max_queue: int = 256
    """Requests that may wait; one more is answered 503."""
    prefill_chunk: int | None = None
    """Rows of a step, drafts aside: prompt tokens between two looks at other requests. None: 256;
    encoder prefill on a GPU: at most 8,192 for each of `tp`, as memory allows."""
    max_stall_ms: float = 100.0
    """What parts of prompts may take in a step in which others wait for their next token."""
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
    tp: int = 1
    """Processes that share one model, each with a part of its weights (docs/parallel.md)."""
    threads: int | None = None
    """CPU threads of one operator; None: 1 for a model under 1 GB, else torch's own choice."""
    kv_memory: int | Literal["auto"] = "auto"
    """Bytes of host memory for conversations (docs/kv-sharing.md); "auto": an eighth of the
    machine's, at most 16 GiB; 0: nothing is kept. A file may say "512MiB"."""
    kv_spill: str | None = None
    """A directory for conversations that memory has no room for, kept over restarts."""
    kv_spill_bytes: int = 16 << 30
    """What lies in that directory at most."""
    chat_format: str = "auto"
    """How conversations are written (docs/prompt-format.md); "auto": as the checkpoint says."""
    accept_keys: tuple[str, ...] = ()
    """Paths of unknown config.json keys to accept, e.g. text_config.my_key."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("numerics", Numerics),
            ("prefill", Prefill),
            ("device", Device),
            ("load", Load),
            ("rule", Rule),
            ("schedule", ScheduleName),
        ):
            value = getattr(self, name)
            choices = get_args(kind)
            require(value in choices, f"engine.{name}", value, "one of " + ", ".join(choices))
        for name in ("max_running", "max_queue", "tp"):
            value = getattr(self, name)
            require(is_int(value, 1), f"engine.{name}", value, "an integer >= 1")
        ok = self.drafts is None or is_int(self.drafts, 0)
        require(ok, "engine.drafts", self.drafts, "an integer >= 0, or absent")
        require_number("engine.draft_threshold", self.draft_threshold, 0, 1)
        ok = self.cost_table is None or (isinstance(self.cost_table, str) and bool(self.cost_table))
        require(ok, "engine.cost_table", self.cost_table, "a file name, or absent")
        self._check_cache()
        self._check_device()
        optional = ("max_context", "expert_pool", "threads", "tenant_running", "tenant_queue")
        for name in (*optional, "prefill_chunk"):
            value = getattr(self, name)
            ok = value is None or is_int(value, 1)
            require(ok, f"engine.{name}", value, "an integer >= 1, or absent")
        ok = is_int(self.max_parked, 0)
        require(ok, "engine.max_parked", self.max_parked, "an integer >= 0")
        require_number("engine.max_stall_ms", self.max_stall_ms, 1.0)
        require_number("engine.preempt_after_s", self.preempt_after_s, 0.0)
        ok = isinstance(self.chat_format, str) and bool(self.chat_format)
        require(ok, "engine.chat_format", self.chat_format, "auto or the name of a format")
        keys = self.accept_keys
        ok = isinstance(keys, tuple) and all(isinstance(k, str) and k for k in keys)
        require(ok, "engine.accept_keys", keys, "a list of key paths")

    def _check_device(self) -> None:
        if self.device == "cpu":
            require(self.load == "checkpoint", "engine.load", self.load, "checkpoint on a CPU")
            return
        rule = "on a GPU (the kernels compute nothing else)"
        require(self.numerics == "quant", "engine.numerics", self.numerics, f'"quant" {rule}')
        ok = self.tp == 1 or self.load == "checkpoint"
        require(ok, "engine.load", self.load, '"checkpoint" with tp above 1')

    def _check_cache(self) -> None:
        for name in ("kv_memory", "kv_spill_bytes", "state_memory"):
            value = getattr(self, name)
            if isinstance(value, str) and (name == "kv_spill_bytes" or value != "auto"):
                value = parse_bytes(f"engine.{name}", value)
                object.__setattr__(self, name, value)
            ok = value == "auto" or is_int(value, 0)
            require(ok, f"engine.{name}", value, 'bytes, or a size such as "512MiB"')
        value = self.kv_spill
        ok = value is None or (isinstance(value, str) and bool(value))
        require(ok, "engine.kv_spill", value, "a directory, or absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key that clients may bring, known by its digest, and what its bearer may do."""

    name: str
    """Shown in logs; requests of one name are one tenant."""
    sha256: str = field(repr=False)
    """Hex digest of the key."""
    weight: float = 1.0
    """Its share of a busy server, compared with others."""
    max_running: int | None = None
    """Requests that run at once; more of them wait."""
    max_queue: int | None = None
    """Requests that wait; one more is answered 429."""
    requests_per_minute: float | None = None
    """HTTP requests on average; a minute's worth may come at once."""
    tokens_per_minute: float | None = None
    """Tokens of prompts and answers on average, likewise; an answer's are counted when it ends."""

    def __post_init__(self) -> None:
        ok = isinstance(self.name, str) and re.fullmatch(r"[\w.@-]{1,64}", self.name) is not None
        require(ok, "server.keys.name", self.name, "1 to 64 letters, digits, . _ @ or -")
        digest = self.sha256.lower() if isinstance(self.sha256, str) else ""
        if re.fullmatch(r"[0-9a-f]{64}", digest) is None:
            raise ConfigError(
                "server.keys.sha256 must be the 64 hex digits of the key's SHA-256, as "
                "`printf %s KEY | sha256sum` prints it"
            )
        object.__setattr__(self, "sha256", digest)
        require_number("server.keys.weight", self.weight, 0.01)
        for name in ("max_running", "max_queue"):
            value = getattr(self, name)
            ok = value is None or is_int(value, 1)
            require(ok, f"server.keys.{name}", value, "an integer >= 1, or absent")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                require_number(f"server.keys.{name}", getattr(self, name), 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server behaves."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names beside the model's own one; the first one given is listed first."""
    max_body_bytes: int = 16 << 20
    max_messages: int = 8192
    """Messages or items of one request."""
    max_connections: int = 1024
    """Open connections; one more is closed at once."""
    header_timeout_s: float = 15.0
    """Seconds that a client may take to send the head of a request."""
    body_timeout_s: float = 60.0
    """Seconds that a client may take to send a body, or pause within it."""
    send_timeout_s: float = 60.0
    """Seconds that a client may leave an answer unread before it is cut off."""
    compile_timeout_s: float = 10.0
    """Seconds that reading a body may take, grammars included; then 400."""
    request_timeout_s: float | None = None
    """Seconds from its arrival after which a request ends with 504; None: never."""
    keep_alive_s: float = 10.0
    """Seconds of silence in a stream after which a comment line is sent."""
    drain_s: float = 25.0
    """Seconds that running requests get to finish after SIGTERM."""
    retry_after_s: int = 2
    """Value of Retry-After on a 503."""
    log_level: str = "info"
    log_format: str = "text"
    """text, or json: one object a line."""
    log_prompts: bool = False
    """Log each prompt as the model sees it. Without it no text of a request is logged."""
    traces: bool = False
    """Send OpenTelemetry spans where the OTEL_ variables of the environment say."""
    tls_cert: str | None = None
    """PEM file of the server's certificate chain; with `tls_key`, HTTPS is spoken."""
    tls_key: str | None = None
    """PEM file of its key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server, or "*"; none: no other page may."""
    keys: tuple[ApiKey, ...] = ()
    """Keys with a name and limits of their own, beside `api_keys`."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which a request must bring one; none: every request passes. Never shown."""
    response_retention_s: float = 3600.0
    """Seconds that a response of the Responses API can be asked for again; 0: not at all."""
    response_store_bytes: int = 64 << 20
    """Memory for these responses; the oldest go first."""
    session_header: str = "X-Session-ID"
    """The header that names a conversation."""
    session_policy: SessionPolicy = "optional"
    """require: conversations of several turns without that header are answered 400."""

    def __post_init__(self) -> None:
        ok = isinstance(self.session_header, str) and bool(
            re.fullmatch(r"[A-Za-z0-9-]{1,64}", self.session_header)
        )
        require(ok, "server.session_header", self.session_header, "the name of a header")
        choices = get_args(SessionPolicy)
        rule = "one of " + ", ".join(choices)
        require(self.session_policy in choices, "server.session_policy", self.session_policy, rule)
        require(isinstance(self.host, str) and bool(self.host), "server.host", self.host, "a name")
        ok = is_int(self.port) and 0 <= self.port <= 65535
        require(ok, "server.port", self.port, "an integer in 0..65535")
        names = self.served_model_names
        ok = isinstance(names, tuple) and all(isinstance(n, str) and n.strip() for n in names)
        require(ok, "server.served_model_names", names, "a list of names, none of them empty")
        ok = is_int(self.max_body_bytes, 1024)
        require(ok, "server.max_body_bytes", self.max_body_bytes, "an integer >= 1024")
        for name, least in (
            ("keep_alive_s", 0.01),
            ("drain_s", 0.0),
            ("header_timeout_s", 0.01),
            ("body_timeout_s", 0.01),
            ("send_timeout_s", 0.01),
            ("compile_timeout_s", 0.01),
            ("response_retention_s", 0),
        ):
            require_number(f"server.{name}", getattr(self, name), least)
        if self.request_timeout_s is not None:
            require_number("server.request_timeout_s", self.request_timeout_s, 0.01)
        for name, least in (
            ("response_store_bytes", 0),
            ("retry_after_s", 1),
            ("max_messages", 1),
            ("max_connections", 1),
        ):
            value = getattr(self, name)
            ok = is_int(value, least)
            require(ok, f"server.{name}", value, f"an integer >= {least}")
        self._check_security()
        keys = self.api_keys
        if not isinstance(keys, tuple) or not all(map(_is_key, keys)):
            raise ConfigError(
                "server.api_keys must be a list of keys of printable ASCII without spaces"
            )
        ok = self.log_level in ("debug", "info", "warning", "error")
        require(ok, "server.log_level", self.log_level, "one of debug, info, warning, error")
        for name in ("log_prompts", "traces"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"server.{name}", value, "true or false")
        ok = self.log_format in ("text", "json")
        require(ok, "server.log_format", self.log_format, "text or json")

    def _check_security(self) -> None:
        for name in ("tls_cert", "tls_key"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and os.path.isfile(value))
            require(ok, f"server.{name}", value, "the path of a PEM file that can be read")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("server.tls_cert and server.tls_key go together; give both or none")
        origins = self.cors_origins
        ok = isinstance(origins, tuple) and all(
            o == "*" or (isinstance(o, str) and re.fullmatch(r"https?://[^/\s]+", o))
            for o in origins
        )
        require(ok, "server.cors_origins", origins, 'a list such as ["https://page.example"]')
        ok = isinstance(self.keys, tuple) and all(isinstance(k, ApiKey) for k in self.keys)
        require(ok, "server.keys", "something else", "a list of tables, [[server.keys]]")
        names = [k.name for k in self.keys]
        ok = len(set(names)) == len(names) == len({k.sha256 for k in self.keys})
        require(ok, "server.keys", names, "keys of different names and digests")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How this server shares conversations with others (docs/kv-sharing.md)."""

    directory: str | None = field(default=None, repr=False)
    """Address of Redis or Valkey, which may hold a password; None: no sharing."""
    namespace: str = "deepdraft"
    """Of this fleet in the directory."""
    name: str | None = None
    """Of this server, as its certificate says it; None: the machine's."""
    listen: str = "127.0.0.1:0"
    """Where peers connect to; without certificates on loopback only."""
    advertise: str | None = None
    """The host that peers know this server by; None: as in `listen`."""
    files: str | None = None
    """This server's directory of `deepdraft kv init-fleet`; None: plain TCP."""
    fetch: FetchRule = "auto"
    """Whether a peer's cache is fetched: where measurements say that it pays, always, or never."""
    nixl: str | None = None
    """The interpreter of an environment with NIXL, whose sidecar brings chunks by RDMA from peers
    that have one too; None: TCP."""
    hand_over_s: float = 10.0
    """In which a server that stops gives its conversations to the others; 0: it does not."""
    hurry: float = 1.0
    """Leases, deadlines and back-off are shorter by this factor: for tests."""

    def __post_init__(self) -> None:
        for name in ("directory", "name", "advertise", "files", "nixl"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and bool(value))
            require(ok, f"fleet.{name}", "..." if name == "directory" else value, "a text")
        for name in ("namespace", "listen"):
            require(isinstance(getattr(self, name), str), f"fleet.{name}", "...", "a text")
        choices = get_args(FetchRule)
        require_number("fleet.hurry", self.hurry, 0.01)
        require_number("fleet.hand_over_s", self.hand_over_s, 0)
        require(self.fetch in choices, "fleet.fetch", self.fetch, "one of " + ", ".join(choices))
        self.address()

    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises ConfigError."""
        host, _, port = self.listen.rpartition(":")
        ok = bool(host) and port.isascii() and port.isdigit() and int(port) < 65536
        require(ok, "fleet.listen", self.listen, "host:port")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything `deepdraft serve` can be told."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and bool(value) and all("!" <= c <= "~" for c in value)


def build_settings(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """A record of one table. Raises ConfigError, which names an unknown or wrong setting."""
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {section}.{near[0]}?" if near else f"; known: {sorted(known)}"
            raise ConfigError(f"unknown setting {section}.{key}{hint}")
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    keys = fields.get("keys", ())
    if keys and isinstance(keys, tuple) and all(isinstance(k, dict) for k in keys):
        fields["keys"] = tuple(build_settings(ApiKey, f"{section}.keys", k) for k in keys)
    try:
        return cls(**fields)
    except TypeError as error:
        # Only a required field that is missing can be left to go wrong here.
        raise ConfigError(f"{section}: {error}") from error


def read_settings(file: str | Path) -> dict[str, Any]:
    """What a TOML file says, unchecked. Raises ConfigError where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, numbers of 4,300 digits
        raise ConfigError(f"the settings file {file} is not valid TOML: {error}") from error


_TABLES = {"engine": EngineConfig, "server": ServerConfig, "fleet": FleetConfig}


def load_config(
    file: str | Path | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    fleet: Mapping[str, Any] | None = None,
) -> Config:
    """Settings from an optional TOML file (tables `engine`, `server`, `fleet`) and from flags.

    A flag of value None was not given. Raises ConfigError, which names the setting and the rule.
    """
    tables = {} if file is None else read_settings(file)
    for name, table in tables.items():
        if name not in _TABLES:
            known = ", ".join(f"[{table}]" for table in _TABLES)
            raise ConfigError(f"unknown table [{name}] in {file}; known: {known}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} in {file} must be a table, got {table!r}")
    flags = {"engine": engine or {}, "server": server or {}, "fleet": fleet or {}}
    merged = {
        name: {**tables.get(name, {}), **{k: v for k, v in flags[name].items() if v is not None}}
        for name in _TABLES
    }
    return Config(**{n: build_settings(kind, n, merged[n]) for n, kind in _TABLES.items()})
