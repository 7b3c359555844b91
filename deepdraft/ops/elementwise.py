"""Row-wise operations: norms, gates, rotation, residual mixing. Torch reference.

Every function here gives row i the same bits whatever the number of rows and whatever the other
rows hold. `torch.sigmoid`, `silu`, `softplus` and `logaddexp` do not: their vectorised loops treat
the tail of an array with another formula (docs/numerics.md), so they are composed here from
operations whose bits do not depend on the position in the array.

Letters: R rows, S residual streams, D hidden, H heads, C channels.
"""

import functools
import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., C] over its root mean square, times `weight` [C]. Same dtype as x."""
    y = x * inverse_rms(x, eps)
    return y if weight is None else y.mul_(weight)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(mean(x**2) + eps) ** -0.5 over the last axis, which is kept: [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@functools.cache
def _cached_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _constant(value: float, like: Tensor) -> Tensor:
    """A scalar as a tensor, made once: operations with Python scalars make one at every call."""
    return _cached_constant(value, like.dtype, like.device)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise; saturates to 0 and 1 without NaN."""
    return x.neg().exp_().add_(_constant(1.0, x)).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise."""
    return x / x.neg().exp_().add_(_constant(1.0, x))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + exp(x)), elementwise, without overflow."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


class Rotary:
    """Rotation of the last `rope_dim` of `dim` channels by position (adjacent pairs).

    Angles are position times frequency in `dtype` (the published code uses float32). Rotation of
    x: x * cos + swap(x) * sin, where swap exchanges the members of a pair and sin carries the
    sign; the channels before the rotary part have cos 1 and sin 0.
    """

    def __init__(
        self,
        *,
        dim: int,
        rope_dim: int,
        theta: float,
        yarn: tuple[float, float, float, int] | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`yarn`: (factor, beta_fast, beta_slow, original_max_positions) or None (no YaRN)."""
        exponent = torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim
        freq = 1.0 / (float(theta) ** exponent)
        if yarn is not None:
            freq = yarn_frequencies(freq, rope_dim, theta, *yarn)
        head = torch.zeros(dim - rope_dim, dtype=torch.float64)
        pairs = freq.repeat_interleave(2)
        signs = torch.ones(rope_dim, dtype=torch.float64)
        signs[0::2] = -1.0
        self.freq = torch.cat([head, pairs]).to(device=device, dtype=dtype)
        self.sign = torch.cat([head, signs]).to(device=device, dtype=dtype)
        swap = torch.arange(dim)
        rotary = swap[dim - rope_dim :]
        swap[dim - rope_dim :] = rotary.view(-1, 2).flip(-1).reshape(-1)
        self.swap = swap.to(device)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [R] -> cos, signed sin, each [R, dim]."""
        angle = positions.to(self.freq.dtype).unsqueeze(-1) * self.freq
        return angle.cos(), angle.sin().mul_(self.sign)


def yarn_frequencies(
    freq: Tensor,
    rope_dim: int,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_positions: int,
) -> Tensor:
    """YaRN-interpolated frequencies, float64 [rope_dim / 2] (architecture notes 3.1)."""

    def correction(turns: float) -> float:
        return (
            rope_dim
            * math.log(original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rope_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return freq / factor * ramp + freq * (1.0 - ramp)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, swap: Tensor) -> Tensor:
    """Rotate x [..., dim] by tables that broadcast against it; pass -sin to rotate back."""
    return torch.addcmul(x * cos, x.index_select(-1, swap), sin)


class HyperMix:
    """Coefficients of one sublayer's manifold-constrained hyper-connection (report 2.4.1).

    From streams X [R, S, D]: `pre` [R, 1, S] collapses the streams for the *next* sublayer, `post`
    [R, 1, S] and `comb` [R, S, S] write this sublayer's output back; comb[r, a, b] mixes stream a
    into b.
    """

    def __init__(
        self, fn: Tensor, base: Tensor, scale: Tensor, *, streams: int, iters: int, eps: float
    ) -> None:
        """fn [(2+S)*S, S*D], base [(2+S)*S], scale [3] as published (`hc_*_fn/base/scale`)."""
        s = streams
        self.streams, self.iters = s, iters
        self.fn_t = fn.t().contiguous()
        # The gates are sigmoids: their logits are negated here, once, so that a step needs exp
        # only.
        sign = torch.ones_like(base)
        sign[: 2 * s] = -1.0
        spread = torch.cat([scale[0].expand(s), scale[1].expand(s), scale[2].expand(s * s)])
        self.scale = (spread * sign).contiguous()
        self.base = base * sign
        self.gate_scale = torch.cat([base.new_ones(s), base.new_full((s,), 2.0)])
        self.gate_bias = torch.cat([base.new_full((s,), eps), base.new_zeros(s)])
        eye, ones = torch.eye(s, dtype=base.dtype), torch.ones(s, s, dtype=base.dtype)
        # comb is kept flat [R, S*S]; these give row and column sums spread over the matrix.
        self.row_sum = torch.kron(eye, ones).to(base.device)
        self.col_sum = torch.kron(ones, eye).to(base.device)
        self.eps = base.new_full((s * s,), eps)
        self.one = base.new_ones(())

    def __call__(self, x: Tensor, norm_eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """X [R, S, D] -> pre [R, 1, S], post [R, 1, S], comb [R, S, S]."""
        s = self.streams
        flat = x.view(-1, self.fn_t.shape[0])
        mix = torch.mm(flat, self.fn_t).mul_(inverse_rms(flat, norm_eps))
        gates, comb = torch.addcmul(self.base, mix, self.scale).split((2 * s, s * s), 1)
        gates = gates.exp().add_(self.one).reciprocal_()
        gates = torch.addcmul(self.gate_bias, gates, self.gate_scale)
        pre, post = gates.view(-1, 2, s).split(1, 1)
        comb = comb.view(-1, s, s).softmax(-1).view(-1, s * s).add_(self.eps)
        comb.div_(torch.addmm(self.eps, comb, self.col_sum))
        for _ in range(self.iters - 1):
            comb.div_(torch.addmm(self.eps, comb, self.row_sum))
            comb.div_(torch.addmm(self.eps, comb, self.col_sum))
        return pre, post, comb.view(-1, s, s)


def collapse(x: Tensor, mix: Tensor) -> Tensor:
    """Streams X [R, S, D] to one vector [R, D]: sum over a of mix[r, 0, a] X[r, a]."""
    return torch.bmm(mix, x).squeeze(1)


def expand(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write y [R, D] back into X [R, S, D]: out_b = post_b y + sum over a of comb_ab X_a."""
    written = post.transpose(1, 2) * y.unsqueeze(1)
    return torch.baddbmm(written, comb.transpose(1, 2), x)
