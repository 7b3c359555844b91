"""`deepdraft bench speed` through HTTP: the known script, the suite, prompts by length, streams at
a time; one server or two in the same run.

Owns: what is asked in which order, and what is made of the times.
Knows nothing of: how answers are read (`speed_client`), how the report looks (`report`).

Targets take turns, question by question, so that a slow minute of the machine meets them all.
"""

import contextlib
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError, DeepdraftError
from deepdraft.proof.served import served
from deepdraft.proof.speed_client import Sample, Target
from deepdraft.proof.suite import TETRIS, Question, chars_for, document, load_suite

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    runs: int = 3
    tokens: int = 256
    """Of an answer of the suite, at most; the known script has its own limit."""
    tetris_tokens: int = 2048
    temperature: float = 0.0
    classes: tuple[str, ...] | None = None
    """Classes of the suite; None: all; empty: the suite is left out."""
    prefill: tuple[int, ...] = (64, 256, 1024, 3072)
    """Lengths of prompts in tokens, about; usage says what they were."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    """Streams at a time."""
    long_tokens: int = 1500

    @classmethod
    def read(
        cls,
        *,
        suite: str | None = None,
        prefill: str | None = None,
        concurrency: str | None = None,
        **given: Any,
    ) -> "Plan":
        """A plan from texts as the command line has them. Raises ConfigError."""
        if suite is not None and suite != "all":
            given["classes"] = () if suite == "none" else tuple(suite.split(","))
        for name, text in (("prefill", prefill), ("concurrency", concurrency)):
            if text is not None:
                given[name] = _numbers(text, f"--{name}")
        return cls(**given)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(p.isascii() and p.isdigit() and 0 < int(p) <= 10**7 for p in parts):
        raise ConfigError(f"{name} must be numbers apart by commas, or none; got {text!r}")
    return tuple(sorted({int(p) for p in parts}))


def own_and_others(
    model: str | Path | None, urls: Sequence[str], plan: Plan, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures a server started for this (`model` None: none) and those at `urls`, which may be
    written NAME=URL."""

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with contextlib.ExitStack() as stack:
        targets = []
        if model is not None:
            server = stack.enter_context(served(model, options))
            targets.append(Target("deepdraft", server.url))
        for url in urls:
            name, equals, address = url.partition("=")
            if not equals or "/" in name:
                name, address = urllib.parse.urlsplit(url).netloc.rpartition("@")[2], url
            targets.append(Target(name, address))
        names = [target.name for target in targets]
        if len(set(names)) != len(names):
            raise ConfigError(f"two servers have one name ({names}); write NAME=URL")
        return measure(targets, plan, say)


def summary(values: Iterable[float | None], digits: int = 3) -> dict[str, Any] | None:
    """Count, middle and spread of values; None where there are none."""
    kept = sorted(v for v in values if v is not None)
    if not kept:
        return None

    def at(share: float) -> float:
        """Linear between the two nearest values."""
        place = share * (len(kept) - 1)
        low = int(place)
        high = min(low + 1, len(kept) - 1)
        return kept[low] + (kept[high] - kept[low]) * (place - low)

    return {
        "n": len(kept),
        "min": round(kept[0], digits),
        "p10": round(at(0.1), digits),
        "p50": round(at(0.5), digits),
        "p90": round(at(0.9), digits),
        "p99": round(at(0.99), digits),
        "max": round(kept[-1], digits),
        "mean": round(statistics.fmean(kept), digits),
        "stdev": round(statistics.stdev(kept), digits) if len(kept) > 1 else 0.0,
    }


def _summaries(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "answers": len(samples),
        "tokens": sum(s.tokens for s in samples),
        "tokens_per_s": summary(s.tokens_per_s for s in samples),
        "first_token_ms": summary(1e3 * s.first_s for s in samples),
        "gap_ms": summary(gap for s in samples for gap in s.gaps_ms),
        "ms_per_step": summary(s.ms_per_step for s in samples),
        "accepted_length": summary(s.accepted_length for s in samples),
        "counted_by_server": all(s.counted for s in samples),
    }


def measure(targets: Sequence[Target], plan: Plan, say: Say = lambda text: None) -> dict[str, Any]:
    """All figures, by target. Raises DeepdraftError where a target gives no answer."""
    if not targets:
        raise ConfigError("there is no server to measure")
    begin = time.perf_counter()
    for target in targets:
        say(f"warming up {target.name}")
        target.ask("Hello!", max_tokens=8)
    result: dict[str, Any] = {
        "what": "speed of served answers",
        "format": 1,
        "settings": {
            "runs": plan.runs,
            "tokens": plan.tokens,
            "temperature": plan.temperature,
            "long_tokens": plan.long_tokens,
            "clock": "the client's, on the machine below",
        },
        "tetris": _tetris(targets, plan, say),
    }
    if plan.classes is None or plan.classes:
        result["classes"] = _suite(targets, plan, say)
    if plan.prefill:
        result["prefill"] = _prefill(targets, plan, say)
    if plan.concurrency:
        result["concurrency"] = _concurrency(targets, plan, say)
    result["targets"] = [target.describe() for target in targets]
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def _ask(target: Target, question: Question, tokens: int, plan: Plan, seed: int) -> Sample:
    return target.ask(
        question.text,
        thinking=question.thinking,
        max_tokens=tokens,
        temperature=plan.temperature,
        seed=seed,
    )


