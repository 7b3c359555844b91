"""Load on `deepdraft serve` with the bundled model, client and server in processes of their own.

    python bench/server_load.py soak [--minutes 10] [--streams 64]   faults, leaks, solo answers
    python bench/server_load.py throughput [--seconds 7]            16 busy clients, 1, 16 undrafted
    python bench/server_load.py ttft                                first token at idle
    python bench/server_load.py fairness                            one request beside 200 others

Each prints one JSON object; --out FILE writes it too. The exit code is 1 where a limit is missed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from deepdraft.proof.bench import commit, machine

OFF = {"thinking": {"type": "disabled"}}
WORDS = (
    "river stone lamp garden ticket winter engine paper bridge copper window island letter "
    "market basket candle harbour needle orange pocket silver thunder valley wagon yellow"
).split()
KINDS = ("whole", "stream", "cancel", "vanish", "malformed", "oversized", "completion")
WEIGHTS = (25, 30, 15, 5, 10, 5, 10)


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[str, int, Path]]:
    """Address, process id and log of a server that is ready."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "deepdraft.cli.main", "serve", "--port", "0", *flags],
                stderr=stream,
            )
        try:
            end = time.monotonic() + 120
            while "ready after" not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            found = re.search(r"running on (http://[0-9.:]+)", log.read_text())
            assert found is not None
            yield found[1], process.pid, log
        finally:
            process.terminate()
            process.wait(60)


def prompts(num: int) -> list[str]:
    """Questions of different lengths, the same each time."""
    rng = random.Random(1)
    texts = []
    for i in range(num):
        words = " ".join(rng.choices(WORDS, k=rng.choice((3, 8, 20, 60))))
        texts.append(f"({i}) Tell me about: {words}.")
    return texts


def chat(text: str, num: int, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": num,
        **OFF,
        **fields,
    }


async def chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def text_of(chunk: dict[str, Any]) -> str:
    return "".join(c["delta"].get("content") or "" for c in chunk.get("choices", []))


# ---- soak ----------------------------------------------------------------------------------


