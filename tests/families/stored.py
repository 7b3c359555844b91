"""Checkpoints in other storage: FP8 blocks as published, half precision, shards, with an index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.checkpoint.families import load_model_args, model_table
from deepdraft.checkpoint.names import Entry
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.shards import read_headers
from deepdraft.models import model_class
from deepdraft.quant.blocks import quantize_fp8_block
from deepdraft.quant.formats import encode_e8m0, quantize_mxfp4
from tests.families.conftest import Tensors, golden_copy, text_of


def linears(directory: Path) -> list[str]:
    """Names of the linear maps that may be stored quantised."""
    from deepdraft.arch import LlamaArgs, V4Args
    from deepdraft.checkpoint.names_decoder import llama_entries, mla_entries
    from deepdraft.checkpoint.names_v4 import v4_entries

    args = load_model_args(directory / "config.json")
    make = {LlamaArgs: llama_entries, V4Args: v4_entries}.get(type(args), mla_entries)
    return [e.name for e in make(args) if e.format == "weight"]


def table_of(directory: Path) -> dict[str, Entry]:
    found = read_headers(directory)
    return model_table(load_model_args(directory / "config.json"), found.stored)


def quantise(directory: Path, *, e8m0: bool = False, fp4: str = "") -> None:
    """Rewrites a checkpoint with its linear maps in FP8 blocks (maps whose name holds `fp4` in
    MXFP4), factors in float32 or as E8M0 bytes."""
    tensors = load_file(directory / "model.safetensors")
    for name in linears(directory):
        if name not in tensors:
            continue
        w = tensors[name]
        short = name.endswith(".weight") and not name.startswith("model.")
        scale_name = f"{name.removesuffix('weight')}scale" if short else f"{name}_scale_inv"
        if fp4 and fp4 in name and w.shape[1] % 32 == 0:
            values, scales = quantize_mxfp4(w)
            tensors[name], tensors[scale_name] = values.view(torch.int8), scales
            continue
        values, scales = quantize_fp8_block(w)
        if e8m0:
            scales = torch.exp2(scales.log2().ceil())
            spread = scales.repeat_interleave(128, 0)[: w.shape[0]]
            spread = spread.repeat_interleave(128, 1)[:, : w.shape[1]]
            values = (w / spread).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = encode_e8m0(scales)
        tensors[name] = values.view(torch.float8_e4m3fn)
        tensors[scale_name] = scales
    write(directory, tensors)


def quantised_golden(name: str, tmp_path: Path, *, e8m0: bool = False) -> Path:
    """A golden directory of quantised weights. Its logits are those of the same values stored in
    float32, by the same model: what is tested with it is reading."""
    directory = golden_copy(name, tmp_path)
    at = directory / "checkpoint"
    quantise(at, e8m0=e8m0)
    checkpoint = Checkpoint.open(at)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((at / "config.json").read_text())
    stored = load_file(at / "model.safetensors")
    factors = {e.scale_name: e for e in checkpoint.table.values() if e.scale_name}
    values = {}
    for key, tensor in stored.items():
        if key in factors:
            continue
        entry = checkpoint.table[key]
        values[key] = expand(tensor, stored[entry.scale_name]) if entry.scale_name else tensor
    save_file(values, plain / "model.safetensors")
    count = len(json.loads((directory / "tokens.json").read_text())["prompt"])
    prompt = text_of(name)[:count]
    model = open_model(plain)
    sequence = model.new_pool(1, count + 8, slack=64).open()
    first = model.prefill(sequence, prompt, logits="all").logits
    greedy, rows = [], [first[-1]]
    for _ in range(8):
        greedy.append(int(rows[-1].argmax()))
        rows.append(model.step([(sequence, greedy[-1:])]).logits[0])
    decoded = torch.stack(rows[1:])
    (directory / "tokens.json").write_text(json.dumps({"prompt": prompt, "greedy_tokens": greedy}))
    arrays = {
        "prompt_logits": first.clone(),
        "decode_logits": decoded,
        "oneshot_logits": torch.cat([first, decoded]),
    }
    save_file(arrays, directory / "logits.safetensors")
    return directory


def expand(values: Tensor, scales: Tensor) -> Tensor:
    """FP8 values times their factors, written out without the reader's code."""
    if scales.dtype == torch.uint8:
        scales = 2.0 ** (scales.double() - 127)
    out = values.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            out[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scales[i, j]
    return out.float()


def open_model(directory: Path) -> Any:
    """The model of a checkpoint directory."""
    checkpoint = Checkpoint.open(directory)
    return model_class(checkpoint.args)(checkpoint.args, checkpoint)


def logits_of(directory: Path, text: list[int]) -> Tensor:
    """[tokens, V] of one prefill."""
    model = open_model(directory)
    pool = model.new_pool(1, len(text), slack=64)
    return model.prefill(pool.open(), text, logits="all").logits.clone()


def write(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """Writes one file, or shards with an index."""
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    contiguous = {name: t.contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(contiguous, directory / "model.safetensors")
        return
    names = sorted(contiguous)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: contiguous[name] for name in names[number::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
