"""From a checkpoint directory to something an engine can run.

Owns: the order of loading, and the identity of what was loaded.
Knows nothing of: HTTP, requests.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from deepdraft import __version__
from deepdraft.arch import V41Args
from deepdraft.config import EngineConfig, memory_of_machine
from deepdraft.engine.protocol import ModelRunner
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.telemetry import logger
from deepdraft.text.conversation import Family
from deepdraft.text.detect import prompt_family
from deepdraft.text.tokenizer import Tokenizer
from deepdraft.types import Rule

if TYPE_CHECKING:
    from deepdraft.engine.runner import Runner
    from deepdraft.engine.speculate import Speculation
    from deepdraft.parallel.rank import Rank
    from deepdraft.spec.calibrate import Calibration

STATE_SHARE = 4
"""`auto` sets this part of the machine's memory aside for running sequences."""
SPECULATION_FILE = "speculation.json"
"""Beside a checkpoint: what is known of its drafter (docs/speculation.md)."""
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, its tokenizer, its sizes and the name it is known by."""

    runner: ModelRunner
    tokenizer: Tokenizer
    args: V41Args | None
    name: str
    eos_token_id: int
    bos_token_id: int | None
    more_end_ids: frozenset[int] = frozenset()
    """Other tokens that end an answer, by config.json or generation_config.json."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings of the checkpoint's own generation_config.json, by request field."""
    family: Family = "v4.1"
    fingerprint: str
    """Changes with anything that can change the answers: weights, numerics, prefill, version."""
    speculation: "Speculation | None" = None
    path: Path | None = None
    """The checkpoint directory."""


def load_engine(
    model_path: str | Path,
    options: EngineConfig,
    *,
    name: str | None = None,
    rank: "Rank | None" = None,
) -> LoadedModel:
    """Reads a checkpoint directory, published or converted. `rank`: rank 0 of several.

    Raises CheckpointError or ConfigError, which say what is wrong with which file or key.
    """
    path = Path(model_path)
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint directory at {path}; give the directory that holds config.json"
        )
    presets = _Presets(path / "generation_config.json")
    runner, args, tokenizer = load_runner(path, options, rank)
    if runner.num_sequences < options.max_running:
        logger.warning(
            "state_memory has room for %d of %d sequences; the others wait",
            runner.num_sequences,
            options.max_running,
        )
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        args=args,
        name=name or path.resolve().name,
        eos_token_id=args.eos_token_id,
        bos_token_id=args.bos_token_id,
        family=prompt_family(path, args.family, tokenizer, options.chat_format),
        more_end_ids=_more_ends(presets, args),
        sampling_defaults=_sampling_defaults(presets),
        fingerprint=_fingerprint(
            path, [repr(args), options.numerics, options.prefill, options.rule, *_split(options)]
        ),
        speculation=_speculation(runner, path, options),
        path=path,
    )


def load_runner(
    path: Path, options: EngineConfig, rank: "Rank | None" = None
) -> "tuple[Runner, Any, Tokenizer]":
    """The runner of a checkpoint directory, the model's sizes, its tokenizer; of several ranks,
    this one's runner.

    Raises CheckpointError or ConfigError.
    """
    # Imported here: these pull in torch and the model code.
    import torch

    from deepdraft.checkpoint.presharded import is_presharded, open_rank
    from deepdraft.checkpoint.progress import Bar
    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.engine.ranks import open_rank_runner
    from deepdraft.engine.runner import Runner

    torch.set_num_threads(options.threads or _default_threads(path, torch.get_num_threads()))
    if rank is None and options.tp > 1:
        raise ConfigError(
            f"--tp {options.tp} belongs to `deepdraft serve`; start a server, then ask it by --url"
        )
    number, size = (0, 1) if rank is None else (rank.rank, rank.size)
    if options.load == "dummy":
        from deepdraft.engine.gpu_runner import Sizes

        checkpoint: Any = Sizes(path, accept_unknown=options.accept_keys)
    elif is_presharded(path):
        checkpoint = open_rank(path, number, size, accept_unknown=options.accept_keys)
    else:
        checkpoint = Checkpoint.open(path, accept_unknown=options.accept_keys)
    tokenizer = Tokenizer.load(path)
    more = {
        "max_context": options.max_context,
        "num_sequences": options.max_running,
        "drafter": options.drafts != 0,
        "num_drafts": options.drafts,
        "state_bytes": _state_bytes(options),
    }
    with Bar("weights") as bar:
        # One rank tells for all; what reads a converted checkpoint for a GPU has a bar of its own.
        if not number and not (options.device == "cuda" and is_presharded(path)):
            checkpoint.progress = bar
        if rank is not None:
            runner = open_rank_runner(rank, checkpoint, tokenizer, options, **more)
        elif options.device == "cuda":
            runner = _gpu_runner(checkpoint, tokenizer, options, more)
        else:
            runner = Runner.from_checkpoint(
                checkpoint, tokenizer, numerics=options.numerics, prefill=options.prefill, **more
            )
    checkpoint.progress = None
    return runner, checkpoint.args, tokenizer


