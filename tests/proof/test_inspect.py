"""`deepdraft inspect`: the published numbers, the state's size, what fits, and its two outputs."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest

from deepdraft.checkpoint import totals
from deepdraft.checkpoint.config import load_args, parse_args
from deepdraft.checkpoint.names import SKIP_RULES, tensor_table
from deepdraft.checkpoint.presharded import shard_plan
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.inspect import inspect, is_split, main
from tests.checkpoint.tiny import DATA, tiny_config, write_tiny
from tests.parallel.tiny import config_of_eight

PUBLISHED = DATA / "v41-config.json"


@pytest.fixture(scope="module")
def published():
    return inspect(PUBLISHED)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "checkpoint"
    write_tiny(path)
    return path


def test_published_totals(published):
    assert published["total"] == {
        "tensors": 96_085,
        "params": 763_205_315_794,
        "bytes": 510_286_023_000,
    }
    assert published["backbone_params"] == 551_880_835_184
    assert published["state"]["kv_bytes_per_token"] == 890
    assert published["files"] == "config only"
    assert published["skipped"]["vision"]["tensors"] == 266


def test_groups_dtypes_and_modules_each_make_the_total(published):
    for field in ("groups", "dtypes", "modules"):
        for key in ("tensors", "params", "bytes"):
            total = sum(row[key] for row in published[field].values())
            assert total == published["total"][key], (field, key)


def test_state_of_the_published_model(published):
    state = published["state"]
    records = [state[f"{kind}_record_bytes"] for kind in ("window", "main", "index")]
    assert records == [528, 288, 68]
    # Windows of 40 layers, three drafter rings, open groups of three ratio-2 sources.
    assert state["constant_bytes"] == 2 * 1_351_680 + 202_752 + 12_288
    assert state["bytes_at_max_tokens"] == 890 * 1_048_576 + state["constant_bytes"]


def test_kv_bytes_may_be_fractional():
    args = parse_args(tiny_config())
    entry = (16 + 2) + (16 + 1)
    assert totals.kv_bytes_per_token(args) == Fraction(entry, 2) + entry
    assert totals.kv_bytes_per_token(load_args(PUBLISHED)) == 890


def test_what_is_split_over_gpus():
    for name in (
        "head.weight",
        "layers.0.attn.wq_b.scale",
        "layers.0.ffn.experts.3.w1.weight",
        "mtp.0.ffn.shared_experts.w2.weight",
        "layers.1.engram.embed.weight",
        "layers.3.ffn.shared_experts.w1.scale",
    ):
        assert is_split(name), name
    for name in (
        "embed.weight",
        "mtp.0.main_proj.weight",
        "mtp.2.markov_head.head.weight",
        "layers.0.attn.wq_a.weight",
        "layers.0.attn.wkv.scale",
        "layers.2.attn.indexer.wq_b.weight",
        "layers.0.ffn.gate.weight",
        "layers.0.hc_attn_fn",
        "mtp.2.confidence_head.proj.weight",
        "norm.weight",
    ):
        assert not is_split(name), name


def fit(report, gpus, tables):
    (row,) = [f for f in report["fits"] if (f["gpus"], f["engram_tables"]) == (gpus, tables)]
    return row


def test_the_published_model_needs_four_gpus_of_141_gb(published):
    assert [f["gpus"] for f in published["fits"]] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert not fit(published, 2, "host")["fits"]
    row = fit(published, 4, "host")
    assert row["fits"]
    assert row["host_bytes"] == 202_758_032_400
    # One GPU would hold all text weights: everything but tables and vision tower.
    assert fit(published, 1, "host")["weight_bytes_per_gpu"] == (
        510_286_023_000 - 202_758_032_400 - 970_536_960
    )
    assert row["usable_bytes_per_gpu"] == int(141e9 * 0.94) - 2_000_000_000
    left = row["usable_bytes_per_gpu"] - row["weight_bytes_per_gpu"]
    assert row["context_tokens"] == (left - published["state"]["constant_bytes"]) // 890
    assert fit(published, 4, "gpu")["context_tokens"] < row["context_tokens"]


def test_gpus_and_their_size_can_be_chosen(published):
    report = inspect(PUBLISHED, gpus=2, gpu_gb=288)
    assert [f["gpus"] for f in report["fits"]] == [2, 2]
    assert fit(report, 2, "host")["fits"]
    whole = fit(published, 8, "host")["weight_bytes_per_gpu"]
    assert fit(report, 2, "host")["weight_bytes_per_gpu"] > whole
    # Routed experts are split evenly; routers stand whole on every GPU.
    groups = report["ranks"]
    assert groups["routed experts"]["bytes_per_gpu"] * 2 == groups["routed experts"]["bytes"]
    assert groups["routers"]["bytes_per_gpu"] == groups["routers"]["bytes"]
    assert sum(row["bytes"] for row in groups.values()) == (
        published["total"]["bytes"] - 970_536_960
    )
    assert inspect(PUBLISHED, gpus=3)["fits"][0]["problem"] == "o_groups = 8 does not divide by 3"
    with pytest.raises(ConfigError, match="number of GPUs"):
        inspect(PUBLISHED, gpus=0)
    with pytest.raises(ConfigError, match="size"):
        inspect(PUBLISHED, gpu_gb=-1)


def test_human_output(capsys):
    assert main(PUBLISHED) == 0
    out = capsys.readouterr().out
    for needle in (
        "96,085 tensors",
        "510,286,023,000 bytes",
        "551,880,835,184 backbone parameters",
        "KV 890 B/token",
        "routed experts",
        "F8_E8M0",
        "skipped by rule 'vision': 266 tensors",
        "weights do not fit",
    ):
        assert needle in out
    main(PUBLISHED, gpus=3)
    assert "o_groups = 8 does not divide by 3" in capsys.readouterr().out


def test_json_output(capsys, directory):
    assert main(directory, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == inspect(directory)


def test_a_directory_is_checked_against_its_headers(directory, tmp_path):
    report = inspect(directory)
    assert report["files"] == "2 shards, every tensor accounted for"
    assert report["skipped"] == {}
    assert report["total"] == inspect(directory / "config.json")["total"]
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert 0 < stored - report["total"]["bytes"] < 60_000
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        inspect(tmp_path)


def test_bad_paths_and_keys(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        main(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        main(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config() | {"extra": 1}))
    with pytest.raises(ConfigError, match="extra = 1"):
        main(path)
    assert inspect(path, accept_keys=["extra"])["total"]["tensors"] > 0


def test_inspect_needs_no_torch():
    code = (
        "import sys; from deepdraft.proof.inspect import main; "
        f"main({str(PUBLISHED)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_weights_of_a_gpu_are_those_of_the_sharding_plan(tmp_path):
    """Exactly, for the rank that holds most."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of_eight()))
    args = load_args(path)
    entries = [e for e in tensor_table(args).values() if e.module not in SKIP_RULES]
    outside = [e for e in entries if e.group != "Engram tables"]
    for size in (2, 8):
        plan, report = shard_plan(args, size), inspect(path, gpus=size)
        assert fit(report, size, "gpu")["weight_bytes_per_gpu"] == plan.most_bytes(entries)
        assert fit(report, size, "host")["weight_bytes_per_gpu"] == plan.most_bytes(outside)
