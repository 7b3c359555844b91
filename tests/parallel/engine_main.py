"""Every call of a runner on two ranks: `python engine_main.py MODEL OUT`, started by `run_ranks`.

Rank 0 writes what it found; the other rank follows, and any difference of order would hang or end
both.
"""

import json
import sys
from pathlib import Path

import torch

from deepdraft.config import EngineConfig
from deepdraft.engine.load import load_runner
from deepdraft.engine.ranks import follow
from deepdraft.errors import StateError
from deepdraft.parallel.rank import Rank, run_rank, this_rank

OPTIONS = EngineConfig(tp=2, max_running=2, max_context=256, threads=1, numerics="quant")
TEXT = [int(i) for i in torch.randint(4, 4000, (40,), generator=torch.Generator().manual_seed(1))]


def lead(me: Rank, model: Path, out: Path) -> None:
    runner, *_ = load_runner(model, OPTIONS, me)
    one, two = runner.open_sequence(), runner.open_sequence()
    found: dict[str, object] = {}
    try:
        runner.open_sequence()
    except StateError as error:
        found["refused"] = str(error)
    plain = [runner.prefill(one, TEXT[:20], final=True)]
    plain += [runner.step([(one, [t])])[0].clone() for t in TEXT[20:30]]

    # The other sequence: parts of a prompt, rows of drafts, taken back, parked, gone on with.
    assert runner.prefill(two, TEXT[:7], final=False) is None
    runner.prefill(two, TEXT[7:20], final=True)
    rows = runner.step([(two, TEXT[20:26])]).clone()
    found["rows"] = all(torch.equal(rows[i], plain[i + 1]) for i in range(6))
    runner.commit(two, 23)
    parked = runner.park(two)
    three = runner.open_sequence()  # the place is free
    runner.close_sequence(three, scrub=True)
    two = runner.unpark(parked)
    del parked
    rows = runner.step([(two, TEXT[23:30]), (one, TEXT[30:31])]).clone()
    found["gone_on"] = all(torch.equal(rows[i], plain[i + 4]) for i in range(7))

    # Drafts: one by one and together give the same.
    drafts = runner.draft([(one, TEXT[31]), (two, TEXT[30])])
    alone = [draft.refine(0, t)[0].clone() for draft, t in zip(drafts, (1, 2), strict=True)]
    logits, raw = runner.refine(drafts, 0, [1, 2])
    found["together"] = all(torch.equal(a, b) for a, b in zip(alone, logits, strict=True))
    found["raw"] = len(raw) == 2
    del drafts
    runner.close_sequence(one)
    runner.close_sequence(two)
    found["free"] = runner.num_free
    out.write_text(json.dumps(found))


def work(me: Rank) -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    if me.rank == 0:
        lead(me, model, out)
    else:
        follow(model, OPTIONS, me)


if __name__ == "__main__":
    rank = this_rank()
    assert rank is not None
    run_rank(rank, work)
