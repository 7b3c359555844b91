"""`convert --layout, --dtype`: there and back, formats with their errors, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.relayout import LAYOUTS, read_formats, relayout
from deepdraft.checkpoint.shards import read_headers
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.cli.main import main
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.models import model_class
from deepdraft.proof.doctor.run import examine
from deepdraft.proof.tiny_write import write_tiny

CASES = (
    ("llama", "float32"),
    ("v2", "published"),
    ("v2-lite", "float32"),
    ("v3", "published"),
    ("v32", "float32"),
    ("v4", "float32"),
    ("v4", "published"),
)
Tensors = dict[str, torch.Tensor]


def raw(path: Path) -> Tensors:
    """Stored bytes by name."""
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found
            found[name] = tensor.contiguous().view(-1).view(torch.uint8)
    return found


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def spec(path: Path) -> ModelSpec:
    return ModelSpec.of(config(path))


def logits(path: Path) -> torch.Tensor:
    checkpoint = Checkpoint.open(path)
    model = model_class(checkpoint.args)(checkpoint.args, checkpoint)
    ids = list(range(3, 30))
    sequence = model.new_pool(1, len(ids), slack=len(ids)).open()
    return model.prefill(sequence, ids, logits="all").logits.clone()


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_there_and_back(kind: str, storage: Any, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", kind, storage=storage)
    there = relayout(source, tmp_path / "b", layout="transformers5", shard_bytes=300_000)
    assert there.files > 1 and there.errors == {} and there.left_out == []
    assert "rope_parameters" in config(tmp_path / "b")
    assert same(raw(source), raw(tmp_path / "b")) == (kind != "v4")
    back = relayout(tmp_path / "b", tmp_path / "c", layout="published")
    assert same(raw(source), raw(tmp_path / "c")) and back.files == 1
    assert spec(tmp_path / "c").differences(spec(source)) == []
    assert torch.equal(logits(source), logits(tmp_path / "c"))
    assert (tmp_path / "c" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert examine(tmp_path / "c").findings == []


def test_names_of_a_v4_as_transformers_saves_it(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", "v4")
    relayout(source, tmp_path / "b", layout="transformers5")
    names = set(read_headers(tmp_path / "b").stored)
    assert {"model.embed_tokens.weight", "head.weight", "model.hc_head.hc_fn"} <= names
    assert "model.layers.0.attn.norm.weight" in names
    with pytest.raises(CheckpointError):  # another program's names
        Checkpoint.open(tmp_path / "b")
    kept = relayout(tmp_path / "b", tmp_path / "c")  # the layout of the source
    assert kept.layout == "transformers5" and same(raw(tmp_path / "b"), raw(tmp_path / "c"))


def test_layers_that_transformers_has_no_name_for_are_named(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", "v4", mtp="next")
    names = {name for name in load_file(source / "model.safetensors") if name.startswith("mtp.")}
    report = relayout(source, tmp_path / "b", layout="transformers5")
    assert set(report.left_out) == names
    relayout(source, tmp_path / "c", layout="published", formats=read_formats(["bfloat16"]))
    converted = load_file(tmp_path / "c" / "model.safetensors")
    assert names <= set(converted) and converted["mtp.0.e_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["v3", "v32", "v4"])
def test_quantised_weights_become_plain(kind: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", kind, storage="published", mtp=kind == "v3")
    report = relayout(source, tmp_path / "b", formats=read_formats(["float32"]))
    assert all(e.relative_rms == 0.0 and e.worst == 0.0 for e in report.errors.values())
    dtypes = {p.dtype for n, p in read_headers(tmp_path / "b").stored.items() if len(p.shape) > 1}
    assert dtypes <= {"F32", "I64"}
    assert "quantization_config" not in config(tmp_path / "b")
    assert config(tmp_path / "b")["torch_dtype"] == "float32"
    assert not any("scale_inv" in name for name in raw(tmp_path / "b"))
    assert torch.equal(logits(source), logits(tmp_path / "b"))
    assert examine(tmp_path / "b").errors == []


def test_errors_by_group(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", "v2")
    formats = read_formats(["bfloat16", "*lm_head*=float32", "*.gate.weight=float16"])
    report = relayout(source, tmp_path / "b", formats=formats)
    stored = read_headers(tmp_path / "b").stored
    assert stored["lm_head.weight"].dtype == "F32"
    assert stored["model.layers.1.mlp.gate.weight"].dtype == "F16"
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == "BF16"
    assert stored["model.norm.weight"].dtype == "F32"  # no matrix
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "b")
    for group, error in report.errors.items():
        changed = [
            n for n, e in before.table.items() if e.group == group and stored[n].dtype != "F32"
        ]
        assert error.tensors == len(changed)
        a = torch.cat([before.tensor(n).flatten().double() for n in changed])
        b = torch.cat([after.tensor(n).flatten().double() for n in changed])
        assert error.worst == float((a - b).abs().max()) > 0
        expected = float((a - b).norm() / a.norm())
        assert error.relative_rms == pytest.approx(expected, rel=1e-6)
        assert error.largest == float(a.abs().max()) and error.values == a.numel()
    assert sum(e.tensors for e in report.errors.values()) == sum(
        p.dtype != "F32" for p in stored.values()
    )


def test_what_is_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", "llama")
    with pytest.raises(ConfigError, match="no weight or group has such a name"):
        relayout(source, tmp_path / "b", formats=read_formats(["*nothing*=float32"]))
    for option in ("int8", "=float16", "float64", "x=half"):
        with pytest.raises(ConfigError, match="give one of bfloat16, float16, float32"):
            read_formats([option])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        relayout(source, tmp_path / "c", layout="published")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"][3, 4] = 1e6
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has values up to 1e\+06"):
        relayout(source, tmp_path / "d", formats=read_formats(["float16"]))
    assert not list((tmp_path / "d").glob("*.safetensors*"))
    v41 = write_tiny(tmp_path / "e", "v41")
    with pytest.raises(ConfigError, match="one layout only"):
        relayout(v41, tmp_path / "f", layout="published")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny(tmp_path / "a", "v4", storage="published")
    out = str(tmp_path / "b")
    options = ["--layout", "transformers5", "--dtype", "bfloat16", "--dtype", "head*=float32"]
    assert main(["convert", str(source), out, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] == "transformers5" and report["files"] == 1
    assert all(g["formats"] and g["tensors"] for g in report["changed"].values())
    assert main(["convert", out, str(tmp_path / "c"), "--layout", "published"]) == 0
    assert "published layout" in capsys.readouterr().out
    head = read_headers(tmp_path / "c").stored["head.weight"]
    assert head.dtype == "F32"
    assert main(["convert", str(source), str(tmp_path / "d"), "--tp", "2", *options]) == 2
    assert main(["convert", str(source), str(tmp_path / "d")]) == 2
    assert "give OUT and --tp N, or OUT and --layout" in capsys.readouterr().err
    assert LAYOUTS == ("published", "transformers5")
