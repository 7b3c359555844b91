"""Makes an environment, or repairs one: only what is missing, other or damaged is installed.

Owns: uv (or venv and pip), room on the disk, one maker at a time, the record at the end.
Knows nothing of: what an engine does with it.

Everything is installed with --no-deps from the pins, so that no resolver chooses for us.
"""

import contextlib
import datetime
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from deepdraft.adapters.environments import (
    RECORD,
    UNLISTED,
    Environment,
    State,
    clean_environ,
    cuda_packages,
    inspect,
    normal,
    read_record,
    size_of,
)
from deepdraft.adapters.torch_wheel import find_wheel, pip_setting, places
from deepdraft.errors import ConfigError

Say = Callable[[str], None]
_IMPORT_S = 300.0
_locks: set[int] = set()
"""Descriptors that installers hold, too: one that outlives us still works on its environment."""


def create(
    environment: Environment,
    *,
    torch: str | None = None,
    python: str | None = None,
    cuda: bool = False,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Makes or repairs an environment and returns its record. Raises ConfigError.

    `torch`: a wheel or a folder of wheels. `cuda`: packages of several GB may be downloaded.
    """
    base = environment.path.parent
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"environments cannot lie in {base}: {error.strerror}") from error
    with _alone(base / f".{environment.name}.lock"):
        state = inspect(environment)
        record = read_record(environment)
        if state.whole and record is not None and record.get("pins") == environment.digest:
            say(f"{environment.name} is there and whole; nothing was done")
            return record
        for line in state.lines():
            say(f"{environment.name}: {line}")
        _check_room(base, environment, state)
        return _build(environment, state, torch, python, cuda, say)


def _build(
    environment: Environment,
    state: State,
    torch: str | None,
    python: str | None,
    cuda: bool,
    say: Say,
) -> dict[str, Any]:
    version = _python_version(environment, state, python)
    wheel = _torch_source(environment, state, torch, version, cuda)
    tools = installer()
    if state.interpreter is None:
        say(f"making a virtual environment with {tools.name}, Python {version}")
        # Of the one our own environment was made of: a venv of a venv would depend on both.
        tools.make(environment.path, python or getattr(sys, "_base_executable", sys.executable))
        state = inspect(environment)
        if state.interpreter is None:
            raise ConfigError(f"the interpreter in {environment.path} does not start")
    (environment.path / RECORD).unlink(missing_ok=True)
    wanted = environment.pins()
    names = state.broken()
    requirements = [f"{name}=={wanted[name]}" for name in names if name != "torch"]
    if "torch" in names and wheel is not None:
        requirements.insert(0, str(wheel))
    say(f"installing {len(names)} packages with {tools.name}")
    unlisted = [name for name, file in state.damaged.items() if file == UNLISTED]
    _forget(environment, [*state.missing, *unlisted])
    tools.install(environment, requirements, reinstall=list(state.damaged))
    after = inspect(environment)
    if not after.whole:
        raise ConfigError(f"{environment.name} is not whole: {'; '.join(after.lines())}")
    _check_no_cuda(environment, after)
    if environment.name == "triton":
        from deepdraft.adapters.triton_server import link_backends

        link_backends(environment)
    say("importing what it is for")
    check_imports(environment)
    record = {
        "name": environment.name,
        "pins": environment.digest,
        "made": datetime.date.today().isoformat(),
        "python": after.interpreter,
        "platform": platform.platform(),
        "engine": f"{environment.engine} {wanted[environment.engine]}",
        "torch": wanted.get("torch"),
        "packages": len(wanted),
        "bytes": size_of(environment.path),
    }
    _write(environment.path / RECORD, record)
    return record


def _forget(environment: Environment, names: Sequence[str]) -> None:
    """Takes away metadata that no installer can use to remove a package; it writes the package's
    files anew."""
    for folder in environment.site_packages.glob("*.dist-info"):
        if normal(folder.name.partition("-")[0]) in names:
            shutil.rmtree(folder)


def remove(environment: Environment) -> bool:
    """Deletes an environment; whether there was one."""
    if not environment.path.is_dir():
        return False
    with _alone(environment.path.parent / f".{environment.name}.lock"):
        (environment.path / RECORD).unlink(missing_ok=True)
        shutil.rmtree(environment.path)
    return True


def check_imports(environment: Environment) -> None:
    """Imports the engine in its own interpreter. Raises ConfigError with what it said."""
    code = "import " + ", ".join(environment.imports)
    try:
        done = subprocess.run(
            [environment.python, "-I", "-c", code],
            capture_output=True, text=True, timeout=_IMPORT_S, env=clean_environ(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{environment.name} cannot be tried: {error}") from error
    if done.returncode:
        raise ConfigError(f"{environment.name}: `{code}` failed: {_last_lines(done.stderr)}")


def _python_version(environment: Environment, state: State, python: str | None) -> str:
    """ "3.11" of the interpreter that is there, given, or ours."""
    if state.interpreter is not None:
        version = ".".join(state.interpreter.split(".")[:2])
    elif python is not None:
        version = _asked(python)
    else:
        version = "{}.{}".format(*sys.version_info[:2])
    if version not in environment.pythons:
        raise ConfigError(
            f"the pins of {environment.name} were tried with Python "
            f"{', '.join(environment.pythons)}, this is {version}; give one with --python FILE"
        )
    return version


def _asked(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--python {python} does not start: {error}") from error
    if done.returncode:
        raise ConfigError(f"--python {python} is no Python: {_last_lines(done.stderr)}")
    return done.stdout.strip()


def _torch_source(
    environment: Environment, state: State, given: str | None, version: str, cuda: bool
) -> Path | None:
    """The wheel; None where none is needed, or it may be downloaded."""
    if environment.torch is None:
        if given:
            raise ConfigError(f"{environment.name} has no torch; leave --torch out")
        return None
    if state.interpreter is not None and "torch" not in state.broken():
        return None
    if environment.cuda and not given:
        if not cuda:
            raise ConfigError(
                f"{environment.name} is a CUDA engine: torch {environment.torch} and its "
                f"libraries take about {environment.megabytes / 1000:.0f} GB. Say --cuda to "
                "download them, or --torch WHEEL|DIR"
            )
        return None
    return find_wheel(environment, given, version)


def _check_no_cuda(environment: Environment, state: State) -> None:
    if found := cuda_packages(environment, state):
        raise ConfigError(
            f"{environment.name} runs on a CPU, and holds packages of CUDA: {', '.join(found)}; "
            f"`deepdraft env remove {environment.name}`, and make it again"
        )


def _check_room(base: Path, environment: Environment, state: State) -> None:
    wanted = len(environment.pins())
    share = len(state.broken()) / wanted if state.exists and state.installed else 1.0
    needed = int(environment.megabytes * share * 1.2) + 50
    free = shutil.disk_usage(base).free // 1_000_000
    if free < needed:
        raise ConfigError(
            f"{environment.name} needs about {needed} MB in {base}, and {free} MB are free; make "
            "room, or name another disk in DEEPDRAFT_ENVIRONMENTS"
        )


@contextlib.contextmanager
def _alone(lock: Path) -> Generator[None]:
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another process works on {lock.stem.lstrip('.')} now; try again when it is done"
            ) from error
        _locks.add(file.fileno())
        try:
            yield
        finally:
            _locks.discard(file.fileno())


def _write(path: Path, value: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(json.dumps(value, indent=2) + "\n")
    os.replace(file.name, path)


class _Uv:
    name = "uv"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def make(self, path: Path, python: str) -> None:
        _run([*self._command, "venv", "--quiet", "--clear", "--python", python, str(path)])

    def install(
        self, environment: Environment, requirements: Sequence[str], *, reinstall: Sequence[str]
    ) -> None:
        again = [part for name in reinstall for part in ("--reinstall-package", name)]
        # uv reads none of pip's settings: folders of wheels and the index are handed over.
        links = [part for place in places() for part in ("--find-links", str(place.path))]
        more = {"UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "copy")}
        index = os.environ.get("PIP_INDEX_URL") or pip_setting("index-url")
        if index and "UV_DEFAULT_INDEX" not in os.environ:
            more["UV_DEFAULT_INDEX"] = index
        with _listed(requirements) as file:
            _run(
                [
                    *self._command, "pip", "install", "--quiet", "--no-deps", "--no-config",
                    "--python", str(environment.python), *links, *again, "-r", file,
                ],
                **more,
            )  # fmt: skip


class _Pip:
    name = "venv and pip (uv is not there)"

    def make(self, path: Path, python: str) -> None:
        _run([python, "-m", "venv", "--clear", "--without-pip", str(path)])

    def install(
        self, environment: Environment, requirements: Sequence[str], *, reinstall: Sequence[str]
    ) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
        base = [*pip, "install", "--quiet", "--no-deps"]
        pinned = set(reinstall)
        parts = [r for r in requirements if normal(_name_of(r)) in pinned]
        for flags, own in (
            (("--force-reinstall",), parts),
            ((), [r for r in requirements if r not in parts]),
        ):
            if own:
                with _listed(own) as file:
                    _run([*base, *flags, "-r", file])


def _name_of(requirement: str) -> str:
    """The name in NAME==VERSION, or in a wheel's path."""
    if requirement.endswith(".whl"):
        return Path(requirement).name.partition("-")[0]
    return requirement.partition("==")[0]


def installer() -> _Uv | _Pip:
    """uv if it is on the path, beside our interpreter or a module; else venv and pip."""
    beside = Path(sys.executable).with_name("uv")
    for command in (shutil.which("uv"), str(beside) if beside.exists() else None):
        if command is not None:
            return _Uv([command])
    return _Pip()


@contextlib.contextmanager
def _listed(requirements: Sequence[str]) -> Generator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        yield file.name


def _run(command: Sequence[str], **variables: str) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=clean_environ(**variables),
            pass_fds=tuple(_locks),
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} does not start: {error.strerror}") from error
    if done.returncode:
        what = " ".join(Path(part).name for part in command[:3])
        raise ConfigError(f"{what} failed: {_last_lines(done.stderr)}")


def _last_lines(text: str) -> str:
    """The end of what a tool said, without the credentials an address may hold."""
    lines = [line for line in text.strip().splitlines() if line.strip()][-6:]
    return re.sub(r"(://)[^/\s@]*@", r"\1", " / ".join(lines))[:1500]
