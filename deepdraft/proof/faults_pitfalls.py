"""The named pitfalls beside the study's faults: each planted in a checkpoint or in the engine.

Owns: planting them, and which cause must come first. Knows nothing of: how causes are found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.arch import Router
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.models import experts
from deepdraft.proof.doctor.run import examine
from deepdraft.proof.faults import turned_rows
from deepdraft.proof.native import decided_text
from deepdraft.proof.parity.run import Result, compare
from deepdraft.proof.parity.sources import from_native
from deepdraft.proof.parity.target import Target
from deepdraft.proof.tiny_tokenizer import write_tokenizer
from deepdraft.proof.tiny_write import write_tiny

_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Pitfall:
    """One mistake. `run` plants it in a new directory and returns the causes that are named."""

    name: str
    causes: tuple[str, ...]
    """Beginnings of causes that are right."""
    run: Callable[[Path], tuple[str, ...]]

    def named(self, found: tuple[str, ...]) -> bool:
        """Whether the first cause is a right one."""
        return bool(found) and found[0].startswith(self.causes)


def _config(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(values))


def _tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    kept = {name: t.contiguous() for name, t in tensors.items()}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def _doctor(path: Path) -> tuple[str, ...]:
    return tuple(f.cause for f in examine(path).findings)


def _parity(clean: Path, target: Target) -> tuple[str, ...]:
    ids = decided_text(Checkpoint.open(clean), _TOKENS)
    trace = from_native(clean, ids, greedy=0)
    result = Result(str(clean), trace.name, "", len(ids))
    compare(result, target, trace)
    return tuple(f.cause for f in result.findings)


def _target(path: Path) -> Target:
    return Target.of(Checkpoint.open(path), read_config(path / "config.json"))


def _numbers(bytes_: Tensor) -> Tensor:
    return bytes_.view(torch.uint8).float()


def _exponents_stored(kind: str) -> Callable[[Path], tuple[str, ...]]:
    def run(root: Path) -> tuple[str, ...]:
        path = write_tiny(root / "model", kind, storage="published")

        def change(tensors: dict[str, Tensor]) -> None:
            for name, t in list(tensors.items()):
                if name.endswith("weight_scale_inv"):
                    tensors[name] = (t.log2().round() + 127).clamp(64, 192)
                elif name.endswith(".scale") and ".experts." not in name:
                    tensors[name] = _numbers(t)

        _tensors(path, change)
        return _doctor(path)

    return run


def _exponents_read(root: Path) -> tuple[str, ...]:
    path = write_tiny(root / "model", "v4", storage="published")
    target = _target(path)
    checkpoint = target.checkpoint
    wrong: dict[str, Tensor] = {}
    for name, entry in checkpoint.table.items():
        if entry.format != "fp8_block":
            continue
        w, scales = checkpoint.tensor(name), checkpoint.packed(name).scales
        assert scales is not None
        ratio = scales.float() / torch.exp2(scales.float() - 127)
        ratio = ratio.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wrong[name] = w * ratio[: w.shape[0], : w.shape[1]]
    return _parity(path, target.with_tensors(wrong))


def _draft_dropped(*keep: str) -> Callable[[Path], tuple[str, ...]]:
    def run(root: Path) -> tuple[str, ...]:
        path = write_tiny(root / "model", "v3", mtp=True)

        def change(tensors: dict[str, Tensor]) -> None:
            for name in list(tensors):
                if name.startswith("model.layers.3.") and not name.endswith(keep):
                    del tensors[name]

        _tensors(path, change)
        return _doctor(path)

    return run


def _wrong_key(kind: str, **changes: Any) -> Callable[[Path], tuple[str, ...]]:
    def run(root: Path) -> tuple[str, ...]:
        path = write_tiny(root / "model", kind)
        _config(path, **changes)
        return _doctor(path)

    return run


def _index_layout(root: Path) -> tuple[str, ...]:
    clean = write_tiny(root / "clean", "v32")
    path = write_tiny(root / "model", "v32")
    args = Checkpoint.open(path).args
    _tensors(path, lambda tensors: turned_rows("indexer.wq_b", "indexer.wk.")(tensors, args))
    return _parity(clean, _target(path))


def _no_shared_expert(root: Path) -> tuple[str, ...]:
    path = write_tiny(root / "model", "v3")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "shared_experts" in n]:
            del tensors[name]

    _tensors(path, change)
    return _doctor(path)


def _other_tokenizer(size: int) -> Callable[[Path], tuple[str, ...]]:
    def run(root: Path) -> tuple[str, ...]:
        path = write_tiny(root / "model", "v2")
        write_tokenizer(path, size)
        return _doctor(path)

    return run


def _overflow(root: Path) -> tuple[str, ...]:
    path = write_tiny(root / "model", "llama")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if "up_proj" in name:
                tensors[name] = tensors[name] * 2.0**18
            if "down_proj" in name:
                tensors[name] = tensors[name] * 2.0**-18

    _tensors(path, change)
    return _doctor(path)


@contextmanager
def bias_in_weights(biases: Tensor) -> Generator[None]:
    """While it lasts, our engine adds a selection bias to the experts' weights, too."""
    right = experts.expert_weights

    def wrong(scores: Tensor, picks: Tensor, router: Router) -> Tensor:
        return right(scores + biases, picks, router)

    experts.expert_weights = wrong
    try:
        yield
    finally:
        experts.expert_weights = right


