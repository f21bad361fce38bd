"""The HTTP server of the router process: uvicorn inside the process's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from twopool.protocol.config import RouterConfig
from twopool.protocol.endpoints import bracketed
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

    def __init__(self, config: RouterConfig, app: RouterApp, listener: socket.socket | None = None) -> None:
        """``listener``: a socket of ``listen`` that other processes share. Raises as ``listen`` does, and
        ``ConfigError`` naming ``--ssl-certfile`` when it cannot be used.
        """
        self._config = config
        self._app = app
        settings = _uvicorn_config(config, app)
        self._socket = listener if listener is not None else listen(config)
        self._owns_socket_file = listener is None
        self.url: str = url_of(config, self._socket)
        self.port: int = 0 if config.uds is not None else self._socket.getsockname()[1]
        """The TCP port in use, also where the configuration left it to the system; 0 on a Unix socket."""
        self._server = _Server(settings)

    async def serve(self) -> None:
        """Serve until ``stop``; returns when the drain is over."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._config.uds is not None and self._owns_socket_file:
                self._config.uds.unlink(missing_ok=True)

    def stop(self) -> None:
        """Begin the drain. Idempotent; call on the event loop."""
        if self._server.should_exit:
            return
        self._server.should_exit = True
        # uvicorn looks at its flag ten times a second. What it accepted meanwhile would be refused although a process
        # beside this one could have taken it.
        for server in self._server.servers:
            server.close()
        error = UnavailableError("the server is shutting down")
        asyncio.get_running_loop().call_later(self._config.drain_timeout_s, self._app.fail_open, error)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to its HTTP server."""
        yield


def build_server(config: RouterConfig, app: RouterApp, listener: socket.socket | None = None) -> HttpServer:
    """The server of one router process, listening already."""
    return HttpServer(config, app, listener)


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
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        timeout_graceful_shutdown=int(config.drain_timeout_s + _CLOSING_S) + 1,
    )
    settings.max_header_bytes = config.max_header_bytes
    settings.max_write_buffer_bytes = config.max_stream_buffer_bytes
    try:
        settings.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {error}", param="--ssl-certfile") from error
    return settings


def url_of(config: RouterConfig, listener: socket.socket) -> str:
    """Where clients find the server."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}"
    return f"{scheme}://{bracketed(config.advertise_host or config.host)}:{listener.getsockname()[1]}"


def listen(config: RouterConfig) -> socket.socket:
    """The listening socket; raises ``ConfigError`` naming ``--port``, ``--host`` or ``--uds`` when it cannot be had."""
    return _listen_tcp(config.host, config.port) if config.uds is None else _listen_unix(config.uds)


def _listen_unix(path: Path) -> socket.socket:
    """A socket file that a dead process left is replaced; one that somebody answers on is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: cannot be taken: {error.strerror or error}", param="--uds") from error
    listener.setblocking(False)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def _listen_tcp(host: str, port: int) -> socket.socket:
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
