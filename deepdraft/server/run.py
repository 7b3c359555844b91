"""Runs the application on a socket until it is told to stop.

Owns: uvicorn's settings, signals, the grace period at the end, the process's exit code.
Knows nothing of: wire formats, models.
"""

import asyncio
import contextlib
import functools
import resource
import signal
import socket
import threading
from collections.abc import Generator

import uvicorn

from deepdraft.errors import ConfigError, DeepdraftError
from deepdraft.server.app import create_app
from deepdraft.server.connections import KEEP_ALIVE_S, connection_class, cut_slow, period_s
from deepdraft.server.service import Service
from deepdraft.telemetry import configure_logging, logger

# Seconds between the end of the grace period, when every request is cancelled, and the moment
# when connections are cut that did not take their last bytes.
_LAST_BYTES_S = 5
_OWN_FILES = 256
"""Files that a server has open beside its connections."""


class Server(uvicorn.Server):
    """uvicorn with our way to stop: drain first, end the rest after the grace period."""

    def __init__(self, service: Service) -> None:
        settings = service.config.server
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(settings.drain_s) + _LAST_BYTES_S,
                ws="none",
                http=connection_class(settings, service.counters),
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self.service = service
        self._sweeper: asyncio.TimerHandle | None = None
        self._num_stops = 0
        self._grace: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Begins to stop; a second call ends all requests, a third does not wait for clients.

        To be called on the server's loop.
        """
        self._num_stops += 1
        if self._num_stops > 1:
            self.service.cancel_all()
            self.force_exit = self._num_stops > 2
            return
        grace_s = self.service.config.server.drain_s
        logger.info("stopping; running requests get %g s to finish", grace_s)
        self.service.begin_drain()
        self.should_exit = True
        self._grace = asyncio.get_running_loop().call_later(grace_s, self.service.cancel_all)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the port and begins to look for slow clients."""
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # A client in its handshake is no connection yet, and uvicorn would give it 60 s.
            limit_s = self.service.config.server.header_timeout_s
            limited = functools.partial(loop.create_server, ssl_handshake_timeout=limit_s)
            vars(loop)["create_server"] = limited
        try:
            await super().startup(sockets)
        finally:
            vars(loop).pop("create_server", None)
        self._sweep()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        cut_slow(self.server_state.connections, loop.time())
        if not self.should_exit:
            self._sweeper = loop.call_later(period_s(self.service.config.server), self._sweep)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handles SIGINT and SIGTERM without dying of them afterwards, as uvicorn's own does."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if self._grace is not None:
                self._grace.cancel()


def _allow_files(num_connections: int) -> None:
    """Lets this process open so many connections beside its own files, as far as it may."""
    wanted = num_connections + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            logger.warning(
                "this process may open %d files, too few for server.max_connections = %d; raise "
                "the limit (ulimit -n)",
                most,
                num_connections,
            )


def serve(service: Service) -> None:
    """Serves until SIGINT or SIGTERM. Raises the DeepdraftError that ended loading, if one did."""
    settings = service.config.server
    configure_logging(settings.log_level, settings.log_format)
    _allow_files(settings.max_connections)
    server = Server(service)
    try:
        server.config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"server.tls_cert and server.tls_key cannot be used: {error.strerror or error}"
        ) from error

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def failed() -> None:
            loop.call_soon_threadsafe(server.stop)

        service.on_failure = failed
        if service.failure is not None:
            return
        await server.serve()

    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run())
    except SystemExit as error:
        # uvicorn leaves this way when the address cannot be bound, after it has logged the cause.
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}") from error
    if isinstance(service.failure, DeepdraftError):
        raise service.failure
