"""`bench serve`: loads, the check of outputs, and servers that fail. Times are never judged."""

import contextlib
import json
import socket
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError
from deepdraft.proof import serve_client
from deepdraft.proof.bench_serve import Plan, is_good, measure, open_targets, table
from deepdraft.proof.serve_client import Ask, Target
from deepdraft.proof.serve_load import (
    MOST_UNDER_WAY,
    Conversation,
    Turn,
    arrivals,
    fixed,
    read_trace,
)
from deepdraft.proof.serve_load import poisson as poisson_load
from deepdraft.proof.serve_page import page
from tests.adapters.broken import Broken, broken_server
from tests.server.conftest import Live, make_live, make_toy

__all__ = ["make_live", "make_toy"]

TEXT = "The quick brown fox jumps over the lazy dog."
PLACE = {"machine": {"cpu": "x <y>", "cores": 2}, "date": "2026-01-01", "commit": "c"}


@pytest.fixture
def broken() -> Iterator[Broken]:
    with broken_server() as server:
        yield server


def plan(**given: Any) -> Plan:
    return Plan(**{"requests": 6, "max_tokens": 16, "check": 2, **given})


def test_own_server(make_live: Callable[..., Live]) -> None:
    lives = [make_live(drafts=drafts) for drafts in (True, False)]
    for live in lives:
        live.toy.say(TEXT)
    targets = open_targets([f"{n}={live.url}" for n, live in zip("ab", lives, strict=True)])
    record = measure(targets, plan(levels=(1.0, 3.0), max_tokens=60))
    assert record["equal"] == {
        "questions": 2, "max_tokens": 60, "compared": ["a", "b"], "equal": True, "differences": [],
    }  # fmt: skip
    assert is_good(record) and [row["level"] for row in record["loads"]] == [1.0, 3.0]
    for row in record["loads"]:
        for own in row["by_target"].values():
            assert own["good"] == own["requests"] == 6 and own["counted_by_server"]
            # The text and its end token, in each answer.
            assert own["tokens"] == 6 * (len(TEXT) + 1)
            assert own["first_token_ms"]["n"] == 6 and own["gap_ms"]["n"] > 0
            assert own["different_answers"] == 0 and own["compared_answers"] == 2
    drawn = page({**record, **PLACE})
    assert drawn.count("<svg") == 3 and "x &lt;y&gt;" in drawn and "<script" not in drawn
    for part in drawn.split("<svg")[1:]:
        ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    assert "6/6" in table(record) and "equal" in table(record)


@pytest.mark.parametrize("load", ["poisson", "conversations"])
def test_open_loads(make_live: Callable[..., Live], load: Any) -> None:
    live = make_live()
    live.toy.say(TEXT)
    target = Target("toy", live.url, api="completions")
    record = measure(
        [target], plan(load=load, levels=(200.0,), requests=5 if load == "poisson" else 2)
    )
    own = record["loads"][0]["by_target"]["toy"]
    assert own["good"] == own["requests"] == (5 if load == "poisson" else 6)
    assert record["equal"]["compared"] == ["toy", "toy"] and is_good(record)
    assert page({**record, **PLACE}).count("<svg") == 3


def test_different_outputs_are_not_measured(broken: Broken) -> None:
    with broken_server() as other:
        other.words = ("The ", "quick ", "brown ", "dog.")
        targets = open_targets([f"a={broken.url}", f"b={other.url}"])
        record = measure(targets, plan())
    (first, second) = record["equal"]["differences"]
    assert first["target"] == "b" and first["at_character"] == 16
    assert first["a"].endswith("fox.") and first["b"].endswith("dog.")
    assert second["question"] == "question 2"
    assert "loads" not in record and not is_good(record)
    assert "no figures" in table(record) and "differ" in page({**record, **PLACE})


