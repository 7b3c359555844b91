"""Rotary tables of all families: which channels turn, how they pair, how fast.

Owns: frequencies under each scaling, and the layout of pairs. Rotation itself is
`elementwise.rotate`. Knows nothing of: models, caches.

Letters: R rows, C channels.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from deepdraft.arch import Rope
from deepdraft.ops.elementwise import yarn_frequencies

Pairing = Literal["adjacent", "half"]


def frequencies(rope: Rope, width: int) -> Tensor:
    """Radians per position of each pair, float64 [width / 2] (docs/families.md)."""
    freq = 1.0 / rope.theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(freq, rope)
    if rope.yarn is not None:
        return yarn_frequencies(freq, width, rope.theta, *rope.yarn)
    return freq


def _llama3(freq: Tensor, rope: Rope) -> Tensor:
    """Slow pairs are stretched, fast ones kept, those between blended by turns in the context."""
    turns = rope.original_max_positions * freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return freq / rope.factor * (1.0 - keep) + freq * keep


class RopeTable:
    """Rotation of `width` of `dim` channels, from channel `start` on, by position.

    adjacent: channels 2k and 2k + 1 are a pair; half: channels k and k + width / 2.
    """

    def __init__(
        self,
        rope: Rope,
        *,
        dim: int,
        start: int,
        width: int,
        pairing: Pairing,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        half = width // 2
        pair = torch.arange(half)
        first, second = (2 * pair, 2 * pair + 1) if pairing == "adjacent" else (pair, pair + half)
        first, second = first + start, second + start
        freq = torch.zeros(dim, dtype=torch.float64)
        sign, gain = torch.zeros_like(freq), torch.ones_like(freq)
        swap = torch.arange(dim)
        freq[first] = freq[second] = frequencies(rope, width)
        sign[first], sign[second] = -rope.attention_factor, rope.attention_factor
        gain[first] = gain[second] = rope.attention_factor
        swap[first], swap[second] = second, first
        self.freq, self.sign, self.gain = (t.to(device, dtype) for t in (freq, sign, gain))
        self.swap = swap.to(device)
        self._scaled = rope.attention_factor != 1.0

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """positions [R] -> cos, signed sin, each [R, C], and the channel that each pairs with;
        arguments of `elementwise.rotate`."""
        angle = positions.to(self.freq.dtype).unsqueeze(-1) * self.freq
        cos, sin = angle.cos(), angle.sin().mul_(self.sign)
        return (cos.mul_(self.gain) if self._scaled else cos), sin, self.swap
