"""A short look at one or two GPUs: links, peer copies, symmetric memory, programmatic launch.

    python bench/gpu_pair.py [--seconds 70] [--dry-run]

Every look is a child process with its own time limit; its last line, `@ {json}`, is its result.
NVLink multicast stays off, as the launcher's variables say. Needs torch and triton.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
}


def median_us(run, repeats: int = 7) -> float:
    """Microseconds of `run()`, by events on the current stream."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graph_of(run, warm: bool = True):
    import torch

    if warm:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


# ---- looks ---------------------------------------------------------------------------------


def peer() -> dict:
    """Peer access, copy rates in GB/s and the time of a small copy in us."""
    import torch

    count = torch.cuda.device_count()
    result: dict = {"gpus": count}
    if count < 2:
        return result
    result["access"] = [torch.cuda.can_device_access_peer(a, 1 - a) for a in (0, 1)]
    for size, name in ((2**30, "1 GiB"), (164 * 1024, "164 KiB")):
        buffers = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1)]
        for a in (0, 1):
            with torch.cuda.device(a):
                buffers[1 - a].copy_(buffers[a])
                torch.cuda.synchronize()
                us = median_us(lambda a=a, b=buffers: b[1 - a].copy_(b[a]))
                result[f"{name} {a}->{1 - a}"] = {
                    "us": round(us, 1),
                    "GB_per_s": round(size / us / 1e3, 1),
                }
    return result


def pdl() -> dict:
    """Microseconds between dependent tiny kernels of a graph, with and without programmatic
    launch, in one program and in a full grid."""
    import torch
    from gpu_pair_kernels import touch

    result: dict = {}
    x = torch.zeros(264 * 128, device="cuda")
    for programs in (1, 132, 264):
        for on in (False, True):

            def chain(programs=programs, on=on):
                for _ in range(500):
                    touch[(programs,)](x, PDL=on, N=128, launch_pdl=on, num_warps=4)

            x.zero_()
            graph = graph_of(chain)
            us = median_us(graph.replay) / 500
            result[f"{programs} programs, pdl {on}"] = round(us, 3)
            # Each launch adds one: a lost or reordered one shows.
            expected = 500 * 9
            right = bool((x[: programs * 128] == expected).all())
            result[f"{programs} programs, pdl {on}: right"] = right
    return result


def symmetric(rank: int) -> dict:
    """One rank: rendezvous, a peer's memory read directly, reduces in a chain of 86."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    result: dict = {}
    x = torch.full((8, 5120), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(x)
    result["nccl sum right"] = bool((x == 3).all())
    x = torch.ones(8, 5120, dtype=torch.bfloat16, device="cuda")

    def reduce_chain() -> None:
        for _ in range(86):
            dist.all_reduce(x)

    graph = graph_of(reduce_chain)
    result["nccl all_reduce us"] = round(median_us(graph.replay) / 86, 2)
    dist.barrier()
    t = symm.empty(8, 5120, dtype=torch.bfloat16, device="cuda")
    handle = symm.rendezvous(t, group.group_name)
    result["rendezvous"] = True
    result["multicast pointer"] = int(getattr(handle, "multicast_ptr", 0) or 0) != 0
    t.fill_(rank + 1)
    handle.barrier()
    other = handle.get_buffer(1 - rank, (8, 5120), torch.bfloat16)
    result["peer memory reads right"] = bool((other == 2 - rank).all())
    handle.barrier()
    y = torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group.group_name)
    result["one_shot right"] = bool((y == 3).all())

    def one_shot() -> None:
        for _ in range(86):
            torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group.group_name)

    graph = graph_of(one_shot)
    result["one_shot_all_reduce us"] = round(median_us(graph.replay) / 86, 2)
    dist.barrier()
    big = symm.empty(64 * 2**20, dtype=torch.float32, device="cuda")
    far = symm.rendezvous(big, group.group_name).get_buffer(1 - rank, big.shape, big.dtype)
    near = torch.empty_like(big)
    dist.barrier()
    us = median_us(lambda: near.copy_(far))
    result["both read at once GB_per_s"] = round(big.nbytes / us / 1e3, 1)
    dist.barrier()
    return result


METRICS = {
    "us": "gpu__time_duration.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block",
    "blocks limit shared": "launch__occupancy_limit_shared_mem",
    "blocks limit registers": "launch__occupancy_limit_registers",
    **{
        f"stall {why.replace('_', ' ')}": (
            f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio"
        )
        for why in (
            "long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle",
            "mio_throttle", "lg_throttle", "wait", "not_selected",
        )
    },
}  # fmt: skip
"""What ncu reads of each profiled kernel."""


def profile() -> dict:
    """Under ncu: one launch of each large kernel, at published sizes."""
    import kernel_timed as kt
    import torch

    sizes = replace(kt.PUBLISHED, fresh=1)
    o = kt.Operands("cuda", sizes)
    cases = []
    for width in (2304, 288):
        cases += list(kt.expert_timed(o, width, [(6, 22)]))
    for shape in kt.dense_shapes(sizes, 1):
        if shape[0] in ("wq_b", "wo_a", "wo_b", "wq_a+wkv", "head"):
            cases.append(kt.dense_timed(o, shape, ""))
    cases.append(kt.attention_timed(o, 6, 64))
    cases += [c for c in kt.small_timed(o, 6) if c.name.startswith(("mix", "boundary", "write"))]
    for case in cases:
        case.launch(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        case.launch(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return {}


def profiled(output: str) -> list[dict]:
    """ncu's table (csv, one line a kernel) by our names."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    kernels = []
    for row in table[1:]:  # the first holds the units
        kernels.append(
            {
                "kernel": row["Kernel Name"],
                "grid": row.get("Grid Size"),
                **{name: row.get(metric) for name, metric in METRICS.items()},
            }
        )
    return kernels


