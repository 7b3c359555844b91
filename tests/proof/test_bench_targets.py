"""`bench speed` against servers that misbehave, and `bench compare` with records that do."""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepdraft.cli.main import cli
from deepdraft.errors import ConfigError, DeepdraftError
from deepdraft.proof import bench, compare, speed_client
from deepdraft.proof.bench_speed import Plan, measure, own_and_others
from deepdraft.proof.report import html_report
from deepdraft.proof.speed_client import Target
from tests.server.conftest import Live, make_live, make_toy

__all__ = ["make_live", "make_toy"]

MODELS = json.dumps({"data": [{"id": "odd", "owned_by": "x", "max_model_len": "many"}]})
PLAN = Plan(
    runs=2, tokens=8, tetris_tokens=8, classes=("facts",), prefill=(40,), concurrency=(1, 2)
)


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
GOOD = chunk("a") + chunk("b") + chunk(finish="stop") + DONE


class Odd:
    """A server whose answers a test writes."""

    def __init__(self) -> None:
        self.models: tuple[int, bytes] = (200, MODELS.encode())
        self.answer: Callable[[int], tuple[int, str, bytes]] = lambda n: (
            200,
            "text/event-stream",
            GOOD,
        )
        """Status, type and body of the n-th answer."""
        self.asked = 0
        odd = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(odd.models[0], "application/json", odd.models[1])

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                odd.asked += 1
                self._send(*odd.answer(odd.asked))

            def _send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def streams(self, body: bytes) -> None:
        """Every answer is this stream."""
        self.answer = lambda n: (200, "text/event-stream", body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def odd() -> Iterator[Odd]:
    server = Odd()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "a key, please"}', "answered 401: .*a key, please"),
        (500, b"", "answered 500: nothing"),
        (302, b"moved", "answered 302"),
        (200, b"<html>hello</html>", "no list of models in OpenAI's format: <html>"),
        (200, b'{"data": []}', "no list of models"),
        (200, b'{"data": ["x"]}', "no list of models"),
        (200, b'{"data": [{"id": 7}]}', "no list of models"),
        (200, b"[" * 100_000, "no list of models"),
        (200, b"\xff\x00\x1b[31m", "no list of models"),
    ],
)
def test_lists_of_models(odd: Odd, status: int, body: bytes, said: str) -> None:
    odd.models = status, body
    with pytest.raises(ConfigError, match=said) as error:
        Target("x", odd.url)
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 500


def test_no_secret_is_told(odd: Odd, monkeypatch: pytest.MonkeyPatch) -> None:
    odd.models = 500, b""
    with pytest.raises(ConfigError) as error:
        Target("x", odd.url.replace("127", "user:word@127"))
    assert "word" not in str(error.value)
    monkeypatch.setenv(speed_client.KEY_VARIABLE, "secret\nkey")
    with pytest.raises(ConfigError, match="no HTTP header may hold") as error:
        Target("x", odd.url)
    assert "secret" not in str(error.value)
    for url in ("http://[::1", "http://x:99999999"):
        with pytest.raises(ConfigError, match="no http or https address"):
            Target("x", url)


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (500, "text/plain", b"broken", "answered 500: broken"),
        (404, "text/html", b"<h1>\nno such\n</h1>", "answered 404: <h1> no such </h1>"),
        (200, "application/json", b'{"choices": []}', r"in one piece .* where a stream"),
        (200, "text/event-stream", b"", "before the answer's end"),
        (200, "text/event-stream", chunk("a"), "before the answer's end"),
        (200, "text/event-stream", DONE, "empty answer"),
        (200, "text/event-stream", chunk(finish="stop") + DONE, "empty answer"),
        (200, "text/event-stream", b"data: {oh\n\n", r"no JSON: \{oh"),
        (200, "text/event-stream", b"data: [1]\n\n", "no chunk of an answer"),
        (200, "text/event-stream", b"data: " + b"[" * 99_999 + b"\n\n", "no JSON"),
        (200, "text/event-stream", b"data: {" + b"x" * (1 << 20), "no JSON"),
        (200, "text/event-stream", b'data: {"error": {"message": "too hot"}}\n\n', "too hot"),
        (200, "text/event-stream", b'data: {"error": "cold"}\n\n', "cold"),
    ],
)
def test_answers_that_are_none(odd: Odd, status: int, kind: str, body: bytes, said: str) -> None:
    odd.answer = lambda n: (status, kind, body)
    target = Target("odd one", odd.url)
    with pytest.raises(DeepdraftError, match=said) as error:
        target.ask("Hi")
    assert "odd one" in str(error.value) and len(str(error.value)) < 500
    assert odd.asked == 1, "only a refusal is tried again without our own fields"


