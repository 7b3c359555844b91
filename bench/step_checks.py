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
            self.args, num_sequences=slots, max_tokens=max_tokens, spare=16, device=device
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
    for size in (1, 2, 3, 4, 6, 8, 16)[:rows]:
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
    results.stage("rows", lambda: row_checks(pair, text[: 8 if dry else 121], 1 if dry else 7))
    for temperature in (0.0, 1.0):
        results.stage(
            f"drafted_T{temperature:.0f}",
            lambda t=temperature: drafted_equals_plain(pair, text[:33], 3 if dry else 960, t),
        )


class Demo:
    """The bundled model: free texts on the CPU, the same texts forced through the device."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        from deepdraft.proof.prompts import load_prompts

        self.args, self.results = args, results
        self.pair = Pair(DEMO, "cpu" if args.dry_run else "cuda", 6, 2560)
        self.prompts = [list(p.ids) for p in load_prompts(None, self.pair.tokenizer)]

    def text(self, prompt: list[int], count: int) -> list[int]:
        """A prompt and what the CPU's quant mode goes on with (sampled, seeded): `count` tokens."""
        import torch

        model = self.pair.model
        pool = model.new_pool(1, count + 1, slack=16)
        state = pool.open()
        generator = torch.Generator().manual_seed(len(prompt))
        text = list(prompt[:count])
        logits = model.prefill(state, text).logits[-1]
        while len(text) < count:
            law = torch.softmax(logits.float(), -1)
            token = int(torch.multinomial(law, 1, generator=generator))
            text.append(token)
            if token == self.pair.args.eos_token_id:
                break
            logits = model.step([(state, [token])]).logits[-1]
        pool.close(state)
        return text

    def forced(self) -> dict:
        from deepdraft.proof.device_check import Error, compare_logits

        equal = positions = done = 0
        margins: list[float] = []
        error = Error()
        for number in range(self.args.prompts):
            prompt = self.prompts[number % len(self.prompts)][: 32 + 7 * number % 64]
            if self.results.left() < 20:
                break
            found = compare_logits(
                self.pair.model, self.pair.step, self.text(prompt, 128), chunk=16
            )
            equal += found.top1_equal
            positions += found.positions
            margins += found.margins
            error.difference += found.logits.difference
            error.size += found.logits.size
            done += 1
        return {
            "prompts": done, "positions": positions, "top1_equal": equal,
            "share": round(equal / max(1, positions), 6), "relative_l2": round(error.relative, 6),
            "margins": sorted((round(m, 4) for m in margins), reverse=True)[:60],
        }  # fmt: skip

    def noise(self) -> dict:
        """The CPU's own noise: the same quant arithmetic with float32 and with float64 sums."""
        import torch

        from deepdraft.checkpoint.reader import Checkpoint
        from deepdraft.engine.runner import checked_token_map
        from deepdraft.models.deepseek_v41 import DeepseekV41

        pair, checkpoint = self.pair, Checkpoint.open(DEMO)
        token_map = checked_token_map(checkpoint, pair.tokenizer)
        other = DeepseekV41(pair.args, checkpoint, token_map, numerics="quant", dtype=torch.float64)
        gaps, equal, positions = [], 0, 0
        for prompt in self.prompts[:20]:
            text, rows = prompt[:96], []
            for model in (pair.model, other):
                state = model.new_pool(1, 128, slack=16).open()
                rows.append(model.prefill(state, text, logits="all").logits.double())
            gaps.append((rows[0] - rows[1]).abs().flatten())
            equal += int((rows[0].argmax(1) == rows[1].argmax(1)).sum())
            positions += len(text)
        gap = torch.cat(gaps)
        kept = gap[:: max(1, gap.numel() // 2_000_000)]
        return {
            "positions": positions, "top1_equal": equal,
            "logit_difference_p999": round(float(torch.quantile(kept, 0.999)), 5),
        }  # fmt: skip


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
        results.stage("noise", demo.noise, needs=30)
        results.stage("forced", demo.forced, needs=30)
