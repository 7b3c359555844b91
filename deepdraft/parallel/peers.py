"""Memory of every rank that the other ranks write to, for exchanges of many rows.

Owns: the memory, each rank's view of all of it, the barrier. Knows nothing of: what lies where.

What a rank writes before a barrier is there for the others after it. A place that a peer may still
read must not be written again before another barrier, which that peer enters when it has read it.
Small values of decode steps go another way (`kernels.one_shot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepdraft.parallel.group import Group


class PeerMemory(Protocol):
    """As many bytes of every rank."""

    parts: Sequence[Tensor]
    """By rank, uint8 [bytes]: its memory as this rank reaches it."""

    @property
    def addresses(self) -> Sequence[int]:
        """By rank: where its memory begins, in this rank's address space."""
        ...

    def barrier(self, lane: int = 0) -> None:
        """All ranks have come here, and what they wrote is there. Barriers of a lane are entered in
        one order; those of different lanes may be under way at once."""
        ...


class SymmetricMemory:
    """The ranks' GPUs reach each other's memory. NVLink multicast stays off."""

    def __init__(self, nbytes: int) -> None:
        """Zeros. Every rank of the process group (NCCL) calls it. RuntimeError where peers' memory
        cannot be reached, OutOfMemoryError where there is too little."""
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self._own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._own.zero_()
        name: Any = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._handle: Any = symmetric.rendezvous(self._own, name)
        self.addresses: Sequence[int] = list(self._handle.buffer_ptrs)
        self.parts: Sequence[Tensor] = [
            self._own if rank == self._handle.rank else self._handle.get_buffer(
                rank, (nbytes,), torch.uint8
            )
            for rank in range(self._handle.world_size)
        ]  # fmt: skip
        torch.cuda.synchronize(device)
        self._handle.barrier()

    def barrier(self, lane: int = 0) -> None:
        """On the current stream. A rank that never comes is noticed by the ranks' parent."""
        self._handle.barrier(channel=lane)


class OneProcessMemory:
    """The ranks' memories lie in one process (`group.run_in_turn`), or are mapped into it."""

    def __init__(self, parts: Sequence[Tensor], group: Group) -> None:
        """`parts`: uint8, of every rank."""
        self.parts, self._group = parts, group
        self.addresses: Sequence[int] = [part.data_ptr() for part in parts]

    def barrier(self, lane: int = 0) -> None:
        """By an exchange of the group, when this rank's device has written all."""
        if self.parts[0].is_cuda:
            torch.cuda.synchronize()
        self._group.gather(torch.zeros(1))
