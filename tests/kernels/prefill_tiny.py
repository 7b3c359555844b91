"""A model with an encoder of every role, twice: torch reference, and device prefill."""

import dataclasses
import functools

import torch

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.kernels.prefill_attention import AttentionPlan
from deepdraft.kernels.prefill_experts import ExpertPlan
from deepdraft.kernels.prefill_gemm import GemmPlan
from deepdraft.kernels.prefill_index import IndexPlan
from deepdraft.kernels.prefill_streams import StreamPlan
from deepdraft.kernels.prefill_unpacked import PlainPlan
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.v41_device import DevicePool
from deepdraft.models.v41_prefill import DevicePrefill
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.models.v41_weights import ModelWeights, load_weights
from deepdraft.ops.engram_hash import engram_tables
from tests.kernels.interpreter import DEVICE
from tests.step import tiny

VOCABULARY = tiny.VOCABULARY
PLANS = Plans(
    GemmPlan(wide=64, tall=16, groups=2, warps=4, stages=1, band=2),
    ExpertPlan(wide=32, tall=16, groups=2, warps=4, stages=1),
    IndexPlan(rows=2, entries=16, turns=1, held=32),
    AttentionPlan(heads=16, warps=4, stages=1),
    StreamPlan(channels=64, rows=16, part=128, deep=32, stages=1),
    PlainPlan(tall=16, wide=64, deep=128, warps=4, stages=1, band=2, programs=3),
    experts_at_once=3,
)
"""Rows from 1,024 on are unpacked first. Both ways multiply 128 columns a step (few rows take twice
the groups): the interpreter's sums depend on it, the matrix unit's do not."""
UNPACKED = dataclasses.replace(PLANS, plain_rows=8, plain_picks=1)
"""All of them."""


def args() -> V41Args:
    """Encoder: window layer, ratio 2 with Engram, reuse. Decoder: ratio 1 with candidates, reuse,
    restricted indexer."""
    small = dataclasses.replace(
        tiny.args(),
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        index_topk=3,
        engram_layer_ids=(1,),
        dspark_target_layer_ids=(4, 5),
    )
    rows = engram_tables(small).num_embeddings
    return dataclasses.replace(small, engram_num_embeddings=rows)


@functools.cache
def source() -> DummyWeights:
    return DummyWeights(args(), device="cpu", seed=5)


@functools.cache
def weights() -> ModelWeights:
    return load_weights(args(), source(), range(VOCABULARY), device=DEVICE)


@functools.cache
def reference() -> DeepseekV41:
    return DeepseekV41(args(), source(), list(range(VOCABULARY)), numerics="quant")


def make(
    chunk: int = 64, slots: int = 2, max_tokens: int = 96, plans: Plans = PLANS
) -> tuple[DevicePool, DevicePrefill]:
    """Empty sequences and a prefill over them."""
    pool = DevicePool(args(), num_sequences=slots, max_tokens=max_tokens, slack=8, device=DEVICE)
    return pool, DevicePrefill(weights(), pool.caches, chunk=chunk, plans=plans)


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
