"""Messages between two servers about one stored conversation.

Owns: their schema, caps and framing. Knows nothing of: sockets' making, stores, what is verified.

A frame is its length (uint32, little-endian) and a MessagePack map with a `type`. After a `Data`
frame come `length` bytes of a chunk as they are.
"""

from __future__ import annotations

import asyncio

import msgspec

from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.snapshot import HEAD_BYTES, MAX_MANIFEST_BYTES

PROTOCOL = 1
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = MAX_MANIFEST_BYTES + HEAD_BYTES + 4096


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Open(_Message, frozen=True, tag="open"):
    """May I read this conversation? `key`, `epoch`, `sequence` as the directory has them."""

    protocol: int
    fingerprint: bytes
    key: str
    epoch: str
    sequence: int


class Read(_Message, frozen=True, tag="read"):
    """Send chunk `index`, counted in stored order."""

    index: int


class Renew(_Message, frozen=True, tag="renew"):
    """Extend the lease."""


class Close(_Message, frozen=True, tag="close"):
    """I have read all I want. Was the lease valid throughout?"""


class Opened(_Message, frozen=True, tag="opened"):
    """The manifest, with its head; the lease ends after `lease_s` unless renewed."""

    manifest: bytes
    lease_s: float


class Refused(_Message, frozen=True, tag="refused"):
    """`reason`: miss, stale, incompatible, busy, gone or bad."""

    reason: str


class Data(_Message, frozen=True, tag="data"):
    """The chunk's bytes follow."""

    index: int
    length: int


class Renewed(_Message, frozen=True, tag="renewed"):
    """The lease ends after `lease_s`."""

    lease_s: float


class Closed(_Message, frozen=True, tag="closed"):
    """`valid` False: what was read must be thrown away."""

    valid: bool


Request = Open | Read | Renew | Close
Reply = Opened | Refused | Data | Renewed | Closed
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """A message with its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


async def _body(reader: asyncio.StreamReader, cap: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > cap:
        raise SnapshotError(f"a message of {size} bytes is over the cap, {cap}")
    return await reader.readexactly(size)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request. SnapshotError: not one; IncompleteReadError: the peer is gone."""
    try:
        return _REQUESTS.decode(await _body(reader, MAX_REQUEST_BYTES))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotError(f"a peer sent no valid request: {error}") from None


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next reply. SnapshotError: not one; IncompleteReadError: the peer is gone."""
    try:
        return _REPLIES.decode(await _body(reader, MAX_REPLY_BYTES))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotError(f"a peer sent no valid reply: {error}") from None
