"""A long prompt through the engine on a GPU: alone, beside answers being written, cancelled.

    python bench/prefill_engine.py --json FILE [--tokens 131072] [--seconds 120]

Owns: gaps between the events of two decoding requests with and without a long prompt beside them,
what the prompt is told of its progress, how soon a cancelled one ends. Published shape, random
weights, a pool of 96 experts. `--dry-run`: a tiny model in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_results import Results  # noqa: E402


class Timed:
    """One request and the times of its events."""

    def __init__(self, engine: Any, name: str, prompt: list[int], count: int) -> None:
        from deepdraft.types import GenerateRequest, SamplingParams

        self.times: list[float] = []
        self.progress: list[Any] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.ended = threading.Event()
        self.engine, self.name, self.begin = engine, name, time.perf_counter()
        request = GenerateRequest(
            request_id=name, prompt_ids=tuple(prompt), max_new_tokens=count, reuse=False,
            sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        engine.submit([request], [self.take])

    def take(self, event: Any) -> None:
        """On the engine's thread."""
        now = time.perf_counter() - self.begin
        if event.progress is not None:
            self.progress.append((now, event.progress))
        if event.token_ids:
            self.times.append(now)
        if event.finish_reason is not None:
            self.reason, self.error = event.finish_reason, event.error
            self.ended.set()

    def gaps(self) -> dict[str, float]:
        """Milliseconds between two events."""
        found = sorted(1e3 * (b - a) for a, b in zip(self.times, self.times[1:], strict=False))
        if not found:
            return {}
        at = found[int(0.99 * (len(found) - 1))]
        return {
            "median_ms": round(statistics.median(found), 2),
            "p99_ms": round(at, 2),
            "most_ms": round(found[-1], 2),
        }


def runner_of(args: argparse.Namespace) -> Any:
    """A runner of random weights."""
    from deepdraft.engine.gpu_runner import GpuRunner

    if args.dry_run:
        from deepdraft.models.v41_device import DeviceV41
        from tests.kernels import prefill_tiny as tiny

        ids = list(range(tiny.VOCABULARY))
        model = DeviceV41(
            tiny.args(), tiny.source(), ids, device="cpu", prefill_chunk=8,
            prefill_plans=tiny.UNPACKED,
        )  # fmt: skip
        return GpuRunner(model, prefill="encoder", max_context=96, num_sequences=4, num_drafts=0)
    import torch

    from deepdraft.engine.dummy import DummyWeights, dummy_args
    from deepdraft.engine.gpu_runner import prefill_plan
    from deepdraft.models.v41_device import DeviceV41
    from deepdraft.proof.bench_step_main import read_args

    sizes = dummy_args(read_args(None), expert_pool=96, engram_rows=1 << 20)
    ids = [i % sizes.engram_compressed_vocab_size for i in range(sizes.vocab_size)]
    model = DeviceV41(
        sizes, DummyWeights(sizes, device="cuda"), ids, device="cuda", drafter=False,
        tables_on_host=False,
    )  # fmt: skip
    context = 2 * args.tokens
    plan = prefill_plan(sizes, context, torch.cuda.mem_get_info()[0] - (4 << 30), None)
    model.prefill_chunk = plan.rows
    runner = GpuRunner(model, prefill="encoder", max_context=context, num_sequences=4)
    runner.warm_prefill()
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--stall-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    results = Results(args.json, args.seconds)
    count, short = 400, 64
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        importlib.import_module("tests.kernels.interpreter")
        args.tokens, count, short = 40, 3, 5
    from deepdraft.engine.engine import Engine

    runner = runner_of(args)
    vocabulary = runner.vocab_size
    engine = Engine(runner, max_running=4, max_stall_ms=args.stall_ms)
    engine.start()
    engine.warm_up()
    long = [(7 * i + i // 11) % vocabulary for i in range(args.tokens)]
    limit = max(60.0, args.seconds)
    results.data["settings"] = {
        "tokens": args.tokens, "chunk": runner.prefill_rows, "max_stall_ms": args.stall_ms,
    }  # fmt: skip

    def talk(name: str, count: int) -> list[Timed]:
        return [Timed(engine, f"{name}{i}", long[i : i + short], count) for i in range(2)]

    def alone() -> dict[str, Any]:
        one = Timed(engine, "long", long, 2)
        assert one.ended.wait(limit), "no end"
        told = [(round(at, 2), p.done, round(p.tokens_per_second)) for at, p in one.progress]
        return {
            "reason": one.reason, "error": one.error,
            "first_token_s": round(one.times[0], 3) if one.times else None, "progress": told,
        }  # fmt: skip

    def decoding() -> dict[str, Any]:
        found = talk("quiet", count)
        assert all(t.ended.wait(limit) for t in found), "no end"
        return found[0].gaps()

    def beside() -> dict[str, Any]:
        writing = talk("busy", 20 * count if not args.dry_run else count)
        while not all(t.times for t in writing):
            time.sleep(0.001)
        one = Timed(engine, "beside", long, 2)
        assert one.ended.wait(limit), "no end"
        during = [t for t in writing[0].times if t > one.begin - writing[0].begin]
        writing[0].times = during
        engine.cancel(*(t.name for t in writing))
        assert all(t.ended.wait(limit) for t in writing), "no end"
        return {
            "reason": one.reason, "first_token_s": round(one.times[0], 3) if one.times else None,
            "gaps_of_a_writer": writing[0].gaps(),
        }  # fmt: skip

    def cancelled() -> dict[str, Any]:
        one = Timed(engine, "cancelled", long, 2)
        time.sleep(0.5 if not args.dry_run else 2.0)
        begin = time.perf_counter()
        engine.cancel("cancelled")
        assert one.ended.wait(limit), "no end"
        return {
            "reason": one.reason, "ended_after_s": round(time.perf_counter() - begin, 3),
            "free_sequences": runner.num_free,
        }  # fmt: skip

    for name, run in (
        ("alone", alone), ("decoding", decoding), ("beside", beside), ("cancelled", cancelled),
        ("alone_again", alone),
    ):  # fmt: skip
        results.stage(name, run, needs=5)
    engine.close()
    results.save()


if __name__ == "__main__":
    main()
