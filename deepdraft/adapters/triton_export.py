"""`deepdraft export triton`: a model repository that serves an engine through Triton.

Owns: what is written, names, parameters, the note that `triton up` reads.
Knows nothing of: running it.

    OUT/deepdraft.json        which engine stands behind it
    OUT/NAME/config.pbtxt     decoupled, no batching (the engine batches by itself)
    OUT/NAME/1/model.py       passes requests on; `engine_stream.py` beside it reads the stream
"""

import json
import os
import re
import shutil
import tempfile
import urllib.parse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

NOTE = "deepdraft.json"
_SOURCES = Path(__file__).with_name("triton_model")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FORMAT = 1
_READY_PATHS = {"deepdraft": "/readyz", "vllm": "/health", "lmdeploy": "/health"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A model repository's content."""

    name: str
    engine: str = "deepdraft"
    """deepdraft, vllm or lmdeploy: whose readiness path is asked."""
    engine_url: str | None = None
    """An engine that runs by itself; None: `triton up` starts ours on the checkpoint."""
    engine_model: str | None = None
    checkpoint: str | None = None
    serve_options: tuple[str, ...] = ()
    """Further options of `deepdraft serve`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Parameters of requests that leave them out."""
    deadline_s: float = 600.0
    retries: int = 2
    max_in_flight: int = 256
    max_tokens: int = 65536

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} is no name of a Triton model: letters, digits, . _ -, at most 100"
            )
        if self.engine not in _READY_PATHS:
            raise ConfigError(f"engine {self.engine!r} is not known: {', '.join(_READY_PATHS)}")
        if self.engine_url is None and self.checkpoint is None:
            raise ConfigError("an export needs a checkpoint or the address of an engine")
        if self.checkpoint is not None and not (Path(self.checkpoint) / "config.json").is_file():
            raise ConfigError(f"{self.checkpoint} is no checkpoint: it has no config.json")
        if self.engine_url is None and self.engine != "deepdraft":
            raise ConfigError(f"{self.engine} is not started by `triton up`; give --engine-url")
        if self.engine_url is not None:
            _check_url(self.engine_url)
        for name in ("deadline_s", "max_in_flight", "max_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.retries < 0:
            raise ConfigError(f"retries must not be below 0, got {self.retries}")

    @property
    def ready_path(self) -> str:
        """Where the engine says whether it is ready."""
        return _READY_PATHS[self.engine]


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--engine-url {url!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--engine-url {url!r} is no address such as http://HOST:PORT")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "--engine-url would be written into files: leave passwords out; the engine's key is "
            "read from DEEPDRAFT_ENGINE_API_KEY when the server starts"
        )


def write_repository(out: Path, export: Export, *, replace: bool = False) -> Path:
    """Writes a repository at `out`, whole or not at all. Raises ConfigError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (replace and (out / NOTE).is_file()):
            raise ConfigError(f"{out} is there already; another OUT, or --replace an older export")
    work = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        model = work / export.name
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(config_text(export, export.engine_url or ""))
        for name in ("model.py", "engine_stream.py"):
            shutil.copyfile(_SOURCES / name, model / "1" / name)
        note = {"format": _FORMAT, **asdict(export)}
        (work / NOTE).write_text(json.dumps(note, indent=2) + "\n")
        work.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(work, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    finally:
        if work is not None:  # gone where it became `out`
            shutil.rmtree(work, ignore_errors=True)
    return out


def read_note(repository: Path) -> Export:
    """The export that a repository was made of. Raises ConfigError."""
    file = repository / NOTE
    try:
        note = json.loads(file.read_text())
        if note.pop("format") != _FORMAT:
            raise ConfigError(f"{file} has another format; export it again")
        note["serve_options"] = tuple(note["serve_options"])
        return Export(**note)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{repository} is no model repository of `deepdraft export triton`: no {NOTE}"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; export it again") from error


def config_text(export: Export, engine_url: str) -> str:
    """config.pbtxt with the engine at `engine_url`."""
    inputs = (
        ("text_input", "TYPE_STRING"),
        ("messages", "TYPE_STRING"),
        ("sampling_parameters", "TYPE_STRING"),
        ("stream", "TYPE_BOOL"),
    )
    outputs = ("text_output", "reasoning_output", "finish_reason", "usage")
    parameters = {
        "engine_url": engine_url,
        "engine_model": export.engine_model or "",
        "ready_path": export.ready_path,
        "sampling_parameters": json.dumps(export.sampling),
        "deadline_s": f"{export.deadline_s:g}",
        "retries": str(export.retries),
        "max_in_flight": str(export.max_in_flight),
        "max_tokens": str(export.max_tokens),
    }
    lines = [
        f"name: {_quoted(export.name)}",
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        "input [",
        ",\n".join(
            f"  {{ name: {_quoted(name)} data_type: {kind} dims: [ 1 ] optional: true }}"
            for name, kind in inputs
        ),
        "]",
        "output [",
        ",\n".join(
            f"  {{ name: {_quoted(n)} data_type: TYPE_STRING dims: [ 1 ] }}" for n in outputs
        ),
        "]",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
    ]
    lines += [
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
        for key, value in parameters.items()
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A string of the protobuf text format; JSON's escapes are among its own."""
    return json.dumps(text)
