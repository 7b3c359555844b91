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
from deepdraft.kernels import prefill_unpacked as pu
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
        """A dense map, unpacked on the way and first; `torch`: the same with bf16 weights by
        torch's own product."""
        x = self.halves(self.rows, blocks * w.cols)
        runs: Runs = {
            f"on the way {short(p)}": lambda p=p: pg.gemm(x, w, blocks=blocks, plan=p)
            for p in variants(self.plans.gemm, groups=(4,))
        }
        space = torch.empty((w.rows + 64) * w.cols, dtype=torch.bfloat16, device=self.device)
        whole = pu.unpack_dense(w, space)
        runs["unpack"] = lambda: pu.unpack_dense(w, space)
        for p in variants(self.plans.plain, stages=(3,)):
            runs[f"plain {short(p)}"] = lambda p=p: pu.plain_gemm(
                x, whole, w.rows, blocks=blocks, plan=p
            )
        if blocks == 1:
            turned = whole[: w.rows].t()
            runs["torch"] = lambda: x @ turned
        moved = w.nbytes + 2.0 * self.rows * (w.rows + x.shape[1])
        return self.times(runs, 2.0 * self.rows * w.rows * w.cols, moved)

    def picks(self) -> tuple[Tensor, Tensor]:
        """Even routing."""
        shape = self.rows, self.args.n_routed_experts
        some = torch.rand(shape, device=self.device).topk(self.args.num_experts_per_tok).indices
        return some.int(), torch.rand(some.shape, device=self.device)

    def experts(self, half: str) -> dict[str, object]:
        """Half of the routed experts: unpacked on the way; first, all of them a group at a time."""
        rows, count, plain = self.rows, self.args.n_routed_experts, self.plans.plain
        picks, weights = self.picks()
        up, w = half == "up", self.layer.experts
        used, hidden, width = (w.w13 if up else w.w2), w.w2.rows, w.w2.cols
        x = self.halves(rows, hidden) if up else self.halves(picks.numel(), width)
        runs: Runs = {}
        base = self.plans.experts
        for plan in (base, dataclasses.replace(base, wide=64, tall=256, groups=4))[:MOST]:
            found = pe.sort_picks(picks, count, tall=plan.tall)
            runs[f"on the way {short(plan)}"] = lambda p=plan, s=found: (
                pe.sorted_up(x, s, weights, w.w13, limit=10.0, plan=p)
                if up
                else pe.sorted_down(x, s, w.w2, rows=rows, plan=p)
            )
        each = min(self.plans.experts_at_once, count)
        space = torch.empty(each * used.rows * used.cols, dtype=torch.bfloat16, device=self.device)
        y = self.halves(picks.numel(), width if up else hidden)
        more = {"weights": weights, "limit": 10.0} if up else {}

        def unpack() -> list[Tensor]:
            return [
                pu.unpack_experts(used, at, min(each, count - at), space, together=up)
                for at in range(0, count, each)
            ]

        def multiply(plan: Any, found: pe.SortedPicks) -> None:
            part = space[: each * used.rows * used.cols].view(each, used.rows, used.cols)
            for at in range(0, count, each):
                pu.plain_experts(
                    x, part[: min(each, count - at)], at, found.order, found.tiles, found.ends, y,
                    picks=picks.shape[1], plan=plan, **more,
                )  # fmt: skip

        runs["unpack"] = unpack
        unpack()
        for plan in variants(plain, stages=(3,), programs=(132,)):
            found = pe.sort_picks(picks, count, tall=plan.tall)
            runs[f"plain {short(plan)}"] = lambda p=plan, s=found: multiply(p, s)
        return self.times(runs, 2.0 * picks.numel() * used.rows * used.cols, float(used.nbytes))

    def same_bits(self) -> dict[str, bool]:
        """Whether results depend neither on the height of a tile nor on when weights are unpacked:
        if so, both may be chosen by the number of rows."""
        rows, found = min(self.rows, 512), {}
        x = self.halves(rows, self.layer.attention.w_in.cols)
        w = self.layer.attention.w_in
        space = torch.empty((w.rows + 64) * w.cols, dtype=torch.bfloat16, device=self.device)
        plan = dataclasses.replace(self.plans.gemm, tall=128)
        first = pg.gemm(x, w, dtype=torch.float32, plan=plan)
        for tall in (64, 256):
            own = dataclasses.replace(plan, tall=tall)
            got = pg.gemm(x, w, dtype=torch.float32, plan=own)
            found[f"tall={tall}"] = torch.equal(got, first)
        whole = pu.unpack_dense(w, space)
        got = pu.plain_gemm(x, whole, w.rows, dtype=torch.float32, plan=self.plans.plain)
        found["unpacked first"] = torch.equal(got, first)
        picks, weights = (t[:rows].contiguous() for t in self.picks())
        v, e, outputs = self.halves(rows, self.args.hidden_size), self.layer.experts, []
        for plan in (self.plans.experts, pe.few_picks(self.plans.experts, 8)):
            s = pe.sort_picks(picks, self.args.n_routed_experts, tall=plan.tall)
            h = pe.sorted_up(v, s, weights, e.w13, limit=10.0, plan=plan)
            outputs.append(pe.sorted_down(h, s, e.w2, rows=rows, plan=plan))
        found["experts, lower tiles"] = torch.equal(*outputs)
        found["cublas"] = torch.equal(x @ whole[: w.rows].t(), first.bfloat16())
        return found

    def sorting(self) -> dict[str, object]:
        """The sort of picks."""
        picks, _ = self.picks()
        count, plan = self.args.n_routed_experts, self.plans.experts
        runs: Runs = {"sort": lambda: pe.sort_picks(picks, count, tall=plan.tall)}
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
        space = torch.empty(
            keys.shape[0], args.index_head_dim, dtype=torch.bfloat16, device=self.device
        )
        values = pi.key_values(keys[: int(reach.max())], space)
        runs: Runs = {"unpack": lambda: pi.key_values(keys[: int(reach.max())], space)}
        base_plan = self.plans.index
        plans = [("plain", p) for p in self.index_plans(base_plan)] + [("packed", base_plan)]
        for name, plan in plans:
            used = values if name == "plain" else keys
            runs[f"{name} {short(plan)}"] = lambda p=plan, used=used: pi.stream_top(
                q, w, used, base, reach, args.index_topk, weight_scale=0.01, plan=p
            )
        flop = 2.0 * float(reach.double().sum()) * args.index_n_heads * args.index_head_dim
        return self.times(runs, flop, float(keys.shape[1]) * float(reach.max()))

    def index_plans(self, base: pi.IndexPlan) -> list[pi.IndexPlan]:
        """What is tried with keys that are unpacked first."""
        changes = (
            {}, {"entries": 64, "stages": 3, "turns": 16}, {"entries": 64, "stages": 4},
            {"warps": 8, "stages": 3}, {"rows": 8, "entries": 64, "stages": 3, "turns": 16},
            {"rows": 8, "entries": 64, "stages": 3, "warps": 8, "turns": 16},
        )  # fmt: skip
        return [dataclasses.replace(base, **change) for change in changes][:MOST]

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
        space = torch.empty(main.shape[0], c, dtype=torch.bfloat16, device=self.device)
        values = pa.main_values(main, space)
        runs: Runs = {"unpack": lambda: pa.main_values(main, space)}
        for name, used in (("packed", main), ("plain", values)):
            changes = ({}, {"keys": 32, "stages": 3}, {"keys": 32, "stages": 4})
            for change in changes[: 1 if name == "packed" else MOST]:
                p = dataclasses.replace(self.plans.attention, **change)
                runs[f"{name} {short(p)}"] = lambda p=p, used=used: pa.attend_rows(
                    q, *tables, keys, first, a.sink, places=window, scale=c**-0.5, main=used,
                    main_rows=lists, plan=p,
                )  # fmt: skip
        some = lists // 64  # rows that share entries
        runs["plain, entries that are shared"] = lambda: pa.attend_rows(
            q, *tables, keys, first, a.sink, places=window, scale=c**-0.5, main=values,
            main_rows=some, plan=self.plans.attention,
        )  # fmt: skip
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
            for p in [
                dataclasses.replace(self.plans.streams, **change)
                for change in ({}, {"warps": 8}, {"part": 2048}, {"stages": 4}, {"channels": 512})
            ][:MOST]
        }  # fmt: skip
        return self.times(runs, 0.0, 2.0 * rows * d * (2 * s + k + 4))


