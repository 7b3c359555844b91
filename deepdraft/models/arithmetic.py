"""Numerics of all families but V4.1: where values are rounded, and maps that round as they ask.

Owns: `Arithmetic` (exact, bf16, fp16, qsim, quant), weights and linear maps under it.
Knows nothing of: which values a family rounds; files beyond the format that a tensor is stored in.

Everything is computed in float32 (float64 as an oracle) and rounded afterwards, value by value, so
that a row's bits depend on that row alone in every mode (docs/numerics.md).

Letters: R rows, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from deepdraft.errors import ConfigError
from deepdraft.models.layers import Weights, WeightSource
from deepdraft.quant.simulate import fake_fp8_groups, fake_mxfp4_group32

NAMES = ("exact", "bf16", "fp16", "qsim", "quant")
QUANTISED = ("qsim", "quant")
_STORED = ("fp8_block", "mxfp4")
_GROUP, _KV_GROUP = 128, 64
"""Values that share a scale: inputs of quantised maps, V4's window and entries."""


def _same(x: Tensor) -> Tensor:
    return x


def _through(half: torch.dtype) -> Callable[[Tensor], Tensor]:
    def rounded(x: Tensor) -> Tensor:
        return x.to(half).to(x.dtype)

    return rounded


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where values are rounded, and to what (docs/families.md, section Numerics)."""

    name: str
    dtype: torch.dtype
    """What is computed in."""
    act: Callable[[Tensor], Tensor] = _same
    """Rounding of activations between operations."""
    fp8: Callable[[Tensor], Tensor] = _same
    """Inputs of maps that are stored in FP8 or FP4."""
    kv: Callable[[Tensor, int], Tensor] | None = None
    """V4's window and entries [R, C], of which the last so many channels stay as they are."""
    index_v32: Callable[[Tensor], Tensor] = _same
    """Index queries and keys of V3.2, rotated: [..., C]."""
    index_v4: Callable[[Tensor], Tensor] = _same

    @staticmethod
    def keep(x: Tensor) -> Tensor:
        """x as it is."""
        return x

    @property
    def quantised(self) -> bool:
        """Whether inputs of quantised maps are quantised, too."""
        return self.name in QUANTISED


def make_arithmetic(
    name: str, dtype: torch.dtype = torch.float32, *, powers: bool = False
) -> Arithmetic:
    """The arithmetic of that name. `powers`: scales of FP8 inputs are powers of two (V3.1, V4)
    instead of any float32 (V3). Raises ConfigError."""
    if name not in NAMES:
        raise ConfigError(f"numerics must be one of {', '.join(NAMES)}, got {name!r}")
    if name not in QUANTISED:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        return Arithmetic(name, dtype, _same if half is None else _through(half))
    act = _through(torch.bfloat16) if name == "quant" else _same

    def fp8(x: Tensor) -> Tensor:
        return fake_fp8_groups(x, _GROUP, powers=powers)

    def kv(x: Tensor, rotary: int) -> Tensor:
        plain = x.shape[-1] - rotary
        rounded = fake_fp8_groups(x[..., :plain], _KV_GROUP, powers=True)
        return torch.cat([rounded, x[..., plain:]], -1)

    return Arithmetic(
        name,
        dtype,
        act,
        fp8,
        kv,
        index_v32=lambda x: fp8(act(hadamard(x))),
        index_v4=lambda x: fake_mxfp4_group32(act(hadamard(x))),
    )


def hadamard(x: Tensor) -> Tensor:
    """x [..., C] times the normalised Hadamard matrix of C = 2**n: by halves, n times."""
    width = x.shape[-1]
    size = 1
    while size < width:
        pairs = x.reshape(*x.shape[:-1], -1, 2, size)
        a, b = pairs.unbind(-2)
        x = torch.stack([a + b, a - b], -2).reshape(x.shape)
        size *= 2
    return x * width**-0.5


