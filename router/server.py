"""The HTTP server of the router process: uvicorn inside the process's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import ConfigError, UnavailableError
from twopool.router.app import RouterApp
from twopool.router.http_protocol import ProtocolConfig, RouterHttpProtocol

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than the pools of common clients keep a connection, so it is they who close an idle one."""

_CLOSING_S = 2.0
"""After the drain: for error events to be sent and connections to close."""


class HttpServer:
    """Listens from construction on (connections wait in the backlog), serves in ``serve``.

    ``stop`` drains: no new connections, idle ones closed, open answers may finish within ``drain_timeout_s``; then
    they end with an error.
    """

    def __init__(self, config: RouterConfig, app: RouterApp) -> None:
        """Raises ``ConfigError`` naming ``--port`` or ``--host`` when the address cannot be taken."""
        self._config = config
        self._app = app
        self._socket = _listen(config.host, config.port)
        self.port: int = self._socket.getsockname()[1]
        """The port in use, also where the configuration left it to the system."""
        self._server = _Server(_uvicorn_config(config, app))

    async def serve(self) -> None:
        """Serve until ``stop``; returns when the drain is over."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Begin the drain. Idempotent; call on the event loop."""
        if self._server.should_exit:
            return
        self._server.should_exit = True
        error = UnavailableError("the server is shutting down")
        asyncio.get_running_loop().call_later(self._config.drain_timeout_s, self._app.fail_open, error)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to its HTTP server."""
        yield


def build_server(config: RouterConfig, app: RouterApp) -> HttpServer:
    """The server of one router process, listening already."""
    return HttpServer(config, app)


def _uvicorn_config(config: RouterConfig, app: RouterApp) -> ProtocolConfig:
    settings = ProtocolConfig(
        app,
        http=RouterHttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.drain_timeout_s + _CLOSING_S) + 1,
    )
    settings.max_header_bytes = config.max_header_bytes
    return settings


def _listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Without SO_REUSEPORT: a second router must not silently share the traffic."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: not an address to listen on: {error}", param="--host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {port}: {host}:{port} cannot be taken: {error.strerror}", param="--port") from error
    listener.setblocking(False)
    return listener