# ---- parent --------------------------------------------------------------------------------


def child(command: list[str], limit: float, **environment: str) -> subprocess.Popen:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE.parent,
        env={**os.environ, **OFF, **environment}, start_new_session=True,
    )  # fmt: skip
    process.limit = time.monotonic() + limit  # ty: ignore
    return process


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """(output, how it ended)."""
    limit = process.limit  # ty: ignore
    try:
        output, _ = process.communicate(timeout=max(0.1, limit - time.monotonic()))
        return output, f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0] or "", "out of time"


def outcome(output: str, how: str) -> dict:
    for line in reversed(output.splitlines()):
        if line.startswith("@ "):
            return json.loads(line[2:])
    return {"failed": how, "tail": output[-700:]}


def say(name: str, result: object) -> None:
    print("@", json.dumps({name: result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--dry-run", action="store_true", help="name the looks, run none")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look:
        name, _, rank = args.look.partition(":")
        looks = {"peer": peer, "pdl": pdl, "profile": profile}
        result = symmetric(int(rank)) if name == "symmetric" else looks[name]()
        print("@", json.dumps(result), flush=True)
        os._exit(0)
    if args.dry_run:
        say("looks", ["topology", "peer", "pdl", "symmetric", "sanitizer"])
        return
    end = time.monotonic() + args.seconds
    own = [sys.executable, str(HERE / "gpu_pair.py"), "--look"]
    topology = child(["nvidia-smi", "topo", "-m"], 10)
    pdl_look = child([*own, "pdl"], min(40, args.seconds), CUDA_VISIBLE_DEVICES="0")
    say("topology", finish(topology)[0].splitlines()[:8])
    two = outcome(*finish(child([*own, "peer"], 25)))
    say("peer", two)
    say("pdl", outcome(*finish(pdl_look)))
    if two.get("gpus", 0) >= 2:
        ranks = [
            child(
                [*own, f"symmetric:{rank}"], min(40, end - time.monotonic()), RANK=str(rank),
                WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517",
            )
            for rank in (0, 1)
        ]  # fmt: skip
        say("symmetric", [outcome(*finish(r)) for r in ranks])
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if end - time.monotonic() > 25 and Path(ncu).exists():
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--page", "raw", "--metrics", ",".join(METRICS.values()), *own, "profile"]
        limit = min(45, end - time.monotonic() - 20)
        output, how = finish(child(command, limit, CUDA_VISIBLE_DEVICES="0"))
        try:
            kernels = profiled(output)
        except (KeyError, csv.Error) as e:
            kernels = [{"failed": repr(e)}]
        say("profile", kernels or {"failed": how, "tail": output[-900:]})
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if end - time.monotonic() < 15 or not Path(sanitizer).exists():
        say("sanitizer", "no time" if Path(sanitizer).exists() else "not installed")
        return
    runs = {
        (tool, module): child(
            [
                sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all",
                sys.executable, str(HERE / "kernel_worker.py"), "check", "--module", module,
                "--only", "test_bits_do_not_depend",
            ],
            end - time.monotonic() - 2,
            CUDA_VISIBLE_DEVICES="0", PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        for tool in ("memcheck", "racecheck")
        for module in ("test_gemv", "test_moe")
    }  # fmt: skip
    for (tool, module), process in runs.items():
        output, how = finish(process)
        summary = [s for s in output.splitlines() if "SUMMARY" in s]
        passed = output.count('"passed": true')
        errors = [s[:160] for s in output.splitlines() if s.startswith("=========")][:12]
        say(
            f"{tool} {module}",
            {"how": how, "summary": summary, "passed": passed, **({} if summary else {
                "head": errors, "tail": output[-300:]})},
        )  # fmt: skip


if __name__ == "__main__":
    main()
