"""A checkpoint twice, on the device and by the CPU's torch reference: checks of step_gpu.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from step_results import Results

ROOT = Path(__file__).resolve().parents[1]
SET_A = ROOT / "tests" / "golden" / "v41-a"
DEMO = ROOT / "deepdraft" / "demo" / "checkpoint"


class Pair:
    """One checkpoint twice: the torch reference on the CPU, and on the device."""

    def __init__(self, directory: Path, device: str, slots: int, max_tokens: int) -> None:
        import torch

        from deepdraft.checkpoint.reader import Checkpoint
        from deepdraft.engine.runner import checked_token_map
        from deepdraft.models.deepseek_v41 import DeepseekV41
        from deepdraft.models.v41_buffers import DeviceCaches
        from deepdraft.models.v41_step import DeviceStep
        from deepdraft.models.v41_weights import load_weights
        from deepdraft.text.tokenizer import Tokenizer

        torch.set_num_threads(4 if device == "cuda" else 1)
        checkpoint = Checkpoint.open(directory)
        self.tokenizer = Tokenizer.load(directory)
        token_map = checked_token_map(checkpoint, self.tokenizer)
        self.args, self.device = checkpoint.args, device
        self.model = DeepseekV41(self.args, checkpoint, token_map, numerics="quant")
        self.weights = load_weights(self.args, checkpoint, token_map, device=device)
        self.caches = DeviceCaches(
            self.args, num_sequences=slots, max_tokens=max_tokens, spare=64, device=device
        )
        self.step = DeviceStep(self.weights, self.caches)

    def loop(self, width: int, slots: int = 1, sequences: int = 1):
        from deepdraft.models.v41_draft import DeviceDrafter
        from deepdraft.models.v41_loop import DeviceLoop, DeviceSettings

        drafter = DeviceDrafter(self.weights, self.caches) if width > 1 else None
        settings = DeviceSettings(self.caches.num_sequences, self.device)
        return DeviceLoop(self.step, settings, sequences=sequences, width=width, drafter=drafter)


def bits_equal(a, b) -> bool:
    import torch

    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def row_checks(pair: Pair, text: list[int], rows: int) -> dict:
    """The same text in steps of other sizes, beside other texts, and twice: equal bits?"""
    from deepdraft.proof.device_check import side_by_side, step_logits

    n = len(text)
    base = step_logits(pair.step, text, [8] * n, slot=0)
    result: dict[str, object] = {"tokens": n}
    wrong = []
    for size in (1, 2, 3, 4, 6, 8, 16, 64)[:rows]:
        again = step_logits(pair.step, text, [size] * n, slot=1)
        if not bits_equal(base, again):
            first = int((base != again).any(1).nonzero()[0])
            wrong.append({"size": size, "first": first})
    others = [list(reversed(text)), [t ^ 1 for t in text], [text[0]] * n]
    beside = side_by_side(pair.step, [others[0], text, others[1], others[2]], 4, [2, 3, 4, 5])
    if not bits_equal(base, beside[1]):
        first = int((base != beside[1]).any(1).nonzero()[0])
        wrong.append({"beside": 16, "first": first})
    result["wrong"] = wrong
    return result


def drafted_equals_plain(pair: Pair, prompt: list[int], count: int, temperature: float) -> dict:
    from deepdraft.proof.device_check import decode

    found = {}
    for width in (1, 6):
        loop = pair.loop(width)
        if pair.device == "cuda":
            import torch

            with torch.inference_mode():
                loop.capture()
        begin = time.perf_counter()
        tokens, kept = decode(loop, prompt, count, temperature=temperature, seed=7)
        found[width] = tokens, kept, time.perf_counter() - begin
    plain, drafted = found[1][0], found[6][0]
    histogram = [found[6][1].count(k) for k in range(6)]
    same = sum(a == b for a, b in zip(plain, drafted, strict=False))
    first = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    return {
        "equal": plain == drafted, "tokens": [len(plain), len(drafted)], "same": same,
        "first_difference": first, "accepted_histogram": histogram,
        "tokens_per_step": round(len(drafted) / max(1, len(found[6][1])), 3),
        "seconds": [round(found[w][2], 2) for w in (1, 6)],
    }  # fmt: skip


def child_golden(args: argparse.Namespace, results: Results) -> None:
    from deepdraft.proof import device_check

    dry = args.dry_run
    device = "cpu" if dry else "cuda"
    texts = json.loads((SET_A / "tokens.json").read_text())
    text = [int(t) for t in texts["prompt"]]
    if not dry:
        from deepdraft.proof.selftest_gpu import check_device_step

        results.stage("selftest", lambda: check_device_step("cuda"))
    pair = results.stage("load", lambda: Pair(SET_A / "checkpoint", device, 6, 1024))
    assert isinstance(pair, Pair)
    results.data["load"] = {"bytes": pair.weights.nbytes}
    n = 8 if dry else 48
    results.stage(
        "layers", lambda: device_check.compare_layers(pair.model, pair.step, text[:n]).summary()
    )
    consistency = json.loads((SET_A / "consistency.json").read_text())
    limits = consistency["layerwise_quant_vs_fp32_arithmetic"]
    results.data["layer_limits"] = {
        layer: {k: round(2 * v, 6) for k, v in limits[layer].items() if "attn" in k or "ffn" in k}
        for layer in limits
    }
    results.stage(
        "logits",
        lambda: device_check.compare_logits(pair.model, pair.step, text[: n * 2]).summary(),
    )
    results.stage("rows", lambda: row_checks(pair, text[: 8 if dry else 121], 1 if dry else 8))
    if not dry:
        long = (text * 6)[:600]
        results.stage(
            "accepts", lambda: {"wrong": device_check.forced_accepts(pair.step, long, slot=2)}
        )
    for temperature in (0.0, 1.0):
        results.stage(
            f"drafted_T{temperature:.0f}",
            lambda t=temperature: drafted_equals_plain(pair, text[:33], 3 if dry else 960, t),
        )
    if not dry:
        from deepdraft.kernels import runtime

        # Once more with kernels that start while their predecessors end.
        runtime.use_programmatic_launch(True)
        results.stage("rows_pdl", lambda: row_checks(pair, text[:121], 8))
        results.stage("drafted_T1_pdl", lambda: drafted_equals_plain(pair, text[:33], 960, 1.0))


def chunked_attention(window: int):
    """The torch attention in the kernels' order: chunks of 64 by themselves, window and entries
    apart, then combined. One of the two CPU orders of summation."""
    import torch

    from deepdraft.ops.attention import BLOCK_KEYS, chunked_sink_attention

    def padded(x, value):
        missing = -x.shape[1] % BLOCK_KEYS
        return torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing), value=value)

    def attend(q, keys, bias, scale):
        valid = (bias[:, 0] > -torch.inf).expand(keys.shape[0], -1)
        sink = bias[0, :, window].expand(q.shape[1])
        parts = [slice(0, window), slice(window + 1, None)]
        key = torch.cat([padded(keys[:, part], 0.0) for part in parts], 1)
        there = torch.cat([padded(valid[:, part], False) for part in parts], 1)
        return chunked_sink_attention(q, key, there, sink, scale)

    return attend


class Demo:
    """The bundled model: texts of the CPU's quant mode, forced through the device."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        from deepdraft.proof.prompts import load_prompts

        self.args, self.results = args, results
        self.pair = Pair(DEMO, "cpu" if args.dry_run else "cuda", 6, 2560)
        self.prompts = [list(p.ids) for p in load_prompts(None, self.pair.tokenizer)]
        self.texts: list[list[int]] = []

    def write_texts(self, count: int, length: int = 128, batch: int = 20) -> dict:
        """Prompts and what the CPU goes on with, greedily: texts of up to `length` tokens."""
        model, end = self.pair.model, self.pair.args.eos_token_id
        pool = model.new_pool(batch, length + 1, slack=64)
        starts = [self.prompts[n % len(self.prompts)][: 24 + 11 * n % 72] for n in range(count)]
        for at in range(0, count, batch):
            texts = starts[at : at + batch]
            states = [pool.open() for _ in texts]
            for text, state in zip(texts, states, strict=True):
                text.append(int(model.prefill(state, text).logits[-1].argmax()))
            live = list(range(len(texts)))
            while live := [i for i in live if len(texts[i]) < length and texts[i][-1] != end]:
                out = model.step([(states[i], texts[i][-1:]) for i in live]).logits
                for i, token in zip(live, out.argmax(1).tolist(), strict=True):
                    texts[i].append(token)
            for state in states:
                pool.close(state)
            self.texts += texts
        return {"texts": len(self.texts), "tokens": sum(map(len, self.texts))}

    def other_cpu(self, dtype):
        """The CPU's quant mode in the other order of summation."""
        import dataclasses

        from deepdraft.checkpoint.reader import Checkpoint
        from deepdraft.engine.runner import checked_token_map
        from deepdraft.models.deepseek_v41 import DeepseekV41
        from deepdraft.models.layers import make_numerics

        pair, checkpoint = self.pair, Checkpoint.open(DEMO)
        numerics = dataclasses.replace(
            make_numerics("quant", dtype), attention=chunked_attention(pair.args.sliding_window)
        )
        token_map = checked_token_map(checkpoint, pair.tokenizer)
        return DeepseekV41(pair.args, checkpoint, token_map, numerics=numerics, drafter=False)

    def forced(self) -> dict:
        """Device, CPU and CPU in the other order on the same texts, teacher-forced."""
        import torch

        from deepdraft.proof.device_check import step_logits

        other = self.other_cpu(torch.float64)
        tally = {name: Tally() for name in ("device vs cpu", "device vs other", "other vs cpu")}
        gaps = []
        for text in self.texts:
            if self.results.left() < 15:
                break
            device = step_logits(self.pair.step, text, [16] * len(text)).double().cpu()
            cpu, second = (
                m.prefill(m.new_pool(1, 160, slack=64).open(), text, logits="all").logits.double()
                for m in (self.pair.model, other)
            )
            tally["device vs cpu"].add(device, cpu)
            tally["device vs other"].add(device, second)
            tally["other vs cpu"].add(second, cpu)
            gaps.append((second - cpu).abs().flatten()[::29])
        gap = torch.cat(gaps)
        noise = float(gap.kthvalue(int(0.999 * gap.numel())).values)
        return {"logit_noise_p999": round(noise, 4)} | {
            name: t.summary(noise) for name, t in tally.items()
        }


