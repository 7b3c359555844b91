"""Ranks that share a prompt's rows, on one GPU: bits of all in turn, times of each by itself.

    python3 bench/prefill_share_one.py --json FILE [--seconds 60] [--sizes 2,8,4,1]

check  six layers of the published sizes: two ranks in turn, caches and logits against each other
       (bit for bit)
times  40 layers, a pool of 96 experts: a chunk of 32,768 rows of so many ranks, the first and the
       last rank by itself. Its exchanges stay on this GPU and wait for nobody, so a chunk of real
       ranks takes what goes over NVLink longer.

Writes FILE after every figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from prefill_share_gpu import ShareBench, read_prompt, small_args  # noqa: E402

from deepdraft.arch import V41Args  # noqa: E402
from deepdraft.engine.dummy import DummyWeights, dummy_args  # noqa: E402
from deepdraft.models.v41_device import DevicePool  # noqa: E402
from deepdraft.models.v41_prefill import DevicePrefill  # noqa: E402
from deepdraft.models.v41_prefill_layers import Plans  # noqa: E402
from deepdraft.models.v41_prefill_plan import exchange_bytes  # noqa: E402
from deepdraft.models.v41_prefill_share import (  # noqa: E402
    PrefillCuts,
    Regions,
    RowShare,
    own_tables,
)
from deepdraft.models.v41_weights import load_weights  # noqa: E402
from deepdraft.ops.engram_hash import engram_tables  # noqa: E402
from deepdraft.parallel.group import Group, run_in_turn  # noqa: E402
from deepdraft.parallel.peers import OneProcessMemory  # noqa: E402
from deepdraft.parallel.shards import SlicedSource  # noqa: E402
from deepdraft.proof.bench_prefill import timed  # noqa: E402
from deepdraft.proof.bench_step import profile_replays  # noqa: E402
from deepdraft.proof.bench_step_main import read_args  # noqa: E402

DEVICE = torch.device("cuda", 0)
FOUND: dict[str, Any] = {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--sizes", default="2,8,4,1")
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rows", type=int, default=32768, help="of a chunk, of all ranks")
    parser.add_argument("--times-only", action="store_true")
    return parser.parse_args()


def note(path: Path, name: str, value: Any) -> None:
    FOUND[name] = value
    path.write_text(json.dumps(FOUND, indent=1) + "\n")
    print(f"-- {name} (at {time.monotonic() - BEGIN:.0f} s): {json.dumps(value)[:700]}", flush=True)


def check(options: argparse.Namespace, size: int = 2) -> None:
    """Ranks in turn against each other, and against one."""
    args, rows = small_args(read_args(None)), 16384
    ends = [20_003, 20_008, 20_711]
    primes = engram_tables(args).primes.reshape(1, -1).tolist()
    tables = dict(zip(args.engram_layer_ids, primes, strict=True))
    ids = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
    text = np.random.default_rng(3).integers(0, args.vocab_size, ends[-1]).tolist()
    source = DummyWeights(args, device=DEVICE, seed=5)
    nbytes = exchange_bytes(args, rows, size)
    memory = [torch.full((nbytes,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(size)]

    @torch.inference_mode()
    def read(group: Group) -> dict[str, torch.Tensor]:
        torch.cuda.set_device(0)
        plan, share, given = PrefillCuts(args, group.size, tables), None, source
        if group.size > 1:
            regions = Regions(args, rows, OneProcessMemory(memory, group))
            share = RowShare(group, regions, own_tables(args, plan, group.rank))
            given = SlicedSource(source, plan, group.rank)
        weights = load_weights(args, given, ids, device=DEVICE, drafter=False)
        pool = DevicePool(args, num_sequences=1, max_tokens=ends[-1] + 64, slack=16, device=DEVICE)
        prefill = DevicePrefill(weights, pool.caches, chunk=rows, share=share)
        return read_prompt(args, prefill, pool, text, ends)

    first, *others = run_in_turn(size, read)
    differ = [n for n, x in first.items() if not all(torch.equal(x, o[n]) for o in others)]
    note(options.json, "differs between the ranks", differ)
    note(options.json, "finite logits", bool(torch.isfinite(first["logits"]).all()))


class Unshared(OneProcessMemory):
    """Nobody is waited for."""

    def barrier(self, lane: int = 0) -> None:
        """Nothing."""


@dataclasses.dataclass
class Lone:
    """One rank of several, without the others (what `ShareBench` asks for)."""

    options: argparse.Namespace
    rank: int
    size: int
    device: torch.device = DEVICE
    plans: Plans = dataclasses.field(default_factory=Plans)

    def share(self, args: V41Args, rows: int, plan: PrefillCuts) -> RowShare:
        """The other ranks' rows are random and always there."""
        nbytes = exchange_bytes(args, rows, self.size)
        memory = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(self.size)]
        regions = Regions(args, rows, Unshared(memory, self))
        for rank in range(self.size):
            regions.of("inputs", rank).normal_()
            picks = regions.of("picks", rank)
            some = torch.rand(picks.shape[0], args.n_routed_experts, device=DEVICE)
            picks.copy_(some.topk(picks.shape[1]).indices)
            regions.of("weights", rank).fill_(0.25)
        return RowShare(self, regions, own_tables(args, plan, self.rank))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Nobody else is there."""
        return [x] * self.size


def times(options: argparse.Namespace, size: int) -> None:
    """Chunks of one rank."""
    args = dummy_args(read_args(None), expert_pool=options.pool, engram_rows=1 << 21)
    lines: dict[str, Any] = {}
    contexts = (0, options.tokens // 2, options.tokens - options.rows)
    for rank in dict.fromkeys((0, size - 1)):
        bench = ShareBench(Lone(options, rank, size), args, shared=size > 1)  # type: ignore
        for context in contexts if rank == size - 1 else contexts[1:2]:
            run = bench.chunk(context)
            run()
            torch.cuda.synchronize()
            line: dict[str, Any] = {"ms": round(1e3 * timed(run, repeats=1, warm=0), 2)}
            if context == contexts[1]:
                kernels = profile_replays(run, replays=1).as_json()["kernels"]
                assert isinstance(kernels, dict)
                line["us"] = {n[:70]: v["us"] for n, v in list(kernels.items())[:30]}
            lines[f"rank {rank}, context {context}"] = line
            note(options.json, f"{size} ranks, {options.rows} rows", lines)
        del bench, run
        torch.cuda.empty_cache()


def main() -> None:
    options = arguments()
    note(options.json, "torch", torch.__version__)
    note(options.json, "device", torch.cuda.get_device_name())
    for number, size in enumerate(int(n) for n in options.sizes.split(",")):
        if time.monotonic() - BEGIN < options.seconds - 12:
            times(options, size)
        if (
            number == 0
            and not options.times_only
            and time.monotonic() - BEGIN < options.seconds - 12
        ):
            check(options)
    note(options.json, "wall_s", round(time.monotonic() - BEGIN, 1))


BEGIN = time.monotonic()
if __name__ == "__main__":
    main()
