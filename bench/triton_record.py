"""Writes bench/results/g-triton.json: Triton in front of our engine on a tiny checkpoint.

100 prompts, 16 at a time, through Triton and direct; then `kill -9` of the engine in mid-stream,
five times: how long until the client hears of it, and until the model is ready again.

    deepdraft env create triton && python bench/triton_record.py
"""

import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepdraft.adapters.supervisor import fetch
from deepdraft.adapters.triton_export import Export, write_repository
from deepdraft.adapters.triton_up import Running, running
from deepdraft.proof.bench import provenance
from deepdraft.proof.serve_client import Ask, Target
from deepdraft.proof.tiny_write import write_tiny

OUT = Path(__file__).parent / "results" / "g-triton.json"
ROUNDS = 5


def equal(server: Running) -> dict[str, Any]:
    """Whether texts through Triton are those of the engine."""
    asks = [Ask((f"prompt {i}: {'word ' * (i % 7)}",), 16) for i in range(100)]
    direct = Target("direct", server.engine_url, api="completions")
    through = Target("triton", f"triton+{server.http_url}/tiny", api="completions")
    with ThreadPoolExecutor(16) as pool:
        wanted = list(pool.map(direct.ask, asks))
        got = list(pool.map(through.ask, asks))
    return {
        "prompts": len(asks),
        "at_a_time": 16,
        "different": sum(a.said != b.said for a, b in zip(wanted, got, strict=True)),
        "faults": sum(a.fault is not None for a in wanted + got),
    }


def killed(server: Running) -> dict[str, Any]:
    """One kill -9 of the engine while it streams."""
    target = Target("triton", f"triton+{server.http_url}/tiny", api="completions", ignore_eos=True)
    assert server.engine is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(target.ask, Ask(("Hi",), 380))
        while not json.loads(fetch(f"{server.engine_url}/healthz", timeout_s=5)[1])["engine"][
            "running"
        ]:
            pass
        time.sleep(0.05)
        starts, begin = server.engine.health.starts, time.monotonic()
        for pid in server.engine.pids():
            os.kill(pid, signal.SIGKILL)
        answer = asked.result()
        error_s = time.monotonic() - begin
    while server.engine.health.starts == starts:
        time.sleep(0.01)
    server.wait_ready(300)
    return {
        "fault": answer.fault,
        "message": answer.message,
        "pieces_before": answer.chunks,
        "error_s": round(error_s, 3),
        "ready_again_s": round(time.monotonic() - begin, 2),
    }


def main() -> None:
    """Runs and writes."""
    record: dict[str, Any] = {"what": "Triton in front of our engine (tiny llama)", **provenance()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny(Path(folder) / "tiny", "llama")
        export = Export(name="tiny", checkpoint=str(checkpoint), serve_options=("--kv-memory", "0"))
        out = write_repository(Path(folder) / "repository", export)
        begin = time.monotonic()
        with running(out) as server:
            assert server.engine is not None
            record["triton_live_s"] = round(time.monotonic() - begin, 2)
            server.wait_ready(300)
            record["model_ready_s"] = round(time.monotonic() - begin, 2)
            record["equal"] = equal(server)
            record["kills"] = [killed(server) for _ in range(ROUNDS)]
            pids = server.triton.pids() + server.engine.pids()
            begin = time.monotonic()
        record["down_s"] = round(time.monotonic() - begin, 2)
    record["processes_left"] = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    left = Path("/dev/shm").glob("triton_python_backend_shm_region_*")
    record["shared_memory_left"] = len(list(left))
    OUT.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
