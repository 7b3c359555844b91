"""Messages between two servers about one stored conversation, and the connection they go over.

Owns: schema, caps and framing of messages; one blocking connection and its time limits.
Knows nothing of: stores, what is verified, who may ask for what.

A frame is its length (uint32, little-endian) and a MessagePack map with a `type`. After a `Data`
frame come `length` bytes of a chunk as they are.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from typing import Annotated, Any, TypeVar

import msgspec

from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.snapshot import HEAD_BYTES, MAX_MANIFEST_BYTES

PROTOCOL = 5
NONCE_BYTES = 16
MAX_REQUEST_BYTES = 4096
TRACE = re.compile(r"[A-Za-z0-9_.:/+=@-]{0,128}")
"""What a trace id may look like: nothing that could write a log line of its own."""
MAX_REPLY_BYTES = MAX_MANIFEST_BYTES + HEAD_BYTES + 4096
Word = Annotated[str, msgspec.Meta(pattern=r"\A[a-z_]{1,32}\Z")]
"""Why, or how something ended: it stands in logs and counters."""
_MORE = getattr(socket, "MSG_MORE", 0)
_WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Open(_Message, frozen=True, tag="open"):
    """May I read this conversation? `key`, `epoch`, `sequence` as the directory has them."""

    protocol: int
    fingerprint: bytes
    key: str
    epoch: str
    sequence: int
    nonce: bytes
    """Fresh bytes that the answer's authentication covers."""
    trace: str = ""
    """Id of the request that this is for, so that both servers' logs name it; see `TRACE`."""


class Join(_Message, frozen=True, tag="join"):
    """A further connection under the lease that `token` names."""

    protocol: int
    token: bytes


class Read(_Message, frozen=True, tag="read"):
    """Send chunk `index`, counted in stored order."""

    index: int


class Locate(_Message, frozen=True, tag="locate"):
    """Where do the chunks lie? I would read them through a sidecar."""


class Renew(_Message, frozen=True, tag="renew"):
    """Extend the lease."""


class Close(_Message, frozen=True, tag="close"):
    """I have read all I want. Was the lease valid throughout?"""


class Offer(_Message, frozen=True, tag="offer"):
    """I leave: fetch this conversation of mine, as the directory has it, and claim it. Answered
    when that is done."""

    protocol: int
    fingerprint: bytes
    key: str
    epoch: str
    sequence: int


class Opened(_Message, frozen=True, tag="opened"):
    """The manifest, with its head; the lease ends after `lease_s` unless renewed."""

    manifest: memoryview
    """Of what was received, not copied."""
    lease_s: float
    token: bytes
    """For `Join`."""
    mac: bytes
    """Keyed BLAKE3 of nonce and manifest under the fleet's key; empty without one."""


class Joined(_Message, frozen=True, tag="joined"):
    """Chunks may be asked for on this connection too."""


class Refused(_Message, frozen=True, tag="refused"):
    """`reason`: miss, stale, incompatible, busy, gone, bad or none (no sidecar)."""

    reason: Word


class Data(_Message, frozen=True, tag="data"):
    """The chunk's bytes follow."""

    index: int
    length: int


class Located(_Message, frozen=True, tag="located"):
    """`agent`: what a sidecar needs to reach the owner's, under `name`, which changes with every
    start of it. `addresses`: of each chunk in stored order, in that sidecar's memory."""

    name: str
    agent: bytes
    addresses: tuple[int, ...]


class Renewed(_Message, frozen=True, tag="renewed"):
    """The lease ends after `lease_s`."""

    lease_s: float


class Taken(_Message, frozen=True, tag="taken"):
    """What became of an offer: `taken`, or why it was not."""

    outcome: Word


class Closed(_Message, frozen=True, tag="closed"):
    """`valid` False: what was read must be thrown away."""

    valid: bool


Request = Open | Join | Read | Locate | Renew | Close | Offer
Reply = Opened | Joined | Refused | Data | Located | Renewed | Closed | Taken
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)
_MessageT = TypeVar("_MessageT")


