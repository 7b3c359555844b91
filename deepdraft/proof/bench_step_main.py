"""`deepdraft bench step`: ms per decode step of random weights on one GPU, share of the limit.

Owns: which cases are run, the table, the file. Knows nothing of: kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepdraft.arch import V41Args
from deepdraft.checkpoint.config import parse_args
from deepdraft.engine.dummy import dummy_args
from deepdraft.engine.gpu_runner import check_gpu
from deepdraft.errors import ConfigError
from deepdraft.kernels.runtime import use_programmatic_launch
from deepdraft.proof.bench import commit, machine
from deepdraft.proof.bench_step import StepBench, profile_replays, time_graph
from deepdraft.proof.step_bytes import OBSERVED_POOL, distinct, step_bytes

PUBLISHED = Path(__file__).with_name("v41-flash.json")
CONTEXT = 32768
ROWS = (1, 2, 4, 6, 8)
MOST_ROWS = 16


def read_args(model: str | Path | None) -> V41Args:
    """Sizes of a checkpoint directory's config.json; None: the published model's."""
    file = PUBLISHED if model is None else Path(model) / "config.json"
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    return parse_args(values)


def copy_rate() -> float:
    """Bytes a second that this GPU copies, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_graph(lambda: target.copy_(source), replays=5).median * 1e3


def cases(args: V41Args, full: V41Args, rows: Sequence[int]) -> list[tuple[int, int, str]]:
    """(rows, different experts a layer, routing) of both routing columns."""
    picks, found = args.num_experts_per_tok, []
    for r in rows:
        for routing, pool in (("observed", OBSERVED_POOL), ("even", full.n_routed_experts)):
            wanted = round(distinct(r, max(pool, picks), picks))
            experts = max(picks, min(wanted, r * picks, args.n_routed_experts))
            if (r, experts) not in [(a, b) for a, b, _ in found]:
                found.append((r, experts, routing))
    return found


def main(
    model: str | Path | None,
    *,
    layers: int | None,
    expert_pool: int | None,
    rows: Sequence[int],
    context: int,
    as_json: bool,
    out: str | None,
) -> int:
    """Measure, print, write. Raises ConfigError where the GPU or the sizes do not allow it."""
    if any(not 1 <= r <= MOST_ROWS for r in rows):
        raise ConfigError(f"--rows takes numbers from 1 to {MOST_ROWS}, got {list(rows)}")
    full = read_args(model)
    args = dummy_args(full, layers=layers, expert_pool=expert_pool, engram_rows=1 << 21)
    drafter = layers is None or layers >= full.num_hidden_layers
    check_gpu(args, drafter=drafter)
    use_programmatic_launch(True)
    rate = copy_rate()
    bench = StepBench(args, context=context, drafter=drafter)
    lines: list[dict[str, Any]] = []
    for r, experts, routing in cases(args, full, rows):
        loop = bench.loop(r, experts) if drafter else None
        replay = loop.graph.replay if loop and loop.graph else _layers_only(bench, r, experts)
        timed = time_graph(replay, replays=10)
        counted = step_bytes(
            args, rows=r, experts=experts, context=context, draft=drafter and r > 1
        )
        busy = profile_replays(replay)
        lines.append(
            {
                "rows": r,
                "experts": experts,
                "routing": routing,
                "ms": round(timed.median, 4),
                "limit_ms": round(counted.limit_ms(rate), 4),
                "share": round(counted.limit_ms(rate) / timed.median, 4),
                "GB": round(counted.per_rank() / 1e9, 3),
                "idle_share": busy.as_json()["idle_share"],
                "kernels": busy.as_json()["kernels"],
            }
        )
        if not as_json:
            print(_line(lines[-1]), flush=True)
    result = {
        "bench": "step",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "sizes": {"layers": args.num_hidden_layers, "experts": args.n_routed_experts},
        "context": context,
        "drafter": drafter,
        "copy_TB_s": round(rate / 1e12, 3),
        "load_seconds": round(bench.load_seconds, 1),
        "weights_GB": round(bench.weights.nbytes / 1e9, 2),
        "config": asdict(args),
        "results": lines,
    }
    if as_json:
        print(json.dumps(result))
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _layers_only(bench: StepBench, rows: int, experts: int) -> Any:
    bench.set_rows(rows, experts)
    captured = bench.capture()
    return captured.graph.replay


def _line(line: dict[str, Any]) -> str:
    return (
        f"{line['rows']:2} rows, {line['experts']:3} experts a layer ({line['routing']}): "
        f"{line['ms']:7.3f} ms a step, limit {line['limit_ms']:.3f}, "
        f"{100 * line['share']:.0f} % of it, idle {100 * line['idle_share']:.1f} %"
    )
