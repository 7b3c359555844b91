"""Prompts whose rows two GPUs share: bits, times by part, a million tokens.

    python3 bench/prefill_share_gpu.py --json FILE [--seconds 200] [--parts check,links,chunks,...]

check    six layers of the published sizes, a prompt in odd parts: both ranks' caches and logits
         against each other, and read again, bit for bit; each layer against one rank's, from the
         same inputs (random weights make other prompts of any rounding: 1e-4 of relative error in
         the embedding are 0.2 in the logits of six layers)
links    the exchanges alone: rows to the other rank, sums of picks, barriers
chunks   40 layers, a pool of 96 experts: a chunk at several contexts, by kernel; an estimate of
         1M tokens from them
million  1M tokens to the logits
prompts  8K and 64K tokens to the logits
alone    the same chunks, and with `alone-million` the same prompt, on one GPU

Starts its ranks itself; writes FILE after every figure. `--dry-run`: two processes, tiny sizes, in
Triton's interpreter on a CPU (times mean nothing then).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "--dry-run" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tp2_step_gpu import RankWeights  # noqa: E402

from deepdraft.arch import V41Args  # noqa: E402
from deepdraft.engine.dummy import DummyWeights, dummy_args  # noqa: E402
from deepdraft.errors import RankError  # noqa: E402
from deepdraft.kernels.prefill_share import push_sums  # noqa: E402
from deepdraft.models.v41_device import DevicePool  # noqa: E402
from deepdraft.models.v41_prefill import DevicePrefill  # noqa: E402
from deepdraft.models.v41_prefill_chunk import make_chunk  # noqa: E402
from deepdraft.models.v41_prefill_layers import Flow, Plans, PrefillLayers  # noqa: E402
from deepdraft.models.v41_prefill_plan import exchange_bytes  # noqa: E402
from deepdraft.models.v41_prefill_share import (  # noqa: E402
    PrefillCuts,
    Regions,
    RowShare,
    own_tables,
)
from deepdraft.models.v41_weights import load_weights  # noqa: E402
from deepdraft.ops.engram_hash import engram_tables  # noqa: E402
from deepdraft.parallel.group import NVLINK_MULTICAST_OFF, ProcessGroup  # noqa: E402
from deepdraft.parallel.launch import Limits, run_ranks  # noqa: E402
from deepdraft.parallel.peers import OneProcessMemory, PeerMemory, SymmetricMemory  # noqa: E402
from deepdraft.parallel.rank import Rank, run_rank, this_rank  # noqa: E402
from deepdraft.parallel.shards import SlicedSource  # noqa: E402
from deepdraft.proof import bench_prefill  # noqa: E402
from deepdraft.proof.bench_prefill import PrefillBench, long_prompt_estimate  # noqa: E402
from deepdraft.proof.bench_step import fill_caches, profile_replays  # noqa: E402
from deepdraft.proof.bench_step_main import read_args  # noqa: E402

PARTS = "check,links,chunks,million,alone"
SHARED = "PREFILL_SHARE_MEMORY"
"""Environment of a dry run: the file that the ranks map as their memory."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rows", type=int, default=32768, help="of a chunk, of all ranks")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.json.unlink(missing_ok=True)
    options.json.with_suffix(".ended").unlink(missing_ok=True)
    env = {**os.environ, **NVLINK_MULTICAST_OFF}
    if options.dry_run:
        file = options.json.with_suffix(".memory")
        file.write_bytes(b"")
        os.truncate(file, options.ranks << 24)
        env[SHARED] = str(file)
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
    found: dict = {}
    try:
        run_ranks(command, options.ranks, env=env, limits=Limits(step_s=options.seconds))
    except RankError as error:
        found["ended_with"] = error.message
    if options.json.exists():
        found = json.loads(options.json.read_text()) | found
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if "ended_with" in found else 0


# ---- one rank -------------------------------------------------------------------------------


class Bench:
    """One rank, and what its figures go to."""

    def __init__(self, me: Rank, options: argparse.Namespace) -> None:
        self.options, self.dry, self.begin = options, options.dry_run, time.monotonic()
        self.device = torch.device("cpu" if self.dry else f"cuda:{me.rank}")
        if not self.dry:
            torch.cuda.set_device(me.rank)
        backend = "gloo" if self.dry else "nccl"
        self.group = ProcessGroup(me.rank, me.size, me.store, backend=backend, pulse=me.pulse)
        self.together()
        self.rank, self.size, self.values = me.rank, me.size, {}
        self.plans = Plans()
        if self.dry:
            np.seterr(all="ignore")
            importlib.import_module("tests.kernels.interpreter")
            self.plans = importlib.import_module("tests.kernels.prefill_tiny").PLANS
        else:
            self.note("device", torch.cuda.get_device_name())
        self.note("torch", torch.__version__)
        settings = {name: getattr(options, name) for name in ("pool", "tokens", "rows", "ranks")}
        self.note("settings", settings)

    def note(self, name: str, value: Any) -> None:
        """Rank 0's file gets a figure."""
        self.values[name] = value
        if self.rank == 0:
            self.options.json.write_text(json.dumps(self.values, indent=1) + "\n")
            at = time.monotonic() - self.begin
            print(f"-- {name} (at {at:.0f} s): {json.dumps(value)[:600]}", flush=True)

    def left(self) -> float:
        """Seconds, of the rank that has fewest."""
        own = torch.tensor(
            [self.options.seconds - (time.monotonic() - self.begin)], device=self.device
        )
        return min(float(t) for t in self.group.gather(own))

    def together(self) -> None:
        """All ranks have come here and their devices are idle."""
        self.group.gather(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        own = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return max(float(t) for t in self.group.gather(own))

    def clock(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of a call that all ranks make, together."""
        found = []
        for _ in range(repeats):
            self.together()
            begin = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(self.slowest(time.perf_counter() - begin))
        return sorted(found)[len(found) // 2]

    def memory(self, nbytes: int) -> PeerMemory:
        """Of all ranks."""
        if not self.dry:
            return SymmetricMemory(nbytes)
        whole = np.memmap(os.environ[SHARED], dtype=np.uint8, mode="r+")
        assert nbytes <= 1 << 24
        parts = [torch.from_numpy(whole[r << 24 : (r << 24) + nbytes]) for r in range(self.size)]
        return OneProcessMemory(parts, self.group)

    def share(self, args: V41Args, rows: int, plan: PrefillCuts) -> RowShare:
        """Of chunks of so many rows."""
        memory = self.memory(exchange_bytes(args, rows, self.size))
        regions = Regions(args, rows, memory)
        return RowShare(self.group, regions, own_tables(args, plan, self.rank))


# ---- bits -----------------------------------------------------------------------------------


def small_args(full: V41Args) -> V41Args:
    """Encoder: a window layer, ratio 2 with Engram, reuse. Decoder: ratio 1 with candidates,
    reuse."""
    args = dataclasses.replace(
        full,
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1, *full.compress_ratios[full.num_hidden_layers :]),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3),
        candidate_source_layer_id=3,
        n_routed_experts=min(32, full.n_routed_experts),
        engram_layer_ids=(1,),
        engram_vocab_size=min(20_000, full.engram_vocab_size),
    )
    args = dataclasses.replace(args, dspark_target_layer_ids=(3, 4, 5))
    return dataclasses.replace(args, engram_num_embeddings=engram_tables(args).num_embeddings)


def read_prompt(
    args: V41Args, prefill: DevicePrefill, pool: DevicePool, text: list[int], ends: list[int]
) -> dict[str, Tensor]:
    """A prompt in parts, each to its logits: what is kept of it."""
    state, first, logits = pool.open(), 0, None
    for end in ends:
        prefill.encode(state, text[first:end])
        logits = prefill.replay(state, all_rows=False)[0]
        first = end
    assert logits is not None
    n, ring = state.num_tokens, pool.ring
    at = state.slot * ring + torch.arange(max(0, n - args.sliding_window), n) % ring
    held = {f"window {i}": pool.window[i, at].clone() for i in range(args.num_hidden_layers)}
    for layer, ratio in pool.ratios.items():
        some = slice(
            state.slot * pool.entries[layer], state.slot * pool.entries[layer] + n // ratio
        )
        held |= {f"main {layer}": pool.main[layer][some].clone()}
        held |= {f"index {layer}": pool.index[layer][some].clone()}
    place = state.slot * pool.pending_ring + (n - 1) % pool.pending_ring
    held |= {f"pending {layer}": rows[place].clone() for layer, rows in pool.pending.items()}
    pool.close(state)
    return held | {"logits": logits}


@torch.inference_mode()
def check(bench: Bench, full: V41Args) -> None:
    """Ranks against each other, in time, and by layer against one."""
    args = full if bench.dry else small_args(full)
    primes = engram_tables(args).primes.reshape(1, -1).tolist()
    plan = PrefillCuts(args, bench.size, dict(zip(args.engram_layer_ids, primes, strict=True)))
    source = DummyWeights(args, device=bench.device, seed=5)
    ids = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
    rows, ends = (16, [19]) if bench.dry else (16384, [20_003, 20_008, 20_711])
    text = np.random.default_rng(3).integers(0, args.vocab_size, ends[-1]).tolist()

    def make(given: Any, share: RowShare | None) -> tuple[DevicePrefill, DevicePool]:
        weights = load_weights(args, given, ids, device=bench.device, drafter=False)
        pool = DevicePool(
            args, num_sequences=1, max_tokens=ends[-1] + 64, slack=16, device=bench.device
        )
        return DevicePrefill(weights, pool.caches, chunk=rows, plans=bench.plans, share=share), pool

    cut = SlicedSource(source, plan, bench.rank)
    shared = make(cut, bench.share(args, rows, plan))
    first = read_prompt(args, *shared, text, ends)
    again = read_prompt(args, *shared, text, ends)
    same = [torch.equal(first[name], again[name]) for name in first]
    everywhere = bench.group.gather(torch.tensor(all(same), device=bench.device))
    bench.note("read again, same bits, by rank", [bool(part) for part in everywhere])
    differ = [
        name
        for name, x in first.items()
        if not all(torch.equal(x, part) for part in bench.group.gather(x))
    ]
    bench.note("differs between the ranks", differ)
    lines = by_layer(make(source, None)[0].layers, shared[0].layers, text[: rows - 1])
    errors = torch.tensor([list(line.values()) for line in lines], device=bench.device)
    worst = torch.stack(bench.group.gather(errors)).amax(0).tolist()
    names = list(lines[0])
    found = [dict(zip(names, line, strict=True)) for line in worst]
    bench.note("by layer, from one rank's inputs, worst rank", found)


def by_layer(alone: PrefillLayers, shared: PrefillLayers, text: list[int]) -> list[dict]:
    """Every encoder layer of one chunk on this rank's rows, from what enters it on one rank:
    relative L2 of the streams behind attention, of routed and shared experts, and the shares of
    selected entries and of cached bytes that differ."""
    share, lines, given = shared.share, [], {"slot": 0, "first": 0, "floors": (0, 0)}
    one = make_chunk(alone.caches, text, write_from=0, **given)
    own = share.part(0, len(text))
    assert own is not None
    part = make_chunk(
        shared.caches, text, write_from=0, part=own, rows_at_least=share.rows_each(0, len(text)),
        **given,
    )  # fmt: skip
    flow, tables = alone.start(one)
    _, own_tables_ = shared.start(part)
    count = own.stop - own.start

    def mine(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        out = x.new_zeros(part.rows, *x.shape[1:])
        out[:count] = x[own]
        return out

    def error(x: Tensor, want: Tensor) -> float:
        x, want = x.float(), want.float()
        return float((x - want).norm() / want.norm())

    for layer in range(alone.args.decoder_start):
        names = ("x", "pre", "coef", "y", "shared")
        enters = Flow(**{name: mine(getattr(flow, name)) for name in names})  # type: ignore
        alone.run(one, flow, range(layer, layer + 1), table_rows=tables)
        shared.run(part, enters, range(layer, layer + 1), table_rows=own_tables_)
        assert flow.y is not None and enters.y is not None
        assert flow.shared is not None and enters.shared is not None
        line = {
            "attention": error(enters.x[:count], flow.x[own]),
            "routed": error(enters.y[:count].float().sum(1), flow.y[own].float().sum(1)),
            "shared": error(enters.shared[:count], flow.shared[own]),
            "routed to shared": error(flow.y[own].float().sum(1) + flow.shared[own],
                                      flow.shared[own]),
            "picked entries that differ": 0.0,
            "cached bytes that differ": 0.0,
        }  # fmt: skip
        if layer in part.selected:
            got, want = part.selected[layer], one.selected[layer]
            there = torch.arange(got.entries.shape[1], device=got.entries.device)
            live = there[None] < want.counts[own][:, None]
            off = (got.entries[:count] != want.entries[own]) & live
            line["picked entries that differ"] = float(off.double().mean())
        caches = [(shared.caches.window[layer], alone.caches.window[layer])]
        if layer in shared.caches.main:
            made = len(text) // alone.args.compress_ratios[layer]
            for kind in ("main", "index"):
                both = (getattr(layers.caches, kind)[layer][:made] for layers in (shared, alone))
                caches.append(tuple(both))
        off = torch.stack([(a != b).double().mean() for a, b in caches])
        line["cached bytes that differ"] = float(off.max())
        lines.append(line)
    return lines


# ---- times ----------------------------------------------------------------------------------


def timed_args(full: V41Args, options: argparse.Namespace) -> V41Args:
    if options.dry_run:
        return full
    return dummy_args(full, expert_pool=options.pool, engram_rows=1 << 21)


class ShareBench(PrefillBench):
    """`PrefillBench` of one rank; `shared` False: the whole model on one GPU."""

    def __init__(self, bench: Bench, args: V41Args, *, shared: bool) -> None:
        options = bench.options
        self.args, self.device, self.tokens = args, bench.device, options.tokens
        count = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        rows = dict(zip(args.engram_layer_ids, args.engram_num_embeddings, strict=True))
        lengths = {layer: [n // count] * count for layer, n in rows.items()}
        plan = PrefillCuts(args, bench.size if shared else 1, lengths)
        source = RankWeights(args, plan, bench.rank if shared else 0, bench.device)
        ids = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
        self.weights = load_weights(args, source, ids, device=self.device, drafter=False)
        self.pool = DevicePool(
            args, num_sequences=1, max_tokens=options.tokens, slack=64, device=self.device
        )
        fill_caches(self.pool.caches)
        share = bench.share(args, options.rows, plan) if shared else None
        self.prefill = DevicePrefill(
            self.weights, self.pool.caches, chunk=options.rows, plans=bench.plans, share=share
        )
        with torch.inference_mode():
            self.library = self.prefill.layers.prove_library()
        self.rng = np.random.default_rng(0)

    @torch.inference_mode()
    def chunk(self, context: int, rows: int | None = None) -> Callable[[], None]:
        """As `PrefillBench.chunk`, of this rank's rows."""
        count = min(rows or self.prefill.chunk, self.tokens - context)
        ids, layers, source = self.ids(count), self.prefill.layers, self.args.decoder_start
        share = self.prefill.share

        @torch.inference_mode()
        def run() -> None:
            chunk = make_chunk(
                layers.caches, ids, slot=0, first=context, floors=(0, 0), write_from=0,
                part=share.part(context, count), rows_at_least=share.rows_each(context, count),
            )  # fmt: skip
            flow, table_rows = layers.start(chunk)
            layers.run(chunk, flow, range(source), table_rows=table_rows)
            layers.write_entries(chunk, flow, source)

        return run


@torch.inference_mode()
def links(bench: Bench, args: V41Args, shared: ShareBench) -> None:
    """The exchanges of one chunk alone."""
    share, rows, found = shared.prefill.share, shared.prefill.chunk, {}
    each = rows // bench.size
    chunk = make_chunk(
        shared.pool.caches, shared.ids(rows), slot=0, first=0, floors=(0, 0), write_from=0,
        part=share.part(0, rows), rows_at_least=share.rows_each(0, rows),
    )  # fmt: skip
    v = torch.ones(each, args.hidden_size, dtype=torch.bfloat16, device=bench.device)
    k = args.num_experts_per_tok
    y = torch.ones(rows, k, args.hidden_size, dtype=torch.bfloat16, device=bench.device)
    picks = torch.zeros(each, k, dtype=torch.int32, device=bench.device)

    def inputs() -> None:
        share.send_inputs(v, chunk)
        share.send_picks(picks, picks.float(), chunk)
        share.routed(v, picks, picks, chunk)

    def sums_only() -> None:
        places = share.regions.addresses["sums"]
        push_sums(y, places, rows=rows, each=each, odd=0, rank=bench.rank)

    window = share.window(0, shared.pool.caches.window[0])
    before = args.sliding_window - 1
    ways: dict[str, Callable[[], object]] = {
        "barrier": lambda: share.regions.barrier(0),
        "inputs and picks": inputs,
        "sums pushed": sums_only,
        "sums": lambda: share.sums(y, chunk),
        "window": lambda: share.fill_window(window, before, chunk),
        "last rows": lambda: share.last(v, chunk, args.sliding_window),
    }
    for name, run in ways.items():
        run()
        times = 1 if bench.dry else 20
        seconds = bench.clock(lambda r=run, n=times: [r() for _ in range(n)]) / times
        found[name] = round(1e6 * seconds, 1)
    bench.note(f"exchanges alone, us, {rows} rows", found)


def contexts(options: argparse.Namespace) -> list[int]:
    middle = [] if options.dry_run else [options.tokens // 4, options.tokens // 2]
    return [0, *middle, options.tokens - options.rows]


def chunks(bench: Bench, shared: ShareBench, name: str, clock: Callable[..., float]) -> None:
    """A chunk by context, its kernels at a middle and the last one."""
    lines = []
    for number, context in enumerate(contexts(bench.options)):
        run = shared.chunk(context)
        if not bench.dry:
            run()
        line: dict[str, Any] = {"context": context, "rows": shared.prefill.chunk}
        line["ms"] = round(1e3 * clock(run, 1), 2)
        if number > 1 and not bench.dry:
            profile = profile_replays(run, replays=1).as_json()
            kernels = profile["kernels"]
            assert isinstance(kernels, dict)
            line["idle_share"] = profile["idle_share"]
            line["us"] = {n[:60]: v["us"] for n, v in list(kernels.items())[:26]}
        lines.append(line)
        bench.note(f"chunks, {name}", lines)
    estimate = long_prompt_estimate(lines, bench.options.tokens)
    bench.note(f"estimate of {bench.options.tokens} tokens, s, {name}", round(estimate, 2))


def whole_prompt(bench: Bench, shared: ShareBench, tokens: int, name: str) -> float:
    """Seconds to the logits."""
    seconds = shared.prompt(tokens)
    bench.note(f"{tokens} tokens, s, {name}", round(seconds, 3))
    return seconds


def work(me: Rank) -> None:
    options = arguments()
    me.pulse.set_state("loading")
    bench = Bench(me, options)
    parts = options.parts.split(",")
    full = read_args(None)
    if options.dry_run:
        tests = importlib.import_module("tests.kernels.test_prefill_share")
        full = tests.args()
        options.tokens, options.rows = 40, 16
    args = timed_args(full, options)
    with me.pulse.step():
        if "check" in parts:
            check(bench, full)
        if not options.dry_run:
            torch.cuda.empty_cache()
        estimate = 28.0
        if {"links", "chunks", "million", "prompts"} & set(parts):
            begin = time.monotonic()
            shared = ShareBench(bench, args, shared=True)
            bench.note("load_s, two ranks", round(time.monotonic() - begin, 1))
            bench.note("weights_GB_per_rank", round(shared.weights.nbytes / 1e9, 2))
            if "links" in parts:
                links(bench, args, shared)
            # Prompts first: they compile what longer ones need.
            for tokens in (8192, 65536) if "prompts" in parts else ():
                shared.prompt(tokens)
                whole_prompt(bench, shared, tokens, "shared")
            if "million" in parts and bench.left() > 1.1 * estimate + 5:
                bench.together()
                estimate = whole_prompt(bench, shared, options.tokens, "shared")
            if "chunks" in parts and (bench.left() > 20 or bench.dry):
                chunks(bench, shared, "shared", bench.clock)
            if not options.dry_run:
                note = torch.cuda.max_memory_allocated() / 1e9
                bench.note("most memory of rank 0, GB", round(note, 2))
            del shared
        if not options.dry_run:
            torch.cuda.empty_cache()
        ended = options.json.with_suffix(".ended")
        if "alone" in parts and me.rank == 0:
            one_gpu(bench, args, estimate, "alone-million" in parts)
            ended.touch()
        while "alone" in parts and not ended.exists():
            time.sleep(0.2)  # not in an exchange, which would keep this GPU busy
    bench.note("wall_s", round(time.monotonic() - bench.begin, 1))
    bench.together()


def one_gpu(bench: Bench, args: V41Args, estimate: float, million: bool) -> None:
    """The same on one GPU, beside ranks that wait."""

    def left() -> float:
        return bench.options.seconds - (time.monotonic() - bench.begin)

    if left() < 30 and not bench.dry:
        bench.note("alone", f"no time left: {left():.0f} s")
        return
    alone = ShareBench(bench, args, shared=False)

    def clock(run: Callable[[], object], repeats: int) -> float:
        if bench.dry:
            run()
            return 1.0
        return bench_prefill.timed(run, repeats=repeats, warm=0)

    if million:
        alone.prompt(65536)
    if million and left() > 2.1 * estimate + 3:
        whole_prompt(bench, alone, bench.options.tokens, "one GPU")
    if left() > 25 or bench.dry:
        chunks(bench, alone, "one GPU", clock)


if __name__ == "__main__":
    rank = this_rank()
    if rank is None:
        raise SystemExit(main())
    run_rank(rank, work)
