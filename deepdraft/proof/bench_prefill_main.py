"""`deepdraft bench prefill`: encoder prefill of random weights on one GPU, share of the limit.

Owns: which contexts and lengths are run, the table, the file. Knows nothing of: kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from deepdraft.engine.dummy import dummy_args
from deepdraft.engine.gpu_runner import check_gpu
from deepdraft.errors import ConfigError
from deepdraft.models.v41_prefill_plan import plan_prefill
from deepdraft.proof.bench import commit, machine
from deepdraft.proof.bench_prefill import (
    Ceilings,
    Line,
    PrefillBench,
    chunks,
    long_prompt_estimate,
    matrix_rate,
    prompts,
)
from deepdraft.proof.bench_step_main import copy_rate, read_args

TOKENS = 1 << 20
LENGTHS = (1024, 8192, 65536)
_SPARE = 4 << 30
"""Left to the driver, compiled kernels and the allocator."""


def main(
    model: str | Path | None,
    *,
    layers: int | None,
    expert_pool: int | None,
    rows: int | None,
    context: int,
    lengths: Sequence[int],
    as_json: bool,
    out: str | None,
) -> int:
    """Measure, print, write. `context`: the longest prompt; chunks are timed at its start, a
    quarter of it and its end. Raises ConfigError where the GPU or the sizes do not allow it."""
    full = read_args(model)
    args = dummy_args(full, layers=layers, expert_pool=expert_pool, engram_rows=1 << 21)
    if args.num_hidden_layers <= args.decoder_start:
        raise ConfigError(f"--layers must leave a decoder layer: more than {args.decoder_start}")
    check_gpu(args, drafter=False)
    ceilings = Ceilings(matrix_rate(), copy_rate())
    bench = PrefillBench(args, tokens=context, chunk=1024)
    free = torch.cuda.mem_get_info()[0] - _SPARE
    plan = plan_prefill(args, context, free, state=False)
    bench.prefill.chunk = rows or plan.rows
    wanted = sorted({0, context // 4, max(0, context - bench.prefill.chunk)})
    measured = chunks(bench, ceilings, wanted)
    whole = prompts(bench, ceilings, [n for n in lengths if n <= context])
    result: Line = {
        "bench": "prefill",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "sizes": {"layers": args.num_hidden_layers, "experts": args.n_routed_experts},
        "chunk": bench.prefill.chunk,
        "plan": asdict(plan),
        "bf16_TFLOP_s": round(ceilings.flops / 1e12, 1),
        "copy_TB_s": round(ceilings.rate / 1e12, 3),
        "chunks": measured,
        "prompts": whole,
        "estimate": {
            "tokens": context,
            "seconds": round(long_prompt_estimate(measured, context), 2),
        },
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }
    if as_json:
        print(json.dumps(result))
    else:
        for line in measured:
            print(f"{line['rows']} rows at {line['context']}: {_shown(line)}")
        for line in whole:
            print(f"prompt of {line['tokens']}: {_shown(line)}, {line['tokens_per_s']} tokens/s")
        print(f"{context} tokens, from the chunks: {result['estimate']['seconds']} s")
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _shown(line: Line) -> str:
    share = 100 * line["share"]
    return f"{line['ms']} ms, limit {line['limit_ms']}, {share:.0f} % of it"
