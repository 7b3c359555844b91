"""`deepdraft bench lossless`: drafted text against plain text, token for token.

Owns: the runs, their comparison, what is printed of a mismatch. Knows nothing of: thresholds.

Every prompt is answered plainly and with drafts, many at a time, from the same seeds: at
temperature 0, and at 1 under the rule `coupled`. Nothing is shared between the two but the model.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.engine import Engine
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import Speculation
from deepdraft.errors import EngineError
from deepdraft.proof.prompts import Prompt, context_for, evenly, load_prompts
from deepdraft.spec.schedule import FixedSchedule
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, SamplingParams, SpeculationParams


def lossless(
    model: str | Path,
    *,
    prompts: str | None = None,
    num_prompts: int | None = None,
    tokens: int = 256,
    batch: int = 16,
    seeds: int = 3,
    numerics: str = "exact",
) -> dict[str, Any]:
    """Runs and compares. Answers do not end at the end token, so that every one is full length."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(model)
    chosen = evenly(load_prompts(prompts, tokenizer), num_prompts)
    checkpoint = Checkpoint.open(model)
    runner = Runner.from_checkpoint(
        checkpoint,
        tokenizer,
        numerics=numerics,
        drafter=True,
        num_sequences=batch,
        max_context=context_for(chosen, tokens, checkpoint.args.max_position_embeddings),
    )
    schedule = FixedSchedule(num_drafts=runner.block_size)
    engine = Engine(
        runner,
        max_running=batch,
        max_queue=len(chosen),
        speculation=Speculation(schedule=schedule),
    )
    engine.start()
    cases = [("temperature 0", SamplingParams(temperature=0.0))]
    cases += [
        (f"temperature 1, seed {seed}", SamplingParams(seed=seed)) for seed in range(1, seeds + 1)
    ]
    results: list[dict[str, Any]] = []
    try:
        for name, params in cases:
            plain, plain_s, _ = _answers(engine, chosen, params, tokens, 0)
            drafted, drafted_s, accepted_length = _answers(engine, chosen, params, tokens, None)
            results.append(
                {
                    "case": name,
                    "tokens": sum(map(len, plain)),
                    "mismatches": _mismatches(chosen, plain, drafted),
                    "accepted_length": round(accepted_length, 3),
                    "plain_s": round(plain_s, 1),
                    "drafted_s": round(drafted_s, 1),
                }
            )
            print(results[-1], flush=True)
    finally:
        engine.close()
    return {
        "what": "drafted text against plain text",
        "numerics": numerics,
        "prompts": len(chosen),
        "tokens_per_prompt": tokens,
        "batch": batch,
        "rule": "coupled",
        "drafts_per_step": runner.block_size,
        "cases": results,
        "mismatches": sum(len(r["mismatches"]) for r in results),
    }


def _answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    tokens: int,
    num_drafts: int | None,
) -> tuple[list[list[int]], float, float]:
    """Answers in the order of the prompts, seconds, mean accepted length over steps."""
    begin = time.perf_counter()
    streams = [
        engine.generate(
            GenerateRequest(
                request_id=str(i),
                prompt_ids=prompt.ids,
                sampling=params,
                max_new_tokens=tokens,
                speculation=SpeculationParams(rule="coupled", num_drafts=num_drafts),
            )
        )
        for i, prompt in enumerate(prompts)
    ]
    answers, steps, accepted = [], 0, 0
    for stream in streams:
        ids: list[int] = []
        for event in stream:
            ids += event.token_ids
            if event.error is not None:
                raise EngineError(event.error)
            if event.stats is not None:
                steps += event.stats.steps
                accepted += event.stats.accepted
        answers.append(ids)
    return answers, time.perf_counter() - begin, 1 + accepted / max(1, steps)


def _mismatches(
    prompts: Sequence[Prompt], plain: list[list[int]], drafted: list[list[int]]
) -> list[dict[str, Any]]:
    found = []
    for i, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        if a != b:
            places = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            at = next(places, min(len(a), len(b)))
            found.append({"prompt": i, "domain": prompts[i].domain, "token": at})
    return found
