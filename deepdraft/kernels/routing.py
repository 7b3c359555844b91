"""Choice of experts of a decode step, from router logits.

Contract and reference: `deepdraft.ops.moe.route` (which computes the logits, too; here they come
from `gemv`). Equal scores go to the lower expert. One program a row.

Letters: R rows, E experts, K picks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs


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
def route_kernel(
    logits_ptr, bias_ptr, live_ptr, picks_ptr, weights_ptr, E, TEMPERATURE, SCALE,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    e, k = tl.arange(0, EP), tl.arange(0, KP)
    real = e < E
    logits = tl.load(logits_ptr + row * E + e, mask=real, other=0.0)
    scores = tl.sqrt_rn(softplus(tl.div_rn(logits, tl.zeros_like(logits) + TEMPERATURE)))
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
