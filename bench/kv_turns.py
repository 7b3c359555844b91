"""A second turn on the same server and on another one, with the bundled model:

    python bench/kv_turns.py [--pairs 9] [--out bench/results/d-turns.json]

Three `deepdraft serve` processes with a real Redis and TLS on loopback, as in docs/kv-sharing.md.
"""

import argparse
import json
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
from deepdraft.proof.fleet_served import free_port

TEXT = "The fox went out on a chilly night and prayed for the moon to give him light. " * 20


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


def pair(urls: list[str], i: int) -> dict[str, list[Any]]:
    """One conversation twice, on servers that have not seen it: both turns on one server, and the
    turns on two. The work is the same, as the answers are, so only the way of the cache differs.
    """
    out: dict[str, list[Any]] = {"first_turn": [], "sources": [], "answers": []}
    # Who does what changes from pair to pair, and so does the order.
    one, two, three = (urls[(i + k) % 3] for k in range(3))
    ways = [("same", one, one), ("other", two, three)]
    for kind, first, second in ways if i % 2 else reversed(ways):
        messages = [{"role": "user", "content": f"{i}: {TEXT}"}]
        seconds, answer = ask(first, messages, f"{kind}-{i}")
        out["first_turn"].append(seconds)
        reply = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": "And what did he take home?"})
        time.sleep(0.3)
        seconds, answer = ask(second, messages, f"{kind}-{i}")
        out[kind] = [seconds]
        out["sources"].append(answer["usage"]["prompt_tokens_details"].get("cache_source"))
        out["answers"].append((reply, answer["choices"]))
    return out


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out")
    options = parser.parse_args()
    redis = free_port()
    processes = []
    times: dict[str, list[float]] = {"same": [], "other": [], "first_turn": []}
    sources: list[str] = []
    different = 0
    with tempfile.TemporaryDirectory() as directory:
        places = init_fleet(Path(directory) / "fleet", ["a", "b", "c"])
        command = ["redis-server", "--port", str(redis), "--save", "", "--dir", directory]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        try:
            urls = []
            for name, place in zip("abc", places, strict=True):
                process, url = serve(name, redis, place)
                processes.append(process)
                urls.append(url)
            for url in urls:
                wait(url)
            for i in range(-3, options.pairs):  # every server does everything once before
                done = pair(urls, i)
                if i < 0:
                    continue
                for name, values in times.items():
                    values += done[name]
                sources.append("+".join(map(str, sorted(done["sources"]))))
                different += done["answers"][0] != done["answers"][1]
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
        "other_over_same_of_pairs": [round(r, 3) for r in ratios],
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
