"""A checkpoint with a tokenizer that splits over two ranks: the bundled model's, made smaller."""

import json
import shutil
from pathlib import Path

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.proof.tiny import RandomWeights

DEMO = Path(__file__).parents[2] / "deepdraft/demo/checkpoint"


def write_served(directory: Path) -> Path:
    """Writes it with random weights."""
    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "dspark_n_routed_experts": 4,
        "max_position_embeddings": 4096,
    }
    weights = RandomWeights(parse_args(config))
    write_checkpoint(directory, config, weights.tensor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (DEMO / name).is_file():
            shutil.copy(DEMO / name, directory / name)
    return directory
