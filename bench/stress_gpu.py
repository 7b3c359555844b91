"""The captured step again and again on one GPU: is every replay the first one, bit for bit?

    python bench/stress_gpu.py --json FILE [--seconds 190] [--parts forms,where,grid,alone,whole]

What a step gives (logits) and leaves (caches, tokens) is compared on the device, after every
replay, with the same launches one behind the other: in one lane, without programmatic launch.

forms  6 rows, 22 experts, every form of `FORMS`, many replays and the time of one: `kept` is the
       fastest with no other bits anywhere
where  for forms that gave other bits: which result of which layer is the first to differ. All
       results are kept, so no memory serves twice within a step
grid   `kept` at 1 to 8 rows, several numbers of experts and contexts
alone  `kept`, routed freely: each row alone against its bits beside the others
whole  times of the whole step with `kept` (what bench/results/c-step.json holds)

The GPU must be idle otherwise. Random weights of the published shape.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import trials_gpu  # noqa: E402
from step_results import Results  # noqa: E402

from deepdraft.kernels import runtime  # noqa: E402
from deepdraft.kernels.native import stream  # noqa: E402
from deepdraft.models.v41_buffers import RowInputs  # noqa: E402
from deepdraft.models.v41_step import Lanes  # noqa: E402
from deepdraft.proof.bench_step import Capture, time_graph  # noqa: E402

FORMS = (
    "", "held+fenced", "query", "query+held", "query+fenced", "combine+held+fenced",
    "combine+query+held+fenced", "held", "fenced", "combine+query+held",
)  # fmt: skip
GRID = ((1, 6), (2, 11), (4, 18), (6, 22), (6, 35), (8, 25))
CONTEXTS = (120, 16376, 32768)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the widest integers that they fill."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 else flat


def parted(text: str) -> frozenset[str]:
    return frozenset(text.split("+")) - {""}


class Stress(trials_gpu.Tried):
    """Steps captured twice: as they are used, and without programmatic launch."""

    def at(self, rows: int, experts: int | None, context: int) -> None:
        """Rows after `context` tokens, always the same ones."""
        bench = self.p.bench
        longest, bench.context = bench.context, context
        bench.rng = trials_gpu.np.random.default_rng(5)
        bench.set_rows(rows, experts)
        bench.context = longest

    def captured(self, *, programmatic: bool, lanes: bool = True) -> Capture:
        step = self.p.bench.step
        usual = step.lanes
        if not lanes:
            step.lanes = Lanes(self.p.bench.weights.device, on=False)
        runtime.use_programmatic_launch(programmatic)
        try:
            return self.p.bench.capture()
        finally:
            runtime.use_programmatic_launch(True)
            step.lanes = usual

    def state(self) -> dict[str, torch.Tensor]:
        c = self.p.bench.caches
        found = {"window": bits(c.window_rows), "tokens": bits(c.tokens)}
        for name, parts in (("main", c.main), ("index", c.index), ("pending", c.pending)):
            found |= {f"{name} {layer}": bits(part) for layer, part in parts.items()}
        return found

    def counted(
        self, step: Capture, want: torch.Tensor, kept: dict[str, torch.Tensor], replays: int
    ) -> dict:
        """Replays with other logits (by row) or state (by part) than those of the plain step."""
        device = self.p.bench.device
        rows, now = want.shape[0], self.state()
        by_row = torch.zeros(rows, dtype=torch.int64, device=device)
        by_part = torch.zeros(len(now), dtype=torch.int64, device=device)
        wrong, wrong_state = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        for _ in range(replays):
            step.graph.replay()
            apart = (bits(step.logits[:rows]) != bits(want)).view(rows, -1).any(1)
            by_row += apart
            wrong += apart.any()
            other = torch.stack([(now[name] != part).any() for name, part in kept.items()])
            by_part += other
            wrong_state += other.any()
        parts = {n: c for n, c in zip(kept, by_part.tolist(), strict=True) if c}
        return {
            "replays": replays, "logits_differ": int(wrong), "by_row": by_row.tolist(),
            "state_differs": int(wrong_state), "parts": parts,
        }  # fmt: skip

    def case(
        self, names: frozenset[str], rows: int, experts: int | None, context: int, replays: int,
        *, timed: bool = False, lanes: bool = True, plain: int = 20,
    ) -> dict:  # fmt: skip
        """One step, replayed so often, and `plain` times without programmatic launch: what differs
        from launches one behind the other, in one lane."""
        self.use(names)
        self.at(rows, experts, context)
        first = self.captured(programmatic=False, lanes=False)
        first.graph.replay()
        self.p.bench.synchronize()
        logits = first.logits[:rows].clone()
        kept = {name: part.clone() for name, part in self.state().items()}
        again = self.counted(first, logits, kept, 3)
        found: dict[str, object] = {"plain_differ": 0}
        if lanes and plain:
            usual = self.counted(self.captured(programmatic=False), logits, kept, plain)
            found = {"plain_differ": max(usual["logits_differ"], usual["state_differs"])}
            found |= {"plain_parts": usual["parts"]} if usual["parts"] else {}
        step = self.captured(programmatic=True, lanes=lanes)
        found |= self.counted(step, logits, kept, replays)
        found |= {
            "one_by_one_differ": max(again["logits_differ"], again["state_differs"]),
            "finite": bool(torch.isfinite(logits).all()),
        }
        if timed:
            found["ms"] = round(time_graph(step.graph.replay, replays=10).median, 4)
        return found

    def where(self, names: frozenset[str], most: int, seconds: float) -> dict:
        """The first results that differ, of each replay with other logits."""
        self.use(names)
        self.at(6, 22, 32768)
        step = self.p.bench.step
        seen: dict[str, torch.Tensor] = {}
        step.observer = lambda name, value: seen.__setitem__(name, value)
        try:
            plain = self.captured(programmatic=False, lanes=False)
            plain.graph.replay()
            self.p.bench.synchronize()
            want = {name: value.clone() for name, value in seen.items()}
            want["logits"] = plain.logits.clone()
            del plain
            seen.clear()
            captured = self.captured(programmatic=True)
        finally:
            step.observer = None
        seen["logits"] = captured.logits
        found: list[list] = []
        begin, done = time.perf_counter(), 0
        while done < most and time.perf_counter() - begin < seconds and len(found) < 12:
            captured.graph.replay()
            done += 1
            if torch.equal(bits(seen["logits"][:6]), bits(want["logits"][:6])):
                continue
            apart = []
            for name, value in seen.items():
                rows = (value[:6].flatten(1) != want[name][:6].flatten(1)).nonzero()
                if len(rows):
                    places = rows[:, 1]
                    apart.append([
                        name, sorted(set(rows[:, 0].tolist())), len(rows),
                        int(places.min()), int(places.max()),
                    ])  # fmt: skip
                    if len(apart) == 1:
                        at = places.unique()[:128]
                        apart[0] += [
                            at.tolist(),
                            [v[:6].flatten(1)[:, at].tolist() for v in (want[name], value)],
                        ]
                if len(apart) == 3:
                    break
            found.append(apart)
        return {"replays": done, "first": found}

    def alone(self, context: int, replays: int) -> dict:
        """Six rows, then each of them alone, routed freely."""
        bench = self.p.bench
        self.at(6, None, context)
        assert bench.inputs is not None
        ids = bench.inputs.ids[:6].tolist()
        six = self.captured(programmatic=True)
        six.graph.replay()
        want = six.logits[:6].clone()
        bench.inputs = RowInputs(1, bench.device)
        bench.inputs.set([(0, context, ids[:1])])
        one = self.captured(programmatic=True)
        wrong = torch.zeros(6, dtype=torch.int64, device=bench.device)
        for i in range(6):
            bench.inputs.set([(0, context + i, ids[i : i + 1])])
            for _ in range(replays):
                one.graph.replay()
                wrong[i] += (bits(one.logits[:1]) != bits(want[i : i + 1])).any()
        return {"replays": 6 * replays, "rows_apart": wrong.tolist()}


def clean(found: object) -> bool:
    """Whether a case saw nothing but the plain step's bits."""
    counts = ("logits_differ", "state_differs", "plain_differ", "one_by_one_differ")
    return isinstance(found, dict) and all(found.get(n) == 0 for n in counts)


