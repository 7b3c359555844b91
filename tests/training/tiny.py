"""A tiny model and corpus for the training tests."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from deepdraft.arch import V41Args
from training.spec import demo_args, with_engram_rows


def tiny_args() -> V41Args:
    """All layer roles at the smallest sizes the storage formats allow."""
    base = demo_args(vocab_size=96, compressed_vocab=90, noise_token_id=3, image_token_id=None)
    return with_engram_rows(
        replace(
            base,
            hidden_size=64,
            moe_intermediate_size=32,
            num_attention_heads=2,
            head_dim=32,
            qk_rope_head_dim=16,
            q_lora_rank=32,
            o_lora_rank=32,
            n_routed_experts=4,
            sliding_window=16,
            index_topk=12,
            candidate_topk_blocks=3,
            candidate_block_size=4,
            engram_vocab_size=31,
            engram_n_heads=2,
            dspark_n_routed_experts=2,
            dspark_num_experts_per_tok=1,
            dspark_markov_rank=16,
            max_position_embeddings=256,
        )
    )


def tiny_corpus(seed: int = 0) -> SimpleNamespace:
    """Learnable text: each document counts upwards from a random start."""
    rng = np.random.default_rng(seed)
    docs = []
    for _ in range(80):
        n = int(rng.integers(5, 150))
        body = (rng.integers(0, 80) + np.arange(n)) % 80 + 10
        docs.append(np.concatenate([[0], body, [1]]))
    starts = np.cumsum([0] + [len(d) for d in docs])
    tokens = np.concatenate(docs).astype(np.uint16)
    cut1, cut2 = int(starts[40]), int(starts[70])
    sources = [
        {"name": "a", "split": "train", "weight": 0.7, "start": 0, "end": cut1},
        {"name": "b", "split": "train", "weight": 0.3, "start": cut1, "end": cut2},
        {"name": "a", "split": "val", "weight": 1.0, "start": cut2, "end": len(tokens)},
    ]
    return SimpleNamespace(tokens=tokens, doc_starts=starts[:-1].astype(np.uint32), sources=sources)
