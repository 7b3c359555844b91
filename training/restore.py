"""A published checkpoint -> weight shards to train on from; the inverse of `export.py`.

Owns: stacking the experts and the dtypes of the shards. Knows nothing of: training.
Run: `python -m training.restore --checkpoint DIR --model model.json --out DIR`.
"""

import argparse
import sys
from pathlib import Path

import torch

from deepdraft.checkpoint.reader import Checkpoint
from training.model import Base
from training.prepare import read_model_file
from training.store import save_weights


@torch.no_grad()
def restore(checkpoint: Path, model_file: Path, out: Path) -> list[Path]:
    """Write the shards; returns their paths. Values are the stored ones, as the engine reads them.

    ValueError where the checkpoint is not of the sizes in `model_file`.
    """
    args, token_map, _ = read_model_file(model_file)
    source = Checkpoint.open(checkpoint)
    model = Base(args, token_map)
    for p in model.table.values():
        parts = [source.tensor(name) for name in p.published]
        value = torch.stack(parts) if len(parts) > 1 or p.published[0] != p.name else parts[0]
        if tuple(value.shape) != p.shape:
            raise ValueError(f"{checkpoint}: {p.name} is {tuple(value.shape)}, not {p.shape}")
        model.params[p.name].copy_(value)
    return save_weights(model, out, {"restored_from": checkpoint.name})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    o = parser.parse_args()
    for path in restore(o.checkpoint, o.model, o.out):
        print(path, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
