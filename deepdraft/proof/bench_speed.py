"""`deepdraft bench speed` through HTTP: the known script, the suite, prompts by length, streams at
a time; one server or two in the same run.

Owns: what is asked in which order, and what is made of the times.
Knows nothing of: how answers are read (`speed_client`), how the report looks (`report`).

Targets take turns, question by question, so that a slow minute of the machine meets them all.
An answer that does not come is noted and costs none of the others.
"""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError, DeepdraftError
from deepdraft.proof.served import served
from deepdraft.proof.speed_client import Sample, Target
from deepdraft.proof.suite import TETRIS, Question, chars_for, document, load_suite

Say = Callable[[str], None]

_GIVEN_UP_AFTER = 3
_MAX_FAILURES_TOLD = 100
_MAX_STREAMS = 1024


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
            load_suite(given["classes"], long_tokens=1)
        for name, text, most in (
            ("prefill", prefill, 10**7),
            ("concurrency", concurrency, _MAX_STREAMS),
        ):
            if text is not None:
                given[name] = _numbers(text, f"--{name}", most)
        return cls(**given)


def _numbers(text: str, name: str, most: int) -> tuple[int, ...]:
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(p.isascii() and p.isdigit() and len(p) < 9 and 0 < int(p) <= most for p in parts):
        raise ConfigError(
            f"{name} must be numbers from 1 to {most} apart by commas, or none; got {text!r}"
        )
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
                name, address = "", url
            target = Target(name, address)
            target.name = name or target.describe()["host"]
            targets.append(target)
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


@dataclass(slots=True)
class _Asker:
    """Asks, and notes what fails: one bad answer must not cost the figures of all others."""

    plan: Plan
    say: Say
    part: str = ""
    """What is measured just now."""
    failures: list[dict[str, str]] = field(default_factory=list)
    _in_a_row: dict[str, int] = field(default_factory=dict)

    def begin(self, part: str) -> None:
        """From here on `part` is measured."""
        self.part = part
        self.say(part)

    def ask(self, target: Target, text: str, **options: Any) -> Sample | None:
        """One answer; None where there was none, or the target has been given up."""
        if self._in_a_row.get(target.name, 0) >= _GIVEN_UP_AFTER:
            return None
        try:
            sample = target.ask(text, temperature=self.plan.temperature, **options)
        except DeepdraftError as error:
            failed = self._in_a_row[target.name] = self._in_a_row.get(target.name, 0) + 1
            if len(self.failures) < _MAX_FAILURES_TOLD:
                self.failures.append(
                    {"target": target.name, "part": self.part, "error": str(error)}
                )
            self.say(f"FAILED: {error}")
            if failed == _GIVEN_UP_AFTER:
                self.say(f"{target.name} failed {failed} times in a row and is asked no more")
            return None
        self._in_a_row[target.name] = 0
        return sample

    def question(self, target: Target, question: Question, tokens: int, seed: int) -> Sample | None:
        """The answer to a question of the suite."""
        return self.ask(
            target, question.text, thinking=question.thinking, max_tokens=tokens, seed=seed
        )


