"""`deepdraft serve --tp N`: one command, a parent and N ranks.

Owns: which of them this process is.
Knows nothing of: how ranks are watched (`parallel.launch`) and follow each other (`engine.ranks`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepdraft.config import Config
from deepdraft.engine.rank_setup import check, limits_of, without_kv_cache
from deepdraft.parallel.launch import run_ranks
from deepdraft.parallel.rank import Rank, run_rank, this_rank


def serve_on_ranks(path: Path, name: str, config: Config, arguments: Sequence[str]) -> None:
    """As the parent: checks, starts this command once for each rank, and watches. As rank 0: serves
    over HTTP. As another rank: follows rank 0.

    Raises ConfigError, CheckpointError and RankError, in the parent only.
    """
    config = without_kv_cache(config)
    me = this_rank()
    if me is None:
        check(path, config.engine)
        command = [sys.executable, "-m", "deepdraft.cli.main", *arguments]
        run_ranks(command, config.engine.tp, limits=limits_of(config.engine))
        return

    def work(me: Rank) -> None:
        if me.rank == 0:
            _serve(path, name, config, me)
        else:
            _follow(path, config, me)

    run_rank(me, work)


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
