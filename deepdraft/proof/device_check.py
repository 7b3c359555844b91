"""The kernels' step against the torch reference: layer by layer, end to end, row by row.

Owns: teacher-forced comparison of a `DeviceStep` with `DeepseekV41` in quant numerics; bitwise
comparison of one text cut into steps in different ways. Runs on a GPU, and on tiny models in
Triton's interpreter.
Knows nothing of: files, printing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepdraft.kernels.runtime import padded_rows
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.v41_buffers import RowInputs
from deepdraft.models.v41_loop import RUNNING, DeviceLoop
from deepdraft.models.v41_step import DeviceStep, Flow


@dataclass(slots=True)
class Error:
    """Relative L2 over all rows seen."""

    difference: float = 0.0
    size: float = 0.0

    def add(self, got: Tensor, want: Tensor) -> None:
        """Rows of the kernels and of the reference."""
        a, b = got.detach().double().cpu(), want.detach().double().cpu()
        self.difference += float((a - b).square().sum())
        self.size += float(b.square().sum())

    @property
    def relative(self) -> float:
        return (self.difference / max(self.size, 1e-300)) ** 0.5


@dataclass(slots=True)
class Compared:
    """Results of a teacher-forced text."""

    layers: dict[int, dict[str, Error]] = field(default_factory=dict)
    logits: Error = field(default_factory=Error)
    positions: int = 0
    top1_equal: int = 0
    margins: list[float] = field(default_factory=list)
    """Reference's margin, its largest logit less the kernels' choice, where they differ."""
    overlap: dict[int, list[float]] = field(default_factory=dict)
    """Share of the reference's selected entries, per index layer."""

    def summary(self) -> dict[str, object]:
        """As plain data."""
        return {
            "positions": self.positions,
            "top1_equal": self.top1_equal,
            "logits": round(self.logits.relative, 6),
            "margins": [round(m, 5) for m in self.margins[:50]],
            "layers": {
                layer: {name: round(e.relative, 6) for name, e in errors.items()}
                for layer, errors in self.layers.items()
            },
            "overlap": {k: round(sum(v) / len(v), 5) for k, v in self.overlap.items()},
        }


def _chunks(text: Sequence[int], size: int) -> Iterator[tuple[int, list[int]]]:
    for at in range(0, len(text), size):
        yield at, list(text[at : at + size])


