"""Dynamic checks: the native engine runs the checkpoint, against itself.

Owns: text through the tokenizer and back; values that leave float16 or are not finite, layer by
layer; the same bits alone, in a batch, in chunks and token by token.
Knows nothing of: references (`deepdraft parity`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.errors import CheckpointError
from deepdraft.proof.doctor.finding import Finding
from deepdraft.proof.doctor.values import FLOAT16_MAX
from deepdraft.proof.native import load_model, probe_text
from deepdraft.text.tokenizer import Tokenizer

_SAMPLES = (
    "The quick brown fox, 3.14 and 42.",
    "def f(x):\n\treturn {'a': [x, -1]}  # naïve\n",
    "你好，世界 🙂",
)
_CHUNK = 7
_PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.mul")
"""What half precision would hold as a value; masks and memory not yet written are none."""


def dynamic_checks(checkpoint: Checkpoint, *, tokens: int = 96) -> list[Finding]:
    """Loads the model in float32 and runs `tokens` tokens several times."""
    findings: list[Finding] = []
    try:
        model = load_model(checkpoint, checkpoint.args, checkpoint)
    except CheckpointError as error:
        cause = error.message.split(" ", 1)[0]
        return [Finding("dynamic", cause, error.message, "", "correct the checkpoint")]
    ids = probe_text(checkpoint.args, tokens)
    findings += _ranges(model, ids)
    if not findings:
        findings += _cutting(model, ids)
    return findings


def tokenizer_checks(path: Path) -> Iterator[Finding]:
    """Loads the tokenizer and sends text through it and back."""
    fix = "fetch the tokenizer.json that was published with the weights"
    try:
        tokenizer = Tokenizer.load(path)
    except CheckpointError as error:
        yield Finding("tokenizer", "tokenizer.json", error.message, "", fix)
        return
    for text in _SAMPLES:
        back = tokenizer.decode(tokenizer.encode_text(text))
        if back != text:
            yield Finding(
                "tokenizer",
                "tokenizer.json",
                "text does not come back from the tokenizer",
                f"{text!r} became {back!r}",
                fix,
            )
            return


class Ranges(TorchDispatchMode):
    """Largest finite magnitude and first NaN of all products, by the layer that is running."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__()
        self.record = record
        self.largest: dict[str, tuple[float, str]] = {}
        self.not_a_number: dict[str, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs the operation and looks at what it gives."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                self._see(str(func), x)
        return out

    def _see(self, name: str, x: Tensor) -> None:
        layer = next(reversed(self.record), "embedding")
        if not name.startswith(_PRODUCTS):
            return
        finite = torch.nan_to_num(x.detach(), nan=0.0, posinf=0.0, neginf=0.0)
        top = float(finite.abs().max())
        if top > self.largest.get(layer, (0.0, ""))[0]:
            self.largest[layer] = top, name
        if bool(torch.isnan(x).any()):
            self.not_a_number.setdefault(layer, name)


def _ranges(model: Any, ids: list[int]) -> Iterator[Finding]:
    record: dict[str, Any] = {}
    sequence = model.new_pool(1, len(ids), slack=len(ids)).open()
    with Ranges(record) as ranges:
        model.step([(sequence, ids)], record=record)
    for layer, operation in ranges.not_a_number.items():
        yield Finding(
            "dynamic",
            layer,
            f"{layer} gives values that are not numbers in float32",
            f"first in {operation}",
            "look for damaged weights of this layer; run doctor's value checks",
        )
        return
    over = [(layer, *top) for layer, top in ranges.largest.items() if top[0] > FLOAT16_MAX]
    if over:
        layer, top, operation = over[0]
        yield Finding(
            "dynamic",
            "float16",
            f"activations leave float16 in {', '.join(name for name, *_ in over)}: the model "
            "overflows there in float16",
            f"{layer} reaches {top:.4g} in {operation}, float16 ends at {FLOAT16_MAX:g}",
            "run it in bfloat16 or float32",
            "warning",
        )


def _cutting(model: Any, ids: list[int]) -> Iterator[Finding]:
    """Alone, in a batch, in chunks, token by token: the same bits (docs/numerics.md)."""
    pool = model.new_pool(5, len(ids), slack=len(ids))
    alone, first, second, chunks, steps = (pool.open() for _ in range(5))
    whole = model.step([(alone, ids)]).logits.clone()
    both = model.step([(first, ids[::-1]), (second, ids)]).logits[len(ids) :]
    cut = torch.cat(
        [model.step([(chunks, ids[at : at + _CHUNK])]).logits for at in range(0, len(ids), _CHUNK)]
    )
    single = torch.cat([model.step([(steps, [token])]).logits for token in ids])
    for other, what in ((both, "in a batch"), (cut, "in chunks"), (single, "token by token")):
        if not torch.equal(whole, other):
            row = int((whole != other).any(-1).nonzero()[0])
            yield Finding(
                "dynamic",
                "engine",
                f"logits {what} differ from those of one prefill",
                f"first at position {row}",
                "a defect of deepdraft on this machine: run `deepdraft selftest` and report it",
            )
