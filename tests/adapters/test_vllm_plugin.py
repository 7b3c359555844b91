"""Our plugin for vLLM: what it splits, what it registers, how it is found. vLLM is not needed."""

import base64
import errno
import hashlib
import importlib
import importlib.metadata
import json
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.adapters import vllm_plugin
from deepdraft.adapters.vllm_launch import plan
from deepdraft.checkpoint import layouts
from deepdraft.checkpoint.stacks import Splitter
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked

STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3") / "published", "v3", real_latents=True)


@pytest.fixture(scope="module")
def stacked(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stacked(published, tmp_path_factory.mktemp("v3") / "stacked")


def test_stacks_split_into_the_published_tensors(published: Path, stacked: Path) -> None:
    wanted, have = (
        load_file(published / "model.safetensors"),
        load_file(stacked / "model.safetensors"),
    )
    assert STACK in have and len(have) < len(wanted)
    got = dict(Splitter(layouts.stacks()).published(have.items()))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert dict(Splitter(layouts.stacks()).published(wanted.items())).keys() == wanted.keys()


def test_a_stacked_checkpoint_is_served_by_the_plugin(published: Path, stacked: Path) -> None:
    launch = plan(stacked, cpu=True)
    assert launch.plugin and launch.hf_overrides["architectures"] == ["DeepdraftV3ForCausalLM"]
    words = launch.words()
    assert "DeepdraftV3ForCausalLM" in words[words.index("--hf-overrides") + 1]
    assert launch.variables(Path("here"))["PYTHONPATH"] == "here"
    assert not plan(published, cpu=True).plugin
    assert "PYTHONPATH" not in launch.variables()
    with pytest.raises(ConfigError, match="start it without drafts"):
        plan(stacked, cpu=True, drafts=1)


def test_a_family_that_the_plugin_does_not_split(tmp_path: Path) -> None:
    own = write_tiny(tmp_path / "published", "v32", real_latents=True)
    with pytest.raises(ConfigError, match="deepseek_v2 and deepseek_v3 only"):
        plan(write_stacked(own, tmp_path / "stacked"), cpu=False)


@pytest.mark.parametrize("fault", ["missing", "shape", "left over"])
def test_a_stacked_checkpoint_that_is_not_whole(stacked: Path, tmp_path: Path, fault: str) -> None:
    tensors = load_file(stacked / "model.safetensors")
    if fault == "missing":
        del tensors[STACK]
    elif fault == "shape":
        tensors[STACK] = tensors[STACK][:, :-1].contiguous()
    else:
        tensors[STACK] = torch.cat([tensors[STACK], tensors[STACK][:1]])
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((stacked / name).read_bytes())
    says = {
        "missing": r"missing: model.layers.1.mlp.experts.\d+.gate_proj",
        "shape": "rows that are 2 equal parts",
        "left over": r"left over: model.layers.1.mlp.experts.16.gate_proj",
    }
    with pytest.raises(CheckpointError, match=says[fault]):
        plan(tmp_path, cpu=True)


def test_registration_is_lazy_and_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry in place of vLLM's: names and strings only, the module is not imported."""
    registry = types.SimpleNamespace(models={}, calls=0)

    def register_model(name: str, where: str) -> None:
        registry.models[name] = where
        registry.calls += 1

    registry.register_model = register_model
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    vllm_plugin.write_directory(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        (point,) = (
            p
            for d in importlib.metadata.distributions(path=[str(tmp_path)])
            for p in d.entry_points.select(group="vllm.general_plugins")
        )
        register = point.load()
        register()
        register()
        assert registry.calls == 2 and "deepdraft_vllm.models" not in sys.modules
        assert registry.models == {
            f"Deepdraft{family}ForCausalLM": f"deepdraft_vllm.models:Deepdraft{family}ForCausalLM"
            for family in ("V2", "V3")
        }
    finally:
        sys.modules.pop("deepdraft_vllm", None)


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    wheel = vllm_plugin.write_wheel(tmp_path / "out")
    first = wheel.read_bytes()
    assert vllm_plugin.write_wheel(tmp_path / "out").read_bytes() == first
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next(n for n in names if n.endswith("RECORD"))
        rows = [line.split(",") for line in archive.read(record).decode().split()]
        assert {row[0] for row in rows} == names
        for name, digest, size in rows:
            if name == record:
                continue
            data = archive.read(name)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            assert digest == f"sha256={wanted.decode()}" and int(size) == len(data)
        table = json.loads(archive.read("deepdraft_vllm/map.json"))
    assert table["needs"]["deepseek_v3"]["topk_method"] == "noaux_tc"
    assert [s["target"].rpartition(".")[2] for s in table["stacks"]] == [
        "gate_up_proj",
        "down_proj",
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        vllm_plugin.write_wheel(tmp_path / "file")


def test_a_full_disk_leaves_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = zipfile.ZipFile.writestr

    def full(self: zipfile.ZipFile, name: object, data: bytes) -> None:
        if len(self.namelist()) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(ConfigError, match="No space left"):
        vllm_plugin.write_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == []
