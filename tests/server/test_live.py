"""The server on real sockets: load, clients that leave, many at once, signals, the openai SDK."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import Live
from .toy import tokenizer_file

OFF = {"thinking": {"type": "disabled"}}
LONG = "x" * 3000


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **OFF, **fields}


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def num_open(live: Live) -> int:
    return len(live.toy.runner.open_handles)


def test_the_port_answers_while_the_model_loads(make_live: Callable[..., Live]) -> None:
    live = make_live(wait=False)
    live.toy.say("ok")
    with httpx.Client(base_url=live.url) as client:
        assert client.get("/healthz").json()["state"] == "loading"
        for response in (
            client.get("/readyz"),
            client.get("/v1/models"),
            client.post("/v1/chat/completions", json=body()),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "2"
            assert "loading" in response.json()["error"]["message"]
        assert live.toy.runner.num_steps == 0
        live.toy.gate.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert live.toy.runner.num_steps == 1, "ready without a warm-up step"
        assert client.get("/healthz").json()["state"] == "ready"
        assert client.post("/v1/chat/completions", json=body()).status_code == 200


def test_a_stream_arrives_piece_by_piece(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say("abc")
    live.toy.runner.delay_s = 0.05
    times = []
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body(stream=True)) as r:
        for line in r.iter_lines():
            if line:
                times.append(time.monotonic())
    assert times[-1] - times[0] > 0.1


def test_a_client_that_leaves_a_stream_frees_its_place(make_live: Callable[..., Live]) -> None:
    live = make_live(engine={"max_running": 1})
    live.toy.say(LONG)
    live.toy.runner.delay_s = 0.005
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body(stream=True)) as r:
        lines = r.iter_lines()  # held: the client leaves with its iterator
        next(lines)
        until(lambda: num_open(live) == 1)  # the first line may come before the engine begins
    until(lambda: num_open(live) == 0)
    live.toy.say("ok")
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body()).json()
    assert answer["choices"][0]["message"]["content"] == "ok"
    engine = live.toy.service._engine
    assert engine is not None and engine.stats()["finished_abort"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_without_reading_frees_its_place(
    make_live: Callable[..., Live], stream: bool
) -> None:
    live = make_live(engine={"max_running": 2})
    live.toy.say(LONG)
    live.toy.runner.delay_s = 0.005
    connection = http.client.HTTPConnection("127.0.0.1", live.port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body(stream=stream, n=2)))
    until(lambda: num_open(live) == 2)
    connection.close()
    until(lambda: num_open(live) == 0)
    assert live.toy.runner.num_steps < 2900


def test_a_client_that_leaves_the_queue_is_forgotten(make_live: Callable[..., Live]) -> None:
    live = make_live(engine={"max_running": 1})
    live.toy.say(LONG)
    live.toy.runner.delay_s = 0.005
    engine = live.toy.service._engine
    assert engine is not None
    connections = []
    for i in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", live.port)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a"}))
        connections.append(connection)
        until(lambda i=i: engine.stats()["requests"] == i + 2)  # the warm-up is one
    connections[1].close()
    until(lambda: engine.stats()["waiting"] == 0)
    assert num_open(live) == 1
    connections[0].close()
    until(lambda: num_open(live) == 0)


def test_a_body_cut_short_leaves_no_trace(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say("ok")
    connection = http.client.HTTPConnection("127.0.0.1", live.port)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"messages": [')
    connection.close()
    assert httpx.post(f"{live.url}/v1/chat/completions", json=body()).status_code == 200


def test_50_requests_at_once(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.toy.say(lambda prompt: re.findall(r"<(\d+)>", prompt)[0] * 3)

    def ask(i: int) -> tuple[int, str]:
        fields = body(messages=[{"role": "user", "content": f"<{i}>"}])
        response = client.post("/v1/chat/completions", json=fields)
        return response.status_code, response.json()["choices"][0]["message"]["content"]

    limits = httpx.Limits(max_connections=50)
    with (
        httpx.Client(base_url=live.url, timeout=60, limits=limits) as client,
        ThreadPoolExecutor(50) as pool,
    ):
        answers = list(pool.map(ask, range(50)))
    assert answers == [(200, str(i) * 3) for i in range(50)]


def test_silence_in_a_stream_is_filled_with_comments(make_live: Callable[..., Live]) -> None:
    live = make_live(server={"keep_alive_s": 0.05})
    live.toy.say("ok")
    gate = threading.Event()
    live.toy.runner.prefill_fault = lambda s, ids: (gate.wait(5), None)[1]
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body(stream=True)) as r:
        lines = r.iter_lines()
        assert [next(lines), next(lines), next(lines)] == [": keep-alive", "", ": keep-alive"]
        gate.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


def test_a_long_prompt_says_how_far_it_is(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In comments: between them and after them the stream is the usual one."""
    monkeypatch.setattr("deepdraft.engine.reading.EVERY_S", 0.0)
    monkeypatch.setattr("deepdraft.engine.reading.SPACING", float("inf"))
    live = make_live(engine={"prefill_chunk": 16})
    live.toy.say("ok")
    prompt = [{"role": "user", "content": "word " * 40}]
    with httpx.stream(
        "POST", f"{live.url}/v1/chat/completions", json=body(stream=True, messages=prompt)
    ) as r:
        lines = [line for line in r.iter_lines() if line]
    told = [line for line in lines if line.startswith(": prompt ")]
    found = [re.fullmatch(r": prompt (\d+) of (\d+) tokens, \d+ a second, \d+ s left", line)
             for line in told]  # fmt: skip
    done = [int(match[1]) for match in found if match is not None]
    assert len(done) == len(told) >= 2 and done == list(range(16, 16 * len(done) + 1, 16))
    rest = [line for line in lines if not line.startswith(": ")]
    assert rest[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in rest)


