"""From a checkpoint directory to something an engine can run.

Owns: the order of loading, and the identity of what was loaded.
Knows nothing of: HTTP, requests.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from deepdraft import __version__
from deepdraft.arch import V41Args
from deepdraft.config import EngineConfig
from deepdraft.engine.engine import ModelRunner
from deepdraft.errors import CheckpointError
from deepdraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, its tokenizer, its sizes and the name it is known by."""

    runner: ModelRunner
    tokenizer: Tokenizer
    args: V41Args | None
    name: str
    eos_token_id: int
    bos_token_id: int | None
    fingerprint: str
    """Changes with anything that can change the answers: weights, numerics, prefill, version."""


def load_engine(
    model_path: str | Path, options: EngineConfig, *, name: str | None = None
) -> LoadedModel:
    """Reads a checkpoint directory.

    Raises CheckpointError or ConfigError, which say what is wrong with which file or key.
    """
    path = Path(model_path)
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint directory at {path}; give the directory that holds config.json"
        )
    # Imported here: these pull in torch and the model code.
    import torch

    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.engine.runner import Runner

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = Checkpoint.open(path)
    tokenizer = Tokenizer.load(path)
    runner = Runner.from_checkpoint(
        checkpoint,
        tokenizer,
        numerics=options.numerics,
        prefill=options.prefill,
        max_context=options.max_context,
        num_sequences=options.max_running,
    )
    args = checkpoint.args
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        args=args,
        name=name or path.resolve().name,
        eos_token_id=args.eos_token_id,
        bos_token_id=args.bos_token_id,
        fingerprint=_fingerprint(path, [repr(args), options.numerics, options.prefill]),
    )


def _fingerprint(path: Path, settings: list[str]) -> str:
    digest = hashlib.sha256("\n".join([__version__, *settings]).encode())
    for shard in sorted(path.glob("*.safetensors")):
        # Header and last weights of each file: enough to tell two trainings apart, and quick even
        # for hundreds of gigabytes.
        with shard.open("rb") as stream:
            digest.update(shard.name.encode() + stream.read(1 << 16))
            stream.seek(max(0, shard.stat().st_size - (1 << 20)))
            digest.update(stream.read())
    return f"fp_{digest.hexdigest()[:12]}"
