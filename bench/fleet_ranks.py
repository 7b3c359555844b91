"""A replica over several GPUs, without Ray: a rank of it is killed in the middle of an answer,
another replica takes its place, and the answer goes on.

    python bench/fleet_ranks.py --model DIR --gpus 2 [--out bench/results/i-ranks.json]
    python bench/fleet_ranks.py --model DIR --gpus 0 --tp 2                          on a CPU

The replica is the process that Ray would start (`tests/fleet/replica_main.py`); this script is its
front, and starts the next one as Ray would.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.proof.bench import provenance
from deepdraft.server.fleet_config import load_fleet_file
from deepdraft.server.fleet_flights import Seat
from deepdraft.server.fleet_front import FrontService, tokenizer_of
from deepdraft.server.fleet_link import Links
from deepdraft.server.fleet_router import Router
from deepdraft.types import GenerateRequest, SamplingParams
from tests.fleet.children import ranks_of
from tests.fleet.replica_main import FolderRegistry
from tests.parallel.living import alive

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 170.0
Json = dict[str, Any]


class Figures(dict[str, Any]):
    """What was found so far, said as it comes: the machine may be taken away."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"-- {name}: {json.dumps(value)}", flush=True)


class Replicas:
    """The process that is the replica now, and those before it."""

    def __init__(self, place: Path, settings: str) -> None:
        self.place, self.file = place, place / "fleet.toml"
        self.file.write_text(settings)
        (place / "registry").mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """The next one."""
        label = f"r{len(self.processes) + 1}"
        words = [str(ROOT / "tests/fleet/replica_main.py"), str(self.file), label]
        with (self.place / f"{label}.log").open("wb") as log:
            self.processes[label] = subprocess.Popen(
                [sys.executable, "-W", "ignore", *words, str(self.place / "registry")],
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
                stdin=subprocess.PIPE,
                stderr=log,
                stdout=log,
            )

    def log(self, label: str) -> str:
        """What one said."""
        return (self.place / f"{label}.log").read_text()


def settings_of(options: argparse.Namespace) -> str:
    """The fleet's file."""
    device = 'device = "cuda"\nnumerics = "quant"' if options.gpus else f"tp = {options.tp}"
    return (
        f'model = "{options.model.resolve()}"\n[engine]\n{device}\nschedule = "all"\n[replicas]\n'
        f"gpus = {options.gpus}\nselftest = false\nresume = true\n"
    )


async def until(holds: Any, replicas: Replicas) -> None:
    """Waits for a condition while the replicas live."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            for label, process in replicas.processes.items():
                assert process.poll() is None, replicas.log(label)[-3000:]
            await asyncio.sleep(0.01)


async def answer(service: FrontService, number: int, tokens: int) -> list[int]:
    """Token ids of one answer, at temperature 0."""
    engine, _ = service.ready()
    request = GenerateRequest(
        request_id=f"q{number}",
        prompt_ids=tuple(range(5, 45)),
        max_new_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
    )
    found: list[int] = []
    events = await engine.open([request])
    async for event in events:
        found += event.token_ids
        if event.finish_reason is not None:
            assert event.finish_reason == "length", event
            break
    events.close()
    return found


async def seat_of(router: Router, tokens: int, replicas: Replicas) -> Seat:
    """Where a request is that has more tokens."""

    def found() -> list[Seat]:
        seats = router.ready()
        return [s for s in seats if any(len(f.tokens) > tokens for f in s.flights.values())]

    await until(found, replicas)
    return found()[0]


async def run(options: argparse.Namespace, place: Path) -> Json:
    """What is to be recorded."""
    replicas = Replicas(place, settings_of(options))
    fleet = load_fleet_file(replicas.file)
    router = Router(resume=True, patience_s=PATIENCE_S)
    service = FrontService(router, *tokenizer_of(options.model), fleet.config)
    registry = FolderRegistry(place / "registry")
    links = Links(router, registry, name="f", accepts=service.accepts, look_s=0.05)
    await links.start()
    figures = Figures()
    try:
        begin = time.monotonic()
        for _ in range(1 + options.ahead):
            replicas.start()
        await until(lambda: len(router.ready()) == 1 + options.ahead, replicas)
        figures["ready_s"] = round(time.monotonic() - begin, 1)
        true = await answer(service, 1, options.tokens)
        figures["answers_alike"] = true == await answer(service, 2, options.tokens)
        growing = asyncio.create_task(answer(service, 3, options.tokens))
        seat = await seat_of(router, options.tokens // 4, replicas)
        figures["tokens_before"] = max(len(f.tokens) for f in seat.flights.values())
        first = replicas.processes[seat.label]
        ranks = ranks_of(first.pid)
        begin = time.monotonic()
        os.kill(ranks[-1], signal.SIGKILL)
        figures["exit_code"] = await asyncio.to_thread(first.wait, PATIENCE_S)
        figures["killed_to_replica_ended_s"] = round(time.monotonic() - begin, 2)
        figures["other_ranks"] = len(ranks)
        left = sum(map(alive, ranks))
        said = [line for line in replicas.log(seat.label).splitlines() if "was killed by" in line]
        figures["said"] = said[-1] if said else replicas.log(seat.label)[-500:]
        if not options.ahead:
            replicas.start()
        figures["went_on_to_the_same_end"] = await growing == true
        figures["killed_to_answer_s"] = round(time.monotonic() - begin, 1)
        figures["routed"] = router.counters.snapshot()
        [second] = [p for label, p in replicas.processes.items() if label != seat.label]
        ranks = ranks_of(second.pid)
        assert second.stdin is not None
        second.stdin.close()
        figures["exit_code_when_it_leaves"] = await asyncio.to_thread(second.wait, PATIENCE_S)
        figures["ranks_left"] = left + sum(map(alive, ranks))
        return figures
    finally:
        await links.close()
        for process in replicas.processes.values():
            process.kill()
            process.communicate()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ahead", action="store_true", help="both replicas from the start")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        figures = asyncio.run(run(options, Path(place)))
    what = f"a replica of {options.gpus or options.tp} ranks loses one: bench/fleet_ranks.py"
    text = json.dumps(
        {"what": what, **provenance(), "gpus": options.gpus, "ahead": options.ahead, **figures},
        indent=1,
    )
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    good = figures["answers_alike"] and figures["went_on_to_the_same_end"]
    sys.exit(not good or figures["ranks_left"] > 0 or figures["exit_code"] != 3)


if __name__ == "__main__":
    main()
