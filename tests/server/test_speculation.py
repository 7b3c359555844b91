"""Speculation over HTTP: the same answers, the fields, the counters, /metrics."""

import json
import re
from collections.abc import Callable

import pytest

from deepdraft.server.metrics import metrics_text

from .conftest import Client

TEXT = "The quick brown fox jumps over the lazy dog, again and again."


@pytest.fixture
def drafting(make_client: Callable[..., Client]) -> Client:
    client = make_client(drafts=True)
    client.toy.say(TEXT)
    return client


def chunks(client: Client, **fields: object) -> list[dict]:
    lines = client.complete("Hi", stream=True, **fields).text.split("\n\n")
    return [json.loads(x[6:]) for x in lines if x.startswith("data: {")]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_stop_string_across_a_block_boundary(drafting: Client, cut: int) -> None:
    """Wherever it lies in the blocks of six: text, reason and usage are those of plain decoding."""
    stop = TEXT[cut : cut + 9]
    answers = [drafting.complete("Hi", stop=stop, speculation={"drafts": n}).json() for n in (0, 5)]
    for answer in answers:
        assert answer["choices"][0]["text"] == TEXT[:cut]
        assert answer["choices"][0]["finish_reason"] == "stop"
    assert answers[0]["usage"] == answers[1]["usage"]
    assert answers[0]["usage"]["completion_tokens"] == cut + 9
    streamed = chunks(drafting, stop=stop)
    assert "".join(c["choices"][0]["text"] for c in streamed) == TEXT[:cut]
    # The next request is served from a clean state.
    assert drafting.complete("Hi").json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 8, 13])
def test_max_tokens_inside_a_block(drafting: Client, limit: int) -> None:
    answer = drafting.complete("Hi", max_tokens=limit).json()
    assert answer["choices"][0]["text"] == TEXT[:limit]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == limit


def test_logprobs_and_n_are_those_of_plain_decoding(drafting: Client) -> None:
    fields = {"n": 3, "logprobs": 3, "temperature": 1.2, "seed": 4, "top_p": 0.9}
    plain, drafted = (
        drafting.complete("Hi", speculation={"drafts": n}, **fields).json() for n in (0, 5)
    )
    assert plain["choices"] == drafted["choices"]
    assert plain["usage"] == drafted["usage"]


def test_the_report(drafting: Client) -> None:
    fields = {"speculation": {"report": True, "rule": "block"}}
    answer = drafting.complete("Hi", temperature=1, seed=1, **fields).json()["choices"][0]
    report = answer["speculation"]
    assert report["rule"] == "block"
    # The text and its end token, less what the prompt gave: 60 + 1 tokens of 61 in steps of six.
    assert sum(report["accepted_drafts_histogram"]) == report["steps"]
    assert report["accepted_drafts"] == sum(
        n * count for n, count in enumerate(report["accepted_drafts_histogram"])
    )
    assert report["average_accept_length"] == pytest.approx(
        1 + report["accepted_drafts"] / report["steps"], abs=1e-3
    )
    assert report["average_accept_length"] > 4
    assert report["average_iteration_ms"] > 0
    assert report["drafts_cut_by_confidence"] == report["drafts"] - report["verified_drafts"] == 0
    last = [c for c in chunks(drafting, **fields) if c["choices"][0]["finish_reason"]]
    assert [c["choices"][0]["speculation"]["rule"] for c in last] == ["coupled"], "temperature 0"
    assert "speculation" not in drafting.complete("Hi").json()["choices"][0]
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}
    chat = drafting.post("/v1/chat/completions", body).json()["choices"][0]
    assert chat["speculation"]["accepted_drafts"] > 40
    # A stop string ends the answer before the engine does; the counters go up to there.
    stopped = drafting.complete("Hi", stop="again", **fields).json()["choices"][0]
    assert stopped["speculation"]["accepted_drafts"] > 30


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rule": "best"}, "speculation.rule: invalid enum value 'best'"),
        ({"drafts": -1}, "speculation.drafts is -1; it must be from 0 to 15"),
        ({"drafts": 16}, "speculation.drafts is 16"),
        ({"report": 1}, "speculation.report: expected `bool | null`, got `int`"),
        (3, "speculation: expected `object | null`, got `int`"),
    ],
)
def test_wrong_fields_are_named(drafting: Client, value: object, message: str) -> None:
    answer = drafting.complete("Hi", speculation=value)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def samples(text: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_metrics(drafting: Client) -> None:
    before = samples(drafting.get("/metrics").text)
    drafting.complete("Hi", max_tokens=26)
    answer = drafting.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = samples(answer.text)
    grown = {k: v - before.get(k, 0) for k, v in after.items()}
    # One token from the prompt, four whole blocks, one token more.
    assert grown["deepdraft_generation_tokens_total"] == 26
    assert grown["deepdraft_iterations_total"] == 5
    assert grown["deepdraft_iteration_rows_total"] == 25
    assert grown['deepdraft_spec_decode_steps_total{accepted="5"}'] == 4
    assert grown["deepdraft_spec_decode_num_accepted_tokens_total"] == 20
    assert grown["deepdraft_spec_decode_num_draft_tokens_total"] == 20
    assert grown["deepdraft_spec_decode_num_cut_tokens_total"] == 0
    assert grown['deepdraft_requests_finished_total{reason="length"}'] == 1
    for part in ("draft", "verify", "judge", "commit"):
        assert grown[f'deepdraft_iteration_seconds_total{{part="{part}"}}'] >= 0
    assert after["deepdraft_average_iteration_ms"] > 0
    assert 1 < after["deepdraft_average_accept_length"] <= 6
    assert after["deepdraft_num_requests_running"] == 0


def test_metrics_are_in_the_text_format() -> None:
    stats = {"requests": 10**12, "waiting": 0, "finished_stop": 3, "spec_accepted_2": 4}
    text = metrics_text(stats)
    name = r"deepdraft_[a-z_]+"
    line = rf'(# (HELP {name} .+|TYPE {name} (gauge|counter))|{name}(\{{[a-z]+="\w+"\}})? [0-9.]+)'
    assert all(re.fullmatch(line, x) for x in text.splitlines()), text
    assert "deepdraft_requests_total 1000000000000\n" in text
    kinds = re.findall(rf"# TYPE ({name}) ", text)
    assert len(kinds) == len(set(kinds))
    assert metrics_text({}) == "\n"
