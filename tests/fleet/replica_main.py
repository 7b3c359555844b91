"""A replica in a process of its own, without Ray: `python replica_main.py FILE LABEL DIRECTORY`.

It is found in DIRECTORY, and leaves when its standard input ends.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from deepdraft import __version__
from deepdraft.server import fleet_replica
from deepdraft.server.fleet_config import load_fleet_file
from deepdraft.server.fleet_registry import Entry


class FolderRegistry:
    """Entries of one fleet as files, for processes of one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, entry: Entry) -> None:
        """Whole or not at all."""
        partial = self.folder / f"{entry.incarnation}.partial"
        partial.write_bytes(msgspec.json.encode(entry))
        partial.rename(partial.with_suffix(".entry"))

    def drop(self, incarnation: str) -> None:
        """Unknown ones are fine."""
        (self.folder / f"{incarnation}.entry").unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """All of them."""
        files = sorted(self.folder.glob("*.entry"))
        return [msgspec.json.decode(f.read_bytes(), type=Entry) for f in files]

    def secret(self) -> bytes:
        """The same for all."""
        return b"s" * 32

    def asked_to_leave(self, incarnation: str) -> bool:
        """Never."""
        return False


async def run(file: str, label: str, folder: str) -> None:
    """Until standard input ends."""
    fleet_replica.RayRegistry = lambda name: FolderRegistry(Path(folder))  # type: ignore
    fleet_replica.code_digest = lambda: "the same"  # type: ignore  # files may change meanwhile
    replica = object.__new__(fleet_replica.Replica)
    await replica.__init__(load_fleet_file(file), __version__, label)
    await asyncio.to_thread(sys.stdin.read)
    await replica.leave()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
