"""The whole step on two GPUs, random weights of the published shape: ms, and the ranks' bits.

    python3 bench/tp2_step_gpu.py --json FILE [--seconds 240] [--parts golden,equal,stress,whole]

equal: 22 layers, the two ranks' logits against both ranks emulated in turn on one GPU, bit for bit.
stress: 40 layers without the drafter, replayed often: every replay's logits and caches against the
step captured in one lane, without programmatic launch, exchanges as kernels of their own, bit for
bit, on both ranks.
golden: the small golden checkpoint served as `serve --tp 2` does: drafted steps against plain ones.
whole: 40 layers, drafter, one graph a step; exchanges inside the boundaries, under programmatic
launch at every row count and without it, as kernels of their own, by NCCL all-reduce, and none (the
floor of this step without exchange; its numbers mean nothing). Starts its ranks itself; writes FILE
after every figure.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from deepdraft.arch import V41Args  # noqa: E402
from deepdraft.checkpoint.config import parse_args  # noqa: E402
from deepdraft.engine.dummy import DummyWeights, dummy_args  # noqa: E402
from deepdraft.errors import RankError  # noqa: E402
from deepdraft.kernels.one_shot import OneShot  # noqa: E402
from deepdraft.kernels.runtime import use_programmatic_launch  # noqa: E402
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs  # noqa: E402
from deepdraft.models.v41_draft import DeviceDrafter  # noqa: E402
from deepdraft.models.v41_joins import Joins, OwnTables, RankJoins  # noqa: E402
from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings  # noqa: E402
from deepdraft.models.v41_prefill_share import own_tables  # noqa: E402
from deepdraft.models.v41_step import DeviceStep, Lanes  # noqa: E402
from deepdraft.models.v41_weights import load_weights  # noqa: E402
from deepdraft.parallel.group import (  # noqa: E402
    NVLINK_MULTICAST_OFF,
    ProcessGroup,
    run_in_turn,
    symmetric_mailbox,
)
from deepdraft.parallel.launch import Limits, run_ranks  # noqa: E402
from deepdraft.parallel.plan import ShardPlan  # noqa: E402
from deepdraft.parallel.rank import Rank, run_rank, this_rank  # noqa: E402
from deepdraft.proof.bench_step import StepBench, fill_caches  # noqa: E402
from deepdraft.proof.step_bytes import step_bytes  # noqa: E402

CONFIG = ROOT / "tests/checkpoint/data/v41-config.json"
SET_A = ROOT / "tests/golden/v41-a/checkpoint"
CONTEXT = 32768
ROWS = ((6, 22), (6, 35), (8, 25), (1, 6), (2, 11), (4, 18))
CAPACITY = 8 * 65536
DATA = 4 * 65536
"""Words of a mailbox for sums, and for logits as they are, two in a word."""
BRIEF = "one-shot, programmatic launch", "none, programmatic launch"


def log(text: str) -> None:
    print(f"[tp2-step {time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> int:
    options = arguments()
    begin = time.monotonic()
    report: dict = {"torch": torch.__version__, "context": CONTEXT, "pool": options.pool}
    for part in options.parts.split(","):
        left = options.seconds - (time.monotonic() - begin)
        if left < 20:
            report[part] = {"skipped": "no time left"}
            continue
        out = options.json.with_name(f"tp2-step-{part}.json")
        out.unlink(missing_ok=True)
        command = [
            sys.executable, "-W", "ignore", __file__, "--json", str(out), "--parts", part,
            "--pool", str(options.pool), "--replays", str(options.replays), "--more", options.more,
            "--seconds", str(left - 5),
        ]  # fmt: skip
        found: dict = {}
        try:
            run_ranks(
                command, 2, env={**os.environ, **NVLINK_MULTICAST_OFF}, limits=Limits(step_s=left)
            )
        except RankError as error:
            found["ended_with"] = error.message
        if out.exists():
            found = json.loads(out.read_text()) | found
        report[part] = found
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    report["wall_s"] = round(time.monotonic() - begin, 1)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--parts", default="golden,equal,whole")
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--replays", type=int, default=400, help="of one case of part stress")
    parser.add_argument(
        "--more",
        default="rows,timeline",
        help="of part whole: rows (all of them), timeline, trials, plans, brief",
    )
    return parser.parse_args()


# ---- one rank -------------------------------------------------------------------------------


class RankWeights(DummyWeights):
    """One rank's parts: what is whole is alike on all ranks, what is split differs."""

    def __init__(self, args: V41Args, plan: ShardPlan, rank: int, device: torch.device) -> None:
        super().__init__(args, device=device)
        self.plan, self.rank = plan, rank
        self.table = {
            name: dataclasses.replace(entry, shape=plan.shape(name, entry.shape, rank))
            for name, entry in self.table.items()
        }

    def _generator(self, name: str) -> torch.Generator:
        cut = self.plan.cut(name) is not None
        return super()._generator(f"{name} of rank {self.rank}" if cut else name)