def test_fields_of_other_kinds_count_as_absent(odd: Odd) -> None:
    strange = {"choices": ["x", {"delta": [], "speculation": {"average_iteration_ms": "fast"}}]}
    odd.streams(
        b": hello\r\n\r\nevent: x\r\n"
        + b"data: "
        + json.dumps({**strange, "usage": [1], "error": None, "system_fingerprint": 7}).encode()
        + b"\r\n\r\n"
        + chunk("a", usage={"completion_tokens": -4, "prompt_tokens": "9"})
        + chunk("b", usage={"completion_tokens": True, "prompt_tokens_details": 3})
        + b'data: {"choices": 3}\n\n'
        + chunk(finish="length", speculation={})
    )
    sample = Target("x", odd.url).ask("Hi")
    assert (sample.tokens, sample.counted, sample.finish) == (2, False, "length")
    assert sample.prompt_tokens == sample.cached_tokens == 0
    assert sample.ms_per_step is None and sample.accepted_length is None


def test_an_answer_in_one_piece_has_no_rate(odd: Odd) -> None:
    """A server that does not stream, behind a gateway that says it does."""
    odd.streams(chunk("a whole answer", "stop", usage={"completion_tokens": 200}) + DONE)
    target = Target("x", odd.url)
    sample = target.ask("Hi")
    assert sample.tokens == 200 and sample.tokens_per_s is None
    record = measure([target], PLAN)
    assert record["tetris"]["x"]["tokens_per_s"] is None
    assert record["tetris"]["x"]["first_token_ms"]["n"] == 2
    # Nor has a prompt whose length nobody tells.
    assert record["prefill"][0]["by_target"]["x"]["tokens_per_s"] is None
    assert "<svg" in html_report(record)


def test_a_token_without_text_is_an_answer(odd: Odd) -> None:
    """One token of a prompt's measurement may be the end or a part of a character."""
    odd.streams(chunk(finish="length", usage={"completion_tokens": 1, "prompt_tokens": 50}) + DONE)
    sample = Target("x", odd.url).ask("Hi", max_tokens=1)
    assert sample.first_s > 0 and sample.tokens == 1 and sample.tokens_per_s is None


def test_a_stream_of_comments_ends(odd: Odd) -> None:
    class Comments:
        """A stream that says that it lives, and nothing else."""

        def readline(self, limit: int) -> bytes:
            return b": keep-alive\n"

    target = Target("x", odd.url, timeout_s=0.05)
    with pytest.raises(DeepdraftError, match=r"gave no token for 0\.05 s"):
        target._read(Comments(), time.perf_counter())  # type: ignore[arg-type]


def test_one_server_fails_in_the_middle(
    make_live: Callable[..., Live], odd: Odd, tmp_path: Path
) -> None:
    """The figures of the other one are kept, what failed is told, and it is given up in time."""
    live = make_live(drafts=True)
    live.toy.say("The quick brown fox.")
    odd.answer = lambda n: (
        (200, "text/event-stream", GOOD) if n <= 3 else (503, "text/plain", b"<b>gone</b>")
    )
    said: list[str] = []
    targets = [Target("toy", live.url), Target("odd", odd.url)]
    record = measure(targets, PLAN, said.append)
    # The warm-up, both runs of the known script, and three failures.
    assert odd.asked == 1 + 2 + 3
    assert [f["target"] for f in record["failures"]] == ["odd"] * 3
    assert record["failures"][0]["part"] == "suite: facts"
    assert "503" in record["failures"][0]["error"]
    assert any("is asked no more" in line for line in said)
    facts = record["classes"][0]["by_target"]
    assert facts["toy"]["answers"] == 8 and facts["odd"]["answers"] == 0
    assert facts["odd"]["tokens_per_s"] is None
    assert record["concurrency"][1]["by_target"]["odd"]["total_tokens_per_s"] is None
    assert record["concurrency"][1]["by_target"]["toy"]["total_tokens_per_s"]["n"] == 1
    text = html_report(record)
    assert "Answers that did not come" in text and "&lt;b&gt;gone" in text
    assert "<b>gone" not in text
    # Against a run in which it did answer, only what both measured is compared.
    names = {c.name for c in compare.compare(record, record)}
    assert "classes / facts / toy / tokens_per_s" in names
    assert "classes / facts / odd / tokens_per_s" not in names


