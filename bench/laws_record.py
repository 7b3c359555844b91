"""Records laws of target and drafter for `deepdraft.proof.recorded_laws`.

    python bench/laws_record.py MODEL --prompts FILE --out tests/spec/data/recorded-laws.json

Of each setting four blocks are kept, those first in which target and drafter differ most at the
first three places and the rules differ most in what they accept; only tokens that have a
probability in them. Rounded to 12 digits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.block import Block
from deepdraft.engine.engine import Engine
from deepdraft.engine.grammar import GrammarCompiler, GrammarSource
from deepdraft.engine.lark import Rules, json_rule
from deepdraft.engine.runner import Runner
from deepdraft.engine.speculate import BlockTarget, Speculation
from deepdraft.proof.prompts import evenly, load_prompts
from deepdraft.proof.recorded_laws import RULES, FixedTarget
from deepdraft.spec.protocol import Proposal, Row, Verdict
from deepdraft.spec.schedule import FixedSchedule
from deepdraft.spec.verify import survival
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["module", "function", "class"]},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
BLOCKS, PLACES, MOST_TOKENS = 4, 3, 64
SECOND = 0.03
"""The second likeliest token has more, so that a shift of 0.01 between the first two is seen."""


def record(model: Path, prompts: str, num_prompts: int, tokens: int) -> dict[str, Any]:
    """Setting -> blocks of {p, q, drafts} over the tokens that occur in the block."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(model)
    chosen = evenly(load_prompts(prompts, tokenizer), num_prompts)
    checkpoint = Checkpoint.open(model)
    context = max(len(p.ids) for p in chosen) + tokens
    runner = Runner.from_checkpoint(
        checkpoint, tokenizer, numerics="exact", drafter=True, max_context=context + context % 2
    )
    rules = Rules()
    compiler = GrammarCompiler(tokenizer, checkpoint.args.vocab_size, checkpoint.args.eos_token_id)
    schema = compiler.compile(GrammarSource(lark=rules.text(json_rule(rules, SCHEMA))))
    result = {}
    for temperature in (0.7, 1.0):
        for grammar in (None, schema):
            name = f"temperature {temperature:g}, top_p 0.9" + (", JSON schema" if grammar else "")
            seen: list[tuple[float, dict[str, Any]]] = []

            def observe(
                block: Block,
                proposal: Proposal,
                target: BlockTarget,
                verdict: Verdict,
                seen: list[tuple[float, dict[str, Any]]] = seen,
            ) -> None:
                if len(proposal) <= PLACES or not proposal.laws:
                    return
                q = [np.asarray(row, dtype=np.float64) for row in proposal.laws]
                p = [np.asarray(target.law(i), dtype=np.float64) for i in range(len(proposal) + 1)]
                held = int(np.any(np.stack([*p, *q]) > 0, axis=0).sum())
                if held <= MOST_TOKENS and all(np.isfinite(row).all() for row in p):
                    seen.append(_block(p, q, list(proposal.token_ids)))

            engine = Engine(
                runner,
                max_running=4,
                max_queue=len(chosen),
                speculation=Speculation(
                    rule="block", schedule=FixedSchedule(num_drafts=runner.block_size)
                ),
            )
            engine.speculator.observer = observe
            engine.start()
            try:
                streams = [
                    engine.generate(
                        GenerateRequest(
                            request_id=f"laws-{seed}",
                            prompt_ids=prompt.ids,
                            sampling=SamplingParams(temperature=temperature, top_p=0.9, seed=seed),
                            max_new_tokens=tokens,
                            stop_token_ids=frozenset({checkpoint.args.eos_token_id}),
                            grammar=grammar,
                        )
                    )
                    for seed, prompt in enumerate(chosen)
                ]
                for stream in streams:
                    for _ in stream:
                        pass
            finally:
                engine.close()
            seen.sort(key=lambda x: -x[0])
            result[name] = [block for _, block in seen[:BLOCKS]]
    return result


def _block(p: list[Row], q: list[Row], drafts: list[int]) -> tuple[float, dict[str, Any]]:
    """How telling a block is, and the block over the tokens it holds.

    Telling: laws that are near neither each other nor one single token, and rules that differ."""
    some = np.flatnonzero(np.any(np.stack([*p, *q]) > 0, axis=0))
    place = {int(token): i for i, token in enumerate(some)}
    gaps = [0.5 * np.abs(p[i] - q[i]).sum() * (1 - p[i].max()) for i in range(PLACES)]
    proposal = Proposal(start=0, token_ids=tuple(drafts), laws=q)
    token, block = (sum(survival(rule, proposal, FixedTarget(p))) for rule in RULES)
    second = min(np.sort(p[i])[-2] for i in range(PLACES))
    telling = float(min(gaps)) + float(block - token) if second > SECOND else 0.0
    return telling, {
        "p": [[float(f"{x:.12g}") for x in row[some]] for row in p],
        "q": [[float(f"{x:.12g}") for x in row[some]] for row in q],
        "drafts": [place[token] for token in drafts],
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    recorded = record(args.model, args.prompts, args.num_prompts, args.tokens)
    args.out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
