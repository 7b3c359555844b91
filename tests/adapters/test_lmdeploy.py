"""LMDeploy: settings, refusals, what its parameters must be. LMDeploy itself is not needed."""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepdraft.adapters import child, lmdeploy_check
from deepdraft.adapters.lmdeploy_check import Checked, check, expected
from deepdraft.adapters.lmdeploy_launch import plan, write_map
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import ConfigError
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked


def made(tmp_path: Path, kind: str, **options: Any) -> Path:
    return write_tiny(tmp_path / kind, kind, **options)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("llama", "turbomind"), ("v2-lite", "pytorch"), ("v3", "pytorch"), ("v32", "pytorch")],
)
def test_the_engine_of_each_family(tmp_path: Path, kind: str, engine: str) -> None:
    launch = plan(made(tmp_path, kind))
    words = launch.words()
    assert launch.engine == engine and words[words.index("--backend") + 1] == engine
    overrides = launch.hf_overrides
    assert overrides == ({} if kind == "llama" else {"pad_token_id": None})
    assert launch.notes == () and "--speculative-algorithm" not in words


def test_what_to_know_of_a_family(tmp_path: Path) -> None:
    (note,) = plan(made(tmp_path, "v2")).notes
    assert "softmax of V2's router" in note
    (note,) = plan(made(tmp_path, "v4")).notes
    assert "flash_mla" in note
    checkpoint = made(tmp_path, "v3")
    config = read_config(checkpoint / "config.json") | {"rms_norm_eps": 1e-5}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (note,) = plan(checkpoint).notes
    assert "eps 1e-6, whatever" in note


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no DeepSeek-V4\.1"):
        plan(made(tmp_path, "v41"))
    v3 = made(tmp_path, "v3")
    with pytest.raises(ConfigError, match="announces no"):
        plan(v3, drafts=1)
    stacked = write_stacked(v3, tmp_path / "stacked")
    with pytest.raises(ConfigError, match="leave drafts out"):
        plan(write_stacked(made(tmp_path / "mtp", "v3", mtp=True), tmp_path / "s"), drafts=1)
    assert plan(stacked).stacked
    with pytest.raises(ConfigError, match="deepseek_v2 and deepseek_v3 only"):
        plan(write_stacked(made(tmp_path, "v32"), tmp_path / "stacked32"))
    llama = made(tmp_path, "llama")
    with pytest.raises(ConfigError, match="drafts with no layer of llama"):
        plan(llama, drafts=1)
    (llama / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        plan(llama)


def test_drafts_and_what_transformers_leaves_out(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "v3", mtp=True)
    config = read_config(checkpoint / "config.json")
    for key in ("topk_method", "scoring_func"):
        del config[key]
    (checkpoint / "config.json").write_text(json.dumps(config))
    words = plan(checkpoint, drafts=2).words()
    assert words[words.index("--speculative-algorithm") :] == [
        "--speculative-algorithm", "deepseek_mtp", "--speculative-num-draft-tokens", "2",
    ]  # fmt: skip
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "pad_token_id": None,
    }  # fmt: skip