def fastest(forms: dict[str, object]) -> str | None:
    """Of the forms without any difference the one whose step is shortest."""
    good = {n: f["ms"] for n, f in forms.items() if clean(f) and isinstance(f, dict) and "ms" in f}
    return min(good, key=lambda n: good[n]) if good else None


def choose(stress: Stress, results: Results, args: argparse.Namespace) -> str | None:
    """Every form; where other bits were seen, whether side lanes and which result they start at."""
    forms: dict[str, object] = {}
    of = partial(stress.case, rows=6, experts=22, context=args.context, replays=args.replays)
    for form in args.forms.split(","):
        run = partial(of, parted(form), timed=True)
        forms[form] = results.stage(f"form {form or 'usual'}", run, needs=12)
    dirty = [f for f, found in forms.items() if not clean(found)]
    for form in dirty[:3] if "where" in args.parts else ():
        run = partial(stress.where, parted(form), args.replays, 6.0)
        results.stage(f"where {form or 'usual'}", run, needs=45)
    for form in dirty[:1]:
        run = partial(of, parted(form), lanes=False)
        results.stage(f"form {form or 'usual'}, one lane", run, needs=60)
    kept = fastest(forms)
    results.data["kept"] = kept
    print(f"-- kept: {kept!r}", flush=True)
    return kept