def test_a_failure_is_the_status_of_the_command(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    odd.answer = lambda n: (
        (200, "text/event-stream", GOOD) if n == 1 else (500, "text/plain", b"gone")
    )
    out = tmp_path / "a.json"
    arguments = ["bench", "speed", "--remote-only", "--url", f"odd={odd.url}", "--out", str(out)]
    arguments += ["--suite", "none", "--prefill", "none", "--concurrency", "none", "--runs", "1"]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.return_value == 1, result.output
    assert json.loads(out.read_text())["failures"][0]["error"] == "odd answered 500: gone"


def test_what_cannot_work_is_told_before_anything_is_measured(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    with pytest.raises(ConfigError, match="no class 'poems'"):
        Plan.read(suite="facts,poems")
    with pytest.raises(ConfigError, match="from 1 to 1024"):
        Plan.read(concurrency="1,5000")
    (tmp_path / "file").write_text("")
    for where in (tmp_path, tmp_path / "file" / "a.json"):
        for option in ("out", "html"):
            file: dict[str, Any] = {option: str(where)}
            with pytest.raises(ConfigError, match="cannot be written"):
                bench.main(
                    "speed",
                    "",
                    remote_only=True,
                    urls=[odd.url],
                    suite="none",
                    **file,
                )
    assert odd.asked == 0
    with pytest.raises(ConfigError, match="two servers have one name"):
        own_and_others(None, [odd.url, odd.url], PLAN)


SPREAD = {"n": 3, "p10": 9.0, "p50": 10.0, "p90": 11.0}


def record(**parts: Any) -> dict[str, Any]:
    return {"what": "speed of served answers", **parts}


def verdicts(before: dict[str, Any], factor: float) -> dict[str, str]:
    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v if k == "n" else scaled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [scaled(v) for v in value]
        return value * factor if isinstance(value, float) else value

    return {c.name: c.verdict for c in compare.compare(before, scaled(copy.deepcopy(before)))}


def test_which_way_is_better() -> None:
    """By the record's own words, not by what servers and classes are called."""
    more = ("tokens_per_s", "accepted_length", "speedup", "tokens_per_step", "raw_GB_s", "tok_s")
    less = ("ms_per_step", "first_token_ms", "gap_ms", "ready_s", "bytes", "peak_resident_mb",
            "best_ms_per_token", "processor_cost", "frames_over_200_ms", "mismatches")  # fmt: skip
    other = ("tokens", "answers", "ms2", "costume", "seconds_hand_first")
    for target in ("plain", "cost of bytes", "tokens_per_s", "ms"):
        own = {key: dict(SPREAD) for key in more + less + other}
        found = verdicts(record(tetris={target: own}, rows={"by_target": {target: own}}), 2.0)
        for key in more:
            assert found[f"rows / {target} / {key}"] == "better", key
        for key in less:
            assert found[f"rows / {target} / {key}"] == "worse", key
        for key in other[:4]:
            assert found[f"rows / {target} / {key}"] == "other", key
    # Where the last word says nothing, one before it may.
    assert verdicts(record(paint_ms={"first": 4.0}), 2.0) == {"paint_ms / first": "worse"}


def test_numbers_that_are_none() -> None:
    own = {
        "nan": float("nan"),
        "inf": float("inf"),
        "huge": 10**400,
        "true": True,
        "text": "7",
        "bad middle": {**SPREAD, "p50": None},
        "nan middle": {**SPREAD, "p50": float("nan")},
        "bad span": {**SPREAD, "p10": "x", "p90": float("inf")},
        "good": 1.0,
    }
    found = dict(compare.numbers(own))
    assert set(found) == {"bad span", "good"}
    assert found["bad span"] == compare.Number(10.0)
    assert compare.table(compare.compare(own, own)).count("\n") == 2
    deep = json.loads('{"x":' * 200 + "1.0" + "}" * 200)
    with pytest.raises(ConfigError, match="nested more than"):
        compare.compare(deep, deep)


def test_what_only_one_record_holds(tmp_path: Path) -> None:
    def row(name: str, *targets: str) -> dict[str, Any]:
        return {
            "class": name,
            "by_target": {t: {"tokens_per_s": SPREAD, "tokens": 3} for t in targets},
        }

    before = record(classes=[row("code", "a", "b"), row("facts", "a")], prefill=[])
    after = record(classes=[row("code", "a"), row("prose", "a")], failures=[{"target": "b"}])
    assert compare.missing(before, after) == [
        "only in the first: classes / code / b",
        "only in the first: classes / facts",
        "only in the second: classes / prose",
    ]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, content in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(content))
    arguments = ["bench", "compare", *map(str, files)]
    result = CliRunner().invoke(cli, arguments)
    assert "only in the first: classes / facts" in result.output
    said = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert len(said["missing"]) == 3 and {c["verdict"] for c in said["changes"]} == {"same"}


def test_conditions_of_other_kinds() -> None:
    strange = record(machine=["x"], settings=None)
    assert compare.differing_conditions(strange, record(machine={"cpu": "y"})) == [
        "machine cpu: None and y"
    ]
