"""Encoder prefill of the bundled model: the device against the CPU's quant mode.

    python bench/prefill_demo.py [--texts N] [--tokens N] [--device cpu]

Owns: texts from docs/, the state and the logits of the replay on both, and the same between two
orders of summation of the CPU: what a difference means. With --device cpu the kernels run in
Triton's interpreter (minutes for a hundred tokens).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))


def texts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Documents of this repository, cut to `length` tokens."""
    found = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        ids = tokenizer.encode_text(path.read_text()[: 12 * length])[:length]
        if len(ids) == length:
            found.append(ids)
    return found[:count]


def entries(pool: Any, state: Any, unpack: Any = None) -> dict[str, Any]:
    """Values of a sequence's main entries and index keys, by source."""
    found = {}
    for source, ratio in pool.ratios.items():
        at, n = state.slot * pool.entries[source], state.num_tokens // ratio
        for kind, part in (("main", pool.main), ("index", pool.index)):
            rows = part[source][at : at + n].cpu()
            found[f"{kind} {source}"] = rows if unpack is None else unpack(kind, rows)
    return found


def check_demo(device: str, *, count: int, length: int, chunk: int, plans: Any) -> dict[str, Any]:
    """Relative L2 of the state and of logits, top-1 of the last window's rows; the same between
    two CPU orders."""
    import torch
    from step_checks import DEMO, Demo

    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.engine.runner import checked_token_map
    from deepdraft.models.deepseek_v41 import DeepseekV41
    from deepdraft.models.v41_device import DevicePool
    from deepdraft.models.v41_prefill import DevicePrefill
    from deepdraft.models.v41_weights import load_weights
    from deepdraft.ops import cache
    from deepdraft.text.tokenizer import Tokenizer

    checkpoint, tokenizer = Checkpoint.open(DEMO), Tokenizer.load(DEMO)
    token_map = checked_token_map(checkpoint, tokenizer)
    args = checkpoint.args
    cpu = DeepseekV41(args, checkpoint, token_map, numerics="quant", drafter=False)
    pair = types.SimpleNamespace(args=args, tokenizer=tokenizer)
    other = Demo.other_cpu(types.SimpleNamespace(pair=pair), torch.float64)  # type: ignore[arg-type]
    weights = load_weights(args, checkpoint, token_map, device=device, drafter=False)
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    same = defaultdict(lambda: [0, 0])

    def compare(name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
        for part, value in want.items():
            a, b = got[part].double(), value.double()
            sums[name][part][0] += float((a - b).square().sum())
            sums[name][part][1] += float(b.square().sum())
        mine, theirs = got["logits"].argmax(1), want["logits"].argmax(1)
        same[name][0] += int((mine == theirs).sum())
        same[name][1] += len(mine)

    for text in texts(tokenizer, count, length):
        found = {}
        for name, model in (("cpu", cpu), ("other", other)):
            pool = model.new_pool(1, length + 8, slack=64)
            state = pool.open()
            out = model.prefill(state, text, mode="encoder", logits="all")
            found[name] = entries(pool, state) | {"logits": out.logits}
        pool = DevicePool(args, num_sequences=1, max_tokens=length + 8, slack=64, device=device)
        state, prefill = pool.open(), DevicePrefill(weights, pool.caches, chunk=chunk, plans=plans)
        with torch.inference_mode():
            prefill.encode(state, text)
            logits = prefill.replay(state, all_rows=True)[0]
        found["device"] = entries(pool, state, cache.unpack) | {"logits": logits.cpu()}
        compare("device vs cpu", found["device"], found["cpu"])
        compare("other vs cpu", found["other"], found["cpu"])
    return {
        name: {
            "top1_equal": f"{same[name][0]} of {same[name][1]}",
            "relative_L2": {k: round((d / s) ** 0.5, 5) for k, (d, s) in parts.items()},
        }
        for name, parts in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args()
    plans = None
    if args.device == "cpu":
        import warnings

        import numpy as np

        np.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
        importlib.import_module("tests.kernels.interpreter")  # before any kernel
        from tests.kernels import prefill_tiny

        plans = prefill_tiny.PLANS
    found = check_demo(args.device, count=args.texts, length=args.tokens, chunk=256, plans=plans)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
