"""The end of a step on the device: what stands, what the host is told, the rows of the next step.

Contracts and references: `deepdraft.ops.accept`. One program handles all sequences of a step; the
host learns of it through a ring of reports, which may lie in pinned host memory, and a counter that
is written last. A graph may be replayed ahead of the host: an ended sequence emits nothing more.

Letters: Q sequences of a step, W rows of each, R >= Q W rows, S slots, K stop ids, B = W - 1
drafts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

HEAD = 5
"""Leading numbers of a report: slot, tokens emitted, drafts among them, state, tokens left."""
_RUNNING, _STOPPED, _FULL, _NO_TOKEN = (tl.constexpr(i) for i in range(4))


@dataclass(frozen=True, slots=True)
class Slots:
    """Limits of every sequence, at fixed addresses.

    state int32 [S] (ops.accept; set to RUNNING by the host when a sequence begins), left int32 [S]:
    tokens it may still emit; stops int32 [S, K], -1 in unused places; least float32 [S]: drafts
    less likely than this to be reached and stand are left out, 0: none is.
    """

    state: Tensor
    left: Tensor
    stops: Tensor
    least: Tensor


@dataclass(frozen=True, slots=True)
class Reports:
    """What the host reads: `ring` int32 [N, Q, HEAD + W] (report n of a step is row n modulo N) and
    `written` int64 [1], the number of reports written, both on the device or in pinned memory;
    `step` int64 [1] on the device: the number of the next report."""

    ring: Tensor
    written: Tensor
    step: Tensor


@dataclass(frozen=True, slots=True)
class Accepted:
    """confirmed int32 [R]: positions of the rows that stand, -1 elsewhere; last, place int32 [Q]:
    the token that the next step begins with and its position, -1 where a sequence has ended;
    draft_ids and draft_positions int32 [Q B]: rows of the drafter's next block."""

    confirmed: Tensor
    last: Tensor
    place: Tensor
    draft_ids: Tensor
    draft_positions: Tensor


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def is_stop(token, stops_ptr, slot, K: tl.constexpr):
    """token [Q, W] is one of its sequence's stop ids; slot [Q]."""
    found = token < -1
    for k in tl.static_range(K):
        found = found | (token == tl.load(stops_ptr + slot * K + k)[:, None])
    return found & (token >= 0)


@triton.jit
def at_column(values, w, column):
    """values [Q, W] at column [Q] of each row."""
    return tl.sum(tl.where(w[None, :] == column[:, None], values, 0), axis=1)


@triton.jit
def verdict(
    pick, draft, drafted, first, slot, state, left, stops_ptr, w, K: tl.constexpr, WP: tl.constexpr
):  # fmt: skip
    """How many drafts agree [Q], how many tokens are emitted, and the slots' new state and left."""
    goes_on = (state == _RUNNING) & (first >= 0)
    agrees = drafted & (pick == draft) & (pick >= 0)
    agree = tl.min(tl.where(agrees, WP, w[None, :]), axis=1)
    fault = at_column(pick, w, agree) < 0
    most = agree + tl.where(fault, 0, 1)
    stop = is_stop(pick, stops_ptr, slot, K) & (w[None, :] < most[:, None])
    first_stop = tl.min(tl.where(stop, w[None, :], WP), axis=1)
    count = tl.minimum(tl.minimum(most, first_stop + 1), left)
    count = tl.where(goes_on, tl.maximum(count, 0), 0)
    left -= count
    ended = tl.where(fault & (count == agree), _NO_TOKEN, _RUNNING)
    ended = tl.where(left <= 0, _FULL, ended)
    ended = tl.where(first_stop < count, _STOPPED, ended)
    state = tl.where(goes_on, ended, state)
    return agree, count, state, left


