"""Writes `model.json`: sizes, token ids and the n-gram token map that training needs.

Owns: what is derived from the tokenizer once, so that the device needs no tokenizer.
Run: `python -m training.prepare TOKENIZER_DIR OUT/model.json`.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from training.spec import demo_args

NOISE = "<\uff5cSystem\uff5c>"
IMAGE = "<\uff5cdeepseek_image\uff5c>"


def write_model_file(tokenizer_dir: Path, out: Path) -> V41Args:
    """Derive the demo model's sizes from a tokenizer and write them with the token map."""
    from deepdraft.text.tokenizer import Tokenizer, engram_token_map

    tokenizer = Tokenizer.load(tokenizer_dir)
    token_map = list(engram_token_map(tokenizer))
    noise = tokenizer.id_of(NOISE)
    if noise is None:
        raise ValueError(f"{tokenizer_dir}: the drafter's noise token {NOISE} is not in it")
    args = demo_args(
        vocab_size=tokenizer.vocab_size,
        compressed_vocab=max(token_map) + 1,
        noise_token_id=noise,
        image_token_id=tokenizer.id_of(IMAGE),
    )
    digest = hashlib.sha256((tokenizer_dir / "tokenizer.json").read_bytes()).hexdigest()
    out.write_text(
        json.dumps(
            {
                "args": dataclasses.asdict(args),
                "token_map": token_map,
                "tokenizer_sha256": digest,
            }
        )
    )
    return args


def read_model_file(path: Path) -> tuple[V41Args, list[int], dict[str, Any]]:
    """Sizes, token map and the raw record."""
    raw = json.loads(path.read_text())
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["args"].items()}
    return V41Args(**values), raw["token_map"], raw


if __name__ == "__main__":
    print(write_model_file(Path(sys.argv[1]), Path(sys.argv[2])))
