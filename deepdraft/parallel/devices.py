"""Can this machine run a model on its GPUs? Asked before anything is loaded, without torch.

Owns: what NVIDIA's management library says of the GPUs, and the messages for what is missing.
Knows nothing of: models; the caller says how much memory it needs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

LEAST_CAPABILITY = (9, 0)
"""Hopper. The kernels' products and conversions were compiled and measured for it."""
CPU_HINT = "run with --device cpu, or on a machine with such GPUs"

_INIT_PROBLEMS = {
    9: "the NVIDIA driver is not loaded",
    18: "the NVIDIA driver was updated and the old one still runs: reboot, or reload its modules",
    4: "this user may not use the NVIDIA driver (device files under /dev/nvidia*)",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Bytes of memory in all, and free now."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """Visible GPUs in CUDA's order, and the newest CUDA version (major, minor) of the driver."""

    gpus: tuple[Gpu, ...]
    driver_cuda: tuple[int, int]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def read_machine(load: Callable[[str], Any] = ctypes.CDLL) -> Machine:
    """What the driver says. Raises ConfigError where there is no driver or it does not work."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError as error:
        raise ConfigError(f"this machine has no NVIDIA driver; {CPU_HINT}") from error
    code = nvml.nvmlInit_v2()
    if code:
        problem = _INIT_PROBLEMS.get(code, f"the NVIDIA driver does not start (NVML error {code})")
        raise ConfigError(f"{problem}; {CPU_HINT}")
    try:
        return _read(nvml)
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> Machine:
    def number(call: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        _checked(call, getattr(nvml, call)(*arguments, ctypes.byref(value)))
        return value.value

    version = number("nvmlSystemGetCudaDriverVersion_v2")
    gpus = []
    for index in range(number("nvmlDeviceGetCount_v2")):
        handle, memory = ctypes.c_void_p(), _Memory()
        call = "nvmlDeviceGetHandleByIndex_v2"
        _checked(call, nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
        call = "nvmlDeviceGetMemoryInfo"
        _checked(call, nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
        name, uuid = (ctypes.create_string_buffer(96) for _ in range(2))
        _checked("nvmlDeviceGetName", nvml.nvmlDeviceGetName(handle, name, 96))
        _checked("nvmlDeviceGetUUID", nvml.nvmlDeviceGetUUID(handle, uuid, 96))
        major, minor = ctypes.c_int(), ctypes.c_int()
        _checked(
            "nvmlDeviceGetCudaComputeCapability",
            nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            ),
        )
        gpus.append(
            Gpu(
                name.value.decode(),
                uuid.value.decode(),
                memory.total,
                memory.free,
                (major.value, minor.value),
            )
        )
    shown = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(tuple(shown), (version // 1000, version % 1000 // 10))


def _checked(call: str, code: int) -> None:
    if code:
        raise ConfigError(f"the NVIDIA driver answers {call} with error {code}; {CPU_HINT}")


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves: indices or starts of UUIDs, up to the first wrong
    one, as CUDA reads it."""
    if setting is None:
        return list(gpus)
    left: list[Gpu] = []
    for item in filter(None, (part.strip() for part in setting.split(","))):
        if item.isdecimal():
            found = list(gpus[int(item) : int(item) + 1])
        else:
            found = [gpu for gpu in gpus if gpu.uuid.startswith(item)]
        if len(found) != 1 or found[0] in left:
            break
        left += found
    return left


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that the installed torch was built for; None: a build without CUDA. Reads a
    file, does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("torch is not installed")
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda[^=\n]*= '(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of one rank: on its GPU, and of the host for all ranks together."""

    gpu_bytes: int
    host_bytes: int


def check_machine(
    machine: Machine,
    built_for: tuple[int, int] | None,
    ranks: int,
    needs: Callable[[int], Need],
    sizes: Sequence[int],
    host_bytes: int,
) -> None:
    """Raises ConfigError for the first thing that is missing, and says what would do.

    `needs`: memory for a number of ranks; `sizes`: numbers of ranks that divide the model;
    `host_bytes`: memory of this machine.
    """
    if built_for is None:
        raise ConfigError(
            f"the installed torch is a build without CUDA; install one with CUDA, or {CPU_HINT}"
        )
    gpus = machine.gpus
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        raise ConfigError(f"no GPU is visible{why}; {CPU_HINT}")
    if machine.driver_cuda[0] < built_for[0]:
        raise ConfigError(
            f"the NVIDIA driver supports CUDA {_dotted(machine.driver_cuda)}, the installed torch "
            f"was built for {_dotted(built_for)}: update the driver, or install a torch for CUDA "
            f"{machine.driver_cuda[0]}"
        )
    if len(gpus) < ranks:
        raise ConfigError(
            f"--tp {ranks} needs {ranks} GPUs, {len(gpus)} are visible: "
            + ", ".join(gpu.name for gpu in gpus)
        )
    for index, gpu in enumerate(gpus[:ranks]):
        if gpu.capability < LEAST_CAPABILITY:
            raise ConfigError(
                f"GPU {index} ({gpu.name}) has compute capability {_dotted(gpu.capability)}; the "
                f"kernels need {_dotted(LEAST_CAPABILITY)} (Hopper) or newer; {CPU_HINT}"
            )
    _check_memory(gpus, ranks, needs, sizes, host_bytes)


def _check_memory(
    gpus: Sequence[Gpu],
    ranks: int,
    needs: Callable[[int], Need],
    sizes: Sequence[int],
    host_bytes: int,
) -> None:
    need = needs(ranks)
    for index, gpu in enumerate(gpus[:ranks]):
        if gpu.free_bytes >= need.gpu_bytes:
            continue
        if gpu.total_bytes >= need.gpu_bytes:
            raise ConfigError(
                f"each GPU needs {_gb(need.gpu_bytes)} free, GPU {index} ({gpu.name}) has "
                f"{_gb(gpu.free_bytes)} of {_gb(gpu.total_bytes)}: something else uses it"
            )
        smallest = min(g.total_bytes for g in gpus)
        fitting = [n for n in sizes if needs(n).gpu_bytes <= smallest]
        more = (
            f"--tp {fitting[0]} would fit GPUs of this size ({_gb(needs(fitting[0]).gpu_bytes)} "
            "each)"
            if fitting
            else f"at --tp {sizes[-1]}, the most, it still takes {_gb(needs(sizes[-1]).gpu_bytes)}"
        )
        raise ConfigError(
            f"at --tp {ranks} each GPU needs {_gb(need.gpu_bytes)}, GPU {index} ({gpu.name}) has "
            f"{_gb(gpu.total_bytes)}; {more}"
        )
    if need.host_bytes > host_bytes:
        raise ConfigError(
            f"the Engram tables take {_gb(need.host_bytes)} of host memory, this machine has "
            f"{_gb(host_bytes)}"
        )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
