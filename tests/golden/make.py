"""Golden directories of other models, recorded with deepdraft itself.

They show that the replay takes names, sizes and lengths from config and texts, not from set A.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.engine.runner import checked_token_map
from deepdraft.models.csa import Indexer, Span
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.models.state import StatePool
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.proof.golden import hash_table_values
from deepdraft.proof.golden_compare import stored_dtypes
from deepdraft.proof.golden_files import Texts
from deepdraft.proof.golden_run import Inputs, replay, replay_production
from deepdraft.proof.tiny import RandomWeights
from deepdraft.text.tokenizer import Tokenizer

SET_A = Path(__file__).parent / "v41-a"

MIXED = {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 12,
    "max_position_embeddings": 256,
    "compress_ratios": [2, 2, 0, 1, 1, 1, 1, 0],
    "kv_source_layer_ids": [0, 3],
    "index_source_layer_ids": [0, 1, 3, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 10,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 7,
    "engram_layer_ids": [0, 2],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [4, 5],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 3,
    "dspark_num_experts_per_tok": 1,
}
"""A window layer between sources, a source without reuse, memory before layer 0, one drafter layer,
candidate blocks that hold fewer entries than the index takes, window and counts unlike set A's."""

BARE = MIXED | {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 1, 1],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 2],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
    "sliding_window": 8,
}
"""No memory, no drafter, no ratio 2."""


def make_config(text: dict[str, Any]) -> dict[str, Any]:
    """Set A's config.json with these text settings; Engram row counts are derived."""
    config = json.loads((SET_A / "checkpoint" / "config.json").read_text())
    config["text_config"] |= text
    config["text_config"]["rope_scaling"] = {
        **config["text_config"]["rope_scaling"],
        "original_max_position_embeddings": 32,
        "factor": 8,
    }
    sizes = cast(V41Args, SimpleNamespace(**config["text_config"]))
    config["text_config"]["engram_num_embeddings"] = list(engram_tables(sizes).num_embeddings)
    return config


_own_keys = Indexer._keys


def stale_index_keys(self: Indexer, pool: StatePool, span: Span) -> Tensor:
    """`Indexer._keys` with the published defect (notes 11.3): in a step of one token at an even
    position the ratio-2 indexers score against the keys of the last source."""
    # A single row is padded to two.
    if self.ratio != 2 or span.end - span.start > 2 or span.first % 2:
        return _own_keys(self, pool, span)
    wanted = _own_keys(self, pool, span).shape[0]
    last = pool.args.kv_source_layer_ids[-1]
    base = span.state.slot * pool.entries[last]
    return pool.index[last][base : base + wanted]


def record(
    directory: Path, text: dict[str, Any], *, modes: tuple[str, ...] = ("exact", "qsim", "quant")
) -> Path:
    """Writes a checkpoint of random weights and a golden directory around it."""
    config = make_config(text)
    args = parse_args(config)
    write_checkpoint(directory / "checkpoint", config, RandomWeights(args).tensor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SET_A / "checkpoint" / name, directory / "checkpoint")
    checkpoint = Checkpoint.open(directory / "checkpoint")
    token_map = None
    if args.engram_layer_ids:
        token_map = checked_token_map(checkpoint, Tokenizer.load(directory / "checkpoint"))
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 500, (200,), generator=g).tolist()
    texts = Texts(
        prompt=ids[:70],
        prefix=ids[:31],
        prefix_label="31",
        shorts=[ids[70:79], ids[80:89], ids[90:99]],
        short_label="9",
        greedy={},
        next_after_last={},
        replay_greedy=[],
    )
    for mode in modes:
        _record_mode(directory, checkpoint, token_map, texts, mode)
    tokens = {
        "prompt": texts.prompt,
        "prompt31": texts.prefix,
        "short9": texts.shorts,
        "greedy_tokens": texts.greedy,
        "next_after_last": texts.next_after_last,
        "replay_greedy_tokens_exact": texts.replay_greedy,
    }
    (directory / "tokens.json").write_text(json.dumps(tokens))
    tables = {k: v.tolist() for k, (v, _) in hash_table_values(args, token_map).items()}
    (directory / "engram-hash.json").write_text(json.dumps(tables))
    return directory


def greedy_continuation(
    model: DeepseekV41, prompt: list[int], steps: int, mode: str = "full"
) -> list[int]:
    """The likeliest tokens after a prompt: `steps` of them and the one after the last."""
    state = model.new_pool(1, len(prompt) + steps, slack=32).open()
    logits = model.prefill(state, prompt, mode=mode).logits  # type: ignore[arg-type]
    out = []
    for _ in range(steps + 1):
        assert logits is not None
        out.append(int(logits[-1].argmax()))
        if len(out) <= steps:
            logits = model.step([(state, out[-1:])]).logits
    return out


def _record_mode(
    directory: Path, checkpoint: Checkpoint, token_map: Any, texts: Texts, mode: str
) -> None:
    dtype = torch.float64 if mode == "qsim" else torch.float32
    numerics = make_numerics(mode, dtype)
    model = DeepseekV41(checkpoint.args, checkpoint, token_map, numerics=numerics)
    *texts.greedy[mode], texts.next_after_last[mode] = greedy_continuation(model, texts.prompt, 12)
    n = len(texts.prompt)
    inputs = Inputs([5, 20, 33, 70, 79], [n + s for s in range(4)])
    runs = replay(model, texts, mode, inputs).arrays
    del runs["tokens"]
    if mode == "exact":
        steps = greedy_continuation(model, texts.prompt, 5, "encoder")
        texts.replay_greedy[:] = steps[:-1]
        runs |= replay_production(model, texts).arrays
    with patch.object(Indexer, "_keys", stale_index_keys):
        wrong = replay(model, texts, mode, inputs).arrays["logits"]["decode_logits"]
    runs["decode-unmodified"] = {"decode_logits": wrong}
    for stem, arrays in runs.items():
        stored = {}
        for name, value in arrays.items():
            [kind] = stored_dtypes(mode, name, value)
            stored[name] = value.to(kind).contiguous()
            if name.startswith("kv."):
                stored[name] = stored[name][:16].contiguous()
        save_file(stored, directory / f"{stem}-{mode}.safetensors")
