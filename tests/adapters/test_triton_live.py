"""The real Triton server of the environment `triton`, over HTTP and gRPC.

Skipped where the environment is not there (`deepdraft env create triton`). Times are bounds on what
must not hang, wide enough for a busy machine.
"""

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepdraft.adapters import triton_up
from deepdraft.adapters.environment_check import port_is_free, unused_regions
from deepdraft.adapters.environments import find, ready
from deepdraft.adapters.supervisor import scrape
from deepdraft.adapters.triton_export import Export, write_repository
from deepdraft.adapters.triton_up import Running, running
from deepdraft.errors import ConfigError
from deepdraft.proof.serve_client import Ask, Target
from deepdraft.proof.tiny_write import write_tiny

from .broken import WORDS, Broken, broken_server

try:
    ready("triton")
except ConfigError as error:
    pytest.skip(error.message, allow_module_level=True)

TEXT = "".join(WORDS)


class Grpc:
    """Streams through a child in the Triton environment."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [find("triton").python, Path(__file__).with_name("grpc_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def asks(self, server: Running, asks: list[dict[str, Any]], **order: Any) -> list[Any]:
        assert self._child.stdin and self._child.stdout
        named = [{"model": server.export.name, **ask} for ask in asks]
        line = json.dumps({"address": server.grpc_address, "asks": named, **order})
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def ask(self, server: Running, text: str = "Hi", **ask: Any) -> dict[str, Any]:
        return self.asks(server, [{"text_input": text, **ask}])[0]

    def close(self) -> None:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.close()
        assert self._child.wait(20) == 0
        self._child.stdout.close()


@pytest.fixture(scope="module")
def grpc() -> Iterator[Grpc]:
    child = Grpc()
    yield child
    child.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Broken]:
    with broken_server() as server:
        yield server


@pytest.fixture(scope="module")
def module_server(engine: Broken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Triton in front of the engine that fails as it is told."""
    out = tmp_path_factory.mktemp("broken") / "repository"
    export = Export(name="broken", engine_url=engine.url, engine_model="broken", deadline_s=20.0)
    with running(write_repository(out, export)) as server:
        server.wait_ready(60)
        yield server


@pytest.fixture
def server(module_server: Running, engine: Broken) -> Iterator[Running]:
    """The server, ready, with an engine that is well."""
    engine.mode, engine.modes, engine.words, engine.ready = "good", [], WORDS, True
    engine.bodies.clear()
    engine.cancelled.clear()
    module_server.wait_ready(60)
    yield module_server


def generate(server: Running, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
    """Status and events of generate_stream."""
    parts = urllib.parse.urlsplit(server.http_url)
    assert parts.hostname
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        body = json.dumps({"text_input": "Hi", **fields})
        path = f"/v2/models/{server.export.name}/generate_stream"
        connection.request("POST", path, body)
        response = connection.getresponse()
        events = [
            json.loads(line[5:])
            for line in response.read().decode().splitlines()
            if line.startswith("data:")
        ]
        return response.status, events
    finally:
        connection.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.02)


def test_streams(server: Running, grpc: Grpc, engine: Broken) -> None:
    got = grpc.ask(server, sampling_parameters='{"max_tokens": 9, "temperature": 0}')
    assert (got["text"], got["pieces"], got["finish"], got["error"]) == (TEXT, 4, "stop", None)
    assert json.loads(got["usage"]) == {"completion_tokens": 4, "prompt_tokens": 3}
    assert engine.bodies[0] == {
        "prompt": "Hi", "max_tokens": 9, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "model": "broken",
    }  # fmt: skip
    status, events = generate(server)
    assert status == 200 and [e["text_output"] for e in events] == [*WORDS, ""]
    assert events[-1]["finish_reason"] == "stop"
    whole = triton_up.post(f"{server.http_url}/v2/models/broken/generate",
                           {"text_input": "Hi", "stream": False})  # fmt: skip
    assert whole[0] == 200 and json.loads(whole[1])["text_output"] == TEXT
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    assert grpc.asks(server, [{"messages": messages}])[0]["text"] == TEXT
    assert engine.paths[-1].endswith("/v1/chat/completions")


