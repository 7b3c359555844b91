"""`bench fleet`: traces, figures, the client's routing, real servers' answers, the command line.
Times are never judged. The simulator: `test_fleet_sim`."""

import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError
from deepdraft.proof.bench_fleet import (
    Case,
    Router,
    at_its_pace,
    cases,
    check_counts,
    checks,
    highest_rate,
    predict,
    run,
    table_of,
    turns_of,
)
from deepdraft.proof.fleet_calibrate import line, rising
from deepdraft.proof.fleet_costs import Costs
from deepdraft.proof.fleet_figures import TurnDone, compare, figures, imbalance, spread
from deepdraft.proof.fleet_served import Started, fleet_file, samples, tree_cpu_s
from deepdraft.proof.fleet_sim import in_tokens
from deepdraft.proof.fleet_trace import TracePlan, fleet_trace, num_turns
from deepdraft.proof.serve_client import Answer, Ask, Target
from deepdraft.proof.serve_load import Done
from deepdraft.server.fleet_config import load_fleet_file
from tests.server.conftest import Live, make_live, make_toy

__all__ = ["make_live", "make_toy"]


def test_a_trace_is_its_seed() -> None:
    plan = TracePlan(conversations=200, seed=3)
    trace = fleet_trace(plan)
    assert trace == fleet_trace(plan) != fleet_trace(replace(plan, seed=4))
    lengths = [len(c.turns) for c in trace]
    assert min(lengths) == 2 and 10 < max(lengths) <= 20
    assert num_turns(trace) == sum(lengths) and 5.5 < sum(lengths) / 200 < 8
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(trace))
    assert 150 < trace[-1].at_s < 260  # 200 arrivals at one a second
    assert len({c.turns[0].text[:16] for c in trace}) == 200
    assert all(c.turns[0].pause_s == 0 for c in trace)


@pytest.mark.parametrize(
    "wrong", [{"conversations": 0}, {"rate": 0.0}, {"most_turns": 1}, {"mean_turns": 1.5}]
)
def test_a_trace_without_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of a trace must be"):
        TracePlan(**wrong)


def done(**given: Any) -> TurnDone:
    base: dict[str, Any] = {
        "number": 1, "first_s": 0.1, "end_s": 0.2, "prompt": 100, "cached": 0, "known": 0,
        "tokens": 10, "replica": "a",
    }  # fmt: skip
    return TurnDone(**{**base, **given})


def test_figures() -> None:
    turns = [
        done(),
        done(number=2, prompt=120, cached=108, known=110, source="peer", replica="b"),
        done(number=4, prompt=200, cached=192, known=195, source="host", first_s=0.3),
        done(fault="error", first_s=0.0, replica=""),
    ]
    own = figures(turns, 2.0, replicas=2, fetch_bytes=500)
    assert own["good"] == 3 and own["turns"] == 4 and own["faults"] == {"error": 1}
    assert own["tokens_per_s"] == 15.0
    assert own["first_token_ms"] == {
        "n": 3, "mean": 166.667, "p50": 100.0, "p95": 280.0, "max": 300.0,
    }  # fmt: skip
    later = own["later_turns"]
    assert later["reused"] == round(300 / 320, 4) and later["reused_of_known"] == round(
        300 / 305, 4
    )
    assert later["sources"] == {"host": 1, "peer": 1}
    assert list(own["by_turn"]) == ["1", "2", "3-5"]
    assert own["by_turn"]["1"]["sources"] == {"none": 1} and own["by_turn"]["1"]["reused"] == 0.0
    assert own["fetch_bytes_per_later_turn"] == 250
    # a: 110 + 18 rows computed, b: 22.
    assert own["by_replica"] == {"a": {"turns": 2, "rows": 128}, "b": {"turns": 1, "rows": 22}}
    assert own["imbalance"] == round(128 / 75 - 1, 4)


def test_imbalance_counts_who_did_nothing() -> None:
    assert imbalance({"a": 10.0}, 2) == 1.0
    assert imbalance({"a": 10.0, "b": 10.0}, 2) == 0.0
    assert imbalance({}, 2) is None
    # One that was replaced during the run has two names.
    assert imbalance({"a": 4.0, "b": 4.0, "c": 4.0}, 2) == 0.0


