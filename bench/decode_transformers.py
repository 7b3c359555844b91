"""Decoding on a CPU, ours against transformers' generate: bench/results/f-decode.json.

    python bench/decode_transformers.py --reference-python FILE [--kinds v2 v3] [--real-latents]

The same checkpoint, token ids, dtype (float32) and greedy choice; batch 1, cache on, one thread
each, end of sentence off. Ours is the whole engine loop (queue, scheduler, sampler, events);
theirs is `generate` in inference mode with the fastest of their attention and expert
implementations, which a trial finds for each family. Runs alternate; times are of the tokens after
the first, medians. Both must give the same tokens, or nothing is recorded: on a tie of index scores
(V3.2, random weights) two right engines choose differently, so other texts are tried then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, TOKENS, RUNS, TEXTS = 128, 64, 7, 12
KINDS = ("llama", "v2", "v2-lite", "v3", "v32", "v4")


# ---- transformers, in a process and an environment of its own -----------------------------------


def child(directory: str) -> None:
    """Answers lines of JSON {attention, experts, ids} with {ids, seconds} or {error}."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    models: dict[tuple[str, str], Any] = {}

    class Clock:
        """Notes when tokens come, and what the process had used; the first call is the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.used: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            self.used.append(time.process_time())

        def end(self) -> None:
            pass

    def load(attention: str, experts: str) -> Any:
        more = {} if experts == "none" else {"experts_implementation": experts}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            **more,
        )
        return model.eval()

    for line in sys.stdin:
        asked = json.loads(line)
        key = (asked["attention"], asked["experts"])
        try:
            if key not in models:
                models[key] = load(*key)
            clock, ids = Clock(), torch.tensor([asked["ids"]])
            with torch.inference_mode():
                out = models[key].generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    do_sample=False,
                    use_cache=True,
                    eos_token_id=None,
                    pad_token_id=0,
                    streamer=clock,
                )
            answer = {
                "ids": out[0, ids.shape[1] :].tolist(),
                "seconds": clock.times[-1] - clock.times[1],
                "processor": clock.used[-1] - clock.used[1],
                "first": clock.times[1] - clock.times[0],
            }
        except (ValueError, RuntimeError, ImportError, NotImplementedError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(answer), flush=True)


class Theirs:
    """The other process."""

    def __init__(self, python: str, directory: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, "--child", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, how: tuple[str, str], ids: list[int]) -> dict[str, Any]:
        """One generation."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        asked = {"attention": how[0], "experts": how[1], "ids": ids}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit("transformers' process ended; does that Python have transformers?")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


# ---- ours --------------------------------------------------------------------------------------


def ours(directory: Path) -> Any:
    """A started engine on the checkpoint."""
    from deepdraft.config import EngineConfig
    from deepdraft.engine.engine import Engine
    from deepdraft.engine.load import load_engine

    options = EngineConfig(
        max_context=PROMPT + TOKENS + 1, max_running=1, state_memory=1 << 30, threads=1, kv_memory=0
    )
    model = load_engine(directory, options)
    engine = Engine(model.runner, max_running=1, speculation=model.speculation)
    engine.start()
    engine.warm_up()
    return engine


def our_run(engine: Any, ids: list[int]) -> dict[str, Any]:
    """One generation through the engine."""
    from deepdraft.types import GenerateRequest, SamplingParams

    times, used, tokens = [], [], []
    start = time.perf_counter()
    request = GenerateRequest(
        request_id="a",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=TOKENS,
        reuse=False,
    )
    for event in engine.generate(request):
        times += [time.perf_counter()] * len(event.token_ids)
        used += [time.process_time()] * len(event.token_ids)
        tokens += event.token_ids
    return {
        "ids": tokens,
        "seconds": times[-1] - times[0],
        "processor": used[-1] - used[0],
        "first": times[0] - start,
    }


def fastest(theirs: Theirs, ids: list[int]) -> tuple[tuple[str, str], dict[str, float]]:
    """Their best implementations, by the better of two runs each, and what all took."""
    seen: dict[tuple[str, str], float] = {}
    for attention in ("sdpa", "eager"):
        for experts in ("eager", "batched_mm", "grouped_mm", "none"):
            runs = [theirs.run((attention, experts), ids) for _ in range(2)]
            if all("seconds" in run for run in runs):
                seen[attention, experts] = min(run["processor"] for run in runs)
    if not seen:
        raise SystemExit(f"transformers cannot run it: {theirs.run(('eager', 'none'), ids)}")
    best = min(seen, key=lambda key: seen[key])
    return best, {"/".join(key): round(1e3 * s / (TOKENS - 1), 3) for key, s in seen.items()}


def text(theirs: Theirs, engine: Any) -> tuple[list[int], int]:
    """A prompt that both go on from with the same tokens, and how many were tried."""
    for number in range(TEXTS):
        step = 37 + 2 * number
        ids = [(i * step + 11) % 500 + 3 for i in range(PROMPT)]
        if our_run(engine, ids)["ids"] == theirs.run(("eager", "eager"), ids).get("ids"):
            return ids, number + 1
    raise SystemExit(f"no equal tokens on {TEXTS} texts: run `deepdraft parity` first")


def measure(kind: str, python: str, real_latents: bool) -> dict[str, Any]:
    """One family."""
    from deepdraft.proof.tiny_write import write_tiny

    with tempfile.TemporaryDirectory() as root:
        directory = write_tiny(Path(root) / "m", kind, real_latents=real_latents)
        theirs, engine = Theirs(python, directory), ours(directory)
        try:
            ids, tried_texts = text(theirs, engine)
            how, tried = fastest(theirs, ids)
            pairs = []
            for _ in range(RUNS):
                pairs.append((our_run(engine, ids), theirs.run(how, ids)))
            same = all(a["ids"] == b["ids"] for a, b in pairs)
        finally:
            theirs.close()
            engine.close()
    middle, used, first = (
        [statistics.median(pair[side][key] for pair in pairs) for side in (0, 1)]
        for key in ("seconds", "processor", "first")
    )
    row = {
        "kind": kind,
        "real_latents": real_latents,
        "equal_tokens": same,
        "texts_tried": tried_texts,
        "ours_ms_per_token": round(1e3 * middle[0] / (TOKENS - 1), 3),
        "theirs_ms_per_token": round(1e3 * middle[1] / (TOKENS - 1), 3),
        "ratio": round(middle[1] / middle[0], 2),
        "processor_ms_per_token": [round(1e3 * u / (TOKENS - 1), 3) for u in used],
        "ratio_of_processor_time": round(used[1] / used[0], 2),
        "ratios_of_pairs": [round(b["seconds"] / a["seconds"], 2) for a, b in pairs],
        "first_token_ms": [round(1e3 * f, 1) for f in first],
        "theirs": "/".join(how),
        "tried_ms_per_token": tried,
    }
    if kind == "v4":
        row["counts"] = False  # their class runs Python loops
    return row


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--reference-python")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--real-latents", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    import torch

    from deepdraft.proof.bench import provenance

    torch.set_num_threads(1)
    rows = []
    for kind in options.kinds:
        for real in (False, True) if options.real_latents else (False,):
            rows.append(measure(kind, options.reference_python, real))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        **provenance(),
        "reference": "transformers 5.24.0, torch of the same version",
        "prompt": PROMPT,
        "tokens": TOKENS,
        "runs": RUNS,
        "rows": rows,
    }
    if options.out and all(row["equal_tokens"] for row in rows):
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
