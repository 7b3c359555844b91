"""Trains the demo model within a time budget.

Owns: the loop, its schedule, its fall-backs (smaller micro-batches when memory runs out, eager when
compiling fails), and its output: weight shards, `log.jsonl`, `summary.json`.
Run: `python -m training.train --help`; the commands used are in `training/README.md`.
"""

import argparse
import json
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training import losses, ops, store
from training.batches import Sampler, prefetch
from training.continuations import Continuations, split_given
from training.evaluate import HeldOut, Prompts, mean_of, quietly, to_batch
from training.model import Batch, Model, Options, alignment
from training.optim import Optimiser
from training.prepare import read_model_file


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of a training run."""
    p = argparse.ArgumentParser(description="Train the demo model within a time budget.")
    p.add_argument("--corpus", type=Path, required=True, help="packed ids (training.data.load)")
    p.add_argument("--model", type=Path, required=True, help="model.json of training.prepare")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--init", type=Path, help="folder with weights-*.safetensors to start from")
    p.add_argument("--phase", choices=("joint", "drafter"), default="joint")
    p.add_argument("--minutes", type=float, default=8.5, help="from process start to the end")
    p.add_argument("--reserve", type=float, default=30.0, help="seconds kept for the final save")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--anchors", type=int, default=64)
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=3e-3)
    p.add_argument(
        "--weights", default="", help="source weights by name prefix, e.g. long-=4,chat-tetris=10"
    )
    p.add_argument("--warmup", type=int, default=100, help="steps")
    p.add_argument("--decay-from", type=float, default=0.55, help="fraction of the budget")
    p.add_argument("--final-lr", type=float, default=0.02)
    p.add_argument("--index-from", type=float, default=0.7, help="indexer loss from here on")
    p.add_argument("--index-rows", type=int, default=8)
    p.add_argument("--sparse-from", type=float, default=0.85)
    p.add_argument("--quant-from", type=float, default=2.0)
    p.add_argument("--act-share", type=float, default=0.5, help="quantised steps with inputs too")
    p.add_argument("--replay-from", type=float, default=2.0)
    p.add_argument("--replay-share", type=float, default=0.25)
    p.add_argument("--z-loss", type=float, default=1e-5)
    p.add_argument("--bias-rate", type=float, default=1e-3)
    p.add_argument("--draft-ce", type=float, default=0.1, help="share of cross entropy, at the end")
    p.add_argument("--draft-reach", type=float, default=0.0, help="see losses.draft_loss")
    p.add_argument("--continuations", type=Path, help="folder of training.continuations")
    p.add_argument("--continuation-share", type=float, default=0.6, help="of the rows")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--compile-cpu", action="store_true", help="compile on the CPU too (tests)")
    p.add_argument("--float32", action="store_true", help="compute in float32 instead of bfloat16")
    p.add_argument("--eval-every", type=float, default=110.0, help="seconds")
    p.add_argument("--eval-rows", type=int, default=6)
    p.add_argument("--save-every", type=float, default=120.0, help="seconds")
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--max-steps", type=int, default=10**9)
    p.add_argument("--prompts", type=Path)
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json, to print samples as text")
    p.add_argument("--sample-tokens", type=int, default=48)
    return p.parse_args(argv)


@dataclass
class Meter:
    """Means of device scalars between two log lines, without host synchronisation."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: dict[str, Tensor]) -> None:
        for k, v in values.items():
            v = v.detach().float()
            self.sums[k] = self.sums[k] + v if k in self.sums else v
            self.counts[k] = self.counts.get(k, 0) + 1

    def read(self) -> dict[str, float]:
        out = {k: float(v) / self.counts[k] for k, v in self.sums.items()}
        self.sums, self.counts = {}, {}
        return out


