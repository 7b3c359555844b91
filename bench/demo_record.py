"""Writes the demo model's record: training log summary, held-out losses, sample transcripts.

Run: python bench/demo_record.py RUN_DIR... --out bench/results/a-demo-model.json \
         --transcripts docs/demo-transcripts.md
where each RUN_DIR holds a training run's `log.jsonl` (see training/README.md), in order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.engine.sampler import Row, Sampler
from deepdraft.proof.bench import commit, machine
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import SamplingParams

EFFORT = (
    "<｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
QUESTIONS = (
    "Hello! Who are you?",
    "What is the capital of Japan?",
    "What is 23 + 48?",
    "Explain recursion in one sentence.",
    "Write a Python function that checks whether a number is prime.",
    "Tell me a short story about a brave kitten.",
    "List five colours.",
    "Give me a JSON object with the name Anna and the age 30.",
    "What will the weather be in Rome tomorrow?",
    "implement the tetris game. output HTML code directly - no explanation.",
)


def answer(runner: Runner, tokenizer: Tokenizer, prompt: str, params: SamplingParams) -> str:
    """The model's answer, control tokens included, without the end token."""
    sampler = Sampler(runner.vocab_size)
    sequence = runner.open_sequence()
    ids = tokenizer.encode_with_control(prompt)
    logits = runner.prefill(sequence, ids, final=True)
    assert logits is not None
    row, out = logits.unsqueeze(0), []
    eos = runner.model.args.eos_token_id
    while len(out) < 1200:
        choice = sampler.sample(row, [Row(params=params, position=len(ids) + len(out))])[0]
        if choice.token_id == eos:
            break
        out.append(choice.token_id)
        row = runner.step([(sequence, [choice.token_id])])
    runner.close_sequence(sequence)
    return tokenizer.decode(out)


def run_summary(folder: Path) -> dict[str, object]:
    """First, last and held-out lines of one training run."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "eval"][-1]
    keys = ("t", "step", "ce", "draft", "ms", "tok_s", "gib")
    return {
        "steps": train[-1]["step"],
        "seconds": train[-1]["t"],
        "last": {k: train[-1].get(k) for k in keys},
        "held_out_ce": held_out["ce"],
        "held_out": held_out["sources"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, default=Path("deepdraft/demo/checkpoint"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transcripts", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(options.model)
    runner = Runner.from_checkpoint(Checkpoint.open(options.model), tokenizer)
    params = SamplingParams(temperature=0.6, top_p=0.95, seed=7)
    text = [
        "# Transcripts of the demo model",
        "",
        "Default sampling (temperature 0.6, top_p 0.95, seed 7), exact numerics; written by "
        "`bench/demo_record.py`. The model is tiny and recites templates it was trained on.",
    ]
    for question in QUESTIONS:
        for thinking in (True, False):
            prompt = "<｜begin▁of▁sentence｜>" + (EFFORT if thinking else "")
            prompt += f"<｜User｜>{question}<｜Assistant｜>" + (
                "<think>" if thinking else "</think>"
            )
            got = answer(runner, tokenizer, prompt, params)
            text += ["", f"## {question} ({'thinking' if thinking else 'direct'})", ""]
            text += ["~~~~", *got.splitlines(), "~~~~"]
    options.transcripts.write_text("\n".join(text) + "\n")
    record = {
        "what": "training of the demo model on one H200, and its held-out losses",
        "runs": [run_summary(folder) for folder in options.runs],
        "checkpoint_bytes": sum(f.stat().st_size for f in options.model.iterdir()),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "training_machine": "one NVIDIA H200, torch 2.11.0+cu130, Python 3.12",
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
