"""Golden data of the families before V4.1: logits of one prompt and of its greedy continuation.

Owns: the format (checkpoint/, tokens.json, logits.safetensors) and its checks.
Knows nothing of: printing, V4.1's modes and arrays.

A directory passes where an independent computation recorded the same logits, and where our own
prefill, steps and odd chunks give one another's bits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.errors import CheckpointError
from deepdraft.models import model_class
from deepdraft.proof import golden_compare as compare
from deepdraft.proof.golden_compare import Outcome
from deepdraft.proof.golden_files import read_arrays, read_ids, read_json

_LOGITS_FILE = "logits.safetensors"
_SLACK, _CHUNK = 32, 7


def is_family_directory(directory: Path) -> bool:
    """Whether the directory's checkpoint is of a family before V4.1."""
    config = directory / "checkpoint" / "config.json"
    return config.is_file() and read_config(config).get("model_type") != "deepseek_v41"


def check_family(directory: Path) -> tuple[list[Outcome], dict[str, float]]:
    """Outcomes, and seconds by mode. CheckpointError or ConfigError where it is damaged."""
    start = time.perf_counter()
    checkpoint = Checkpoint.open(directory / "checkpoint")
    args = checkpoint.args
    tokens = directory / "tokens.json"
    data = read_json(tokens)
    prompt = read_ids(data.get("prompt"), "prompt", args, tokens)
    greedy = read_ids(data.get("greedy_tokens"), "greedy_tokens", args, tokens)
    if len(prompt) + len(greedy) > args.max_position_embeddings:
        raise CheckpointError(
            f"{tokens.name}: {len(prompt) + len(greedy)} tokens of text, but the model's positions "
            f"end at {args.max_position_embeddings} (max_position_embeddings)"
        )
    recorded = read_arrays(directory / _LOGITS_FILE)
    if recorded is None:
        raise CheckpointError(
            f"{directory} has no {_LOGITS_FILE}, which data of a {args.family} model consists of"
        )
    model = model_class(args)(args, checkpoint)
    return _check(model, prompt, greedy, recorded), {"exact": time.perf_counter() - start}


def _check(
    model: Any, prompt: list[int], greedy: list[int], recorded: dict[str, Tensor]
) -> list[Outcome]:
    text = [*prompt, *greedy]
    pool = model.new_pool(3, len(text), slack=_SLACK)
    stepped, whole, odd = pool.open(), pool.open(), pool.open()
    first = model.prefill(stepped, prompt, logits="all").logits
    steps = [model.step([(stepped, [token])]).logits for token in greedy]
    ours = {
        "prompt_logits": first,
        "decode_logits": torch.cat(steps),
        "oneshot_logits": model.prefill(whole, text, logits="all").logits,
    }
    where, rule = ("exact", "logits"), compare.within_rows(compare.EXACT_REL)
    outcomes = []
    for name in sorted(ours.keys() | recorded.keys()):
        if name not in ours or name not in recorded:
            note = "missing in the file" if name in ours else "not an array of this format"
            outcomes.append(Outcome(*where, name, "fail", "structure", note=note))
        else:
            outcomes.append(compare.check(*where, name, ours[name], recorded[name], rule))
    # Each is the argmax after the tokens that were recorded before it, not after our own choices.
    best = torch.cat([first[-1:], ours["decode_logits"][:-1]]).argmax(-1)
    outcomes.append(
        compare.check(
            "exact", "tokens", "greedy_tokens", best, torch.tensor(greedy), compare.identical
        )
    )
    chunks = [
        model.step([(odd, text[at : at + _CHUNK])]).logits for at in range(0, len(text), _CHUNK)
    ]
    stepwise = torch.cat([first, ours["decode_logits"]])
    for name, other in (("prefill", ours["oneshot_logits"]), ("chunks", torch.cat(chunks))):
        label = f"{name} of the text, bits"
        outcomes.append(
            compare.check("exact", "cutting", label, other, stepwise, compare.identical)
        )
    return outcomes