def _gpu_runner(
    checkpoint: Any, tokenizer: Tokenizer, options: EngineConfig, more: dict[str, Any]
) -> "Runner":
    from deepdraft.checkpoint.device_source import DeviceSource
    from deepdraft.checkpoint.presharded import is_presharded
    from deepdraft.checkpoint.progress import Bar
    from deepdraft.engine.gpu_runner import GpuRunner

    dummy = options.load == "dummy"
    with contextlib.ExitStack() as stack:
        if is_presharded(checkpoint.path) and not dummy:
            source = DeviceSource(checkpoint, "cuda", progress=Bar("weights"))
            checkpoint = stack.enter_context(source)
        return GpuRunner.from_checkpoint(
            checkpoint,
            tokenizer,
            dummy=dummy,
            expert_pool=options.expert_pool,
            prefill=options.prefill,
            prefill_chunk=options.prefill_chunk,
            **more,
        )


def _split(options: EngineConfig) -> list[str]:
    """What of the ranks changes the answers: sums in another order."""
    return [f"tp {options.tp}"] if options.tp > 1 else []


def _state_bytes(options: EngineConfig) -> int:
    wanted = options.state_memory
    total = memory_of_machine() // STATE_SHARE if isinstance(wanted, str) else wanted
    return total // options.tp  # every rank holds the whole state


def _speculation(runner: "Runner", path: Path, options: EngineConfig) -> "Speculation":
    """Rule, schedule, costs and calibrations. Raises ConfigError."""
    from deepdraft.engine.measure import measure_costs
    from deepdraft.engine.speculate import Speculation
    from deepdraft.spec.costs import StepCosts
    from deepdraft.spec.live import LiveCosts
    from deepdraft.spec.schedule import FixedSchedule, ThresholdSchedule

    if not runner.block_size:
        return Speculation(rule=options.rule)
    calibrations = read_calibrations(path)
    costs = schedule = None
    if options.schedule == "threshold":
        schedule = ThresholdSchedule(threshold=options.draft_threshold)
    elif options.schedule == "all":
        schedule = FixedSchedule(num_drafts=runner.block_size)
    elif options.cost_table is not None:
        costs = StepCosts.from_dict(_read_json(Path(options.cost_table)))
    else:
        costs = LiveCosts(measure_costs(runner))
    return Speculation(rule=options.rule, schedule=schedule, costs=costs, calibrations=calibrations)


def read_calibrations(path: Path) -> "dict[Rule, Calibration]":
    """What the checkpoint in `path` says of its drafter's confidences, by rule; none: nothing.

    Raises ConfigError.
    """
    from deepdraft.spec.calibrate import Calibration

    file = path / SPECULATION_FILE
    if not file.is_file():
        return {}
    known = _read_json(file).get("calibrations", {})
    if not isinstance(known, dict) or not set(known) <= set(get_args(Rule)):
        raise ConfigError(f"{file}: calibrations must be an object with one entry per rule")
    return {rule: Calibration.from_dict(values) for rule, values in known.items()}


def _read_json(file: Path) -> dict[str, Any]:
    """A small file that holds a JSON object. Raises ConfigError."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(f"{file} is larger than {_MAX_JSON_BYTES} bytes")
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold an object")
    return values


SMALL_MODEL_BYTES = 1 << 30
"""Below this, operators are so short that waking a second thread costs more than it gives, and on
a busy machine a spinning one stalls every operator (measured: 4 to 30 tok/s instead of 120)."""


def _default_threads(path: Path, available: int) -> int:
    """CPU threads of one operator where none were asked for."""
    stored = sum(shard.stat().st_size for shard in path.rglob("*.safetensors"))
    return 1 if stored < SMALL_MODEL_BYTES else available


def _fingerprint(path: Path, settings: list[str]) -> str:
    digest = hashlib.sha256("\n".join([__version__, *settings]).encode())
    manifest = path / "sharded.json"  # of a converted checkpoint: digests of all its files
    if manifest.is_file():
        digest.update(manifest.read_bytes())
    for shard in sorted(path.glob("*.safetensors")):
        # Header and last weights of each file: enough to tell two trainings apart, and quick even
        # for hundreds of gigabytes.
        with shard.open("rb") as stream:
            digest.update(shard.name.encode() + stream.read(1 << 16))
            stream.seek(max(0, shard.stat().st_size - (1 << 20)))
            digest.update(stream.read())
    return f"fp_{digest.hexdigest()[:12]}"


# Field, lowest and highest value: what a generation_config.json may preset.
_PRESETS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


class _Presets:
    """The optional generation_config.json. Raises ConfigError where it is no object."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values = _read_json(file) if file.is_file() else {}


def _sampling_defaults(presets: _Presets) -> dict[str, float]:
    """Sampling settings of requests that have none. Raises ConfigError for a wrong value."""
    found: dict[str, float] = {}
    for name, (low, high) in _PRESETS.items():
        value = presets.values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{presets.file}: {name} must be a number, got {value!r}")
        if not low <= value <= high:
            raise ConfigError(f"{presets.file}: {name} must lie in {low}..{high}, got {value}")
        found[name] = value
    if presets.values.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _more_ends(presets: _Presets, args: Any) -> frozenset[int]:
    """End tokens beside the first of config.json. Raises ConfigError for what is no token."""
    value = presets.values.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    for end in ends:
        if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < args.vocab_size:
            raise ConfigError(
                f"{presets.file}: eos_token_id holds {end!r}; token ids run from 0 to "
                f"{args.vocab_size - 1}"
            )
    return frozenset((*ends, *getattr(args, "more_end_ids", ()))) - {args.eos_token_id}