def test_nothing_good_has_no_figures_but_faults() -> None:
    own = figures([done(fault="connect", first_s=0.0)], 1.0, replicas=1, fetch_bytes=None)
    assert own["faults"] == {"connect": 1} and own["tokens_per_s"] == 0.0
    assert own["first_token_ms"] is None and own["imbalance"] is None
    assert "connect" not in table_of({"cases": [{"name": "x", "measured": own}]})
    assert spread([]) is None


def test_a_prediction_is_compared() -> None:
    real = figures([done(), done(number=2, cached=90, known=95)], 1.0, replicas=1, fetch_bytes=0)
    thought = figures(
        [done(first_s=0.11), done(number=2, cached=81, known=95, first_s=0.11)],
        1.0,
        replicas=1,
        fetch_bytes=0,
    )
    compared = compare(real, thought)
    assert compared["first_token_ms_mean"]["off"] == pytest.approx(0.1)
    assert compared["later_reused"] == {"measured": 0.9, "predicted": 0.81, "off": -0.1}
    row = {"name": "x", "case": {"sharing": False, "routing": "own", "count": 1}}
    found = checks([{**row, "measured": real, "compared": compared}])
    assert found == {"predictions": {"worst_off": 0.1, "ok": True}}


def test_a_run_is_predicted_at_its_pace() -> None:
    plan = TracePlan(conversations=12, rate=0.5, document_chars=2000, seed=3)
    costs = Costs(prefill_s=((256.0, 0.2), (1024.0, 0.9)), decode_s=((1.0, 0.02), (4.0, 0.03)))
    case = Case("servers", 1, False, "own")
    real = predict(case, plan, costs.slower(1.3), per_machine=1)
    pace, thought = at_its_pace(case, plan, costs, real["engines_busy"])
    assert pace == pytest.approx(1.3, rel=0.01)
    for name, figure in compare(real, thought).items():
        assert abs(figure["off"] or 0.0) < 0.02, (name, figure)
    assert abs(compare(real, predict(case, plan, costs, 1))["first_turn_ms_p50"]["off"]) > 0.2
    assert at_its_pace(case, plan, costs, None) == (1.0, predict(case, plan, costs, 1))
    row = {"name": "x", "case": {"sharing": False, "routing": "own", "count": 1}, "measured": real}
    busy = {"engines_busy": {"off": 0.5}, "tokens_per_s": {"off": 0.1}}
    assert checks([{**row, "compared": busy}])["predictions"] == {"worst_off": 0.1, "ok": True}


def test_checks_compare_with_stickiness() -> None:
    def row(routing: str, cached: int) -> dict[str, Any]:
        turns = [done(), done(replica="b"), done(number=2, cached=cached, known=95)]
        return {
            "name": routing,
            "case": {"sharing": True, "routing": routing, "count": 2},
            "measured": figures(turns, 1.0, replicas=2, fetch_bytes=0),
        }

    found = checks([row("random", 93), row("sticky", 96)])
    assert found["random"]["points_below_sticky"] == 3.0 and not found["random"]["sticky_ok"]
    assert not found["random"]["later_reused_ok"] and "sticky" not in found
    assert checks([row("random", 95), row("sticky", 96)])["random"]["sticky_ok"]


def test_which_fleets_are_measured() -> None:
    assert [c.name for c in cases("servers", (1, 2), (True, False), ("random", "sticky"))] == [
        "1 servers own unshared",
        "2 servers random shared",
        "2 servers sticky shared",
        "2 servers random unshared",
        "2 servers sticky unshared",
    ]


