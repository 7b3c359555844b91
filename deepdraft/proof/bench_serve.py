"""`deepdraft bench serve`: the same load on one endpoint or several, after their outputs are equal.

Owns: the order of things, the check of outputs, what is made of the answers.
Knows nothing of: how a request is sent (`serve_client`), when (`serve_load`), how the page looks
(`serve_page`).

A server that answers fast because it answers wrongly must not win: no figure is taken before all
targets gave the same greedy answers, and answers under load are compared with those.
"""

import contextlib
import json
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from deepdraft.errors import ConfigError
from deepdraft.proof.bench_speed import summary
from deepdraft.proof.serve_client import Answer, Api, Ask, Target
from deepdraft.proof.serve_hf import PREFIX, served
from deepdraft.proof.serve_load import (
    Conversation,
    Done,
    conversations,
    fixed,
    made_trace,
    poisson,
    read_trace,
)
from deepdraft.proof.suite import load_suite

Say = Callable[[str], None]
LoadName = Literal["fixed", "poisson", "conversations"]
LOADS: tuple[LoadName, ...] = get_args(LoadName)
_CLASSES = ("templates", "prose", "code", "facts")
_MESSAGES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked."""

    load: LoadName = "fixed"
    levels: tuple[float, ...] = (1.0,)
    """fixed: streams at a time. poisson: requests a second. conversations: starts a second."""
    requests: int = 32
    """Of each level; conversations: how many of them."""
    max_tokens: int = 64
    seed: int = 0
    check: int = 4
    """Questions whose greedy answers must be equal first; 0: none."""
    trace: Path | None = None
    texts: tuple[str, ...] = field(default_factory=lambda: bundled_texts())

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ConfigError(f"--load knows {', '.join(LOADS)}, got {self.load!r}")
        if self.load == "fixed" and any(v != int(v) for v in self.levels):
            raise ConfigError("streams at a time are whole numbers")
        if not self.levels or min(self.levels) <= 0 or max(self.levels) > 10_000:
            raise ConfigError(f"levels must be from above 0 to 10000, got {self.levels}")
        if self.trace is not None and (self.load != "conversations" or len(self.levels) > 1):
            raise ConfigError("--trace belongs to one run of --load conversations")
        if not self.texts:
            raise ConfigError("there is nothing to ask")


def bundled_texts() -> tuple[str, ...]:
    """The short questions of the suite."""
    return tuple(q.text for own in load_suite(_CLASSES).values() for q in own)


def read_levels(text: str) -> tuple[float, ...]:
    """Numbers apart by commas. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"levels are numbers apart by commas, got {text!r}") from error


def open_targets(urls: Sequence[str], **options: Any) -> list[Target]:
    """Targets from [NAME=]URL. Raises ConfigError where one does not answer."""
    targets = []
    for url in urls:
        name, equals, address = url.partition("=")
        if not equals or "/" in name:
            name, address = urllib.parse.urlsplit(url.partition("+")[2] or url).netloc, url
            name = name.rpartition("@")[2]
        targets.append(Target(name, address, **options))
    names = [target.name for target in targets]
    if len(set(names)) != len(names):
        raise ConfigError(f"two targets have one name ({', '.join(names)}); write NAME=URL")
    if not targets:
        raise ConfigError("there is no target; --target [NAME=]URL")
    return targets


def _start_transformers(
    urls: Sequence[str], api: Api, python: str | None, stack: contextlib.ExitStack
) -> tuple[list[str], dict[str, str]]:
    """Addresses with [NAME=]hf:CHECKPOINT served, and host -> engine of those."""
    addresses, engines = [], {}
    for url in urls:
        name, equals, address = url.partition("=")
        if not equals or "/" in name:
            name, address = "transformers", url
        if not address.startswith(PREFIX):
            addresses.append(url)
            continue
        if api != "completions":
            raise ConfigError(f"{PREFIX}CHECKPOINT answers completions; add --api completions")
        directory = Path(address.removeprefix(PREFIX))
        served_at, engine = stack.enter_context(served(directory, python))
        addresses.append(f"{name}={served_at}")
        engines[urllib.parse.urlsplit(served_at).netloc] = engine
    return addresses, engines