def plan_of(args: V41Args, size: int) -> ShardPlan:
    """Shortened hash tables count as equally long."""
    count = (args.engram_max_ngram_size - 1) * args.engram_n_heads
    rows = dict(zip(args.engram_layer_ids, args.engram_num_embeddings, strict=True))
    return ShardPlan(args, size, {layer: [n // count] * count for layer, n in rows.items()})


class RankBench(StepBench):
    """`StepBench` of one rank."""

    def __init__(self, args: V41Args, rank: int, size: int, joins, *, drafter: bool = True) -> None:
        self.args, self.context = args, CONTEXT
        self.device = torch.device("cuda", torch.cuda.current_device())
        plan = plan_of(args, size)
        ids = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
        source = RankWeights(args, plan, rank, self.device)
        self.weights = load_weights(args, source, ids, device=self.device, drafter=drafter)
        self.caches = DeviceCaches(
            args, num_sequences=1, max_tokens=CONTEXT + 4096, spare=16, device=self.device
        )
        fill_caches(self.caches)
        self.joins: Joins = joins(own_tables(args, plan, rank))
        self.step = DeviceStep(self.weights, self.caches, joins=self.joins)
        self.rng = np.random.default_rng(0)
        self.inputs: RowInputs | None = None

    def whole(self, width: int, experts: int) -> DeviceLoop:
        """One sequence's whole step, captured and at its context."""
        self.rng = np.random.default_rng(1)
        self.set_rows(width, experts)
        self.step.joins = self.joins
        drafter = DeviceDrafter(self.weights, self.caches, joins=self.joins) if width > 1 else None
        loop = DeviceLoop(
            self.step, DeviceSettings(1, self.device), sequences=1, width=width, drafter=drafter
        )
        loop.set_slots([0])
        with torch.inference_mode():
            loop.capture()
        loop.settings.begin(0, max_tokens=3000, temperature=0.0)
        loop.begin(0, 0, self.context)
        return loop


class NcclExchange:
    """The same joins by NCCL: float32 all-reduce and all-gather (bits may differ above 2 ranks)."""

    positions, gives_tickets = None, False

    def __init__(self, size: int) -> None:
        self.size = size

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x.bfloat16()

    def sum_picks(self, y: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return self.sum_rows(y.float().sum(1) + shared)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out, x)
        return out.transpose(0, 1).reshape(x.shape[0], -1)

    def finish(self) -> None:
        """Nothing is counted."""


class NoExchange(RankJoins):
    """Each rank goes on with its own part: the step's time without exchanges."""

    def __init__(self, size: int, tables: list[OwnTables]) -> None:
        self.size, self.tables = size, tables

    part, whole, boundary = Joins.part, Joins.whole, Joins.boundary
    begin, finish = Joins.begin, Joins.finish

    def logits(self, h: torch.Tensor, head) -> torch.Tensor:
        return Joins.logits(self, h, head).repeat(1, self.size)


def full_args() -> V41Args:
    return parse_args(json.loads(CONFIG.read_text()))


def work(me: Rank) -> None:
    options = arguments()
    me.pulse.set_state("loading")
    torch.cuda.set_device(me.rank)
    group = ProcessGroup(me.rank, me.size, me.store, backend="nccl", pulse=me.pulse)
    group.gather(torch.zeros(1, device="cuda"))
    values: dict = {}

    def note(name: str, value: object) -> None:
        values[name] = value
        if me.rank == 0:
            options.json.write_text(json.dumps(values, indent=1) + "\n")
            log(f"{name}: {value}")

    with me.pulse.step():
        {"equal": equal, "whole": whole, "stress": stress}[options.parts](group, options, note)
    dist.barrier()


def golden(me: Rank) -> None:
    """Rank 0 leads, rank 1 follows, as the engine has it."""
    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.engine.gpu_ranks import open_gpu_rank
    from deepdraft.engine.ranks import Follower
    from deepdraft.text.tokenizer import Tokenizer

    options = arguments()
    checkpoint = Checkpoint.open(SET_A)
    runner = open_gpu_rank(me, checkpoint, Tokenizer.load(SET_A), max_context=512, num_sequences=2)
    if me.rank:
        Follower(me, runner, runner.check_exchanges).run()
        return
    g = torch.Generator().manual_seed(0)
    text = torch.randint(4, 500, (96,), generator=g).tolist()
    first = runner.open_sequence()
    rows = [runner.prefill(first, text, final=True)]
    tokens = [int(rows[0].argmax())]
    for _ in range(36):
        rows.append(runner.step([(first, tokens[-1:])])[0].clone())
        tokens.append(int(rows[-1].argmax()))
    second = runner.open_sequence()
    again = [runner.prefill(second, text, final=True)]
    for at in range(0, 36, 6):
        again += list(runner.step([(second, tokens[at : at + 6])]).clone())
    found = {
        "tokens": tokens,
        "finite": all(bool(torch.isfinite(row).all()) for row in rows),
        "six rows a step give the bits of one": [
            torch.equal(a, b) for a, b in zip(rows, again, strict=True)
        ].count(False)
        == 0,
    }
    runner.commit(second, len(text) + 30)
    retaken = runner.step([(second, tokens[30:33])])
    found["bits after taking rows back"] = torch.equal(retaken[2], rows[33])
    (draft,) = runner.draft([(second, tokens[33])])
    previous, drafted = tokens[33], []
    for i in range(len(draft)):
        previous = int(draft.refine(i, previous)[0].argmax())
        drafted.append(previous)
    found["drafted"] = drafted
    for sequence in (first, second):
        runner.close_sequence(sequence)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    log(f"golden: {found}")


def symmetric(group: ProcessGroup) -> OneShot:
    own, boxes = symmetric_mailbox(group.size, CAPACITY + DATA)
    return OneShot(group.rank, boxes, own, data=DATA)


def equal(group: ProcessGroup, options: argparse.Namespace, note) -> None:
    """22 layers: processes against ranks in turn on one GPU."""
    args = dummy_args(full_args(), layers=22, expert_pool=8, engram_rows=240_000)
    exchange = symmetric(group)
    bench = RankBench(args, group.rank, group.size, lambda own: RankJoins(exchange, own))
    bench.set_rows(6, None)
    with torch.inference_mode():
        logits = bench.once()[:6].clone()
    torch.cuda.synchronize()
    exchange.check()
    parts = group.gather(logits)
    note("finite", bool(torch.isfinite(logits).all()))
    note("both ranks, same logits", torch.equal(parts[0], parts[1]))
    use_programmatic_launch(True)
    early = []
    with torch.inference_mode():
        for _ in range(3):
            early.append(torch.equal(bench.once()[:6], logits))
    torch.cuda.synchronize()
    exchange.check()
    use_programmatic_launch(False)
    both = group.gather(torch.tensor(early, device="cuda"))
    note("programmatic launch, same logits", [part.tolist() for part in both])
    del bench
    torch.cuda.empty_cache()
    if group.rank:
        return
    boxes = [
        torch.zeros(2, group.size, CAPACITY, dtype=torch.int64, device="cuda")
        for _ in range(group.size)
    ]

    def in_turn(one):
        torch.cuda.set_device(0)

        def between() -> None:
            torch.cuda.synchronize()
            one.gather(torch.zeros(1))

        own = OneShot(one.rank, [b.data_ptr() for b in boxes], boxes[one.rank], between=between)
        bench = RankBench(args, one.rank, one.size, lambda tables: RankJoins(own, tables))
        bench.step = DeviceStep(bench.weights, bench.caches, joins=bench.joins, side_lanes=False)
        bench.set_rows(6, None)
        with torch.inference_mode():
            found = bench.once()[:6].clone()
        own.check()
        return found

    found = run_in_turn(group.size, in_turn)
    note("ranks in turn on one GPU, same logits", [torch.equal(f, logits) for f in found])


def whole(group: ProcessGroup, options: argparse.Namespace, note) -> None:
    """40 layers and the drafter."""
    begin = time.monotonic()
    args = dummy_args(full_args(), expert_pool=options.pool, engram_rows=4_000_000)
    exchange = symmetric(group)
    tables: list[OwnTables] = []

    def joins(own: list[OwnTables]) -> RankJoins:
        tables.extend(own)
        return RankJoins(exchange, own)

    bench = RankBench(args, group.rank, group.size, joins)
    torch.cuda.synchronize()
    note("load_s", round(time.monotonic() - begin, 1))
    note("weights_GB_per_rank", round(bench.weights.nbytes / 1e9, 2))
    ways = {
        "one-shot, programmatic launch": bench.joins,
        "one-shot, programmatic launch, kernels of their own": bench.joins,
        "one-shot": bench.joins,
        "nccl": RankJoins(NcclExchange(group.size), tables),
        "none, programmatic launch": NoExchange(group.size, tables),
    }
    if "brief" in options.more:
        ways = {name: way for name, way in ways.items() if name in BRIEF}
    first = next(iter(ways))
    for name, way in ways.items():
        bench.joins, exchange.apart = way, "own" in name
        use_programmatic_launch("programmatic" in name)
        for rows, experts in ROWS if name == first and "rows" in options.more else ROWS[:1]:
            if time.monotonic() - begin > options.seconds - 15:
                note(f"{name}, rows {rows} experts {experts}", "no time left")
                continue
            note(f"{name}, rows {rows} experts {experts}", timed(bench, group, rows, experts))
            if "one-shot" in name:
                exchange.check()
        if name == first and "timeline" in options.more:
            try:
                note("timeline", timeline(bench, options, group.rank, "step"))
            except Exception as error:
                note("timeline", f"{type(error).__name__}: {error}"[:300])
            exchange.check()
    bench.step.joins, exchange.apart = ways[first], False
    use_programmatic_launch(True)
    note("layers and head", timed_layers(bench))
    for trial, change in TRIALS.items() if "trials" in options.more else ():
        if time.monotonic() - begin > options.seconds - 6:
            break
        with change(bench):
            note(f"trial: {trial}", timed_layers(bench))
        exchange.check()
    if "plans" in options.more:
        try_plans(bench, group, note, begin + options.seconds - 6)


# ---- forms to be tried ----------------------------------------------------------------------


def try_plans(bench: RankBench, group: ProcessGroup, note, until: float) -> None:
    """Other plans of a rank's slices, one map after another, each with the best found so far."""
    from tp2_rank_gpu import PLANS, with_plan

    from deepdraft.kernels.native.fragments import StreamPlan

    def layers() -> float:
        ms = torch.tensor([timed_layers(bench)], device="cuda")
        return round(max(float(part) for part in group.gather(ms)), 4)

    weights, best = bench.weights, layers()
    for name, (part, shape, plans) in PLANS.items():
        kept = weights
        for plan in plans:
            left = torch.tensor([time.monotonic() - until], device="cuda")
            if max(float(t) for t in group.gather(left)) > 0:
                return
            bench.step.weights = with_plan(weights, part, name, shape, StreamPlan(*plan))
            try:
                ms = layers()
            except (ValueError, RuntimeError) as error:  # on all ranks alike
                note(f"trial: {name} {plan}", f"{error}"[:200])
                continue
            note(f"trial: {name} {plan}", ms)
            if ms < best:
                best, kept = ms, bench.step.weights
        weights = bench.step.weights = kept
    note("layers and head with the best of each", layers())
    bench.step.weights = bench.weights
    note("layers and head again", layers())


TRIALS = {"usual again": contextlib.nullcontext}
"""Forms to be tried: a context each, given the bench."""


def timeline(bench: RankBench, options: argparse.Namespace, rank: int, name: str) -> str:
    """Kernels of one replay of the whole step, 6 rows: [name, start us, us, stream], in a file."""
    from torch.profiler import ProfilerActivity, profile

    graph = bench.whole(6, 22).graph
    assert graph is not None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    last = events[len(events) // 3 * 2 :]
    begin = last[0]["ts"]
    out = options.json.with_name(f"timeline-{name}-rank{rank}.json")
    rows = [
        [e["name"][:24], round(e["ts"] - begin, 2), round(e["dur"], 2), e["args"].get("stream")]
        for e in last
    ]
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return f"{len(rows)} kernels in {out.name}"


def stress(group: ProcessGroup, options: argparse.Namespace, note) -> None:
    """Replays of the captured step that give other bits than the plain one, by rank."""
    begin = time.monotonic()
    args = dummy_args(full_args(), expert_pool=options.pool, engram_rows=4_000_000)
    exchange = symmetric(group)
    bench = RankBench(
        args, group.rank, group.size, lambda own: RankJoins(exchange, own), drafter=False
    )
    state = [bench.caches.window_rows, *bench.caches.main.values(), *bench.caches.index.values()]
    one_lane = Lanes(bench.device, on=False)
    for rows, experts in ROWS:
        left = options.seconds - (time.monotonic() - begin)
        if left < 4 + 0.009 * options.replays:
            note(f"rows {rows} experts {experts}", "no time left")
            continue
        bench.rng = np.random.default_rng(1)
        bench.set_rows(rows, experts)
        use_programmatic_launch(False)
        lanes, bench.step.lanes, exchange.apart = bench.step.lanes, one_lane, True
        plain = bench.capture()
        bench.step.lanes, exchange.apart = lanes, False
        wrong = torch.zeros(3, dtype=torch.int64, device="cuda")  # logits, state, plain logits
        plain.graph.replay()
        logits, kept = plain.logits[:rows].clone(), [part.clone() for part in state]
        for _ in range(5):
            plain.graph.replay()
            wrong[2] += (plain.logits[:rows].view(torch.int32) != logits.view(torch.int32)).any()
        use_programmatic_launch(True)
        step = bench.capture()
        for _ in range(options.replays):
            step.graph.replay()
            wrong[0] += (step.logits[:rows].view(torch.int32) != logits.view(torch.int32)).any()
            for part, other in zip(state, kept, strict=True):
                wrong[1] += (part != other).any()
        torch.cuda.synchronize()
        exchange.check()
        found = [part.tolist() for part in group.gather(wrong)]
        note(f"rows {rows} experts {experts}", {"replays": options.replays, "differ": found})
        del plain, step


def timed_layers(bench: RankBench) -> float:
    """ms of layers and head, 6 rows, 22 experts."""
    bench.rng = np.random.default_rng(1)
    bench.set_rows(6, 22)
    captured = bench.capture()
    times = replay_times(captured.graph)
    del captured
    torch.cuda.empty_cache()
    return round(statistics.median(times), 4)


def replay_times(graph: torch.cuda.CUDAGraph) -> list[float]:
    """ms of a replay, 7 times 10 of them."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 10)
    return times


def timed(bench: RankBench, group: ProcessGroup, rows: int, experts: int) -> dict:
    loop = bench.whole(rows, experts)
    graph = loop.graph
    assert graph is not None
    times = replay_times(graph)
    counted = step_bytes(bench.args, rows=rows, experts=experts, context=CONTEXT, draft=rows > 1)
    ms = statistics.median(times)
    limit = counted.limit_ms(4.3e12, group.size)
    del loop
    torch.cuda.empty_cache()
    return {"ms": round(ms, 3), "best": round(min(times), 3), "limit_ms": round(limit, 3),
            "share": round(limit / ms, 3)}  # fmt: skip


if __name__ == "__main__":
    rank = this_rank()
    if rank is None:
        sys.exit(main())
    run_rank(rank, golden if "golden" in sys.argv else work)
