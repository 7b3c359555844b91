"""A second turn on the same server, on another one, and without a cache, with the bundled model:

    python bench/kv_turns.py [--pairs 7] [--out bench/results/d-turns.json]

Two `deepdraft serve` processes with a real Redis and TLS on loopback, as in docs/kv-sharing.md.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.kv.fleet_files import init_fleet
from deepdraft.proof.bench import provenance

TEXT = "The fox went out on a chilly night and prayed for the moon to give him light. " * 20


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def serve(name: str, redis: int, files: Path, *more: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and its address."""
    port = free_port()
    command = [sys.executable, "-m", "deepdraft.cli.main", "serve", "--port", str(port)]
    command += ["--kv-directory", f"redis://127.0.0.1:{redis}", "--kv-name", name]
    command += ["--kv-files", str(files), "--kv-fetch", "always", "--log-level", "warning", *more]
    return subprocess.Popen(command), f"http://127.0.0.1:{port}"


def wait(url: str) -> None:
    """Until the server is ready."""
    while True:
        try:
            if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)


def ask(url: str, messages: list[dict[str, str]], session: str) -> tuple[float, dict[str, Any]]:
    """Seconds of a turn, and its response."""
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
    body["thinking"] = {"type": "disabled"}
    begin = time.perf_counter()
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"X-Session-ID": session}, timeout=300
    )
    seconds = time.perf_counter() - begin
    assert answer.status_code == 200, answer.text
    return seconds, answer.json()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out")
    options = parser.parse_args()
    redis = free_port()
    processes = []
    times: dict[str, list[float]] = {"same": [], "other": [], "first_turn": []}
    sources: dict[str, list[str | None]] = {"same": [], "other": []}
    different = 0
    with tempfile.TemporaryDirectory() as directory:
        places = init_fleet(Path(directory) / "fleet", ["a", "b"])
        command = ["redis-server", "--port", str(redis), "--save", "", "--dir", directory]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        try:
            urls = []
            for name, place in zip("ab", places, strict=True):
                process, url = serve(name, redis, place)
                processes.append(process)
                urls.append(url)
            for url in urls:
                wait(url)
                ask(url, [{"role": "user", "content": "warm up"}], "warm")
            for i in range(options.pairs):
                answers = {}
                for kind, second in (("same", urls[0]), ("other", urls[1])):
                    # A text of its own for each, or the second kind would find the first's.
                    messages = [{"role": "user", "content": f"{kind} {i}: {TEXT}"}]
                    seconds, first = ask(urls[0], messages, f"{kind}-{i}")
                    times["first_turn"].append(seconds)
                    reply = first["choices"][0]["message"]["content"]
                    messages += [
                        {"role": "assistant", "content": reply},
                        {"role": "user", "content": "And what did he take home?"},
                    ]
                    time.sleep(0.3)
                    seconds, answer = ask(second, messages, f"{kind}-{i}")
                    times[kind].append(seconds)
                    details = answer["usage"]["prompt_tokens_details"]
                    sources[kind].append(details.get("cache_source"))
                    answers[kind] = (messages, answer)
                messages, answer = answers["other"]
                _, again = ask(urls[0], messages, f"check-{i}")
                different += again["choices"] != answer["choices"]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
    ratios = [o / s for o, s in zip(times["other"], times["same"], strict=True)]
    result = {
        "what": "second turn on the server that has the first and on another one, bundled model",
        **provenance(),
        "seconds": {name: [round(s, 3) for s in values] for name, values in times.items()},
        "median_s": {n: round(statistics.median(v), 3) for n, v in times.items()},
        "other_over_same_median_of_pairs": round(statistics.median(ratios), 3),
        "sources": sources,
        "different_answers": different,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
