"""Engram: an n-gram memory read by hashing the last tokens (report; architecture notes 5).

Letters: R rows, S streams, D hidden, G n-gram orders (2..max), H hash heads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.models.layers import Numerics, Weights
from deepdraft.ops.elementwise import inverse_rms, sigmoid
from deepdraft.ops.engram_hash import EngramTables, hash_rows


class EngramHash:
    """Token ids to table rows. Runs on the host: ids are known before the step."""

    def __init__(self, args: V41Args, tables: EngramTables, token_map: list[int]) -> None:
        if len(token_map) < args.vocab_size:
            raise ValueError(f"{len(token_map)=} is less than {args.vocab_size=}")
        self.token_map = np.asarray(token_map, dtype=np.int64)
        self.depth = args.engram_max_ngram_size
        self.pad = int(self.token_map[args.engram_pad_token_id])
        self.tables = tables

    def rows(self, history: np.ndarray) -> np.ndarray:
        """history int64 [R, depth] (column s: token s places back, -1 before the start) -> table
        rows int64 [layers, R, G * H] in (order, head) order."""
        ids = np.where(history >= 0, self.token_map[history], self.pad)
        layers = range(self.tables.primes.shape[0])
        return np.stack([hash_rows(self.tables, layer, ids) for layer in layers])


class Engram:
    """The injection before one block."""

    def __init__(self, args: V41Args, weights: Weights, prefix: str, num: Numerics) -> None:
        self.num, self.eps = num, args.rms_norm_eps
        self.streams, self.hidden = args.hc_mult, args.hidden_size
        table = weights.source.packed(f"{prefix}.embed.weight")
        assert table.scales is not None, "Engram rows are E4M3 with E8M0 scales"
        self.values = table.values.view(torch.uint8)
        self.scales = table.scales.view(torch.uint8)
        # A row is the product of 256 E4M3 and 256 E8M0 values: two small lookup tables.
        codes = torch.arange(256, dtype=torch.uint8)
        self.value_of = codes.view(torch.float8_e4m3fn).to(num.dtype)
        self.scale_of = torch.exp2(codes.to(num.dtype) - 127.0)
        self.device = weights.device
        self.wkv = weights.linear(f"{prefix}.wkv.weight")
        self.join = weights.join(f"{prefix}.wkv.weight")
        tables = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        self.own, self.first_row = weights.shards.own_tables(f"{prefix}.embed.weight", tables)
        gate = weights.vector(f"{prefix}.q_weight") * weights.vector(f"{prefix}.k_weight")
        self.gate = gate * self.hidden**-0.5

    def lookup(self, rows: Tensor) -> Tensor:
        """Table rows int64 [R, G * H] -> dequantised and concatenated [R, G * H * row width]."""
        flat = (rows[:, self.own] - self.first_row).reshape(-1)
        values = self.value_of[self.values.index_select(0, flat).int()]
        scales = self.scale_of[self.scales.index_select(0, flat).int()]
        e = values.view(flat.shape[0], scales.shape[1], -1).mul_(scales.unsqueeze(-1))
        return self.num.act(e.view(rows.shape[0], -1)).to(self.device)

    def __call__(self, x: Tensor, rows: Tensor, record: dict[str, Tensor] | None = None) -> Tensor:
        """X [R, S, D] plus what the memory holds for these rows (notes 5.3)."""
        num, s = self.num, self.streams
        e = self.lookup(rows)
        kv = num.act(self.join(torch.mm(num.fp8(e), self.wkv))).view(-1, s + 1, self.hidden)
        key, value = kv[:, :s], kv[:, s:]
        dot = (x * self.gate).mul_(key).sum(-1)
        dot.mul_(inverse_rms(x, self.eps).squeeze(-1)).mul_(inverse_rms(key, self.eps).squeeze(-1))
        gate = sigmoid(dot.sign() * dot.abs().clamp_(min=1e-6).sqrt_())
        if record is not None:
            record.update(emb=e, kv=kv.flatten(1), dot=dot, gate=gate)
        return num.act(torch.addcmul(x, gate.unsqueeze(-1), value))
