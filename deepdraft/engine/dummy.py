"""Random weights of any V4.1 shape, in the published formats: `--load dummy`.

Owns: seeded bytes on the device, scaled so that activations stay finite; what a reduced pool of
experts and short Engram tables make of a config. Knows nothing of: files, kernels.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.names import Entry, tensor_table
from deepdraft.quant import formats

_DEQUANTIZE = {
    "fp8_tile": formats.dequantize_fp8_tile,
    "fp8_row": formats.dequantize_fp8_row,
    "mxfp4": formats.dequantize_mxfp4,
}
_FP8_SCALES = (117, 121)
"""E8M0 bytes of weights: 2**-10 to 2**-7."""
_TABLE_SCALES = (119, 122)


@dataclass(frozen=True, slots=True)
class DummyTensor:
    """A tensor as a checkpoint would store it."""

    values: Tensor
    scales: Tensor | None


def dummy_args(
    args: V41Args,
    *,
    layers: int | None = None,
    expert_pool: int | None = None,
    engram_rows: int | None = None,
) -> V41Args:
    """`args` cut to `layers` layers, `expert_pool` routed experts and `engram_rows` rows a table.

    Every expert of a pool has memory of its own, so a step reads as many different bytes as it
    would of the full set, as long as it picks no more experts than the pool holds.
    """
    changes: dict[str, object] = {}
    if layers is not None and layers < args.num_hidden_layers:
        drafters = args.compress_ratios[args.num_hidden_layers :]
        keep = tuple(i for i in range(layers))
        taps = tuple(range(max(0, layers - len(args.dspark_target_layer_ids)), layers))
        changes.update(
            num_hidden_layers=layers,
            compress_ratios=(*args.compress_ratios[:layers], *drafters),
            kv_source_layer_ids=tuple(i for i in args.kv_source_layer_ids if i in keep),
            index_source_layer_ids=tuple(i for i in args.index_source_layer_ids if i in keep),
            engram_layer_ids=tuple(i for i in args.engram_layer_ids if i in keep),
            dspark_target_layer_ids=taps,
        )
    if expert_pool is not None:
        changes["n_routed_experts"] = min(expert_pool, args.n_routed_experts)
    kept = changes.get("engram_layer_ids", args.engram_layer_ids)
    assert isinstance(kept, tuple)
    rows = [args.engram_num_embeddings[args.engram_layer_ids.index(i)] for i in kept]
    if engram_rows is not None:
        rows = [min(engram_rows, n) for n in rows]
    changes["engram_num_embeddings"] = tuple(rows)
    return dataclasses.replace(args, **changes)  # type: ignore[arg-type]


class DummyWeights:
    """A source of weights: bytes seeded by tensor name."""

    def __init__(self, args: V41Args, *, device: torch.device | str, seed: int = 0) -> None:
        self.table, self.device, self.seed = tensor_table(args), torch.device(device), seed

    def _generator(self, name: str) -> torch.Generator:
        seed = zlib.crc32(f"{self.seed}.{name}".encode())
        return torch.Generator(self.device).manual_seed(seed)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of a tensor, dequantised."""
        entry = self.table[name]
        if entry.format in ("bf16", "f32"):
            return self._plain(entry, name).to(dtype)
        stored = self.packed(name)
        assert stored.scales is not None
        return _DEQUANTIZE[entry.format](stored.values, stored.scales, dtype)

    def packed(self, name: str) -> DummyTensor:
        """Random stored bytes."""
        entry = self.table[name]
        if entry.format in ("bf16", "f32"):
            return DummyTensor(self._plain(entry, name), None)
        generator = self._generator(name)
        codes = self._bytes(entry.shape, 0, 256, generator)
        if entry.format != "mxfp4":
            codes.masked_fill_((codes & 127) == 127, 0)  # no NaN
        assert entry.scale_name is not None
        low, high = _TABLE_SCALES if entry.format == "fp8_row" else _FP8_SCALES
        scales = self._bytes(self.table[entry.scale_name].shape, low, high, generator)
        if entry.format == "fp8_row" and self.device.type == "cuda":
            codes, scales = _pinned(codes), _pinned(scales)
        return DummyTensor(codes, scales)

    def _bytes(
        self, shape: tuple[int, ...], low: int, high: int, generator: torch.Generator
    ) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=self.device, generator=generator
        )

    def _plain(self, entry: Entry, name: str) -> Tensor:
        dtype = torch.bfloat16 if entry.format == "bf16" else torch.float32
        generator = self._generator(name)
        x = torch.randn(entry.shape, dtype=dtype, device=self.device, generator=generator)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return x.mul_(0.1).add_(1.0)
        if len(entry.shape) > 1 and not name.endswith("embed.weight"):
            return x.mul_(entry.shape[-1] ** -0.5)
        return x


def _pinned(t: Tensor) -> Tensor:
    """Moved to pinned host memory."""
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t)
