"""The reports of `bench accept`, `drafted` and `lossless` on a few short answers; prompt files."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepdraft.engine.sampler import Sampler
from deepdraft.errors import ConfigError, EngineError
from deepdraft.proof import bench_accept, bench_drafted, bench_lossless
from deepdraft.proof.plot_accept import plot
from deepdraft.proof.prompts import Prompt, context_for, evenly, load_prompts
from deepdraft.proof.replay import AsTold, replay, replay_fixed
from deepdraft.server.service import bundled_checkpoint
from deepdraft.spec.calibrate import Calibration, Observation
from deepdraft.spec.costs import CostTable, StepCosts
from deepdraft.spec.live import LiveCosts
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import DecodeStats, PromptProgress, TokenEvent

MODEL = bundled_checkpoint()
TOKENS = 12
"""Of each answer of a report."""
COSTS = StepCosts(
    verify=CostTable(rows=(1, 2, 3, 4), ms=((10.0, 11.0, 12.0, 13.0),)),
    draft=CostTable(rows=(1,), ms=((3.0,),)),
    sampled_row=0.5,
    sampled_draft=0.25,
)


@pytest.fixture(scope="module", autouse=True)
def known_costs() -> Iterator[None]:
    """Seven rounds of measuring, as a report has them, would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_accept, "measure_costs", lambda runner, repeats: COSTS)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def test_bundled_prompts_cover_the_domains(tokenizer: Tokenizer) -> None:
    prompts = load_prompts(None, tokenizer)
    domains = Counter(p.domain for p in prompts)
    assert domains == dict.fromkeys(("templates", "facts", "chat", "docs", "code", "prose"), 10)
    assert len({p.ids for p in prompts}) == 60
    assert all(p.ids[0] == 0 and 5 < len(p.ids) < 100 for p in prompts)
    first = evenly(prompts, 8)
    assert [p.domain for p in first] == [*domains, *list(domains)[:2]]
    assert sorted(p.ids for p in evenly(prompts, None)) == sorted(p.ids for p in prompts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read as JSON"),
        ("{}", "must hold a list of prompts"),
        ("[]", "must hold a list of prompts"),
        ('[{"text": "a"}]', "prompt 0 needs a domain and a text or ids"),
        ('[{"domain": "a", "ids": [1]}, {"domain": "a"}]', "prompt 1 needs"),
        ('[{"domain": "a", "ids": [4096]}]', "prompt 0 has ids outside"),
        ('[{"domain": "a", "ids": [true]}]', "prompt 0 has ids outside"),
        ('[{"domain": "a", "ids": []}]', "prompt 0 is empty"),
        (r'[{"domain": "a", "text": "\ud800"}]', "prompts.json: prompt 0: The text holds a lone"),
    ],
)
def test_a_wrong_prompt_file_is_named(
    tokenizer: Tokenizer, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_prompts(file, tokenizer)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(tmp_path / "none.json", tokenizer)


def test_replay_counts_tokens_and_ms() -> None:
    blocks = [
        Observation(raw=(2.0, 1.0, 0.5), num_accepted=3),
        Observation(raw=(2.0, 1.0, 0.5), num_accepted=1),
        Observation(raw=(-9.0,), num_accepted=0),
    ]

    greedy, sampled = AsTold(COSTS), AsTold(COSTS, sampled=True)
    assert replay_fixed(blocks, greedy, 0) == (3, 30.0)
    assert replay_fixed(blocks, greedy, 1) == (2 + 2 + 1, 3 * 3 + 3 * 11)
    assert replay_fixed(blocks, greedy, 3) == (4 + 2 + 1, 3 * 3 + 13 + 13 + 11)
    # Sampled: half a ms for each row, a quarter for each draft made.
    assert replay_fixed(blocks, sampled, 3) == (7, 46 + 7 * 0.25 + (4 + 4 + 2) * 0.5)
    # By cost: rows are cheap, so two whole blocks; the hopeless draft is cut after it was made.
    by_cost = replay(blocks, greedy, LiveCosts(COSTS), Calibration())
    assert by_cost == (4 + 2 + 1, 3 * 3 + 13 + 13 + 10)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return bench_accept.accept(MODEL, num_prompts=6, tokens=TOKENS, quick=True)


def test_the_report_adds_up(report: dict[str, Any]) -> None:
    runs = report["runs"]
    cells = {(r["temperature"], r["rule"], r["schedule"], r["domain"]): r for r in runs}
    assert len(cells) == len(runs) == 11 * 7
    for (temperature, rule, schedule, _), row in cells.items():
        assert 1.0 <= row["accepted_length"] <= 6.0
        assert row["verified"] <= row["drafts"] <= 5 * row["steps"]
        by_accepted = row["steps_by_accepted"]
        assert sum(by_accepted) == row["steps"]
        accepted = sum(n * steps for n, steps in enumerate(by_accepted))
        assert row["accepted_length"] == pytest.approx(1 + accepted / row["steps"], abs=1e-3)
        assert row["tokens"] <= row["steps"] * 6
        if schedule == "none":
            assert row["accepted_length"] == 1.0 and row["drafts"] == 0
        if schedule == "all":
            assert row["verified"] == row["drafts"]
        if temperature == 0.0:
            assert rule == "coupled"
    templates = cells[0.0, "coupled", "all", "templates"]
    assert (
        templates["accepted_length"] > 4 > cells[0.0, "coupled", "all", "prose"]["accepted_length"]
    )
    # The same seeds and the rule coupled: the same answers, whatever the schedule.
    for schedule in ("none", "cost"):
        for temperature in (0.0, 1.0):
            a = cells[temperature, "coupled", schedule, "all"]["tokens"]
            assert a == cells[temperature, "coupled", "all", "all"]["tokens"]
    assert {r["rule"] for r in report["reliability"]} == {"token", "block", "coupled"}
    for entry in report["reliability"]:
        for name in ("raw", "calibrated"):
            bins = entry[name]["bins"]
            assert sum(b["count"] for b in bins) == entry[name]["drafts"] > 0
            assert all(b["from"] - 1e-9 <= b["predicted"] <= b["to"] + 1e-9 for b in bins)
            assert 0 <= entry[name]["brier"] <= 1
    for worth in report["schedule"]:
        assert set(worth["domains"]) == {p["domain"] for p in runs} - {"all"}
        low, high = worth["mixed"]["interval_95"]
        assert low <= worth["mixed"]["over_best_fixed"] * 1.05 and high >= low
    assert json.loads(json.dumps(report)) == report


def test_the_plot_is_well_formed(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(plot(report))
    names = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    # A bar for each domain, and all, and rule: one rule at temperature 0, three at the others.
    assert len(names) == 7 * (1 + 3 + 3)
    assert all(name and ": " in name for name in names)
    size = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.attrib["width"] != "100%":
            x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= size[0] and y + h <= size[1]


def test_what_is_accepted_does_not_depend_on_the_streams(report: dict[str, Any]) -> None:
    """The same drafts stand, alone and beside others; single rates are told of single streams."""
    prompts = evenly(load_prompts(None, Tokenizer.load(MODEL)), 6)
    together = bench_accept.Bench(MODEL, prompts, TOKENS, streams=3)
    for rule in ("coupled", "block"):
        setting = bench_accept.Setting(temperature=1.0, rule=rule)
        rows = bench_accept._rows(setting, together.run(prompts, setting, TOKENS), together)
        alone = [r for r in report["runs"] if r["temperature"] == 1.0 and r["rule"] == rule]
        alone = [r for r in alone if r["schedule"] == "all"]
        same = ("domain", "answers", "tokens", "steps", "accepted_length", "drafts")
        assert [[r[k] for k in same] for r in rows] == [[r[k] for k in same] for r in alone]
        assert [r["tokens_per_s"] is None for r in rows] == [True] * 6 + [False]


def test_drafted_against_plain() -> None:
    result = bench_drafted.drafted(MODEL, num_prompts=2, tokens=20, runs=1)
    assert [r["domain"] for r in result["domains"]] == ["templates", "facts", "all"]
    assert result["domains"][0]["accepted_length"] > 4
    assert all(r["speedup"] > 0 for r in result["domains"])
    assert result["ms_per_step"]["plain"]["verify"] > 0
    assert result["ms_per_drafted_step"]["draft"] > 0
    assert all(0 < part < 1 for part in result["draft_of_verify"].values())


def answered(*parts: tuple[int, ...], waits: int = 0, ids: tuple[int, ...] = (1, 2)) -> Any:
    progress = PromptProgress(done=1, total=2, tokens_per_second=1.0, seconds_left=1.0)
    stats = DecodeStats(
        rule="coupled",
        steps=2,
        drafted_steps=0,
        drafts=0,
        verified=0,
        accepted=0,
        histogram=(2,),
        average_iteration_ms=1.0,
        average_accept_length=1.0,
    )
    events = [TokenEvent(request_id="r", progress=progress)] * waits
    events += [TokenEvent(request_id="r", token_ids=part) for part in parts]
    events.append(TokenEvent(request_id="r", finish_reason="length", stats=stats))
    return bench_accept._answer(Prompt("a", ids), events)


def test_a_prompt_that_is_read_slowly_changes_no_count() -> None:
    """Events of its progress come before the first token, and hold none."""
    assert [answered((7,), (8, 9), waits=n).num_tokens for n in (0, 1, 2)] == [2, 2, 2]


def test_answers_that_differ_are_told() -> None:
    same = answered((7,), (8, 9)), answered((7, 8), (9,), waits=1)
    bench_drafted._agree([same[0]], [same[1]], "drafted answers")
    for other, at in ((answered((7,), (9, 9)), 1), (answered((7,), (8,)), 2)):
        with pytest.raises(EngineError, match=f"drafted answers differ.* 2 tokens, token {at} "):
            bench_drafted._agree([same[0]], [other], "drafted answers")
    for others in ([], [*same], [answered((7,), (8, 9), ids=(1, 3))]):
        with pytest.raises(EngineError, match="of other prompts"):
            bench_drafted._agree([same[0]], others, "drafted answers")


def test_lossless_finds_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Any]:
        return bench_lossless.lossless(MODEL, num_prompts=3, tokens=12, batch=3, seeds=1)

    result = run()
    assert result["mismatches"] == 0 and [c["tokens"] for c in result["cases"]] == [36, 36]
    assert all(c["accepted_length"] > 1 for c in result["cases"])
    # Noise that is drawn anew for every call: plain and drafted no longer share it.
    calls = iter(range(10**9))
    make = Sampler.gumbel

    def fresh(self: Sampler, seed: int, position: int) -> Any:
        return make(self, next(calls), position)

    monkeypatch.setattr(Sampler, "gumbel", fresh)
    broken = run()
    assert broken["cases"][0]["mismatches"] == []
    found = broken["cases"][1]["mismatches"]
    assert broken["mismatches"] == len(found) > 0
    assert found[0].keys() == {"prompt", "domain", "token"}


def test_evenly_with_uneven_domains() -> None:
    prompts = [Prompt("a", (1,)), Prompt("a", (2,)), Prompt("b", (3,))]
    assert [p.ids[0] for p in evenly(prompts, None)] == [1, 3, 2]
    assert evenly([], None) == []


def test_the_context_fits_the_longest_prompt() -> None:
    prompts = [Prompt("a", (1,)), Prompt("b", (1,) * 9)]
    assert [context_for(prompts, n, 12) for n in (1, 2, 3)] == [10, 12, 12]
    with pytest.raises(ConfigError, match="of domain 'b' has 9 tokens; with 4 of an answer"):
        context_for(prompts, 4, 12)


def test_prompts_and_streams_that_cannot_be_measured(tmp_path: Path) -> None:
    """Clear errors."""
    file = tmp_path / "prompts.json"
    file.write_text('[{"domain": "a", "ids": [0, 5, 6]}]')
    with pytest.raises(ConfigError, match="no answer took a step"):
        bench_accept.accept(MODEL, prompts=str(file), tokens=1, quick=True)
    with pytest.raises(ConfigError, match="state of 100000000 streams does not fit"):
        bench_accept.Bench(MODEL, [Prompt("a", (1,))], 5, streams=10**8)


@pytest.mark.full
def test_one_tiny_prompt_is_enough_for_a_report(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('[{"domain": "a", "ids": [0, 5, 6]}]')
    report = bench_accept.accept(MODEL, prompts=str(file), tokens=3, quick=True)
    assert json.loads(json.dumps(report, allow_nan=False))["prompts"] == 1
    assert "Brier of no drafts" in plot(report)
