"""Sums and joins over the ranks of one host in one kernel: peers' memory, tagged words, no library.

Owns: the mailboxes, the kernel, the error word. Knows nothing of: processes, what is summed.

Every rank writes its float32 values, each with the number of the exchange, as 8-byte words into a
mailbox of every other rank, and waits on its own memory until the words of all ranks carry that
number. Then it adds them in rank order, or puts them side by side. (Logits, which are many, are put
side by side another way: values as they are, behind each block of them one word, written when they
are there and read before they are.) A word arrives whole, so there
are no flags, fences or clearing; two mailboxes in turn suffice, because a rank can be at most one
exchange ahead of another (to end exchange k + 1 it needs the others' words, which they send after
they have read those of k).

Contract: the sum is `parallel.group.rank_order_sum` bit for bit, on every rank. Every wait is
bounded: a rank that waits too long sets the error word, gives NaN, and waits no more in later
exchanges until the word is cleared. The word is 0; 1 + r: rank r's words did not come; 256 + r:
rank r's values were not finite. What comes first stays, so all ranks name the one that began.

The number of an exchange is `count` (in device memory, so a captured graph counts on) plus its
place in the step; `finish` adds the step's exchanges at its end. All ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.errors import EngineError
from deepdraft.kernels.rounding import to_bf16_rne
from deepdraft.kernels.runtime import INTERPRET, check, launch, wait_for_inputs

NOT_FINITE = 256
SPIN_LIMIT = 20_000_000
"""Polls before a wait is given up: 6 seconds on an H200. A rank may compile meanwhile."""
_SMALL, _LARGE = (128, 1), (1024, 4)
"""Values of a program and its warps; measured, see bench/results/c-tp2-exchange.json."""
_MANY = 1 << 16
_GATHERED = 1024
"""Values of a program that gathers."""
_RESIDENT = 16
"""Programs of either kind that one multiprocessor holds at once."""


@triton.jit
def put_word(ptr, word, inside):
    """Stores 8-byte words to any GPU's memory, each whole, seen in time by the others' loads."""
    if INTERPRET:
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
    if INTERPRET:
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
def own_values(x_ptr, shared_ptr, at, inside, WIDTH, PICKS: tl.constexpr):
    """float32 x as it stands, or bf16 picks [R, PICKS, WIDTH] added in order, then shared."""
    if PICKS == 0:
        return tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        row, column = (at // WIDTH).to(tl.int64), at % WIDTH
        x_ptr += row * PICKS * WIDTH + column
        total = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(1, PICKS):
            total += tl.load(x_ptr + k * WIDTH, mask=inside, other=0.0).to(tl.float32)
        return total + tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def send(
    x, tag, at, inside, boxes_ptr, CAPACITY, RANK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Writes x with its tag to every other rank."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (tag.to(tl.int64) << 32) | bits
    for step in tl.static_range(1, SIZE):
        box = tl.load(boxes_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        put_word(box + ((tag & 1) * SIZE + RANK) * CAPACITY + at, word, inside)


@triton.jit
def note_unusable(x, rank, counts, error_ptr):
    """Where a rank's values that count are not finite: the error word, if it is still 0."""
    bad = counts & ((x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000)  # NaN or infinity
    if tl.sum(bad.to(tl.int32), axis=0) > 0:
        tl.atomic_cas(error_ptr, 0, 256 + rank)


@triton.jit
def await_words(place, tag, inside, limit):
    """The values at `place` once all carry the tag, and how many still did not at the limit."""
    word = get_word(place, inside)
    missing = tl.sum((inside & ((word >> 32).to(tl.int32) != tag)).to(tl.int32), axis=0)
    spins = 0
    while (missing > 0) & (spins < limit):
        word = get_word(place, inside)
        missing = tl.sum((inside & ((word >> 32).to(tl.int32) != tag)).to(tl.int32), axis=0)
        spins += 1
    value = word.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(missing > 0, float("nan"), value), missing


@triton.jit
def one_shot_kernel(
    x_ptr, shared_ptr, out_ptr, positions_ptr, boxes_ptr, count_ptr, error_ptr,
    SLOT, N, WIDTH, CAPACITY, LIMIT,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PICKS: tl.constexpr,
    GATHER: tl.constexpr, ROUND: tl.constexpr, LIVE: tl.constexpr,
    PUSH: tl.constexpr, COLLECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    tag = (tl.load(count_ptr) + SLOT + 1).to(tl.int32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    counts = inside
    if LIVE:  # rows that only fill a tile may hold anything
        counts &= tl.load(positions_ptr + at // WIDTH, mask=inside, other=-1) >= 0
    x = own_values(x_ptr, shared_ptr, at, inside, WIDTH, PICKS)
    if PUSH:
        send(x, tag, at, inside, boxes_ptr, CAPACITY, RANK, SIZE)
        note_unusable(x, RANK, counts, error_ptr)
    if COLLECT:
        own = tl.load(boxes_ptr + RANK).to(tl.pointer_type(tl.int64))
        own += (tag & 1) * SIZE * CAPACITY + at
        limit = tl.where(tl.load(error_ptr) == 0, LIMIT, 0)
        # Where GATHER: row by row, the ranks' WIDTH values side by side.
        out_ptr += (at // WIDTH).to(tl.int64) * (SIZE * WIDTH) + at % WIDTH if GATHER else at
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                part = x
            else:
                part, missing = await_words(own + source * CAPACITY, tag, inside, limit)
                if missing > 0:
                    tl.atomic_cas(error_ptr, 0, source + 1)
                note_unusable(part, source, counts, error_ptr)
            if GATHER:
                tl.store(out_ptr + source * WIDTH, part, mask=inside)
            else:
                total = part if source == 0 else total + part
        if ROUND:
            tl.store(out_ptr, to_bf16_rne(total), mask=inside)
        elif not GATHER:
            tl.store(out_ptr, total, mask=inside)


@triton.jit
def publish(ptr, tag):
    """Stores the word `tag` to any GPU's memory, behind all that this program has stored before."""
    tl.debug_barrier()
    tl.atomic_xchg(ptr, tag.to(tl.int64) << 32, sem="release", scope="sys")


@triton.jit
def reads_follow():
    """What is read from here on is no older than the words that have been read."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def gather_kernel(
    x_ptr, out_ptr, positions_ptr, boxes_ptr, count_ptr, error_ptr,
    SLOT, WIDTH, STRIDE, DATA, LIMIT,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LIVE: tl.constexpr,
    PUSH: tl.constexpr, COLLECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of columns of one row of every rank. Rows that only fill a tile are left out, but
    never row 0: an exchange that nobody waits for would let a rank run ahead."""
    wait_for_inputs(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    live = True
    if LIVE:
        live = tl.load(positions_ptr + row) >= 0
        if (row > 0) & (live == 0):
            return
    tag = (tl.load(count_ptr) + SLOT + 1).to(tl.int32)
    side, word = (tag & 1) * SIZE, row * tl.num_programs(1) + part
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < WIDTH, row * WIDTH + column
    counts = inside & live
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if PUSH:
        for step in tl.static_range(1, SIZE):
            box = (
                tl.load(boxes_ptr + (RANK + step) % SIZE) + (side + RANK).to(tl.int64) * STRIDE * 8
            )
            data = tl.multiple_of((box + DATA * 8).to(tl.pointer_type(tl.float32)), 16)
            tl.store(data + at, x, mask=inside)
        for step in tl.static_range(1, SIZE):
            box = (
                tl.load(boxes_ptr + (RANK + step) % SIZE) + (side + RANK).to(tl.int64) * STRIDE * 8
            )
            publish(box.to(tl.pointer_type(tl.int64)) + word, tag)
        note_unusable(x, RANK, counts, error_ptr)
    if COLLECT:
        limit = tl.where(tl.load(error_ptr) == 0, LIMIT, 0)
        out_ptr += row.to(tl.int64) * (SIZE * WIDTH) + column
        tl.store(out_ptr + RANK * WIDTH, x, mask=inside)
        one = tl.arange(0, 1)
        for step in tl.static_range(1, SIZE):
            source = (RANK + step) % SIZE
            box = tl.load(boxes_ptr + RANK) + (side + source).to(tl.int64) * STRIDE * 8
            words = box.to(tl.pointer_type(tl.int64)) + word + one
            _, missing = await_words(words, tag, one == 0, limit)
            reads_follow()
            data = tl.multiple_of((box + DATA * 8).to(tl.pointer_type(tl.float32)), 16)
            value = tl.load(data + at, mask=inside, other=0.0, cache_modifier=".cg")
            if missing > 0:
                tl.atomic_cas(error_ptr, 0, source + 1)
                value = tl.full((BLOCK,), float("nan"), tl.float32)
            note_unusable(value, source, counts, error_ptr)
            tl.store(out_ptr + source * WIDTH, value, mask=inside)


@triton.jit
def advance_kernel(count_ptr, SLOTS, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    tl.store(count_ptr, tl.load(count_ptr) + SLOTS)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One exchange for a kernel that makes it itself (native/boundary.cu)."""

    rank: int
    boxes: tuple[int, ...]
    """Address of every rank's mailbox."""
    count: int
    error: int
    positions: int
    """Addresses of the counter, the error word and the rows' positions (0: all rows count)."""
    slot: int
    capacity: int
    """Words from one rank's part of a mailbox to the next one's."""
    limit: int


class OneShot:
    """One rank's side: mailboxes, counter, error word, and the exchanges of a step."""

    def __init__(
        self,
        rank: int,
        boxes: Sequence[int],
        own: Tensor,
        *,
        limit: int = SPIN_LIMIT,
        plan: tuple[int, int] | None = None,
        between: Callable[[], object] | None = None,
        data: int = 0,
    ) -> None:
        """`boxes`: device address of every rank's mailbox, in rank order, reachable from here;
        `own`: this rank's, int64 [2, ranks, capacity + data], zeros. `data`: twice as many float32
        values are gathered at once as they are; 0: as words. `plan`: values of a program and its
        warps, the same on all ranks. `between`: for ranks that are emulated in turn: words are sent
        before it is called and awaited after it has returned."""
        size = len(boxes)
        if own.dtype != torch.int64 or own.shape[:2] != (2, size) or not own.is_contiguous():
            raise ValueError(f"a mailbox of {size} ranks is int64 [2, {size}, n], got {own.shape}")
        self.rank, self.size, self.limit, self.between = rank, size, limit, between
        self._plan, self._own = plan, own
        self.stride, self.capacity = own.shape[2], own.shape[2] - data
        device = own.device
        self._addresses = tuple(boxes)
        self._boxes = torch.tensor(boxes, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        """The error word; read it after a step, clear it with zero_()."""
        self.positions: Tensor | None = None
        """Of the rows in hand, int32 [R]: NaN in a row at -1 is no fault. None: all rows count."""
        self.apart = False
        """Every exchange is a kernel of its own (measurements)."""
        self._slot = 0
        self._most = 1 << 30
        if device.type == "cuda":
            cores = torch.cuda.get_device_properties(device).multi_processor_count
            self._most = cores * _RESIDENT

    @property
    def gives_tickets(self) -> bool:
        """Whether other kernels may make exchanges: not where ranks are emulated in turn."""
        return self.between is None and not self.apart and self.stride % 2 == 0

    def ticket(self, n: int, programs: int) -> Ticket:
        """The next exchange, of n values by so many programs of up to 256 threads, for a kernel
        that follows the rules above. All ranks take the same tickets."""
        if n > self.capacity or 2 * programs > self._most:
            raise ValueError(f"{n} values by {programs} programs: exchange fewer rows")
        at = 0 if self.positions is None else self.positions.data_ptr()
        slot, self._slot = self._slot, self._slot + 1
        return Ticket(
            self.rank, self._addresses, self.count.data_ptr(), self.error.data_ptr(), at, slot,
            self.stride, self.limit,
        )  # fmt: skip

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' x float32 added in rank order: float32 of x's shape."""
        out = torch.empty_like(x)
        self._exchange(x, x, out, x.numel(), x.numel())
        return out

    def sum_rows(self, x: Tensor) -> Tensor:
        """The ranks' x float32 [R, N] added in rank order, rounded to bfloat16."""
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        self._exchange(x, x, out, x.numel(), x.shape[-1], rounded=True)
        return out

    def sum_picks(self, y: Tensor, shared: Tensor) -> Tensor:
        """Every rank adds y bfloat16 [R, K, D] in pick order and shared [R, D] last, in float32;
        these are added in rank order and rounded to bfloat16 [R, D]."""
        r, k, d = y.shape
        if y.dtype != torch.bfloat16 or shared.dtype != torch.bfloat16 or shared.shape != (r, d):
            raise ValueError(f"picks are bfloat16 [R, K, D], shared [R, D], got {shared.shape}")
        out = torch.empty_like(shared)
        self._exchange(y, shared, out, r * d, d, picks=k, rounded=True)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' x float32 [R, N] side by side in rank order: [R, ranks * N]."""
        r, n = x.shape
        out = torch.empty(r, n * self.size, dtype=x.dtype, device=x.device)
        positions, values = self.positions, 2 * (self.stride - self.capacity)
        whole = n <= values  # a row fits
        rows = max(1, (values if whole else self.capacity) // n)
        for at in range(0, r, rows):
            some = x[at : at + rows]
            self.positions = None if positions is None else positions[at:]
            if whole:
                self._gather(some, out[at : at + rows])
            else:
                self._exchange(some, some, out[at : at + rows], some.numel(), n, gathers=True)
        self.positions = positions
        return out

    def _gather(self, x: Tensor, out: Tensor) -> None:
        check(x, out, self._own)
        (rows, width), positions = x.shape, self.positions
        grid = rows, -(-width // _GATHERED)
        if x.dtype != torch.float32 or grid[0] * grid[1] > self.capacity:
            raise ValueError(
                f"{rows} x {width} values of {x.dtype} are no float32 for this mailbox"
            )
        if grid[0] * grid[1] > self._most:
            raise ValueError(f"{grid} programs do not run at once: gather fewer rows")
        for push, collect in self._phases():
            launch(
                gather_kernel, grid, x, out, x if positions is None else positions, self._boxes,
                self.count, self.error, self._slot, width, self.stride, self.capacity, self.limit,
                RANK=self.rank, SIZE=self.size, BLOCK=_GATHERED, LIVE=positions is not None,
                PUSH=push, COLLECT=collect, num_warps=4,
            )  # fmt: skip
        self._slot += 1

    def _phases(self) -> Iterator[tuple[bool, bool]]:
        """What the launches of an exchange do: send, await."""
        if self.between is None:
            yield True, True
            return
        yield True, False
        self.between()
        yield False, True

    def _exchange(
        self,
        x: Tensor,
        shared: Tensor,
        out: Tensor,
        n: int,
        width: int,
        *,
        picks: int = 0,
        gathers: bool = False,
        rounded: bool = False,
    ) -> None:
        check(x, shared, out, self._own)
        positions = self.positions
        if positions is not None and positions.numel() * width < n:
            raise ValueError(f"{positions.numel()} positions for {n // width} rows")
        if n > self.capacity or (not picks and x.dtype != torch.float32):
            raise ValueError(f"at most {self.capacity} float32 values, got {n} of {x.dtype}")
        block, warps = self._plan or (_SMALL if n <= _MANY else _LARGE)
        programs = -(-n // block)
        if programs > self._most:
            raise ValueError(
                f"{programs} programs do not run at once; waiting ones could block those they wait "
                "for: exchange fewer rows"
            )
        for push, collect in self._phases():
            launch(
                one_shot_kernel, (programs,),
                x, shared, out, x if positions is None else positions,
                self._boxes, self.count, self.error, self._slot, n, width, self.stride,
                self.limit, RANK=self.rank, SIZE=self.size, BLOCK=block, PICKS=picks,
                GATHER=gathers, ROUND=rounded, LIVE=positions is not None, PUSH=push,
                COLLECT=collect, num_warps=warps,
            )  # fmt: skip
        self._slot += 1

    def finish(self) -> None:
        """The step is over; the next one counts on. Part of what is captured."""
        if self._slot:
            launch(advance_kernel, (1,), self.count, self._slot, num_warps=1)
        self._slot = 0

    def check(self) -> None:
        """Reads the error word (waits for the device). Raises EngineError."""
        raise_for(int(self.error.item()))


def raise_for(word: int) -> None:
    """EngineError for an error word that is not 0."""
    if word >= NOT_FINITE:
        raise EngineError(
            f"rank {word - NOT_FINITE} produced NaN or infinity; the device or its memory may be "
            "faulty"
        )
    if word:
        raise EngineError(f"rank {word - 1} did not answer in an exchange between the GPUs")
