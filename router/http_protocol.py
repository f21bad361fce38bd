"""uvicorn's HTTP protocol with what streams need: the transport itself, limits on headers, news of a lost client.

Each request's ASGI scope carries a ``ClientConnection`` (``connection_of``). Only documented attributes of
``HttpToolsProtocol`` and its request cycle are used besides the callbacks it overrides; uvicorn is pinned.
"""

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from twopool.protocol.errors import InvalidRequestError, TwopoolError
from twopool.router.http_errors import HeadersTooLargeError, RequestTimeoutError, error_body
from twopool.router.http_ids import client_id_in, http_id_of

_log = logging.getLogger("twopool.router")
_STATE_KEY = "twopool.connection"
_HIGH_WATER_BYTES = 64 * 1024
_MAX_DUPLICATED_FD = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3
"""Descriptors up to here may have a duplicate: those that are short of it are left for connections."""


class ProtocolConfig(Config):
    """uvicorn's configuration and our limits; set right after construction."""

    max_header_bytes: int = 64 * 1024
    max_write_buffer_bytes: int = 1024 * 1024
    request_read_timeout_s: float = 60.0


class ClientConnection:
    """One request's connection: for writing its stream and for hearing that the client left."""

    __slots__ = (
        "_cycle",
        "_flow",
        "_is_chunked",
        "_lost",
        "_on_lost",
        "_protocol",
        "_transport",
        "began_s",
        "header_error",
        "http_id",
        "on_write_paused",
        "write",
    )

    def __init__(self, protocol: "RouterHttpProtocol", cycle: RequestResponseCycle, began_s: float) -> None:
        self.began_s = began_s
        """When the request's first byte was read (``time.monotonic()``)."""
        self.http_id: bytes | None = None
        """What the request is called (``http_ids``), once the application has seen it."""
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._is_chunked = True
        self.write: Callable[[bytes], None] = protocol.transport.write
        """Bytes as they are, such as a whole chunk; otherwise as ``write_chunk``."""
        self._on_lost: Callable[[], None] | None = None
        self.on_write_paused: Callable[[], None] | None = None
        """Called when ``is_write_paused`` becomes true."""
        self._lost: asyncio.Event | None = None
        self.header_error: TwopoolError | None = None
        """Why the request must be refused whatever it says: its headers were too large."""

    @property
    def is_lost(self) -> bool:
        return self._cycle.disconnected

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the client leaves (at once if it has). Reading goes on, or nobody would notice."""
        if self.is_lost:
            on_lost()
            return
        self._on_lost = on_lost
        self._protocol.flow.resume_reading()

    def unwatch(self) -> None:
        self._on_lost = None

    @property
    def is_write_paused(self) -> bool:
        """Whether bytes wait for the client by the dozen of kilobytes."""
        return self._flow.write_paused

    @property
    def is_behind(self) -> bool:
        """Whether the client takes bytes more slowly than they come: more than ``max_write_buffer_bytes`` wait."""
        return self._flow.write_paused and (
            self._transport.get_write_buffer_size() > self._protocol.config.max_write_buffer_bytes
        )

    def begin_stream(self) -> bool:
        """Before the head of a response of unknown length: whether it is chunked. An HTTP/1.0 client (a proxy, most
        likely) does not know chunks: there the end of the connection is the end of the body.
        """
        self._is_chunked = self._cycle.scope["http_version"] != "1.0"
        if not self._is_chunked:
            self._cycle.chunked_encoding = False  # or uvicorn would make it so
        return self._is_chunked

    def write_chunk(self, data: bytes) -> None:
        """A part of the response whose head was sent through ASGI; not after ``on_lost`` was called.

        Never blocks: see ``is_behind``.
        """
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes written that the system has not taken yet."""
        return self._transport.get_write_buffer_size()

    def direct_send(self) -> Callable[[bytes], int] | None:
        """The ``send`` of the client's socket, which costs a sixth less than ``write``; ``None`` where there is none.

        It goes past the transport, so only while that has nothing buffered; it raises ``BlockingIOError``, or takes a
        part only, and whoever calls it writes the rest. It stays safe to call, in vain, when the connection is lost.
        """
        return self._protocol.direct_send()

    async def drained(self) -> None:
        """Wait while ``is_write_paused``."""
        await self._flow.drain()

    def abort(self) -> None:
        """Drop the connection and what it has buffered."""
        self._transport.abort()

    async def close(self, *, timeout_s: float) -> None:
        """Close without ending the response, after what is buffered has been sent or ``timeout_s`` has passed."""
        self._transport.close()
        if self.is_lost:
            return
        self._lost = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()
            await self._lost.wait()

    def release(self) -> None:
        """The request is over. What was kept for it is let go of, or it would wait for the collector in a cycle."""
        self._on_lost = self.on_write_paused = None
        self._cycle.scope["state"].clear()

    def lost(self) -> None:
        """The protocol's news that the connection is gone."""
        self._cycle.disconnected = True
        if self._lost is not None:
            self._lost.set()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()


