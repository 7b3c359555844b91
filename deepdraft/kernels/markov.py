"""Markov rounds of draft blocks over shortlists, in two launches.

Which draft comes before another is not known, but it is one of the shortlist before it. So the bias
of every token of a shortlist behind every one of the list before is made at once, by many programs;
then one program a sequence goes through its rounds, each of which reads one row of these.

Contract and reference: `deepdraft.ops.markov`. The shortlist of a draft is its best base logits
(`index.select_top`). The noise is that of `sample.pick_tokens` for the same seed and position, so a
draft and the target's pick meet the same. Without a shortlist a round is `embed_rows`, `gemv` and
`sample.pick_rows`.

Letters: Q sequences, B drafts of each, W rows of a sequence in a step, V vocabulary, K shortlist, M
Markov rank, D hidden, S slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.index import select_top
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.runtime import INTERPRET, check, launch, next_power, wait_for_inputs
from deepdraft.kernels.sample import gumbel

SHORTLIST = 256
"""Tokens of a shortlist."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """tokens int32 [Q, B], -1 from the first draft on that could not be chosen; raw float32 [Q, B]:
    confidences; logits float32 [Q, B, K] of the shortlist's tokens, int32 [Q * B, K] (-1: none)."""

    tokens: Tensor
    raw: Tensor
    logits: Tensor
    shortlist: Tensor


