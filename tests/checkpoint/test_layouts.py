"""Checkpoints whose experts are stacked are read as the published ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.checkpoint.layouts import read_published
from deepdraft.checkpoint.names import Entry
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.relayout import relayout
from deepdraft.checkpoint.shards import INDEX_NAME
from deepdraft.errors import CheckpointError
from deepdraft.proof.doctor.run import examine
from deepdraft.proof.inspect_family import inspect_family
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked
from tests.doctor.sparse import write_shard

STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3") / "published", "v3")


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_the_published_one(published: Path, tmp_path: Path, shards: int) -> None:
    stacked = write_stacked(published, tmp_path / "stacked", shards=shards)
    found, layout = read_published(stacked)
    assert layout == "stacked" and read_published(published)[1] == "published"
    wanted = load_file(published / "model.safetensors")
    assert found.stored.keys() == wanted.keys()
    assert (found.weight_map or wanted).keys() == wanted.keys()
    opened = Checkpoint.open(stacked)
    assert all(torch.equal(opened.tensor(name), wanted[name]) for name in wanted)
    own, theirs = inspect_family(stacked), inspect_family(published)
    assert own["total"] == theirs["total"] and own["groups"] == theirs["groups"]


@pytest.mark.parametrize("fault", ["another shard", "left out"])
def test_an_index_that_is_wrong_about_a_stack(published: Path, tmp_path: Path, fault: str) -> None:
    stacked = write_stacked(published, tmp_path / "stacked", shards=2)
    index = json.loads((stacked / INDEX_NAME).read_text())
    names = index["weight_map"]
    if fault == "left out":
        del names[STACK]
    else:
        names[STACK] = next(file for file in names.values() if file != names[STACK])
    (stacked / INDEX_NAME).write_text(json.dumps(index))
    says = "does not name" if fault == "left out" else "puts"
    with pytest.raises(CheckpointError, match=rf"index: {says} model.layers.1.mlp.experts.0.gate"):
        Checkpoint.open(stacked)


@pytest.mark.parametrize("shape", [[1 << 49, 2, 0], [1 << 30, 2, 1], [0, 2, 4], [4, 3, 4]])
def test_a_stack_that_is_none(tmp_path: Path, shape: list[int]) -> None:
    """Refused at once: the header alone may claim any number of parts."""
    write_shard(
        tmp_path / "model.safetensors",
        [Entry(STACK, tuple(shape), "bf16", "routed experts", "text")],
    )
    with pytest.raises(CheckpointError, match=rf"{STACK} has the shape"):
        read_published(tmp_path)


def test_a_tensor_by_itself_and_in_a_stack(published: Path, tmp_path: Path) -> None:
    """Neither of the two is preferred in silence."""
    stacked = write_stacked(published, tmp_path / "stacked")
    file, own = stacked / "model.safetensors", "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors = load_file(published / "model.safetensors")
    save_file(load_file(file) | {own: torch.zeros_like(tensors[own])}, file)
    with pytest.raises(CheckpointError, match=rf"stored twice: {own}"):
        Checkpoint.open(stacked)
    assert own in {f.cause for f in examine(stacked, static_only=True).errors}


def test_convert_splits_stacks(published: Path, tmp_path: Path) -> None:
    stacked = write_stacked(published, tmp_path / "stacked")
    relayout(stacked, tmp_path / "out", layout="published")
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "out", published))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