def _in_turn(
    targets: Sequence[Target], questions: Sequence[Question], tokens: int, plan: Plan
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for run in range(plan.runs):
        for i, question in enumerate(questions):
            # Who goes first changes, too: the second may find the machine warmer.
            order = list(targets) if (run + i) % 2 == 0 else list(reversed(targets))
            for target in order:
                samples[target.name].append(_ask(target, question, tokens, plan, run + 1))
    return samples


def _tetris(targets: Sequence[Target], plan: Plan, say: Say) -> dict[str, Any]:
    say("the known script: Tetris, thinking off")
    question = Question("tetris", TETRIS)
    samples = _in_turn(targets, [question], plan.tetris_tokens, plan)
    return {
        name: {
            **_summaries(own),
            "tokens_per_s_of_each_run": [round(s.tokens_per_s, 1) for s in own],
            "finish": sorted({s.finish or "none" for s in own}),
        }
        for name, own in samples.items()
    }


def _suite(targets: Sequence[Target], plan: Plan, say: Say) -> list[dict[str, Any]]:
    long_tokens = plan.long_tokens
    contexts = [t.max_tokens for t in targets if isinstance(t.max_tokens, int)]
    if contexts:
        # Half of what is left beside the answer, so that a poor guess of its length still fits.
        long_tokens = max(64, min(long_tokens, (min(contexts) - plan.tokens) // 2))
    rows = []
    for name, questions in load_suite(plan.classes, long_tokens=long_tokens).items():
        say(f"suite: {name}")
        samples = _in_turn(targets, questions, plan.tokens, plan)
        rows.append(
            {
                "class": name,
                "questions": len(questions),
                "by_target": {target: _summaries(own) for target, own in samples.items()},
            }
        )
    return rows


def _prefill(targets: Sequence[Target], plan: Plan, say: Say) -> list[dict[str, Any]]:
    """Time to the first token of prompts that no cache knows."""
    rows = []
    seed = int(time.time()) % 10**6 * 1000
    chars: dict[str, float] = {}
    for target in targets:
        text = document(400, seed)
        chars[target.name] = len(text) / (target.ask(text, max_tokens=1).prompt_tokens or 100)
    for length in plan.prefill:
        say(f"prompts of {length} tokens")
        row: dict[str, Any] = {"wanted_tokens": length, "by_target": {}}
        for target in targets:
            if isinstance(target.max_tokens, int) and length > 0.9 * target.max_tokens:
                continue
            samples = []
            for _ in range(plan.runs):
                seed += 1
                text = document(chars_for(length, chars[target.name]), seed)
                sample = target.ask(text, max_tokens=1)
                samples.append(sample)
            row["by_target"][target.name] = {
                "prompt_tokens": summary((s.prompt_tokens for s in samples), 1),
                "cached_tokens": max(s.cached_tokens for s in samples),
                "first_token_ms": summary(1e3 * s.first_s for s in samples),
                "tokens_per_s": summary((s.prompt_tokens / s.first_s for s in samples), 1),
            }
        rows.append(row)
    return rows


def _concurrency(targets: Sequence[Target], plan: Plan, say: Say) -> list[dict[str, Any]]:
    """Streams that begin together; each asks another question of the suite."""
    questions = [q for own in load_suite(("templates", "prose", "code")).values() for q in own]
    rows = []
    for streams in plan.concurrency:
        say(f"{streams} streams at a time")
        row: dict[str, Any] = {"streams": streams, "by_target": {}}
        for target in targets:
            totals, samples = [], []
            for run in range(max(1, plan.runs - 1)):
                asked = [questions[(i + run) % len(questions)] for i in range(streams)]
                wall_s, own = _together(target, asked, plan)
                totals.append(sum(s.tokens for s in own) / wall_s)
                samples += own
            row["by_target"][target.name] = {
                "total_tokens_per_s": summary(totals, 1),
                "stream_tokens_per_s": summary((s.tokens_per_s for s in samples), 1),
                "first_token_ms": summary(1e3 * s.first_s for s in samples),
                "gap_ms": summary(gap for s in samples for gap in s.gaps_ms),
            }
        rows.append(row)
    return rows


def _together(
    target: Target, questions: Sequence[Question], plan: Plan
) -> tuple[float, list[Sample]]:
    """All questions at once: the wall time until the last answer has ended, and the answers."""
    samples: list[Sample] = []
    faults: list[Exception] = []
    gate = threading.Barrier(len(questions) + 1)

    def one(i: int, question: Question) -> None:
        gate.wait()
        try:
            samples.append(_ask(target, question, plan.tokens, plan, i + 1))
        except Exception as error:
            faults.append(error)

    threads = [
        threading.Thread(target=one, args=(i, q), daemon=True) for i, q in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - begin
    if faults:
        raise DeepdraftError(f"{len(questions)} streams at a time: {faults[0]}") from faults[0]
    return wall_s, samples