# Signals: the server as a process of its own


class Process:
    """A served toy in a process; `length` characters of answer, `delay_s` a token."""

    def __init__(
        self, directory: Path, *, drain_s: float, length: int, delay_s: float, broken: str = "no"
    ) -> None:
        tokenizer_file(directory)
        arguments = [str(v) for v in (directory, drain_s, length, delay_s, broken)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.served", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def url(self) -> str:
        until(lambda: "ready after" in "".join(self.log), 60)
        found = re.search(r"running on (http://[0-9.:]+)", "".join(self.log))
        assert found is not None, self.log
        return found[1]

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def make(**options: Any) -> Process:
        processes.append(Process(tmp_path, **options))
        return processes[-1]

    yield make
    for process in processes:
        process.close()


def refuses(url: str) -> bool:
    try:
        httpx.get(url + "/healthz")
    except httpx.TransportError:
        return True
    return False


def stream_lines(url: str, on_first: Callable[[], None]) -> list[str]:
    lines = []
    request = body(stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=30) as r:
        for line in r.iter_lines():
            if line:
                if not lines:
                    on_first()
                lines.append(line)
    return lines


def test_sigterm_lets_a_stream_finish_and_refuses_new_requests(
    spawn: Callable[..., Process],
) -> None:
    server = spawn(drain_s=20, length=100, delay_s=0.02)
    url = server.url()

    def stop() -> None:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in "".join(server.log))
        until(lambda: refuses(url))

    lines = stream_lines(url, stop)
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(x[6:])["choices"][0]["delta"]["content"] for x in lines[:-1]]
    assert "".join(texts) == "x" * 100
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def test_sigterm_ends_a_long_stream_after_the_grace_period(
    spawn: Callable[..., Process],
) -> None:
    server = spawn(drain_s=0.3, length=3000, delay_s=0.02)
    url = server.url()
    lines = stream_lines(url, lambda: server.process.send_signal(signal.SIGTERM))
    assert len(lines) < 2900, "it was written to the end"
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "overloaded" and "shutting down" in error["message"]
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def num_tasks(server: Process) -> int:
    found = re.search(r"http_tasks (\d+)", httpx.get(server.url() + "/metrics", timeout=60).text)
    assert found is not None
    return int(found[1])


