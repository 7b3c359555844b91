"""What every model file needs: numerics modes, the source of weights, weight layouts.

Numerics are chosen once, at construction; model code calls `num.act`, `num.fp8` and so on and
never asks for the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from deepdraft.errors import ConfigError
from deepdraft.ops import attention
from deepdraft.parallel.shards import WHOLE, Join, Shards
from deepdraft.quant import formats

NumericsName = Literal["exact", "qsim", "quant"]


class Packed(Protocol):
    """A tensor as stored: raw values, and E8M0 scale bytes where the format has them."""

    @property
    def values(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor | None: ...


class WeightSource(Protocol):
    """Where weights come from, by published tensor name (deepdraft.checkpoint is one)."""

    def tensor(self, name: str, dtype: torch.dtype = ...) -> Tensor:
        """The dequantised tensor, as published [out, in]."""
        ...

    def packed(self, name: str) -> Packed:
        """The stored bytes, not copied where possible."""
        ...


def _same(x: Tensor) -> Tensor:
    return x


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Numerics:
    """Where values are rounded, and to what (architecture notes 7.3, 7.4).

    exact: nowhere. qsim: the FP8 and FP4 quantisers, all else in `dtype`. quant: the quantisers,
    and bf16 wherever the published code holds bf16.
    """

    name: NumericsName
    dtype: torch.dtype
    act: Callable[[Tensor], Tensor]
    """Rounding of activations between operations."""
    fp8: Callable[[Tensor], Tensor]
    """Input of FP8 and FP4 linear maps: E4M3 in groups of 32."""
    window_kv: Callable[[Tensor], Tensor]
    main_kv: Callable[[Tensor], Tensor]
    index: Callable[[Tensor], Tensor]
    """Index queries and keys: MXFP4."""
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def make_numerics(name: str, dtype: torch.dtype = torch.float32) -> Numerics:
    """The numerics of that name, computing in `dtype` (float32, or float64 as an oracle)."""
    if name == "exact":
        return Numerics("exact", dtype, _same, _same, _same, _same, _same, attention.sink_attention)
    if name in ("qsim", "quant"):
        quant = name == "quant"
        return Numerics(
            "quant" if quant else "qsim",
            dtype,
            _bf16 if quant else _same,
            formats.fake_fp8_group32,
            formats.fake_fp8_group32,
            formats.fake_fp4_e4m3_group16,
            formats.fake_mxfp4_group32,
            attention.sink_attention_bf16 if quant else attention.sink_attention,
        )
    raise ConfigError(f"numerics must be exact, qsim or quant, got {name!r}")


class Weights:
    """Published names in, tensors in this model's layout out.

    Linear weights are stored [in, out]: a product x @ w of two or more rows then gives each row
    the same bits whatever the row count, which `F.linear` over [out, in] does not
    (docs/numerics.md).
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str,
        shards: Shards = WHOLE,
    ) -> None:
        """`source` gives this rank's parts where `shards` splits the model."""
        self.source, self.dtype, self.device, self.shards = source, dtype, device, shards

    def join(self, name: str) -> Join:
        """What makes the result of that map whole on every rank; the identity on one."""
        return self.shards.join(name)

    def vector(self, name: str) -> Tensor:
        """A norm weight, bias, sink or table in its published shape."""
        return self.source.tensor(name, self.dtype).to(self.device).contiguous()

    def linear(self, *names: str) -> Tensor:
        """One or several maps that share their input, side by side: [in, out1 + out2 + ...]."""
        parts = [self.source.tensor(name, self.dtype).t() for name in names]
        return torch.cat(parts, dim=1).contiguous().to(self.device)

    def grouped(self, name: str, groups: int) -> Tensor:
        """A block-diagonal map: [groups, in / groups, out / groups] from [out, in / groups]."""
        w = self.source.tensor(name, self.dtype)
        return w.view(groups, -1, w.shape[1]).transpose(1, 2).contiguous().to(self.device)

    def experts(self, prefix: str, count: int) -> tuple[Tensor, Tensor]:
        """Routed experts, then the shared one: w13 [E + 1, in, 2 width], w2 [E + 1, width, in]."""
        names = [f"{prefix}.experts.{e}" for e in range(count)] + [f"{prefix}.shared_experts"]
        w13 = w2 = None
        for e, name in enumerate(names):
            up = self.linear(f"{name}.w1.weight", f"{name}.w3.weight")
            down = self.linear(f"{name}.w2.weight")
            if w13 is None or w2 is None:
                w13 = up.new_empty(len(names), *up.shape)
                w2 = down.new_empty(len(names), *down.shape)
            w13[e], w2[e] = up, down
        assert w13 is not None and w2 is not None
        return w13, w2