class Fake:
    """A target that notes who asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[Ask] = []
        self._lock = threading.Lock()

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        with self._lock:
            self.asked.append(ask)
        return Answer(text="x", tokens=1)


def test_stickiness_keeps_conversations_and_spreads_them() -> None:
    fakes = [Fake(n) for n in "abc"]
    router = Router(fakes, "sticky", 0, "tag")  # type: ignore[arg-type]
    for turn in range(3):
        for i in range(30):
            answer = router.ask(Ask(("q",) * (2 * turn + 1), 4, f"conversation {i}"))
            assert answer.replica in ("a", "b", "c")
    for fake in fakes:
        sessions = {a.session for a in fake.asked}
        assert len(sessions) == 10 and len(fake.asked) == 30
        assert all(s and s.startswith("tag-conversation-") for s in sessions)


def test_random_routing_bounces_and_is_its_seed() -> None:
    def chosen(seed: int) -> list[str | None]:
        router = Router([Fake(n) for n in "abc"], "random", seed, "t")  # type: ignore[arg-type]
        return [router.ask(Ask(("q",), 4, "one")).replica for _ in range(60)]

    assert chosen(1) == chosen(1) != chosen(2) and set(chosen(1)) == set("abc")


def test_what_a_turn_could_know() -> None:
    def answered(turns: int, prompt: int) -> Done:
        answer = Answer(prompt_tokens=prompt, tokens=5, cached_tokens=prompt // 2, first_s=0.2)
        return Done(Ask(("q",) * turns, 5, "one"), answer, 0.0, 0.1)

    turns = turns_of([answered(3, 40), answered(1, 20)])
    assert [(t.number, t.known, t.cached) for t in turns] == [(1, 0, 10), (2, 25, 20)]
    assert turns[0].first_s == pytest.approx(0.3)  # from when it was due


def test_samples_are_summed_and_sums_of_a_fleet_counted_once() -> None:
    text = """# HELP deepdraft_a x
