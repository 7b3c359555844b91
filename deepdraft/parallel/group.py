"""Ranks that exchange tensors: processes over torch.distributed, threads that take turns, or none.

Owns: gathering in rank order, and the sum that every rank forms alike. Knows nothing of: models.

Contract of the sum: ((x_0 + x_1) + x_2) + ... in rank order, in the tensors' own type (float32, or
float64 as an oracle), element by element. So it is the same on all ranks, does not depend on which
part came first, and a row's bits do not depend on the other rows. An all-reduce of a library
promises none of the three (only for two ranks is every order the same sum).
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepdraft.parallel.rank import PeerLost, Pulse

T = TypeVar("T")

NVLINK_MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class Group(Protocol):
    """Ranks 0..size-1, of which this is one."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order; shapes and types are equal on all ranks."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def gather(self, x: Tensor) -> list[Tensor]:
        """Only x."""
        return [x]


def rank_order_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of equally shaped parts in their order and type; the first is not changed."""
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


class ProcessGroup:
    """Ranks as processes over torch.distributed (gloo on CPU, NCCL on GPUs)."""

    def __init__(
        self, rank: int, size: int, store: str, *, backend: str = "gloo", pulse: Pulse | None = None
    ) -> None:
        """`store`: path of a file all ranks share, empty at the start. Waits for all ranks."""
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(NVLINK_MULTICAST_OFF)
        self.rank, self.size, self._pulse = rank, size, pulse
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(minutes=10),
        )

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x. Raises PeerLost where a rank is gone."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        if self._pulse is not None:
            self._pulse.enter_exchange()
        try:
            dist.all_gather(parts, x.contiguous())
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise PeerLost(f"rank {self.rank} lost another rank: {reason}") from error
        if self._pulse is not None:
            self._pulse.leave_exchange()
        return parts

    def close(self) -> None:
        """Ends the group; to be called on every rank."""
        dist.destroy_process_group()


def run_in_turn(size: int, work: Callable[[Group], T]) -> list[T]:
    """All ranks in one process: `work(group)` of each rank runs to its next exchange, then the next
    rank's does. Never two at once. Returns what each rank returned.

    The reference for ranks that run apart. An exception of one rank ends all of them.
    """
    turns = _Turns(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with turns.running(rank):
                results[rank] = work(_Emulated(rank, size, turns))
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:
            failures.append(error)
            turns.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


class _Turns:
    """A baton: rank r runs only after rank r - 1 has reached the same exchange or its end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._turn = 0
        self._ended: set[int] = set()
        self._broken = False
        self.box: list[Tensor | None] = [None] * size

    def running(self, rank: int) -> _Running:
        return _Running(self, rank)

    def wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._broken)
            if self._broken:
                raise threading.BrokenBarrierError

    def hand_on(self, rank: int, *, ended: bool = False) -> None:
        with self._changed:
            if ended:
                self._ended.add(rank)
            others = [(rank + step) % self.size for step in range(1, self.size + 1)]
            self._turn = next((r for r in others if r not in self._ended), -1)
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class _Running:
    def __init__(self, turns: _Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank

    def __enter__(self) -> None:
        self._turns.wait(self._rank)

    def __exit__(self, *_: object) -> None:
        self._turns.hand_on(self._rank, ended=True)


class _Emulated:
    def __init__(self, rank: int, size: int, turns: _Turns) -> None:
        self.rank, self.size, self._turns = rank, size, turns

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank; the other ranks run up to the same exchange meanwhile."""
        turns = self._turns
        turns.box[self.rank] = x.clone()
        turns.hand_on(self.rank)  # the others put theirs in
        turns.wait(self.rank)
        parts = list(turns.box)
        turns.hand_on(self.rank)  # the others take theirs out before the box is used again
        turns.wait(self.rank)
        assert all(part is not None for part in parts)
        return parts  # type: ignore[return-value]


def symmetric_mailbox(size: int, capacity: int) -> tuple[Tensor, list[int]]:
    """A mailbox for `kernels.one_shot` in symmetric memory, int64 [2, size, capacity] zeros, and
    the addresses of all ranks' mailboxes.

    Every rank of the process group (NCCL) calls it. Multicast stays off. Raises RuntimeError where
    peers' memory cannot be reached. Keep the tensor: it is the memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    own = symmetric.empty(2 * size * capacity, dtype=torch.int64, device=device)
    own.zero_()
    name: Any = dist.group.WORLD.group_name  # type: ignore[union-attr]
    handle = symmetric.rendezvous(own, name)
    torch.cuda.synchronize(device)
    handle.barrier()
    return own.view(2, size, capacity), list(handle.buffer_ptrs)