def test_sigterm_does_not_wait_for_requests_that_are_not_whole(
    spawn: Callable[..., Process],
) -> None:
    server = spawn(drain_s=300, length=10, delay_s=0)
    address = ("127.0.0.1", int(server.url().rsplit(":", 1)[1]))
    with contextlib.ExitStack() as stack:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        sent = (b"", head, head + b"content-length: 500\r\n\r\n{")
        parts, at_rest = [], num_tasks(server)
        for content in sent:
            parts.append(stack.enter_context(socket.create_connection(address, timeout=60)))
            parts[-1].sendall(content)
        until(lambda: num_tasks(server) > at_rest)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        first, second, third = (part.recv(65536) for part in parts)
    assert not first and not second and third.startswith(b"HTTP/1.1 503")
    assert b"shutting down" in third
    assert "Traceback" not in "".join(server.log)


def test_a_second_signal_does_not_wait(spawn: Callable[..., Process]) -> None:
    server = spawn(drain_s=600, length=3000, delay_s=0.02)
    url = server.url()

    def stop_twice() -> None:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in "".join(server.log))
        server.process.send_signal(signal.SIGTERM)

    lines = stream_lines(url, stop_twice)
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "overloaded"
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def test_sigint_when_idle_ends_at_once(spawn: Callable[..., Process]) -> None:
    server = spawn(drain_s=20, length=5, delay_s=0.0)
    url = server.url()
    assert httpx.get(url + "/readyz").status_code == 200
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def test_a_failed_load_ends_the_server_with_one_message(spawn: Callable[..., Process]) -> None:
    server = spawn(drain_s=20, length=5, delay_s=0.2, broken="broken")
    assert server.wait() == 2
    assert server.log[-1] == "Error: shard 2 is truncated\n"
    assert "Traceback" not in "".join(server.log)


# The openai SDK


@pytest.fixture
def sdk(make_live: Callable[..., Live]) -> Iterator[tuple[openai.OpenAI, Live]]:
    live = make_live()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client, live


def test_the_openai_sdk_chats(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say("Let me see.</think>It is 4.")
    messages: Any = [{"role": "user", "content": "2+2?"}]
    assert [m.id for m in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    answer = client.chat.completions.create(model="toy", messages=messages, temperature=0)
    message = answer.choices[0].message
    assert message.content == "It is 4."
    assert message.model_dump()["reasoning_content"] == "Let me see."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 11
    assert answer.system_fingerprint == "fp_toy"


def test_the_openai_sdk_streams(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say("Hm.</think>It is 4.")
    stream = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "2+2?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    content, reasoning, usage, num_logprobs = "", "", None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += choice.delta.model_dump().get("reasoning_content") or ""
            num_logprobs += len((choice.logprobs and choice.logprobs.content) or ())
    assert (reasoning, content) == ("Hm.", "It is 4.")
    assert usage is not None and usage.completion_tokens == 3 + 1 + 8 + 1
    assert num_logprobs == 1 + 8


def test_the_openai_sdk_calls_tools_and_completes(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    live.toy.say(
        '</think><｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="a" string="false">[1]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages: Any = [{"role": "user", "content": "go"}]
    answer = client.chat.completions.create(
        model="toy", messages=messages, tools=tools, temperature=0
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": [1]})
    live.toy.say(" world")
    completion = client.completions.create(model="toy", prompt="Hello", temperature=0)
    assert completion.choices[0].text == " world"


def test_the_openai_sdk_sees_our_errors(sdk: tuple[openai.OpenAI, Live]) -> None:
    client, live = sdk
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=messages, temperature=9)
    assert bad.value.param == "temperature"
    live.toy.say("abcdef")

    def fault(sequences: Any) -> None:
        if sequences[0].num_tokens > sequences[0].num_prompt + 2:
            raise RuntimeError

    live.toy.runner.step_fault = fault
    stream = client.chat.completions.create(
        model="toy", messages=messages, stream=True, temperature=0
    )
    with pytest.raises(openai.APIError, match="the model failed"):
        list(stream)
