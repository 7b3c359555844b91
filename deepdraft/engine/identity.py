"""What may change a bit of stored state, as one fingerprint.

Owns: the list of fields, digests of a checkpoint's files and the file that remembers them.
Knows nothing of: snapshots' bytes, who compares fingerprints.
"""

import functools
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from deepdraft import __version__
from deepdraft.telemetry import logger

DIGESTS_FILE = "file-digests.json"
"""Beside stored conversations: digests of the model's files by name, size, time and inode."""
_KINDS = ("*.safetensors", "*.json")
_PROGRAM = ("arch", "kv", "models", "ops", "parallel", "quant")
"""Packages whose change may change a bit of stored state, or what it means."""
_SOURCES = (".py", ".cu", ".cuh")
_MAX_REMEMBERED_BYTES = 16 << 20


def fingerprint_fields(
    runner: Any, *, numerics: str, prefill: str, weights: str
) -> dict[str, str | int | bool]:
    """Everything that two servers must share to exchange state of this model.

    `weights`: a digest of the checkpoint's files, its tokenizer's among them.
    """
    device = torch.device(runner.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "weights": weights,
        "numerics": numerics,
        "prefill": prefill,
        "drafter": runner.block_size > 0,
        "program": f"{__version__} {program_digest(*_PROGRAM)}",
        "kernels": _kernels(device),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": f"{device.type} {name}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "step_rows": runner.max_step_rows,
        "parallel": 1,
    }


def _kernels(device: torch.device) -> str:
    """What makes the rows on a GPU: sources, their compiler, forms that were asked for."""
    if device.type != "cuda":
        return "none"
    from deepdraft.kernels.native.trials import SETTING

    compiler = f"triton {importlib.metadata.version('triton')}"
    return f"{program_digest('kernels')} {compiler} {os.environ.get(SETTING, '')}"


@functools.cache
def program_digest(*packages: str) -> str:
    """BLAKE3-256 over the sources of these packages, in hex: two states of the program with one
    version number are not taken for the same."""
    root, total = Path(__file__).parent.parent, blake3()
    files = (f for package in packages for f in (root / package).rglob("*"))
    for file in sorted(f for f in files if f.suffix in _SOURCES):
        name = file.relative_to(root).as_posix()
        total.update(json.dumps([name, blake3(file.read_bytes()).hexdigest()]).encode())
    return total.hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = sorted({line.split(":", 1)[-1].strip() for line in lines if "model name" in line})
    return f"{platform.machine()} {', '.join(models)}"


def file_digest(file: Path) -> str:
    """BLAKE3-256 of a file's bytes, in hex; uses all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def files_digest(checkpoint: Path, remember: Path | None = None) -> str:
    """BLAKE3-256 over names and bytes of all files that make up a model, in hex.

    `remember`: a directory in which digests are kept, so that the next start need not read
    unchanged files again.
    """
    known = _remembered(remember) if remember is not None else {}
    total, fresh = blake3(), dict[str, list[object]]()
    for file in sorted(f for kind in _KINDS for f in checkpoint.glob(kind)):
        about = file.stat()
        key = f"{file.resolve()}"
        stamp: list[object] = [about.st_size, about.st_mtime_ns, about.st_ino]
        entry = known.get(key)
        if isinstance(entry, list) and entry[:3] == stamp and len(entry) == 4:
            value = str(entry[3])
        else:
            value = file_digest(file)
        fresh[key] = [*stamp, value]
        total.update(json.dumps([file.name, value]).encode())
    if remember is not None and fresh != known:
        try:
            target = remember / DIGESTS_FILE
            aside = target.with_suffix(".new")
            aside.write_text(json.dumps(fresh))
            aside.replace(target)
        except OSError as error:
            logger.warning("digests of the model's files are not remembered: %s", error.strerror)
    return total.hexdigest()


def _remembered(directory: Path) -> dict[str, Any]:
    try:
        file = directory / DIGESTS_FILE
        if file.stat().st_size > _MAX_REMEMBERED_BYTES:
            return {}
        known = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
