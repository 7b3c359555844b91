"""Two GPUs of one host: the one-shot sum against NCCL, what faults do, and how long they take.

    python3 bench/tp2_gpu.py --json FILE [--seconds 240] [--parts link,sum,silent,killed,stopped]

Starts its ranks with `deepdraft.parallel.launch`, so that is tried too. Needs torch and triton.
Writes FILE after every part; a part that fails or hangs is noted and the next one runs.
`--dry-run`: two gloo ranks on the CPU, without our kernel; for trying this script.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from deepdraft.errors import EngineError, RankError  # noqa: E402
from deepdraft.kernels.one_shot import OneShot  # noqa: E402
from deepdraft.parallel.group import (  # noqa: E402
    NVLINK_MULTICAST_OFF,
    ProcessGroup,
    rank_order_sum,
    run_in_turn,
    symmetric_mailbox,
)
from deepdraft.parallel.launch import Limits, run_ranks  # noqa: E402
from deepdraft.parallel.rank import Rank, run_rank, this_rank  # noqa: E402

WIDTH = 5120
CHAIN = 86
"""Exchanges of a step of the published model: 43 layers, two each."""
ROWS = (1, 2, 4, 6, 8)
PLANS = ((32, 1), (64, 1), (128, 1), (128, 2), (256, 2), (512, 4))


def log(text: str) -> None:
    print(f"[tp2 {time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# ---- the parent -----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--parts", default="link,sum,silent,killed,stopped")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    report: dict = {"torch": torch.__version__, "parts": {}}
    if torch.cuda.is_available():
        report["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    for part in options.parts.split(","):
        left = options.seconds - (time.monotonic() - begin)
        if left < 15:
            report["parts"][part] = {"skipped": "no time left"}
            continue
        log(f"{part}: {left:.0f} s left")
        started = time.monotonic()
        try:
            if part == "link":
                result = link(options.dry_run)
            else:
                result = ranks(part, min(left, 150.0), options)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        result["wall_s"] = round(time.monotonic() - started, 2)
        report["parts"][part] = result
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        log(f"{part}: {json.dumps(result)[:600]}")
    return 0


def link(dry: bool) -> dict:
    """How the GPUs are joined."""
    result: dict = {}
    found = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=30
    ) if not dry else None  # fmt: skip
    if found is not None:
        result["topology"] = found.stdout[:2000]
        result["peer_access"] = [
            torch.cuda.can_device_access_peer(0, 1), torch.cuda.can_device_access_peer(1, 0)
        ]  # fmt: skip
        a = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0")
        b = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:1")
        for name, (to, source) in {"0->1": (b, a), "1->0": (a, b)}.items():
            times = []
            for _ in range(5):
                torch.cuda.synchronize(0), torch.cuda.synchronize(1)
                start = time.perf_counter()
                to.copy_(source)
                torch.cuda.synchronize(0), torch.cuda.synchronize(1)
                times.append(time.perf_counter() - start)
            result[f"copy {name} GB/s"] = round((1 << 30) / min(times) / 1e9, 1)
    return result


def ranks(part: str, seconds: float, options: argparse.Namespace) -> dict:
    """Runs a part on two ranks and reads what rank 0 wrote; for faults, what the launcher said."""
    out = options.json.with_name(f"tp2-{part}.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--json", str(out), "--parts", part]
    env = {**os.environ, **NVLINK_MULTICAST_OFF, "TP2_DRY": "1" if options.dry_run else ""}
    limits = Limits(step_s=seconds if part == "sum" else 60.0)
    result: dict = {}
    begin = time.monotonic()
    try:
        run_ranks(command, 2, env=env, limits=limits)
    except RankError as error:
        result["ended_with"] = error.message
    if out.exists():
        result |= json.loads(out.read_text())
    if "fault_at" in result:
        result["fault_to_all_gone_s"] = round(time.time() - result["fault_at"], 2)
    result["ranks_s"] = round(time.monotonic() - begin, 2)
    if part in ("killed", "stopped") and not options.dry_run:
        seen = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        own = str(os.getpid())  # the part `link` used the GPUs
        result["processes_left_on_gpus"] = [pid for pid in seen.stdout.split() if pid != own]
    return result


# ---- one rank -------------------------------------------------------------------------------


def work(me: Rank) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts")
    options = parser.parse_args()
    dry = bool(os.environ.get("TP2_DRY"))
    me.pulse.set_state("loading")
    device = torch.device("cpu") if dry else torch.device("cuda", me.rank)
    if not dry:
        torch.cuda.set_device(device)
    backend = "gloo" if dry else "nccl"
    group = ProcessGroup(me.rank, me.size, me.store, backend=backend, pulse=me.pulse)
    group.gather(torch.zeros(1, device=device))  # the library's own start is not part of a step
    result: dict = {"rank_0_ready": True}
    note = Note(options.json if me.rank == 0 else None, result)
    with me.pulse.step():
        PARTS[options.parts](group, device, note, dry)
    group.close()


class Note:
    """Results of rank 0, written as they come."""

    def __init__(self, path: Path | None, values: dict) -> None:
        self.path, self.values = path, values

    def __call__(self, name: str, value: object) -> None:
        self.values[name] = value
        if self.path is not None:
            self.path.write_text(json.dumps(self.values, indent=1) + "\n")
            log(f"  {name}: {value}")


def one_shot(group: ProcessGroup, rows: int = 8, **options: object) -> OneShot:
    own, boxes = symmetric_mailbox(group.size, rows * WIDTH)
    return OneShot(group.rank, boxes, own, **options)


def input_of(rank: int, rows: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """What a rank gives: made alike on every rank."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    scale = 10.0 ** torch.randint(-2, 3, (rows, WIDTH), generator=g)
    return (torch.randn(rows, WIDTH, generator=g) * scale).to(device)