def test_requests_without_a_stream_are_refused(server: Running, grpc: Grpc) -> None:
    (unary,) = grpc.asks(server, [{"text_input": "Hi"}], unary=True)
    assert unary["code"] == "StatusCode.UNIMPLEMENTED"
    value = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}
    status, _ = triton_up.post(f"{server.http_url}/v2/models/broken/infer", {"inputs": [value]})
    assert status == 501


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": "[]"}, "either text_input or messages"),
        ({"sampling_parameters": "{"}, "no JSON"),
        ({"sampling_parameters": "[1]"}, "no JSON object"),
        ({"sampling_parameters": '{"max_tokens": 0}'}, "max_tokens must be"),
        ({"sampling_parameters": '{"max_tokens": 10000000}'}, "max_tokens must be"),
        ({"sampling_parameters": '{"stream": false}'}, "not to be set"),
        ({"sampling_parameters": '{"n": 2}'}, "not to be set"),
    ],
)
def test_bad_requests(server: Running, grpc: Grpc, engine: Broken, fields: Any, says: str) -> None:
    status, events = generate(server, **fields)
    assert status == 400 and says in events[0]["error"]
    got = grpc.ask(server, codes=True, **fields)
    assert got["code"] == "StatusCode.INVALID_ARGUMENT" and says in got["error"]
    assert engine.bodies == []


def test_refusals_pass_through(server: Running, grpc: Grpc, engine: Broken) -> None:
    engine.mode = "refuses"
    status, events = generate(server)
    assert status == 400 and "prompt too long" in events[0]["error"]
    assert len(engine.bodies) == 1, "a refusal is not tried again"
    assert grpc.ask(server, codes=True)["code"] == "StatusCode.INVALID_ARGUMENT"


def test_an_engine_that_is_busy_is_asked_again(server: Running, grpc: Grpc, engine: Broken) -> None:
    engine.modes = ["unavailable", "drops", "good"]
    status, events = generate(server)
    assert status == 200 and "".join(e["text_output"] for e in events) == TEXT
    assert len(engine.bodies) == 3
    engine.bodies.clear()
    engine.modes = ["unavailable"] * 3
    got = grpc.ask(server, codes=True)
    assert got["code"] == "StatusCode.UNAVAILABLE" and "3 times" in got["error"]
    assert len(engine.bodies) == 3
    engine.modes = ["unavailable"] * 3
    status, events = generate(server)
    assert status >= 400 and "3 times" in events[0]["error"]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("error_inside", "engine died"),
        ("truncated", "without its end mark"),
        ("endless", "does not end"),
        ("no_json", "no JSON object"),
        ("no_choices", "without choices"),
        ("html", "no stream"),
        ("error_whole", "out of memory"),
    ],
)
def test_streams_that_fail(
    server: Running, grpc: Grpc, engine: Broken, mode: str, says: str
) -> None:
    engine.mode = mode
    sampling = '{"max_tokens": 16}'
    _, events = generate(server, sampling_parameters=sampling)
    assert says in events[-1]["error"] and not any(e.get("finish_reason") for e in events)
    got = grpc.ask(server, sampling_parameters=sampling)
    assert says in got["error"] and got["finish"] is None
    assert len(engine.bodies) == 2, "nothing is tried again after the first byte"
    if mode == "endless":
        until(engine.cancelled.is_set)


def test_a_deadline_ends_the_request_in_the_engine(
    server: Running, grpc: Grpc, engine: Broken
) -> None:
    engine.mode = "slow"
    got = grpc.ask(server, timeout_us=500_000, codes=True)
    assert "0.5 s" in got["error"] and got["code"] == "StatusCode.CANCELLED"
    assert got["seconds"] < 10
    until(engine.cancelled.is_set)
    engine.mode = "hangs"
    got = grpc.ask(server, timeout_us=300_000)
    assert "0.3 s" in got["error"] and got["seconds"] < 10