def test_answers_that_change_under_load_are_counted(broken: Broken) -> None:
    (target,) = open_targets([broken.url])
    asked = target.ask

    def changes(ask: Ask, **options: Any) -> Any:
        if len(broken.bodies) == 7:  # after the warming-up and two questions, asked twice
            broken.words = ("Else.",)
        return asked(ask, **options)

    target.ask = changes  # type: ignore[method-assign]
    record = measure([target], plan())
    own = record["loads"][0]["by_target"][target.name]
    assert record["equal"]["equal"] and own["compared_answers"] == 2
    # The first two of six questions were checked; the second came after the change.
    assert own["different_answers"] in (0, 1, 2) and "Else." not in json.dumps(record["equal"])


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("unavailable", "status"),
        ("refuses", "refused"),
        ("error_whole", "error"),
        ("error_inside", "error"),
        ("error_first", "error"),
        ("truncated", "truncated"),
        ("no_json", "malformed"),
        ("no_choices", "malformed"),
        ("html", "malformed"),
        ("drops", "connect"),
        ("endless", "endless"),
        ("slow", "timeout"),
        ("drip", "timeout"),
        ("hangs", "timeout"),
    ],
)
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_faults_are_named_and_bounded(broken: Broken, mode: str, fault: str, api: Any) -> None:
    target = Target("broken", broken.url, api=api, timeout_s=1.5)
    broken.mode = mode
    answer = target.ask(Ask(("Hi",), 16))
    assert answer.fault == fault, answer.message
    if mode == "endless":
        assert answer.chunks <= 2 * 16 + 65
    if mode in ("endless", "slow", "drip"):
        assert broken.cancelled.wait(10), "the connection was left open"


LIES: list[dict[str, Any]] = [
    *(
        {"usage": {"completion_tokens": count}, "choices": []}
        for count in ([1], float("inf"), -5, 17, 10**400, "x", True)
    ),
    {"choices": [{"delta": "abc"}]},
    {"choices": [{"delta": {}}]},  # and then its end: no text, no reason
]


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_a_server_that_lies_is_counted(
    broken: Broken, lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        serve_client, "_frames", lambda _: iter([json.dumps(lie).encode(), b"[DONE]"])
    )
    done = fixed(Target("broken", broken.url), [Ask(("Hi",), 16)] * 2, 2)
    assert [d.answer.fault for d in done] == ["malformed"] * 2


def test_a_list_of_models_that_drips_is_given_up() -> None:
    """Every read of the socket is in time; the whole never ends."""
    stop = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while not stop.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(ConfigError, match="no list of models"):
                Target("dripping", url, timeout_s=0.5)
        finally:
            stop.set()
            thread.join()


def test_faults_do_not_end_a_load(broken: Broken) -> None:
    (target,) = open_targets([f"one={broken.url}"], timeout_s=5.0)
    broken.modes = ["good"] * 3 + ["truncated", "good", "unavailable", "good", "error_inside"]
    record = measure([target], plan(check=1))
    own = record["loads"][0]["by_target"]["one"]
    assert own["faults"] == {"error": 1, "status": 1, "truncated": 1} and own["good"] == 3
    assert own["tokens"] == 12 and own["first_token_ms"]["n"] == 3
    assert not is_good(record) and "engine died" in table(record)


def test_switches_are_left_out_where_they_are_refused(broken: Broken) -> None:
    broken.mode = "no_switches"
    (target,) = open_targets([broken.url])
    assert [target.ask(Ask(("Hi",), 8)).fault for _ in range(2)] == [None, None]
    assert ["thinking" in body for body in broken.bodies] == [True, False, False]


