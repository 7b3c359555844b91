"""Times of prompts on a GPU: random weights of any shape, chunks at any context, whole prompts.

Owns: a model of random weights whose caches are as full as a long context leaves them, the time of
a chunk by context and by kernel, what a whole prompt takes. Knows nothing of: printing, files.

Random weights route evenly. A pool of E experts gives each of them as many rows of a chunk as 384
experts get of one that is 384 / E times longer; results say which pool they are of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.models.v41_device import DevicePool
from deepdraft.models.v41_prefill import DevicePrefill
from deepdraft.models.v41_prefill_chunk import make_chunk
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.models.v41_prefill_plan import Stage, chunk_work, prompt_work
from deepdraft.models.v41_weights import load_weights
from deepdraft.proof.bench_step import Profile, fill_caches, profile_replays

Line = dict[str, Any]
"""One measured case."""
REPEATS = 3
PEAK_SIDE = 8192


def timed(run: Callable[[], object], *, repeats: int = REPEATS, warm: int = 1) -> float:
    """Median seconds of a call, by events."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def matrix_rate(side: int = PEAK_SIDE) -> float:
    """Floating-point operations a second of torch's own bf16 product, random values."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2.0 * side**3 / timed(lambda: a @ b, repeats=10, warm=3)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and the limit: arithmetic or bytes at the ceilings of the run."""

    seconds: float
    limit: float

    def as_json(self) -> dict[str, float]:
        """As plain data, in milliseconds."""
        return {
            "ms": round(1e3 * self.seconds, 4),
            "limit_ms": round(1e3 * self.limit, 4),
            "share": round(self.limit / self.seconds, 4),
        }


class PrefillBench:
    """Random weights and full caches of one shape on one GPU."""

    def __init__(
        self,
        args: V41Args,
        *,
        tokens: int,
        chunk: int,
        device: str = "cuda",
        plans: Plans | None = None,
        seed: int = 0,
    ) -> None:
        """`args` as `dummy_args` makes them; `tokens`: the longest prompt."""
        self.args, self.device, self.tokens = args, torch.device(device), tokens
        token_map = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
        begin = time.perf_counter()
        self.weights = load_weights(
            args, DummyWeights(args, device=device, seed=seed), token_map, device=device,
            drafter=False,
        )  # fmt: skip
        self.pool = DevicePool(args, num_sequences=1, max_tokens=tokens, slack=64, device=device)
        fill_caches(self.pool.caches)
        self.prefill = DevicePrefill(self.weights, self.pool.caches, chunk=chunk, plans=plans)
        with torch.inference_mode():
            self.library = self.prefill.layers.prove_library()
        self.rng = np.random.default_rng(seed)
        self.synchronize()
        self.load_seconds = time.perf_counter() - begin

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return [int(i) for i in self.rng.integers(0, self.args.vocab_size, count)]

    @torch.inference_mode()
    def chunk(self, context: int, rows: int | None = None) -> Callable[[], None]:
        """A call that runs the encoder on one chunk behind `context` tokens."""
        count = min(rows or self.prefill.chunk, self.tokens - context)
        ids, layers, source = self.ids(count), self.prefill.layers, self.args.decoder_start

        @torch.inference_mode()
        def run() -> None:
            chunk = make_chunk(
                layers.caches, ids, slot=0, first=context, floors=(0, 0), write_from=0
            )
            flow, table_rows = layers.start(chunk)
            layers.run(chunk, flow, range(source), table_rows=table_rows)
            layers.write_entries(chunk, flow, source)

        return run

    def profile(self, context: int, rows: int | None = None) -> Profile:
        """Where a chunk's time goes, by kernel."""
        return profile_replays(self.chunk(context, rows), replays=1)

    @torch.inference_mode()
    def prompt(self, tokens: int) -> float:
        """Seconds from a prompt's ids to the logits after its last token."""
        ids = self.ids(tokens)
        state = self.pool.open()
        try:
            self.synchronize()
            begin = time.perf_counter()
            self.prefill.encode(state, ids)
            logits, _, _ = self.prefill.replay(state, all_rows=False)
            logits.argmax().item()
            return time.perf_counter() - begin
        finally:
            self.pool.close(state)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of the run: operations and bytes a second."""

    flops: float
    rate: float

    def limit(self, work: dict[str, Stage]) -> float:
        """Seconds: all arithmetic or all bytes, whichever takes longer."""
        flop = sum(s.flop for s in work.values()) / self.flops
        return max(flop, sum(s.bytes for s in work.values()) / self.rate)


def chunks(
    bench: PrefillBench, ceilings: Ceilings, contexts: Sequence[int], rows: int | None = None
) -> list[Line]:
    """A chunk at each context: time, limit, time by kernel."""
    lines: list[Line] = []
    for context in contexts:
        count = min(rows or bench.prefill.chunk, bench.tokens - context)
        work = chunk_work(bench.args, count, context)
        # A long chunk takes seconds and varies by less than a hundredth.
        repeats = 1 if count > 16384 else REPEATS
        seconds = timed(bench.chunk(context, rows), repeats=repeats)
        found = Measured(seconds, ceilings.limit(work))
        profile = bench.profile(context, rows).as_json()
        lines.append(
            {
                "context": context,
                "rows": count,
                "runs": repeats,
                **found.as_json(),
                "limit_ms_by_stage": {
                    name: round(1e3 * ceilings.limit({name: stage}), 3)
                    for name, stage in work.items()
                },
                "idle_share": profile["idle_share"],
                "kernels": profile["kernels"],
            }
        )
    return lines


def prompts(
    bench: PrefillBench, ceilings: Ceilings, lengths: Sequence[int], *, repeats: int = REPEATS
) -> list[Line]:
    """Whole prompts, decoder replay and head included (which the limit does not count)."""
    lines: list[Line] = []
    for length in lengths:
        limit = ceilings.limit(prompt_work(bench.args, length, chunk=bench.prefill.chunk))
        if length <= bench.prefill.chunk:
            bench.prompt(length)  # compiles what its sizes need
        times = [bench.prompt(length) for _ in range(repeats if length < 100_000 else 1)]
        found = Measured(statistics.median(times), limit)
        lines.append(
            {
                "tokens": length,
                **found.as_json(),
                "tokens_per_s": round(length / found.seconds),
                "runs": len(times),
            }
        )
    return lines


def long_prompt_estimate(lines: Sequence[Line], tokens: int) -> float:
    """Seconds of a prompt from measured chunks of equal rows at several contexts: what a chunk
    takes is linear between them."""
    known = sorted((float(x["context"]), float(x["ms"])) for x in lines)
    rows = int(lines[0]["rows"])
    at = np.arange(0, tokens, rows)
    ms = np.interp(at, [c for c, _ in known], [m for _, m in known])
    return float(ms.sum() / 1e3)
