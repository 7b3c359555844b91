"""Our side: the native engine with a spec and a source of weights, which may be repaired ones.

Owns: a source of weights with some tensors replaced, running a text, a greedy continuation.
Knows nothing of: references, causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import DeepdraftError
from deepdraft.models.layers import WeightSource
from deepdraft.proof.native import load_model
from deepdraft.proof.parity.reference import Trace

_SLACK = 512
_KEPT = ("stream_in", "attn_out", "ffn_out", "experts", "weights", "scores_router")
Change = Callable[[Tensor], Tensor]


class Changed:
    """A source of weights in which some tensors are others."""

    def __init__(self, source: Any, tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
        self.source, self.tensors = source, tensors
        self.table = getattr(source, "table", {})

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The changed tensor, or the source's."""
        if name not in self.tensors:
            return self.source.tensor(name, dtype)
        made = self.tensors[name]
        x = made if isinstance(made, Tensor) else made()
        return x.to(dtype) if x.is_floating_point() else x

    def packed(self, name: str) -> Any:
        """Stored bytes, of unchanged tensors."""
        return self.source.packed(name)


@dataclass(frozen=True)
class Target:
    """A model as an engine would run it: what it believes of the configuration, its weights."""

    checkpoint: Checkpoint
    spec: ModelSpec
    source: WeightSource
    patches: dict[str, Any] = field(default_factory=dict)
    numerics: str = "exact"

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: dict[str, Any]) -> Target:
        """The checkpoint as it is."""
        return cls(checkpoint, ModelSpec.of(config), checkpoint)

    def with_spec(self, spec: ModelSpec) -> Target:
        """The same weights under another spec."""
        return Target(self.checkpoint, spec, self.source)

    def with_tensors(self, tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> Target:
        """The same spec with some tensors replaced."""
        return Target(self.checkpoint, self.spec, Changed(self.source, tensors))

    def model(self) -> Any:
        """The loaded model, computing in float32."""
        return load_model(self.checkpoint, self.spec.args, self.source, numerics=self.numerics)

    def names(self) -> list[str]:
        """Weights that the model may read, by published name."""
        return [
            name
            for name, entry in self.checkpoint.table.items()
            if entry.format not in ("scale", "block_scale") and entry.module in ("text", "drafter")
        ]


def run(target: Target, ids: list[int], *, greedy: int = 0, layers: bool = False) -> Trace:
    """One pass over `ids` and a greedy continuation. Raises what loading or running raises."""
    model = target.model()
    pool = model.new_pool(1, len(ids) + greedy, slack=_SLACK)
    sequence = pool.open()
    rows, records = [], []
    for at in range(0, len(ids), _SLACK):
        record: dict[str, dict[str, Tensor]] | None = {} if layers else None
        part = ids[at : at + _SLACK]
        rows.append(model.step([(sequence, part)], record=record).logits.clone())
        if record is not None:
            records.append((len(part), record))
    trace = Trace(name="deepdraft native", ids=ids, logits=torch.cat(rows).float())
    trace.layers = _join(records)
    tokens, chosen, last = [], [], trace.logits[-1]
    for _ in range(greedy):
        chosen.append(last)
        tokens.append(int(last.argmax()))
        if len(tokens) < greedy:
            last = model.step([(sequence, tokens[-1:])]).logits[0].float().clone()
    trace.greedy = tokens
    trace.greedy_logits = torch.stack(chosen) if chosen else None
    return trace


def _join(records: list[tuple[int, dict[str, dict[str, Tensor]]]]) -> dict[str, dict[str, Tensor]]:
    """Records of consecutive steps as one; a step of one row holds its copy, too."""
    joined: dict[str, dict[str, Tensor]] = {}
    for layer in records[0][1] if records else ():
        notes = [record[layer] for _, record in records]
        counts = [count for count, _ in records]
        joined[layer] = {
            key: torch.cat([n[key][:c] for n, c in zip(notes, counts, strict=True)])
            for key in _KEPT
            if all(key in n for n in notes)
        }
    return joined


def try_run(target: Target, ids: list[int], **options: Any) -> Trace | str:
    """`run`, or the message of what failed."""
    try:
        return run(target, ids, **options)
    except DeepdraftError as error:
        return error.message
    except (RuntimeError, AssertionError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
