"""Doctor: silent on clean checkpoints; what contradicts itself is named by key or tensor."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.cli.main import main
from deepdraft.errors import ConfigError
from deepdraft.proof.doctor import dynamic
from deepdraft.proof.doctor.finding import render
from deepdraft.proof.doctor.run import examine
from deepdraft.proof.tiny_families import KINDS
from deepdraft.proof.tiny_write import write_tiny
from tests.checkpoint.stacked import write_stacked
from tests.doctor.sparse import write_sparse

Tensors = dict[str, Tensor]


def changed(
    tmp_path: Path,
    kind: str,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
    **options: Any,
) -> Path:
    path = write_tiny(tmp_path / "model", kind, **options)
    if config is not None:
        values = json.loads((path / "config.json").read_text())
        for key, value in config.items():
            if value is None:
                del values[key]
            else:
                values[key] = value
        (path / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        weights = load_file(path / "model.safetensors")
        tensors(weights)
        kept = {name: t.contiguous() for name, t in weights.items()}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_clean_checkpoints_have_no_finding(kind: str, tmp_path: Path) -> None:
    others = {"style": "transformers5", "storage": "bfloat16", "shards": 2}
    options = {} if kind == "v41" else others
    report = examine(write_tiny(tmp_path / "a", kind, seed=5, **options))
    assert report.findings == [] and report.not_run == {}
    assert list(report.checks) == ["static", "tokenizer", "values", "dynamic"]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "v41"])
def test_published_storage_has_no_finding(kind: str, tmp_path: Path) -> None:
    assert examine(write_tiny(tmp_path / "a", kind, storage="published")).findings == []


def drop(*parts: str) -> Callable[[Tensors], None]:
    def apply(weights: Tensors) -> None:
        names = [n for n in weights if any(p in n for p in parts)]
        assert names
        for name in names:
            del weights[name]

    return apply


def each(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(weights: Tensors) -> None:
        names = [n for n in weights if part in n]
        assert names
        for name in names:
            weights[name] = change(weights[name])

    return apply


STATIC: list[tuple[str, dict[str, Any] | None, Callable[[Tensors], object] | None, str, str]] = [
    ("llama", {"num_key_value_heads": 4}, None, "num_key_value_heads", "the files show 2"),
    ("llama", {"intermediate_size": 200}, None, "intermediate_size", "the files show 176"),
    ("llama", {"num_hidden_layers": 4}, None, "num_hidden_layers", "the files show 3"),
    ("llama", {"num_hidden_layers": 2}, None, "num_hidden_layers", "the files show 3"),
    ("llama", None, drop("lm_head"), "tie_word_embeddings", "the files show true"),
    ("v2", {"q_lora_rank": None}, None, "q_lora_rank", "the files show 48"),
    ("v2-lite", {"q_lora_rank": 48}, None, "q_lora_rank", "the files show null"),
    ("v2", {"kv_lora_rank": 64}, None, "kv_lora_rank", "the files show 32"),
    ("v2", {"v_head_dim": 16}, None, "v_head_dim", "the files show 32"),
    ("v2", {"n_shared_experts": 1}, None, "n_shared_experts", "the files show 2"),
    ("v3", {"first_k_dense_replace": 2}, None, "first_k_dense_replace", "the files show 1"),
    ("v3", {"first_k_dense_replace": 0}, None, "first_k_dense_replace", "the files show 1"),
    ("v3", {"n_routed_experts": 20}, None, "n_routed_experts", "the files show 16"),
    ("v3", {"moe_intermediate_size": 64}, None, "moe_intermediate_size", "the files show 32"),
    ("v3", {"vocab_size": 500}, None, "vocab_size", "the files show 512"),
    ("v32", {"index_n_heads": 4}, None, "index_n_heads", "the files show 8"),
    ("v4", {"compress_ratios": [0, 4, 4, 4]}, None, "compress_ratios", "[0, 4, 128, 4]"),
    ("v4", {"num_hash_layers": 0}, None, "num_hash_layers", "the files show 1"),
    ("v4", {"n_routed_experts": 8}, None, "n_routed_experts", "the files show 6"),
    ("v3", None, drop("e_score_correction"), "model.layers.*.mlp.gate.e_score_correction_bias",
     "2 tensors are missing"),
    ("v2", None, drop("q_a_layernorm"), "model.layers.*.self_attn.q_a_layernorm.weight",
     "3 tensors are missing"),
    ("v3", None, drop("shared_experts.down"), "model.layers.*.mlp.shared_experts.down_proj.weight",
     "2 tensors are missing"),
    ("v2", None, each("o_proj", lambda w: w[:64]), "model.layers.*.self_attn.o_proj.weight",
     "3 tensors have another shape"),
    ("v3", None, each("mlp.gate.weight", lambda w: w.int()), "model.layers.*.mlp.gate.weight",
     "2 tensors are stored as I32"),
    ("v2", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
     None, "config.json", "both rope_parameters and rope_scaling"),
    ("llama", {"eos_token_id": 7}, None, "eos_token_id", "mean different tokens by eos"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "cause", "says"),
    STATIC,
    ids=[f"{s[0]}-{s[3]}-{i}" for i, s in enumerate(STATIC)],
)
def test_static_checks_name_the_cause(
    kind: str, config: Any, tensors: Any, cause: str, says: str, tmp_path: Path
) -> None:
    report = examine(changed(tmp_path, kind, config, tensors), static_only=True)
    first = report.errors[0]
    assert first.cause == cause and says in first.what
    assert report.exit_code == 1
    if not cause.startswith(("model.", "config", "eos")):
        assert "settles" in first.evidence and len(report.errors) <= 2


def test_two_wrong_keys_are_both_named(tmp_path: Path) -> None:
    wrong = {"kv_lora_rank": 64, "n_routed_experts": 24}
    report = examine(changed(tmp_path, "v3", wrong), static_only=True)
    assert {f.cause for f in report.errors} == {"kv_lora_rank", "n_routed_experts"}


VALUES: list[tuple[str, Callable[[Tensors], object], str, str]] = [
    ("v3", each("correction_bias", torch.zeros_like),
     "model.layers.*.mlp.gate.e_score_correction_bias", "every value is 0"),
    ("v2", each("kv_a_layernorm", torch.ones_like),
     "model.layers.*.self_attn.kv_a_layernorm.weight", "every value is 1"),
    ("v2", each("shared_experts.up", torch.zeros_like),
     "model.layers.*.mlp.shared_experts.up_proj.weight", "every value is 0"),
    ("llama", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
     "lm_head.weight", "may have been tied by mistake"),
    ("llama", each("lm_head", lambda w: w.bfloat16().float()), "lm_head.weight",
     "rounded to bfloat16"),
    ("llama", each("lm_head", lambda w: w.bfloat16()), "lm_head.weight", "stored as BF16"),
    ("llama", lambda w: w.update({"model.layers.1.mlp.up_proj.weight":
                                  w["model.layers.0.mlp.up_proj.weight"].clone()}),
     "model.layers.*.mlp.up_proj.weight", "is a copy of"),
    ("llama", each("layers.0.mlp.up_proj", lambda w: w * 2.0**20),
     "model.layers.*.mlp.up_proj.weight", "beyond float16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tensors", "cause", "says"), VALUES, ids=[f"{v[0]}-{v[3]}" for v in VALUES]
)
def test_odd_values_are_warned_of(
    kind: str, tensors: Any, cause: str, says: str, tmp_path: Path
) -> None:
    report = examine(changed(tmp_path, kind, None, tensors))
    first = report.findings[0]
    assert (first.cause, first.severity) == (cause, "warning") and says in first.what
    assert report.exit_code == 0


def test_values_that_cannot_be_right(tmp_path: Path) -> None:
    def poison(weights: Tensors) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan

    report = examine(changed(tmp_path, "llama", None, poison))
    assert report.errors[0].cause == "model.layers.1.mlp.up_proj.weight"
    assert report.not_run == {"dynamic": "errors before it"}


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    report = examine(changed(tmp_path, "llama", {"tie_word_embeddings": True}))
    assert report.errors[0].cause == "lm_head.weight" and report.exit_code == 1


def test_activations_beyond_float16(tmp_path: Path) -> None:
    def stretch(weights: Tensors) -> None:  # weights fit, their product does not
        for name in weights:
            if "up_proj" in name:
                weights[name] = weights[name] * 2.0**16
            if "down_proj" in name:
                weights[name] = weights[name] * 2.0**-16

    report = examine(changed(tmp_path, "llama", None, stretch))
    assert [f.cause for f in report.findings] == ["float16"]
    assert "L0" in report.findings[0].what and report.exit_code == 0


def test_an_engine_whose_bits_depend_on_the_cutting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = dynamic.load_model

    def load(*args: Any) -> Any:
        model = right(*args)
        step = model.step

        def wrong(work: Any, **options: Any) -> Any:
            out = step(work, **options)
            if sum(len(new) for _, new in work) == 7:
                out.logits = out.logits + 1e-6
            return out

        model.step = wrong
        return model

    monkeypatch.setattr(dynamic, "load_model", load)
    report = examine(write_tiny(tmp_path / "a", "llama"))
    assert [f.cause for f in report.errors] == ["engine"]
    assert "in chunks" in report.errors[0].what


@pytest.mark.parametrize(
    ("kind", "engine", "causes"),
    [
        ("v3", "vllm", ["kv_lora_rank"]),
        ("v32", "vllm", ["model_type"]),
        ("v4", "vllm", ["model_type"]),
        ("llama", "vllm", []),
        ("v3", "lmdeploy", []),
        ("v41", "lmdeploy", ["model_type"]),
        ("v3", "triton", []),
    ],
)
def test_what_other_engines_lack(kind: str, engine: str, causes: list[str], tmp_path: Path) -> None:
    report = examine(write_tiny(tmp_path / "a", kind), engine=engine, static_only=True)
    assert [f.cause for f in report.findings] == causes
    assert all(f.severity == "warning" for f in report.findings)


def test_keys_that_transformers_leaves_out(tmp_path: Path) -> None:
    gone = {"topk_method": None, "scoring_func": None, "moe_layer_freq": None}
    path = changed(tmp_path, "v3", gone, real_latents=True)
    assert examine(path, static_only=True).findings == []
    report = examine(path, engine="vllm", static_only=True)
    assert [f.cause for f in report.errors] == list(gone)
    with pytest.raises(ConfigError, match="engine 'other' is not known"):
        examine(path, engine="other")


def test_a_v4_whose_factor_transformers_would_derive(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a", "v4", style="transformers5")
    values = json.loads((path / "config.json").read_text())
    del values["rope_parameters"]["compress"]["attention_factor"]
    (path / "config.json").write_text(json.dumps(values))
    (finding,) = examine(path, static_only=True).findings
    assert finding.cause == "rope_parameters.compress.attention_factor"
    assert finding.severity == "warning" and "1.277" in finding.evidence


def test_published_shapes_by_headers_alone(tmp_path: Path) -> None:
    """96,085 tensors in 48 files of 510 GB that are holes: nothing but headers can be read."""
    data = Path(__file__).parents[1] / "checkpoint" / "data" / "v41-config.json"
    path = tmp_path / "model"
    assert write_sparse(path, json.loads(data.read_text()), 48) == 96_085
    report = examine(path)
    assert [f.cause for f in report.findings] == ["tokenizer.json"]
    assert "GB of weights" in report.not_run["values, dynamic"]
    shards = sorted(path.glob("*.safetensors"))
    shards[7].unlink()
    assert f"lacks {shards[7].name}" in examine(path).errors[0].what


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "a", "v2")
    assert main(["doctor", str(path)]) == 0
    assert "no findings" in capsys.readouterr().out
    shutil.copy(path / "config.json", path / "old.json")
    config = json.loads((path / "config.json").read_text()) | {"n_shared_experts": 3}
    (path / "config.json").write_text(json.dumps(config))
    assert main(["doctor", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and report["findings"][0]["cause"] == "n_shared_experts"
    assert set(report["findings"][0]) == {
        "check", "cause", "what", "evidence", "fix", "severity",
    }  # fmt: skip
    text = render(examine(path, static_only=True))
    assert "error: n_shared_experts" in text and "fix: set n_shared_experts to 2" in text


def test_static_checks_start_without_torch(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a", "v41")
    code = (
        "import sys; from deepdraft.proof.doctor.run import main; "
        f"status = main({str(path)!r}, static_only=True); "
        "sys.exit(10 if 'torch' in sys.modules else status)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("kind", "engine", "severity", "fix"),
    [
        ("v3", "native", None, ""),
        ("v2", "vllm", "warning", "`deepdraft vllm up` brings"),
        ("v3", "lmdeploy", "warning", "`deepdraft lmdeploy up` brings"),
        ("v32", "vllm", "error", "save_pretrained"),
    ],
)
def test_expert_stacks(
    kind: str, engine: str, severity: str | None, fix: str, tmp_path: Path
) -> None:
    stacked = write_stacked(write_tiny(tmp_path / "a", kind, real_latents=True), tmp_path / "b")
    report = examine(stacked, engine=engine, static_only=True)
    found = [f for f in report.findings if f.cause == "model.layers.*.mlp.experts.gate_up_proj"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(fix in f.fix and engine in f.what for f in found)
    assert not any(f.check == "tensors" for f in report.findings)