def test_a_client_that_cancels_ends_the_request_in_the_engine(
    server: Running, grpc: Grpc, engine: Broken
) -> None:
    engine.mode = "slow"
    got = grpc.ask(server, cancel_after=2)
    assert got["error"] == "cancelled here" and got["pieces"] == 2
    until(engine.cancelled.is_set)
    engine.mode = "good"
    assert grpc.ask(server)["text"] == TEXT


def test_a_model_is_ready_only_while_its_engine_is(
    server: Running, grpc: Grpc, engine: Broken
) -> None:
    engine.ready = False
    until(lambda: not server.is_ready())
    url = f"{server.http_url}/v2/models/broken/ready"
    until(lambda: _status(url) != 200)
    status, events = generate(server)
    assert status in (400, 404, 503) and "error" in (events[0] if events else {"error": ""})
    engine.ready = True
    server.wait_ready(60)
    assert _status(url) == 200 and grpc.ask(server)["text"] == TEXT


def _status(url: str) -> int:
    from deepdraft.adapters.supervisor import fetch

    return fetch(url, timeout_s=5)[0]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Triton with our engine, started on a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("own")
    checkpoint = write_tiny(folder / "tiny", "llama")
    out = write_repository(
        folder / "repository",
        Export(name="tiny", checkpoint=str(checkpoint), serve_options=("--kv-memory", "0")),
    )
    with running(out, logs=folder / "logs") as server:
        server.wait_ready(120)
        yield server
        pids = server.triton.pids() + (server.engine.pids() if server.engine else [])
        assert len(pids) >= 3, "server, stub and engine"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    assert not unused_regions(), "shared memory was left behind"
    ports = server.ports
    assert all(port_is_free(ports.host, p) for p in (ports.http, ports.grpc, ports.metrics))


def test_text_is_that_of_the_direct_call(own: Running, grpc: Grpc) -> None:
    """100 prompts, 16 at a time, over gRPC and HTTP."""
    prompts = [f"prompt {i}: {'word ' * (i % 7)}{chr(65 + i % 26)}" for i in range(100)]
    direct = Target("direct", own.engine_url, api="completions")
    through = Target("triton", f"triton+{own.http_url}/tiny", api="completions")
    asks = [Ask((text,), 8, text) for text in prompts]
    with ThreadPoolExecutor(16) as pool:
        wanted = list(pool.map(direct.ask, asks))
        got = list(pool.map(through.ask, asks))
    assert [a.fault for a in wanted + got] == [None] * 200
    assert [a.said for a in got] == [a.said for a in wanted]
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert len({a.said for a in wanted}) > 50, "the prompts make a difference"
    sampling = json.dumps({"max_tokens": 8, "temperature": 0})
    results = grpc.asks(
        own, [{"text_input": p, "sampling_parameters": sampling} for p in prompts], at_once=16
    )
    assert [r["text"] for r in results] == [a.text for a in wanted]
    assert sum(v for k, v in scrape(own.metrics_url).items() if "success" in k) >= 200


def test_an_engine_that_is_killed_comes_back(own: Running, grpc: Grpc) -> None:
    assert own.engine is not None
    old = own.engine.pids()
    sampling = json.dumps({"max_tokens": 300, "ignore_eos": True, "temperature": 0})
    with ThreadPoolExecutor(1) as pool:
        ask = pool.submit(grpc.ask, own, sampling_parameters=sampling)
        until(lambda: _running_requests(own) > 0)
        killed = time.monotonic()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        got = ask.result(30)
        took = time.monotonic() - killed
    assert got["error"] and got["finish"] is None, got
    assert took < 5, "the client hears of it at once"
    until(lambda: own.engine is not None and own.engine.health.starts >= 2)
    own.wait_ready(120)
    assert not set(old) & set(own.engine.pids())
    assert grpc.ask(own, sampling_parameters='{"max_tokens": 4}')["finish"] is not None


def _running_requests(server: Running) -> float:
    from deepdraft.adapters.supervisor import fetch

    text = fetch(f"{server.engine_url}/healthz", timeout_s=5)[1]
    return json.loads(text)["engine"]["running"]