def confirm(stress: Stress, results: Results, args: argparse.Namespace, kept: str) -> None:
    """One form at other rows, experts and contexts, its rows alone, and its times."""
    stress.use(parted(kept))
    if "alone" in args.parts:
        for context in (120, 32768):
            results.stage(f"alone at {context}", partial(stress.alone, context, 20), needs=15)
        run = partial(stress.case, parted(kept), 6, 22, args.context, 10, plain=args.replays)
        results.stage("without programmatic launch", run, needs=10)
    if "whole" in args.parts:
        for rows, experts in trials_gpu.ROWS:
            run = partial(stress.p.whole, rows, experts)
            results.stage(f"whole rows {rows} experts {experts}", run)
        results.stage("profile", partial(stress.p.profile, 6, 22))
    if "grid" in args.parts:
        for rows, experts in GRID:
            for context in CONTEXTS:
                run = partial(stress.case, parted(kept), rows, experts, context, args.replays // 4)
                results.stage(f"grid rows {rows} experts {experts} at {context}", run, needs=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--parts", default="forms,where,grid,alone,whole")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--kept", default="", help="without part forms: the form to look at")
    parser.add_argument("--replays", type=int, default=400)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    os.environ[stream.SETTING] = "all"
    results = Results(args.json, args.seconds)
    results.data["device"] = torch.cuda.get_device_name()
    wanted = trials_gpu.wanted()
    more = ({"GIVE": 1}, {"GIVE": 2}, {"GIVE": 3}, {"GIVE": 2, "VOTED": 1})
    wanted += [(file, made | other) for other in more for file, made in wanted]
    built = threading.Thread(target=trials_gpu.prebuild, args=(wanted,))
    built.start()
    made: list[Stress] = []
    results.stage("load", lambda: made.append(Stress(args)) or made[0].p.loaded())
    if not made:
        raise SystemExit("no weights")
    stress = made[0]
    stress.use(frozenset())
    results.stage("compile", stress.p.compile)
    built.join()
    kept = choose(stress, results, args) if "forms" in args.parts else args.kept
    if kept is None:
        raise SystemExit("no form gives the same bits every time")
    confirm(stress, results, args, kept)
    cases = [f for f in results.data.values() if isinstance(f, dict) and "logits_differ" in f]
    results.data["replays"] = sum(f["replays"] for f in cases)
    results.save()


if __name__ == "__main__":
    main()
