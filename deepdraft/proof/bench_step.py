"""Times of a whole decode step on a GPU: random weights of any shape, one CUDA graph.

Owns: a model of random weights with caches as full as a long context leaves them, forced routing,
capture, timing and attribution. Knows nothing of: printing, files.

Experts are forced so that each layer reads exactly as many different ones as asked: random weights
route evenly, real text does not.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.kernels.runtime import padded_rows
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs
from deepdraft.models.v41_draft import DeviceDrafter
from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings
from deepdraft.models.v41_step import DeviceStep, Skip
from deepdraft.models.v41_weights import load_weights

REPEATS = 7
_ROOM = 4096
"""Positions behind the context: a measured loop goes on by at least one a step."""


def forced_picks(
    rows: int, picks: int, experts: int, wanted: int, rng: np.random.Generator
) -> np.ndarray:
    """int32 [padded rows, picks]: each row's experts differ, `wanted` different ones in all; -1 in
    rows that do not count."""
    assert picks <= wanted <= min(rows * picks, experts), f"{wanted=} of {rows=} x {picks=}"
    pool = rng.permutation(experts)[:wanted]
    out = np.full((padded_rows(rows), picks), -1, dtype=np.int32)
    # Deal every expert once, then fill the rows up with ones they do not have yet.
    hands: list[list[int]] = [[] for _ in range(rows)]
    for number, expert in enumerate(pool):
        hands[number % rows].append(int(expert))
    for row, hand in enumerate(hands):
        assert len(hand) <= picks
        others = [int(e) for e in rng.permutation(pool) if e not in hand]
        out[row] = (hand + others)[:picks]
    assert len(np.unique(out[out >= 0])) == wanted
    return out


def fill_caches(caches: DeviceCaches, seed: int = 1) -> None:
    """Random records everywhere: finite, of the size that normed values have."""
    device = caches.tokens.device
    generator = torch.Generator(device).manual_seed(seed)

    def random(part: Tensor, low: int, high: int) -> None:
        part.copy_(
            torch.randint(
                low, high, part.shape, dtype=torch.uint8, device=device, generator=generator
            )
        )

    c, ci = caches.args.head_dim, caches.args.index_head_dim
    for window in caches.window:
        random(window[:, :c], 0, 256)
        window[:, :c].bitwise_and_(0xF7)  # no NaN
        random(window[:, c:], 119, 121)
    for main in caches.main.values():
        random(main[:, : c // 2], 0, 256)
        random(main[:, c // 2 :], 40, 56)
    for keys in caches.index.values():
        random(keys[:, : ci // 2], 0, 256)
        random(keys[:, ci // 2 :], 125, 128)
    for pending in caches.pending.values():
        pending.normal_(generator=generator)
    vocabulary = caches.args.vocab_size
    caches.tokens.copy_(
        torch.randint(0, vocabulary, caches.tokens.shape, device=device, generator=generator)
    )


@dataclass(slots=True)
class Timed:
    """Milliseconds of one replay."""

    median: float
    best: float
    times: list[float]


def time_graph(run: Callable[[], object], *, replays: int = 20) -> Timed:
    """Replays in groups; the median and the best of the groups' means."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return Timed(statistics.median(times), min(times), times)


