"""The Triton server that the nvidia-pytriton wheel brings, started directly and without Docker.

Owns: where its parts lie, the backends folder it wants, its command line and variables.
Knows nothing of: model repositories (`triton_export`), supervision.

The server wants the Python backend, its utilities and the stub for the interpreter's version side
by side; the wheel has the stubs elsewhere. The stub loads libpython: without the folder of the
environment's own interpreter it takes the system's, whose patch level may differ.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from deepdraft.adapters.environments import Environment, clean_environ
from deepdraft.errors import ConfigError

BACKENDS = "deepdraft-backends"
_STUB = "triton_python_backend_stub"
_SHM_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens."""

    host: str
    http: int
    grpc: int
    metrics: int


def link_backends(environment: Environment) -> Path:
    """Puts backend, utilities and stub into one folder of the environment, as links."""
    server = _server(environment)
    version = environment.site_packages.parent.name.removeprefix("python")
    parts = {
        "libtriton_python.so": server / "backends/python/libtriton_python.so",
        "triton_python_backend_utils.py": server / "backends/python/triton_python_backend_utils.py",
        _STUB: server / "python_backend_stubs" / version / _STUB,
    }
    folder = environment.path / BACKENDS / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in parts.items():
        if not file.is_file():
            raise ConfigError(
                f"the wheel of {environment.engine} has no {file.relative_to(server)}; this "
                f"version, or Python {version}, is not supported"
            )
        link = folder / name
        if link.is_symlink() or link.exists():
            link.unlink()
        link.symlink_to(os.path.relpath(file, folder))
    return folder.parent


def _server(environment: Environment) -> Path:
    return environment.site_packages / "pytriton" / "tritonserver"


def command(environment: Environment, repository: Path, ports: Ports) -> list[str]:
    """What starts the server. Models are loaded by whoever probes their engines."""
    return [
        str(_server(environment) / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={environment.path / BACKENDS}",
        "--model-control-mode=explicit",
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false",
        f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}",
        "--exit-timeout-secs=10",
        "--log-verbose=0",
    ]


def variables(environment: Environment) -> dict[str, str]:
    """The server's environment variables."""
    folder = _libdir(environment)
    libraries = [str(environment.site_packages / "nvidia_pytriton.libs"), folder]
    if given := os.environ.get("LD_LIBRARY_PATH"):
        libraries.append(given)
    path = f"{environment.path / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return clean_environ(LD_LIBRARY_PATH=":".join(libraries), PATH=path, OMP_NUM_THREADS="1")


def _libdir(environment: Environment) -> str:
    """The folder of the interpreter's own library; asked once for each environment."""
    from deepdraft.adapters.environment_check import libpython

    known = environment.path / "deepdraft-libpython.json"
    try:
        return str(json.loads(known.read_text())["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        folder = libpython(environment)[0]
        known.write_text(json.dumps({"folder": folder}))
        return folder
