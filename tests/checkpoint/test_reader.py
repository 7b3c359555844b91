"""Reading tensors: values against an independent decoder, and what `open` and `tensor` refuse."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from deepdraft.checkpoint import reader
from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.shards import Nearest
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.errors import CheckpointError, ConfigError
from tests.checkpoint.tiny import (
    edit_index,
    find_shard,
    patch_tensor,
    published_config,
    random_tensors,
    read_shard,
    shard_paths,
    tiny_config,
    write_shard,
    write_tiny,
)
from tests.quant.grids import E2M1_POSITIVE, e4m3_value

E4M3 = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
E2M1 = torch.tensor([*E2M1_POSITIVE, *(-v for v in E2M1_POSITIVE)], dtype=torch.float64)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(directory)
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "copy")


def refused(directory, *needles):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    for needle in needles:
        assert needle in caught.value.message
    return caught.value.message


def naive_values(directory) -> dict[str, torch.Tensor]:
    """Every weight in float64, read with the safetensors library and decoded by definition."""
    stored = {}
    for path in shard_paths(directory):
        stored |= safetensors.torch.load_file(path)
    values = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(f"{name.removesuffix('weight')}scale")
        if scale is None:
            values[name] = tensor.double()
            continue
        codes = tensor.view(torch.uint8).long()
        if tensor.dtype == torch.int8:
            flat = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.float64)
            flat[:, ::2], flat[:, 1::2] = E2M1[codes % 16], E2M1[codes // 16]
        else:
            flat = E4M3[codes]
        factor = 2.0 ** (scale.view(torch.uint8).double() - 127)
        factor = factor.repeat_interleave(32, 1)
        if tensor.dtype == torch.float8_e4m3fn and "engram.embed" not in name:
            factor = factor.repeat_interleave(32, 0)
        values[name] = flat * factor
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_tensor_has_the_stored_values(pristine, dtype):
    checkpoint = Checkpoint.open(pristine)
    expected = naive_values(pristine)
    assert set(expected) == {n for n, e in checkpoint.table.items() if e.format != "scale"}
    for name, value in expected.items():
        assert torch.equal(checkpoint.tensor(name, dtype), value.to(dtype)), name


def test_chunks_give_the_same_values(pristine, monkeypatch):
    checkpoint = Checkpoint.open(pristine)
    names = ["layers.1.engram.embed.weight", "layers.1.engram.wkv.weight", "embed.weight"]
    whole = [checkpoint.tensor(name) for name in names]
    monkeypatch.setattr(reader, "_CHUNK_VALUES", 1)
    assert all(torch.equal(checkpoint.tensor(n), w) for n, w in zip(names, whole, strict=True))


def test_out_receives_the_tensor(pristine):
    checkpoint = Checkpoint.open(pristine)
    name = "layers.0.ffn.experts.1.w2.weight"
    stack = torch.zeros(3, 32, 32, dtype=torch.float64)
    assert checkpoint.tensor(name, out=stack[1]) is not None
    assert torch.equal(stack[1], checkpoint.tensor(name, torch.float64))
    assert stack[0].eq(0).all()
    assert stack[2].eq(0).all()


def test_packed_is_the_stored_bytes_and_private(directory):
    checkpoint = Checkpoint.open(directory)
    for name, fmt, shape, scale_shape in (
        ("layers.0.attn.wkv.weight", "fp8_tile", (32, 32), (1, 1)),
        ("layers.1.engram.embed.weight", "fp8_row", (301, 32), (301, 1)),
        ("layers.0.ffn.experts.0.w1.weight", "mxfp4", (32, 16), (32, 1)),
    ):
        packed = checkpoint.packed(name)
        assert packed.format == fmt
        assert packed.values.dtype == packed.scales.dtype == torch.uint8
        assert packed.values.shape == shape
        assert packed.scales.shape == scale_shape
        header, data = read_shard(find_shard(directory, name))
        start, end = header[name]["data_offsets"]
        assert packed.values.numpy().tobytes() == data[start:end]
        packed.values.fill_(0)
        assert read_shard(find_shard(directory, name))[1] == data
    packed = checkpoint.packed("norm.weight")
    assert (packed.format, packed.scales, packed.values.dtype) == ("bf16", None, torch.bfloat16)
    assert checkpoint.packed("layers.0.hc_attn_fn").values.dtype == torch.float32


def test_one_file_without_index(directory):
    merged, data = {}, b""
    for path in shard_paths(directory):
        header, part = read_shard(path)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                merged[name] = entry | {"data_offsets": [start + len(data), end + len(data)]}
        data += part
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    write_shard(directory / "model.safetensors", merged, data)
    checkpoint = Checkpoint.open(directory)
    for name, value in naive_values(directory).items():
        assert torch.equal(checkpoint.tensor(name, torch.float64), value)


def retype(directory, old, new):
    for path in shard_paths(directory):
        header, data = read_shard(path)
        for entry in header.values():
            if entry.get("dtype") == old:
                entry["dtype"] = new
        write_shard(path, header, data)


@pytest.mark.parametrize("old, new", [("F8_E8M0", "U8"), ("I8", "U8")])
def test_bytes_may_be_stored_as_u8(directory, pristine, old, new):
    retype(directory, old, new)
    name = "layers.0.ffn.experts.0.w1.weight"
    assert torch.equal(
        Checkpoint.open(directory).tensor(name), Checkpoint.open(pristine).tensor(name)
    )


def test_unaligned_tensors_are_read(directory, pristine):
    # One byte of a scale before wider types puts those at odd addresses.
    path = find_shard(directory, "norm.weight")
    header, data = read_shard(path)
    metadata = header.pop("__metadata__")
    order = sorted(header, key=lambda n: (not n.startswith("mtp.0.attn.wkv.scale"), n))
    moved, parts, position = {"__metadata__": metadata}, [], 0
    for name in order:
        start, end = header[name]["data_offsets"]
        moved[name] = header[name] | {"data_offsets": [position, position + end - start]}
        parts.append(data[start:end])
        position += end - start
    assert moved["norm.weight"]["data_offsets"][0] % 2 == 1
    write_shard(path, moved, b"".join(parts))
    checkpoint = Checkpoint.open(directory)
    for name in ("norm.weight", "mtp.0.hc_attn_fn", "mtp.0.attn.wkv.weight"):
        assert torch.equal(checkpoint.tensor(name), Checkpoint.open(pristine).tensor(name))


# Accounting


def drop(directory, *names):
    """Takes tensors out of their shards and the index."""
    for name in names:
        path = find_shard(directory, name)
        header, data = read_shard(path)
        start, end = header.pop(name)["data_offsets"]
        for entry in header.values():
            offsets = entry.get("data_offsets")
            if offsets and offsets[0] >= end:
                entry["data_offsets"] = [o - (end - start) for o in offsets]
        write_shard(path, header, data[:start] + data[end:])
        edit_index(directory, lambda weight_map, name=name: weight_map.pop(name))


def rename(directory, old, new):
    path = find_shard(directory, old)
    header, data = read_shard(path)
    header[new] = header.pop(old)
    write_shard(path, header, data)
    edit_index(directory, lambda weight_map: weight_map.update({new: weight_map.pop(old)}))


def test_missing_tensors_are_listed_together(directory):
    drop(directory, "layers.0.attn.wkv.scale", "norm.weight")
    message = refused(directory, "missing: layers.0.attn.wkv.scale [1, 1]", "missing: norm.weight")
    assert "(2 problems)" in message


def test_a_renamed_tensor_is_missing_and_left_over_with_its_nearest_name(directory):
    rename(directory, "layers.0.attn.wkv.weight", "model.layers.0.attn.kv_proj.weight")
    refused(
        directory,
        "missing: layers.0.attn.wkv.weight [32, 32] (nearest left over: model.layers.0.attn.kv_pr",
        "left over: model.layers.0.attn.kv_proj.weight in model-0",
        "(nearest expected: layers.0.attn.wkv.weight)",
    )


def test_all_kinds_stay_visible_among_many_problems(directory):
    config = tiny_config(num_hidden_layers=3, compress_ratios=[0, 2, 1, 0])
    config["text_config"] |= {"index_source_layer_ids": [1, 2], "dspark_target_layer_ids": [2]}
    (directory / "config.json").write_text(json.dumps(config))
    rename(directory, "norm.weight", "final_norm.weight")
    message = refused(
        directory, "left over: layers.3.", "missing: norm.weight", "wrong shape: mtp.0"
    )
    assert "left over: 46 more" in message
    assert message.count("\n") < 40


def test_wrong_shape_and_dtype(directory):
    path = find_shard(directory, "norm.weight")
    header, data = read_shard(path)
    header["norm.weight"]["shape"] = [2, 16]
    write_shard(path, header, data)
    path = find_shard(directory, "layers.0.attn.wkv.weight")
    header, data = read_shard(path)
    header["layers.0.attn.wkv.weight"]["dtype"] = "F8_E5M2"
    header["layers.0.attn_norm.weight"]["dtype"] = "F16"
    write_shard(path, header, data)
    refused(
        directory,
        "wrong shape: norm.weight is [2, 16]",
        "config.json makes it [32]",
        "wrong dtype: layers.0.attn.wkv.weight is F8_E5M2",
        "must be F8_E4M3",
        "wrong dtype: layers.0.attn_norm.weight is F16",
    )


def test_a_tensor_in_two_shards(directory):
    first, second = shard_paths(directory)
    header, data = read_shard(second)
    entry = read_shard(first)[0]["embed.weight"]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    header["embed.weight"] = entry | {"data_offsets": [len(data), len(data) + size]}
    write_shard(second, header, data + bytes(size))
    refused(directory, f"stored twice: embed.weight is in {first.name} and {second.name}")


def test_index_must_agree_with_the_headers(directory):
    first, second = shard_paths(directory)

    def edit(weight_map):
        weight_map["embed.weight"] = second.name
        del weight_map["layers.0.attn_norm.weight"]
        weight_map["ghost.weight"] = first.name

    edit_index(directory, edit)
    refused(
        directory,
        f"index: puts embed.weight in {second.name}, it lies in {first.name}",
        "index: does not name layers.0.attn_norm.weight",
        f"index: puts ghost.weight in {first.name}, no shard holds it",
    )


def test_vision_tensors_are_checked_and_skipped(tmp_path):
    config = tiny_config()
    config["vision_config"] |= {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "patch_size": 2,
    }
    write_checkpoint(tmp_path / "v", config, random_tensors(config))
    checkpoint = Checkpoint.open(tmp_path / "v")
    assert len(checkpoint.skipped["vision"]) == 10 + 8
    with pytest.raises(
        CheckpointError, match=r"vision\.norm\.weight is not read: the vision tower"
    ):
        checkpoint.tensor("vision.norm.weight")
    drop(tmp_path / "v", "vision.norm.weight")
    refused(tmp_path / "v", "missing: vision.norm.weight")


def test_text_only_checkpoint_skips_nothing(pristine):
    assert Checkpoint.open(pristine).skipped == {"vision": [], "mtp": [], "derived": []}


# Damaged files


def damaged(directory, change):
    """Applies `change` to header and data of the first shard; returns its name."""
    path = shard_paths(directory)[0]
    header, data = read_shard(path)
    data = change(header, data) or data
    write_shard(path, header, data)
    return path.name


def test_truncated_data(directory):
    path = shard_paths(directory)[1]
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, path.name, "truncated", "download it again")


@pytest.mark.parametrize("size", [0, 5, 8, 200])
def test_truncated_header(directory, size):
    path = shard_paths(directory)[0]
    path.write_bytes(path.read_bytes()[:size])
    refused(directory, path.name, "truncated")


def test_absurd_header_size(directory):
    path = shard_paths(directory)[0]
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    refused(directory, path.name, "header claims 18446744073709551615 bytes")


def test_header_that_is_not_json(directory):
    path = shard_paths(directory)[0]
    raw = bytearray(path.read_bytes())
    raw[20:30] = b"\x00" * 10
    path.write_bytes(raw)
    refused(directory, path.name, "header is not JSON")


def test_a_git_lfs_pointer_is_no_shard(directory):
    path = shard_paths(directory)[0]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(directory, path.name, "not a safetensors file or corrupt")


def test_trailing_bytes(directory):
    name = damaged(directory, lambda header, data: data + b"1234")
    refused(directory, name, "4 bytes follow '")


def shift(name, start, end):
    def change(header, data):
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [offsets[0] + start, offsets[1] + end]

    return change


@pytest.mark.parametrize(
    "change, needle",
    [
        (shift("embed.weight", -1, -1), "overlaps"),
        (shift("embed.weight", 8, 8), "leaves a gap"),
        (shift("embed.weight", 0, 8), "its offsets"),
        (shift("embed.weight", 10**12, 10**12), "truncated or corrupt"),
        (lambda header, data: header["embed.weight"].update(data_offsets=[-8, 8]), "malformed"),
        (lambda header, data: header["embed.weight"].update(data_offsets=[0]), "malformed"),
        (lambda header, data: header["embed.weight"].update(shape=[64, True]), "malformed"),
        (lambda header, data: header["embed.weight"].update(shape="64x32"), "malformed"),
        (lambda header, data: header["embed.weight"].update(shape=[1] * 100), "malformed"),
        (lambda header, data: header["embed.weight"].pop("dtype"), "malformed"),
        (lambda header, data: header["embed.weight"].update(dtype="F3"), "unknown dtype 'F3'"),
        (lambda header, data: header.update({"embed.weight": 7}), "malformed"),
    ],
)
def test_bad_header_entries(directory, change, needle):
    name = damaged(directory, lambda header, data: change(header, data) and None)
    refused(directory, name, "embed.weight", needle)


def test_duplicate_names_in_a_header(directory):
    path = shard_paths(directory)[0]
    raw = path.read_bytes()
    start = raw.index(b'"layers.0.attn.attn_sink"')
    # Two names of equal length keep the header's size.
    other = raw.index(b'"layers.1.attn.attn_sink"')
    raw = raw[:other] + raw[start : start + 25] + raw[other + 25 :]
    path.write_bytes(raw)
    refused(directory, path.name, "names 'layers.0.attn.attn_sink' twice")


def test_missing_index(directory):
    (directory / "model.safetensors.index.json").unlink()
    refused(directory, "2 .safetensors files", "no model.safetensors.index.json")


def test_missing_and_extra_shards(directory):
    first = shard_paths(directory)[0]
    shutil.copy(first, directory / "extra.safetensors")
    refused(directory, "holds extra.safetensors", "does not name")
    (directory / "extra.safetensors").unlink()
    first.unlink()
    refused(directory, f"lacks {first.name}", "2 shards")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin"])
def test_index_stays_in_its_directory(directory, name):
    edit_index(directory, lambda weight_map: weight_map.update({"norm.weight": name}))
    refused(directory, name, "no shard of")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": 3}'],
)
def test_bad_index(directory, content):
    (directory / "model.safetensors.index.json").write_text(content)
    refused(directory, "model.safetensors.index.json")


def test_empty_missing_and_foreign_paths(tmp_path, pristine):
    refused(tmp_path, "has no config.json")
    refused(tmp_path / "nowhere", "is not a directory")
    refused(shard_paths(pristine)[0], "is not a directory")
    shutil.copy(pristine / "config.json", tmp_path)
    refused(tmp_path, "holds no .safetensors file")


def test_config_errors_pass_through(directory):
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type is missing"):
        Checkpoint.open(directory)


def test_unknown_config_keys_can_be_accepted(directory):
    config = tiny_config() | {"new_key": 1}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="new_key = 1"):
        Checkpoint.open(directory)
    assert Checkpoint.open(directory, accept_unknown=["new_key"]).args.hidden_size == 32


def test_tokenizer_file(directory):
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer_file  # noqa: B018
    (directory / "tokenizer.json").write_text("{}")
    assert checkpoint.tokenizer_file == directory / "tokenizer.json"


# Values


@pytest.mark.parametrize(
    "weight, patched, offset, new, where",
    [
        ("layers.0.attn.wkv.weight", "layers.0.attn.wkv.weight", 33, b"\x7f", "[1, 1]"),
        ("layers.0.attn.wkv.weight", "layers.0.attn.wkv.weight", 65, b"\xff", "[2, 1]"),
        ("layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale", 0, b"\xff", "[0, 0]"),
        (
            "layers.0.ffn.experts.2.w3.weight",
            "layers.0.ffn.experts.2.w3.scale",
            7,
            b"\xff",
            "[7, 0]",
        ),
        ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale", 300, b"\xff", "[300, 0]"),
        ("norm.weight", "norm.weight", 6, b"\xc0\x7f", "[3]"),
        ("head.weight", "head.weight", 64 * 3, b"\x80\xff", "[3, 0]"),
        ("layers.0.hc_attn_base", "layers.0.hc_attn_base", 4, b"\x00\x00\xc0\x7f", "[1]"),
    ],
)
def test_values_that_are_not_finite_name_tensor_file_and_place(
    directory, weight, patched, offset, new, where
):
    patch_tensor(directory, patched, offset, new)
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tensor(weight)
    shard = find_shard(directory, weight).name
    assert weight in caught.value.message
    assert shard in caught.value.message
    assert f"the first at {where}" in caught.value.message
    assert checkpoint.tensor("layers.0.attn.wq_a.weight").isfinite().all()


def test_place_is_right_in_a_later_chunk(directory, monkeypatch):
    monkeypatch.setattr(reader, "_CHUNK_VALUES", 32 * 64)
    patch_tensor(directory, "layers.1.engram.embed.scale", 200, b"\xff")
    with pytest.raises(CheckpointError, match=r"rows 192\.\.255, the first at \[200, 0\]"):
        Checkpoint.open(directory).tensor("layers.1.engram.embed.weight")


def test_names_that_cannot_be_read(pristine):
    checkpoint = Checkpoint.open(pristine)
    with pytest.raises(CheckpointError, match=r"no tensor layers\.0\.attn\.wkvv\.weight \(nearest"):
        checkpoint.tensor("layers.0.attn.wkvv.weight")
    with pytest.raises(CheckpointError, match="ask for the weight"):
        checkpoint.packed("layers.0.attn.wkv.scale")


def test_file_that_shrinks_after_opening(directory):
    checkpoint = Checkpoint.open(directory)
    path = find_shard(directory, "head.weight")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="shrank"):
        checkpoint.tensor("mtp.0.ffn.experts.1.w2.weight")


def test_near_names_among_the_published_ones():
    names = Nearest(tensor_table(parse_args(published_config())))
    assert names.matches("model.layers.7.attn.wq_a.weight")[0] == "layers.7.attn.wq_a.weight"
    assert names.matches("nothing_alike") == []
