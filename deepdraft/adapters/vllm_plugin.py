"""Our plugin package for vLLM, as a directory that can be put on a path or as a wheel.

Owns: the package's files and metadata, its map (made from the weight maps and tables of keys).
Knows nothing of: what vLLM does with it.

vLLM finds plugins by entry points (`vllm.general_plugins`) of whatever lies on its path, so that a
directory with metadata is enough, and the environment is not touched.
"""

import base64
import contextlib
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path

from deepdraft import __version__
from deepdraft.checkpoint import stacks as splitter
from deepdraft.checkpoint.layouts import stacks
from deepdraft.checkpoint.spec_styles import ENGINE_NEEDS
from deepdraft.errors import ConfigError

NAME = "deepdraft_vllm"
_PACKAGE = Path(__file__).with_name("vllm_package")
_FILES = {
    "__init__.py": _PACKAGE / "plugin.py",
    "models.py": _PACKAGE / "models.py",
    "stacks.py": Path(splitter.__file__),
}
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


def files() -> dict[str, bytes]:
    """Path in the package -> content, metadata included."""
    made = {f"{NAME}/{to}": own.read_bytes() for to, own in _FILES.items()}
    table = {"stacks": stacks(), "needs": ENGINE_NEEDS["vllm"]}
    made[f"{NAME}/map.json"] = (json.dumps(table, indent=1) + "\n").encode()
    about = f"{NAME}-{__version__}.dist-info"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: deepdraft-vllm\nVersion: {__version__}\n"
        "Summary: DeepSeek checkpoints in layouts that vLLM does not read\n"
        "Requires-Python: >=3.10\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: deepdraft\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        "entry_points.txt": f"[vllm.general_plugins]\ndeepdraft = {NAME}:register\n",
    }
    made |= {f"{about}/{name}": text.encode() for name, text in metadata.items()}
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in made.items()]
    made[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,", ""]).encode()
    return made


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_directory(folder: Path) -> None:
    """The package as it lies when installed; `folder` goes on PYTHONPATH."""
    for name, data in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_wheel(folder: Path) -> Path:
    """A wheel in `folder`, for a vLLM that is not ours to start. Raises ConfigError."""
    path = folder / f"{NAME}-{__version__}-py3-none-any.whl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files().items():
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), data)
    except OSError as error:
        with contextlib.suppress(OSError):  # half a wheel looks like one
            path.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


@contextlib.contextmanager
def directory() -> Generator[Path]:
    """The package in a directory that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="deepdraft-vllm-") as folder:
        write_directory(Path(folder))
        yield Path(folder)
