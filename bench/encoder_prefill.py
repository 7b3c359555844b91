"""How far `encoder` prefill and a resume from global KV are from `full` prefill.

Both are approximations by design (docs/numerics.md). Measured on held-out documents of the demo
model's corpus: KL(full || other) of the next-token distribution, in nats, right after the prompt
and over the 32 tokens after it (the true text is fed to both).

Run: python bench/encoder_prefill.py --data .data --out bench/results/a-encoder-prefill.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.engine.runner import Runner
from deepdraft.models.state import SequenceState
from deepdraft.proof.bench import commit, machine
from deepdraft.text.tokenizer import Tokenizer
from training.data.load import load

CLASSES = {
    "templates": ("chat-tetris", "chat-apps", "chat-tools"),
    "chat": ("chat-talk", "chat-stories", "chat-terms", "chat-code"),
    "docs": ("python-docs", "nodejs-docs", "postgresql-docs", "django-docs"),
    "code": ("python-stdlib", "sympy", "networkx", "phaser"),
    "prose": ("shakespeare-milton", "moby-dick", "state-of-the-union"),
}
AFTER = 32


def documents(data: Path, per_class: int, shortest: int) -> dict[str, list[list[int]]]:
    """Held-out documents of at least `shortest` tokens, by class."""
    corpus = load(data / "pack.xz")
    starts = corpus.doc_starts.tolist()
    found: dict[str, list[list[int]]] = {name: [] for name in CLASSES}
    for source in corpus.sources:
        name = next((c for c, names in CLASSES.items() if source.name in names), None)
        if name is None or source.split != "val":
            continue
        inside = [i for i, s in enumerate(starts) if source.start <= s < source.end]
        kept = 0
        for i in inside:
            end = starts[i + 1] if i + 1 < len(starts) else len(corpus.tokens)
            if end - starts[i] >= shortest and kept < per_class:
                found[name].append(corpus.tokens[starts[i] : end].astype(int).tolist())
                kept += 1
    return found


def kl(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    """KL(p || q) of rows of logits, in nats."""
    lp, lq = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (lp.exp() * (lp - lq)).sum(-1).tolist()


def follow(runner: Runner, state: SequenceState, text: list[int]) -> torch.Tensor:
    """Logits after each token of `text`."""
    logits = runner.model.step([(state, text)]).logits
    assert logits is not None
    return logits


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": round(statistics.fmean(ordered), 6),
        "median": round(statistics.median(ordered), 6),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 6),
        "max": round(ordered[-1], 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("deepdraft/demo/checkpoint"))
    parser.add_argument("--per-source", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runner = Runner.from_checkpoint(
        Checkpoint.open(options.model), Tokenizer.load(options.model), num_sequences=3
    )
    model = runner.model
    window = model.args.sliding_window
    results = {}
    for name, texts in documents(options.data, options.per_source, 3 * window + AFTER).items():
        rows: dict[str, list[float]] = {k: [] for k in ("encoder_first", "encoder_after")}
        rows |= {k: [] for k in ("resume_first", "resume_after")}
        agree: dict[str, list[float]] = {"encoder": [], "resume": []}
        for text in texts:
            n = min(len(text) - AFTER, 700) // 2 * 2
            prompt, rest = text[:n], text[n : n + AFTER]
            full, encoder, resumed = (runner.open_sequence() for _ in range(3))
            a = model.prefill(full, prompt).logits
            b = model.prefill(encoder, prompt, mode="encoder").logits
            model.prefill(resumed, prompt[: n - 16])
            resumed.keep_global(n - 16)
            c = model.prefill(resumed, prompt[n - 16 :], mode="encoder").logits
            assert a is not None and b is not None and c is not None
            after = follow(runner, full, rest)
            for kind, first, state in (("encoder", b, encoder), ("resume", c, resumed)):
                rows[f"{kind}_first"] += kl(a[-1:], first[-1:])
                other = follow(runner, state, rest)
                rows[f"{kind}_after"] += kl(after, other)
                same = (after.argmax(-1) == other.argmax(-1)).float().mean()
                agree[kind].append(float(same))
            for state in (full, encoder, resumed):
                runner.close_sequence(state)
        results[name] = {k: summary(v) for k, v in rows.items()} | {
            "documents": len(texts),
            "top1_agreement": {k: round(statistics.fmean(v), 4) for k, v in agree.items()},
        }
        print(name, json.dumps(results[name]))
    record = {
        "what": "KL(full || encoder prefill) and KL(full || resume from global KV), nats",
        "window": window,
        "tokens_after": AFTER,
        "classes": results,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