def test_the_module_map_splits_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy's class is replaced by one that keeps what it is given."""

    class Theirs:
        def load_weights(self, weights: Any) -> None:
            self.given = dict(weights)

    name = "lmdeploy.pytorch.models.deepseek_v2"
    for part in ("lmdeploy", "lmdeploy.pytorch", "lmdeploy.pytorch.models"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    module = types.ModuleType(name)
    module.DeepseekV2ForCausalLM = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    file = write_map(tmp_path / "map")
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location("a_module_map", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.modules.pop("deepdraft_stacks", None)
    published = made(tmp_path, "v3")
    stacked = load_file(write_stacked(published, tmp_path / "stacked") / "model.safetensors")
    model = getattr(loaded, loaded.CUSTOM_MODULE_MAP["DeepseekV3ForCausalLM"])()
    model.load_weights(stacked.items())
    wanted = load_file(published / "model.safetensors")
    assert model.given.keys() == wanted.keys()
    assert all(torch.equal(model.given[n], wanted[n]) for n in wanted)


def test_expected_parameters(tmp_path: Path) -> None:
    """Written out for one layer, apart from the map."""
    checkpoint = made(tmp_path, "v3")
    args: Any = ModelSpec.of(read_config(checkpoint / "config.json")).args
    stored = load_file(checkpoint / "model.safetensors")
    map_ = expected(args).plan({n: tuple(t.shape) for n, t in stored.items()})
    made_ = {name: map_.read(name, stored.__getitem__) for name in map_.pieces}
    at = "model.layers.1"
    gate, up = (stored[f"{at}.mlp.experts.5.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(made_[f"{at}.mlp.experts.gate_up.weight"][5], torch.cat([gate, up]))
    whole = stored[f"{at}.self_attn.q_b_proj.weight"].view(4, 48, -1)
    turned = made_[f"{at}.self_attn.q_b_proj.weight"].view(4, 48, -1)
    assert torch.equal(turned[:, :32], whole[:, :32])
    assert torch.equal(turned[:, 32:40], whole[:, 32::2])
    assert torch.equal(turned[:, 40:], whole[:, 33::2])
    latent = stored[f"{at}.self_attn.kv_a_proj_with_mqa.weight"]
    got = made_[f"{at}.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(got[:32], latent[:32]) and torch.equal(got[32:40], latent[32::2])


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[Path], Checked]]:
    """`check` with a child that answers as a right LMDeploy would, then changed."""

    def with_change(change: Callable[[dict[str, Any], dict, dict], None]) -> Any:
        def asked(what: str, python: Path, program: str, order: dict, **more: Any) -> dict:
            checkpoint = Path(order["checkpoint"])
            spec = ModelSpec.of(read_config(checkpoint / "config.json"))
            stored = load_file(checkpoint / "model.safetensors")
            map_ = expected(spec.args).plan({n: tuple(t.shape) for n, t in stored.items()})
            weights = {n: map_.read(n, stored.__getitem__).contiguous() for n in map_.pieces}
            angles = torch.tensor(order["positions"])[:, None] * torch.tensor(
                spec.effective["rope.frequencies"]
            )
            probes = {"cos": angles.cos().repeat(1, 2), "sin": angles.sin().repeat(1, 2)}
            words = order["words"]
            answer = {
                "version": "0.18.0", "class": "Their", "unloaded": [], "turbomind": True,
                "softmax_scale": None, "eps": {"model.norm": 1e-6},
                "options": {
                    "backend": words[words.index("--backend") + 1],
                    "session_len": int(words[words.index("--session-len") + 1]),
                    "hf_overrides": None,
                    "server_name": words[words.index("--server-name") + 1],
                    "server_port": int(words[words.index("--server-port") + 1]),
                    "model_name": words[words.index("--model-name") + 1],
                },
            }  # fmt: skip
            change(answer, weights, probes)
            save_file(weights, more["folder"] / "weights.safetensors")
            save_file(probes, more["folder"] / "probes.safetensors")
            return answer

        monkeypatch.setattr(child, "ask", asked)
        place = types.SimpleNamespace(python=Path("python"))
        monkeypatch.setattr(lmdeploy_check, "ready", lambda name: place)
        return lambda path: check(plan(path))

    return with_change


def test_a_right_answer_has_no_problem(tmp_path: Path, answers: Any) -> None:
    found = answers(lambda *_: None)(made(tmp_path, "llama"))
    assert found.problems == [] and found.parameters == found.equal == 21 and found.fused == 6


def swapped(name: str) -> Callable[..., None]:
    def change(answer: dict, weights: dict, probes: dict) -> None:
        weights[name] = weights[name].flip(0).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swapped("model.layers.1.self_attn.qkv_proj.weight"), "layers.1.self_attn.qkv_proj"),
        (lambda a, w, p: a.update(unloaded=["lm_head.weight"]), "lm_head.weight was not loaded"),
        (lambda a, w, p: p.update(cos=p["cos"] * 1.01), "its rotary tables differ"),
        (lambda a, w, p: a.update(eps={"model.norm": 1e-5}), "model.norm has eps 1e-05"),
        (lambda a, w, p: a.update(turbomind=False), "TurboMind does not take"),
        (lambda a, w, p: a["options"].update(session_len=7), "its parser read"),
    ],
)
def test_what_is_not_right_is_named(tmp_path: Path, answers: Any, change: Any, says: str) -> None:
    (problem,) = answers(change)(made(tmp_path, "llama")).problems
    assert says in problem


def test_weights_that_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = plan(made(tmp_path, "llama"))
    monkeypatch.setattr(lmdeploy_check, "_MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="the map is the same"):
        check(launch)
