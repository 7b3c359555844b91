"""Writing checkpoints: files as another library writes them, and exact round trips."""

import json

import pytest
import safetensors.torch
import torch

from deepdraft.checkpoint.reader import Checkpoint, Packed
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.quant.formats import (
    dequantize_fp8_row,
    dequantize_fp8_tile,
    dequantize_mxfp4,
    quantize_fp8_row,
    quantize_fp8_tile,
    quantize_mxfp4,
)
from tests.checkpoint.tiny import (
    DATA,
    random_tensors,
    shard_paths,
    tiny_config,
    two_shards,
    write_tiny,
)

QUANTIZE = {
    "fp8_tile": quantize_fp8_tile,
    "fp8_row": quantize_fp8_row,
    "mxfp4": quantize_mxfp4,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "checkpoint"
    write_tiny(directory)
    return directory


def shard_bytes(directory):
    return {path.name: path.read_bytes() for path in shard_paths(directory)}


def rewrite(target, tensors):
    config = tiny_config()
    write_checkpoint(target, config, tensors, max_shard_bytes=two_shards(config))


def test_files_equal_those_of_the_safetensors_library(original, tmp_path):
    for path in shard_paths(original):
        tensors = safetensors.torch.load_file(path)
        safetensors.torch.save_file(tensors, tmp_path / "other", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "other").read_bytes()


def test_packed_tensors_are_written_as_they_are(original, tmp_path):
    rewrite(tmp_path / "copy", Checkpoint.open(original).packed)
    assert shard_bytes(tmp_path / "copy") == shard_bytes(original)


def test_dequantised_tensors_with_their_scales_give_the_same_bytes(original, tmp_path):
    checkpoint = Checkpoint.open(original)

    def tensor(name):
        packed = checkpoint.packed(name)
        value = checkpoint.tensor(name)
        if packed.scales is None:
            return value
        return Packed(*QUANTIZE[packed.format](value, packed.scales), packed.format)

    rewrite(tmp_path / "copy", tensor)
    assert shard_bytes(tmp_path / "copy") == shard_bytes(original)


def test_dequantised_tensors_alone_give_the_same_values(original, tmp_path):
    checkpoint = Checkpoint.open(original)
    names = [name for name, entry in checkpoint.table.items() if entry.format != "scale"]
    rewrite(tmp_path / "copy", {name: checkpoint.tensor(name) for name in names})
    copy = Checkpoint.open(tmp_path / "copy")
    for name in names:
        assert torch.equal(copy.tensor(name), checkpoint.tensor(name)), name


def test_bytes_of_the_recorded_set():
    """Codes and scales of ../golden/v41-a come back from their dequantised values."""
    stored = safetensors.torch.load_file(DATA / "v41-a-tensors.safetensors")
    for stem, quantize, dequantize in (
        ("layers.2.attn.wkv", quantize_fp8_tile, dequantize_fp8_tile),
        ("layers.1.engram.embed", quantize_fp8_row, dequantize_fp8_row),
        ("layers.2.ffn.experts.0.w1", quantize_mxfp4, dequantize_mxfp4),
    ):
        values = stored[f"{stem}.weight"].view(torch.uint8)
        scales = stored[f"{stem}.scale"].view(torch.uint8)
        x = dequantize(values, scales)
        assert x.isfinite().all()
        assert torch.equal(quantize(x, scales)[0], values)
        assert torch.equal(dequantize(*quantize(x)), x)


def test_values_are_the_nearest_in_their_format(original, tmp_path):
    tensors = write_tiny(tmp_path / "again")
    checkpoint = Checkpoint.open(original)
    exact = checkpoint.tensor("layers.0.hc_attn_fn")
    assert torch.equal(exact, tensors["layers.0.hc_attn_fn"])
    rounded = checkpoint.tensor("head.weight")
    assert torch.equal(rounded, tensors["head.weight"].bfloat16().float())
    for name, relative in (("layers.0.attn.wkv.weight", 2**-4), ("mtp.0.main_proj.weight", 2**-4)):
        error = (checkpoint.tensor(name) - tensors[name]).abs()
        assert (error <= torch.maximum(relative * tensors[name].abs(), torch.tensor(1e-5))).all()
        assert error.max() > 0


def test_layout_of_the_directory(original):
    config = json.loads((original / "config.json").read_text())
    assert config == tiny_config()
    index = json.loads((original / "model.safetensors.index.json").read_text())
    checkpoint = Checkpoint.open(original)
    assert list(index["weight_map"]) == list(checkpoint.table)
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in checkpoint.table.values())
    assert [p.name for p in shard_paths(original)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for entry in checkpoint.table.values():
        if entry.scale_name:
            weight_map = index["weight_map"]
            assert weight_map[entry.name] == weight_map[entry.scale_name]


def test_shards_keep_their_limit(tmp_path):
    config = tiny_config()
    write_checkpoint(tmp_path / "c", config, random_tensors(config), max_shard_bytes=20_000)
    paths = shard_paths(tmp_path / "c")
    assert len(paths) > 4
    # Data only; the headers come on top.
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(p).values()) for p in paths]
    assert max(sizes) <= 20_000
    assert Checkpoint.open(tmp_path / "c").tensor("norm.weight").isfinite().all()


def refused(tmp_path, tensors, *needles, config=None):
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "refused", config or tiny_config(), tensors)
    for needle in needles:
        assert needle in caught.value.message
    assert list((tmp_path / "refused").glob("*")) == []


def test_missing_unknown_and_misshapen_tensors(tmp_path):
    tensors = random_tensors(tiny_config())
    weight = tensors.pop("layers.0.attn.wkv.weight")
    refused(tmp_path, tensors, "1 tensors are missing", "layers.0.attn.wkv.weight")
    tensors["layers.0.attn.kv.weight"] = weight
    refused(tmp_path, tensors, "layers.0.attn.kv.weight", "expected: layers.0.attn.wkv.weight")
    del tensors["layers.0.attn.kv.weight"]
    tensors["layers.0.attn.wkv.weight"] = weight[:, :16]
    refused(tmp_path, tensors, "layers.0.attn.wkv.weight has shape [32, 16]", "[32, 32]")


@pytest.mark.parametrize("name", ["layers.0.attn.wkv.weight", "norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_must_be_finite(tmp_path, name, value):
    tensors = random_tensors(tiny_config())
    tensors[name].view(-1)[3] = value
    refused(tmp_path, tensors, f"{name} holds NaN or infinity")


def test_integers_and_wrong_packings_are_refused(tmp_path):
    tensors = random_tensors(tiny_config())
    name = "layers.0.attn.wkv.weight"
    weight = tensors[name]
    tensors[name] = weight.int()
    refused(tmp_path, tensors, f"{name} must be a float tensor")
    tensors[name] = Packed(*quantize_mxfp4(weight), "mxfp4")
    refused(tmp_path, tensors, f"{name} is packed as mxfp4", "fp8_tile")
    tensors[name] = Packed(quantize_fp8_tile(weight)[0][:16], torch.zeros(1, 1).byte(), "fp8_tile")
    refused(tmp_path, tensors, f"{name}: the packed bytes do not make [32, 32]")


def test_no_checkpoint_is_overwritten(original):
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write_checkpoint(original, tiny_config(), random_tensors(tiny_config()))


def test_a_wrong_configuration_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size = 40"):
        write_checkpoint(tmp_path / "new", tiny_config(hidden_size=40), {})
    assert not (tmp_path / "new").exists()
