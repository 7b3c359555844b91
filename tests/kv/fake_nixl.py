"""The sidecar's program with an agent that reads peers' slabs through /proc: no NIXL needed.

Faults are switched on by files in DEEPDRAFT_FAKE_FAULTS: `stall` (reads stay under way while it is
there, and write once it is gone), `lie` (done without bytes), `error`, `crash`, `deaf` (it answers
nothing any more).
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).parents[2] / "deepdraft" / "kv" / "nixl_process.py"
_FAULTS = Path(os.environ["DEEPDRAFT_FAKE_FAULTS"])


def fault(name: str) -> bool:
    return (_FAULTS / name).exists()


class RemoteDisconnectError(Exception):
    """As NIXL's own is named."""


class FakeAgent:
    def __init__(self, name: str, address: int, size: int) -> None:
        self.name, self.base, self.file = name, address, int(sys.argv[2])
        self.size = size
        self.peers: dict[str, dict[str, Any]] = {}

    def get_agent_metadata(self) -> bytes:
        place = f"/proc/{os.getpid()}/fd/{self.file}"
        return json.dumps({"name": self.name, "place": place, "base": self.base}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        peer = json.loads(metadata)
        self.peers[peer["name"]] = peer
        return peer["name"].encode()

    def remove_remote_agent(self, name: str) -> None:
        del self.peers[name]

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM"
        return places

    def initialize_xfer(self, what: str, local: Any, remote: Any, name: str, note: bytes) -> Any:
        assert what == "READ" and name in self.peers
        return {"local": local, "remote": remote, "peer": self.peers[name]}

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if fault("crash"):
            os.abort()
        while fault("deaf"):
            time.sleep(0.01)
        if fault("stall"):
            return "PROC"
        if fault("error"):
            return "ERR"
        if fault("lie"):
            return "DONE"
        ((at, size, _),), ((address, _, _),) = handle["local"], handle["remote"]
        peer = handle["peer"]
        try:
            with open(peer["place"], "rb") as slab:
                data = os.pread(slab.fileno(), size, address - peer["base"])
        except OSError as error:
            raise RemoteDisconnectError(str(error)) from None
        os.pwrite(self.file, data, at - self.base)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass


def main() -> None:
    spec = importlib.util.spec_from_file_location("nixl_process", _PROGRAM)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.make_agent = FakeAgent
    if fault("no_start"):
        sys.exit("it does not start")
    program.main()
    os._exit(0)


if __name__ == "__main__":
    main()
