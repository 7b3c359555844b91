"""Families without a drafter draft from the text itself: the same text, in fewer steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.config import EngineConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.load import load_engine
from deepdraft.engine.runner import LOOKUP_DRAFTS, Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.spec.ngram import LONGEST, SHORTEST, History
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams

KINDS = ("llama", "v2", "v3", "v32", "v4")
tokens = st.integers(0, 3)


def slow(text: Sequence[int], most: int) -> tuple[list[int], int]:
    """The definition, place by place: `text` ends in the last token."""
    n = len(text) - 1
    best, length = -1, 0
    for j in range(n):
        match = 0
        while match < LONGEST and match <= j and text[j - match] == text[n - match]:
            match += 1
        if match >= SHORTEST and match >= length:
            best, length = j, match
    if best < 0:
        return [], 0
    whole = list(text)
    for i in range(most):
        whole.append(whole[best + 1 + i])
    return whole[n + 1 :], length


@given(st.lists(tokens, min_size=1, max_size=60), st.integers(1, 9))
def test_the_search_is_its_definition(text: list[int], most: int) -> None:
    history = History()
    for end in range(len(text)):  # as in use: it grows, and is asked at every length
        history.update(text[:end])
        found, match = history.propose(text[end], most)
        assert (found, match) == slow(text[: end + 1], most)
    history.update([])  # taken back and started again
    history.update([5, 6, 5])
    assert history.propose(6, 2)[0] == [5, 6]


def run(runner: Runner, requests: list[GenerateRequest]) -> tuple[list[Any], dict[str, int]]:
    engine = Engine(runner, max_running=4, speculation=Speculation())
    engine.start()
    try:
        streams = [engine.generate(request) for request in requests]
        answers = []
        for stream in streams:
            ids: list[int] = []
            marks: list[float] = []
            for event in stream:
                assert event.finish_reason != "error", event.error
                ids += event.token_ids
                marks += [entry.logprob for entry in event.logprobs or ()]
            answers.append((ids, marks))
        return answers, engine.stats()
    finally:
        engine.close()


def num_accepted(stats: dict[str, int]) -> int:
    return sum(k * stats.get(f"spec_accepted_{k}", 0) for k in range(1, LOOKUP_DRAFTS + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_is_plain(kind: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "m", kind))
    loop = [5, 9, 17, 33, 65, 129, 257, 7, 11] * 6
    few = tuple((token, 60.0) for token in (5, 9, 17))  # so that pairs of tokens come again
    requests = [
        GenerateRequest(
            request_id=f"{temperature}-{rule}",
            prompt_ids=tuple([3, *loop[: 40 + number]]),
            max_new_tokens=40,
            sampling=SamplingParams(temperature=temperature, logit_bias=few, seed=7, logprobs=0),
            speculation=SpeculationParams(rule=rule),
            reuse=False,
        )
        for number, (temperature, rule) in enumerate(
            [(0.0, None), (0.7, "coupled"), (0.0, "block")]
        )
    ]
    found = []
    for drafter in (False, True):
        runner = Runner.from_checkpoint(
            checkpoint, None, max_context=128, num_sequences=4, drafter=drafter
        )
        assert runner.block_size == (LOOKUP_DRAFTS if drafter else 0)
        answers, stats = run(runner, requests)
        found.append(answers)
        assert (stats["spec_drafts"] > 0) == drafter
        assert runner.num_free == 4
        assert num_accepted(stats) > 0 or not drafter
    assert found[0] == found[1]  # tokens and log-probabilities, bit for bit


def test_a_text_that_repeats_takes_fewer_steps(tmp_path: Path) -> None:
    """A model whose next token is a function of the last one: every greedy text is a loop."""
    import torch
    from safetensors.torch import load_file, save_file

    path = write_tiny(tmp_path / "m", "llama")
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    size = weights["lm_head.weight"].shape[0]
    following = torch.arange(size)
    following[3:11] = torch.tensor([4, 5, 6, 7, 8, 9, 10, 3])
    # Embeddings of norm one; the head answers token t with the embedding of the one before it.
    embeddings = torch.nn.functional.normalize(weights["model.embed_tokens.weight"], dim=-1)
    weights["model.embed_tokens.weight"] = embeddings
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    head = torch.zeros_like(weights["lm_head.weight"])
    head[following[3:11]] = embeddings[3:11]
    weights["lm_head.weight"] = head
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    request = GenerateRequest(
        request_id="a",
        prompt_ids=(3,),
        max_new_tokens=64,
        sampling=SamplingParams(temperature=0.0),
        reuse=False,
    )
    runner = Runner.from_checkpoint(Checkpoint.open(path), None, max_context=128, drafter=True)
    ((ids, _),), stats = run(runner, [request])
    assert ids == [3 + (i + 1) % 8 for i in range(64)]
    assert num_accepted(stats) > 40 and stats["decode_steps"] < 30


def test_serving_options(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", "llama")
    for drafts, size in ((None, LOOKUP_DRAFTS), (3, 3), (0, 0)):
        options = EngineConfig(max_context=400, max_running=2, drafts=drafts, state_memory=1 << 26)
        model = load_engine(path, options)
        assert model.runner.block_size == size  # type: ignore[attr-defined]
        assert model.speculation is not None
        assert (model.speculation.costs is not None) == (size > 0)
