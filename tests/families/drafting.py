"""What the tests of the families' drafters share: texts, drafted against plain, small training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.proof.tiny_write import write_directory
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams
from tests.families.test_lookup import run

SMALL_V4: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "compress_ratios": [0],
    "num_hash_layers": 0,
    "n_routed_experts": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
"""Keys of a V4 configuration that is trained in seconds."""


def text(count: int) -> list[int]:
    return [(i * i * 7 + i * 31) % 500 + 3 for i in range(count)]


def following(count: int, generator: torch.Generator) -> list[int]:
    """A text over 16 tokens in which each follows from the one before."""
    ids = torch.randint(3, 14, (1,), generator=generator).tolist()
    while len(ids) < count:
        ids.append(3 + (4 * ids[-1] + 1) % 11)
    return ids


def check_refined(
    drafter: Any, starts: Any, last: int, drafts: Sequence[int], expected: Tensor
) -> None:
    """Of the first of two sequences: a row of logits for each draft and one more, confidences of
    the likeliest tokens."""
    for i, before in enumerate([last, *drafts]):
        found = drafter.refine(starts, i, [before, 11 + i])
        error = (found.logits[0] - expected[i]).abs().max() / expected[i].abs().max()
        assert float(error) < 1e-10
        best = float(expected[i].softmax(-1).max())
        assert float(found.raw[0].sigmoid()) == pytest.approx(best, abs=1e-6)


def check_drafted_is_plain(
    checkpoint: Checkpoint, *, block_size: int, tokens: int, numerics: str = "exact"
) -> None:
    """Three requests at once, of other lengths, numbers of drafts and temperatures."""
    few = tuple((token, 60.0) for token in (5, 9, 17))
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_ids=tuple(text(20 + 9 * number)),
            max_new_tokens=tokens,
            sampling=SamplingParams(temperature=heat, logit_bias=few, seed=3, logprobs=0),
            speculation=SpeculationParams(num_drafts=number or None),
            reuse=False,
        )
        for number, heat in enumerate((0.0, 0.9, 0.9))
    ]
    found = []
    for drafter in (False, True):
        runner = Runner.from_checkpoint(
            checkpoint, None, numerics=numerics, max_context=128, num_sequences=3, drafter=drafter
        )
        assert runner.block_size == (block_size if drafter else 0)
        answers, stats = run(runner, requests)
        found.append(answers)
        assert (stats["spec_drafts"] > 0) == drafter and runner.num_free == 3
    assert found[0] == found[1]


def train(
    weights: Mapping[str, Tensor], loss: Callable[[], Tensor], *, steps: int, lr: float
) -> None:
    """So many steps of Adam, each on a loss of its own."""
    optimiser = torch.optim.Adam(weights.values(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def stats_of_trained(
    folder: Path,
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    prompt: Sequence[int],
    *,
    tokens: int,
    num_drafts: int | None = None,
) -> dict[str, int]:
    """Counters of a greedy answer, drafted by a checkpoint of these weights."""
    write_directory(folder, config, {name: t.detach() for name, t in weights.items()})
    runner = Runner.from_checkpoint(
        Checkpoint.open(folder), None, max_context=128, num_drafts=num_drafts, drafter=True
    )
    request = GenerateRequest(
        request_id="a",
        prompt_ids=tuple(prompt),
        max_new_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        reuse=False,
    )
    return run(runner, [request])[1]
