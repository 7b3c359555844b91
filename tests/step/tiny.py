"""The smallest model in which every layer role occurs, twice: torch reference and device step."""

import dataclasses
import functools

import torch

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.v41_buffers import DeviceCaches
from deepdraft.models.v41_step import DeviceStep
from deepdraft.models.v41_weights import ModelWeights, load_weights
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.proof.tiny import tiny_args
from tests.kernels.interpreter import DEVICE

VOCABULARY = 64


def args() -> V41Args:
    """Window layer, ratio 2, ratio 1 with candidates, reuse with Engram, restricted indexer."""
    small = dataclasses.replace(
        tiny_args(),
        vocab_size=VOCABULARY,
        num_hidden_layers=5,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=64,
        compress_ratios=(0, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 4),
        candidate_source_layer_id=2,
        index_n_heads=2,
        index_topk=6,
        candidate_topk_blocks=2,
        sliding_window=8,
        n_routed_experts=4,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        engram_layer_ids=(3,),
        engram_compressed_vocab_size=VOCABULARY,
        engram_n_heads=2,
        num_nextn_predict_layers=1,
        dspark_block_size=3,
        dspark_target_layer_ids=(3, 4),
        dspark_n_routed_experts=3,
    )
    rows = engram_tables(small).num_embeddings
    return dataclasses.replace(small, engram_num_embeddings=rows)


@functools.cache
def source() -> DummyWeights:
    return DummyWeights(args(), device="cpu", seed=3)


@functools.cache
def weights() -> ModelWeights:
    return load_weights(args(), source(), range(VOCABULARY), device=DEVICE)


@functools.cache
def reference() -> DeepseekV41:
    return DeepseekV41(args(), source(), list(range(VOCABULARY)), numerics="quant")


def step(slots: int = 2, max_tokens: int = 64) -> DeviceStep:
    """A step over empty caches."""
    caches = DeviceCaches(
        args(), num_sequences=slots, max_tokens=max_tokens, spare=8, device=DEVICE
    )
    return DeviceStep(weights(), caches)


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
