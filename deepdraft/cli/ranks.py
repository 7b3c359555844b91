"""`deepdraft serve --tp N`: one command, a parent and N ranks.

Owns: which of them this process is, the checks before any rank starts.
Knows nothing of: how ranks are watched (`parallel.launch`) and follow each other (`engine.ranks`).
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepdraft.arch import V41Args
from deepdraft.checkpoint import totals
from deepdraft.checkpoint.config import load_args, read_config
from deepdraft.checkpoint.names import SKIP_RULES, tensor_table
from deepdraft.config import Config, memory_of_machine
from deepdraft.errors import ConfigError
from deepdraft.parallel.devices import Need, check_machine, read_machine, torch_cuda
from deepdraft.parallel.launch import Limits, run_ranks
from deepdraft.parallel.plan import V41_CUTS, check_size, sizes_that_divide, stem
from deepdraft.parallel.rank import Rank, run_rank, this_rank

CPU_LIMITS = Limits(step_s=300.0)
"""A step of the torch reference may be slow."""
GPU_LIMITS = Limits(step_s=8.0, warm_s=180.0)
WORK_BYTES = 4 << 30
"""Of each GPU: captured steps, what a step makes, mailboxes, the libraries' own."""


def serve_on_ranks(path: Path, name: str, config: Config, arguments: Sequence[str]) -> None:
    """As the parent: checks, starts this command once for each rank, and watches. As rank 0: serves
    over HTTP. As another rank: follows rank 0.

    Raises ConfigError, CheckpointError and RankError, in the parent only.
    """
    config = without_kv_cache(config)
    me = this_rank()
    if me is None:
        check(path, config)
        command = [sys.executable, "-m", "deepdraft.cli.main", *arguments]
        limits = GPU_LIMITS if config.engine.device == "cuda" else CPU_LIMITS
        run_ranks(command, config.engine.tp, limits=limits)
        return

    def work(me: Rank) -> None:
        if me.rank == 0:
            _serve(path, name, config, me)
        else:
            _follow(path, config, me)

    run_rank(me, work)


def without_kv_cache(config: Config) -> Config:
    """The ranks cannot take a stored conversation together yet. Raises ConfigError where storing
    was asked for."""
    engine = config.engine
    if engine.kv_spill is not None or (isinstance(engine.kv_memory, int) and engine.kv_memory):
        raise ConfigError(
            "conversations are not kept with --tp yet: leave --kv-memory and --kv-spill out"
        )
    return dataclasses.replace(config, engine=dataclasses.replace(engine, kv_memory=0))


def check(path: Path, config: Config) -> None:
    """What can be told before a process starts."""
    size = config.engine.tp
    file = path / "config.json"
    family = read_config(file).get("model_type")
    if family != "deepseek_v41":
        raise ConfigError(
            f"tensor parallelism (--tp {size}) covers DeepSeek-V4.1, this is {family!r}; "
            "run it with --tp 1"
        )
    args = load_args(file, accept_unknown=config.engine.accept_keys)
    check_size(args, size)
    if config.engine.device == "cuda":
        check_machine(
            read_machine(),
            torch_cuda(),
            size,
            functools.partial(needs, args, config),
            sizes_that_divide(args),
            memory_of_machine(),
        )


def needs(args: V41Args, config: Config, ranks: int) -> Need:
    """Memory of one of so many ranks: its weights, the state of every sequence, work space. Engram
    tables lie in host memory."""
    whole = split = tables = 0
    for entry in tensor_table(args).values():
        if entry.module in SKIP_RULES or (entry.module == "drafter" and config.engine.drafts == 0):
            continue
        if entry.group == "Engram tables":
            tables += entry.num_bytes
        elif stem(entry.name) in V41_CUTS:
            split += entry.num_bytes
        else:
            whole += entry.num_bytes
    tokens = config.engine.max_context or args.max_position_embeddings
    state = int(totals.kv_bytes_per_token(args) * tokens) + totals.constant_state_bytes(args)
    return Need(whole + -(-split // ranks) + state + WORK_BYTES, tables)


def _serve(path: Path, name: str, config: Config, me: Rank) -> None:
    from deepdraft.server.run import serve as run
    from deepdraft.server.service import Service

    def load() -> Any:
        from deepdraft.engine.load import load_engine

        return load_engine(path, config.engine, name=name, rank=me)

    run(Service(load, config))


def _follow(path: Path, config: Config, me: Rank) -> None:
    from deepdraft.engine.ranks import follow

    follow(path, config.engine, me)
