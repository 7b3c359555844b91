"""A tiny V4.1 model with random weights, for checks on any machine.

Owns: sizes that make every layer role, the window wrap and both pruning levels occur within 200
tokens.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.ops.engram_hash import engram_tables


def tiny_args() -> V41Args:
    """8 layers of width 64: window 16, index top-16, candidate blocks 6 x 4, vocabulary 256."""
    args = V41Args(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        swiglu_limit=2.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=1024,
        rope_theta=10000,
        rope_factor=16,
        rope_beta_fast=32,
        rope_beta_slow=1,
        rope_original_max_positions=64,
        compress_rope_theta=160000,
        n_routed_experts=12,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        sliding_window=16,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(1, 3, 4),
        index_source_layer_ids=(1, 3, 4, 6),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        candidate_source_layer_id=4,
        candidate_topk_blocks=6,
        candidate_block_size=4,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=(),
        engram_max_ngram_size=4,
        engram_vocab_size=97,
        engram_n_heads=4,
        engram_head_dim=32,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=256,
        num_nextn_predict_layers=2,
        dspark_block_size=5,
        dspark_noise_token_id=3,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=32,
        dspark_n_routed_experts=6,
        dspark_num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=None,
    )
    return dataclasses.replace(args, engram_num_embeddings=engram_tables(args).num_embeddings)


@dataclass(frozen=True, slots=True)
class RawRows:
    """An Engram table as stored."""

    values: Tensor
    scales: Tensor | None
    format: str


class RandomWeights:
    """A source of weights: seeded by name, scaled so that activations stay near one."""

    def __init__(self, args: V41Args, seed: int = 0) -> None:
        self.table, self.seed = tensor_table(args), seed

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}.{name}".encode()))

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random values of the named tensor, in its dequantised shape."""
        entry = self.table[name]
        shape = list(entry.shape)
        if entry.format == "mxfp4":
            shape[-1] *= 2
        x = torch.randn(shape, generator=self._generator(name), dtype=torch.float64)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            x = 1.0 + 0.1 * x
        elif len(shape) > 1:
            x = x * shape[-1] ** -0.5
        if name.endswith("embed.weight"):
            x = x * shape[-1] ** 0.5
        return x.to(dtype)

    def packed(self, name: str) -> RawRows:
        """Random stored bytes of an Engram table: finite E4M3 codes, scales near 2**-6."""
        rows, width = self.table[name].shape
        g = self._generator(name)
        codes = torch.randint(0, 256, (rows, width), generator=g, dtype=torch.int32)
        codes = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8)
        scales = torch.randint(120, 123, (rows, width // 32), generator=g, dtype=torch.int32)
        return RawRows(codes, scales.to(torch.uint8), "fp8_row")