def _padded(x: Tensor, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(rows, *x.shape[1:], dtype=dtype, device=device)
    out[: x.shape[0]] = x.to(device, dtype)
    return out


@torch.inference_mode()
def compare_layers(
    model: DeepseekV41, step: DeviceStep, text: Sequence[int], *, chunk: int = 8, slot: int = 0
) -> Compared:
    """Each layer fed with what the reference gave that layer; selections come from our own run.

    The reference runs the text in steps of `chunk` rows in quant numerics.
    """
    result = Compared()
    device = step.weights.device
    pool = model.new_pool(1, len(text), slack=chunk)
    state = pool.open()
    inputs = RowInputs(chunk, device)
    seen: dict[str, Tensor] = {}
    step.observer = lambda name, value: seen.__setitem__(name, value)
    try:
        for at, ids in _chunks(text, chunk):
            record: dict[str, dict[str, Tensor]] = {}
            model.step([(state, ids)], logits="none", record=record)
            inputs.set([(slot, at, ids)])
            places = step.place(inputs)
            n, rows = len(ids), padded_rows(chunk)
            for layer in range(model.args.num_hidden_layers):
                want = record[f"L{layer}"]
                x = _padded(want["stream_in"][:n], rows, device, torch.bfloat16)
                pre = _padded(want["premix_in"][:n].flatten(1), rows, device, torch.float32)
                seen.clear()
                flow = Flow(x, pre=pre)
                step.run_block(layer, flow, places)
                got = {name.split(".")[1]: value[:n] for name, value in seen.items()}
                got |= _ffn_out(flow, n)
                errors = result.layers.setdefault(layer, {})
                for name in ("attn_in", "attn_o", "attn_out", "ffn_in", "ffn_out", "stream_out"):
                    error = errors.setdefault(name, Error())
                    error.add(got[name].flatten(1), want[name][:n].flatten(1))
                if layer in places.selected:
                    _note_overlap(result, layer, places.selected[layer].entries, want["topk"], n)
    finally:
        step.observer = None
        pool.close(state)
    return result


def _ffn_out(flow: Flow, n: int) -> dict[str, Tensor]:
    assert flow.y is not None and flow.shared is not None
    total = flow.y[:n, 0].float()
    for k in range(1, flow.y.shape[1]):
        total += flow.y[:n, k].float()
    total = (total + flow.shared[:n].float()).bfloat16()
    flow.finish()
    return {"ffn_out": total, "stream_out": flow.x[:n]}


def _note_overlap(result: Compared, layer: int, got: Tensor, want: Tensor, n: int) -> None:
    for ours, theirs in zip(got[:n].tolist(), want[:n].tolist(), strict=True):
        entries = {e for e in theirs if e >= 0}
        if entries:
            shared = len(entries & set(ours)) / len(entries)
            result.overlap.setdefault(layer, []).append(shared)


@torch.inference_mode()
def compare_logits(
    model: DeepseekV41, step: DeviceStep, text: Sequence[int], *, chunk: int = 8, slot: int = 0
) -> Compared:
    """The text teacher-forced through both, from embedding to logits."""
    result = Compared()
    got = step_logits(step, text, [chunk] * -(-len(text) // chunk), slot=slot).cpu()
    pool = model.new_pool(1, len(text), slack=chunk)
    state = pool.open()
    for at, ids in _chunks(text, chunk):
        want = model.step([(state, ids)]).logits
        assert want is not None
        ours = got[at : at + len(ids)]
        result.logits.add(ours, want)
        mine, theirs = ours.argmax(1), want.argmax(1)
        result.positions += len(ids)
        result.top1_equal += int((mine == theirs).sum())
        for row in (mine != theirs).nonzero().flatten().tolist():
            result.margins.append(float(want[row, theirs[row]] - want[row, mine[row]]))
    pool.close(state)
    return result


@torch.inference_mode()
def step_logits(
    step: DeviceStep, text: Sequence[int], sizes: Sequence[int], *, slot: int = 0
) -> Tensor:
    """Logits [N, V] of a text in steps of these sizes, from an empty sequence."""
    parts, at = [], 0
    for size in sizes:
        ids = list(text[at : at + size])
        if not ids:
            break
        inputs = RowInputs(len(ids), step.weights.device)
        inputs.set([(slot, at, ids)])
        parts.append(step.run(inputs).logits[: len(ids)].clone())
        at += len(ids)
    return torch.cat(parts)


@torch.inference_mode()
def forced_accepts(
    step: DeviceStep,
    text: Sequence[int],
    *,
    first: int = 0,
    slot: int = 0,
    width: int = 6,
    begin_with: int = 0,
) -> list[str]:
    """Verification of drafts that are right up to a place and wrong behind it, 0 to width - 1 right
    ones in turn, from position `first` on; what differs from plain steps of the same text in any
    bit of the logits of a row that counts.

    What lies before `first` is what the caches hold: the text must be short enough that its rows
    leave the window before `first` in the rings. `begin_with`: right drafts of the first step.
    """
    spare = step.caches.ring - step.args.sliding_window
    assert not first or len(text) + width <= spare, f"{len(text)=} overwrites the window before"
    inputs = RowInputs(width, step.weights.device)
    plain = []
    for at, token in enumerate(text):
        inputs.set([(slot, first + at, [token])])
        plain.append(step.run(inputs).logits[0].clone())
    wrong: list[str] = []
    at, number = 0, begin_with * 5
    while at < len(text):
        right = number * 5 % width  # every count at odd and even positions
        ids = list(text[at : at + right + 1])
        drafts = [(t + 1 + i) % step.args.vocab_size for i, t in enumerate(text[at : at + width])]
        rows = ids + drafts[: width - len(ids)]
        inputs.set([(slot, first + at, rows)])
        logits = step.run(inputs).logits
        for i in range(len(ids)):
            if not torch.equal(logits[i], plain[at + i]):
                wrong.append(f"row {i} at position {first + at}, {right} right drafts")
        at += len(ids)
        number += 1
    return wrong


@torch.inference_mode()
def side_by_side(
    step: DeviceStep, texts: Sequence[Sequence[int]], rows_each: int, slots: Sequence[int]
) -> list[Tensor]:
    """Logits of several texts of one length, `rows_each` rows of each in every step."""
    parts: list[list[Tensor]] = [[] for _ in texts]
    inputs = RowInputs(rows_each * len(texts), step.weights.device)
    for at in range(0, len(texts[0]), rows_each):
        pieces = [list(text[at : at + rows_each]) for text in texts]
        inputs.set([(slot, at, ids) for slot, ids in zip(slots, pieces, strict=True)])
        logits, first = step.run(inputs).logits, 0
        for part, ids in zip(parts, pieces, strict=True):
            part.append(logits[first : first + len(ids)].clone())
            first += len(ids)
    return [torch.cat(part) for part in parts]


@torch.inference_mode()
def decode(
    loop: DeviceLoop,
    prompt: Sequence[int],
    count: int,
    *,
    slot: int = 0,
    chunk: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """`count` tokens behind a prompt, from an empty sequence, and how many drafts each step kept.

    The prompt's last token opens the loop, so plain and drafted decoding start alike. The host
    reads one step late, as a server would.
    """
    step = loop.step
    inputs = RowInputs(chunk, step.weights.device)
    for at, ids in _chunks(prompt[:-1], chunk):
        inputs.set([(slot, at, ids)])
        out = step.run(inputs)
        if loop.drafter is not None:
            loop.drafter.feed_output(out)
    loop.settings.begin(slot, max_tokens=count, temperature=temperature, seed=seed)
    loop.set_slots([slot])
    loop.begin(0, prompt[-1], len(prompt) - 1)
    tokens: list[int] = []
    kept: list[int] = []
    state = RUNNING
    loop.launch()
    while state == RUNNING:
        loop.launch()
        if step.weights.device.type == "cuda":
            torch.cuda.synchronize()
        while loop.num_waiting and state == RUNNING:
            report = loop.read()[0]
            tokens.extend(report.token_ids)
            kept.append(report.num_accepted)
            state = report.state
    while loop.num_waiting:
        late = loop.read()[0]
        assert not late.token_ids, "a step behind the end emitted tokens"
    return tokens, kept
