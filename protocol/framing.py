"""Typed messages over a stream socket between the processes of one worker: four bytes of length, then MessagePack.

``FrameSocket`` blocks and is used by one thread at a time in each direction; ``FrameConnection`` calls back on an event
loop. Both refuse what is malformed or longer than ``MAX_MESSAGE_BYTES`` and take the connection for lost then: its
other end is a process of this program, so that whatever does not decode is a fault of one of them.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from twopool.protocol.codec import MAX_MESSAGE_BYTES, Decoder, encode
from twopool.protocol.errors import ProtocolError

M = TypeVar("M")

_LENGTH = struct.Struct("<I")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it travels."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class FrameSocket(Generic[M]):
    """A blocking end. ``union`` is what may arrive."""

    def __init__(self, sock: socket.socket, union: Any) -> None:
        self.socket = sock
        self._decoder: Decoder[M] = Decoder(union)

    def send(self, data: bytes, *, timeout_s: float | None) -> None:
        """Send what ``frame`` made. Raises ``OSError``: the other end is gone, or (``TimeoutError``) does not read."""
        self.socket.settimeout(timeout_s)
        self.socket.sendall(data)

    def receive(self, *, timeout_s: float | None) -> M:
        """The next message. Raises ``ConnectionError`` at the end, ``TimeoutError``, ``ProtocolError``."""
        self.socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
        return self._decoder.decode(self._receive_exactly(length))

    def close(self) -> None:
        self.socket.close()

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        have = 0
        while have < count:
            received = self.socket.recv_into(view[have:])
            if not received:
                raise ConnectionError("the connection was closed")
            have += received
        return bytes(data)


class FrameConnection(asyncio.Protocol, Generic[M]):
    """An end on an event loop: ``on_message(message)`` for each, ``on_lost(error)`` once unless ``close`` was first."""

    def __init__(
        self, union: Any, *, on_message: Callable[[M], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        self._decoder: Decoder[M] = Decoder(union)
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._is_closed = False

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket; from then on it belongs to the loop."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: self, sock=sock)
        else:
            await loop.create_connection(lambda: self, sock=sock)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message, before ``open`` too; one for a lost connection is dropped, ``on_lost`` tells of it."""
        if self._transport is None:
            self._early.append(frame(message))
        elif not self._is_closed:
            self._transport.write(frame(message))

    def close(self) -> None:
        """Send what is queued, then close. Idempotent."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._early)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while not self._is_closed and (message := self._next()) is not None:
                self._on_message(message)
        except ProtocolError as error:
            self._lose(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(exc)

    def _next(self) -> M | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._decoder.decode(data)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost(error)
