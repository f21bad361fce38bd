"""The three connections of a rank on another node, as messages over the connection of its node.

Node 0's end of it stands between the leader's sockets and the network, the other node's between the network and the
rank's: neither the leader nor the rank knows of it.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import cast

from twopool.engine.node_messages import Channel, ChannelEnded, RankBytes

_MAX_BYTES = 512 * 1024
"""A message's share of a large write."""


class RankPipes:
    """Carries what comes out of ``sockets`` to ``send``, and what ``write`` gets into them. Lives on an event loop."""

    def __init__(
        self, rank: int, sockets: Mapping[Channel, socket.socket], send: Callable[[RankBytes | ChannelEnded], None]
    ) -> None:
        self._pipes = {channel: _Pipe(rank, channel, send) for channel in sockets}
        self._sockets = sockets

    async def open(self) -> None:
        """Take the sockets over; from now on they belong to the loop."""
        loop = asyncio.get_running_loop()
        for channel, sock in self._sockets.items():
            sock.setblocking(False)
            pipe = self._pipes[channel]
            await loop.create_unix_connection(lambda pipe=pipe: pipe, sock=sock)  # type: ignore[misc]

    def write(self, channel: Channel, data: bytes) -> None:
        self._pipes[channel].write(data)

    def end(self, channel: Channel) -> None:
        """The other end is gone."""
        self._pipes[channel].end()

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.end()


class _Pipe(asyncio.Protocol):
    def __init__(self, rank: int, channel: Channel, send: Callable[[RankBytes | ChannelEnded], None]) -> None:
        self._rank = rank
        self._channel = channel
        self._send = send
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._is_ended = False

    def write(self, data: bytes) -> None:
        if self._transport is None:
            self._early.append(data)
        elif not self._is_ended:
            self._transport.write(data)

    def end(self) -> None:
        """What was written still goes out."""
        self._is_ended = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._early)
        self._early.clear()
        if self._is_ended:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _MAX_BYTES):
            self._send(RankBytes(self._rank, self._channel, data[start : start + _MAX_BYTES]))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._send(ChannelEnded(self._rank, self._channel))
