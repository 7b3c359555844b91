"""Lookups in a real Redis on loopback at 200 concurrent requests:

python bench/kv_directory.py [--out bench/results/d-directory.json]
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.kv.directory import DirectorySettings, RedisDirectory, session_key
from deepdraft.proof.bench import provenance

CONCURRENT, ROUNDS, KEYS = 200, 50, 1000


async def measure(url: str) -> dict[str, object]:
    """Latencies of lookups, all 200 at a time, and of one at a time."""
    settings = DirectorySettings(timeout_s=5.0)
    directory = RedisDirectory.connect(url, "bench", settings)
    keys = [session_key("t", f"s{i}") for i in range(KEYS)]
    for key in keys:
        seen = await directory.lookup(key)
        assert seen is not None
        await directory.claim(key, seen, "a@127.0.0.1:1", "fp")
    times: list[float] = []

    async def look(i: int) -> None:
        begin = time.perf_counter()
        assert await directory.lookup(keys[i % KEYS]) is not None
        times.append(time.perf_counter() - begin)

    async def many(start: int) -> None:
        for i in range(ROUNDS):
            await asyncio.sleep(random.uniform(0.0, 0.4))  # turns of 200 conversations
            await look(start + i * CONCURRENT)

    for i in range(200):
        await look(i)
    alone = sorted(times[100:])
    times.clear()
    begin = time.perf_counter()
    await asyncio.gather(*(look(i) for i in range(CONCURRENT)))
    burst, burst_s = sorted(times), time.perf_counter() - begin
    times.clear()
    await asyncio.gather(*(many(i) for i in range(CONCURRENT)))
    spread = sorted(times)
    await directory.close()

    def at(values: list[float], share: float) -> float:
        return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 3)

    return {
        "one_at_a_time_ms": {"p50": at(alone, 0.5), "p99": at(alone, 0.99)},
        "200_clients_ms": {"p50": at(spread, 0.5), "p99": at(spread, 0.99), "lookups": len(spread)},
        "200_at_the_same_moment_ms": {"p50": at(burst, 0.5), "p99": at(burst, 0.99)},
        "burst_lookups_per_s": round(CONCURRENT / burst_s),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--dir", directory],
            stdout=subprocess.DEVNULL,
        )
        try:
            time.sleep(1.0)
            result = asyncio.run(measure(f"redis://127.0.0.1:{port}/0"))
        finally:
            server.kill()
            server.wait()
    head = {
        "what": "directory lookups in a real Redis over TCP on loopback, one asyncio client",
        **provenance(),
    }
    text = json.dumps(head | result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