deepdraft_a 3
deepdraft_b{kind="x"} 1.5
deepdraft_b{kind="y"} 2
deepdraft_c_bucket{le="1"} 9
deepdraft_a{replica="one"} 1
nonsense
deepdraft_d NaN-ish
"""
    assert samples(text) == {"deepdraft_a": 3.0, "deepdraft_b": 3.5}


def test_processor_time_of_a_tree() -> None:
    import os

    assert tree_cpu_s(os.getpid()) > 0
    assert tree_cpu_s(2**22 + 1) == 0


def test_the_file_of_a_started_fleet_is_one(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_file(None, 3, 9000, "redis://127.0.0.1:1/0"))
    fleet = load_fleet_file(file)
    assert fleet.replicas.count == 3 and fleet.config.server.port == 9000
    assert fleet.config.fleet.directory is not None


def test_lines_and_rising_tables() -> None:
    slope, start = line((1.0, 2.0, 4.0), (3.0, 5.0, 9.0))
    assert (slope, start) == (pytest.approx(2.0), pytest.approx(1.0))
    assert rising([(1, -1.0), (2, 0.5), (3, 0.4)]) == ((1.0, 1e-6), (2.0, 0.5), (3.0, 0.5))


def test_texts_become_tokens() -> None:
    costs = Costs(prefill_s=((1, 1),), decode_s=((1, 1),), chars_per_token=3.0, turn_tokens=7.0)
    plan = TracePlan(conversations=30)
    trace = fleet_trace(plan)
    for one, other in zip(trace, in_tokens(plan, costs), strict=True):
        assert one.at_s == other.at_s and len(one.turns) == len(other.turns)
        # The text was not written for this; its length is known to a few characters.
        assert other.turns[0].new == pytest.approx(len(one.turns[0].text) / 3 + 7, abs=3)
        for turn, tokens in zip(one.turns[1:], other.turns[1:], strict=True):
            assert tokens.new == round(len(turn.text) / 3 + 7)
            assert (tokens.answer, tokens.pause_s) == (plan.max_tokens, turn.pause_s)


def test_the_highest_rate_that_keeps_a_limit() -> None:
    costs = Costs(prefill_s=((100, 0.1), (2000, 2.5)), decode_s=((1, 0.01), (8, 0.04)))
    plan = TracePlan(conversations=40, rate=1.0)
    rates = []
    for count in (1, 4):
        case = Case("replicas", count, True, "own")
        rate, row = highest_rate(case, plan, costs, 1, 500.0)
        assert row["later_turns"]["first_token_ms"]["p95"] <= 500.0
        more = TracePlan(conversations=round(60 * rate), rate=1.5 * rate)
        late = predict(case, more, costs, 1)["later_turns"]["first_token_ms"]["p95"]
        assert late > row["later_turns"]["first_token_ms"]["p95"]
        rates.append(rate)
    assert rates[1] > 3 * rates[0]
    with pytest.raises(ConfigError, match="too few for these costs"):
        highest_rate(Case("replicas", 1, True, "own"), plan, costs, 1, 0.001)


def test_conversations_on_servers(make_live: Callable[..., Live]) -> None:
    lives = [make_live() for _ in range(2)]
    for live in lives:
        live.toy.say("yes")
    fleet = Started(tuple(live.url for live in lives), ())
    plan = TracePlan(
        conversations=6, rate=200, mean_turns=3, document_chars=40, max_tokens=4, pause_s=0.001
    )
    own = run(fleet, Case("servers", 2, False, "random"), plan, "t")
    assert own["good"] == own["turns"] == num_turns(fleet_trace(plan)) and not own["faults"]
    assert own["tokens"] == 4 * own["turns"]  # full length, whatever ends
    assert set(own["by_replica"]) == {"server 1", "server 2"} and own["fetch_bytes"] is None
    assert own["later_turns"]["n"] == own["turns"] - 6
    assert "6/" not in table_of({"cases": []})
    assert f"{own['turns']}/{own['turns']}" in table_of({"cases": [{"name": "x", "measured": own}]})


def test_a_server_that_fails_is_a_fault(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say("yes")
    target = Target("toy", live.url, timeout_s=30)
    live.toy.service.begin_drain()
    router = Router([target], "random", 0, "t")
    assert router.ask(Ask(("q",), 4, "one")).fault == "status"


def test_counts() -> None:
    assert check_counts("1,2,30", "--replicas") == (1, 2, 30)
    for wrong in ("", "0", "1,x", "5000"):
        with pytest.raises(ConfigError, match="--replicas takes numbers"):
            check_counts(wrong, "--replicas")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "2", "--replicas", "2"], "choose one"),
        (["--url", "http://x", "--simulate", "c"], "choose one"),
        (["--url", "http://x", "--servers", "2"], "started here"),
        (["--url", "http://x", "--calibrate"], "started here"),
        (["--servers", "2", "--routing", "own"], "random or sticky"),
        (["--replicas", "2", "--routing", "random"], "by the fleet itself"),
        (["--url", "http://x", "--routing", "sticky"], "by the fleet itself"),
        (["--replicas", "x"], "takes numbers"),
        (["--replicas", "1", "--limit-ms", "100"], "are for --simulate"),
        (["--simulate", "no-such-file"], "cannot be read"),
        (["--servers", "2", "--rate", "0"], "rate of a trace"),
    ],
)
def test_flags_that_do_not_go_together(words: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "fleet", *words])
    assert result.exit_code != 0 and said in f"{result.output} {result.exception}"


def test_a_simulation_by_command(tmp_path: Path) -> None:
    costs = Costs(
        prefill_s=((100, 0.05), (1000, 0.6)), decode_s=((1, 0.01), (8, 0.03)), gap_tokens=2
    )
    file, out = tmp_path / "costs.json", tmp_path / "out" / "result.json"
    file.write_text(json.dumps({"costs": costs.as_dict()}))
    words = ["--simulate", str(file), "--replicas", "1,4", "--routing", "both", "--out", str(out)]
    result = CliRunner().invoke(cli, ["bench", "fleet", *words, "--conversations", "40"])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [c["name"] for c in record["cases"]] == [
        "1 replicas own unshared", "4 replicas random shared", "4 replicas sticky shared",
    ]  # fmt: skip
    assert record["costs"] == json.loads(json.dumps(costs.as_dict()))
    assert len({c["predicted"]["good"] for c in record["cases"]}) == 1
    assert record["cases"][1]["predicted"]["later_turns"]["sources"]["peer"] > 0
    assert "peer" not in record["cases"][2]["predicted"]["later_turns"]["sources"]
    again = CliRunner().invoke(cli, ["bench", "fleet", *words, "--conversations", "40", "--json"])
    assert json.loads(again.output) == record
