# SPDX-License-Identifier: Apache-2.0
"""Run the app under uvicorn: sockets, TLS, slow clients, and a shutdown that ends every stream properly."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lazyattention.errors import ConfigError
from lazyattention.server.app import create_app
from lazyattention.server.config import ServerConfig
from lazyattention.server.context import ServerContext
from lazyattention.server.errors import InvalidBodyError, error_body
from lazyattention.server.listening import listen

if TYPE_CHECKING:
    from lazyattention.engine.async_engine import AsyncEngine

# Between the last stream's error event and closing its connection by force.
_CLOSE_S = 5
_KEEP_ALIVE_S = 75


def make_server(
    engine: "AsyncEngine",
    config: ServerConfig,
    *,
    listener: socket.socket | None = None,
    tracer: Any = None,  # noqa: ANN401  # optional package
    on_started: Callable[[str], None] = lambda url: None,
) -> "ApiServer":
    """Build the app; `run()` serves until SIGINT or SIGTERM, a second signal ends at once.

    Args:
        engine: Started; stopped by the caller afterwards.
        config: The server's options.
        listener: From `listening.listen`, for a caller that wants to know early whether the address is free.
        tracer: From `tracing.py`.
        on_started: Called with the server's address once it accepts connections.

    Raises:
        ConfigError: The address cannot be listened on, or the certificate cannot be read.
    """
    app = create_app(engine, config, tracer=tracer)
    options = uvicorn.Config(
        app,
        http=_protocol(config.header_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # Longer than clients keep idle connections: one that closes them first cannot lose a request to the race.
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.shutdown_grace_s) + _CLOSE_S,
        ssl_certfile=config.tls_cert_file,
        ssl_keyfile=config.tls_key_file,
    )
    try:
        options.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the TLS certificate or key cannot be used: {error}") from error
    return ApiServer(options, app.state.context, listener or listen(config), on_started)


class ApiServer(uvicorn.Server):
    """Tells the app when the end begins and when the grace period is over.

    Attributes:
        url: Where it listens.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: ServerContext,
        listener: socket.socket,
        on_started: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._context = context
        self._listener = listener
        self._on_started = on_started
        host, port = listener.getsockname()[:2]
        self.url = f"{'https' if config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; blocks."""
        super().run(sockets or [self._listener])

    def stop(self) -> None:
        """Begin the end, as SIGTERM does; from any thread."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal begin the end; unlike uvicorn's, it does not kill the process once that end is reached."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._on_started(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end by themselves for a while, then end them with an error."""
        self._context.refuse_new()
        grace_s = self._context.config.shutdown_grace_s
        timer = asyncio.get_running_loop().call_later(grace_s, self._context.generator.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _protocol(header_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's HTTP/1.1 with a limit on how long a request's head may take: uvicorn has none."""

    class Protocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_watching()
            elif self._head_timer is None:
                self._watch_head()

        def send_400_response(self, msg: str) -> None:
            error = InvalidBodyError(f"{msg.rstrip('.')}; send it as HTTP/1.1 has it")
            body = json.dumps(error_body(error)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            self._head_timer = self.loop.call_later(header_timeout_s, self.transport.abort)

        def _stop_watching(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol
