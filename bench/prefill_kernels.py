"""Each prefill kernel at the sizes of a model: plans, share of the ceilings, torch's beside ours.

Owns: the operands of one chunk, which plans are tried. Stages of prefill_gpu.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from step_results import Results
from torch import Tensor

from deepdraft.kernels import prefill_attention as pa
from deepdraft.kernels import prefill_experts as pe
from deepdraft.kernels import prefill_gemm as pg
from deepdraft.kernels import prefill_index as pi
from deepdraft.kernels import prefill_streams as ps
from deepdraft.models.v41_prefill_layers import Plans
from deepdraft.proof.bench_prefill import Ceilings, PrefillBench

Clock = Callable[[Callable[[], object]], float]
Runs = dict[str, Callable[[], object]]


MOST = 99
"""Plans of a kernel that are tried; a dry run takes two."""


def variants(plan: Any, **choices: tuple[int, ...]) -> list:
    """The plan, and the plan with each of some changes."""
    found = [plan]
    for name, values in choices.items():
        found += [dataclasses.replace(plan, **{name: v}) for v in values]
    return list(dict.fromkeys(found))[:MOST]


def short(plan: Any) -> str:
    """A plan's numbers."""
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(plan).items())


class Kernels:
    """The kernels of one chunk over the weights of a bench."""

    def __init__(self, bench: PrefillBench, ceilings: Ceilings, plans: Plans, clock: Clock) -> None:
        self.bench, self.ceilings, self.plans, self.clock = bench, ceilings, plans, clock
        self.rows, self.args, self.device = bench.prefill.chunk, bench.args, bench.device
        self.source = bench.args.kv_source_layer_ids[0]
        self.layer = bench.weights.layers[self.source]

    def halves(self, *shape: int) -> Tensor:
        """Random bf16."""
        return torch.randn(shape, device=self.device).bfloat16()

    def times(self, runs: Runs, flop: float, moved: float) -> dict[str, object]:
        """Every variant's time and share of the ceilings; one that fails says why."""
        limit = max(flop / self.ceilings.flops, moved / self.ceilings.rate)
        found: dict[str, object] = {}
        for name, run in runs.items():
            try:
                seconds = self.clock(run)
                found[name] = {
                    "ms": round(1e3 * seconds, 4),
                    "share": round(limit / seconds, 4),
                    "TFLOP_s": round(flop / seconds / 1e12, 2),
                }
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        return found

    def dense(self, w: Any, blocks: int = 1) -> dict[str, object]:
        """A dense map; `torch`: the same with bf16 weights by torch's own product."""
        x = self.halves(self.rows, blocks * w.cols)
        changes = {
            "wide": (256, 64), "tall": (128, 64), "groups": (4,), "warps": (4,), "stages": (2, 4),
            "band": (1, 32),
        }  # fmt: skip
        runs: Runs = {
            short(p): lambda p=p: pg.gemm(x, w, blocks=blocks, plan=p)
            for p in variants(self.plans.gemm, **changes)
        }
        if blocks == 1:
            whole = self.halves(w.cols, w.rows)
            runs["torch"] = lambda: x @ whole
        moved = w.nbytes + 2.0 * self.rows * (w.rows + x.shape[1])
        return self.times(runs, 2.0 * self.rows * w.rows * w.cols, moved)

    def picks(self) -> tuple[Tensor, Tensor]:
        """Even routing."""
        shape = self.rows, self.args.n_routed_experts
        some = torch.rand(shape, device=self.device).topk(self.args.num_experts_per_tok).indices
        return some.int(), torch.rand(some.shape, device=self.device)

    def experts(self, half: str) -> dict[str, object]:
        """Half of the routed experts."""
        rows, count = self.rows, self.args.n_routed_experts
        picks, weights = self.picks()
        v = self.halves(rows, self.args.hidden_size)
        h = self.halves(picks.numel(), self.args.moe_intermediate_size)
        w = self.layer.experts
        runs: Runs = {}
        for plan in self.expert_plans():
            found = pe.sort_picks(picks, count, plan=plan)
            if half == "up":
                runs[short(plan)] = lambda p=plan, s=found: pe.sorted_up(
                    v, s, weights, w.w13, limit=10.0, plan=p
                )
            else:
                runs[short(plan)] = lambda p=plan, s=found: pe.sorted_down(
                    h, s, w.w2, rows=rows, plan=p
                )
        used = w.w13 if half == "up" else w.w2
        return self.times(runs, 2.0 * picks.numel() * used.rows * used.cols, float(used.nbytes))

    def expert_plans(self) -> list[pe.ExpertPlan]:
        """What is tried: sides of the tile, then steps."""
        base = self.plans.experts
        sides = [(64, 256), (64, 128), (64, 64), (128, 64), (128, 256)]
        found = [base, *(dataclasses.replace(base, wide=w, tall=t) for w, t in sides)]
        found += variants(base, groups=(4, 1), warps=(4,), stages=(2, 4))[1:]
        found += variants(found[1], stages=(2,), groups=(4,))[1:]
        return found[:MOST]

    def same_bits(self) -> dict[str, bool]:
        """Whether results do not depend on the height of a tile: if so, it may be chosen by the
        number of rows."""
        rows = min(self.rows, 512)
        picks, weights = (t[:rows].contiguous() for t in self.picks())
        v, w = self.halves(rows, self.args.hidden_size), self.layer.experts
        x, found = self.halves(rows, self.layer.attention.w_in.cols), {}
        first: list[Tensor] | None = None
        for tall in (16, 64, 128, 256):
            plan = dataclasses.replace(self.plans.experts, tall=tall)
            s = pe.sort_picks(picks, self.args.n_routed_experts, plan=plan)
            h = pe.sorted_up(v, s, weights, w.w13, limit=10.0, plan=plan)
            own = dataclasses.replace(self.plans.gemm, tall=tall)
            got = [
                pe.sorted_down(h, s, w.w2, rows=rows, plan=plan),
                pg.gemm(x, self.layer.attention.w_in, plan=own),
            ]
            first = first or got
            found[f"tall={tall}"] = all(map(torch.equal, got, first))
        return found

    def sorting(self) -> dict[str, object]:
        """The sort of picks."""
        picks, _ = self.picks()
        count, plan = self.args.n_routed_experts, self.plans.experts
        runs: Runs = {"sort": lambda: pe.sort_picks(picks, count, plan=plan)}
        return self.times(runs, 0.0, 8.0 * picks.numel())

    def index(self, context: int) -> dict[str, object]:
        """Scores and selection at ratio 2."""
        args, rows = self.args, self.rows
        keys = self.bench.pool.caches.index[self.source]
        q = self.halves(rows, args.index_n_heads, args.index_head_dim)
        w = torch.randn(rows, args.index_n_heads, device=self.device)
        reach = (context + torch.arange(rows, device=self.device) + 1) // 2
        reach = reach.clamp(max=keys.shape[0]).int()
        base = torch.zeros_like(reach)
        changes = {"rows": (2, 8), "entries": (64, 256), "warps": (4,)}
        runs: Runs = {
            short(p): lambda p=p: pi.stream_top(
                q, w, keys, base, reach, args.index_topk, weight_scale=0.01, plan=p
            )
            for p in variants(self.plans.index, **changes)
        }
        flop = 2.0 * float(reach.double().sum()) * args.index_n_heads * args.index_head_dim
        return self.times(runs, flop, float(keys.shape[1]) * float(reach.max()))

    def attention(self) -> dict[str, object]:
        """Sparse attention, lists anywhere in the cache."""
        args, rows, a = self.args, self.rows, self.layer.attention
        heads, c, window = args.num_attention_heads, args.head_dim, args.sliding_window
        q = self.halves(rows, heads * c)
        turn = torch.randn(rows, args.qk_rope_head_dim // 2, device=self.device)
        tables = turn.cos(), turn.sin()
        main = self.bench.pool.caches.main[self.source]
        shape = rows, args.index_topk
        lists = torch.randint(0, main.shape[0], shape, device=self.device).sort(1).values.int()
        keys = self.halves(rows + window, c)
        first = torch.zeros(rows, dtype=torch.int32, device=self.device)
        runs: Runs = {
            short(p): lambda p=p: pa.attend_rows(
                q, *tables, keys, first, a.sink, places=window, scale=c**-0.5, main=main,
                main_rows=lists, plan=p,
            )
            for p in variants(self.plans.attention, heads=(32, 16), warps=(4, 16), stages=(1, 3))
        }  # fmt: skip
        flop = 4.0 * rows * heads * c * (window + args.index_topk)
        return self.times(runs, flop, 4.0 * rows * heads * c)

    def streams(self) -> dict[str, object]:
        """From experts to attention."""
        args, rows = self.args, self.rows
        s, d, k = args.hc_mult, args.hidden_size, args.num_experts_per_tok
        x, y, shared = self.halves(rows, s, d), self.halves(rows, k, d), self.halves(rows, d)
        coef = torch.rand(rows, (2 + s) * s, device=self.device)
        w = self.layer.mix_ffn
        mix = ps.Mix.of(w.fn, w.base, w.scale)
        runs: Runs = {
            short(p): lambda p=p: ps.enter(
                x, self.layer.attn_norm, y=y, shared=shared, coef=coef, mix=mix,
                iters=args.hc_sinkhorn_iters, eps=args.hc_eps, norm_eps=args.rms_norm_eps, plan=p,
            )
            for p in variants(self.plans.streams, rows=(16, 64), channels=(64,), warps=(8, 2))
        }  # fmt: skip
        return self.times(runs, 0.0, 2.0 * rows * d * (2 * s + k + 4))


def run(
    results: Results, bench: PrefillBench, ceilings: Ceilings, plans: Plans, clock: Clock,
    tokens: int,
) -> None:  # fmt: skip
    """All of them, a stage each."""
    kernels = Kernels(bench, ceilings, plans, clock)
    a, e = kernels.layer.attention, kernels.layer.experts
    dense = {
        "w_in": (a.w_in, 1), "w_query": (a.w_query, 1), "wo_a": (a.wo_a, a.groups),
        "wo_b": (a.wo_b, 1), "shared13": (e.shared13, 1), "router": (e.gate, 1),
    }  # fmt: skip
    for name, (w, blocks) in dense.items():
        results.stage(f"gemm_{name}", lambda w=w, b=blocks: kernels.dense(w, b), needs=15)
    for half in ("up", "down"):
        results.stage(f"experts_{half}", lambda h=half: kernels.experts(h), needs=20)
    results.stage("sort_picks", kernels.sorting)
    results.stage("same_bits", kernels.same_bits)
    for context in (0, tokens // 4, tokens - kernels.rows):
        results.stage(f"index_{context}", lambda n=context: kernels.index(n), needs=20)
    results.stage("attention", kernels.attention, needs=20)
    results.stage("streams", kernels.streams, needs=20)