def best(data: dict[str, Any], contexts: tuple[int, ...]) -> dict[str, dict[str, int]]:
    """The fastest plan of each kernel that was measured, by the name it has in `Plans`: of several
    stages the one with the least time in all."""
    found: dict[str, dict[str, int]] = {}
    stages = {
        "plain": ["gemm_w_query", "gemm_wo_a", "experts_up", "experts_down"],
        "index": [f"index_{n}" for n in contexts],
        "attention": ["attention"],
        "streams": ["streams"],
    }
    for kernel, names in stages.items():
        sums: dict[str, list[float]] = {}
        for name in names:
            for plan, value in data.get(name, {}).items():
                if "=" in plan and not plan.startswith(("on the way", "packed")):
                    ms = value.get("ms", float("inf")) if isinstance(value, dict) else float("inf")
                    sums.setdefault(plan.removeprefix("plain "), []).append(ms)
        longest = max(map(len, sums.values()), default=0)
        whole = {plan: sum(ms) for plan, ms in sums.items() if len(ms) == longest}
        if whole:
            numbers = (part.split("=") for part in min(whole, key=whole.__getitem__).split())
            found[kernel] = {name: int(value) for name, value in numbers}
    return found


def run(
    results: Results, bench: PrefillBench, ceilings: Ceilings, plans: Plans, clock: Clock,
    tokens: int,
) -> None:  # fmt: skip
    """All of them, a stage each."""
    kernels = Kernels(bench, ceilings, plans, clock)
    a, e = kernels.layer.attention, kernels.layer.experts
    dense = {
        "w_query": (a.w_query, 1), "wo_a": (a.wo_a, a.groups), "w_in": (a.w_in, 1),
        "shared13": (e.shared13, 1), "router": (e.gate, 1),
    }  # fmt: skip
    for half in ("up", "down"):
        results.stage(f"experts_{half}", lambda h=half: kernels.experts(h), needs=20)
    results.stage("attention", kernels.attention, needs=20)
    for context in (tokens - kernels.rows, tokens // 4, 0):
        results.stage(f"index_{context}", lambda n=context: kernels.index(n), needs=20)
    results.stage("streams", kernels.streams, needs=10)
    for name, (w, blocks) in dense.items():
        results.stage(f"gemm_{name}", lambda w=w, b=blocks: kernels.dense(w, b), needs=10)
    results.stage("sort_picks", kernels.sorting)
    results.stage("same_bits", kernels.same_bits)
    contexts = tokens - kernels.rows, tokens // 4
    results.stage("best", lambda: best(results.data, contexts), needs=-1e9)