def check_numerics(name: str, args: Any, source: WeightSource) -> None:
    """Refuses numerics that a checkpoint has no use for. Raises ConfigError."""
    if name not in QUANTISED:
        return
    table = getattr(source, "table", {})
    if not any(entry.format in _STORED for entry in table.values()):
        raise ConfigError(
            f"numerics {name!r} quantises the inputs of maps that are stored in FP8 or FP4, and "
            f"this {args.family} checkpoint has none; use exact, bf16 or fp16"
        )
    width = getattr(args, "index_head_dim", 0)
    if width and (width & (width - 1) or width % 32):
        raise ConfigError(
            f"numerics {name!r} rotates index keys by a Hadamard matrix and quantises groups of "
            f"32; index_head_dim = {width} must be a power of two from 32 on. Use exact or bf16"
        )


class Map:
    """A linear map, or several with one input side by side: quantised where they are stored so,
    results rounded."""

    def __init__(self, parts: list[tuple[Tensor, bool]], num: Arithmetic) -> None:
        """`parts`: [D, N] each, and whether its input is quantised."""
        self.parts = [
            (torch.cat([w for w, _ in run], 1) if len(run) > 1 else run[0][0], fp8)
            for fp8, run in ((fp8, list(run)) for fp8, run in groupby(parts, key=lambda p: p[1]))
        ]
        self.num, self.act = num, num.act
        self.one = self.parts[0][0] if len(self.parts) == 1 else None
        self.fp8 = num.fp8 if self.parts[0][1] else _same

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, D] -> [R, N]."""
        if self.one is not None:
            return self.act(torch.mm(self.fp8(x), self.one))
        inputs = {True: self.num.fp8(x), False: x}
        return self.act(torch.cat([torch.mm(inputs[fp8], w) for w, fp8 in self.parts], 1))


class FamilyWeights(Weights):
    """Published names in, tensors as an arithmetic holds them out.

    Half precision rounds maps, embeddings and norms. Biases, sinks, position biases and the
    coefficients of residual mixes are held in float32 by every implementation, and are here.
    """

    def __init__(self, source: WeightSource, num: Arithmetic, device: torch.device | str) -> None:
        super().__init__(source, num.dtype, device)
        self.num = num

    def stored_quantised(self, name: str) -> bool:
        """Whether a tensor is stored in FP8 or FP4."""
        entry = getattr(self.source, "table", {}).get(name)
        return entry is not None and entry.format in _STORED

    def vector(self, name: str) -> Tensor:
        """As `Weights.vector`; norms and embeddings are rounded."""
        x = super().vector(name)
        stem = name.removesuffix(".weight")
        rounds = stem != name and stem.endswith(("norm", "embed", "embed_tokens"))
        return self.num.act(x) if rounds else x

    def linear(self, *names: str) -> Tensor:
        """As `Weights.linear`, rounded: for products whose input is never quantised."""
        return self.num.act(super().linear(*names))

    def grouped(self, name: str, groups: int) -> Tensor:
        """As `Weights.grouped`, rounded."""
        return self.num.act(super().grouped(name, groups))

    def exact(self, name: str) -> Tensor:
        """One map [D, N], not rounded."""
        return super().linear(name)

    def map(self, *names: str) -> Map:
        """Maps that share their input."""
        return Map([self._part(name) for name in names], self.num)

    def _part(self, name: str) -> tuple[Tensor, bool]:
        quantised = self.num.quantised and self.stored_quantised(name)
        return (super().linear(name) if quantised else self.linear(name)), quantised

    def expert(self, prefix: str, names: tuple[str, str, str]) -> tuple[Tensor, Tensor, bool]:
        """One gated MLP: gate and up [D, 2 F], down [F, D], and whether inputs are quantised.

        Raises ConfigError where its maps are not stored alike.
        """
        first, second, third = (self._part(f"{prefix}.{n}.weight") for n in names)
        flags = {first[1], second[1], third[1]}
        if len(flags) > 1:
            raise ConfigError(
                f"the maps of {prefix} are stored in different formats; numerics "
                f"{self.num.name!r} needs all of an expert in FP8 or FP4, or none"
            )
        return torch.cat([first[0], second[0]], 1), third[0], first[1]


def scale_powers(args: Any, source: WeightSource) -> bool:
    """Whether scales of FP8 inputs are powers of two: said by the configuration, or so stored."""
    table = getattr(source, "table", {})
    e8m0 = any(e.format == "fp8_block" and _is_e8m0(table, e.scale_name) for e in table.values())
    return args.scale_fmt == "ue8m0" or e8m0


def _is_e8m0(table: Any, name: str | None) -> bool:
    return name in table and table[name].format == "scale"
