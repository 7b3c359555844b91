"""`deepdraft bench drafted`: speed of answers with drafts against plain ones, by domain.

Owns: the interleaved runs, what is made of their times. Knows nothing of: thresholds.
"""

from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

from deepdraft.engine.engine import STEP_PARTS
from deepdraft.engine.load import read_calibrations
from deepdraft.errors import EngineError
from deepdraft.proof.bench_accept import Answer, Bench, Setting
from deepdraft.proof.prompts import evenly, load_prompts
from deepdraft.spec.calibrate import Calibration
from deepdraft.text.tokenizer import Tokenizer


def drafted(
    model: str | Path,
    *,
    prompts: str | None = None,
    num_prompts: int | None = None,
    tokens: int = 200,
    runs: int = 5,
    numerics: str = "exact",
    temperature: float = 0.0,
    streams: int = 1,
) -> dict[str, Any]:
    """Decoding times of the same answers, plainly and as the server drafts by itself.

    Domain by domain, plain and drafted in turn; the best of `runs` each. Wall time, and processor
    time of the whole process, which a busy machine stretches less. With several `streams` prompts
    are read beside the decoding, and their time counts.
    """
    chosen = evenly(load_prompts(prompts, Tokenizer.load(model)), num_prompts)
    bench = Bench(model, chosen, tokens, numerics=numerics, streams=streams)
    calibration = read_calibrations(Path(model)).get("coupled", Calibration())
    settings = {
        "plain": Setting(temperature=temperature, schedule="none"),
        "drafted": Setting(temperature=temperature, schedule="cost"),
    }
    domains = list(dict.fromkeys(p.domain for p in chosen))
    best: dict[tuple[str, str], list[float]] = {}
    lengths: dict[str, float] = {}
    texts: dict[tuple[str, str], int] = {}
    first: dict[str, list[Answer]] = {}
    parts: dict[str, Counter[str]] = {name: Counter() for name in settings}
    for _ in range(runs):
        for domain in domains:
            own = [p for p in chosen if p.domain == domain]
            for name, setting in settings.items():
                answers = bench.run(own, setting, tokens, calibration)
                _agree(first.setdefault(domain, answers), answers, f"{name} answers of {domain}")
                times = [_sum(answers, "seconds"), _sum(answers, "cpu_seconds")]
                old = best.get((domain, name), times)
                best[domain, name] = [min(a, b) for a, b in zip(old, times, strict=True)]
                texts[domain, name] = int(_sum(answers, "num_tokens"))
                parts[name].update(bench.last_stats)
                if name == "drafted":
                    steps = sum(a.stats.steps for a in answers)
                    lengths[domain] = 1 + sum(a.stats.accepted for a in answers) / steps
    rows = [_row(domain, best, texts, lengths[domain]) for domain in domains]
    for name in settings:
        for k in (0, 1):
            best.setdefault(("all", name), [0.0, 0.0])[k] = sum(
                best[domain, name][k] for domain in domains
            )
        texts["all", name] = sum(texts[domain, name] for domain in domains)
    rows.append(_row("all", best, texts, None))
    return {
        "what": "answers with drafts against plain ones",
        "streams": streams,
        "numerics": numerics,
        "temperature": temperature,
        "prompts": len(chosen),
        "tokens_per_answer": tokens,
        "runs": runs,
        "costs": bench.costs.to_dict(),
        "draft_of_verify": _draft_of_verify(bench),
        "domains": rows,
        "ms_per_step": {name: _parts(counts) for name, counts in parts.items()},
        "ms_per_drafted_step": _drafted_parts(parts["drafted"]),
    }


def _draft_of_verify(bench: Bench) -> dict[str, float]:
    """What a block of drafts takes, as a part of the step that verifies all of it, by streams."""
    costs = bench.costs
    return {
        str(q): round(
            costs.draft.step_ms(q) / costs.verify.step_ms(q * (1 + bench.block_size), q), 3
        )
        for q in costs.draft.rows
    }


def _agree(first: list[Answer], answers: list[Answer], what: str) -> None:
    """Raises EngineError where an answer is not that of the first run, token for token."""
    for one, other in zip_longest(first, answers):
        if one is None or other is None or one.prompt != other.prompt:
            raise EngineError(f"{what}: {len(answers)}, of other prompts than the first plain ones")
        if one.token_ids != other.token_ids:
            pairs = zip_longest(one.token_ids, other.token_ids)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            raise EngineError(
                f"{what} differ from the first plain ones: a prompt of {len(one.prompt.ids)} "
                f"tokens, token {at} of {len(one.token_ids)} and {len(other.token_ids)}"
            )


def _sum(answers: list[Answer], name: str) -> float:
    return sum(getattr(a, name) for a in answers)


def _row(
    domain: str,
    best: dict[tuple[str, str], list[float]],
    texts: dict[tuple[str, str], int],
    length: float | None,
) -> dict[str, Any]:
    plain, with_drafts = best[domain, "plain"], best[domain, "drafted"]
    tokens = texts[domain, "plain"]
    return {
        "domain": domain,
        "tokens": tokens,
        "plain_tokens_per_s": round(tokens / plain[0], 1),
        "drafted_tokens_per_s": round(tokens / with_drafts[0], 1),
        "speedup": round(plain[0] / with_drafts[0], 3),
        "speedup_cpu_time": round(plain[1] / with_drafts[1], 3),
        "accepted_length": None if length is None else round(length, 3),
    }


def _parts(counts: Counter[str]) -> dict[str, float]:
    """Wall ms of a step by what was done, all runs."""
    steps = max(1, counts["decode_steps"])
    return {name: round(counts[f"{name}_us"] / 1e3 / steps, 3) for name in STEP_PARTS}


def _drafted_parts(counts: Counter[str]) -> dict[str, float]:
    """Ms of the draft and rows of the step behind it, over the steps that had one."""
    steps = max(1, counts["spec_drafted_steps"])
    return {
        "draft": round(counts["draft_us"] / 1e3 / steps, 3),
        "drafts_verified": round(counts["spec_verified"] / steps, 3),
    }