@triton.jit
def accept_kernel(
    picks_ptr, ids_ptr, position_ptr, slot_ptr, state_ptr, left_ptr, stops_ptr,
    ring_ptr, written_ptr, step_ptr, confirmed_ptr, last_ptr, place_ptr,
    draft_ids_ptr, draft_position_ptr,
    Q, W, R, DEPTH, NOISE, K: tl.constexpr, HEAD: tl.constexpr, RP: tl.constexpr,
    QP: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    r = tl.arange(0, RP)
    tl.store(confirmed_ptr + r, tl.full((RP,), -1, tl.int32), mask=r < R)
    q, w = tl.arange(0, QP), tl.arange(0, WP)
    inside = (q < Q)[:, None] & (w < W)[None, :]
    row = q[:, None] * W + w[None, :]
    slot = tl.maximum(tl.load(slot_ptr + q * W, mask=q < Q, other=0), 0)
    state = tl.load(state_ptr + slot)
    left = tl.load(left_ptr + slot)
    pick = tl.load(picks_ptr + row, mask=inside, other=-1)
    own = tl.load(ids_ptr + row, mask=inside, other=-1)
    position = tl.load(position_ptr + row, mask=inside, other=-1)
    behind = inside & (w < W - 1)[None, :]
    draft = tl.load(ids_ptr + row + 1, mask=behind, other=-1)
    drafted = tl.load(position_ptr + row + 1, mask=behind, other=-1) >= 0
    first = tl.load(position_ptr + q * W, mask=q < Q, other=-1)

    agree, count, state, left = verdict(
        pick, draft, drafted, first, slot, state, left, stops_ptr, w, K, WP
    )
    place = tl.where((state == _RUNNING) & (first >= 0), first + count, -1)
    begin = at_column(own, w, tl.zeros_like(count))
    last = tl.where(count > 0, at_column(pick, w, tl.maximum(count - 1, 0)), begin)
    # Nothing below may be written before every thread has read what is above.
    tl.debug_barrier()

    real = q < Q
    tl.store(state_ptr + slot, state, mask=real)
    tl.store(left_ptr + slot, left, mask=real)
    stands = inside & (w[None, :] < count[:, None])
    tl.store(confirmed_ptr + row, tl.where(stands, position, -1), mask=inside)
    tl.store(last_ptr + q, last, mask=real)
    tl.store(place_ptr + q, place, mask=real)
    block = inside & (w < W - 1)[None, :]
    draft_row = q[:, None] * (W - 1) + w[None, :]
    tl.store(draft_ids_ptr + draft_row, tl.where(w[None, :] == 0, last[:, None], NOISE), mask=block)
    at = tl.where(place[:, None] >= 0, place[:, None] + w[None, :], -1)
    tl.store(draft_position_ptr + draft_row, at, mask=block)

    step = tl.load(step_ptr)
    report = ring_ptr + (step % DEPTH) * Q * (HEAD + W) + q * (HEAD + W)
    tl.store(report, slot, mask=real)
    tl.store(report + 1, count, mask=real)
    tl.store(report + 2, tl.minimum(agree, count), mask=real)
    tl.store(report + 3, state, mask=real)
    tl.store(report + 4, left, mask=real)
    tokens = report[:, None] + HEAD + w[None, :]
    tl.store(tokens, tl.where(stands, pick, -1), mask=inside)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)
    # The counter's release makes the report visible to a host that has seen it.
    tl.atomic_xchg(written_ptr, step + 1, sem="release", scope="sys")


