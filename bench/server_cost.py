"""Processor time of the server per streamed token, above a stub of the engine without HTTP.

    python bench/server_cost.py [--seconds 20] [--out bench/results/e-server-cost.json]

The stub gives every open request one token each 20 ms (50 tok/s). It runs in a process of its
own: with sinks that do nothing (the base), and behind the server, for 16 and for 64 streams of
clients in another process. Counted is the processor time of the whole server process per token,
less the base. About 4 x SECONDS.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from deepdraft.config import Config, ServerConfig
from deepdraft.engine.events import AsyncEvents
from deepdraft.proof.bench import commit, machine
from deepdraft.server.run import Server
from deepdraft.server.sampling import ModelView
from deepdraft.server.service import Service, bundled_checkpoint
from deepdraft.telemetry import configure_logging
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import GenerateRequest, TokenEvent

TOKENS_PER_S = 50.0
TEXT = "The quick brown fox jumps over the lazy dog, again and again, until it is tired of it. "


class StubEngine:
    """Tokens at a steady rate for every request; no model."""

    failure = None

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids
        self._lock = threading.Lock()
        self._open: dict[str, list[Any]] = {}
        self.num_tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest], sinks: Sequence[Any]) -> None:
        with self._lock:
            for request, sink in zip(requests, sinks, strict=True):
                self._open[request.request_id] = [request, sink, 0]

    def stream(self, requests: Sequence[GenerateRequest]) -> AsyncEvents:
        events = AsyncEvents(self, [r.request_id for r in requests])
        self.submit(requests, [events.put] * len(requests))
        return events

    def cancel(self, *request_ids: str) -> None:
        with self._lock:
            for request_id in request_ids:
                self._open.pop(request_id, None)

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due += 1 / TOKENS_PER_S
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._lock:
                entries = list(self._open.items())
            wakes = set()
            for request_id, entry in entries:
                request, sink, n = entry
                entry[2] = n + 1
                last = n + 1 >= request.max_new_tokens
                wake = sink(
                    TokenEvent(
                        request_id=request_id,
                        token_ids=(self._ids[n % len(self._ids)],),
                        finish_reason="length" if last else None,
                    )
                )
                wakes.add(wake)
                self.num_tokens += 1
                if last:
                    self.cancel(request_id)
            for wake in wakes - {None}:
                wake()

    def stats(self) -> dict[str, int]:
        return {}

    def begin_drain(self) -> None: ...
    def cancel_all(self) -> None: ...
    def close(self) -> None: ...


class StubService(Service):
    """A service whose engine is the stub."""

    def __init__(self, stub: StubEngine, view: ModelView) -> None:
        super().__init__(lambda: None, Config(server=ServerConfig(port=0)))  # type: ignore[arg-type, return-value]
        self._engine: Any = stub
        self._view = view
        self.state = "ready"

    def start(self) -> None: ...


def make_view() -> ModelView:
    tokenizer = Tokenizer.load(bundled_checkpoint())
    return ModelView(
        names=("demo",),
        tokenizer=tokenizer,
        family="v4.1",
        vocab_size=4096,
        max_tokens=1 << 20,
        eos_token_id=1,
        bos_token_id=0,
        fingerprint="fp_stub",
        created=0,
    )


def base_process(pipe: Any, streams: int, seconds: float) -> None:
    view = make_view()
    stub = StubEngine(view.tokenizer.encode_text(TEXT))
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=(0,), max_new_tokens=1 << 30)
        for i in range(streams)
    ]
    stub.submit(requests, [lambda event: None] * streams)
    pipe.send(measure(stub, seconds))


def measure(stub: StubEngine, seconds: float) -> tuple[float, int]:
    """Processor seconds and tokens of a while, after a moment to settle."""
    time.sleep(1.0)
    gc.collect()
    gc.freeze()
    tokens, begin = stub.num_tokens, time.process_time()
    time.sleep(seconds)
    return time.process_time() - begin, stub.num_tokens - tokens


def server_process(pipe: Any, seconds: float) -> None:
    configure_logging("warning")
    view = make_view()
    stub = StubEngine(view.tokenizer.encode_text(TEXT))
    server = Server(StubService(stub, view))

    def control() -> None:
        while not server.started:
            time.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        pipe.recv()
        pipe.send(measure(stub, seconds))
        pipe.recv()
        server.should_exit = True

    threading.Thread(target=control, daemon=True).start()
    uvloop.run(server.serve())


async def read_streams(port: int, streams: int, ready: Any, stop: asyncio.Event) -> int:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "disabled"},
        "stream": True,
        "max_tokens": 1_000_000,
    }
    content = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    num_bytes = 0

    async def one() -> None:
        nonlocal num_bytes
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + f"content-length: {len(content)}\r\n\r\n".encode() + content)
        first = await reader.read(100)
        assert first.startswith(b"HTTP/1.1 200"), first
        while part := await reader.read(1 << 16):
            num_bytes += len(part)

    tasks = [asyncio.ensure_future(one()) for _ in range(streams)]
    await asyncio.sleep(1.0)
    ready()
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_bytes


def served(streams: int, seconds: float) -> tuple[float, int]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=server_process, args=(theirs, seconds)
    )
    process.start()
    port = ours.recv()

    async def run() -> Any:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        result: list[Any] = []

        def watch() -> None:
            result.append(ours.recv())
            loop.call_soon_threadsafe(stop.set)

        def ready() -> None:
            ours.send("go")
            threading.Thread(target=watch, daemon=True).start()

        await read_streams(port, streams, ready, stop)
        return result[0]

    found = uvloop.run(run())
    ours.send("end")
    process.join(20)
    return found


def base(streams: int, seconds: float) -> tuple[float, int]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=base_process, args=(theirs, streams, seconds)
    )
    process.start()
    found = ours.recv()
    process.join(20)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "tokens_per_s": TOKENS_PER_S,
        "limits_us": {"16": 60, "64": 100},
        "streams": {},
    }
    for streams in options.streams:
        base_s, base_tokens = base(streams, options.seconds)
        with_s, with_tokens = served(streams, options.seconds)
        row = {
            "base_us_per_token": 1e6 * base_s / base_tokens,
            "served_us_per_token": 1e6 * with_s / with_tokens,
            "tokens": with_tokens,
            "tokens_wanted": round(streams * TOKENS_PER_S * options.seconds),
        }
        row["server_us_per_token"] = row["served_us_per_token"] - row["base_us_per_token"]
        report["streams"][str(streams)] = {k: round(v, 2) for k, v in row.items()}
        print(streams, report["streams"][str(streams)], flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