def _bias_leaks(root: Path) -> tuple[str, ...]:
    path = write_tiny(root / "model", "v3")
    target = _target(path)
    ids = decided_text(target.checkpoint, _TOKENS)
    trace = from_native(path, ids, greedy=0)
    # One layer's bias stands for all: the first wrong layer is where it is looked for.
    bias = target.checkpoint.tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    result = Result(str(path), trace.name, "", len(ids))
    with bias_in_weights(bias):
        compare(result, target, trace)
    return tuple(f.cause for f in result.findings)


_SHARED = "model.layers.*.mlp.shared_experts"

PITFALLS: tuple[Pitfall, ...] = (
    Pitfall("E8M0 stored as numbers (v4)", ("layers.",), _exponents_stored("v4")),
    Pitfall("E8M0 stored as numbers (v3)", ("model.layers.",), _exponents_stored("v3")),
    Pitfall("E8M0 read as integers (engine)", ("layers.*.",), _exponents_read),
    Pitfall("draft tensors dropped", ("model.layers.3.*",), _draft_dropped("nothing")),
    Pitfall(
        "draft tensors dropped in part", ("model.layers.*.mlp",), _draft_dropped("norm.weight")
    ),
    Pitfall(
        "kv heads 2 -> 1", ("num_key_value_heads",), _wrong_key("llama", num_key_value_heads=1)
    ),
    Pitfall(
        "kv heads 2 -> 4", ("num_key_value_heads",), _wrong_key("llama", num_key_value_heads=4)
    ),
    Pitfall("indexer's rotary layout", ("model.layers.*.self_attn.indexer.",), _index_layout),
    Pitfall(
        "bias in weights (engine)", ("model.layers.*.mlp.gate.e_score_correction",), _bias_leaks
    ),
    Pitfall("shared expert missing", (_SHARED,), _no_shared_expert),
    Pitfall("tokenizer of another vocabulary, larger", ("vocab_size",), _other_tokenizer(600)),
    Pitfall("tokenizer of another vocabulary, smaller", ("vocab_size",), _other_tokenizer(300)),
    Pitfall(
        "first_k_dense one too many",
        ("first_k_dense_replace",),
        _wrong_key("v3", first_k_dense_replace=2),
    ),
    Pitfall(
        "first_k_dense one too few",
        ("first_k_dense_replace",),
        _wrong_key("v3", first_k_dense_replace=0),
    ),
    Pitfall("float16 overflow", ("float16", "model.layers.*.mlp.up_proj"), _overflow),
)