class StepBench:
    """Random weights and full caches of one shape on one GPU."""

    def __init__(
        self,
        args: V41Args,
        *,
        context: int,
        device: str = "cuda",
        drafter: bool = True,
        rows: int = 16,
        seed: int = 0,
    ) -> None:
        """`args` as `dummy_args` makes them; `rows`: most rows of a step."""
        self.args, self.context, self.device = args, context, torch.device(device)
        begin = time.perf_counter()
        token_map = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
        self.weights = load_weights(
            args,
            DummyWeights(args, device=device, seed=seed),
            token_map,
            device=device,
            drafter=drafter,
        )
        self.caches = DeviceCaches(
            args, num_sequences=1, max_tokens=context + _ROOM, spare=rows, device=device
        )
        fill_caches(self.caches)
        self.step = DeviceStep(self.weights, self.caches)
        self.synchronize()
        self.load_seconds = time.perf_counter() - begin
        self.rng = np.random.default_rng(seed)
        self.inputs: RowInputs | None = None

    def loop(self, width: int, experts: int | None, *, masked: bool = False) -> DeviceLoop:
        """The whole step of one sequence, `width` rows, captured and at its context."""
        self.set_rows(width, experts)
        loop = DeviceLoop(
            self.step,
            DeviceSettings(1, self.device),
            sequences=1,
            width=width,
            drafter=DeviceDrafter(self.weights, self.caches) if width > 1 else None,
            masked=masked,
        )
        loop.set_slots([0])
        if self.device.type == "cuda":
            with torch.inference_mode():
                loop.capture()
        loop.settings.begin(0, max_tokens=_ROOM - 64, temperature=0.0)
        loop.begin(0, 0, self.context)
        return loop

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def set_rows(self, rows: int, experts: int | None) -> None:
        """The step's rows, after `context` tokens; `experts`: different ones each layer reads."""
        args = self.args
        self.inputs = RowInputs(rows, self.device)
        ids = [int(i) for i in self.rng.integers(0, args.vocab_size, rows)]
        self.inputs.set([(0, self.context, ids)])
        self.step.forced = None
        if experts is not None:
            self.step.forced = [
                torch.from_numpy(
                    forced_picks(
                        rows, args.num_experts_per_tok, args.n_routed_experts, experts, self.rng
                    )
                ).to(self.device)
                for _ in range(args.num_hidden_layers)
            ]

    def once(self, skip: Skip = frozenset()) -> Tensor:
        """One eager step; its logits."""
        assert self.inputs is not None, "set_rows first"
        return self.step.run(self.inputs, skip).logits

    def capture(self, skip: Skip = frozenset()) -> Capture:
        """The step as a graph. Kernels are compiled by an eager run before."""
        self.once(skip)
        self.synchronize()
        begin = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            logits = self.once(skip)
        return Capture(graph, logits, time.perf_counter() - begin)


@dataclass(slots=True)
class Capture:
    """A captured step; the graph's memory belongs to it."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    seconds: float


@dataclass(slots=True)
class Profile:
    """Where a replay's time on the device goes, by torch's profiler."""

    kernels: dict[str, dict[str, float]]
    """By name: us and launches of a replay."""
    busy_us: float
    """Some kernel ran."""
    span_us: float
    """From the first kernel's start to the last one's end."""

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        idle = 1 - self.busy_us / max(self.span_us, 1e-9)
        return {
            "busy_us": round(self.busy_us, 1),
            "span_us": round(self.span_us, 1),
            "idle_share": round(idle, 4),
            "kernels": {
                name: {k: round(v, 2) for k, v in numbers.items()}
                for name, numbers in self.kernels.items()
            },
        }


def profile_replays(replay: Callable[[], object], replays: int = 3) -> Profile:
    """Time on the device by kernel, per replay."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans: list[tuple[float, float]] = []
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += event.time_range.elapsed_us()
            total[event.name][1] += 1
            spans.append((event.time_range.start, event.time_range.end))
    busy = end = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    first = min((start for start, _ in spans), default=0.0)
    names = sorted(total, key=lambda name: -total[name][0])
    kernels = {
        name: {"us": total[name][0] / replays, "launches": total[name][1] / replays}
        for name in names
    }
    return Profile(kernels, busy / replays, (end - first) / replays)


def removal_times(
    bench: StepBench, stages: Sequence[str], whole: float
) -> dict[str, dict[str, float | str]]:
    """Each stage left out of all layers in turn: what the step takes then, in ms."""
    result: dict[str, dict[str, float | str]] = {}
    for stage in stages:
        try:
            captured = bench.capture(frozenset((stage,)))
            ms = time_graph(captured.graph.replay, replays=10).median
            result[stage] = {"without_ms": ms, "saves_ms": whole - ms}
            del captured
        except Exception as error:
            result[stage] = {"failed": f"{type(error).__name__}: {error}"[:400]}
    return result
