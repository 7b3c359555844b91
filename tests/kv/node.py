"""One server of a fleet as a process of its own, with a tiny model:

    python -m tests.kv.node CONFIG.toml TOKENIZER_DIR REUSE PORT_FILE REPORT.json

When it is told to stop it writes what it counted and whether its books are right.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from deepdraft.config import load_config
from deepdraft.server.run import Server
from deepdraft.server.service import Service
from deepdraft.text.tokenizer import Tokenizer
from tests.kv.served import load_tiny, tiny_model


class Node(Service):
    """A service that reports on its cache at the end."""

    report: Path

    def close(self) -> None:
        """Ends everything; the first call writes the report."""
        reuse = None if self._engine is None else self._engine.reuse
        stats = self.stats()
        super().close()
        if reuse is not None and not self.report.exists():
            stats |= reuse.stats()  # with what was handed over at the end
            self.report.write_text(json.dumps({**books(reuse.cache), "stats": stats}))


def books(cache: Any) -> dict[str, Any]:
    """Whether every slot is accounted for, and that all come back."""
    memory, slab = cache.memory, cache.memory.slab
    memory.expire()
    cache.check()
    memory.check()
    held = {"reserved": len(memory._reserved), "quarantined": len(memory._quarantined)}
    pins = sum(entry.pins for entry in memory.entries.values())
    memory.evict(slab.num_slots)
    condemned = len(memory._condemned)
    leaked = slab.num_slots - slab.num_free - condemned
    return {**held, "pins": pins, "leaked_slots": leaked, "leaked_bytes": leaked * slab.slot_bytes}


def main() -> int:
    reuse = sys.argv.pop(3)
    config_file, directory, port_file, report = (Path(a) for a in sys.argv[1:5])
    torch.set_num_threads(1)
    config = load_config(config_file)
    tokenizer = Tokenizer.load(directory)

    def load() -> Any:
        model = tiny_model(tokenizer, config.engine.numerics)
        return load_tiny(tokenizer, model, config.engine)

    service = Node(load, config)
    service.report = report
    server = Server(service)
    service.start()
    assert service.wait(1200)
    if service.failure is not None:
        print(service.failure.message, file=sys.stderr)
        return 2
    assert service._engine is not None and service._engine.reuse is not None
    service._engine.reuse.cache.reuse = reuse  # type: ignore[assignment]
    port_file.write_text("ready")
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
