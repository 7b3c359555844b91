"""`bench speed` through HTTP, its report, and `bench compare`. Times are never judged."""

import copy
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError, DeepdraftError
from deepdraft.proof import bench_speed, compare, speed_client, suite, svg
from deepdraft.proof.bench_speed import Plan, measure, own_and_others, summary
from deepdraft.proof.report import html_report, write_page
from deepdraft.proof.speed_client import Target
from tests.server.conftest import Live, make_live, make_toy

__all__ = ["make_live", "make_toy"]

TEXT = "The quick brown fox jumps over the lazy dog."
PLAN = Plan(
    runs=2,
    tokens=24,
    tetris_tokens=60,
    classes=("facts", "chat with thinking", "long context"),
    prefill=(100, 300),
    concurrency=(1, 3),
    long_tokens=300,
)


@pytest.fixture
def targets(make_live: Callable[..., Live]) -> list[Target]:
    """A drafting toy, and one without a drafter."""
    servers = [make_live(drafts=drafts) for drafts in (True, False)]
    for live in servers:
        live.toy.say(TEXT)
    return [Target(f"toy {i}", live.url) for i, live in enumerate(servers)]


@pytest.fixture
def record(targets: list[Target]) -> dict[str, Any]:
    said: list[str] = []
    result = measure(targets, PLAN, said.append)
    assert "suite: facts" in said
    return {**result, "machine": {"cpu": "x <y>", "cores": 2}, "date": "2026-01-01", "commit": "c"}


def test_what_is_measured(record: dict[str, Any]) -> None:
    assert [t["name"] for t in record["targets"]] == ["toy 0", "toy 1"]
    assert all(t["is_deepdraft"] and t["model"] == "toy" for t in record["targets"])
    drafted, plain = record["tetris"]["toy 0"], record["tetris"]["toy 1"]
    # The text and its end token, in each of two runs.
    assert drafted["tokens"] == plain["tokens"] == 2 * (len(TEXT) + 1)
    assert drafted["accepted_length"]["p50"] > 3 and plain["accepted_length"]["p50"] == 1
    assert drafted["tokens_per_s"]["n"] == 2 == len(drafted["tokens_per_s_of_each_run"])
    assert drafted["ms_per_step"]["min"] > 0 and drafted["finish"] == ["stop"]
    classes = {row["class"]: row for row in record["classes"]}
    assert list(classes) == ["facts", "chat with thinking", "long context"]
    facts = classes["facts"]["by_target"]["toy 0"]
    assert facts["answers"] == 2 * 4 and facts["tokens"] == 2 * 4 * 24
    assert facts["first_token_ms"]["min"] > 0 and facts["gap_ms"]["n"] > 8
    for row, wanted in zip(record["prefill"], (100, 300), strict=True):
        seen = row["by_target"]["toy 0"]
        assert seen["cached_tokens"] == 0
        assert seen["prompt_tokens"]["p50"] == pytest.approx(wanted, rel=0.6)
        assert seen["first_token_ms"]["min"] > 0
    for row, streams in zip(record["concurrency"], (1, 3), strict=True):
        assert row["streams"] == streams
        assert row["by_target"]["toy 1"]["total_tokens_per_s"]["n"] == 1


def test_the_suite_asks_for_thinking_where_it_should(
    make_live: Callable[..., Live],
) -> None:
    live = make_live()
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Yes."

    live.toy.say(answer)
    target = Target("toy", live.url)
    for thinking in (False, True):
        target.ask("Hm?", thinking=thinking)
        assert ("<think>" in prompts[-1]) == thinking


