"""Before a model's ranks start: what must hold, how long they may be silent. Without torch.

Owns: the checks of settings, model and machine that need no process, the limits.
Knows nothing of: who starts the ranks; how they are watched (`parallel.launch`) and follow each
other (`engine.ranks`).
"""

import dataclasses
import functools
from pathlib import Path

from deepdraft.arch import V41Args
from deepdraft.checkpoint import totals
from deepdraft.checkpoint.config import load_args, read_config
from deepdraft.checkpoint.names import SKIP_RULES, tensor_table
from deepdraft.config import Config, EngineConfig, memory_of_machine
from deepdraft.errors import ConfigError
from deepdraft.models.v41_prefill_plan import CHUNKS, workspace_bytes
from deepdraft.parallel.devices import Need, check_machine, read_machine, torch_cuda
from deepdraft.parallel.launch import Limits
from deepdraft.parallel.plan import V41_CUTS, check_size, cut_for_rows, sizes_that_divide, stem

CPU_LIMITS = Limits(step_s=300.0)
"""A step of the torch reference may be slow."""
GPU_LIMITS = Limits(step_s=8.0, warm_s=180.0)
WORK_BYTES = 4 << 30
"""Of each GPU: captured steps, what a step makes, mailboxes, the libraries' own."""


def limits_of(options: EngineConfig) -> Limits:
    """How long a rank may be silent on this device."""
    return GPU_LIMITS if options.device == "cuda" else CPU_LIMITS


def without_kv_cache(config: Config) -> Config:
    """The ranks cannot take a stored conversation together yet. Raises ConfigError where storing
    was asked for."""
    engine = config.engine
    if engine.kv_spill is not None or (isinstance(engine.kv_memory, int) and engine.kv_memory):
        raise ConfigError(
            "conversations are not kept with --tp yet: leave --kv-memory and --kv-spill out"
        )
    return dataclasses.replace(config, engine=dataclasses.replace(engine, kv_memory=0))


def check_model(path: Path, options: EngineConfig) -> V41Args:
    """Sizes of the model, which splits over `tp` ranks. Raises ConfigError with the numbers that
    would do."""
    size, file = options.tp, path / "config.json"
    family = read_config(file).get("model_type")
    if family != "deepseek_v41":
        raise ConfigError(
            f"tensor parallelism (--tp {size}) covers DeepSeek-V4.1, this is {family!r}; "
            "run it with --tp 1"
        )
    args = load_args(file, accept_unknown=options.accept_keys)
    check_size(args, size)
    return args


def check(path: Path, options: EngineConfig) -> None:
    """What can be told of model and machine before a process starts. Raises ConfigError."""
    args = check_model(path, options)
    if options.device == "cuda":
        check_machine(
            read_machine(),
            torch_cuda(),
            options.tp,
            functools.partial(needs, args, options),
            sizes_that_divide(args),
            memory_of_machine(),
        )


def needs(args: V41Args, options: EngineConfig, ranks: int) -> Need:
    """Memory of one of so many ranks: its weights, the state of every sequence, work space. Engram
    tables lie in host memory. Prompts whose rows the ranks share need more maps whole, beside the
    parts that decoding reads, and room for a chunk."""
    whole = split = tables = 0
    shares = options.prefill == "encoder" and options.device == "cuda" and ranks > 1
    for entry in tensor_table(args).values():
        if entry.module in SKIP_RULES or (entry.module == "drafter" and options.drafts == 0):
            continue
        if entry.group == "Engram tables":
            tables += entry.num_bytes
        elif stem(entry.name) in V41_CUTS:
            split += entry.num_bytes
            if shares and entry.module == "text" and not cut_for_rows(entry.name):
                whole += entry.num_bytes
        else:
            whole += entry.num_bytes
    tokens = options.max_context or args.max_position_embeddings
    state = int(totals.kv_bytes_per_token(args) * tokens) + totals.constant_state_bytes(args)
    work = WORK_BYTES + (workspace_bytes(args, min(CHUNKS), ranks=ranks) if shares else 0)
    return Need(whole + -(-split // ranks) + state + work, tables)