@triton.jit
def next_rows_kernel(
    last_ptr, place_ptr, drafts_ptr, raw_ptr, slot_ptr, left_ptr, stops_ptr, least_ptr,
    ids_ptr, position_ptr, Q, W, B, K: tl.constexpr, QP: tl.constexpr, WP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    q, w = tl.arange(0, QP), tl.arange(0, WP)
    real = q < Q
    inside = real[:, None] & (w < W)[None, :]
    row = q[:, None] * W + w[None, :]
    slot = tl.maximum(tl.load(slot_ptr + q * W, mask=real, other=0), 0)
    place = tl.load(place_ptr + q, mask=real, other=-1)
    left = tl.load(left_ptr + slot)
    # Column w holds draft w - 1.
    at = q[:, None] * B + w[None, :] - 1
    have = inside & (w >= 1)[None, :] & (w <= B)[None, :]
    draft = tl.load(drafts_ptr + at, mask=have, other=-1)
    before = tl.load(drafts_ptr + at - 1, mask=have & (w >= 2)[None, :], other=-1)
    raw = tl.load(raw_ptr + at, mask=have, other=float("inf")).to(tl.float32)
    least = tl.load(least_ptr + slot)
    survival = tl.cumprod(1.0 / (1.0 + tl.exp(-raw)), axis=1)
    wanted = have & (draft >= 0) & (w[None, :] < left[:, None])
    wanted = wanted & ((least <= 0)[:, None] | (survival >= least[:, None]))
    wanted = wanted & (is_stop(before, stops_ptr, slot, K) == 0)
    wanted = (wanted | (w == 0)[None, :]) & (place >= 0)[:, None]
    ends = tl.min(tl.where(wanted, WP, w[None, :]), axis=1)
    live = w[None, :] < ends[:, None]
    last = tl.load(last_ptr + q, mask=real, other=0)
    token = tl.where(w[None, :] == 0, last[:, None], tl.maximum(draft, 0))
    tl.store(ids_ptr + row, token, mask=inside)
    tl.store(position_ptr + row, tl.where(live, place[:, None] + w[None, :], -1), mask=inside)


# ---- launches ------------------------------------------------------------------------------


def accept(
    picks: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    limits: Slots,
    reports: Reports,
    *,
    sequences: int,
    noise: int = 0,
) -> Accepted:
    """What of a step stands (contract: ops.accept.accept); writes one report, updates `limits`.

    picks, ids, positions, slots int32 [R]: sequence q has rows q W .. q W + W - 1 (W from the
    reports' ring), of one slot; rows beyond Q W are no sequence's. Two sequences must not share a
    slot. noise: token id of the drafter's later rows.
    """
    device = check(picks, ids, positions, slots, limits.state, limits.left, limits.stops)
    depth, q, width = reports.ring.shape
    w = width - HEAD
    if q != sequences or w < 1 or ids.shape[0] < q * w:
        raise ValueError(f"reports {tuple(reports.ring.shape)} do not fit {sequences} sequences")
    for tensor in (picks, ids, positions, slots, limits.state, limits.left, limits.stops):
        if tensor.dtype != torch.int32:
            raise ValueError(f"accept takes int32 tensors, got {tensor.dtype}")
    for tensor, dtype in ((reports.ring, torch.int32), (reports.written, torch.int64)):
        if tensor.device != device and not tensor.is_pinned():
            raise ValueError("reports must lie on the GPU or in pinned host memory")
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError("reports are contiguous, the ring int32 and the counter int64")

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    drafts = q * (w - 1)
    out = Accepted(ints(ids.shape[0]), ints(q), ints(q), ints(drafts), ints(drafts))
    launch(
        accept_kernel, (1,),
        picks, ids, positions, slots, limits.state, limits.left, limits.stops,
        reports.ring, reports.written, reports.step, out.confirmed, out.last, out.place,
        out.draft_ids, out.draft_positions, q, w, ids.shape[0], depth, noise,
        K=limits.stops.shape[1], HEAD=HEAD, RP=next_power(ids.shape[0]), QP=next_power(q),
        WP=next_power(w, 2), num_warps=1,
    )  # fmt: skip
    return out


def next_rows(
    done: Accepted,
    limits: Slots,
    slots: Tensor,
    ids: Tensor,
    positions: Tensor,
    *,
    drafts: Tensor | None = None,
    raw: Tensor | None = None,
) -> None:
    """Write the next step's ids and positions int32 [R] (contract: ops.accept.next_rows): drafts
    int32 [Q, B] and their raw confidences float32 [Q, B], or none. Rows beyond Q W stay as they
    are; slots int32 [R] is unchanged from step to step."""
    device = check(done.last, done.place, slots, ids, positions, limits.left, limits.stops)
    q = done.last.shape[0]
    b = 0 if drafts is None else drafts.shape[1]
    w = b + 1 if done.draft_ids.numel() == 0 else done.draft_ids.shape[0] // q + 1
    if drafts is not None and (drafts.dtype != torch.int32 or not drafts.is_contiguous()):
        raise ValueError("drafts are contiguous and int32")
    if raw is None:
        raw = torch.full((q, max(b, 1)), float("inf"), dtype=torch.float32, device=device)
    launch(
        next_rows_kernel, (1,),
        done.last, done.place, done.last if drafts is None else drafts, raw, slots,
        limits.left, limits.stops, limits.least, ids, positions, q, w, b,
        K=limits.stops.shape[1], QP=next_power(q), WP=next_power(w, 2), num_warps=1,
    )  # fmt: skip
