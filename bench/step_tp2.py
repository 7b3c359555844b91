"""Two GPUs of one host: the whole decode step over two ranks, random weights of published shape.

    python bench/step_tp2.py --json FILE [--seconds 240] [--layers 40] [--pool 96]

Each rank holds its part of every split map, of a pool of experts; partial sums meet in the one-shot
exchange over symmetric memory. Written after every stage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from step_results import Results  # noqa: E402

from deepdraft.checkpoint.config import parse_args  # noqa: E402
from deepdraft.checkpoint.presharded import shard_plan  # noqa: E402
from deepdraft.engine.dummy import DummyWeights, dummy_args  # noqa: E402
from deepdraft.errors import RankError  # noqa: E402
from deepdraft.kernels.one_shot import SPIN_LIMIT, OneShot  # noqa: E402
from deepdraft.models.v41_joins import OwnTables, RankJoins  # noqa: E402
from deepdraft.parallel.group import (  # noqa: E402
    NVLINK_MULTICAST_OFF,
    ProcessGroup,
    symmetric_mailbox,
)
from deepdraft.parallel.launch import Limits, run_ranks  # noqa: E402
from deepdraft.parallel.rank import Rank, run_rank, this_rank  # noqa: E402
from deepdraft.parallel.shards import SlicedSource  # noqa: E402

CONFIG = ROOT / "tests" / "checkpoint" / "data" / "v41-config.json"
CASES = ((6, 22), (6, 35), (1, 6), (8, 25))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--pdl", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args()


class RankParts(SlicedSource):
    """A rank's parts; Engram tables, short here, are whole on every rank."""

    def packed(self, name: str):
        if ".engram.embed." in name:
            return self._whole.packed(name)
        return super().packed(name)


class TwoRanks:
    """One rank's side of the measurement."""

    def __init__(self, args: argparse.Namespace, me: Rank, group: ProcessGroup) -> None:
        from deepdraft.proof.bench_step import StepBench

        self.me, self.group, self.context = me, group, args.context
        device = f"cuda:{me.rank}"
        full = parse_args(json.loads(CONFIG.read_text()))
        self.shape = dummy_args(
            full, layers=args.layers, expert_pool=args.pool, engram_rows=2_000_000
        )
        plan = shard_plan(self.shape, me.size)
        own, boxes = symmetric_mailbox(me.size, 8 * self.shape.vocab_size // me.size)
        # Ranks compile while others wait: no hurry before everything is warm.
        self.exchange = OneShot(me.rank, boxes, own, limit=60 * SPIN_LIMIT)
        first, last = plan.own_tables(me.rank)
        tables = [OwnTables(slice(first, last), 0, 2_000_000)] * len(self.shape.engram_layer_ids)
        self.bench = StepBench(
            self.shape,
            context=args.context,
            device=device,
            source=RankParts(DummyWeights(self.shape, device=device), plan, me.rank),
            joins=RankJoins(self.exchange, tables),
        )

    def loaded(self) -> dict:
        return {
            "seconds": round(self.bench.load_seconds, 1),
            "weights_GB": round(self.bench.weights.nbytes / 1e9, 2),
        }

    def compile(self) -> dict:
        begin = time.perf_counter()
        self.bench.set_rows(6, 22)
        logits = self.bench.once()
        torch.cuda.synchronize()
        self.exchange.check()
        parts = self.group.gather(logits[:6])
        return {
            "seconds": round(time.perf_counter() - begin, 1),
            "finite": bool(torch.isfinite(logits[:6]).all()),
            "equal_on_ranks": all(torch.equal(parts[0], p) for p in parts),
        }

    def timed(self, graph) -> list[float]:
        """Milliseconds of a replay, groups of ten; all ranks start together."""
        times = []
        for _ in range(7):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 10)
        return sorted(times)

    def whole(self, rows: int, experts: int) -> dict:
        from deepdraft.proof.step_bytes import step_bytes

        loop = self.bench.loop(rows, experts)
        assert loop.graph is not None
        self.exchange.limit = SPIN_LIMIT
        times = self.timed(loop.graph)
        self.exchange.check()
        counted = step_bytes(
            self.shape, rows=rows, experts=experts, context=self.context, draft=rows > 1
        )
        limit = counted.limit_ms(4.3e12, self.me.size)
        return {
            "ms": round(times[3], 4), "best": round(times[0], 4),
            "GB_per_rank": round(counted.per_rank(self.me.size) / 1e9, 3),
            "limit_ms_at_4.3": round(limit, 3), "share": round(limit / times[3], 4),
        }  # fmt: skip


def work(me: Rank) -> None:
    args = options()
    torch.cuda.set_device(me.rank)
    from deepdraft.kernels import runtime

    path = args.json if me.rank == 0 else args.json.with_name(f"{args.json.stem}-{me.rank}.json")
    results = Results(path, args.seconds)
    me.pulse.set_state("loading")
    group = ProcessGroup(me.rank, me.size, me.store, backend="nccl", pulse=me.pulse)
    group.gather(torch.zeros(1, device="cuda"))
    runtime.use_programmatic_launch(bool(args.pdl))
    with me.pulse.step():
        made: list[TwoRanks] = []
        results.stage("load", lambda: made.append(TwoRanks(args, me, group)) or made[0].loaded())
        two = made[0]
        results.stage("compile", two.compile)
        for rows, experts in CASES:
            # All ranks must go on or stop together.
            left = min(float(t) for t in group.gather(torch.tensor(results.left(), device="cuda")))
            if left < 15:
                break
            name = f"whole rows {rows} experts {experts}"
            results.stage(name, lambda r=rows, e=experts: two.whole(r, e))
    results.save()
    group.close()


def main() -> int:
    args = options()
    env = {**os.environ, **NVLINK_MULTICAST_OFF}
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
    try:
        run_ranks(command, args.ranks, env=env, limits=Limits(step_s=args.seconds))
    except RankError as error:
        print(f"ended: {error.message}")
        return 1
    print(args.json.read_text())
    return 0


if __name__ == "__main__":
    rank = this_rank()
    if rank is None:
        sys.exit(main())
    run_rank(rank, work)
