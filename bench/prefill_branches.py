"""A long prompt stopped, resumed, extended and branched at random: its state against fresh ones.

    python bench/prefill_branches.py --json FILE [--tokens 100000] [--branches 20] [--seconds 120]

Owns: the random schedule, the comparison of every byte that counts (entries, keys, windows, open
pairs) and of the logits. A branch keeps the global entries of a random prefix, replays the windows
(`SequenceState.keep_global`) and goes on with text of its own in parts of random lengths; the fresh
one reads that prefix in chunks of its own, and then does the same.

Published shape, 22 layers (all of the encoder), 8 experts, random weights. `--dry-run`: a tiny
model in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_results import Results  # noqa: E402


def held(pool: Any, state: Any, layers: range) -> dict[tuple[str, int], Any]:
    """Every byte of a sequence that counts."""
    import torch

    n, found = state.num_tokens, {}
    for source, ratio in pool.ratios.items():
        at = state.slot * pool.entries[source]
        for name, part in (("main", pool.main), ("index", pool.index)):
            found[name, source] = part[source][at : at + n // ratio]
    first = max(state.encoder_floor, n - pool.args.sliding_window)
    window = torch.arange(first, n, device=pool.window[0].device)
    rows = state.slot * pool.ring + window % pool.ring
    for layer in layers:
        found["window", layer] = pool.window[layer][rows]
    if n % 2:
        at = state.slot * pool.pending_ring + (n - 1) % pool.pending_ring
        found |= {("open pair", s): part[at] for s, part in pool.pending.items()}
    return found


class Branches:
    """One trunk and its branches."""

    def __init__(
        self, weights: Any, *, tokens: int, chunk: int, least: int, plans: Any, seed: int = 0
    ) -> None:
        from deepdraft.models.v41_device import DevicePool
        from deepdraft.models.v41_prefill import DevicePrefill

        self.args, self.chunk, self.least, self.tokens = weights.args, chunk, least, tokens
        self.pool = DevicePool(
            self.args, num_sequences=3, max_tokens=tokens + tokens // 8, slack=64,
            device=weights.device,
        )  # fmt: skip
        self.prefill = DevicePrefill(weights, self.pool.caches, chunk=chunk, plans=plans)
        self.random = random.Random(seed)

    def text(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.random.randrange(self.args.vocab_size) for _ in range(count)]

    def read(self, state: Any, ids: list[int], chunk: int) -> None:
        """All of `ids` in chunks of this size."""
        self.prefill.chunk = chunk
        self.prefill.encode(state, ids)

    def in_parts(self, state: Any, ids: list[int], cuts: list[int]) -> Any:
        """`ids` cut there, each part whole to the logits; the last part's."""
        logits = None
        for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            self.read(state, ids[first:last], self.chunk)
            logits = self.prefill.replay(state, all_rows=False)[0]
        return logits

    def trunk(self) -> tuple[Any, dict[str, Any]]:
        """A prompt that is stopped and resumed several times; and read at once."""
        import torch

        ids, state, at, stops = self.text(self.tokens), self.pool.open(), 0, 0
        while at < len(ids):
            self.prefill.chunk = 8 * self.random.randint(1, self.chunk // 8)
            left = self.random.randint(1, 4)

            def watch(progress: Any) -> bool:
                nonlocal left
                left -= 1
                return left > 0

            at += self.prefill.encode(state, ids[at:], watch=watch)
            stops += 1
        logits = self.prefill.replay(state, all_rows=False)[0]
        whole = self.pool.open()
        self.read(whole, ids, self.chunk)
        other = self.prefill.replay(whole, all_rows=False)[0]
        layers = range(self.args.decoder_start)
        found = self.compare(state, whole, layers)
        found |= {"calls": stops, "logits_equal": torch.equal(logits, other)}
        self.pool.close(whole)
        return state, found

    def branch(self, trunk: Any) -> dict[str, Any]:
        """One branch and its fresh twin."""
        import torch

        keep = 2 * self.random.randint(1, self.tokens // 2)
        more = self.text(self.random.randint(2, self.tokens // 8))
        count = min(self.random.randint(0, 2), len(more) - 1)
        cuts = sorted(self.random.sample(range(1, len(more)), count))
        # A branch begins at entries that are not its own: of the trunk, copied.
        state = trunk.clone()
        state.keep_global(keep)
        logits = self.in_parts(state, more, cuts)
        fresh = self.pool.open()
        size = 8 * self.random.randint(self.least // 8, self.chunk // 8)
        self.read(fresh, trunk.token_ids[:keep], size)
        self.prefill.replay(fresh, all_rows=False)
        fresh.keep_global(keep)
        other = self.in_parts(fresh, more, cuts)
        found = self.compare(state, fresh, range(self.args.num_hidden_layers))
        found |= {
            "kept": keep,
            "added": len(more),
            "parts": len(cuts) + 1,
            "logits_equal": torch.equal(logits, other),
        }
        self.pool.close(state), self.pool.close(fresh)
        return found

    def compare(self, one: Any, two: Any, layers: range) -> dict[str, Any]:
        """Bytes that differ, by kind."""
        found = held(self.pool, one, layers), held(self.pool, two, layers)
        differ = {
            f"{name} {layer}": int((value != found[1][name, layer]).sum())
            for (name, layer), value in found[0].items()
        }
        marks = ("encoder_floor", "decoder_floor", "decoder_tokens", "token_ids")
        return {
            "equal": not any(differ.values()),
            "differing_bytes": {name: count for name, count in differ.items() if count},
            "marks_equal": all(getattr(one, m) == getattr(two, m) for m in marks),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--branches", type=int, default=20)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument(
        "--least", type=int, default=128,
        help="rows of a fresh one's chunks (few take long; the shortest parts are the branches')",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and text")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    results, plans = Results(args.json, args.seconds), None
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        importlib.import_module("tests.kernels.interpreter")
    import torch

    from deepdraft.engine.dummy import DummyWeights, dummy_args
    from deepdraft.models.v41_weights import load_weights
    from deepdraft.proof.bench_step_main import read_args

    if args.dry_run:
        from tests.kernels import prefill_tiny

        weights, plans = prefill_tiny.weights(), prefill_tiny.UNPACKED
        args.tokens, args.branches, args.chunk, args.least = 16, 1, 8, 8
    else:
        sizes = dummy_args(read_args(None), layers=22, expert_pool=8, engram_rows=1 << 16)
        tokens = [i % sizes.engram_compressed_vocab_size for i in range(sizes.vocab_size)]
        weights = load_weights(
            sizes, DummyWeights(sizes, device="cuda"), tokens, device="cuda", drafter=False
        )
        results.data["device"] = torch.cuda.get_device_name()
    results.data["settings"] = {"tokens": args.tokens, "chunk": args.chunk, "seed": args.seed}
    results.data["settings"]["least"] = args.least
    with torch.inference_mode():
        made = Branches(
            weights, tokens=args.tokens, chunk=args.chunk, least=args.least, plans=plans,
            seed=args.seed,
        )  # fmt: skip
        found = results.stage("trunk", made.trunk)
        if found is not None:
            trunk, results.data["trunk"] = found  # type: ignore[misc]
            took = 0.0
            for number in range(args.branches):
                begin = time.perf_counter()
                results.stage(f"branch_{number}", lambda: made.branch(trunk), needs=1.5 * took + 1)
                took = max(took, time.perf_counter() - begin)
    ended = [v for k, v in results.data.items() if k.startswith("branch_") and "equal" in v]
    results.data["branches"] = len(ended)
    results.data["all_equal"] = all(
        v["equal"] and v["marks_equal"] and v["logits_equal"]
        for v in (*ended, results.data["trunk"])
    )
    results.save()
    print(f"{len(ended)} branches, all equal: {results.data['all_equal']}")


if __name__ == "__main__":
    main()
