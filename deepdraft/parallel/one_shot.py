"""Sum over the ranks of one host in one kernel: peers' memory, tagged words, no library call.

Owns: the mailboxes, the kernel, the error word. Knows nothing of: processes, what is summed.

Every rank writes its float32 values, each with the number of the exchange, as 8-byte words into a
mailbox of every other rank, and waits on its own memory until the words of all ranks carry that
number. Then it adds them in rank order. A word arrives whole, so there are no flags, fences or
clearing; two mailboxes in turn suffice, because a rank can be at most one exchange ahead of another
(to end exchange k + 1 it needs the others' words, which they send after they have read those of k).

Contract: the result is `group.rank_order_sum` bit for bit, on every rank. Every wait is bounded: a
rank that waits too long sets the error word, gives NaN, and waits no more in later exchanges until
the word is cleared. The word is 0; 1 + r: rank r's words did not come; 256 + r: this rank's own
values were not finite.

The number of an exchange is `count` (in device memory, so a captured graph counts on) plus its slot
in the step; `advance` adds the slots of a step at its end. All ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NOT_FINITE = 256
SPIN_LIMIT = 4_000_000
"""Polls before a wait is given up: 1.2 seconds on an H200."""
_INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def put_word(ptr, word, inside):
    """Stores 8-byte words to any GPU's memory, each whole, seen in time by the others' loads."""
    if _INTERPRET:
        tl.store(ptr, word, mask=inside)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; "
            "mov.b32 $0, 0; }",
            "=&r,l,l,r",
            [ptr.to(tl.int64), word, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def get_word(ptr, inside):
    """Loads 8-byte words past the caches that other GPUs do not write through; 0 outside."""
    if _INTERPRET:
        return tl.load(ptr, mask=inside, other=0)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; "
            "@p ld.relaxed.sys.global.b64 $0, [$1]; }",
            "=&l,l,r",
            [ptr.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def one_shot_kernel(
    x_ptr, out_ptr, boxes_ptr, count_ptr, error_ptr, SLOT, N, CAPACITY, LIMIT,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PUSH: tl.constexpr, COLLECT: tl.constexpr,
):  # fmt: skip
    tag = (tl.load(count_ptr) + SLOT + 1).to(tl.int32)
    parity = tag & 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if PUSH:
        bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        word = (tag.to(tl.int64) << 32) | bits
        for step in tl.static_range(1, SIZE):
            box = tl.load(boxes_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
            put_word(box + (parity * SIZE + RANK) * CAPACITY + at, word, inside)
        finite = tl.abs(x) < float("inf")
        if tl.sum((inside & ~finite).to(tl.int32), axis=0) > 0:
            tl.atomic_cas(error_ptr, 0, 256 + RANK)
    if COLLECT:
        own = tl.load(boxes_ptr + RANK).to(tl.pointer_type(tl.int64))
        limit = tl.where(tl.load(error_ptr) == 0, LIMIT, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        lost = 0
        for source in tl.static_range(SIZE):
            if source == RANK:
                part = x
            else:
                place = own + (parity * SIZE + source) * CAPACITY + at
                word = get_word(place, inside)
                missing = tl.sum((inside & ((word >> 32).to(tl.int32) != tag)).to(tl.int32), axis=0)
                spins = 0
                while (missing > 0) & (spins < limit):
                    word = get_word(place, inside)
                    late = inside & ((word >> 32).to(tl.int32) != tag)
                    missing = tl.sum(late.to(tl.int32), axis=0)
                    spins += 1
                if missing > 0:
                    lost = source + 1
                part = word.to(tl.int32).to(tl.float32, bitcast=True)
            total = part if source == 0 else total + part
        if lost > 0:
            tl.atomic_cas(error_ptr, 0, lost)
            total = tl.full((BLOCK,), float("nan"), tl.float32)
        tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def advance_kernel(count_ptr, SLOTS):
    tl.store(count_ptr, tl.load(count_ptr) + SLOTS)


class OneShot:
    """One rank's side: mailboxes, counter, error word, and the exchanges of a step."""

    def __init__(
        self,
        rank: int,
        boxes: Sequence[int],
        own: Tensor,
        *,
        limit: int = SPIN_LIMIT,
        block: int = 128,
        warps: int = 1,
    ) -> None:
        """`boxes`: device address of every rank's mailbox, in rank order, reachable from here;
        `own`: this rank's, int64 [2, ranks, capacity], zeros, kept alive by the caller."""
        size = len(boxes)
        if own.dtype != torch.int64 or own.shape[:2] != (2, size) or not own.is_contiguous():
            raise ValueError(f"a mailbox of {size} ranks is int64 [2, {size}, n], got {own.shape}")
        self.rank, self.size, self.limit = rank, size, limit
        self._block, self._warps = block, warps
        self.capacity = own.shape[2]
        device = own.device
        self._own = own
        self._boxes = torch.tensor(boxes, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        """The error word; read it after a step, clear it with zero_()."""
        if device.type == "cuda":
            programs = torch.cuda.get_device_properties(device).multi_processor_count * 16
            if -(-self.capacity // block) > programs:
                raise ValueError(
                    f"{self.capacity} values are more than {programs} programs of {block} that "
                    "run at once; waiting ones could block those they wait for"
                )

    def sum(self, x: Tensor, slot: int, out: Tensor | None = None, *, phase: str = "") -> Tensor:
        """The ranks' float32 x added in rank order, in the exchange number `slot` of this step.

        `phase`: only "push" or only "collect", for ranks that are emulated in turn.
        """
        n = x.numel()
        if x.dtype != torch.float32 or not x.is_contiguous() or n > self.capacity:
            raise ValueError(
                f"at most {self.capacity} contiguous float32 values, got {n} {x.dtype}"
            )
        out = torch.empty_like(x) if out is None else out
        _launch(
            one_shot_kernel, (-(-n // self._block),),
            x, out, self._boxes, self.count, self.error, slot, n, self.capacity, self.limit,
            RANK=self.rank, SIZE=self.size, BLOCK=self._block,
            PUSH=phase != "collect", COLLECT=phase != "push", num_warps=self._warps,
        )  # fmt: skip
        return out

    def advance(self, slots: int) -> None:
        """The step had this many exchanges; the next one counts on from there."""
        _launch(advance_kernel, (1,), self.count, slots, num_warps=1)

    def check(self) -> None:
        """Reads the error word (waits for the device). Raises EngineError."""
        raise_for(int(self.error.item()))


def raise_for(word: int) -> None:
    """EngineError for an error word that is not 0."""
    from deepdraft.errors import EngineError

    if word >= NOT_FINITE:
        raise EngineError(
            f"rank {word - NOT_FINITE} produced NaN or infinity; the device or its memory may be "
            "faulty"
        )
    if word:
        raise EngineError(f"rank {word - 1} did not answer in an exchange between the GPUs")


def _launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    kernel[grid](*args, **options)


def symmetric_mailbox(group_name: Any, size: int, capacity: int) -> tuple[Tensor, list[int]]:
    """This rank's mailbox in symmetric memory and the addresses of all ranks'.

    Every rank of the process group calls it. Multicast stays off. Raises RuntimeError where peers'
    memory cannot be reached.
    """
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    own = symmetric.empty(2 * size * capacity, dtype=torch.int64, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, group_name)
    torch.cuda.synchronize(device)
    handle.barrier()
    return own.view(2, size, capacity), list(handle.buffer_ptrs)
