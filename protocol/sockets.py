"""ZeroMQ sockets on an asyncio loop: whole messages in, callbacks out, and a word when a peer is gone.

``ServerSocket`` (ROUTER, bound) and ``ClientSocket`` (DEALER, one peer) read through the socket's file descriptor with
direct callbacks; no task, queue or future stands between a message and its handler. Sending never blocks.

Peer loss comes from libzmq itself: its I/O thread sends and answers ZMTP heartbeats whatever Python is doing, and the
socket monitor reports a connection that closed or fell silent. A lost connection is final: whoever was lost comes
back as a new connection with a new identity and has to introduce itself again.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from twopool.protocol.codec import MAX_MESSAGE_BYTES
from twopool.protocol.endpoints import bracketed, tcp_address
from twopool.protocol.errors import ConfigError
from twopool.protocol.security import Security

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heartbeats:
    """How often libzmq asks whether the other end is there, and after how long a silence it drops the connection."""

    interval_ms: int
    timeout_ms: int


HEARTBEATS = Heartbeats(interval_ms=400, timeout_ms=1400)
"""Together under the 2 s a loss may take to be seen."""

_RECONNECT_MS = 100
_HIGH_WATER_MARK = 100_000
_MESSAGES_A_TURN = 256

# Plain numbers: combining and looking up the library's enums costs more than the calls they go to.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_LOST_EVENTS = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class _FdReader:
    """Calls ``read_one`` while ``socket`` has messages, giving other work a turn after every few hundred.

    The descriptor of a ZeroMQ socket is edge-triggered: after it fires everything must be read, and a send may
    swallow an edge, so ``check`` looks again after sends.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", read_one: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._read_one = read_one
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.check()

    def check(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        if not self._closed and self._is_readable():
            self._drain()

    def _is_readable(self) -> bool:
        """Costs a fraction of the exception that a read in vain is."""
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def _drain(self) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._closed:
                return
            try:
                self._read_one()
            except zmq.Again:
                return
            except BaseException:
                self.check()  # a handler's fault is the loop's to report; what waits behind it is read all the same
                raise
            if not self._closed and not self._is_readable():
                return
        self.check()


class _MonitoredReader:
    """Reads a socket and its monitor until it closes both."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        monitor: "zmq.Socket[bytes]",
        read_one: Callable[[], None],
        read_event: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._monitor = monitor
        self._reader = _FdReader(socket, read_one)
        self._monitor_reader = _FdReader(monitor, read_event)

    def check(self) -> None:
        """Look for messages again: after a send, see ``_FdReader``."""
        self._reader.check()

    def close(self, *, linger_ms: int) -> None:
        self._reader.close()
        self._monitor_reader.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)


class ServerSocket:
    """A bound ROUTER socket. Must be created and used on a running event loop's thread.

    ``on_message(peer, payload)`` gets each single-frame message; ``on_lost(peer)`` is called once for each peer that
    had sent something and whose connection is gone. ``peer`` is the connection's identity, new with each connection.
    """

    def __init__(
        self,
        *,
        security: Security,
        host: str,
        port: int,
        on_message: Callable[[bytes, bytes], None],
        on_lost: Callable[[bytes], None],
        port_flag: str = "--port",
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket = _new_socket(security, zmq.ROUTER, heartbeats, server=True)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._peer_of_fd: dict[int, bytes] = {}
        self._peers: set[bytes] = set()
        self.port = _bind(self._socket, host, port, port_flag)
        self._monitor = self._socket.get_monitor_socket(int(zmq.Event.DISCONNECTED))
        self._reading = _MonitoredReader(self._socket, self._monitor, self._read_one, self._read_event)

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Queue a message; ``False`` when the peer is gone or does not read what it is sent."""
        try:
            self._socket.send(peer, _NOBLOCK_MORE)
            self._socket.send(payload, _NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("send to peer %s failed: %s", peer.hex(), error)
            return False
        self._reading.check()
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        """Idempotent; messages already queued get ``linger_ms`` to leave."""
        self._reading.close(linger_ms=linger_ms)

    def _read_one(self) -> None:
        peer = self._socket.recv(_NOBLOCK)
        # The second frame's metadata names the connection it came over; asked only once, because frames that carry
        # metadata to Python cost more than plain bytes.
        if peer in self._peers:
            payload = self._socket.recv(_NOBLOCK)
        else:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            payload = frame.bytes
            self._peers.add(peer)
            self._peer_of_fd[int(frame.get(zmq.SRCFD))] = peer
        if self._socket.get(_RCVMORE):
            while self._socket.get(_RCVMORE):
                self._socket.recv(_NOBLOCK)
            logger.warning("dropped a message of several frames from peer %s", peer.hex())
            return
        self._on_message(peer, payload)

    def _read_event(self) -> None:
        event = recv_monitor_message(self._monitor, _NOBLOCK)
        peer = self._peer_of_fd.pop(int(event["value"]), None)
        if peer is None:
            return
        # What the peer sent before it went is read first: its last words count.
        self._drain_then_lose(peer)

    def _drain_then_lose(self, peer: bytes) -> None:
        try:
            while not self._socket.closed:
                self._read_one()
        except zmq.Again:
            pass
        self._peers.discard(peer)
        self._on_lost(peer)


class ClientSocket:
    """A DEALER socket connected to one server, for one connection's life.

    ``on_connected`` is called once when the connection stands, ``on_lost`` at most once when it is gone or was
    refused; after that the socket is closed and the owner makes a new one if it wants to try again.
    """

    def __init__(
        self,
        *,
        security: Security,
        address: str,
        on_message: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._socket = _new_socket(security, zmq.DEALER, heartbeats, server=False)
        self._socket.setsockopt(zmq.ROUTING_ID, b"c" + secrets.token_bytes(12))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(int(zmq.Event.HANDSHAKE_SUCCEEDED | _LOST_EVENTS))
        self._socket.connect(address)
        self._reading = _MonitoredReader(self._socket, self._monitor, self._read_one, self._read_event)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def send(self, payload: bytes) -> bool:
        """Queue a message; ``False`` when there is no connection or the server does not read."""
        try:
            self._socket.send(payload, _NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("send to %s failed: %s", self.address, error)
            return False
        self._reading.check()
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        """Idempotent; messages already queued get ``linger_ms`` to leave."""
        self._reading.close(linger_ms=linger_ms)

    def _read_one(self) -> None:
        frames = self._socket.recv_multipart(_NOBLOCK)
        if len(frames) != 1:
            logger.warning("dropped a message of %d frames from %s", len(frames), self.address)
            return
        self._on_message(frames[0])

    def _read_event(self) -> None:
        event = recv_monitor_message(self._monitor, _NOBLOCK)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._on_connected()
            return
        try:
            while not self._socket.closed:
                self._read_one()
        except zmq.Again:
            pass
        if not self._socket.closed:
            self.close()
            self._on_lost()


def _new_socket(security: Security, kind: int, heartbeats: Heartbeats, *, server: bool) -> "zmq.Socket[bytes]":
    socket = security.context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeats.interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeats.timeout_ms)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    # The codec refuses what exceeds its limit and the connection survives; beyond twice that libzmq drops it unread.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
    security.apply(socket, server=server)
    return socket


def _bind(socket: "zmq.Socket[bytes]", host: str, port: int, flag: str) -> int:
    """Bind and return the port; raises ``ConfigError`` naming ``flag`` when it is taken."""
    try:
        if port:
            socket.bind(tcp_address(host, port))
            return port
        return int(socket.bind_to_random_port(f"tcp://{bracketed(host)}"))
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"{flag} {port}: cannot listen on {host}: {error.strerror}", param=flag) from error
