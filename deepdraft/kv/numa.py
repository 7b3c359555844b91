"""NUMA nodes: which this process may use, which is nearest to a device, binding memory to one.

Owns: what /proc and /sys say, the mbind call.
Knows nothing of: slabs, tensors.

Nothing here may fail a start: where the kernel does not say or does not allow it, memory lies where
it lies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
"""Taken from another node where this one is full: a slow byte is better than a killed server."""
SYS = Path("/sys")
STATUS = Path("/proc/self/status")


def _numbers(text: str) -> list[int]:
    """ "0-2,5" -> 0, 1, 2, 5."""
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            out += range(int(first), int(last or first) + 1)
    return out


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def nodes(*, sys: Path = SYS, status: Path = STATUS) -> list[int]:
    """Nodes with memory that this process may take it from, ascending; empty where not known."""
    allowed = [
        line.partition(":")[2]
        for line in _read(status).splitlines()
        if line.startswith("Mems_allowed_list:")
    ]
    there = _numbers(_read(sys / "devices/system/node/has_memory"))
    return [n for n in there if n in _numbers(allowed[0])] if allowed else []


def node_of_pci(address: str, *, sys: Path = SYS) -> int | None:
    """The node that a PCI device (0000:1b:00.0) hangs on."""
    text = _read(sys / "bus/pci/devices" / address.lower() / "numa_node").strip()
    return int(text) if text.isdigit() else None


def node_of_cpus(cpus: Iterable[int] | None = None, *, sys: Path = SYS) -> int | None:
    """The node of these CPUs (default: those this process may run on), if it is one."""
    wanted = set(os.sched_getaffinity(0) if cpus is None else cpus)
    for node in (sys / "devices/system/node").glob("node[0-9]*"):
        if wanted and wanted <= set(_numbers(_read(node / "cpulist"))):
            return int(node.name[4:])
    return None


def nearest_first(near: int | None, there: list[int]) -> tuple[int, ...]:
    """The nodes to cut memory over, the one to fill first in front; () where there is no choice."""
    if len(there) < 2:
        return ()
    return tuple(sorted(there, key=lambda node: (node != near, node)))


def bind(address: int, size: int, node: int) -> bool:
    """Has pages of whole-page memory taken from a node when they are first touched."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (ctypes.c_ulong(address), ctypes.c_ulong(size), ctypes.c_int(_PREFERRED))
    done = call(ctypes.c_long(number), *arguments, mask, ctypes.c_ulong(64 * words + 1), 0)
    if done:
        why = os.strerror(ctypes.get_errno())
        logger.info("KV memory is not bound to NUMA node %d: %s", node, why)
    return not done
