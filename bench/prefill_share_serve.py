"""Prompts shared by two GPUs as `serve --tp` has them: bits, and a rank that is lost.

    python3 bench/prefill_share_serve.py --json FILE [--seconds 100] [--parts engine,lost]

engine  six layers of the published sizes and the drafter, rank 0 leads: a prompt by other
        boundaries, and beside a sequence that decodes, bit for bit
lost    the same, and rank 1 ends in the middle of a prompt: what is said, and how soon

Starts its ranks itself; writes FILE after every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from prefill_share_gpu import small_args  # noqa: E402
from torch import Tensor  # noqa: E402

from deepdraft.arch import V41Args  # noqa: E402
from deepdraft.engine.dummy import DummyWeights  # noqa: E402
from deepdraft.engine.gpu_ranks import open_gpu_rank  # noqa: E402
from deepdraft.engine.ranks import Follower  # noqa: E402
from deepdraft.errors import RankError  # noqa: E402
from deepdraft.parallel.group import NVLINK_MULTICAST_OFF  # noqa: E402
from deepdraft.parallel.launch import Limits, run_ranks  # noqa: E402
from deepdraft.parallel.rank import Rank, run_rank, this_rank  # noqa: E402
from deepdraft.proof.bench_step_main import read_args  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--parts", default="engine,lost")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    found: dict = {}
    begin = time.monotonic()
    for part in options.parts.split(","):
        out = options.json.with_suffix(f".{part}.json")
        out.unlink(missing_ok=True)
        left = max(8.0, options.seconds - (time.monotonic() - begin))
        command = [sys.executable, "-W", "ignore", __file__, "--json", str(out), "--parts", part]
        ended: dict[str, Any] = {}
        try:
            env = {**os.environ, **NVLINK_MULTICAST_OFF}
            run_ranks(command, 2, env=env, limits=Limits(step_s=left))
        except RankError as error:
            ended = {"said": error.message, "at": round(time.time(), 2)}
        found[part] = (json.loads(out.read_text()) if out.exists() else {}) | ended
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"-- {part}: {json.dumps(ended)}", flush=True)
    return 0


class Published(DummyWeights):
    """Random weights that are opened like a checkpoint."""

    def __init__(self, args: V41Args, device: torch.device) -> None:
        super().__init__(args, device=device, seed=5)
        self.args, self.path = args, ROOT


def engine(me: Rank) -> None:
    """Rank 0 leads, the others follow."""
    options = arguments()
    me.pulse.set_state("loading")
    torch.cuda.set_device(me.rank)
    args = small_args(read_args(None))
    ids = [i % args.engram_compressed_vocab_size for i in range(args.vocab_size)]
    given: Any = Published(args, torch.device("cuda", me.rank))
    runner: Any = open_gpu_rank(
        me, given, None, token_map=ids, max_context=65536, num_sequences=3, prefill="encoder",
        prefill_chunk=8192,
    )  # fmt: skip
    if me.rank == 0:
        Conversations(runner, options).run()
        return
    if options.parts == "lost":
        prefill, calls = runner.prefill, []

        def ends(*given: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return prefill(*given, **more)

        runner.prefill = ends
    Follower(me, runner, runner.check_exchanges).run()


class Conversations:
    """What rank 0 does."""

    def __init__(self, runner: Any, options: argparse.Namespace) -> None:
        self.runner, self.options = runner, options
        self.found: dict[str, Any] = {}
        vocabulary = runner.model.args.vocab_size
        self.text = np.random.default_rng(4).integers(0, vocabulary, 20_011).tolist()
        self.note("rows of a chunk", runner.prefill_rows)

    def note(self, name: str, value: Any) -> None:
        """The file gets a figure."""
        self.found[name] = value
        part = self.options.parts
        self.options.json.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"-- {part}, {name}: {json.dumps(value)[:500]}", flush=True)

    def read(
        self, sequence: Any, ends: list[int], between: Callable[[], object] = lambda: None
    ) -> Tensor:
        """The text in parts."""
        logits, size = None, len(self.text)
        for first, end in zip((0, *ends), (*ends, size), strict=True):
            logits = self.runner.prefill(sequence, self.text[first:end], final=end == size)
            self.note("last part ended", round(time.time(), 2))
            between()
        assert logits is not None
        return logits.clone()

    def steps(self, sequence: Any, token: int, count: int) -> list[Tensor]:
        """Plain decoding: the logits."""
        rows = []
        for _ in range(count):
            rows.append(self.runner.step([(sequence, [token])])[0].clone())
            token = int(rows[-1].argmax())
        return rows

    def run(self) -> None:
        """Three sequences of one text."""
        runner, size = self.runner, len(self.text)
        one, two, three = (runner.open_sequence() for _ in range(3))
        logits = self.read(one, [8192, 16384])
        token = int(logits.argmax())
        self.note("finite", bool(torch.isfinite(logits).all()))
        plain = [logits, *self.steps(one, token, 8)]
        again = [self.read(two, [3, 5000, 12_345]), *self.steps(two, token, 8)]
        same = [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
        self.note("other boundaries, same bits", same)
        runner.commit(one, size)
        beside: list[Tensor] = []

        def between() -> None:
            last = int(beside[-1].argmax()) if beside else token
            beside.extend(self.steps(one, last, 2))

        third = self.read(three, [7001, 15_000, 19_999], between)
        self.note("beside a sequence that decodes", torch.equal(third, logits))
        same = [torch.equal(a, b) for a, b in zip(plain[1:], beside, strict=True)]
        self.note("which has the same bits", same)
        (draft,) = runner.draft([(three, token)])
        previous, drafted = token, []
        for i in range(len(draft)):
            previous = int(draft.refine(i, previous)[0].argmax())
            drafted.append(previous)
        self.note("drafted", drafted)
        for sequence in (one, two, three):
            runner.close_sequence(sequence)
        self.note("all sequences given back", runner.num_free == 3)


if __name__ == "__main__":
    rank = this_rank()
    if rank is None:
        raise SystemExit(main())
    run_rank(rank, engine)