def test_history_of_a_conversation(broken: Broken) -> None:
    from deepdraft.proof.serve_load import conversations

    target = Target("one", broken.url)
    trace = [Conversation(0.0, (Turn("A", 4), Turn("B", 5)))]
    broken.modes = ["good", "good"]
    assert [d.answer.fault for d in conversations(target, trace)] == [None, None]
    last = broken.bodies[-1]
    assert last["max_tokens"] == 5
    assert [m["content"] for m in last["messages"]] == ["A", "The quick brown fox.", "B"]
    broken.modes = ["truncated"]
    assert [d.answer.fault for d in conversations(target, trace)] == ["truncated"]


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = arrivals(4000, 8.0, 3)
    assert times == arrivals(4000, 8.0, 3) != arrivals(4000, 8.0, 4)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    assert 0.118 < mean < 0.132 and 0.9 < variance**0.5 / mean < 1.1


def test_a_most_of_requests_is_under_way(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepdraft.proof import serve_load

    assert MOST_UNDER_WAY >= 256
    monkeypatch.setattr(serve_load, "MOST_UNDER_WAY", 2)
    broken.mode = "hangs"
    target = Target("one", broken.url, timeout_s=0.5)
    done = poisson_load(target, [Ask(("Hi",), 4)] * 5, 1000.0, 0)
    assert sorted(d.answer.fault or "" for d in done) == ["limit"] * 3 + ["timeout"] * 2


def test_the_socket_may_notice_the_deadline_first(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepdraft.proof import serve_client

    monkeypatch.setattr(serve_client, "_cut", lambda *_: None)
    broken.mode = "hangs"
    assert Target("one", broken.url, timeout_s=0.2).ask(Ask(("Hi",), 4)).fault == "timeout"


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at_s": 0.5, "turns": [{"text": "Hi", "max_tokens": 3, "pause_s": 2}]}\n\n'
        '{"turns": [{"text": "Ho"}]}\n'
    )
    assert read_trace(file, 9) == [
        Conversation(0.5, (Turn("Hi", 3, 2.0),)),
        Conversation(0.0, (Turn("Ho", 9, 0.0),)),
    ]
    for bad in (
        "", "[1]", "{", '{"turns": []}', '{"turns": [{"text": ""}]}', '{"turns": [3]}',
        '{"turns": [{"text": "a", "max_tokens": 0}]}', '{"turns": [{"text": "a"}], "at_s": -1}',
        '{"turns": [{"text": "a", "pause_s": "x"}]}', '{"turns": [{"text": "a"}], "at_s": NaN}',
    ):  # fmt: skip
        file.write_text(bad)
        with pytest.raises(ConfigError, match="trace"):
            read_trace(file, 9)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none", 9)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://127.0.0.1", "no target"),
        ("http://", "no target"),
        ("http://127.0.0.1:x", "no address"),
        ("triton+http://127.0.0.1:1", "names no model"),
        ("triton+http://127.0.0.1:1/m", "no Triton server"),
        ("http://127.0.0.1:1", "no list of models"),
    ],
)
def test_bad_targets(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Target("x", url)


@pytest.mark.parametrize(
    "given", [{"levels": (0.5,)}, {"levels": ()}, {"levels": (0.0,)}, {"trace": Path("x")}]
)
def test_bad_plans(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan(**given)


def test_command(broken: Broken, tmp_path: Path) -> None:
    out, html = tmp_path / "a" / "r.json", tmp_path / "b" / "r.html"
    options = ["bench", "serve", "--target", f"x={broken.url}", "--requests", "3", "--check", "1"]
    result = CliRunner().invoke(
        cli, [*options, "--json", "--out", str(out), "--html", str(html)], standalone_mode=False
    )
    assert result.return_value == 0, result.output
    record = json.loads(out.read_text())
    assert record["loads"][0]["by_target"]["x"]["good"] == 3 and record["machine"]["cores"]
    assert json.loads(result.stdout) == record and "<svg" in html.read_text()
    broken.mode = "truncated"
    assert CliRunner().invoke(cli, options, standalone_mode=False).return_value == 1
    two = [*options, "--target", f"x={broken.url}"]
    result = CliRunner().invoke(cli, two, standalone_mode=False)
    assert isinstance(result.exception, ConfigError) and "one name" in str(result.exception)
