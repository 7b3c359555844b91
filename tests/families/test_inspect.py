"""`deepdraft inspect` on checkpoints of the families."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepdraft.errors import ConfigError
from deepdraft.proof.inspect import inspect, main
from tests.families.conftest import DATA, SETS, golden_copy
from tests.families.stored import quantise
from tests.families.test_config import PUBLISHED


@pytest.mark.parametrize("name", SETS)
def test_directories(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = DATA / name / "checkpoint"
    assert main(str(at)) == 0
    assert "B/token" in capsys.readouterr().out
    report = inspect(at)
    size = (at / "model.safetensors").stat().st_size
    assert 0 < size - report["total"]["bytes"] < 20_000  # the header
    assert report["files"] == "1 shards, every tensor accounted for"
    assert report["total"]["bytes"] == sum(g["bytes"] for g in report["groups"].values())


def test_state_of_published_sizes(tmp_path: Path) -> None:
    (tmp_path / "v3.json").write_text(json.dumps(PUBLISHED["V3"]))
    (tmp_path / "v32.json").write_text(json.dumps(PUBLISHED["V3.2"]))
    (tmp_path / "coder.json").write_text(json.dumps(PUBLISHED["Coder-33B"]))
    v3, v32, coder = (inspect(tmp_path / f"{n}.json") for n in ("v3", "v32", "coder"))
    assert v3["state"]["kv_bytes_per_token"] == 61 * 576 * 4
    assert v32["state"]["kv_bytes_per_token"] == 61 * (576 + 128) * 4
    assert coder["state"]["kv_bytes_per_token"] == 62 * 2 * 8 * 128 * 4
    assert v3["state"]["constant_bytes"] == 0 and v3["family"] == "deepseek_v3"
    assert "config only" in v3["files"] and not v3["skipped"]


def test_formats_are_counted(tmp_path: Path) -> None:
    at = golden_copy("deepseek-v3-a", tmp_path) / "checkpoint"
    quantise(at)
    report = inspect(at)
    assert report["dtypes"].keys() == {"F8_E4M3", "F32"}
    assert (
        report["total"]["params"]
        == inspect(DATA / "deepseek-v3-a" / "checkpoint")["total"]["params"]
    )


def test_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="known for DeepSeek-V4"):
        inspect(DATA / "llama-a" / "checkpoint", gpus=4)


def test_command_starts_without_torch() -> None:
    code = (
        "import sys; from deepdraft.proof.inspect import main; "
        f"status = main({str(DATA / 'deepseek-v4-a' / 'checkpoint')!r}); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deepseek_v4 (1 shards" in done.stdout and "B constant" in done.stdout