class Trainer:
    """One run. `train()` returns when the budget is spent or a stop was asked for."""

    def __init__(self, opts: argparse.Namespace, corpus: Any, born: float) -> None:
        self.o, self.born = opts, born
        self.device = torch.device(opts.device)
        torch.manual_seed(opts.seed)
        torch.set_float32_matmul_precision("high")
        opts.out.mkdir(parents=True, exist_ok=True)
        self.log_path = opts.out / "log.jsonl"
        args, token_map, self.record = read_model_file(opts.model)
        about = getattr(corpus, "about", {})
        if (
            about.get("tokenizer_sha256", self.record["tokenizer_sha256"])
            != (self.record["tokenizer_sha256"])
        ):
            raise ValueError(f"{opts.model} and {opts.corpus} come from different tokenizers")
        self.model = Model(args, token_map)
        if opts.init is not None:
            store.load_weights(self.model, opts.init)
        else:
            self.model.initialise(opts.seed)
        self.model.to(self.device)
        self.model.compute_dtype = torch.float32 if opts.float32 else torch.bfloat16
        self.optimiser = Optimiser(
            self.model,
            muon_lr=opts.muon_lr,
            adam_lr=opts.adam_lr,
            only="mtp." if opts.phase == "drafter" else None,
        )
        self.sampler = Sampler(
            corpus,
            "train",
            opts.length,
            alignment(args),
            args.pad_token_id,
            opts.seed,
            {k: float(v) for k, _, v in (x.partition("=") for x in opts.weights.split(",") if x)},
        )
        self.held_out = HeldOut(corpus, self.model, opts.length, opts.eval_rows)
        self.continuations = None
        if opts.continuations is not None:
            self.continuations = Continuations(
                opts.continuations, opts.length, alignment(args), args.pad_token_id, opts.seed
            )
        self.prompts = None
        if opts.prompts is not None:
            self.prompts = quietly(
                lambda: Prompts(opts.prompts, opts.tokenizer, opts.length // 2), self.say
            )
        self.rng = np.random.default_rng(opts.seed)
        self.micro = 1
        self.steps = 0
        self.factor = 1.0
        self.stop = False
        self.errors = 0
        self.meter = Meter()
        self.start = time.monotonic()
        self.snapshot: dict[str, Tensor] = {}
        self.last_eval: dict[str, Any] = {}

    # reporting

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.born:6.1f}s] {text}", flush=True)

    def record_line(self, kind: str, values: dict[str, Any]) -> None:
        line = {"kind": kind, "t": round(time.monotonic() - self.born, 1), "step": self.steps}
        with self.log_path.open("a") as file:
            file.write(json.dumps(line | values) + "\n")
        self.say(f"{kind} step {self.steps} " + json.dumps(values))

    # schedule

    @property
    def progress(self) -> float:
        """Fraction of the training time that is spent, in [0, 1]."""
        end = self.born + self.o.minutes * 60 - self.o.reserve
        by_time = (time.monotonic() - self.start) / max(end - self.start, 1e-3)
        return min(max(by_time, self.steps / self.o.max_steps), 1.0)

    def lr_factor(self, progress: float) -> float:
        """Warm-up, constant, linear decay."""
        o = self.o
        up = min((self.steps + 1) / max(o.warmup, 1), 1.0)
        down = 1.0
        if progress > o.decay_from:
            left = (1 - progress) / max(1 - o.decay_from, 1e-6)
            down = o.final_lr + (1 - o.final_lr) * left
        return up * down * self.factor

    def options(self, progress: float) -> Options:
        o = self.o
        quant = progress >= o.quant_from
        return Options(
            sparse=progress >= o.sparse_from,
            index_rows=o.index_rows if o.phase == "joint" and progress >= o.index_from else 0,
            weight_quant=quant,
            kv_quant=quant,
            act_quant=quant and self.rng.random() < o.act_share,
        )

    def next_batch(self) -> np.ndarray:
        """Rows [3 or 4, B, T]: of the corpus, and of continuations as far as there are any."""
        o = self.o
        if self.continuations is None:
            return self.sampler.batch(o.batch)
        want = round(o.continuation_share * o.batch)
        own = self.continuations.next_rows(want)
        rows = self.sampler.batch(o.batch - len(own))
        rows = np.concatenate((rows, np.ones_like(rows[:1])))
        return np.concatenate((rows, split_given(own)), axis=1) if own else rows

    # one step

    def cuts(self, batch: Batch, progress: float) -> None:
        """Bounded replay on some rows: window attention does not look back over a cut."""
        if progress < self.o.replay_from:
            return
        rows, length = batch.tokens.shape
        share = self.o.replay_share
        for name, part in (("decoder_cut", share), ("encoder_cut", share * 0.4)):
            at = self.rng.integers(0, length // 2, size=rows) * 2
            at = np.where(self.rng.random(rows) < part, at, 0).astype(np.int32)
            setattr(batch, name, torch.from_numpy(at).to(self.device, non_blocking=True))

    def backward(
        self, batch: Batch, progress: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses and gradients of one micro-batch: metrics and routing loads."""
        o, model = self.o, self.model
        joint = o.phase == "joint"
        target, weight = losses.next_tokens(batch)
        with torch.set_grad_enabled(joint):
            out = model(batch)
            logits = model.logits(out.hidden)
            ce, z = losses.token_loss(logits.flatten(0, 1), target.flatten())
            w = weight.flatten()
            total = w.sum().clamp(min=1)
            ce_mean = (ce * w).sum() / total
        share = o.draft_ce + 0.4 * max(0.0, 1 - 2 * progress) if joint else o.draft_ce
        draft, accept, conf, loads = losses.draft_loss(
            model, batch, out.taps, logits, weight, o.anchors, share, o.draft_reach
        )
        loss = draft
        metrics = {"ce": ce_mean, "draft": draft, "soft": accept, "conf": conf, "fill": w.mean()}
        if joint:
            loss = loss + ce_mean + o.z_loss * (z * w).sum() / total
            loads = loads | out.loads
        if out.index_loss is not None:
            loss = loss + out.index_loss
            metrics["index"] = out.index_loss
        (loss / self.micro).backward()
        return metrics, loads

    @torch.no_grad()
    def balance(self, loads: dict[str, Tensor], factor: float) -> None:
        """Move the selection bias towards equal expert loads."""
        worst = []
        for name, load in loads.items():
            bias = self.model.params[f"{name}.gate.bias"]
            mean = load.mean()
            bias.add_(torch.sign(mean - load), alpha=self.o.bias_rate * min(factor, 1.0))
            worst.append(load.max() / mean.clamp(min=1e-6))
        self.meter.add({"max_load": torch.stack(worst).mean()})

    def step(self, rows: np.ndarray) -> None:
        progress = self.progress
        self.model.options = self.options(progress)
        totals: dict[str, Tensor] = {}
        for part in np.array_split(rows, self.micro, axis=1):
            batch = to_batch(np.ascontiguousarray(part), self.device)
            self.cuts(batch, progress)
            metrics, loads = self.backward(batch, progress)
            self.meter.add(metrics)
            for k, v in loads.items():
                totals[k] = totals[k] + v if k in totals else v
        factor = self.lr_factor(progress)
        self.optimiser.step(factor)
        self.balance(totals, factor)
        self.steps += 1

    def attempt(self, rows: np.ndarray) -> None:
        """One step with fall-backs; a fault that persists is raised."""
        while True:
            try:
                self.step(rows)
                self.errors = 0
                return
            except torch.cuda.OutOfMemoryError:
                fault = "out of memory"
                if self.micro >= rows.shape[1]:
                    raise
                self.micro *= 2
                ops.set_compiled(ops.is_compiled(), ops.min_elements() // 2)
            except Exception as e:
                fault = f"{type(e).__name__}: {str(e)[:600]}"
                self.errors += 1
                if self.errors > 2:
                    raise
                ops.set_compiled(False)
            for p in self.model.params.values():
                p.grad = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            state = f"micro-batches {self.micro}, compiled {ops.is_compiled()}"
            self.say(f"step failed ({fault}); {state}")

    # the compiler's results travel between runs: a fresh machine has none

    def load_compiled(self) -> None:
        path = self.o.init / "compile-cache.bin" if self.o.init else None
        if path is None or not path.exists() or self.o.no_compile:
            return
        try:
            torch.compiler.load_cache_artifacts(path.read_bytes())
            self.say("loaded the compile cache")
        except Exception as e:
            self.say(f"compile cache not used: {type(e).__name__}: {e}")

    def save_compiled(self) -> None:
        if not ops.is_compiled():
            return
        try:
            artifacts = torch.compiler.save_cache_artifacts()
            if artifacts is not None and len(artifacts[0]) < 4 << 20:
                (self.o.out / "compile-cache.bin").write_bytes(artifacts[0])
                self.say(f"compile cache: {len(artifacts[0])} bytes")
        except Exception as e:
            self.say(f"compile cache not saved: {type(e).__name__}: {e}")

    # the loop

    def remember(self) -> None:
        with torch.no_grad():
            self.snapshot = {k: p.detach().clone() for k, p in self.model.params.items()}

    def check(self, values: dict[str, float]) -> None:
        """Go back to the last good weights with a lower learning rate on a broken loss."""
        if all(math.isfinite(v) for v in values.values()):
            self.remember()
            return
        self.factor *= 0.5
        self.say(f"a loss is not finite; back to the last good weights, factor {self.factor}")
        with torch.no_grad():
            for k, p in self.model.params.items():
                p.copy_(self.snapshot[k])
        for buffer in self.optimiser.muon.buffers:
            if buffer is not None:
                buffer.zero_()
        self.optimiser.adam.state.clear()

    def evaluate(self, final: bool = False) -> None:
        """Held-out losses, forced answers; samples at the end. Errors are only logged."""
        if self.continuations is not None:
            self.held_out.add_continuations(self.continuations.held_out())
        result = quietly(lambda: self.held_out.run(self.model), self.say) or {}
        forced = None
        if self.prompts:
            forced = quietly(lambda: self.prompts.forced(self.model), self.say)
        self.last_eval = {
            "ce": mean_of(result, "ce"),
            "accepted": mean_of(result, "accepted"),
            "sources": result,
            "forced": forced,
        }
        self.record_line("eval", self.last_eval)
        if self.prompts:
            lines = quietly(
                lambda: self.prompts.samples(self.model, 2 if final else 1, self.o.sample_tokens),
                self.say,
            )
            for line in lines or []:
                self.say(line)

    def save(self) -> None:
        note = {
            "steps": self.steps,
            "phase": self.o.phase,
            "eval_ce": self.last_eval.get("ce"),
            "tokenizer_sha256": self.record.get("tokenizer_sha256"),
        }
        try:
            store.save_weights(self.model, self.o.out, note)
        except Exception as e:
            self.say(f"saving failed: {type(e).__name__}: {e}")

    def log_line(self, since: float, steps: int) -> None:
        values = self.meter.read()
        spent = time.monotonic() - since
        self.check(values)
        extra: dict[str, Any] = {k: round(v, 4) for k, v in values.items()}
        extra["ms"] = round(1000 * spent / max(steps, 1), 1)
        extra["tok_s"] = int(steps * self.o.batch * self.o.length / max(spent, 1e-6))
        extra["progress"] = round(self.progress, 3)
        extra["lr"] = round(self.lr_factor(self.progress), 4)
        if self.device.type == "cuda":
            extra["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self.record_line("train", extra)

    def train(self) -> None:
        o = self.o
        if not o.no_compile and (self.device.type == "cuda" or o.compile_cpu):
            a = self.model.args
            ops.set_compiled(True, int(0.75 * o.batch * o.length * a.hc_mult * a.hidden_size))
        self.load_compiled()
        feed = prefetch(self.next_batch)
        for k in range(3):
            begun = time.monotonic()
            self.attempt(next(feed))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.monotonic() - begun
            self.say(f"first steps: {k} took {spent:.2f} s, compiled {ops.is_compiled()}")
            if self.stop:
                break
        self.start = time.monotonic()
        mark, mark_step = self.start, self.steps
        next_eval, next_save = self.start + o.eval_every, self.start + o.save_every
        while not self.stop and self.progress < 1 and self.steps < o.max_steps:
            self.attempt(next(feed))
            if self.steps % o.log_every == 0 or self.steps in (10, 20):
                self.log_line(mark, self.steps - mark_step)
                now = time.monotonic()
                if now >= next_eval and self.progress < 0.93:
                    self.evaluate()
                    next_eval = time.monotonic() + o.eval_every
                if now >= next_save:
                    self.save()
                    next_save = time.monotonic() + o.save_every
                mark, mark_step = time.monotonic(), self.steps
        if self.meter.sums:
            self.check(self.meter.read())

    def finish(self) -> None:
        """Save first, then evaluate, then write the summary."""
        self.save()
        self.model.options = Options(
            sparse=self.o.sparse_from <= 1,
            weight_quant=self.o.quant_from <= 1,
            kv_quant=self.o.quant_from <= 1,
        )
        self.evaluate(final=True)
        summary = {
            "steps": self.steps,
            "tokens": self.steps * self.o.batch * self.o.length,
            "seconds": round(time.monotonic() - self.born, 1),
            "epochs": self.sampler.epochs(),
            "continuation_tokens": self.continuations.tokens if self.continuations else 0,
            "micro_batches": self.micro,
            "compiled": ops.is_compiled(),
            "eval": self.last_eval,
            "options": {k: str(v) for k, v in vars(self.o).items()},
            "torch": torch.__version__,
        }
        self.save_compiled()
        (self.o.out / "summary.json").write_text(json.dumps(summary, indent=1))
        self.say(f"done: {self.steps} steps, epochs {summary['epochs']}")


def main(argv: list[str] | None = None) -> int:
    born = time.monotonic()
    opts = parse_options(argv)
    from training.data.load import load

    trainer = Trainer(opts, load(opts.corpus), born)

    def ask_stop(_signal: int, _frame: Any) -> None:
        trainer.stop = True

    signal.signal(signal.SIGTERM, ask_stop)
    try:
        trainer.train()
    except BaseException:
        trainer.say("training stopped on an error; saving what there is")
        trainer.save()
        raise
    trainer.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
