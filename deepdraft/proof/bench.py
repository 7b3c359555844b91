"""`deepdraft bench`: measurements with the machine, the versions and the commit beside them.

Owns: plain decoding through engine parts, `startup` (a real server process), `costs`, and how the
others (`speed` through servers, `drafted`, `accept`, `lossless`) are called and recorded.
Knows nothing of: acceptance thresholds; tests never assert on times.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepdraft import __version__
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.engine.sampler import Row, Sampler
from deepdraft.errors import ConfigError
from deepdraft.proof.served import served
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import SamplingParams

SMALL_OPS = 20_000
BENCHES = ("speed", "startup", "costs", "drafted", "accept", "lossless", "load")


def machine() -> dict[str, Any]:
    """Where a number was measured."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    record: dict[str, Any] = {
        "cpu": name,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "deepdraft": __version__,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
    return record


def commit() -> str | None:
    """The source's commit, with + when the tree has changes; None outside a checkout.
    DEEPDRAFT_COMMIT names that of a copy."""
    if named := os.environ.get("DEEPDRAFT_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True
        )
    except OSError:
        return None
    if name.returncode:
        return None
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def provenance() -> dict[str, Any]:
    """What stands beside every recorded figure."""
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}


def small_op_us() -> float:
    """Microseconds of one small tensor operation: how busy the machine is, in the same run."""
    x = torch.ones(2, 192)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(SMALL_OPS):
            x = x * 1.0
        best = min(best, time.perf_counter() - start)
    return best / SMALL_OPS * 1e6


class _CountCalls(TorchDispatchMode):
    """Counts operator calls, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def speed(
    model: str | Path,
    *,
    context: int = 600,
    tokens: int = 200,
    runs: int = 5,
    numerics: str = "exact",
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Plain decoding after a prompt of `context` tokens: tokens per second of each run, operator
    calls of one token, prefill time. The text starts from the model's own bytes of English."""
    checkpoint = Checkpoint.open(model)
    tokenizer = Tokenizer.load(model)
    runner = Runner.from_checkpoint(checkpoint, tokenizer, numerics=numerics, num_sequences=1)
    if context + tokens + 2 > runner.max_tokens:
        raise ConfigError(
            f"{context} + {tokens} tokens do not fit the model's {runner.max_tokens}; ask for less"
        )
    sampler = Sampler(runner.vocab_size)
    params = SamplingParams(temperature=temperature, seed=1)
    seed_text = "A small model reads this text and goes on with it, word after word. "
    prompt = [checkpoint.args.bos_token_id]
    while len(prompt) < context:
        prompt += tokenizer.encode_text(seed_text)
    prompt = prompt[:context]
    rates, prefills = [], []
    calls = 0
    noise_before = small_op_us()
    for _ in range(runs):
        sequence = runner.open_sequence()
        start = time.perf_counter()
        logits = runner.prefill(sequence, prompt, final=True)
        prefills.append(time.perf_counter() - start)
        assert logits is not None
        row = logits.unsqueeze(0)
        start = time.perf_counter()
        for i in range(tokens):
            choice = sampler.sample(row, [Row(params=params, position=context + i)])[0]
            row = runner.step([(sequence, [choice.token_id])])
        rates.append(tokens / (time.perf_counter() - start))
        with _CountCalls() as counter:
            row = runner.step([(sequence, [prompt[-1]])])
            sampler.sample(row, [Row(params=params, position=context + tokens)])
        calls = counter.calls
        runner.close_sequence(sequence)
    return {
        "what": "plain decoding, one sequence",
        "numerics": numerics,
        "context_tokens": context,
        "tokens_per_run": tokens,
        "temperature": temperature,
        "tokens_per_s": [round(r, 1) for r in rates],
        "best_tokens_per_s": round(max(rates), 1),
        "median_tokens_per_s": round(statistics.median(rates), 1),
        "best_ms_per_token": round(1000 / max(rates), 2),
        "operator_calls_per_token": calls,
        "prefill_s_best": round(min(prefills), 3),
        "small_op_us_before": round(noise_before, 2),
        "small_op_us_after": round(small_op_us(), 2),
    }