def check_equal(
    targets: Sequence[Target], asks: Sequence[Ask]
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Greedy answers of all targets, in turn; one target is asked twice.

    Returns the report and, if all are equal, the answers by name of the question.
    """
    told: list[dict[str, Any]] = []
    known: dict[str, tuple[str, str]] = {}
    first = targets[0]
    others = list(targets[1:]) or [first]
    for ask in asks:
        mine = first.ask(ask)
        for other in others:
            theirs = other.ask(ask)
            if difference := _difference(first, mine, other, theirs):
                told.append({"question": ask.name, **difference})
        known[ask.name] = mine.said
    report = {
        "questions": len(asks),
        "max_tokens": asks[0].max_tokens if asks else 0,
        "compared": [t.name for t in (first, *others)],
        "equal": not told,
        "differences": told,
    }
    return report, ({} if told else known)


def _difference(a: Target, mine: Answer, b: Target, theirs: Answer) -> dict[str, Any] | None:
    for target, answer in ((a, mine), (b, theirs)):
        if answer.fault is not None:
            return {"target": target.name, "fault": answer.fault, "message": answer.message}
    if mine.said == theirs.said:
        return None
    ours, other = mine.reasoning + mine.text, theirs.reasoning + theirs.text
    at = next((i for i, (x, y) in enumerate(zip(ours, other, strict=False)) if x != y), None)
    at = min(len(ours), len(other)) if at is None else at
    return {
        "target": b.name,
        "at_character": at,
        a.name: ours[max(0, at - 20) : at + 20],
        f"{b.name} again" if a is b else b.name: other[max(0, at - 20) : at + 20],
    }


def measure(targets: Sequence[Target], plan: Plan, say: Say = lambda text: None) -> dict[str, Any]:
    """All figures, by level and target. Without `loads` where outputs are not equal."""
    begin = time.perf_counter()
    for target in targets:
        say(f"warming up {target.name}")
        target.ask(Ask((plan.texts[0],), min(8, plan.max_tokens)))
    texts = plan.texts
    asks = [
        Ask((texts[i % len(texts)],), plan.max_tokens, f"question {i % len(texts) + 1}")
        for i in range(plan.requests)
    ]
    checked = [
        Ask((text,), plan.max_tokens, f"question {i + 1}")
        for i, text in enumerate(texts[: plan.check])
    ]
    result: dict[str, Any] = {
        "what": "served answers under load",
        "format": 1,
        "settings": {
            "load": plan.load,
            "api": targets[0].api,
            "requests": plan.requests,
            "max_tokens": plan.max_tokens,
            "ignore_eos": targets[0].ignore_eos,
            "timeout_s": targets[0].timeout_s,
            "seed": plan.seed,
            "trace": plan.trace.name if plan.trace else None,
            "clock": "the client's, on the machine below",
        },
        "targets": [target.describe() for target in targets],
    }
    known: dict[str, tuple[str, str]] = {}
    if checked:
        say(f"greedy answers to {len(checked)} questions")
        result["equal"], known = check_equal(targets, checked)
        if not known:
            return result
    result["loads"] = []
    for level in plan.levels:
        row: dict[str, Any] = {"level": level, "by_target": {}}
        for target in targets:
            say(f"{plan.load}, {level:g}: {target.name}")
            row["by_target"][target.name] = figures(_run(target, asks, plan, level), known)
        result["loads"].append(row)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    return result


def _run(target: Target, asks: Sequence[Ask], plan: Plan, level: float) -> tuple[list[Done], float]:
    begin = time.perf_counter()
    if plan.load == "fixed":
        done = fixed(target, asks, int(level))
    elif plan.load == "poisson":
        done = poisson(target, asks, level, plan.seed)
    else:
        done = conversations(target, _trace(plan, level))
    return done, time.perf_counter() - begin


def _trace(plan: Plan, level: float) -> list[Conversation]:
    if plan.trace is not None:
        return read_trace(plan.trace, plan.max_tokens)
    return made_trace(
        plan.texts, plan.requests, rate=level, max_tokens=plan.max_tokens, seed=plan.seed
    )


def figures(run: tuple[Sequence[Done], float], known: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """What came of one load on one target: percentiles of the good answers, faults by kind."""
    done, wall_s = run
    good = [d for d in done if d.answer.fault is None]
    faults = Counter(d.answer.fault for d in done if d.answer.fault is not None)
    compared = [d for d in good if len(d.ask.turns) == 1 and d.ask.name in known]
    answers = [d.answer for d in good]
    tokens = sum(a.tokens for a in answers)
    return {
        "requests": len(done),
        "good": len(good),
        "faults": dict(sorted(faults.items())),
        "fault_messages": _messages(done),
        "different_answers": sum(d.answer.said != known[d.ask.name] for d in compared),
        "compared_answers": len(compared),
        "wall_s": round(wall_s, 3),
        "tokens": tokens,
        "counted_by_server": all(a.counted for a in answers),
        "total_tokens_per_s": round(tokens / wall_s, 2) if wall_s else None,
        "requests_per_s": round(len(good) / wall_s, 3) if wall_s else None,
        "first_token_ms": summary(
            1e3 * (d.answer.first_s + d.late_s) for d in good if d.answer.first_s
        ),
        "gap_ms": summary(1e3 * gap for a in answers for gap in a.gaps_s),
        "ms_per_token": summary(
            1e3 * (a.end_s - a.first_s) / (a.tokens - 1) for a in answers if a.tokens > 1
        ),
        "answer_ms": summary(1e3 * (d.answer.end_s + d.late_s) for d in good),
        "stream_tokens_per_s": summary(a.tokens / a.end_s for a in answers if a.tokens and a.end_s),
        "late_ms": summary(1e3 * d.late_s for d in done),
    }


def _messages(done: Sequence[Done]) -> list[str]:
    told = (f"{d.answer.fault}: {d.answer.message}" for d in done if d.answer.fault is not None)
    return list(dict.fromkeys(told))[:_MESSAGES]


def main(
    urls: Sequence[str],
    plan: Plan,
    *,
    api: Api,
    model: str | None,
    timeout_s: float,
    ignore_eos: bool,
    as_json: bool,
    out: str | None,
    html: str | None,
    python: str | None = None,
) -> int:
    """Measures, prints, writes. 1 where outputs differ or a request had a fault."""
    from deepdraft.proof.bench import provenance

    begun = provenance()
    with contextlib.ExitStack() as stack:
        addresses, engines = _start_transformers(urls, api, python, stack)
        targets = open_targets(
            addresses, api=api, model=model, timeout_s=timeout_s, ignore_eos=ignore_eos
        )
        result = measure(targets, plan, lambda text: print(text, file=sys.stderr))
    for described in result["targets"]:
        if described["host"] in engines:
            described |= {"kind": "transformers", "engine": engines[described["host"]]}
    record = {**result, **begun}
    text = json.dumps(record, indent=2)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text + "\n")
    if html is not None:
        from deepdraft.proof.report import write_page
        from deepdraft.proof.serve_page import page

        write_page(html, page(record))
    print(text if as_json else table(record))
    return 0 if is_good(record) else 1


def is_good(record: dict[str, Any]) -> bool:
    """Outputs were equal and no request had a fault."""
    rows = [own for row in record.get("loads", ()) for own in row["by_target"].values()]
    return bool(rows) and not any(own["faults"] for own in rows)


def table(record: dict[str, Any]) -> str:
    """The figures as lines of text."""
    lines = []
    equal = record.get("equal")
    if equal:
        verdict = "equal" if equal["equal"] else "DIFFERENT"
        lines.append(f"greedy answers to {equal['questions']} questions: {verdict}")
        lines += [f"  {json.dumps(d, ensure_ascii=False)}" for d in equal["differences"]]
    if "loads" not in record:
        return "\n".join([*lines, "no figures: the targets do not give the same answers"])
    columns = ("first_token_ms", "gap_ms", "stream_tokens_per_s")
    heads = ("ms to first token", "ms between chunks", "tok/s of a stream")
    lines.append(
        f"{'level':>8}  {'target':<22}{'good':>10}{'tok/s':>9}"
        + "".join(f"{head:>27}" for head in heads)
    )
    lines.append(f"{'':>49}" + f"{'p50 / p90 / p99':>27}" * len(heads))
    for row in record["loads"]:
        for name, own in row["by_target"].items():
            spans = "".join(f"{_span(own[column]):>27}" for column in columns)
            good = f"{own['good']}/{own['requests']}"
            total = own["total_tokens_per_s"] or 0.0
            lines.append(f"{row['level']:>8g}  {name[:22]:<22}{good:>10}{total:>9.1f}{spans}")
            lines += [f"{'':>10}{message}" for message in own["fault_messages"]]
            if own["different_answers"]:
                lines.append(
                    f"{'':>10}{own['different_answers']} of {own['compared_answers']} answers "
                    "under load differ from those given alone"
                )
    return "\n".join(lines)


def _span(stats: dict[str, Any] | None) -> str:
    if stats is None:
        return "-"
    return " / ".join(f"{stats[key]:.1f}" for key in ("p50", "p90", "p99"))