def test_times_of_one_answer(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.runner.delay_s = 0.01
    live.toy.say("Hm.</think>" + TEXT)
    target = Target("toy", live.url)
    sample = target.ask("Hi", thinking=True)
    assert 0 < sample.first_s < sample.content_s < sample.end_s
    assert len(sample.gaps_ms) >= len(TEXT) and sample.counted
    assert sample.tokens == len("Hm.") + 1 + len(TEXT) + 1
    assert sample.tokens_per_s == pytest.approx(sample.tokens / (sample.end_s - sample.first_s))
    assert target.describe()["system_fingerprint"] == "fp_toy"


def test_a_server_that_does_not_take_our_switches(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other servers may refuse `thinking`; then it is left out, once and for all."""
    live = make_live()
    live.toy.say(TEXT)
    target = Target("toy", live.url)
    target.is_deepdraft = False
    bodies: list[dict[str, Any]] = []
    real = Target._stream

    def picky(self: Target, body: dict[str, Any]) -> Any:
        bodies.append(body)
        if "thinking" in body:
            raise speed_client._Refused("unknown field thinking")
        return real(self, body)

    monkeypatch.setattr(Target, "_stream", picky)
    for _ in range(2):
        assert target.ask("Hi").accepted_length is None
    assert ["thinking" in body for body in bodies] == [True, False, False]
    assert all("speculation" not in body for body in bodies)


def test_bad_targets(make_live: Callable[..., Live]) -> None:
    for url in ("ftp://x", "nonsense", "http://"):
        with pytest.raises(ConfigError, match="no http or https address"):
            Target("x", url)
    with pytest.raises(ConfigError, match="no list of models"):
        Target("x", "http://127.0.0.1:9")
    live = make_live(max_tokens=32)
    with pytest.raises(DeepdraftError, match=r"400.*context is 32"):
        Target("toy", live.url).ask("Hi", max_tokens=500)
    with pytest.raises(ConfigError, match="no server"):
        measure([], PLAN)
    with pytest.raises(ConfigError, match="two servers have one name"):
        own_and_others(None, [live.url, live.url], PLAN)


def test_keys_are_sent_and_not_shown(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_live(server={"api_keys": ("secret-key",)})
    live.toy.say(TEXT)
    monkeypatch.setenv(speed_client.KEY_VARIABLE, "secret-key")
    target = Target("toy", live.url.replace("127", "user:word@127"))
    assert target.ask("Hi").tokens == len(TEXT) + 1
    assert "secret" not in json.dumps(target.describe())
    assert "word" not in json.dumps(target.describe())


def test_summaries() -> None:
    assert summary([]) is None and summary([None]) is None
    one = summary([5.0])
    assert one is not None and one["p50"] == one["p99"] == 5.0 and one["stdev"] == 0.0
    many = summary(float(x) for x in range(101))
    assert many is not None
    assert (many["min"], many["p10"], many["p50"], many["p90"], many["p99"], many["max"]) == (
        0, 10, 50, 90, 99, 100,
    )  # fmt: skip
    assert many["mean"] == 50 and many["n"] == 101


def test_plans() -> None:
    assert Plan.read() == Plan()
    plan = Plan.read(suite="facts,code", prefill="512,64", concurrency="none", runs=1)
    assert plan.classes == ("facts", "code") and plan.prefill == (64, 512)
    assert plan.concurrency == () and plan.runs == 1
    assert Plan.read(suite="none").classes == () and Plan.read(suite="all").classes is None
    for bad in ("x", "1,,2", "-1", "0", "1.5", "9" * 20):
        with pytest.raises(ConfigError, match="--prefill must be numbers"):
            Plan.read(prefill=bad)


def test_the_suite() -> None:
    questions = suite.load_suite(long_tokens=200)
    assert set(questions) == {
        "templates", "code", "prose", "facts", "chat with thinking", "long context",
    }  # fmt: skip
    assert questions["templates"][0].text == suite.TETRIS
    assert all(q.thinking for q in questions["chat with thinking"])
    assert all(len(q.text) > 700 for q in questions["long context"])
    assert suite.document(500, 1) == suite.document(500, 1)
    a, b = suite.document(5000, 1), suite.document(5000, 2)
    assert abs(len(a) - 5000) < 50
    assert a[:12] != b[:12], "no cache of prompts knows a new document"
    with pytest.raises(ConfigError, match="no class 'poems'; its classes: templates"):
        suite.load_suite(["poems"])


class _Page(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {k}" for k, _ in attrs if k in ("src", "href") or k[:2] == "on"]


def test_the_report(record: dict[str, Any], tmp_path: Path) -> None:
    record["targets"][1]["model"] = "<img src=x onerror=alert(1)>"
    text = html_report(record)
    page = _Page()
    page.feed(text)
    assert page.loads == [] and "script" not in page.tags and "img" not in page.tags
    assert "default-src 'none'" in text and "x &lt;y&gt;" in text
    pictures = text.split("<svg")[1:]
    assert len(pictures) == 7
    for picture in pictures:
        tree = ET.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
        assert tree.findall(".//rect") or tree.findall(".//circle")
    for what in ("known script", "long context", "Streams at a time", "fp_toy", "toy 0"):
        assert what in text
    record["targets"][1]["model"] = "half a \ud83d"
    write_page(str(tmp_path / "new" / "page.html"), html_report(record))
    assert "half a ?" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    # A record of one target without the wide parts is a report, too.
    small = {k: v for k, v in record.items() if k not in ("classes", "prefill", "concurrency")}
    assert "<svg" not in html_report(small)


def test_pictures() -> None:
    assert [svg.nice(x) for x in (0, 0.3, 1, 7, 11, 95, 1200)] == [1, 0.4, 1, 8, 20, 100, 2000]
    picture = svg.bars([("a", [svg.Bar(5, 4, 8), None])], ["x", "y"], "ms")
    tree = ET.fromstring(picture)
    (bar,) = tree.findall(".//rect")
    axis = [t.text for t in tree.findall("text[@class='a']")]
    assert axis == ["0", "2", "4", "6", "8"]
    plot = svg.WIDTH - svg.LABELS - 74
    assert float(bar.get("width", "")) == pytest.approx(plot * 5 / 8, abs=0.1)


def test_compare(record: dict[str, Any]) -> None:
    after = copy.deepcopy(record)
    for change in compare.compare(record, after):
        assert change.verdict == "same" and change.ratio in (1, None)
    before, facts = (r["classes"][0]["by_target"]["toy 0"] for r in (record, after))
    for key, factor in (("tokens_per_s", 2), ("first_token_ms", 2), ("accepted_length", 1)):
        spread = {"p10": 90.0, "p50": 100.0, "p90": 110.0}
        before[key] |= spread
        facts[key] |= {k: v * factor for k, v in spread.items()}
    row = record["prefill"][0]["by_target"]["toy 1"]["first_token_ms"]
    row |= {"p10": 1.0, "p50": 2.0, "p90": 3.0}
    after["prefill"][0]["by_target"]["toy 1"]["first_token_ms"] |= {**row, "p50": 2.5}
    changes = {c.name: c for c in compare.compare(record, after)}
    assert changes["classes / facts / toy 0 / tokens_per_s"].verdict == "better"
    assert changes["classes / facts / toy 0 / tokens_per_s"].ratio == 2
    assert changes["classes / facts / toy 0 / first_token_ms"].verdict == "worse"
    assert changes["classes / facts / toy 0 / accepted_length"].verdict == "same"
    assert changes["prefill / 100 / toy 1 / first_token_ms"].verdict == "within the spread"
    assert not any("seconds" in name or "settings" in name for name in changes)
    after["machine"]["cpu"] = "another"
    assert compare.differing_conditions(record, after) == ["machine cpu: x <y> and another"]
    with pytest.raises(ConfigError, match="different measurements"):
        compare.compare(record, {"what": "server start"})
    with pytest.raises(ConfigError, match="share no number"):
        compare.compare(record, {"what": record["what"]})


def test_compare_on_the_command_line(record: dict[str, Any], tmp_path: Path) -> None:
    run = CliRunner().invoke
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(record))
    b.write_text(json.dumps(record))
    result = run(cli, ["bench", "compare", str(a), str(b)])
    assert result.exit_code == 0 and "tetris / toy 0 / tokens_per_s" in result.output
    rows = json.loads(run(cli, ["bench", "compare", str(a), str(b), "--json"]).output)
    assert {row["verdict"] for row in rows["changes"]} == {"same"}
    assert "needs two files" in run(cli, ["bench", "compare", str(a)]).output
    assert "takes one model" in run(cli, ["bench", "costs", "x", "y"]).output
    for text in ("{", "[]", "3"):
        b.write_text(text)
        result = run(cli, ["bench", "compare", str(a), str(b)])
        assert isinstance(result.exception, ConfigError), text
    result = run(cli, ["bench", "compare", str(a), str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)


def test_a_run_on_the_command_line(
    make_live: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = make_live(drafts=True)
    live.toy.say(TEXT)
    out, page = tmp_path / "sub" / "out.json", tmp_path / "out.html"
    arguments = ["bench", "speed", "--remote-only", "--url", f"here={live.url}", "--runs", "1"]
    arguments += ["--suite", "facts", "--prefill", "none", "--concurrency", "none"]
    arguments += ["--tokens", "8", "--out", str(out), "--html", str(page)]
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert list(record["tetris"]) == ["here"] and "prefill" not in record
    assert record["machine"]["torch"] and record["date"]
    assert page.read_text().startswith("<!doctype html>")
    wrong = CliRunner().invoke(cli, ["bench", "costs", "--html", "x.html"])
    assert "only bench speed has a report" in str(wrong.exception)


def test_plain_decoding_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option of the suite: the old keys, and the known script beside them."""
    from deepdraft.proof import bench

    seen: dict[str, Any] = {}

    def own(model: Any, urls: Any, plan: Plan, options: Any) -> dict[str, Any]:
        seen.update(plan=plan, options=options)
        return {"what": "answers", "tetris": {}}

    def plain(model: Any, **given: Any) -> dict[str, Any]:
        seen["given"] = given
        return {"what": "plain decoding, one sequence"}

    monkeypatch.setattr(bench_speed, "own_and_others", own)
    monkeypatch.setattr(bench, "speed", plain)
    result = CliRunner().invoke(
        cli, ["bench", "speed", "--context", "64", "--tokens", "8", "--json"]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["what"] == "plain decoding, one sequence" and "tetris" in record
    assert seen["given"] == {"context": 64, "tokens": 8, "runs": 5, "numerics": "exact"}
    assert seen["plan"].classes == () and seen["plan"].prefill == ()
    assert seen["options"] == ("--numerics", "exact", "--served-model-name", "demo")
