"""Where the replicas of one machine keep conversations on disk: a folder for each, none shared.

Owns: which folder a replica takes, the lock that shows that it has it, what is left of others.
Knows nothing of: what lies in a folder (`kv.spill`), Ray.

Folders are numbered, and a replica takes the first one whose lock it gets: so the folder of one
that has died is taken, with its conversations, by the one that is started in its place, and there
are never more folders than replicas that ran at once. The lock ends with its process, however that
ends.
"""

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from deepdraft.errors import ConfigError
from deepdraft.telemetry import logger

MOST_FOLDERS = 256
LOCK = "lock"
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


class SpillFolder:
    """One replica's folder, while its process lives or until `release`."""

    def __init__(self, base: Path) -> None:
        """Takes the first free folder below `base`. Raises ConfigError."""
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(MOST_FOLDERS):
                self.path = base / f"replica-{number}"
                self.path.mkdir(mode=0o700, exist_ok=True)
                if self._take():
                    return
        except OSError as error:
            raise ConfigError(
                f"engine.kv_spill: {error.filename or base} cannot be used: {error.strerror}"
            ) from error
        raise ConfigError(f"engine.kv_spill: all {MOST_FOLDERS} folders in {base} are in use")

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock = os.open(self.path / LOCK, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            return False
        return True

    def keep_only(self, used: Path) -> None:
        """Removes what replicas with other models left here. `used`: the folder within this one
        that the cache of this replica uses."""
        for other in self.path.iterdir():
            if other != used and _FINGERPRINT.fullmatch(other.name) and not other.is_symlink():
                logger.info("removing conversations of another model: %s", other)
                shutil.rmtree(other, ignore_errors=True)

    def release(self) -> None:
        """Another replica may take it. May be called twice."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1