def connection_of(scope: Scope) -> ClientConnection:
    """The connection a request came in on."""
    connection: ClientConnection = scope["state"][_STATE_KEY]
    return connection


class RouterHttpProtocol(HttpToolsProtocol):
    """One client connection, possibly of several requests."""

    config: ProtocolConfig

    def __init__(
        self,
        config: ProtocolConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._open: list[ClientConnection] = []
        self._began_s = 0.0
        self._header_bytes = 0
        self._in_headers = False
        self._is_reading = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Where ``flow.write_paused`` begins: asking for it costs less than asking the transport for its buffer's size.
        transport.set_write_buffer_limits(high=min(_HIGH_WATER_BYTES, self.config.max_write_buffer_bytes))
        # A connection that never sends a request is as idle as one between requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        super().pause_writing()
        for connection in self._open:
            if connection.on_write_paused is not None:
                connection.on_write_paused()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._unwatch_unread()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._socket is not None:
            self._socket.close()
        for connection in self._open:
            connection.lost()
        self._open.clear()

    def direct_send(self) -> Callable[[bytes], int] | None:
        """See ``ClientConnection.direct_send``."""
        if self._socket is None:
            inner = self.transport.get_extra_info("socket")
            if self.scheme == "https" or inner is None or self.transport.is_closing():
                return None
            fd = inner.fileno()
            if not 0 <= fd <= _MAX_DUPLICATED_FD:
                return None
            # A duplicate, which is closed here and nowhere else: the transport's own number may be another
            # connection's by the time that somebody writes to it.
            self._socket = socket.socket(fileno=os.dup(fd))
            self._socket.setblocking(False)
        return self._socket.send

    def data_received(self, data: bytes) -> None:
        # httptools has no limit of its own and hands a header over only when it is whole, so bytes are counted here
        # while headers are incomplete, and header by header below.
        was_in_headers = self._in_headers
        super().data_received(data)
        if was_in_headers and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.config.max_header_bytes:
                self._refuse(self._headers_too_large())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Also where the client has not even read its last answer: that a mere ``close`` would wait for, for ever."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch_unread(self) -> None:
        """Nothing else bounds how long an answer waits whose client asked for the next one and reads neither."""
        self._unwatch_unread()
        size = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.timeout_keep_alive, self._check_unread, size)

    def _unwatch_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _check_unread(self, size_before: int) -> None:
        is_stream = any(connection.on_write_paused is not None for connection in self._open)
        if is_stream or self.transport.get_write_buffer_size() < size_before:
            self._watch_unread()  # streams have their own bound: ``is_behind``
        else:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began_s = time.monotonic()
        self._header_bytes = 0
        self._in_headers = self._is_reading = True
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(self.config.request_read_timeout_s, self._read_timed_out)

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes <= self.config.max_header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        # The cycle's task has been created but has not run yet, so it sees this.
        connection = ClientConnection(self, self.cycle, self._began_s)
        if self._header_bytes > self.config.max_header_bytes:
            connection.header_error = self._headers_too_large()
        self._open = [other for other in self._open if not other._cycle.response_complete]
        self._open.append(connection)
        self.cycle.scope["state"][_STATE_KEY] = connection

    def on_message_complete(self) -> None:
        self._is_reading = False
        self._stop_read_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError(msg))

    def _headers_too_large(self) -> TwopoolError:
        return HeadersTooLargeError(f"request line and headers exceed {self.config.max_header_bytes} bytes")

    def _read_timed_out(self) -> None:
        self._read_timer = None
        if not self._in_headers and self.cycle.response_started:
            self.transport.close()  # answered already (too large, say); only its body still trickles in
            return
        self._refuse(
            RequestTimeoutError(f"the request was not complete after {self.config.request_read_timeout_s:g} s")
        )

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _refuse(self, error: TwopoolError) -> None:
        """Answer outside of ASGI, then close: what follows on this connection cannot be trusted."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # an answer is under way: a second status line would garble it
            return
        http_id = self._http_id()
        _log.info("answered %d: %s", error.http_status, error.message, extra={"http_id": http_id.decode()})
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.http_status] + head % (len(body), http_id) + body)
        self.transport.close()

    def _http_id(self) -> bytes:
        """Of the request that is being read."""
        if not self._is_reading:
            return http_id_of(None)
        if not self._in_headers and self._open and self._open[-1].http_id is not None:
            return self._open[-1].http_id
        return http_id_of(client_id_in(self.headers))
