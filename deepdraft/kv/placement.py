"""Where host memory lies best for a device, and memory that a GPU reads and writes directly.

Owns: the choice of NUMA nodes, the registration of one block with CUDA.
Knows nothing of: what lies in it. Without either every copy is right, only slower.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from deepdraft.kv import numa

logger = logging.getLogger(__name__)


def nearest_nodes(device: torch.device) -> tuple[int, ...]:
    """NUMA nodes to cut a slab over, the one nearest to `device` first; () for one node."""
    there = numa.nodes()
    if len(there) < 2:
        return ()
    if device.type != "cuda":
        return numa.nearest_first(numa.node_of_cpus(), there)
    gpu: Any = torch.cuda.get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):  # an older torch
        return numa.nearest_first(None, there)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return numa.nearest_first(numa.node_of_pci(address), there)


def _cuda() -> Any:
    return torch.cuda.cudart()


class Pinned:
    """Registered from here to `close`. The pages are touched, so all memory is taken at once."""

    def __init__(self, memory: np.ndarray, runtime: Any = None) -> None:
        """`runtime`: CUDA's, as torch has it. A refusal is logged, and `done` stays False."""
        self._runtime = _cuda() if runtime is None else runtime
        self._address = memory.ctypes.data
        code = int(self._runtime.cudaHostRegister(self._address, memory.nbytes, 0))
        self.done = code == 0
        if not self.done:
            logger.warning(
                "CUDA refuses to pin %d MiB of KV memory (error %d): copies to the GPU are slower; "
                "a container may need a higher limit of locked memory",
                memory.nbytes >> 20,
                code,
            )

    def close(self) -> None:
        """Before the memory is unmapped. May be called twice."""
        done, self.done = self.done, False
        if done:
            self._runtime.cudaHostUnregister(self._address)
