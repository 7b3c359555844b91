"""Choice of experts of a decode step, from router logits, and the list of distinct ones.

Contract and reference: `deepdraft.ops.moe.route` (which computes the logits, too; here they come
from `gemv`) and `moe.expert_list`. Equal scores go to the lower expert. One program a row; of a row
tile's programs the last one makes the list.

Letters: R rows, E experts, K picks, L = 8 K places of a row tile's list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import gemv
from deepdraft.kernels.layout import Tiled
from deepdraft.kernels.moe import ExpertList
from deepdraft.kernels.native import route as native
from deepdraft.kernels.runtime import ROW_TILE, check, launch, next_power, wait_for_inputs

ROUTE_WARPS = 4


@triton.jit
def softplus(x):
    """ln(1 + exp(x)), fp32, to a few units in the last place also where it is tiny.

    ln(1 + e) is 2 artanh(e / (2 + e)) as a series: the fast logarithm of a GPU has no digits left
    near 1.
    """
    e = tl.exp(-tl.abs(x))
    s = tl.div_rn(e, 2.0 + e)
    q = s * s
    series = 1.0 / 15 + q * (1.0 / 17)
    series = 1.0 / 11 + q * (1.0 / 13 + q * series)
    series = 1.0 / 7 + q * (1.0 / 9 + q * series)
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * series))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def router_scores(logits, TEMPERATURE):
    """sqrt(softplus(logits / temperature)), fp32."""
    return tl.sqrt_rn(softplus(tl.div_rn(logits, tl.zeros_like(logits) + TEMPERATURE)))


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, live_ptr, picks_ptr, weights_ptr, E, TEMPERATURE, SCALE,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    e, k = tl.arange(0, EP), tl.arange(0, KP)
    real = e < E
    logits = tl.load(logits_ptr + row * E + e, mask=real, other=0.0)
    scores = router_scores(logits, TEMPERATURE)
    ranked = tl.where(real, scores + tl.load(bias_ptr + e, mask=real, other=0.0), float("-inf"))
    picks = tl.full((KP,), -1, tl.int32)
    chosen = tl.zeros((KP,), tl.float32)
    for number in tl.static_range(K):
        _, best = tl.max(ranked, axis=0, return_indices=True)
        best = tl.minimum(best, E - 1)  # NaN logits must not point beyond the experts
        picks = tl.where(k == number, best, picks)
        score = tl.sum(tl.where(e == best, scores, 0.0), axis=0)
        chosen = tl.where(k == number, score, chosen)
        ranked = tl.where(e == best, float("-inf"), ranked)
    live = tl.load(live_ptr + row) >= 0
    total = tl.sum(chosen, axis=0) + 1e-20
    weights = tl.div_rn(chosen, tl.zeros_like(chosen) + total) * SCALE
    tl.store(picks_ptr + row * K + k, tl.where(live, picks, -1), mask=k < K)
    tl.store(weights_ptr + row * K + k, tl.where(live, weights, 0.0), mask=k < K)


def route(
    logits: Tensor, bias: Tensor, positions: Tensor, *, k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """logits float32 [R, E], bias float32 [E], positions int32 [R] (below 0: the row does not
    count) -> picks int32 [R, K], -1 in rows that do not count, and weights float32 [R, K]."""
    device = check(logits, bias, positions)
    rows, experts = logits.shape
    if not 0 < k <= experts or bias.shape != (experts,) or logits.dtype != torch.float32:
        raise ValueError(f"{k} picks do not fit {logits.shape} {logits.dtype} and {bias.shape}")
    picks = torch.empty(rows, k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=device)
    launch(
        route_kernel, (rows,),
        logits, bias, positions, picks, weights, experts, temperature, scale,
        K=k, KP=next_power(k), EP=next_power(experts), num_warps=1,
    )  # fmt: skip
    return picks, weights


@triton.jit
def list_experts(pick, experts_ptr, slots_ptr, L, KP: tl.constexpr, T: tl.constexpr):
    """The distinct experts of picks int32 [T * KP] (-1: none), in the order of their first pick.
    The row tile's slots hold -1 already."""
    i = tl.arange(0, T * KP)
    same = (pick[:, None] == pick[None, :]) & (pick >= 0)[None, :]
    first_place = tl.min(tl.where(same, i[None, :], T * KP), axis=1)
    is_first = first_place == i
    earlier = tl.sum((is_first[None, :] & (i[None, :] < first_place[:, None])).to(tl.int32), axis=1)
    count = tl.sum(is_first.to(tl.int32), axis=0)
    none = tl.full((T * KP,), -1, tl.int32)
    tl.store(experts_ptr + i, none, mask=(i < L) & (i >= count))
    tl.store(experts_ptr + earlier, pick, mask=is_first)
    tl.store(slots_ptr + earlier * T + i // KP, i % KP, mask=pick >= 0)


@triton.jit
def route_list_kernel(
    logits_ptr, bias_ptr, live_ptr, forced_ptr, picks_ptr, weights_ptr, experts_ptr, slots_ptr,
    arrive_ptr, E, TEMPERATURE, SCALE,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, T: tl.constexpr, FORCED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    row_tile = row // T
    experts_ptr += row_tile * (T * K)
    slots_ptr += row_tile * (T * K) * T
    e, k, t = tl.arange(0, EP), tl.arange(0, KP), tl.arange(0, T)
    # Each row's program empties its part of the list; the last one fills it.
    part = ((row % T) * K + k)[:, None] * T + t[None, :]
    tl.store(slots_ptr + part, tl.full((KP, T), -1, tl.int32), mask=(k < K)[:, None])
    real = e < E
    logits_ptr += row * E
    scores = router_scores(tl.load(logits_ptr + e, mask=real, other=0.0), TEMPERATURE)
    ranked = tl.where(real, scores + tl.load(bias_ptr + e, mask=real, other=0.0), float("-inf"))
    live = tl.load(live_ptr + row) >= 0
    picks = tl.full((KP,), -1, tl.int32)
    for number in tl.static_range(K):
        _, best = tl.max(ranked, axis=0, return_indices=True)
        best = tl.minimum(best, E - 1)  # NaN logits must not point beyond the experts
        picks = tl.where(k == number, best, picks)
        ranked = tl.where(e == best, float("-inf"), ranked)
    # Scores again, of the picks alone: cheaper than finding each among all of them.
    chosen = router_scores(tl.load(logits_ptr + picks, mask=k < K, other=0.0), TEMPERATURE)
    chosen = tl.where(k < K, chosen, 0.0)
    total = tl.sum(chosen, axis=0) + 1e-20
    weights = tl.div_rn(chosen, tl.zeros_like(chosen) + total) * SCALE
    tl.store(picks_ptr + row * K + k, tl.where(live, picks, -1), mask=k < K)
    tl.store(weights_ptr + row * K + k, tl.where(live, weights, 0.0), mask=k < K)
    tl.debug_barrier()
    if tl.atomic_add(arrive_ptr + row_tile, 1, sem="acq_rel") == T - 1:
        tl.store(arrive_ptr + row_tile, 0)
        i = tl.arange(0, T * KP)
        at = (row_tile * T + i // KP) * K + i % KP
        all_ptr = forced_ptr if FORCED else picks_ptr
        pick = tl.load(all_ptr + at, mask=i % KP < K, other=-1, cache_modifier=".cg")
        list_experts(pick, experts_ptr, slots_ptr, T * K, KP, T)


def route_listed(
    logits: Tensor, bias: Tensor, positions: Tensor, arrivals: Tensor, *, k: int, scale: float,
    temperature: float, forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, ExpertList]:  # fmt: skip
    """As `route`, and the list of the distinct experts as `moe.expert_list` makes it.

    8 divides R. arrivals int32, at least R / 8: zero between launches, as `Tiled.arrivals` are.
    forced int32 [R, K], a row's all different: the list is that of these picks (measurements).
    """
    device = check(logits, bias, positions, arrivals)
    rows, experts = logits.shape
    if not 0 < k <= experts or bias.shape != (experts,) or logits.dtype != torch.float32:
        raise ValueError(f"{k} picks do not fit {logits.shape} {logits.dtype} and {bias.shape}")
    if rows % ROW_TILE or (forced is not None and forced.shape != (rows, k)):
        raise ValueError(f"rows come in eights, with as many forced picks: {rows}, {forced}")
    picks = torch.empty(rows, k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=device)
    tiles, places = rows // ROW_TILE, ROW_TILE * k
    if arrivals.numel() < tiles:
        raise ValueError(f"{rows} rows need {tiles} arrival counters, got {arrivals.numel()}")
    listed = torch.empty(tiles, places, dtype=torch.int32, device=device)
    slots = torch.empty(tiles, places, ROW_TILE, dtype=torch.int32, device=device)
    launch(
        route_list_kernel, (rows,),
        logits, bias, positions, picks if forced is None else forced, picks, weights, listed,
        slots, arrivals, experts, temperature, scale,
        K=k, KP=next_power(k), EP=next_power(experts), T=ROW_TILE, FORCED=forced is not None,
        num_warps=ROUTE_WARPS,
    )  # fmt: skip
    return picks, weights, ExpertList(listed, slots)


def route_rows(
    v: Tensor, gate: Tiled, bias: Tensor, positions: Tensor, *, k: int, scale: float,
    temperature: float, forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, ExpertList]:  # fmt: skip
    """`route_listed` from the router's input v bfloat16 [R, D] and the router [E, D]."""
    if native.enabled(v.device) and native.fits(gate, k):
        check(v, gate.values, bias, positions, *(() if forced is None else (forced,)))
        rows, width = v.shape
        if rows % ROW_TILE or width != gate.cols or v.dtype != torch.bfloat16:
            raise ValueError(f"{v.shape} {v.dtype} are no 8 n rows of the router's {gate.cols}")
        if bias.shape != (gate.rows,) or not 0 < k <= gate.rows:
            raise ValueError(f"{k} picks and {bias.shape=} do not fit {gate.rows} experts")
        picks, weights, listed, slots = native.route(
            v, gate, bias, positions, forced, k=k, scale=scale, temperature=temperature
        )
        return picks, weights, ExpertList(listed, slots)
    logits = gemv(v, gate, dtype=torch.float32)
    return route_listed(
        logits, bias, positions, gate.arrivals, k=k, scale=scale, temperature=temperature,
        forced=forced,
    )  # fmt: skip