def frame(*messages: Request | Reply) -> bytearray:
    """Messages, each with its length."""
    out = bytearray()
    for message in messages:
        start = len(out)
        _ENCODER.encode_into(message, out, start + 4)
        out[start : start + 4] = (len(out) - start - 4).to_bytes(4, "little")
    return out


class Disconnected(OSError):
    """The other side closed the connection in the middle."""


class Link:
    """One blocking connection. Every wait for bytes ends after `idle_s` with TimeoutError.

    The time limit is the kernel's, so that a whole chunk is one call. `abort` may be called from
    another thread: whoever waits gets an OSError.
    """

    until: float = math.inf
    """Of `time.monotonic`. From then on no message and no chunk goes on: a peer that sends a byte
    now and then, or message after message, never lets a wait run out."""
    _limit: float = math.inf

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self.sock, self.idle_s = sock, idle_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit(idle_s)

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        name: str,
        *,
        idle_s: float,
        by: float,
    ) -> Link:
        """A connection made within `by` seconds, to the server whose certificate says `name`."""
        sock = socket.create_connection((host, port), by)
        try:
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=name or host)
            return cls(sock, idle_s)
        except BaseException:
            sock.close()
            raise

    def limit(self, seconds: float) -> None:
        """Waits take so long from now on."""
        self._limit = seconds
        if self._tls:
            self.sock.settimeout(seconds)
            return
        self.sock.settimeout(None)
        whole = max(1, round(seconds * 1e6))
        value = struct.pack("@ll", whole // 1_000_000, whole % 1_000_000)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, *messages: Request | Reply, more: bool = False) -> None:
        """Messages in one piece; `more`: bytes follow at once."""
        data = frame(*messages)
        with _timeouts():
            if self._tls:
                self.sock.sendall(data)
            else:
                self.sock.sendall(data, _MORE if more else 0)

    def send_bytes(self, data: memoryview, file: int | None = None, offset: int = 0) -> None:
        """A chunk's bytes; straight from `file` at `offset`, where memory is a file's."""
        at = 0
        while at < len(data):
            with _timeouts():
                if file is None or self._tls:
                    sent = self.sock.send(data[at:])
                else:
                    sent = os.sendfile(self.sock.fileno(), file, offset + at, len(data) - at)
            if not sent:
                raise Disconnected("the memory file ended early")
            at += sent
            if at < len(data):
                self._check_time()

    def fill(self, into: memoryview) -> None:
        """Exactly so many bytes. Raises Disconnected where the stream ends before."""
        at = 0
        while at < len(into):
            with _timeouts():
                if self._tls:
                    got = self.sock.recv_into(into[at:])
                else:
                    got = self.sock.recv_into(into[at:], 0, _WAIT_ALL)
            if not got:
                raise Disconnected("the peer closed the connection")
            at += got
            if at < len(into):
                self._check_time()

    def request(self) -> Request:
        """The next request. SnapshotError: not one; OSError: the peer is gone."""
        return self._message(_REQUESTS.decode, MAX_REQUEST_BYTES)

    def reply(self) -> Reply:
        """The next reply. SnapshotError: not one; OSError: the peer is gone."""
        return self._message(_REPLIES.decode, MAX_REPLY_BYTES)

    def _message(self, decode: Callable[[bytes], _MessageT], cap: int) -> _MessageT:
        self._check_time()
        head = bytearray(4)
        self.fill(memoryview(head))
        size = int.from_bytes(head, "little")
        if size > cap:
            raise SnapshotError(f"a message of {size} bytes is over the cap, {cap}")
        body: Any = bytearray(size)
        self.fill(memoryview(body))
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotError(f"a peer sent no valid message: {error}") from None

    def _check_time(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer took longer than it may in all")
        if left < self._limit:
            self.limit(left)

    def abort(self) -> None:
        """End the connection at once; the descriptor stays until `close`."""
        with contextlib.suppress(OSError):
            # Of the socket below: a TLS layer would first say good-bye.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back."""
        with contextlib.suppress(OSError):
            self.sock.close()


@contextlib.contextmanager
def _timeouts() -> Generator[None]:
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("no byte came or went in time") from None
