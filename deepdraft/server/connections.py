"""Connections of clients that are slow, silent or too many.

Owns: how long a client may take to send a request's head or to read what was written for it.
Knows nothing of: requests' bodies (`app` times these), answers. Runs without torch.

A connection that breaks a limit is cut, and whatever it had asked for is cancelled like that of any
client that leaves.
"""

import asyncio
from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deepdraft.config import ServerConfig
from deepdraft.telemetry import logger


class Connection(HttpToolsProtocol):
    """One connection; notes since when it waits for its client."""

    settings: ServerConfig
    head_since: float | None = None
    """Since when the head of a request is awaited, or arrives bit by bit."""
    unread_since: float | None = None
    """Since when the client leaves so much unread that nothing more is written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; one too many is cut at once."""
        super().connection_made(transport)
        self.head_since = self.loop.time()
        if len(self.connections) > self.settings.max_connections:
            logger.warning("more than %d connections; one is cut", self.settings.max_connections)
            transport.abort()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if self.head_since is None:
            self.head_since = self.loop.time()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self.head_since = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.unread_since = None
        super().resume_writing()

    def broken_limit(self, now: float) -> str | None:
        """What this client has done too slowly, if anything."""
        settings = self.settings
        if self.head_since is not None and now - self.head_since > settings.header_timeout_s:
            return "sent no whole request head"
        if self.unread_since is not None and now - self.unread_since > settings.send_timeout_s:
            return "left its answer unread"
        return None


def connection_class(settings: ServerConfig) -> type[Connection]:
    """The class of a server's connections."""
    return type("Connection", (Connection,), {"settings": settings})


def cut_slow(connections: Iterable[object], now: float) -> int:
    """Cuts every connection that has broken a limit; returns how many."""
    num_cut = 0
    for connection in list(connections):
        if not isinstance(connection, Connection):
            continue
        reason = connection.broken_limit(now)
        if reason is not None:
            logger.info("a client %s in time; its connection is cut", reason)
            # `close` would wait until the client has read what is left.
            connection.transport.abort()
            num_cut += 1
    return num_cut


def period_s(settings: ServerConfig) -> float:
    """How often to look for slow clients."""
    return min(5.0, settings.header_timeout_s / 4, settings.send_timeout_s / 4)