class Soak:
    """Workers that do one random thing after another, and what came of it."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.texts = prompts(40)
        self.lengths = [random.Random(i).choice((6, 12, 24, 48)) for i in range(40)]
        self.solo: list[str] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stopping = False

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=600)

    def body(self, i: int, **fields: Any) -> dict[str, Any]:
        return chat(self.texts[i], self.lengths[i], **fields)

    async def learn(self) -> None:
        """The answers of an otherwise idle server."""
        async with self.client() as client:
            for i in range(len(self.texts)):
                answer = await client.post("/v1/chat/completions", json=self.body(i))
                self.solo.append(answer.json()["choices"][0]["message"]["content"])

    async def worker(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        async with self.client() as client:
            while not self.stopping:
                kind = rng.choices(KINDS, WEIGHTS)[0]
                try:
                    await getattr(self, kind)(client, rng)
                except Exception as error:
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                self.done[kind] += 1

    def check(self, i: int, text: str, kind: str) -> None:
        if text != self.solo[i]:
            self.wrong.append(f"{kind}: prompt {i} gave {text!r}, alone {self.solo[i]!r}")

    async def whole(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        i = rng.randrange(len(self.texts))
        answer = await client.post("/v1/chat/completions", json=self.body(i))
        answer.raise_for_status()
        self.check(i, answer.json()["choices"][0]["message"]["content"], "whole")

    async def stream(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        i, text = rng.randrange(len(self.texts)), ""
        body = self.body(i, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in chunks(response):
                assert "error" not in chunk, chunk
                text += text_of(chunk)
        self.check(i, text, "stream")

    async def cancel(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        i = rng.randrange(len(self.texts))
        body, left = self.body(i, stream=True), rng.randrange(4)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in chunks(response):
                left -= 1
                if left < 0:
                    break

    async def vanish(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        i = rng.randrange(len(self.texts))
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(
                "/v1/chat/completions", json=self.body(i, max_tokens=400), timeout=rng.random()
            )

    async def malformed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        whole = json.dumps(self.body(0)).encode()
        content = rng.choice(
            [
                whole[: rng.randrange(len(whole))],
                whole.replace(b"user", b"us\xffer"),
                whole.replace(b"max_tokens", b"max_tokenz"),
                b"[" * 5000,
                whole.replace(b'"temperature": 0', b'"temperature": "hot"'),
            ]
        )
        answer = await client.post("/v1/chat/completions", content=content)
        assert answer.status_code == 400, answer.text

    async def oversized(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        text = "word " * rng.choice((20_000, 200_000))
        answer = await client.post("/v1/chat/completions", json=chat(text, 5))
        assert answer.status_code == 400, answer.text

    async def completion(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"prompt": rng.choice(self.texts), "n": 2, "max_tokens": 8, "seed": 3, "stop": "\n"}
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()


def resident_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    # A small cache of conversations is soon full, and memory flat if nothing leaks.
    with server("--max-queue", "512", "--kv-memory", options.kv_memory) as (url, pid, log):
        one = Soak(url, options.seed)
        await one.learn()
        idle_tasks = await gauge(url, "http_tasks")
        workers = [asyncio.ensure_future(one.worker(i)) for i in range(options.streams)]
        memory, seconds = [], options.minutes * 60
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            await asyncio.sleep(min(5.0, seconds / 20))
            memory.append(resident_kb(pid))
        one.stopping = True
        await asyncio.gather(*workers)
        left = {}
        for _ in range(100):
            await asyncio.sleep(0.1)
            names = ("num_requests_running", "num_requests_waiting", "num_requests_preempted")
            left = {name: await gauge(url, name) for name in names}
            left["tasks"] = await gauge(url, "http_tasks") - idle_tasks
            if not any(left.values()):
                break
        text = log.read_text()
    # After the first third everything that is cached is there.
    early = memory[len(memory) // 3 : len(memory) // 3 + max(1, len(memory) // 10)]
    late = memory[-max(1, len(memory) // 10) :]
    growth = statistics.mean(late) / statistics.mean(early) - 1
    wrong = one.wrong + [line for line in text.splitlines() if "Traceback" in line]
    return {
        "minutes": options.minutes,
        "streams": options.streams,
        "requests": dict(one.done),
        "wrong": wrong[:20],
        "num_wrong": len(wrong),
        "left": left,
        "kv_memory": options.kv_memory,
        "memory_mb": [round(kb / 1024, 1) for kb in memory],
        "memory_growth": round(growth, 4),
        "ok": not wrong and not any(left.values()) and growth <= 0.03,
    }


async def gauge(url: str, name: str) -> int:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    found = re.search(rf"^deepdraft_{name} (\d+)", text, re.M)
    assert found is not None, f"the server's metrics have no {name}"
    return int(found[1])


# ---- throughput ----------------------------------------------------------------------------


async def answer(client: httpx.AsyncClient, text: str, num: int) -> int:
    """Reads a streamed answer of `num` tokens; returns how many it has."""
    body = chat(text, num, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in chunks(response):
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return tokens


async def batch_rate(url: str, streams: int, rounds: int, num: int) -> float:
    """Tokens a second of streams that each answer `rounds` prompts, until the last one is done."""
    texts = prompts(48)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(number: int) -> int:
            own = (texts[(number * rounds + k) % len(texts)] for k in range(rounds))
            return sum([await answer(client, text, num) for text in own])

        begin = time.perf_counter()
        total = sum(await asyncio.gather(*(one(i) for i in range(streams))))
        return total / (time.perf_counter() - begin)


async def busy_rate(url: str, streams: int, seconds: float, num: int) -> float:
    """Tokens a second while all of so many clients are busy, each with one answer after another."""
    texts = prompts(48)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(number: int) -> None:
            # 48 prompts, each client from another one on.
            for k in range(10_000):
                await answer(client, texts[(3 * number + 7 * k) % len(texts)], num)

        tasks = [asyncio.ensure_future(one(i)) for i in range(streams)]
        while await gauge(url, "num_requests_running") < streams:
            await asyncio.sleep(0.05)
        before, begin = await gauge(url, "generation_tokens_total"), time.perf_counter()
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        took_s = time.perf_counter() - begin
        tokens = await gauge(url, "generation_tokens_total") - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # a client that failed
    while await gauge(url, "num_requests_running"):
        await asyncio.sleep(0.05)
    return tokens / took_s


async def throughput(options: argparse.Namespace) -> dict[str, Any]:
    num = options.tokens
    busy: dict[str, list[float]] = {}
    batch: dict[str, list[float]] = {}
    flags = ("--kv-memory", "0")
    with server(*flags) as (url, _, _), server(*flags, "--drafts", "0") as (plain_url, _, _):
        cells = (
            ("1", url, 1, 3),
            ("16", url, 16, 1),
            ("16 undrafted", plain_url, 16, 1),
            ("1 undrafted", plain_url, 1, 3),
        )
        await batch_rate(url, 2, 1, 32)
        await batch_rate(plain_url, 2, 1, 32)
        for k in range(options.repeats):
            for name, where, streams, _ in cells[: 3 if k else 4]:
                rate = await busy_rate(where, streams, options.seconds, num)
                busy.setdefault(name, []).append(rate)
                print(k, name, round(rate, 1), file=sys.stderr, flush=True)
        for name, where, streams, rounds in cells[:3]:
            batch.setdefault(name, []).append(await batch_rate(where, streams, rounds, num))
    median = {name: statistics.median(values) for name, values in busy.items()}
    scale, against = median["16"] / median["1"], median["16"] / median["16 undrafted"]
    return {
        "tokens_per_answer": num,
        "window_s": options.seconds,
        "tokens_per_s": {name: [round(v, 1) for v in values] for name, values in busy.items()},
        "16_over_1": round(scale, 3),
        "16_over_16_undrafted": round(against, 3),
        # One answer each, until the slowest is done (of one stream: three, one after another).
        "closed_batch_tokens_per_s": {name: round(v[0], 1) for name, v in batch.items()},
        "ok": scale >= 4.0 and against >= 1.0,
    }


# ---- first token ---------------------------------------------------------------------------


def prefill_ms(num_tokens: int, repeats: int) -> float:
    """One prefill of so many tokens by the model alone, in this process."""
    import torch

    from deepdraft.config import EngineConfig
    from deepdraft.engine.load import load_engine
    from deepdraft.server.service import bundled_checkpoint

    runner: Any = load_engine(
        bundled_checkpoint(), EngineConfig(max_running=1, schedule="all", kv_memory=0)
    ).runner
    times = []
    with torch.inference_mode():
        for i in range(repeats):
            sequence = runner.open_sequence()
            ids = [(7 * k + i) % 3000 + 5 for k in range(num_tokens)]
            begin = time.perf_counter()
            runner.prefill(sequence, ids, final=True)
            times.append(1e3 * (time.perf_counter() - begin))
            runner.close_sequence(sequence)
    return statistics.median(times[3:])


async def ttft(options: argparse.Namespace) -> dict[str, Any]:
    times, rendered = [], 0
    with server() as (url, _, _):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for i in range(options.repeats * 10 + 3):
                text = " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(options.words))
                body = {**chat(text, 4), "stream": True, "stream_options": {"include_usage": True}}
                begin, first = time.perf_counter(), None
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for chunk in chunks(response):
                        if first is None and text_of(chunk):
                            first = 1e3 * (time.perf_counter() - begin)
                        rendered = (chunk.get("usage") or {}).get("prompt_tokens", rendered)
                if first is not None:
                    times.append(first)
    step = prefill_ms(rendered, 20)
    middle = statistics.median(times[3:])
    return {
        "prompt_tokens": rendered,
        "ttft_ms_median": round(middle, 2),
        "ttft_ms_p90": round(statistics.quantiles(times[3:], n=10)[-1], 2),
        "prefill_ms": round(step, 2),
        "limit_ms": round(1.5 * step + 10, 2),
        "ok": middle <= 1.5 * step + 10,
    }


# ---- fairness ------------------------------------------------------------------------------


async def fairness(options: argparse.Namespace) -> dict[str, Any]:
    """A tenant's single request, alone and behind 200 of another tenant; with 4 places, so that
    nearly all of these wait."""
    texts, rows = prompts(200), []
    with server("--max-running", "4") as (url, _, log):

        async def ask(text: str, user: str) -> float:
            begin = time.perf_counter()
            body = chat(text, options.tokens, user_id=user, ignore_eos=True)
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            return time.perf_counter() - begin

        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:
            for k in range(options.repeats):
                alone_s = await ask(f"Alone {k}.", "b")
                crowd = [asyncio.ensure_future(ask(text, "a")) for text in texts]
                await asyncio.sleep(3 * alone_s)
                crowded_s = await ask(f"Crowded {k}.", "b")
                left = sum(not task.done() for task in crowd)
                for task in crowd:
                    task.cancel()
                await asyncio.gather(*crowd, return_exceptions=True)
                rows.append({"alone_s": alone_s, "crowded_s": crowded_s, "others_left": left})
                await asyncio.sleep(1)
        # What a request of the crowd takes once it has a place.
        spans = [
            json.loads(x.split("request_end ", 1)[1])
            for x in log.read_text().splitlines()
            if "request_end " in x
        ]
        run_s = statistics.median(
            (x["request_ms"] - x["queue_ms"]) / 1e3
            for x in spans
            if x["finish_reason"] == "length" and "queue_ms" in x
        )
    worst = max(row["crowded_s"] - row["alone_s"] for row in rows)
    return {
        "rows": [{k: round(v, 3) for k, v in row.items()} for row in rows],
        "request_time_s": round(run_s, 3),
        "worst_delay_s": round(worst, 3),
        "delay_in_request_times": round(worst / run_s, 2),
        "ok": worst <= 2 * run_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("soak", "throughput", "ttft", "fairness"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=7.0, help="of a window of throughput")
    parser.add_argument("--kv-memory", default="16MiB")
    parser.add_argument("--words", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = {"soak": soak, "throughput": throughput, "ttft": ttft, "fairness": fairness}[options.what]
    found = asyncio.run(run(options))
    report = {
        "what": options.what,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        **found,
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
