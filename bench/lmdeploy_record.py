"""What LMDeploy's own classes make of tiny checkpoints, without a GPU.

    python bench/lmdeploy_record.py [--out FILE] [KIND ...]

For each kind: parameters bit for bit what the weight map makes of the checkpoint, nothing unloaded,
rotary tables, routers on random rows. `stacked` is V3 with its experts in stacks, which it loads by
our module map. A finding that is known (KNOWN) must be there, so that a release without it is
noticed; any other, or a parameter that differs, makes the exit status 1.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepdraft.adapters.lmdeploy_check import check
from deepdraft.adapters.lmdeploy_launch import plan
from deepdraft.proof.bench import provenance
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked

KINDS = {"coder": "llama", "v2-lite": "v2-lite", "v2": "v2", "v3": "v3", "stacked": "v3"}
KNOWN = {"v2": ("its router", "its router")}
"""The softmax of a group-limited router is taken after its logits are masked (0.18)."""


def measured(kind: str, folder: Path) -> dict[str, Any]:
    """One kind."""
    begin = time.perf_counter()
    family = KINDS[kind]
    path = write_tiny(folder / kind, family, real_latents=family != "llama")
    if kind == "stacked":
        path = write_stacked(path, folder / "served")
    found = check(plan(path))
    known = KNOWN.get(kind, ())
    expected = len(found.problems) == len(known) and all(
        any(words in problem for problem in found.problems) for words in known
    )
    passed = expected and found.equal == found.parameters
    seconds = round(time.perf_counter() - begin, 1)
    return {**found.as_json(), "passed": passed, "seconds": seconds}


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun, kinds = provenance(), {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            kinds[kind] = measured(kind, Path(folder))
            print(kind, json.dumps(kinds[kind]), file=sys.stderr, flush=True)
    record = {
        "what": "LMDeploy's own model classes on tiny checkpoints (real latent sizes), no GPU: "
        "parameters against the weight map, rotary tables, routers",
        "kinds": kinds,
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
