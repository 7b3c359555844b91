"""`deepdraft top`: what is read, what is shown, and servers that do not answer."""

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deepdraft.cli.main import main
from deepdraft.cli.top import parse, view
from tests.server.conftest import Live, make_live, make_toy

__all__ = ["make_live", "make_toy"]

OLD = """
# HELP deepdraft_generation_tokens_total Tokens.
deepdraft_generation_tokens_total 100
deepdraft_iterations_total 10
deepdraft_iteration_rows_total 20
deepdraft_spec_decode_steps_total{accepted="0"} 5
deepdraft_spec_decode_num_accepted_tokens_total 7
deepdraft_time_to_first_token_seconds_bucket{le="0.1"} 1
deepdraft_time_to_first_token_seconds_bucket{le="1.0"} 2
deepdraft_time_to_first_token_seconds_bucket{le="+Inf"} 2
other_metric 5
deepdraft_broken x
"""
NEW = """
deepdraft_generation_tokens_total 340
deepdraft_iterations_total 50
deepdraft_iteration_rows_total 140
deepdraft_num_requests_running 3
deepdraft_num_requests_waiting 41
deepdraft_spec_decode_steps_total{accepted="0"} 15
deepdraft_spec_decode_steps_total{accepted="2"} 30
deepdraft_spec_decode_num_accepted_tokens_total 67
deepdraft_spec_decode_num_draft_tokens_total 120
deepdraft_iteration_seconds_total{part="verify"} 3
deepdraft_iteration_seconds_total{part="draft"} 1
deepdraft_requests_finished_total{reason="stop"} 4
deepdraft_requests_finished_total{reason="error"} 0
deepdraft_time_to_first_token_seconds_bucket{le="0.1"} 2
deepdraft_time_to_first_token_seconds_bucket{le="1.0"} 11
deepdraft_time_to_first_token_seconds_bucket{le="+Inf"} 12
"""


def test_rates_between_two_readings() -> None:
    old = parse(OLD)
    assert old["generation_tokens_total"] == 100 and "broken" not in old and len(old) == 8
    text = "\n".join(view(old, parse(NEW), 2.0))
    assert "3 running    41 waiting" in text
    assert "120.0 /s answered" in text
    assert "20.0 /s     3.0 rows each" in text
    assert "2.50 tokens a step" in text and " 50.0 % of verified" in text
    assert "verify    75.0 %  ##################\n" in text
    assert "1st token  50 % <= 1 s  90 % <= 1 s  (10)" in text
    assert "ended      4 stop" in text and "error" not in text


def test_a_server_that_was_started_anew_and_one_that_is_idle() -> None:
    text = "\n".join(view(parse(NEW), parse(OLD), 1.0))
    assert "0.0 /s answered" in text and "-1" not in text and "ended      none" in text
    assert len(view({}, {}, 1.0)) >= 7


def test_a_live_server(make_live: Callable[..., Live], capsys: Any) -> None:
    live = make_live()
    live.toy.say("ok")
    body = {"messages": [{"role": "user", "content": "Hi"}], "thinking": False}
    assert httpx.post(f"{live.url}/v1/chat/completions", json=body).status_code == 200
    assert main(["top", live.url, "--interval", "0.1", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{live.url}  ready" and lines[1].startswith("requests")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://"])
def test_addresses_that_are_none(url: str, capsys: Any) -> None:
    assert main(["top", url, "--once"]) == 2
    assert "is no http or https address" in capsys.readouterr().err


def test_nobody_answers(capsys: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["top", f"http://127.0.0.1:{port}", "--once"]) == 2
    assert f"no answer from 127.0.0.1:{port}" in capsys.readouterr().err
