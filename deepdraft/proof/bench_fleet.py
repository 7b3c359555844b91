"""`bench fleet`: conversations on 1 to N replicas, measured and simulated.

Owns: which fleets are measured in what order, the choice of a server where the client makes it, the
record. Knows nothing of: HTTP, processes, events of a simulation.
"""

import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deepdraft.errors import ConfigError
from deepdraft.proof.fleet_calibrate import Calibration, Machine
from deepdraft.proof.fleet_costs import Costs, read_costs
from deepdraft.proof.fleet_figures import COMPUTED, TurnDone, compare, figures
from deepdraft.proof.fleet_served import Kind, Started, replicas, servers
from deepdraft.proof.fleet_sim import FleetShape, Simulated, in_tokens, simulate
from deepdraft.proof.fleet_trace import TracePlan, fleet_trace, num_turns
from deepdraft.proof.serve_client import Answer, Ask, Target
from deepdraft.proof.serve_load import Done, conversations

Say = Callable[[str], None]
Routing = Literal["random", "sticky", "own"]
"""The client draws a server for each turn; keeps a conversation where it began; leaves it to the
fleet."""
_MOST_NAMED = 16
"""Of simulated replicas in a record."""
_FETCHED = "deepdraft_kv_fetch_bytes_total"
_ENGINE = ("deepdraft_prefill_seconds_total", "deepdraft_iteration_seconds_total")
_ENGINES = (
    *("prefill_seconds_total", "prompt_tokens_total", "iteration_seconds_total"),
    *("iterations_total", "spec_decode_steps_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_sum", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("kv_fetches_total", "kv_fetch_seconds_total", "kv_directory_seconds_total"),
)
"""Counters that say where a run's time went."""
_PACE_TRIES, _SAME_PACE = 4, 0.01
"""A run's pace is found in so many steps, or as soon as it is known so well."""
_TOLD_S = 2.5
"""So late a front may hear its engines' counters."""
_LATER_REUSED, _POINTS, _IMBALANCE, _OFF = 0.95, 0.02, 0.15, 0.20
"""The figures to reach: reuse of later turns, distance from stickiness, imbalance, predictions."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet that is measured."""

    kind: Kind
    count: int
    sharing: bool
    routing: Routing

    @property
    def name(self) -> str:
        """Of its row."""
        shared = "shared" if self.sharing else "unshared"
        return f"{self.count} {self.kind} {self.routing} {shared}"


def cases(
    kind: Kind, counts: Sequence[int], sharing: Sequence[bool], routings: Sequence[Routing]
) -> list[Case]:
    """All wanted ones that differ: one replica shares with nobody and is its own choice."""
    found: dict[Case, None] = {}
    for count in counts:
        for shared in sharing:
            for routing in routings:
                alone = count == 1
                found[Case(kind, count, shared and not alone, "own" if alone else routing)] = None
    return list(found)


class Router:
    """Several servers behind a client's choice."""

    def __init__(self, targets: Sequence[Target], routing: Routing, seed: int, tag: str) -> None:
        """`tag`: goes before the names of conversations, so that no run meets another's."""
        self._targets, self._routing, self._tag = targets, routing, tag
        self._random = random.Random(f"router {seed}")
        self._lock = threading.Lock()
        self._homes: dict[str, Target] = {}
        self._given = dict.fromkeys((t.name for t in targets), 0)

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        """Sends a turn to the server whose turn it is, with the conversation's session id."""
        target = self._choose(ask.name)
        session = f"{self._tag}-{ask.name}".replace(" ", "-")
        answer = target.ask(replace(ask, session=session), deadline_s=deadline_s)
        answer.replica = answer.replica or target.name
        return answer

    def _choose(self, name: str) -> Target:
        with self._lock:
            if self._routing != "sticky":
                return self._random.choice(self._targets)
            if name not in self._homes:
                home = min(self._targets, key=lambda t: self._given[t.name])
                self._given[home.name] += 1
                self._homes[name] = home
            return self._homes[name]


@contextlib.contextmanager
def started(case: Case, model: str | None, url: str | None) -> Generator[Started]:
    """The case's fleet."""
    if case.kind == "url":
        assert url is not None
        yield Started((url,), ())
    elif case.kind == "servers":
        with servers(model, case.count, sharing=case.sharing) as fleet:
            yield fleet
    else:
        extra = "sticky = true" if case.routing == "sticky" else ""
        with replicas(model, case.count, sharing=case.sharing, extra=extra) as fleet:
            yield fleet


def targets_of(fleet: Started, timeout_s: float = 300.0) -> list[Target]:
    """The fleet's servers; answers have their full length, so that runs can be compared."""
    return [
        Target(f"server {i + 1}", url, timeout_s=timeout_s, ignore_eos=True)
        for i, url in enumerate(fleet.urls)
    ]


def run(fleet: Started, case: Case, plan: TracePlan, tag: str) -> dict[str, Any]:
    """Plays the trace on a fleet that is ready, and gives the figures."""
    trace = fleet_trace(plan)
    targets = targets_of(fleet)
    for i in range(2 * case.count):
        targets[i % len(targets)].ask(Ask((f"{tag} {i}: hello",), 4, session=f"{tag}-warm-{i}"))
    router = Router(targets, case.routing, plan.seed, tag)
    before = fleet.counters()
    cpu, own = fleet.cpu_s(), time.process_time()
    begin = time.perf_counter()
    done = conversations(router, trace)
    wall_s = time.perf_counter() - begin
    own = time.process_time() - own
    cpu = fleet.cpu_s() - cpu
    if case.kind != "servers":
        time.sleep(_TOLD_S)
    counted = fleet.counters() - before
    shares = case.sharing or case.kind == "url"
    result = figures(
        turns_of(done),
        wall_s,
        replicas=case.count,
        fetch_bytes=round(counted[_FETCHED]) if shares else None,
    )
    busy = sum(counted[name] for name in _ENGINE) / wall_s / case.count
    result["engines_busy"] = round(busy, 4) if busy else None
    result["engines"] = {name: round(counted[f"deepdraft_{name}"], 3) for name in _ENGINES}
    result["fault_messages"] = sorted({d.answer.message for d in done if d.answer.fault})[:5]
    result["cpu_s"] = {"fleet": round(cpu, 2) if fleet.pids else None, "client": round(own, 2)}
    late = sorted(d.late_s for d in done)
    result["client_late_ms_p99"] = round(1e3 * late[int(0.99 * (len(late) - 1))], 1)
    return result


def turns_of(done: Sequence[Done]) -> list[TurnDone]:
    """Answers as turns, with what was known before each of them."""
    by_name: dict[str, list[Done]] = defaultdict(list)
    for one in done:
        by_name[one.ask.name].append(one)
    out = []
    for own in by_name.values():
        known = 0
        for one in sorted(own, key=lambda d: len(d.ask.turns)):
            answer = one.answer
            out.append(
                TurnDone(
                    number=(len(one.ask.turns) + 1) // 2,
                    first_s=answer.first_s + one.late_s if answer.first_s else 0.0,
                    end_s=answer.end_s + one.late_s,
                    prompt=answer.prompt_tokens,
                    cached=answer.cached_tokens,
                    known=known,
                    tokens=answer.tokens,
                    source=answer.cache_source or COMPUTED,
                    replica=answer.replica or "",
                    fault=answer.fault,
                )
            )
            known = answer.prompt_tokens + answer.tokens
    return out


def predict(
    case: Case, plan: TracePlan, costs: Costs, per_machine: int, kv_bytes: float = float("inf")
) -> dict[str, Any]:
    """The case's figures as simulated, `per_machine` replicas on each machine, each with so much
    memory for conversations."""
    shape = FleetShape(
        replicas=case.count,
        per_machine=per_machine,
        routing={"random": "random", "sticky": "sticky", "own": "two"}[case.routing],  # type: ignore[arg-type]
        sharing=case.sharing,
        kv_bytes=kv_bytes,
        seed=plan.seed,
    )
    return simulated_figures(simulate(in_tokens(plan, costs), costs, shape), case.count)


def highest_rate(
    case: Case,
    plan: TracePlan,
    costs: Costs,
    per_machine: int,
    limit_ms: float,
    kv_bytes: float = float("inf"),
) -> tuple[float, dict[str, Any]]:
    """Conversations a second that the case takes while 95 of 100 later turns have their first token
    within `limit_ms`, to 5 %, and its figures then. Each try has as many conversations as begin
    in the time of the plan. Raises ConfigError where even few are too many."""
    window_s = plan.conversations / plan.rate

    def tried(rate: float) -> dict[str, Any] | None:
        count = max(40, round(rate * window_s))
        row = predict(
            case, replace(plan, rate=rate, conversations=count), costs, per_machine, kv_bytes
        )
        within = row["later_turns"]["first_token_ms"]["p95"] <= limit_ms
        return row if within else None

    low, best = 1e-3 * case.count, None
    best = tried(low)
    if best is None:
        raise ConfigError(f"{limit_ms:g} ms to a first token are too few for these costs")
    high = 2 * low
    while (found := tried(high)) is not None and high < 1e4 * case.count:
        low, best, high = high, found, 2 * high
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        found = tried(middle)
        low, best, high = (low, best, middle) if found is None else (middle, found, high)
    return low, best


def simulated_figures(out: Simulated, count: int) -> dict[str, Any]:
    """A simulated run's figures, as those of a measured one, and what only a simulation knows."""
    result = figures(out.turns, out.wall_s, replicas=count, fetch_bytes=round(out.fetch_bytes))
    if count > _MOST_NAMED:
        del result["by_replica"]
    result["fetch_mbit_per_s_and_replica"] = round(
        8e-6 * out.fetch_bytes / max(out.wall_s, 1e-9) / count, 2
    )
    result["engines_busy"] = round(out.busy_share, 4)
    result["kv_bytes_most"] = round(out.kv_bytes_most)
    return result


def checks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures to reach, where the rows hold what is needed for them."""
    out: dict[str, Any] = {}
    shared = [r for r in rows if r["case"]["sharing"] and r["case"]["routing"] != "sticky"]
    for row in shared:
        measured = row["measured"]
        reused = measured["later_turns"]["reused"]
        own = {
            "later_reused": reused,
            "later_reused_ok": reused is not None and reused >= _LATER_REUSED,
            "imbalance": measured["imbalance"],
            "imbalance_ok": (measured["imbalance"] or 0.0) < _IMBALANCE,
        }
        sticky = [
            r["measured"]["later_turns"]["reused"]
            for r in rows
            if r["case"]["routing"] == "sticky" and r["case"]["count"] == row["case"]["count"]
        ]
        if sticky and None not in (sticky[0], reused):
            own["points_below_sticky"] = round(100 * (sticky[0] - reused), 2)
            own["sticky_ok"] = sticky[0] - reused <= _POINTS
        out[row["name"]] = own
    off = [
        abs(figure["off"])
        for row in rows
        if "compared" in row
        for name, figure in row["compared"].items()
        # Of 183 turns nine lie beyond the 95th percentile: it is told and not judged. The engines'
        # time gave the run's pace.
        if figure["off"] is not None and not name.endswith(("_p95", "_busy"))
    ]
    if off:
        out["predictions"] = {"worst_off": round(max(off), 4), "ok": max(off) <= _OFF}
    return out


def measure(
    wanted: Sequence[Case],
    plan: TracePlan,
    *,
    model: str | None = None,
    url: str | None = None,
    calibrate: bool = False,
    costs: Costs | None = None,
    runs: int = 3,
    say: Say = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Every case on a fleet of its own, each with its prediction where costs are known. `keep` gets
    what there is after each of them."""
    tag = f"{random.SystemRandom().randrange(1 << 32):08x}"
    result: dict[str, Any] = {
        "what": "conversations on a fleet",
        "format": 1,
        "settings": {**asdict(plan), "turns": num_turns(fleet_trace(plan)), "ignore_eos": True},
        "cases": [],
    }
    if calibrate:
        costs = calibrated(wanted[0].kind, model, plan, runs, say)
    if costs is not None:
        result["costs"] = costs.as_dict()
    for case in wanted:
        say(f"{case.name}: starting")
        with started(case, model, url) as fleet:
            say(f"{case.name}: {result['settings']['turns']} turns")
            row: dict[str, Any] = {"name": case.name, "case": asdict(case)}
            states = []
            if costs is not None:
                states.append(Calibration(fleet, targets_of(fleet), plan, runs).machine(case.count))
            row["measured"] = run(fleet, case, plan, f"{tag}-{len(result['cases'])}")
            if costs is not None:
                states.append(Calibration(fleet, targets_of(fleet), plan, runs).machine(case.count))
        if costs is not None:
            row["machine"] = [asdict(state) for state in states]
            row["pace"], row["predicted"] = at_its_pace(
                case, plan, then(costs, states), row["measured"]["engines_busy"]
            )
            row["compared"] = compare(row["measured"], row["predicted"])
        result["cases"].append(row)
        result["checks"] = checks(result["cases"])
        keep(result)
    return result


def then(costs: Costs, states: Sequence[Machine]) -> Costs:
    """The costs on a machine as it was in these moments, on average."""
    if costs.alone_s:
        costs = costs.slower(statistics.fmean(s.alone_s for s in states) / costs.alone_s)
    shared = [s.capacity[1] for s in states if len(s.capacity) > 1]
    return replace(costs, capacity=(1.0, statistics.fmean(shared))) if shared else costs


def at_its_pace(
    case: Case, plan: TracePlan, costs: Costs, busy: float | None
) -> tuple[float, dict[str, Any]]:
    """By what factor all that is computed took longer in a run than `costs` say, and what is
    predicted for that. `busy`: share of the run in which engines computed, by their own counters;
    a virtual machine's host changes within a run, so its pace is known from that run alone (and not
    where engines never rest). Nothing else of the run goes into its prediction."""
    pace, predicted = 1.0, predict(case, plan, costs, per_machine=case.count)
    for _ in range(_PACE_TRIES):
        if not busy or abs(busy / predicted["engines_busy"] - 1) < _SAME_PACE:
            break
        pace *= busy / predicted["engines_busy"]
        predicted = predict(case, plan, costs.slower(pace), per_machine=case.count)
    return round(pace, 4), predicted


def calibrated(kind: Kind, model: str | None, plan: TracePlan, runs: int, say: Say) -> Costs:
    """The costs on this machine. Fetches and shared cores are measured on two plain servers, the
    rest on the kind of fleet that is to be predicted."""

    def of(fleet: Started) -> Calibration:
        return Calibration(fleet, targets_of(fleet), plan, runs)

    if kind == "replicas":
        with replicas(model, 1, sharing=False) as one:
            costs = of(one).engine(say)
        with servers(model, 2, sharing=True) as two:
            return of(two).pair(costs, say)
    with servers(model, 2, sharing=True) as two:
        return of(two).pair(of(two).engine(say), say)


def simulated(
    wanted: Sequence[Case],
    plan: TracePlan,
    file: str,
    per_machine: int,
    limit_ms: float | None,
    kv_bytes: float,
) -> dict[str, Any]:
    """The record of simulated fleets; with `limit_ms` each at the highest rate that keeps it."""
    costs, rows = read_costs(file), []
    for case in wanted:
        row: dict[str, Any] = {"name": case.name, "case": asdict(case)}
        if limit_ms is None:
            row["predicted"] = predict(case, plan, costs, per_machine, kv_bytes)
        else:
            rate, row["predicted"] = highest_rate(
                case, plan, costs, per_machine, limit_ms, kv_bytes
            )
            row["conversations_per_s"] = round(rate, 4)
        rows.append(row)
    return {
        "what": "conversations on a simulated fleet",
        "format": 1,
        "settings": {**asdict(plan), "limit_ms": limit_ms, "per_machine": per_machine},
        "cases": rows,
        "costs": costs.as_dict(),
    }


def main(
    wanted: Sequence[Case],
    plan: TracePlan,
    *,
    simulate_only: str | None = None,
    per_machine: int = 1,
    limit_ms: float | None = None,
    kv_bytes: float = float("inf"),
    costs: str | None = None,
    as_json: bool = False,
    out: str | None = None,
    **options: Any,
) -> int:
    """Measures or simulates, prints, writes. 1 where a request had a fault."""
    begun: dict[str, Any] = {}
    if simulate_only is not None:
        result = simulated(wanted, plan, simulate_only, per_machine, limit_ms, kv_bytes)
    else:
        from deepdraft.proof.bench import provenance

        begun = provenance()
        known = None if costs is None else read_costs(costs)
        result = measure(
            wanted,
            plan,
            costs=known,
            say=lambda text: print(text, file=sys.stderr),
            keep=lambda result: _write(out, {**result, **begun}),
            **options,
        )
    record = {**result, **begun}
    _write(out, record)
    text = json.dumps(record, indent=1)
    print(text if as_json else table_of(record))
    faults = any(row["measured"]["faults"] for row in result["cases"] if "measured" in row)
    return 1 if faults else 0


def _write(out: str | None, record: dict[str, Any]) -> None:
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


def table_of(record: dict[str, Any]) -> str:
    """The figures as lines of text."""
    lines = [
        f"{'':36}{'good':>11}{'tok/s':>9}{'first token ms':>18}{'later':>18}{'reused':>9}"
        f"{'peer':>7}{'imbal.':>8}",
        f"{'':36}{'':>11}{'':>9}{'p50 / p95':>18}{'p50 / p95':>18}",
    ]
    for row in record["cases"]:
        for kind in ("measured", "predicted"):
            if kind in row:
                name = row["name"] if kind == "measured" or "measured" not in row else "  predicted"
                lines.append(f"{name[:35]:<36}" + _cells(row[kind]))
                if "conversations_per_s" in row:
                    lines.append(_planned(row))
                lines += [f"    {message}" for message in row[kind].get("fault_messages", ())]
    for name, own in record.get("checks", {}).items():
        lines.append(f"{name}: " + ", ".join(f"{k} {v}" for k, v in own.items()))
    return "\n".join(lines)


def _planned(row: dict[str, Any]) -> str:
    own = row["predicted"]
    return (
        f"    {row['conversations_per_s']:g} conversations a second, engines busy "
        f"{100 * own['engines_busy']:.0f} %, KV {own['kv_bytes_most'] / 1e9:.1f} GB a replica, "
        f"fetched {(own['fetch_bytes_per_later_turn'] or 0) / 1e6:.1f} MB a later turn, "
        f"{own['fetch_mbit_per_s_and_replica']:g} Mbit/s a replica"
    )


def _cells(own: dict[str, Any]) -> str:
    later = own["later_turns"]

    def span(stats: dict[str, Any] | None) -> str:
        return "-" if stats is None else f"{stats['p50']:.0f} / {stats['p95']:.0f}"

    return (
        f"{own['good']}/{own['turns']}".rjust(11)
        + f"{own['tokens_per_s'] or 0.0:9.1f}"
        + span(own["first_token_ms"]).rjust(18)
        + span(later["first_token_ms"]).rjust(18)
        + f"{100 * (later['reused'] or 0.0):8.1f}%"
        + f"{later['sources'].get('peer', 0):7d}"
        + ("-".rjust(8) if own["imbalance"] is None else f"{100 * own['imbalance']:7.1f}%")
    )


def check_counts(text: str, what: str) -> tuple[int, ...]:
    """Numbers of replicas apart by commas. Raises ConfigError."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > 4096:
        raise ConfigError(f"{what} takes numbers from 1 to 4096 apart by commas, got {text!r}")
    return counts
