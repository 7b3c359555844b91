"""The sidecar's own program: a NIXL agent over the slab, in an environment of its own.

    python nixl_process.py SOCKET_FD SLAB_FD SLAB_BYTES NAME

Owns: the agent, its registration of the slab, reads under way.
Knows nothing of: deepdraft (only the standard library and NIXL are imported), conversations.

Both ways go lines of JSON. In: `read` (id, name and metadata of a peer's agent, local offset,
remote address, length) and `ping`. Out: `ready` (metadata, base address), `done`, `failed` with
whether the read is settled (nothing can write for it any more), and `pong`. There is no message
that cancels: NIXL cannot. Ending this process is what stops a read.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import select
import socket
import sys
import time
from typing import Any

BUSY_S, IDLE_S = 0.0002, 0.01
"""Between two looks at reads under way: while some end, and while none has for a while."""
PATIENCE_S = 1.0


class Reads:
    """Reads under way, by the number that the other side gave them."""

    def __init__(self, agent: Any, base: int) -> None:
        self.agent, self.base = agent, base
        self.active: dict[int, tuple[Any, str]] = {}
        self.peers: set[str] = set()

    def begin(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Starts a read; what there is to say at once."""
        number, name, size = message["id"], message["name"], message["length"]
        handle = None
        try:
            if name not in self.peers:
                told = self.agent.add_remote_agent(base64.b64decode(message["agent"]))
                told = told.decode() if isinstance(told, bytes) else told
                if told != name:
                    if told not in self.peers:
                        self.agent.remove_remote_agent(told)
                    return self._failed(number, f"the metadata is that of {told}", settled=True)
                self.peers.add(name)
            local = self.agent.get_xfer_descs([(self.base + message["at"], size, 0)], "DRAM")
            remote = self.agent.get_xfer_descs([(message["address"], size, 0)], "DRAM")
            handle = self.agent.initialize_xfer("READ", local, remote, name, b"")
        except Exception as error:
            self._drop(name)
            return self._failed(number, _named(error), settled=True)
        self.active[number] = handle, name
        try:
            self.agent.transfer(handle)  # its state is asked for in `poll`
        except Exception as error:
            return self._end(number, error)
        return None

    def poll(self) -> list[dict[str, Any]]:
        """What has ended since."""
        out = []
        for number, (handle, _) in list(self.active.items()):
            try:
                state = self.agent.check_xfer_state(handle)
            except Exception as error:
                out.append(self._end(number, error))
                continue
            if state == "DONE":
                del self.active[number]
                self._release(handle)
                out.append({"is": "done", "id": number})
            elif state != "PROC":
                out.append(self._end(number, None))
        return out

    def _end(self, number: int, error: Exception | None) -> dict[str, Any]:
        """A read that failed. Only a peer whose connection is gone cannot write any more."""
        handle, name = self.active.pop(number)
        self._release(handle)
        self._drop(name)
        why = "error" if error is None else _named(error)
        return self._failed(number, why, settled="RemoteDisconnect" in why)

    def _release(self, handle: Any) -> None:
        try:
            self.agent.release_xfer_handle(handle)
        except Exception as error:
            print(f"release: {_named(error)}", file=sys.stderr)

    def _drop(self, name: str) -> None:
        """After a failure a peer can be used again only when it was forgotten."""
        if name in self.peers and all(other != name for _, other in self.active.values()):
            self.peers.discard(name)
            try:
                self.agent.remove_remote_agent(name)
            except Exception as error:
                print(f"forget {name}: {_named(error)}", file=sys.stderr)

    @staticmethod
    def _failed(number: int, why: str, *, settled: bool) -> dict[str, Any]:
        return {"is": "failed", "id": number, "why": why[:200], "settled": settled}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def serve(sock: socket.socket, reads: Reads) -> None:
    """Until the other side is gone."""
    buffer, last = b"", time.monotonic()
    while True:
        out = reads.poll()
        now = time.monotonic()
        if out:
            last = now
            sock.sendall(b"".join(json.dumps(m).encode() + b"\n" for m in out))
        wait = None if not reads.active else BUSY_S if now - last < PATIENCE_S else IDLE_S
        if not select.select([sock], [], [], wait)[0]:
            continue
        data = sock.recv(1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            reply = {"is": "pong"} if message["do"] == "ping" else reads.begin(message)
            last = time.monotonic()
            if reply is not None:
                sock.sendall(json.dumps(reply).encode() + b"\n")


def make_agent(name: str, address: int, size: int) -> Any:
    """An agent with the slab registered."""
    from nixl_cu13._api import (  # pyrefly: ignore[missing-import]
        nixl_agent,
        nixl_agent_config,
    )

    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("UCX")
    agent.register_memory([(address, size, 0, "")], "DRAM")
    return agent


def main() -> None:
    """See the module."""
    control, slab, size = (int(word) for word in sys.argv[1:4])
    sock = socket.socket(fileno=control)
    memory = mmap.mmap(slab, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent = make_agent(sys.argv[4], base, size)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    sock.sendall(json.dumps({"is": "ready", "agent": metadata, "base": base}).encode() + b"\n")
    serve(sock, Reads(agent, base))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(_named(error), file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    # Destructors of the transport libraries crash in a normal exit.
    os._exit(0)
