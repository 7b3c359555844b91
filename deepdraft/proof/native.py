"""The native engine as `doctor` and `parity` run it: a model, one text, what its layers did.

Owns: loading a model from any source of weights, the text that reaches what only long texts reach.
Knows nothing of: checks, references.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from deepdraft.arch import V41Args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import ConfigError
from deepdraft.models import model_class
from deepdraft.models.layers import WeightSource
from deepdraft.text.tokenizer import Tokenizer, engram_token_map

_MOST_TOKENS = 768
_SEED = 20_261
_TEXTS = 6
_TIE = 2e-6
"""Relative gap of scores below which float32 does not decide."""


def load_model(
    checkpoint: Checkpoint,
    args: Any,
    source: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    numerics: str = "exact",
) -> Any:
    """A model of `args` with the weights of `source`; `checkpoint` gives the tokenizer where a
    family hashes tokens. Raises CheckpointError and ConfigError."""
    token_map = None
    if isinstance(args, V41Args):
        token_map = engram_token_map(Tokenizer.load(checkpoint.path))
    return model_class(args)(args, source, token_map, dtype=dtype, numerics=numerics)


def half_numerics(args: Any, dtype: str) -> str:
    """The native numerics that a half-precision engine is compared with. Raises ConfigError."""
    if not isinstance(args, V41Args):
        return {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    if dtype == "bfloat16":
        return "quant"
    raise ConfigError("DeepSeek-V4.1 is published for bfloat16; leave --dtype float16 out")


def reach(args: Any) -> dict[str, int]:
    """Lengths that a text must pass to show what only long texts show, by their name."""
    lengths: dict[str, int] = {}
    for name in ("rope", "compress_rope"):
        rope = getattr(args, name, None)
        if rope is not None and rope.original_max_positions:
            lengths["original context"] = 3 * rope.original_max_positions
    if isinstance(args, V41Args):
        lengths["original context"] = 3 * args.rope_original_max_positions
        entries = args.candidate_topk_blocks * args.candidate_block_size
        lengths["candidate blocks"] = 2 * entries * max(args.compress_ratios)
    if window := getattr(args, "sliding_window", 0):
        lengths["window"] = 2 * window
    if topk := getattr(args, "index_topk", 0):
        ratio = getattr(args, "csa_ratio", 1)
        if isinstance(args, V41Args):
            ratio = max(args.compress_ratios)
        lengths["index top-k"] = 3 * topk * ratio
    if hca := getattr(args, "hca_ratio", 0):
        lengths["compressed entries"] = 2 * hca + 8
    return lengths


def probe_length(args: Any, *, most: int = _MOST_TOKENS, leave: int = 0) -> int:
    """Tokens of a text that passes every length of `reach` that is affordable."""
    wanted = max(reach(args).values(), default=0)
    return max(2, min(max(wanted, 96), most, args.max_position_embeddings - leave))


def decided_text(checkpoint: Checkpoint, count: int) -> list[int]:
    """A `probe_text` on which no choice of the indexer is a tie, cut off before the first tie if
    there is no such text: where scores are equal, two right engines choose differently."""
    args = checkpoint.args
    text = probe_text(args, count)
    if not getattr(args, "index_topk", 0):
        return text
    model = load_model(checkpoint, args, checkpoint)
    best: list[int] = []
    for seed in range(_TEXTS):
        ids = probe_text(args, count, seed)
        ids = ids[: _first_tie(model, ids, args.index_topk)]
        best = max(best, ids, key=len)
        if len(best) == count:
            break
    return best


def _first_tie(model: Any, ids: list[int], topk: int) -> int:
    """First position at which the last index entry chosen and the first one left out are equal, as
    far as float32 can tell; the text's length if there is none."""
    first = len(ids)
    sequence = model.new_pool(1, len(ids), slack=len(ids)).open()
    record: dict[str, dict[str, torch.Tensor]] = {}
    model.step([(sequence, ids)], record=record)
    for note in record.values():
        scores = note.get("index_scores")
        if scores is None or scores.shape[-1] <= topk:
            continue
        best = scores.topk(topk + 1, -1).values
        size = torch.where(scores.isfinite(), scores, 0.0).abs().amax(-1)
        gap = (best[:, -2] - best[:, -1]) / size.clamp_min(1e-30)
        ties = (gap < _TIE).nonzero()  # NaN, where both are out of reach, is no tie
        if len(ties):
            first = min(first, int(ties[0]))
    return max(first, 2)


def probe_text(args: Any, count: int, seed: int = 0) -> list[int]:
    """Token ids from a fixed generator: ordinary tokens, with repeats at all distances."""
    rng = random.Random(_SEED + seed)
    low = min(3, args.vocab_size - 1)
    ids = [rng.randrange(low, args.vocab_size) for _ in range(count)]
    for at in range(8, count, 5):
        ids[at] = ids[rng.randrange(0, at)]
    return ids
