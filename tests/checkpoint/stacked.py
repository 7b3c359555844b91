"""Tiny checkpoints whose experts are stacked, as transformers 5 holds them in memory."""

from pathlib import Path

from safetensors.torch import load_file

from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec_maps import expert_stacks
from deepdraft.proof.tiny_tokenizer import write_tokenizer
from deepdraft.proof.tiny_write import write_directory


def write_stacked(published: Path, out: Path, *, shards: int = 1) -> Path:
    """The same model with stacks."""
    tensors = load_file(published / "model.safetensors")
    plan = expert_stacks().plan({name: tuple(t.shape) for name, t in tensors.items()})
    made = {target: plan.read(target, tensors.__getitem__) for target in plan.pieces}
    config = read_config(published / "config.json")
    write_directory(out, config, made, shards=shards)
    write_tokenizer(out, config["vocab_size"])
    return out
