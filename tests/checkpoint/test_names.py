"""The tensor table: the published totals, the published names, and the layout of a small set."""

import json
from collections import Counter

import pytest

from deepdraft.checkpoint import totals
from deepdraft.checkpoint.config import load_args, parse_args
from deepdraft.checkpoint.names import STORED_DTYPES, tensor_table
from tests.checkpoint.tiny import DATA, published_config, tiny_config


@pytest.fixture(scope="module")
def published():
    args = load_args(DATA / "v41-config.json")
    return tensor_table(args)


def test_published_totals(published):
    assert len(published) == 96_085
    assert sum(entry.num_bytes for entry in published.values()) == 510_286_023_000
    assert sum(entry.num_params for entry in published.values()) == 763_205_315_794
    assert totals.backbone_params(published.values()) == 551_880_835_184


def test_published_elements_per_dtype(published):
    counts = totals.totals_by(published.values(), "dtype")
    assert {dtype: total.params for dtype, total in counts.items()} == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "F8_E4M3": 204_015_223_296,
        "I8": 557_171_343_360,
        "F8_E8M0": 0,
    }


def test_published_parameters_per_group(published):
    counts = totals.totals_by(published.values(), "group")
    assert {group: total.params for group, total in counts.items()} == {
        "routed experts": 543_581_798_400,
        "attention projections": 5_064_622_080,
        "shared experts": 1_415_577_600,
        "embed and head": 1_323_827_200,
        "Engram projections and gates": 314_654_720,
        "routers": 78_673_920,
        "indexers": 43_516_416,
        "mHC": 39_323_760,
        "compressors": 18_352_128,
        "norms and sinks": 488_960,
        "Engram tables": 196_613_849_600,
        "DSpark": 14_225_362_530,
        "vision tower": 485_268_480,
    }


PUBLISHED_SHAPES = {
    "layers.0.attn.wq_a.weight": ((1280, 5120), "F8_E4M3"),
    "layers.0.attn.wq_a.scale": ((40, 160), "F8_E8M0"),
    "layers.39.attn.wq_b.scale": ((1024, 40), "F8_E8M0"),
    "layers.5.attn.wo_a.weight": ((8192, 4096), "F8_E4M3"),
    "layers.5.attn.wo_b.scale": ((160, 256), "F8_E8M0"),
    "layers.7.attn.attn_sink": ((64,), "F32"),
    "layers.7.hc_ffn_fn": ((24, 20480), "F32"),
    "layers.7.hc_attn_scale": ((3,), "F32"),
    "layers.1.ffn.experts.383.w1.weight": ((2304, 2560), "I8"),
    "layers.1.ffn.experts.383.w2.weight": ((5120, 1152), "I8"),
    "layers.1.ffn.experts.383.w2.scale": ((5120, 72), "F8_E8M0"),
    "layers.1.ffn.shared_experts.w2.scale": ((160, 72), "F8_E8M0"),
    "layers.14.engram.embed.weight": ((384016682, 256), "F8_E4M3"),
    "layers.14.engram.embed.scale": ((384016682, 8), "F8_E8M0"),
    "layers.1.engram.wkv.weight": ((25600, 6144), "F8_E4M3"),
    "layers.1.engram.wkv.scale": ((800, 192), "F8_E8M0"),
    "layers.1.engram.q_weight": ((4, 5120), "BF16"),
    "layers.20.attn.compressor.wkv.weight": ((512, 5120), "BF16"),
    "layers.8.attn.compressor.wgate.weight": ((512, 5120), "BF16"),
    "layers.36.attn.indexer.wq_b.scale": ((128, 40), "F8_E8M0"),
    "layers.36.attn.indexer.weights_proj.weight": ((32, 5120), "BF16"),
    "layers.20.attn.indexer.wk.weight": ((128, 512), "BF16"),
    "mtp.0.main_proj.weight": ((5120, 15360), "F8_E4M3"),
    "mtp.0.main_proj.scale": ((160, 480), "F8_E8M0"),
    "mtp.0.main_norm.weight": ((5120,), "BF16"),
    "mtp.2.ffn.gate.bias_vl": ((128,), "F32"),
    "mtp.2.confidence_head.proj.weight": ((1, 5376), "BF16"),
    "mtp.2.markov_head.head.weight": ((129280, 256), "BF16"),
    "image_newline": ((5120,), "BF16"),
    "vision.patch_embed.proj.weight": ((1024, 588), "BF16"),
    "vision.blocks.31.mlp.w1.weight": ((5632, 1024), "BF16"),
    "aligner.w1.weight": ((5120, 9216), "BF16"),
}


def test_published_shapes(published):
    found = {name: (published[name].shape, published[name].dtype) for name in PUBLISHED_SHAPES}
    assert found == PUBLISHED_SHAPES


ABSENT = [
    "layers.20.attn.compressor.wgate.weight",
    "layers.24.attn.indexer.wk.weight",
    "layers.24.attn.compressor.wkv.weight",
    "layers.3.attn.indexer.wq_b.weight",
    "layers.0.engram.embed.weight",
    "mtp.1.main_proj.weight",
    "mtp.1.norm.weight",
    "mtp.0.ffn.experts.128.w1.weight",
    "layers.40.attn_norm.weight",
]


@pytest.mark.parametrize("name", ABSENT)
def test_absent_in_the_published_checkpoint(published, name):
    assert name not in published


def test_every_scale_belongs_to_one_weight(published):
    scales = {name for name, entry in published.items() if entry.format == "scale"}
    owners = Counter(entry.scale_name for entry in published.values() if entry.scale_name)
    assert set(owners) == scales
    assert set(owners.values()) == {1}


def test_headers_of_the_recorded_set():
    """Names, dtypes and shapes in the shard headers of ../golden/v41-a, copied as data."""
    table = tensor_table(load_args(DATA / "v41-a-config.json"))
    headers = json.loads((DATA / "v41-a-headers.json").read_text())
    assert {n: [e.dtype, list(e.shape)] for n, e in table.items()} == headers


def test_modules_and_skipping():
    modules = {e.module for e in tensor_table(parse_args(tiny_config())).values()}
    assert modules == {"text", "drafter"}
    vision = [
        e.name
        for e in tensor_table(parse_args(published_config())).values()
        if e.module == "vision"
    ]
    assert len(vision) == 266
    assert all(name.startswith(("vision.", "aligner.", "image_")) for name in vision)


def test_sizes_follow_the_configuration():
    config = tiny_config(hc_mult=2, dspark_markov_rank=8)
    table = tensor_table(parse_args(config))
    assert table["layers.0.hc_attn_fn"].shape == (2 * 4, 2 * 32)
    assert table["layers.1.engram.wkv.weight"].shape == (3 * 32, 3 * 1 * 32)
    assert table["layers.1.engram.q_weight"].shape == (2, 32)
    assert table["mtp.0.main_proj.weight"].shape == (32, 2 * 32)
    assert table["mtp.0.norm.weight"].shape == (32,)
    assert table["mtp.0.confidence_head.proj.weight"].shape == (1, 40)
    assert table["layers.0.ffn.experts.2.w1.weight"].value_shape == (32, 32)
    assert table["layers.0.ffn.experts.2.w1.weight"].shape == (32, 16)


def test_first_dtype_is_the_published_one():
    published = {
        "bf16": "BF16",
        "f32": "F32",
        "fp8_tile": "F8_E4M3",
        "fp8_row": "F8_E4M3",
        "mxfp4": "I8",
        "scale": "F8_E8M0",
    }
    assert {fmt: STORED_DTYPES[fmt][0] for fmt in published} == published