class Tally:
    """Top-1 agreement of two models on the same positions."""

    def __init__(self) -> None:
        self.positions = self.equal = 0
        self.margins: list[float] = []
        self.difference = self.size = 0.0

    def add(self, got, want) -> None:
        mine, theirs = got.argmax(1), want.argmax(1)
        self.positions += len(mine)
        self.equal += int((mine == theirs).sum())
        for row in (mine != theirs).nonzero().flatten().tolist():
            self.margins.append(float(want[row, theirs[row]] - want[row, mine[row]]))
        self.difference += float((got - want).square().sum())
        self.size += float(want.square().sum())

    def summary(self, noise: float) -> dict:
        return {
            "positions": self.positions, "top1_equal": self.equal,
            "share": round(self.equal / max(1, self.positions), 6),
            "relative_l2": round((self.difference / max(self.size, 1e-300)) ** 0.5, 6),
            "margins_beyond_noise": sum(m > noise for m in self.margins),
            "largest_margins": [round(m, 3) for m in sorted(self.margins, reverse=True)[:8]],
        }  # fmt: skip


def served(device: str, count: int) -> dict:
    """The bundled model behind the engine: texts with and without running ahead, alone and four at
    a time; greedy, sampled, and (2) sampled with top-p and a penalty."""
    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.engine.engine import Engine
    from deepdraft.engine.gpu_runner import GpuRunner
    from deepdraft.engine.speculate import Speculation
    from deepdraft.proof.prompts import load_prompts
    from deepdraft.text.tokenizer import Tokenizer
    from deepdraft.types import GenerateRequest, SamplingParams

    tokenizer, checkpoint = Tokenizer.load(DEMO), Checkpoint.open(DEMO)
    prompts = [p.ids for p in load_prompts(None, tokenizer)][:8]

    def run(*, ahead: bool, at_once: int) -> tuple[list[tuple[int, ...]], float, dict]:
        runner = GpuRunner.from_checkpoint(
            checkpoint, tokenizer, max_context=1024, num_sequences=4, drafter=True, device=device
        )
        engine = Engine(runner, speculation=Speculation())
        if not ahead:
            engine._ahead = None
        engine.start()
        engine.warm_up()
        list(engine.generate(ask("first", prompts[0], 0)))
        texts: list[tuple[int, ...]] = []
        begin = time.perf_counter()
        jobs = [(i, p, t) for t in (0, 1, 2) for i, p in enumerate(prompts)]
        for first in range(0, len(jobs), at_once):
            some = jobs[first : first + at_once]
            streams = [engine.generate(ask(f"{t}-{i}", p, t)) for i, p, t in some]
            texts += [tuple(x for e in stream for x in e.token_ids) for stream in streams]
        took = time.perf_counter() - begin
        stats = engine.stats()
        engine.close()
        return texts, sum(map(len, texts)) / took, stats

    def ask(name: str, prompt: tuple[int, ...], temperature: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=name, prompt_ids=tuple(prompt[:120]), max_new_tokens=count,
            sampling=SamplingParams(
                temperature=float(min(temperature, 1)), seed=3,
                top_p=0.95 if temperature == 2 else 1.0,
                frequency_penalty=0.3 if temperature == 2 else 0.0,
            ),
        )  # fmt: skip

    results: dict = {}
    wanted = None
    for ahead in (False, True):
        for at_once in (1, 4):
            texts, rate, stats = run(ahead=ahead, at_once=at_once)
            wanted = wanted or texts
            name = f"{'ahead' if ahead else 'host'}, {at_once} at once"
            results[name] = {
                "tok_s": round(rate, 1),
                "same_text": [a == b for a, b in zip(texts, wanted, strict=True)].count(True),
                "of": len(wanted),
                "steps": stats.get("decode_steps"),
            }
    return results


def child_demo(args: argparse.Namespace, results: Results) -> None:
    """The bundled model against the CPU."""
    demo = Demo(args, results)
    dry = args.dry_run
    long = max(demo.prompts, key=len)[: 12 if dry else 60]
    for temperature in (0.0, 1.0):
        results.stage(
            f"drafted_T{temperature:.0f}",
            lambda t=temperature: drafted_equals_plain(demo.pair, long, 3 if dry else 2000, t),
        )
    if not dry:
        results.stage("texts", lambda: demo.write_texts(args.prompts), needs=40)
        results.stage("forced", demo.forced, needs=30)
        results.stage("served", lambda: served("cuda", 200), needs=30)
