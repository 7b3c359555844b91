"""The ranks of a replica whose engine has several GPUs: this process is rank 0 of them.

Owns: when the others start, and that a replica ends when one of them is lost.
Knows nothing of: Ray, requests, how ranks are watched (`parallel.launch`).

A rank that is lost leaves its peers in an exchange that never ends, on a GPU in a kernel. Nothing
of such a process can be used again: it ends at once, fronts go on elsewhere, and Ray starts
another.
"""

import os
import sys
from pathlib import Path

from deepdraft.config import EngineConfig
from deepdraft.engine import rank_main
from deepdraft.engine.rank_setup import check, check_model, limits_of
from deepdraft.errors import RankError
from deepdraft.parallel.launch import LedRanks
from deepdraft.parallel.rank import Rank
from deepdraft.telemetry import logger


def check_split(path: Path, options: EngineConfig) -> None:
    """Before any replica starts. Raises ConfigError where the model in `path` does not split over
    `tp` ranks."""
    if options.tp > 1:
        check_model(path, options)


class ReplicaRanks:
    """Ranks 1 and up of one replica."""

    def __init__(self, path: Path, options: EngineConfig, label: str) -> None:
        """Raises ConfigError where model or machine cannot be split like this."""
        check(path, options)
        self._label = label
        self._error: RankError | None = None
        self._serves = False
        command = rank_main.command(path, options)
        self._ranks = LedRanks(command, options.tp, self._lost, limits=limits_of(options))

    def start(self) -> Rank:
        """Starts them; they see the GPUs that this process sees. Returns rank 0, this process."""
        return self._ranks.start()

    def check(self) -> None:
        """Before the replica serves. Raises RankError where one is lost."""
        if self._error is not None:
            raise self._error

    def serve(self) -> None:
        """From now on the loss of one ends this process. Raises RankError where one is lost."""
        self._serves = True
        self.check()

    def close(self) -> None:
        """When the engine has ended."""
        self._serves = False
        self._ranks.close()

    def _lost(self, error: RankError) -> None:
        self._error = error
        if self._serves:
            logger.error("replica %s: %s", self._label, error.message)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)