def measure(targets: Sequence[Target], plan: Plan, say: Say = lambda text: None) -> dict[str, Any]:
    """All figures, by target, and under `failures` the answers that did not come.

    Raises DeepdraftError for a target that does not answer at the beginning."""
    if not targets:
        raise ConfigError("there is no server to measure")
    begin = time.perf_counter()
    asker = _Asker(plan, say)
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
        "tetris": _tetris(targets, plan, asker),
    }
    if plan.classes is None or plan.classes:
        result["classes"] = _suite(targets, plan, asker)
    if plan.prefill:
        result["prefill"] = _prefill(targets, plan, asker)
    if plan.concurrency:
        result["concurrency"] = _concurrency(targets, plan, asker)
    result["failures"] = asker.failures
    result["targets"] = [target.describe() for target in targets]
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def _in_turn(
    targets: Sequence[Target],
    questions: Sequence[Question],
    tokens: int,
    plan: Plan,
    asker: _Asker,
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for run in range(plan.runs):
        for i, question in enumerate(questions):
            # Who goes first changes, too: the second may find the machine warmer.
            order = list(targets) if (run + i) % 2 == 0 else list(reversed(targets))
            for target in order:
                sample = asker.question(target, question, tokens, run + 1)
                if sample is not None:
                    samples[target.name].append(sample)
    return samples


def _tetris(targets: Sequence[Target], plan: Plan, asker: _Asker) -> dict[str, Any]:
    asker.begin("the known script: Tetris, thinking off")
    question = Question("tetris", TETRIS)
    samples = _in_turn(targets, [question], plan.tetris_tokens, plan, asker)
    return {
        name: {
            **_summaries(own),
            "tokens_per_s_of_each_run": [
                round(rate, 1) for s in own if (rate := s.tokens_per_s) is not None
            ],
            "finish": sorted({s.finish or "none" for s in own}),
        }
        for name, own in samples.items()
    }


def _suite(targets: Sequence[Target], plan: Plan, asker: _Asker) -> list[dict[str, Any]]:
    long_tokens = plan.long_tokens
    contexts = [t.max_tokens for t in targets if t.max_tokens is not None]
    if contexts:
        # Half of what is left beside the answer, so that a poor guess of its length still fits.
        long_tokens = max(64, min(long_tokens, (min(contexts) - plan.tokens) // 2))
    rows = []
    for name, questions in load_suite(plan.classes, long_tokens=long_tokens).items():
        asker.begin(f"suite: {name}")
        samples = _in_turn(targets, questions, plan.tokens, plan, asker)
        rows.append(
            {
                "class": name,
                "questions": len(questions),
                "by_target": {target: _summaries(own) for target, own in samples.items()},
            }
        )
    return rows


def _prefill(targets: Sequence[Target], plan: Plan, asker: _Asker) -> list[dict[str, Any]]:
    """Time to the first token of prompts that no cache knows."""
    rows = []
    seed = int(time.time()) % 10**6 * 1000
    chars: dict[str, float] = {}
    asker.begin("prompts: how long a token is")
    for target in targets:
        text = document(400, seed)
        sample = asker.ask(target, text, max_tokens=1)
        chars[target.name] = len(text) / ((sample and sample.prompt_tokens) or 100)
    for length in plan.prefill:
        asker.begin(f"prompts of {length} tokens")
        row: dict[str, Any] = {"wanted_tokens": length, "by_target": {}}
        for target in targets:
            if target.max_tokens is not None and length > 0.9 * target.max_tokens:
                continue
            samples = []
            for _ in range(plan.runs):
                seed += 1
                text = document(chars_for(length, chars[target.name]), seed)
                sample = asker.ask(target, text, max_tokens=1)
                if sample is not None:
                    samples.append(sample)
            row["by_target"][target.name] = _prompt_summaries(samples)
        rows.append(row)
    return rows


def _prompt_summaries(samples: Sequence[Sample]) -> dict[str, Any]:
    # Without usage nobody knows how many tokens the prompt had.
    counted = [s for s in samples if s.prompt_tokens]
    return {
        "prompt_tokens": summary((s.prompt_tokens for s in counted), 1),
        "cached_tokens": max((s.cached_tokens for s in samples), default=None),
        "first_token_ms": summary(1e3 * s.first_s for s in samples),
        "tokens_per_s": summary((s.prompt_tokens / s.first_s for s in counted), 1),
    }


def _concurrency(targets: Sequence[Target], plan: Plan, asker: _Asker) -> list[dict[str, Any]]:
    """Streams that begin together; each asks another question of the suite."""
    questions = [q for own in load_suite(("templates", "prose", "code")).values() for q in own]
    rows = []
    for streams in plan.concurrency:
        asker.begin(f"{streams} streams at a time")
        row: dict[str, Any] = {"streams": streams, "by_target": {}}
        for target in targets:
            totals, samples = [], []
            for run in range(max(1, plan.runs - 1)):
                asked = [questions[(i + run) % len(questions)] for i in range(streams)]
                wall_s, own = _together(target, asked, plan, asker)
                # With fewer streams it would be another measurement.
                if len(own) == streams:
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
    target: Target, questions: Sequence[Question], plan: Plan, asker: _Asker
) -> tuple[float, list[Sample]]:
    """All questions at once: the wall time until the last answer has ended, and the answers."""
    samples: list[Sample] = []
    faults: list[Exception] = []
    gate = threading.Barrier(len(questions) + 1)

    def one(i: int, question: Question) -> None:
        gate.wait()
        try:
            sample = asker.question(target, question, plan.tokens, i + 1)
            if sample is not None:
                samples.append(sample)
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
        raise faults[0]
    return wall_s, samples