def sums(group: ProcessGroup, device: torch.device, note: Note, dry: bool) -> None:
    """Bits and times of every way to add."""
    ways: dict = {
        "nccl all_gather + rank-order sum": lambda x: rank_order_sum(group.gather(x)),
        "nccl all_reduce fp32": all_reduced,
    }
    if not dry:
        ways["nccl all_reduce bf16"] = lambda x: all_reduced(x.bfloat16())
        try:
            own = one_shot(group)
            ways["one-shot"] = own.sum
            note("symmetric_memory", "works, multicast off")
        except Exception as error:
            note("symmetric_memory", f"{type(error).__name__}: {error}")
    bits = {}
    for name, way in ways.items():
        if "bf16" in name:
            continue
        bits[name] = all(
            torch.equal(
                way(input_of(group.rank, rows, device, seed)),
                rank_order_sum([input_of(r, rows, device, seed) for r in range(group.size)]),
            )
            for rows in range(1, 9)
            for seed in range(3)
        )
        if name == "one-shot":
            own.finish()
            own.check()
    note("equal to the rank-order sum, bit for bit, 1 to 8 rows", bits)
    if not dry:
        note("one GPU emulating both ranks, same bits", emulated(device))
    for name, way in ways.items():
        note(f"us per exchange, {name}", {r: timed(way, r, group, device, dry) for r in ROWS})
        if name == "one-shot":
            own.check()
    if dry:
        return
    torch_one_shot(group, device, note)
    for block, warps in PLANS if "one-shot" in ways else ():
        plan = one_shot(group, plan=(block, warps))
        times = {r: timed(plan.sum, r, group, device, dry) for r in (1, 6, 8)}
        note(f"us per exchange, one-shot, block {block}, {warps} warps", times)
        plan.check()


def all_reduced(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def torch_one_shot(group: ProcessGroup, device: torch.device, note: Note) -> None:
    """torch's own kernel over symmetric memory (bf16), where this build has it."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        name = dist.group.WORLD.group_name
        buffer = symmetric.empty(8 * WIDTH, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(buffer, name)
        one = torch.ops.symm_mem.one_shot_all_reduce
        times = {
            r: timed(lambda x: one(buffer[: x.numel()], "sum", name), r, group, device, False)
            for r in ROWS
        }
        note("us per exchange, torch one_shot_all_reduce bf16", times)
    except Exception as error:
        note("torch one_shot_all_reduce bf16", f"{type(error).__name__}: {error}")


def emulated(device: torch.device) -> bool:
    """Both ranks' kernels on this GPU in turn."""
    boxes = [torch.zeros(2, 2, 8 * WIDTH, dtype=torch.int64, device=device) for _ in range(2)]

    def one(rank) -> bool:
        own = OneShot(
            rank.rank, [b.data_ptr() for b in boxes], boxes[rank.rank],
            between=lambda: rank.gather(torch.zeros(1)),
        )  # fmt: skip
        draws = [[input_of(r, 6, device, seed) for r in range(2)] for seed in range(4)]
        return all(torch.equal(own.sum(xs[rank.rank]), rank_order_sum(xs)) for xs in draws)

    return all(run_in_turn(2, one))


def timed(way, rows: int, group, device, dry: bool) -> float:
    """Microseconds of one exchange in a chain of 86, in a CUDA graph; median of 7."""
    x = input_of(group.rank, rows, device)
    chain = 4 if dry else CHAIN
    owner = getattr(way, "__self__", None)

    def step() -> None:
        for _ in range(chain):
            way(x)
        if isinstance(owner, OneShot):
            owner.finish()

    step()
    if dry:
        begin = time.perf_counter()
        step()
        return round((time.perf_counter() - begin) / chain * 1e6, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(20):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 20 / chain * 1e3)
    return round(statistics.median(times), 2)


def silent(group: ProcessGroup, device: torch.device, note: Note, dry: bool) -> None:
    """Rank 1 leaves one exchange out: rank 0's kernel must give up by itself."""
    if dry:
        return
    own = one_shot(group)
    x = input_of(group.rank, 6, device)
    own.sum(x)
    own.finish()
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    if group.rank == 0:
        for _ in range(CHAIN):
            out = own.sum(x)
        torch.cuda.synchronize()
        note("seconds until rank 0 gave up, 86 exchanges", round(time.perf_counter() - begin, 3))
        note("result is NaN", bool(out.isnan().all()))
        try:
            own.check()
            note("error", "none")
        except EngineError as error:
            note("error", error.message)
    dist.barrier()


def killed(group: ProcessGroup, device: torch.device, note: Note, dry: bool) -> None:
    """Rank 1 dies while rank 0 waits in NCCL for ever."""
    note("fault_at", time.time() + 1.0)
    time.sleep(1.0)
    if group.rank == 1:
        os.kill(os.getpid(), 9)
    group.gather(torch.zeros(8, device=device))
    if not dry:
        torch.cuda.synchronize()


def stopped(group: ProcessGroup, device: torch.device, note: Note, dry: bool) -> None:
    """Rank 1 is stopped while rank 0 waits in NCCL."""
    note("fault_at", time.time() + 1.0)
    time.sleep(1.0)
    if group.rank == 1:
        os.kill(os.getpid(), 19)
    group.gather(torch.zeros(8, device=device))
    if not dry:
        torch.cuda.synchronize()


PARTS = {"sum": sums, "silent": silent, "killed": killed, "stopped": stopped}

if __name__ == "__main__":
    rank = this_rank()
    if rank is None:
        sys.exit(main())
    run_rank(rank, work)