@triton.jit
def confidence_sum(hidden_ptr, weight_ptr, D, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + d, mask=d < D, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def markov_pairs_kernel(
    list_ptr, last_ptr, embed_ptr, head_ptr, hidden_ptr, confidence_ptr,
    bias_ptr, own_ptr, fixed_ptr, V, D, K, B,
    TILE: tl.constexpr, M: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the row's shortlist behind each token j before it: biases [K, K], and what j and the row
    have in the draft's confidence."""
    wait_for_inputs(PDL)
    row, from_j, from_k = tl.program_id(0), tl.program_id(1) * SIDE, tl.program_id(2) * SIDE
    q, first = row // B, row % B == 0
    if first & (from_j > 0):
        return  # behind the last token alone
    side, i = tl.arange(0, SIDE), tl.arange(0, 32)
    j, k = from_j + side, from_k + side
    before = tl.load(list_ptr + (row - 1) * K + j, mask=(j < K) & (row % B > 0), other=-1)
    before = tl.where(first, tl.load(last_ptr + q), before)
    embed_at = tl.minimum(tl.maximum(before, 0), V - 1).to(tl.int64) * M
    v = tl.maximum(tl.load(list_ptr + row * K + k, mask=k < K, other=0), 0)
    # Row v of the head lies in groups of 32 columns, TILE rows apart from group to group.
    head_at = ((v // TILE).to(tl.int64) * (M // 32) * TILE + v % TILE) * 32
    bias = tl.zeros((SIDE, SIDE), tl.float32)
    own = tl.zeros((SIDE,), tl.float32)
    for g in tl.static_range(M // 32):
        e = tl.load(embed_ptr + embed_at[:, None] + g * 32 + i[None, :])
        w = tl.load(head_ptr + head_at[None, :] + g * TILE * 32 + i[:, None])
        if INTERPRET:
            bias = tl.dot(e.to(tl.float32), w.to(tl.float32), bias, input_precision="ieee")
        else:
            bias = tl.dot(e, w, bias)
        weight = tl.load(confidence_ptr + D + g * 32 + i)
        own += tl.sum(e.to(tl.float32) * weight[None, :], axis=1)
    at = (row * K + j).to(tl.int64)
    inside = (j < K)[:, None] & (k < K)[None, :]
    tl.store(bias_ptr + at[:, None] * K + k[None, :], bias, mask=inside)
    if from_k == 0:
        tl.store(own_ptr + at, own, mask=j < K)
        if from_j == 0:
            hidden_ptr += row.to(tl.int64) * D
            tl.store(fixed_ptr + row, confidence_sum(hidden_ptr, confidence_ptr, D, BLOCK))


@triton.jit
def markov_kernel(
    base_ptr, list_ptr, bias_ptr, own_ptr, fixed_ptr, place_ptr, slot_ptr, temperature_ptr,
    seed_ptr, token_ptr, raw_ptr, logits_ptr, V, W, K, B, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    q = tl.program_id(0)
    place = tl.load(place_ptr + q)
    slot = tl.maximum(tl.load(slot_ptr + q * W), 0)
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seed_ptr + slot).to(tl.uint64)
    usable = place >= 0
    k = tl.arange(0, KP)
    before = 0  # where the draft before lies in its shortlist
    for b in range(B):
        row = q * B + b
        at = row.to(tl.int64) * K + before
        v = tl.load(list_ptr + row * K + k, mask=k < K, other=-1)
        there = v >= 0
        v = tl.maximum(v, 0)
        logit = tl.load(base_ptr + row.to(tl.int64) * V + v, mask=there, other=float("-inf"))
        logit += tl.load(bias_ptr + at * K + k, mask=there, other=0.0)
        raw = tl.load(fixed_ptr + row) + tl.load(own_ptr + at)
        top = tl.max(tl.where(logit == logit, logit, float("inf")), axis=0)
        usable = usable & (top > float("-inf")) & (top < float("inf"))
        score = logit.to(tl.float64)
        if temperature > 0:
            score = (score - top.to(tl.float64)) / temperature
            score += gumbel(seed, (place + 1 + b).to(tl.uint64), v.to(tl.uint64))
        _, best = tl.max(score, axis=0, return_indices=True)
        before = tl.minimum(best, K - 1)
        token = tl.sum(tl.where(k == best, v, 0), axis=0)
        tl.store(token_ptr + row, tl.where(usable, token, -1))
        tl.store(raw_ptr + row, raw)
        tl.store(logits_ptr + row * K + k, logit, mask=k < K)


@triton.jit
def embed_rows_kernel(ids_ptr, table_ptr, out_ptr, V, M, MP: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    m = tl.arange(0, MP)
    token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), V - 1)
    x = tl.load(table_ptr + token.to(tl.int64) * M + m, mask=m < M, other=0.0)
    tl.store(out_ptr + row * M + m, x, mask=m < M)


# ---- launches ------------------------------------------------------------------------------


def markov_rounds(
    base: Tensor,
    embed: Tensor,
    head: Tiled,
    hidden: Tensor,
    confidence: Tensor,
    last: Tensor,
    place: Tensor,
    slots: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    block: int,
    width: int,
    keep: int = SHORTLIST,
) -> Drafts:
    """Drafts of every sequence (contract: ops.markov.rounds).

    base float32 [>= Q B, V], B = `block` rows of each sequence; embed bfloat16 [V, M]; head
    bfloat16 [V, M] tiled; hidden bfloat16 [>= Q B, D]; confidence float32 [D + M]; last, place
    int32 [Q]: the token before the drafts and its position (-1: no drafts); slots int32 [R]:
    `width` rows of each sequence; temperature float64 [S]; seeds int64 [S]. keep: K.
    """
    given = (base, embed, head.values, hidden, confidence, last, place, slots, temperature, seeds)
    device = check(*given)
    q, vocabulary, rank, size = last.shape[0], base.shape[1], embed.shape[1], hidden.shape[1]
    if base.shape[0] < q * block or hidden.shape[0] < q * block or slots.shape[0] < q * width:
        raise ValueError(f"{base.shape=} and {hidden.shape=} do not hold {q} x {block} drafts")
    if head.kind != "bf16" or (head.rows, head.cols) != (vocabulary, rank) or rank % GROUP:
        raise ValueError(f"the head {head.kind} {head.rows, head.cols} is not {vocabulary, rank}")
    if confidence.shape != (size + rank,) or embed.dtype != torch.bfloat16:
        raise ValueError(f"{confidence.shape=} must be ({size + rank},), embed bfloat16")
    if temperature.dtype != torch.float64 or seeds.dtype != torch.int64:
        raise ValueError("temperatures are float64, seeds int64")
    keep, rows = min(keep, vocabulary), q * block
    reach = torch.full((rows,), vocabulary, dtype=torch.int32, device=device)
    found = select_top(base[:rows], torch.zeros_like(reach), reach, keep, skip=0)
    tokens = torch.empty(q, block, dtype=torch.int32, device=device)
    raw = torch.empty(q, block, dtype=torch.float32, device=device)
    logits = torch.empty(q, block, keep, dtype=torch.float32, device=device)
    bias = torch.empty(rows, keep, keep, dtype=torch.float32, device=device)
    own = torch.empty(rows, keep, dtype=torch.float32, device=device)
    fixed = torch.empty(rows, dtype=torch.float32, device=device)
    side = min(32, next_power(keep, 16))
    parts = -(-keep // side)
    launch(
        markov_pairs_kernel, (rows, parts, parts),
        found.entries, last, embed, head.values, hidden, confidence, bias, own, fixed,
        vocabulary, size, keep, block,
        TILE=head.plan.tile, M=rank, SIDE=side, BLOCK=min(1024, next_power(size)), num_warps=4,
    )  # fmt: skip
    launch(
        markov_kernel, (q,),
        base, found.entries, bias, own, fixed, place, slots, temperature, seeds, tokens, raw,
        logits, vocabulary, width, keep, block, KP=next_power(keep), num_warps=2,
    )  # fmt: skip
    return Drafts(tokens, raw, logits, found.entries)


def embed_rows(ids: Tensor, table: Tensor) -> Tensor:
    """table bfloat16 [V, M] at ids int32 [R]: bfloat16 [R, M]; an id outside counts as the
    nearest."""
    device = check(ids, table)
    rows, (vocabulary, rank) = ids.shape[0], table.shape
    out = torch.empty(rows, rank, dtype=table.dtype, device=device)
    launch(
        embed_rows_kernel, (rows,), ids, table, out, vocabulary, rank,
        MP=next_power(rank), num_warps=1,
    )  # fmt: skip
    return out
