"""Golden directories of the families, their models, and copies with one thing changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.models import model_class

DATA = Path(__file__).parent / "data"
SETS = ("llama-a", "deepseek-v2-a", "deepseek-v3-a", "deepseek-v32-a", "deepseek-v4-a")
VARIANTS = (
    "llama-gqa-yarn",
    "llama-tied-llama3",
    "v2-groups",
    "v3-plain-halves",
    "v32-whole",
    "v4-other",
)

Tensors = dict[str, Tensor]


def golden_copy(
    name: str,
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
) -> Path:
    """A copy of a golden directory; `config` sets keys (None deletes one, a dict is merged),
    `tensors` changes the weights in place."""
    target = directory / name
    shutil.copytree(DATA / name, target)
    at = target / "checkpoint"
    if config is not None:
        values = json.loads((at / "config.json").read_text())
        merge(values, config)
        (at / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        weights = load_file(at / "model.safetensors")
        tensors(weights)
        save_file({k: v.contiguous() for k, v in weights.items()}, at / "model.safetensors")
    logits = load_file(target / "logits.safetensors")
    if "oneshot_logits" not in logits:
        logits["oneshot_logits"] = torch.cat([logits["prompt_logits"], logits["decode_logits"]])
        save_file(logits, target / "logits.safetensors")
    return target


def merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            values.pop(key)
        elif isinstance(value, dict) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = value


def config_of(name: str, file: str = "config.json") -> dict[str, Any]:
    return json.loads((DATA / name / "checkpoint" / file).read_text())


def text_of(name: str) -> list[int]:
    tokens = json.loads((DATA / name / "tokens.json").read_text())
    return [*tokens["prompt"], *tokens["greedy_tokens"]]


@pytest.fixture(scope="session")
def load() -> Callable[[str], Any]:
    """The model of a data directory, loaded once."""
    loaded: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in loaded:
            checkpoint = Checkpoint.open(DATA / name / "checkpoint")
            loaded[name] = model_class(checkpoint.args)(checkpoint.args, checkpoint)
        return loaded[name]

    return model
