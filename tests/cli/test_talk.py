"""`chat` and `generate`: against a served toy, and with a toy loaded in the process."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepdraft.cli.chat import Chat
from deepdraft.cli.main import main
from deepdraft.config import EngineConfig
from deepdraft.engine import load
from deepdraft.errors import DeepdraftError
from tests.server.conftest import Live
from tests.server.toy import Toy


@pytest.fixture
def live(make_live: Callable[..., Live]) -> Live:
    live = make_live()
    live.toy.say(lambda p: ("hm</think>" if p.endswith("<think>") else "") + "Grüße 🎲\n")
    return live


def test_generate_prints_the_answer_and_thinks_aside(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "Hi", "--url", live.url]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Grüße 🎲\n"
    assert "hm" in shown.err
    assert main(["generate", "-p", "Hi", "--url", live.url + "/v1/", "--no-think"]) == 0
    assert capsys.readouterr().err == ""


def test_generate_as_json(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--max-tokens", "5", "--temperature", "0", "--seed", "1"]
    assert main(["generate", "-p", "Hi", "--url", live.url, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    usage = result.pop("usage")
    assert result == {
        "model": "toy",
        "text": "Gr",
        "reasoning": "hm",
        "finish_reason": "length",
    }
    assert usage["completion_tokens"] == 5


def test_generate_raw(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    live.toy.say(lambda p: p.removeprefix("<｜begin▁of▁sentence｜>").upper())
    assert main(["generate", "-p", "abc", "--raw", "--url", live.url]) == 0
    assert capsys.readouterr().out == "ABC\n"


def test_errors_of_a_server_are_one_message(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", "-p", "Hi", "--url", live.url]
    assert main([*ask, "--temperature", "9"]) == 2
    assert "400: temperature is 9.0" in capsys.readouterr().err
    assert main([*ask, "--model-name", "other"]) == 2
    assert "no model 'other'" in capsys.readouterr().err

    def fault(sequences: Any) -> None:
        raise RuntimeError

    live.toy.runner.step_fault = fault
    assert main(ask) == 2
    assert "the model failed" in capsys.readouterr().err
    assert main(["generate", "-p", "Hi", "--url", "http://127.0.0.1:1"]) == 2
    assert "no answer from 127.0.0.1:1" in capsys.readouterr().err


def test_generate_with_a_model_in_this_process(
    make_toy: Callable[..., Toy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toy = make_toy()
    toy.say("hm</think>Hello")
    seen: list[Any] = []

    def load_engine(path: Path, options: EngineConfig, *, name: str) -> load.LoadedModel:
        seen.append((path, options.numerics, options.max_context, name))
        return toy.load()

    monkeypatch.setattr(load, "load_engine", load_engine)
    options = ["--numerics", "qsim", "--max-context", "99"]
    assert main(["generate", str(tmp_path), "-p", "Hi", *options]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert seen == [(tmp_path, "qsim", 99, tmp_path.name)]
    assert main(["generate", str(tmp_path), "-p", "Hi", "--temperature", "9"]) == 2
    assert "temperature is 9.0" in capsys.readouterr().err


# The conversation


class Script:
    """A backend that answers what it is told; an exception in a list is raised there."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.num_closed = 0

    def answer(self, kind: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert kind == "chat"
        self.bodies.append(json.loads(json.dumps(body)))
        return self._chunks(self.answers.pop(0))

    def _chunks(self, pieces: list[Any]) -> Iterator[dict[str, Any]]:
        try:
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield {"choices": [piece]}
            yield {"choices": [], "usage": {}}
        finally:
            self.num_closed += 1

    def close(self) -> None:
        pass


def thought(text: str) -> dict[str, Any]:
    return {"delta": {"content": None, "reasoning_content": text}, "finish_reason": None}


def said(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"delta": {"content": text, "reasoning_content": None}, "finish_reason": finish}


def talk(backend: Script, *lines: Any, system: str | None = None) -> Chat:
    """Runs a conversation over these lines; an exception among them is raised by the reader."""
    chat = Chat(backend, {"temperature": 0}, system)
    left = iter(lines)

    def read() -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    chat.loop(read)
    return chat


def test_a_conversation_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Script([thought("let me"), said("Hel"), said("lo", "stop")], [said("Again", "stop")])
    talk(backend, "hi", "  ", "more", system="Be brief.")
    assert [m["content"] for m in backend.bodies[1]["messages"]] == [
        "Be brief.",
        "hi",
        "Hello",
        "more",
    ]
    assert backend.bodies[0]["temperature"] == 0 and backend.bodies[0]["stream"] is True
    assert capsys.readouterr().out == "let me\n\nHello\nAgain\n\n"


def test_no_answer_gives_orders_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is one lost that holds half a character; what is remembered is what was said."""
    orders = "a\x1b]0;title\x07\r\n\tb\x9b2J\x7f \ud83d Größe 🎲"
    chat = talk(Script([thought("\x1b[2J"), said(orders, "stop")]), "Hi")
    shown = capsys.readouterr().out
    assert "a\\x1b]0;title\\x07\n\tb\\x9b2J\\x7f \ufffd Größe 🎲" in shown
    assert "\\x1b[2J" in shown and "\x1b[2J" not in shown
    assert chat.messages[-1]["content"] == orders


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Script([said("a", "stop")], [said("b", "stop")], [said("c", "stop")])
    lines = ["one", "/think off", "two", "/reset", "/think on", "three", "/think", "/help", "/exit"]
    talk(backend, *lines, "never read")
    assert [len(b["messages"]) for b in backend.bodies] == [1, 3, 1]
    assert [b.get("thinking") for b in backend.bodies] == [
        None,
        {"type": "disabled"},
        {"type": "enabled"},
    ]
    shown = capsys.readouterr().out
    assert "Unknown command '/think'" in shown and "Ctrl-C stops an answer" in shown


def test_ctrl_c_stops_the_answer_and_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Script(
        [said("Half"), KeyboardInterrupt()],
        [thought("not yet"), KeyboardInterrupt()],
        [said("Fine", "stop")],
    )
    chat = talk(backend, "one", KeyboardInterrupt(), "two", "three")
    assert [m["content"] for m in chat.messages] == ["one", "Half", "three", "Fine"]
    assert backend.num_closed == 3, "a stopped answer was not closed"
    assert capsys.readouterr().out.count("(stopped)") == 2


def test_an_error_ends_the_answer_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Script([DeepdraftError("out of order")], [said("cut", "length")])
    chat = talk(backend, "one", "two")
    assert [m["content"] for m in chat.messages] == ["two", "cut"]
    shown = capsys.readouterr()
    assert "Error: out of order" in shown.err and "length limit" in shown.out


def test_ctrl_c_in_a_real_terminal_program(live: Live) -> None:
    live.toy.say("x" * 3000)
    live.toy.runner.delay_s = 0.01
    process = subprocess.Popen(
        [sys.executable, "-m", "deepdraft.cli.main", "chat", "--url", live.url, "--no-think"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        shown = ""
        while "xxx" not in shown:
            piece = process.stdout.read(1)
            assert piece, "the program ended"
            shown += piece
        process.send_signal(signal.SIGINT)
        while "(stopped)" not in shown:
            piece = process.stdout.read(1)
            assert piece, "Ctrl-C ended the program"
            shown += piece
        live.toy.say("still here")
        live.toy.runner.delay_s = 0.0
        rest, _ = process.communicate("again\n", timeout=20)
        assert "still here" in rest
        assert process.returncode == 0
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert live.toy.runner.num_steps < 2500
