"""The small fused pieces of the trainable model: mHC, norms, rotation, SwiGLU, sink softmax.

Owns: pure tensor functions, each optionally compiled on its own (`set_compiled`); every function
runs its statistics in float32 (float64 for float64 input) and returns the input's dtype.
Knows nothing of: parameters, layers, masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPILED = False
_MIN_ELEMENTS = 0


def set_compiled(on: bool, min_elements: int | None = None) -> None:
    """Use torch.compile for calls on tensors of at least `min_elements`, or eager calls only."""
    global _COMPILED, _MIN_ELEMENTS
    _COMPILED = on
    if min_elements is not None:
        _MIN_ELEMENTS = min_elements


def is_compiled() -> bool:
    """Whether the pieces are compiled."""
    return _COMPILED


def min_elements() -> int:
    """The size from which calls are compiled."""
    return _MIN_ELEMENTS


def _large(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.numel() >= _MIN_ELEMENTS for x in args)


class Piece:
    """A function that can run eagerly or compiled; one whose compilation fails stays eager."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.eager = fn
        self._compiled: Callable[..., Any] | None = None
        self._broken = False
        self.__name__ = fn.__name__

    def __call__(self, *args: Any) -> Any:
        if not _COMPILED or not _large(args):
            return self.eager(*args)
        if self._broken:
            return self.eager(*args)
        if self._compiled is None:
            self._compiled = torch.compile(self.eager, dynamic=False)
        try:
            return self._compiled(*args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as e:
            self._broken = True
            print(f"{self.__name__} runs eagerly: {type(e).__name__}: {str(e)[:300]}", flush=True)
            return self.eager(*args)


def acc(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis with weight."""
    f = acc(x)
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype)


rms_norm = rms


@Piece
def collapse_norm(streams: Tensor, mix: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMS(sum_a mix_a X_a): streams [.., n, d], mix [.., n] -> [.., d]."""
    u = (acc(streams) * mix[..., None]).sum(-2).to(streams.dtype)
    return rms(u, w, eps)


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """sum_a mix_a X_a."""
    return (acc(streams) * mix[..., None]).sum(-2).to(streams.dtype)


@Piece
def expand_fused(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_b y + sum_a C_ab X_a, unrolled over a (good when fused)."""
    f = acc(streams)
    out = post[..., None] * acc(y)[..., None, :]
    for a in range(streams.shape[-2]):
        out = out + comb[..., a, :, None] * f[..., a, None, :]
    return out.to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_b y + sum_a C_ab X_a -> streams."""
    if _COMPILED and _large((streams,)):
        return expand_fused(y, streams, post, comb)
    mixed = comb.transpose(-1, -2) @ acc(streams)
    return torch.addcmul(mixed, post[..., None], acc(y)[..., None, :]).to(streams.dtype)


@Piece
def mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients (architecture 2.2): pre [.., n], post [.., n], comb [.., n, n]."""
    n = streams.shape[-2]
    x = acc(streams.flatten(-2))
    m = (x @ fn.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20)
    pre = torch.sigmoid(scale[0] * m[..., :n] + base[:n]) + eps
    post = 2 * torch.sigmoid(scale[1] * m[..., n : 2 * n] + base[n : 2 * n])
    c = torch.softmax((scale[2] * m[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n)), -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return pre, post, c


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Adjacent-pair rotation of the last 2*k channels; cos, sin [.., k] broadcast against x."""
    k2 = 2 * cos.shape[-1]
    f = acc(x[..., -k2:]).unflatten(-1, (-1, 2))
    a, b = f[..., 0], f[..., 1]
    r = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-k2], r), -1)


@Piece
def swiglu(h: Tensor, weight: Tensor, limit: float) -> Tensor:
    """h [.., 2, E, I] (gate, up), weight [.., E] -> w_e silu(min(gate)) clip(up) [.., E, I]."""
    a = acc(h[..., 0, :, :]).clamp(max=limit)
    b = acc(h[..., 1, :, :]).clamp(-limit, limit)
    return (torch.nn.functional.silu(a) * b * weight[..., None]).to(h.dtype)


@Piece
def engram_inject(streams: Tensor, kv: Tensor, qw: Tensor, kw: Tensor) -> Tensor:
    """Architecture 5.3: streams [.., n, d], kv [.., n + 1, d] -> streams."""
    n, d = streams.shape[-2:]
    x, key, val = acc(streams), acc(kv[..., :n, :]), acc(kv[..., n, :])
    dot = (x * qw * kw * key).sum(-1) * d**-0.5
    dot = (
        dot * torch.rsqrt(x.square().mean(-1) + 1e-20) * torch.rsqrt(key.square().mean(-1) + 1e-20)
    )
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    return (x + gate[..., None] * val[..., None, :]).to(streams.dtype)


@Piece
def _sink_forward(
    sw: Tensor, sc: Tensor | None, mw: Tensor, mc: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    ninf = float("-inf")
    zw = acc(sw).masked_fill(~mw[:, :, None, :], ninf)
    top = torch.maximum(zw.amax(-1), sink)
    if sc is not None and mc is not None:
        zc = acc(sc).masked_fill(~mc[:, :, None, :], ninf)
        top = torch.maximum(top, zc.amax(-1))
        ew, ec = torch.exp(zw - top[..., None]), torch.exp(zc - top[..., None])
        es = torch.exp(sink - top)
        inv = 1 / (ew.sum(-1) + ec.sum(-1) + es)
        return (ew * inv[..., None]).to(sw.dtype), (ec * inv[..., None]).to(sc.dtype), es * inv
    ew, es = torch.exp(zw - top[..., None]), torch.exp(sink - top)
    inv = 1 / (ew.sum(-1) + es)
    return (ew * inv[..., None]).to(sw.dtype), None, es * inv


@Piece
def _sink_backward(
    pw: Tensor, pc: Tensor | None, ps: Tensor, dw: Tensor, dc: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    fw, gw = acc(pw), acc(dw)
    dot = (fw * gw).sum(-1)
    if pc is not None and dc is not None:
        fc, gc = acc(pc), acc(dc)
        dot = dot + (fc * gc).sum(-1)
        dsc = (fc * (gc - dot[..., None])).to(pc.dtype)
    else:
        dsc = None
    return (fw * (gw - dot[..., None])).to(pw.dtype), dsc, -(ps * dot).sum((0, 1))


class SinkSoftmax(torch.autograd.Function):
    """One softmax over window and compressed scores with a learned sink in the denominator.

    Scores [B, T, H, K]; masks [B, T, K] (True = visible); sink [H]. Returns probabilities.
    """

    @staticmethod
    def forward(ctx, sw, sc, mw, mc, sink):  # type: ignore[override]
        pw, pc, ps = _sink_forward(sw, sc, mw, mc, sink)
        ctx.save_for_backward(pw, pc, ps)
        return pw, pc

    @staticmethod
    def backward(ctx, dw, dc):  # type: ignore[override]
        pw, pc, ps = ctx.saved_tensors
        dsw, dsc, dsink = _sink_backward(pw, pc, ps, dw, dc)
        return dsw, dsc, None, None, dsink
