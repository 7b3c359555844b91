"""One rank of a real run: `python model_main.py CONVERTED OUT FAULT`, started by `run_ranks`."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepdraft.checkpoint.presharded import open_rank, shard_plan
from deepdraft.parallel.group import ProcessGroup
from deepdraft.parallel.rank import Rank, run_rank, this_rank
from deepdraft.parallel.shards import Shards
from tests.parallel.tiny import model_of, run


def main(me: Rank, converted: Path, out: Path, fault: str) -> None:
    torch.set_num_threads(1)
    me.pulse.set_state("loading")
    group = ProcessGroup(me.rank, me.size, me.store, pulse=me.pulse)
    checkpoint = open_rank(converted, me.rank, me.size)
    shards = Shards(shard_plan(checkpoint.args, me.size), group)
    model = model_of(checkpoint, checkpoint, shards, "quant")
    if fault and me.rank == me.size - 1:
        plant(model, fault)
    with me.pulse.step():
        result = run(model)
    save_file({k: v.contiguous() for k, v in result.items()}, out / f"{me.rank}.safetensors")
    group.close()


def plant(model, fault: str) -> None:
    """Something that goes wrong in layer 2 of this rank alone."""
    attention = model.blocks[2].attention
    if fault == "nan":
        attention.wo_b[0, 0] = torch.nan
    elif fault == "exit":
        attention.join = lambda _: os._exit(7)


if __name__ == "__main__":
    rank = this_rank()
    assert rank is not None
    run_rank(rank, lambda me: main(me, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
