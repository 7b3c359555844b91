"""Connections of clients that are slow, silent, too many or that do not speak HTTP.

Owns: how large the head of a request may be, how long a client may take to send it or to read what
was written for it, how many requests of a connection may wait, and what answers bytes that are no
HTTP request.
Knows nothing of: requests' bodies (`app` times these), answers. Runs without torch.

A connection that breaks a limit is cut, and whatever it had asked for is cancelled like that of any
client that leaves.
"""

import asyncio
import http
from collections.abc import Iterable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deepdraft.config import ServerConfig
from deepdraft.errors import RequestError
from deepdraft.server.wire_errors import error_body
from deepdraft.telemetry import Counters, logger

DIRECT_SEND = "deepdraft.send"
"""Key of an ASGI scope with the server's own `send`. Layers around the application look only at
how an answer begins, and each would cost a stream as much a token as writing it does."""
KEEP_ALIVE_S = 20
"""An idle connection is closed after so many seconds: later than clients drop it themselves (httpx
after 5 s, aiohttp after 15), so that none sends a request into a connection that is closing."""
MAX_HEAD_BYTES = 64 << 10
READ_AHEAD = 16
"""Behind so many requests that wait for the one being answered, no more of a connection is read."""
MAX_PIPELINED = 256
"""So many may have come in one piece all the same."""
LEAST_BYTES_PER_S = 32 << 10
"""A body that keeps arriving at this rate, or an answer that is read at it, has time, however long
it is."""


class BadHead(RequestError):
    """What came is no HTTP request."""


class HeadTooLarge(RequestError):
    """The head of a request is larger than the server reads (HTTP 431)."""

    http_status = 431
    code = "head_too_large"


class Connection(HttpToolsProtocol):
    """One connection; notes since when it waits for its client."""

    settings: ServerConfig
    counters: Counters
    head_since: float | None = None
    """Since when the head of a request is awaited, or arrives bit by bit."""
    unread_since: float | None = None
    """Since when the client leaves unread what nothing more is written behind."""
    unread_bytes = 0
    """How much that was then."""
    _head_bytes = 0
    """Of the head in progress: what its lines hold."""
    _pending_bytes = 0
    """What came while no head was whole."""
    _in_body = False
    """The body of a request is not there yet; where it is answered already, the rest is dropped."""
    _stays = False
    """The parser reads again what the head has said of the body."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; one too many is cut at once."""
        super().connection_made(transport)
        self.head_since = self.loop.time()
        if len(self.connections) > self.settings.max_connections:
            self.cut("many", f"more than {self.settings.max_connections} connections are open")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: also where a pipelined request waits behind the running one, which
        uvicorn does not tell then."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come; a head that does not end is refused before it is held in memory."""
        in_body = self._in_body
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            large = self._head_bytes > MAX_HEAD_BYTES
            self._refuse(_too_large() if large else BadHead("this is no valid HTTP/1.1 request"))
        if self.head_since is None or in_body or self._in_body:
            self._pending_bytes = 0
            return
        self._pending_bytes += len(data)
        if self._pending_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())

    def _stay(self, rest: bytes) -> None:
        """Goes on in HTTP/1.1 with a request that offers another protocol, as Java's client does
        with each. The parser takes nothing behind the offer, and the body would be lost."""
        framing = (b"content-length", b"transfer-encoding")
        lines = (name + b": " + value + b"\r\n" for name, value in self.headers if name in framing)
        parser = httptools.HttpRequestParser(self)
        self._stays, self.parser = True, parser
        parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        self._stays = False
        if rest and self.parser is parser:
            self.data_received(rest)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._stays:
            return
        super().on_message_begin()
        now = self.loop.time()
        self.head_since = now if self.head_since is None else min(self.head_since, now)
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        if self._stays:
            return
        self._count_head(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        if self._stays:
            return
        self._count_head(name, value)
        super().on_header(name, value)

    def _count_head(self, *parts: bytes) -> None:
        self._head_bytes += sum(map(len, parts))
        if self._head_bytes > MAX_HEAD_BYTES:
            # The parser reports it as its own error.
            raise _too_large()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._stays:
            return
        self.head_since, self._in_body = None, True
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.cut("pipelined", f"a client sent more than {MAX_PIPELINED} requests ahead")
            raise BadHead("too many requests")  # ends the parser
        elif 0 < len(self.pipeline) <= READ_AHEAD:
            # uvicorn stops reading here, and would not see the client leave.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self.parser.should_upgrade():
            return  # it only looks so: the parser has seen the head alone
        self._in_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is written; where no other request is there, the next head is awaited."""
        super().on_response_complete()
        if len(self.pipeline) > READ_AHEAD:
            self.flow.pause_reading()
        if self._idle and self.head_since is None:
            self.head_since = self.loop.time() + KEEP_ALIVE_S

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        self.counters.add(f"http_{error.http_status}")
        if self._idle:
            # Nothing may be written into an answer that is under way.
            body = msgspec.json.encode(error_body(error))
            head = (
                f"HTTP/1.1 {error.http_status} {http.HTTPStatus(error.http_status).phrase}\r\n"
                "content-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        self._note_unread()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.unread_since = None
        super().resume_writing()

    @property
    def _idle(self) -> bool:
        """No answer is owed or under way."""
        return self.cycle is None or self.cycle.response_complete

    def _note_unread(self) -> None:
        self.unread_since = self.loop.time()
        self.unread_bytes = self.transport.get_write_buffer_size()

    def check(self, now: float) -> None:
        """Cuts the connection where its client breaks a limit of time."""
        settings = self.settings
        if self.transport.get_write_buffer_size() == 0:
            self.unread_since = None
        elif self.unread_since is None and (self._idle or self.transport.is_closing()):
            # The end of an answer that was small enough to be written whole.
            self._note_unread()
        if self.head_since is not None and now - self.head_since > settings.header_timeout_s:
            self.cut("head", "a client sent no whole request head in time")
        elif self.unread_since is not None:
            patience_s = settings.send_timeout_s + self.unread_bytes / LEAST_BYTES_PER_S
            if now - self.unread_since > patience_s:
                self.cut("unread", "a client left its answer unread")

    def cut(self, reason: str, text: str) -> None:
        """Ends the connection at once; `close` would wait for the client to read what is left."""
        logger.info("%s; its connection is cut", text)
        self.counters.add(f"cut_{reason}")
        self.transport.abort()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")


def connection_class(settings: ServerConfig, counters: Counters) -> type[Connection]:
    """The class of a server's connections; `counters` get `cut_REASON` and `http_STATUS`."""
    return type("Connection", (Connection,), {"settings": settings, "counters": counters})


def cut_slow(connections: Iterable[object], now: float) -> None:
    """Cuts every connection whose client breaks a limit of time."""
    for connection in list(connections):
        if isinstance(connection, Connection):
            connection.check(now)


def period_s(settings: ServerConfig) -> float:
    """How often to look for slow clients."""
    return min(5.0, settings.header_timeout_s / 4, settings.send_timeout_s / 4)
