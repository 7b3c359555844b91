"""A rank that is not rank 0, as a program: `python -m deepdraft.engine.rank_main MODEL SETTINGS`.

Owns: its arguments, MODEL a checkpoint directory, SETTINGS an `EngineConfig` as JSON.
Knows nothing of: who started it (`parallel.launch`), what rank 0 asks for (`engine.ranks`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deepdraft.config import EngineConfig
from deepdraft.errors import ConfigError
from deepdraft.parallel.rank import run_rank, this_rank


def command(path: Path, options: EngineConfig) -> list[str]:
    """The words that start it."""
    return [
        sys.executable,
        "-m",
        "deepdraft.engine.rank_main",
        str(path),
        msgspec.json.encode(options).decode(),
    ]


def main(arguments: Sequence[str]) -> None:
    """Follows rank 0 and ends the process. Raises ConfigError where nobody started it as a rank."""
    me = this_rank()
    if me is None:
        raise ConfigError("a rank is started by rank 0, not by hand")
    path, settings = Path(arguments[0]), arguments[1]

    def work(_: object) -> None:
        from deepdraft.engine.ranks import follow

        follow(path, msgspec.json.decode(settings, type=EngineConfig), me)

    run_rank(me, work)


if __name__ == "__main__":
    main(sys.argv[1:])
