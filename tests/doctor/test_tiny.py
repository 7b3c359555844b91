"""Tiny checkpoints: complete, loadable, reproducible, in every storage and style."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.shards import read_headers
from deepdraft.cli.main import main
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.models import model_class
from deepdraft.proof.tiny_families import KINDS, tiny_config
from deepdraft.proof.tiny_write import write_tiny
from deepdraft.text.tokenizer import Tokenizer, engram_token_map

FAMILIES = [kind for kind in KINDS if kind != "v41"]


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    checkpoint = Checkpoint.open(directory)
    token_map = engram_token_map(Tokenizer.load(directory))
    model = model_class(checkpoint.args)(checkpoint.args, checkpoint, token_map)
    sequence = model.new_pool(1, len(ids), slack=len(ids)).open()
    return model.prefill(sequence, ids, logits="all").logits.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_checkpoint_runs(kind: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "a", kind)
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode_text("the rest of the story is not here")
    assert tokenizer.decode(ids) == "the rest of the story is not here" and len(ids) < 30
    assert tokenizer.vocab_size == 512
    out = logits(directory, ids)
    assert out.shape == (len(ids), 512) and torch.isfinite(out).all()
    assert 0.5 < float(out.std()) < 2.0
    assert out.argmax(-1).unique().numel() > len(ids) // 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str, tmp_path: Path) -> None:
    a, b, c = (
        write_tiny(tmp_path / n, kind, seed=s) for n, s in zip("abc", (3, 3, 4), strict=True)
    )
    for file in sorted(p.name for p in a.iterdir()):
        same = (a / file).read_bytes() == (b / file).read_bytes()
        assert same, file
    weights = sorted(p.name for p in a.glob("*.safetensors"))[-1]
    assert (a / weights).read_bytes() != (c / weights).read_bytes()


@pytest.mark.parametrize("kind", FAMILIES)
def test_styles_and_shards_change_nothing(kind: str, tmp_path: Path) -> None:
    ids = list(range(3, 40))
    plain = write_tiny(tmp_path / "a", kind)
    other = write_tiny(tmp_path / "b", kind, style="transformers5", shards=3)
    assert len(list(other.glob("*.safetensors"))) == 3
    assert torch.equal(logits(plain, ids), logits(other, ids))


PUBLISHED = {
    "llama": {"BF16"},
    "v2": {"BF16"},
    "v2-lite": {"BF16"},
    "v3": {"BF16", "F8_E4M3", "F32"},
    "v32": {"BF16", "F8_E4M3", "F32"},
    "v4": {"BF16", "F8_E4M3", "F8_E8M0", "I8", "I64", "F32"},
    "v41": {"BF16", "F8_E4M3", "F8_E8M0", "I8", "F32"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_published_storage(kind: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "a", kind, storage="published")
    assert {s.dtype for s in read_headers(directory).stored.values()} == PUBLISHED[kind]
    ids = list(range(3, 40))
    a, b = logits(directory, ids), logits(write_tiny(tmp_path / "b", kind), ids)
    if kind == "v41":
        assert torch.equal(a, b)
    else:  # rounded to 4 to 8 bits, the same model all the same
        assert not torch.equal(a, b)
        assert float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) > 0.5


def test_kernel_real_latents(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {kind: tiny_config(kind, real_latents=True) for kind in FAMILIES}
    for kind in ("v2", "v2-lite", "v3", "v32"):
        assert (sizes[kind]["kv_lora_rank"], sizes[kind]["qk_rope_head_dim"]) == (512, 64)
    assert sizes["v4"]["head_dim"] == 512 and sizes["v32"]["index_head_dim"] == 128
    directory = write_tiny(tmp_path / "a", "v32", real_latents=True)
    assert torch.isfinite(logits(directory, list(range(3, 30)))).all()


@pytest.mark.parametrize("kind", ["v3", "v32"])
def test_a_prediction_layer(kind: str, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "a", kind, mtp=True)
    checkpoint = Checkpoint.open(directory)
    skipped = checkpoint.skipped["mtp"]
    assert "model.layers.3.eh_proj.weight" in skipped
    assert "model.layers.3.shared_head.head.weight" in skipped


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["tiny", "v3", str(out), "--style", "transformers5", "--shards", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "rope_parameters" in json.loads((out / "config.json").read_text())
    Checkpoint.open(out)
    assert main(["tiny", "v2", str(out)]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind 'v5' is not known; known: llama, v2"):
        write_tiny(tmp_path, "v5")
    with pytest.raises(ConfigError, match="no drafter is known for v2"):
        write_tiny(tmp_path, "v2", mtp=True)
    with pytest.raises(ConfigError, match="written as published"):
        write_tiny(tmp_path, "v41", shards=2)
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="choose another directory"):
        write_tiny(tmp_path, "v2")