def _resident_bytes(pid: int) -> int | None:
    status = Path(f"/proc/{pid}/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return None


def startup(model: str | Path | None = None, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """A server process from start to /readyz 200, and its peak resident memory then and after an
    answer."""
    with served(model, timeout_s=timeout_s) as server:
        memory_ready = _resident_bytes(server.pid)
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            usage = json.loads(answer.read())["usage"]
        return {
            "what": "server start",
            "ready_s": round(server.ready_s, 2),
            "peak_resident_mb_ready": memory_ready and round(memory_ready / 1e6),
            "peak_resident_mb_after_answer": (m := _resident_bytes(server.pid)) and round(m / 1e6),
            "first_answer_s": round(time.perf_counter() - begun, 2),
            "first_answer_tokens": usage["completion_tokens"],
        }


def costs(model: str | Path, *, numerics: str = "exact") -> dict[str, Any]:
    """What steps and drafts cost here, by rows and sequences: a file for --cost-table."""
    from deepdraft.engine.measure import measure_costs

    checkpoint = Checkpoint.open(model)
    runner = Runner.from_checkpoint(
        checkpoint, Tokenizer.load(model), numerics=numerics, drafter=True, num_sequences=16
    )
    if not runner.block_size:
        raise ConfigError("this model has no drafter; there is nothing to choose by cost")
    table = measure_costs(runner, repeats=8)
    return {"what": "costs of steps and drafts", "numerics": numerics, **table.to_dict()}


_SERVED_OPTIONS = ("suite", "urls", "remote_only", "prefill", "concurrency", "html")


def _speed(model: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    """Plain decoding and the known script; with an option of the suite, servers alone."""
    from deepdraft.proof.bench_speed import Plan, own_and_others

    wide = any(options[name] for name in _SERVED_OPTIONS)
    most = {} if options["tokens"] is None else {"tokens": options["tokens"]}
    plan = Plan.read(
        runs=options["runs"],
        temperature=options["temperature"],
        suite=options["suite"] if wide else "none",
        prefill=options["prefill"] if wide else "none",
        concurrency=options["concurrency"] if wide else "none",
        **most,
    )
    plain = {}
    if not wide:
        keys = ("context", "tokens", "runs", "numerics")
        plain = speed(model, **{k: options[k] for k in keys if options[k] is not None})
    answers = own_and_others(
        None if options["remote_only"] else model,
        options["urls"],
        plan,
        ("--numerics", options["numerics"], "--served-model-name", options["model_name"]),
    )
    return answers if wide else {**answers, **plain}


def _measure(what: str, model: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    numerics, prompts = options["numerics"], options["prompts"]
    shared = {"prompts": prompts, "num_prompts": options["num_prompts"], "numerics": numerics}
    if what == "speed":
        return _speed(model, options)
    if what == "startup":
        return startup(model)
    if what == "load":
        from deepdraft.proof import bench_load

        return bench_load.main(Path(model), runs=options["runs"])
    if what == "costs":
        return costs(model, numerics=numerics)
    if options["tokens"] is not None:
        shared["tokens"] = options["tokens"]
    if what == "accept":
        from deepdraft.proof.bench_accept import accept

        return accept(model, **shared, quick=options["quick"], streams=options["streams"])
    if what == "lossless":
        from deepdraft.proof.bench_lossless import lossless

        return lossless(model, **shared)
    if what == "drafted":
        from deepdraft.proof.bench_drafted import drafted

        return drafted(model, **shared, runs=options["runs"], streams=options["streams"])
    raise ConfigError(f"bench knows {', '.join(BENCHES)}, got {what!r}")


def main(
    what: str,
    model: str | Path,
    *,
    context: int = 600,
    tokens: int | None = None,
    runs: int = 5,
    numerics: str = "exact",
    prompts: str | None = None,
    num_prompts: int | None = None,
    quick: bool = False,
    streams: int = 1,
    as_json: bool = False,
    out: str | None = None,
    svg: str | None = None,
    html: str | None = None,
    **speed_options: Any,
) -> int:
    """Run one measurement, print it, and write it to `out` (JSON) when given.

    `svg`, `html`: where the plot of `accept` and the report of `speed` go. 1 where `lossless`
    found a mismatch or a server of `speed` failed to answer.
    """
    if svg is not None and what != "accept":
        raise ConfigError("only bench accept has a plot")
    if html is not None and what != "speed":
        raise ConfigError("only bench speed has a report")
    for file in (svg, html, out):
        if file is not None:
            _check_writable(Path(file))
    torch.set_num_threads(1)
    begun = provenance()
    options = {
        "context": context,
        "tokens": tokens,
        "runs": runs,
        "numerics": numerics,
        "prompts": prompts,
        "num_prompts": num_prompts,
        "quick": quick,
        "streams": streams,
        "html": html,
        **speed_options,
    }
    result = _measure(what, model, options)
    if svg is not None:
        from deepdraft.proof.plot_accept import plot

        Path(svg).write_text(plot(result))
    record = {**result, **begun}
    text = json.dumps(record, indent=2)
    if out:
        Path(out).write_text(text + "\n")
    if html is not None:
        from deepdraft.proof.report import html_report, write_page

        write_page(html, html_report(record))
    if as_json:
        print(text)
    else:
        for key, value in record.items():
            print(f"{key}: {value}")
    return 1 if result.get("mismatches") or result.get("failures") else 0


def _check_writable(path: Path) -> None:
    """Raises ConfigError where `path` cannot be written: known before hours are measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: it is a folder, or not ours to write")
