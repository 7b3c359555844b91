"""Where references come from: transformers in another process, golden data, our own engine, others.

Owns: running the child, reading what it wrote, bringing its weights to published names.
Knows nothing of: comparing. A wire reference is `wire`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.checkpoint.spec_maps import expert_stacks, transformers_modules
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.golden_files import read_arrays, read_ids, read_json
from deepdraft.proof.parity.reference import Trace
from deepdraft.proof.parity.target import Target, run
from deepdraft.proof.tiny_families import entries_of

_CHILD = Path(__file__).with_name("hf_child.py")
_MAX_ERROR = 600


Engine = Callable[[Sequence[Sequence[int]], int], Sequence[Any]]
"""Another engine on one checkpoint: prompts, length of their greedy continuations -> an answer to
each: `engine` (name and version), `prompt` [N, V] log-probabilities, row i following token i,
`tokens`, `greedy` [len(tokens), V], row i having chosen token i; NaN where not told."""


def from_engine(engine: Engine, ids: list[int], *, greedy: int) -> Trace:
    """Log-probabilities of the text and a greedy continuation by another engine."""
    (told,) = engine([ids], max(1, greedy))
    trace = Trace(name=told.engine, ids=ids, logits=told.prompt, partial=True)
    trace.greedy = told.tokens[:greedy]
    if greedy:
        # What is not told is less likely than what is.
        least = float(told.greedy.nan_to_num(nan=0.0).min())
        trace.greedy_logits = told.greedy[:greedy].nan_to_num(nan=least)
    return trace


def from_native(directory: Path, ids: list[int], *, greedy: int) -> Trace:
    """Our own engine on another directory: what a conversion was made from."""
    checkpoint = Checkpoint.open(directory)
    target = Target.of(checkpoint, read_config(directory / "config.json"))
    trace = run(target, ids, greedy=greedy, layers=True)
    trace.name = f"deepdraft native on {directory.name}"
    trace.spec = target.spec
    trace.weights = {name: _value(checkpoint, name) for name in target.names()}
    return trace


def _value(checkpoint: Checkpoint, name: str) -> Tensor:
    ids = checkpoint.table[name].format in ("i32", "i64", "ids")
    return checkpoint.tensor(name, torch.int64 if ids else torch.float32)


def from_golden(directory: Path, args: Any) -> Trace:
    """Recorded logits of a golden directory; its checkpoint is not read."""
    tokens = directory / "tokens.json"
    data = read_json(tokens)
    prompt = read_ids(data.get("prompt"), "prompt", args, tokens)
    greedy = data.get("greedy_tokens")
    modes = isinstance(greedy, dict)
    continuation = read_ids(greedy.get("exact") if modes else greedy, "greedy_tokens", args, tokens)
    file = directory / ("logits-exact.safetensors" if modes else "logits.safetensors")
    arrays = read_arrays(file)
    if arrays is None or not {"prompt_logits", "decode_logits"} <= arrays.keys():
        raise CheckpointError(f"{directory} has no {file.name} with prompt and decode logits")
    ids, parts = [*prompt, *continuation], (arrays["prompt_logits"], arrays["decode_logits"])
    for name, x in zip(("prompt_logits", "decode_logits"), parts, strict=True):
        if x.ndim != 2 or x.shape[1] != args.vocab_size or not torch.isfinite(x.float()).all():
            raise CheckpointError(
                f"{file.name}: {name} {list(x.shape)} must be finite rows of {args.vocab_size} "
                "logits; record or fetch it again"
            )
    logits = torch.cat(parts)
    if len(logits) != len(ids) or logits.shape[1] != args.vocab_size:
        raise CheckpointError(
            f"{file.name}: logits {list(logits.shape)} do not belong to {len(ids)} tokens of a "
            f"vocabulary of {args.vocab_size}"
        )
    return Trace(name=f"golden data {directory.name}", ids=ids, logits=logits.float())


def from_transformers(
    directory: Path,
    ids: list[int],
    *,
    greedy: int,
    dtype: str = "float32",
    python: str | None = None,
    timeout: float = 600.0,
) -> Trace:
    """transformers on a directory, run by the interpreter `python` in a process of its own.

    Raises ConfigError where that interpreter has no transformers, CheckpointError where it cannot
    load or run the directory.
    """
    if isinstance(ModelSpec.of(read_config(directory / "config.json")).args, V41Args):
        raise ConfigError(
            "transformers has no DeepSeek-V4.1; use --reference golden or --reference native"
        )
    with tempfile.TemporaryDirectory(prefix="deepdraft-parity-") as out:
        request = {
            "checkpoint": str(directory.resolve()),
            "ids": ids,
            "greedy": greedy,
            "dtype": dtype,
            "out": out,
        }
        file = Path(out) / "request.json"
        file.write_text(json.dumps(request))
        # Run from a copy: beside the original lie modules that a script's path would put first.
        child = Path(shutil.copy(_CHILD, out))
        command = [python or sys.executable, "-W", "ignore", str(child), str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, capture_output=True, timeout=timeout, env=environment)
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"transformers gave no answer within {timeout:g} s; use fewer --tokens"
            ) from error
        if done.returncode:
            raise _child_error(done.stderr.decode("utf-8", "replace"), command[0], done.returncode)
        try:
            return _read(Path(out))
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{command[0]} ended without an error and without the reference's arrays "
                f"({type(error).__name__}); give a Python interpreter that has transformers with "
                "--reference-python"
            ) from error


def _child_error(stderr: str, python: str, status: int) -> CheckpointError | ConfigError:
    last = next((line for line in reversed(stderr.strip().splitlines()) if line.strip()), "")
    if "No module named" in last and any(n in last for n in ("transformers", "torch")):
        return ConfigError(
            f"{python} cannot import what the reference needs ({last}); give an interpreter that "
            "has transformers with --reference-python (docs/parity.md says how to make one)"
        )
    said = (
        last[:_MAX_ERROR] or "it said nothing; is it a Python interpreter, and was memory enough?"
    )
    return CheckpointError(
        f"transformers failed on this checkpoint ({python}, status {status}): {said}"
    )


def _read(out: Path) -> Trace:
    about = json.loads((out / "trace.json").read_text(encoding="utf-8"))
    try:
        arrays = load_file(out / "trace.safetensors")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"the reference wrote no readable arrays: {error}") from error
    request = json.loads((out / "request.json").read_text())
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in arrays.items():
        if "." in name:
            layer, part = name.split(".")
            layers.setdefault(layer, {})[part] = value
    trace = Trace(
        name=about["engine"],
        ids=request["ids"],
        logits=arrays["logits"],
        greedy=about["greedy"],
        greedy_logits=arrays.get("greedy_logits"),
        layers=dict(sorted(layers.items(), key=lambda item: int(item[0][1:]))),
        frequencies=about["frequencies"],
        factors=about["factors"],
        about={k: about[k] for k in ("engine", "torch", "python", "seconds")},
    )
    if about["missing"]:
        trace.notes.append(
            f"the reference misses {len(about['missing'])} tensors, such as {about['missing'][0]}, "
            "and filled them in: it is no judge of this checkpoint"
        )
    try:
        trace.spec = ModelSpec.of(about["config"])
    except ConfigError as error:
        trace.notes.append(f"the reference's configuration was not understood: {error.message}")
    weights = out / "weights.safetensors"
    if trace.spec is not None and weights.is_file():
        trace.weights = _published(trace.spec, load_file(weights))
    return trace


def _published(spec: ModelSpec, modules: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameters under published names."""
    shapes = {
        entry.name: entry.value_shape
        for entry in entries_of(spec.args)
        if entry.module == "text" and entry.format not in ("scale", "block_scale")
    }
    single = transformers_modules(spec.args).plan(shapes)
    stacks = expert_stacks().plan(
        {target: shapes[piece.sources[0]] for target, piece in single.pieces.items()}
    )
    found = {}
    for name in shapes:
        module = single.owner[name]
        if module in modules:
            found[name] = modules[module]
        elif stacks.owner.get(module) in modules:
            found[name] = stacks.undo(module, modules.__getitem__).clone()
    return {name: x.float() if x.is_floating_point() else x.long() for name, x in found.items()}
