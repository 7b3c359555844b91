"""Turns of conversations over engines on one GPU that share their caches, against one without a
cache, with the bundled model:

    python bench/kv_serve_gpu.py [--conversations 6] [--turns 4] [--out FILE.json]

Two engines with the KV cache bounce every conversation between them (own TCP, a directory in this
process); each answer must be token for token that of the engine without. Greedy and sampled
requests are decoded ahead of the host, those that want log-probabilities by the host. On a CPU,
--device cpu shows that the script runs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepdraft.config import EngineConfig
from deepdraft.engine.engine import Engine
from deepdraft.engine.load import LoadedModel, load_engine
from deepdraft.engine.reuse import Reuse, open_reuse
from deepdraft.kv.directory import LocalDirectory, session_key
from deepdraft.kv.fleet import Fleet
from deepdraft.proof.bench import provenance
from deepdraft.types import GenerateRequest, SamplingParams, StoredSink

DEMO = Path(__file__).resolve().parents[1] / "deepdraft" / "demo" / "checkpoint"
TEXT = "The fox went out on a chilly night and prayed for the moon to give him light. "
ASK = "And what did he take home, and to whom, and how many of them were there?"
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.0, "logprobs": 1},
)


class Served:
    """One engine over the bundled model."""

    def __init__(self, options: EngineConfig, name: str, directory: LocalDirectory | None) -> None:
        self.model: LoadedModel = load_engine(DEMO, options)
        self.reuse: Reuse | None = open_reuse(self.model, options)
        self.fleet: Fleet | None = None
        if directory is not None:
            assert self.reuse is not None, "the engine has no cache"
            self.fleet = Fleet(self.reuse.cache, lambda: directory, name=name, rule="always")
            self.fleet.start()
            self.reuse.fleet = self.fleet
        self.engine = Engine(
            self.model.runner,
            max_running=options.max_running,
            speculation=self.model.speculation,
            reuse=self.reuse,
        )
        self.engine.start()
        self.engine.warm_up()

    def turn(self, prompt: list[int], kind: dict[str, Any], key: str | None) -> dict[str, Any]:
        """An answer: its tokens, seconds, what came from the cache."""
        begin = time.perf_counter()
        session: StoredSink | None = None
        if key is not None and self.fleet is not None:
            session = self.fleet.prepare(key, prompt, "bench")
        request = GenerateRequest(
            request_id="turn",
            prompt_ids=tuple(prompt),
            max_new_tokens=24,
            sampling=SamplingParams(**kind),
            stop_token_ids=frozenset([self.model.eos_token_id]),
            session=session,
        )
        tokens, first, last = [], None, None
        for last in self.engine.generate(request):
            if last.token_ids and first is None:
                first = time.perf_counter() - begin
            tokens.extend(last.token_ids)
        assert last is not None and last.error is None, last
        if self.reuse is not None:
            self.reuse.cache.flush()
        if self.fleet is not None:
            self.fleet.flush()
        return {"tokens": tokens, "first_s": first, "cached": last.cached}

    def close(self) -> dict[str, int]:
        """Counters, after the books were checked."""
        stats = {} if self.reuse is None else self.reuse.stats()
        if self.reuse is not None:
            self.reuse.cache.check()
            self.reuse.cache.memory.check()
        self.engine.close()
        return stats


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=12, help="sentences of a first prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out")
    parsed = parser.parse_args()
    more: dict[str, Any] = {"device": parsed.device, "numerics": "quant", "schedule": "all"}
    more |= {"max_running": 4, "max_context": 4096}
    directory = LocalDirectory()
    cold = Served(EngineConfig(**more, kv_memory=0), "cold", None)
    warm = [Served(EngineConfig(**more, kv_memory=256 << 20), n, directory) for n in "ab"]
    encode, sources = cold.model.tokenizer.encode_text, Counter[str]()
    times: dict[str, list[float]] = {"cold": [], "host": [], "peer": []}
    different = []
    for number in range(parsed.conversations):
        kind, key = KINDS[number % len(KINDS)], session_key("bench", f"c{number}")
        history = encode(f"{number}: {TEXT * parsed.repeat}")
        for turn in range(parsed.turns):
            wanted = cold.turn(history, kind, None)
            got = warm[(number + turn // 2) % 2].turn(history, kind, key)
            use = got["cached"]
            source = "computed" if use is None else f"{use.source} {use.provenance}"
            sources[source] += 1
            if wanted["tokens"] != got["tokens"]:
                different.append({"conversation": number, "turn": turn, "source": source})
            if turn:
                times["cold"].append(wanted["first_s"])
                if use is not None:
                    times[use.source].append(got["first_s"])
            history = [*history, *wanted["tokens"], *encode(f"{ASK} {turn}")]
    stats = [server.close() for server in (*warm, cold)]
    # What a server leaves on disk starts the next one's requests.
    with tempfile.TemporaryDirectory() as place:
        options = EngineConfig(**more, kv_memory=256 << 20, kv_spill=place)
        prompt = encode(TEXT * parsed.repeat)
        use = None
        for _ in range(2):
            server = Served(options, "disk", None)
            use = server.turn(prompt, KINDS[0], None)["cached"]
            server.close()
        from_disk = None if use is None else use.source
    names = ("kv_errors", "kv_restore_failed", "kv_restore_refused", "kv_store_refused")
    result = {
        "what": "turns bounced between two engines that share caches, against one without",
        **provenance(),
        "device": parsed.device,
        "turns": parsed.conversations * parsed.turns,
        "different_answers": different,
        "sources": dict(sources),
        "after_a_restart": from_disk,
        "first_token_ms": {
            name: round(1e3 * statistics.median(values), 2)
            for name, values in times.items()
            if values
        },
        "faults": {name: sum(s.get(name, 0) for s in stats) for name in names},
        "fetches": {n: stats[0].get(n, 0) + stats[1].get(n, 0) for n in ("kv_fetch_hit",)},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if parsed.out:
        Path(parsed.out).write_text(text + "\n")
    wrong = different or any(result["faults"].values()) or from_disk != "disk"  # type: ignore[union-attr]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
