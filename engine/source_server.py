"""The source side of worker-to-worker connections: who reads from this worker.

A reader connects, says hello, and from then on sends ``Prefill``, ``Confirm`` and ``ReleasePrefill``. A reader whose
connection is lost is reported once; what was held for it is the role's to give back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from twopool.engine import handshake
from twopool.kv_transfer.fault_points import FaultPoints, end_process
from twopool.protocol.codec import encode, reader_to_source_decoder
from twopool.protocol.endpoints import tcp_address
from twopool.protocol.errors import ProtocolError
from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import (
    Confirm,
    FetchPrefix,
    PeerHello,
    PeerIdentity,
    PeerRefused,
    Prefill,
    ReleasePrefill,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ServerSocket

logger = logging.getLogger(__name__)

HANDSHAKE_WINDOW_S = 10.0
"""How long after a hello the transport is asked to answer peers often: their first connection needs it."""
MAX_VAIN_READERS = 256

SourceRequest = Prefill | FetchPrefix | Confirm | ReleasePrefill


class Reader:
    """One reader's connection."""

    def __init__(self, connection: bytes, identity: PeerIdentity, server: "SourceServer") -> None:
        self.identity = identity
        self.is_lost = False
        self.has_asked = False
        self.connection = connection
        self.connected_s = time.monotonic()
        self._server = server

    @property
    def worker_id(self) -> WorkerId:
        return self.identity.worker_id

    def send(self, message: msgspec.Struct) -> None:
        """Dropped when the reader is gone: its loss is reported separately."""
        if not self.is_lost:
            self._server.send(self.connection, message)


class SourceHandler(Protocol):
    """The role behind the server; called on the event loop."""

    def on_source_request(self, reader: Reader, message: SourceRequest) -> None: ...

    def on_reader_lost(self, reader: Reader) -> None: ...


class SourceServer:
    """Binds this worker's peer address. ``identity`` is asked at each hello."""

    def __init__(
        self,
        *,
        security: Security,
        host: str,
        port: int,
        advertise_host: str | None,
        compatibility_hash: str,
        identity: Callable[[], PeerIdentity],
        handler: SourceHandler,
        faults: FaultPoints | None = None,
    ) -> None:
        self._faults = faults or FaultPoints(None)
        self.num_rejected_messages = 0
        self.num_refused = 0
        self._compatibility_hash = compatibility_hash
        self._identity = identity
        self._handler = handler
        self._decoder = reader_to_source_decoder()
        self._readers: dict[bytes, Reader] = {}
        self._vain: set[WorkerId] = set()
        """Readers that left within the handshake, as those do that cannot read our KV, again and again: logged once."""
        self._last_hello_s = -HANDSHAKE_WINDOW_S
        self._socket = ServerSocket(
            security=security, host=host, port=port, on_message=self._on_message, on_lost=self._on_lost
        )
        self.address = tcp_address(advertise_host or host, self._socket.port)

    @property
    def in_handshake(self) -> bool:
        """Whether a reader came lately and may still be making its first connection."""
        return time.monotonic() - self._last_hello_s < HANDSHAKE_WINDOW_S

    def send(self, connection: bytes, message: msgspec.Struct) -> None:
        self._socket.send(connection, encode(message))

    def close(self) -> None:
        self._socket.close(linger_ms=300)

    def _on_message(self, connection: bytes, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
            if isinstance(message, PeerHello):
                self._on_hello(connection, message)
                return
            reader = self._readers.get(connection)
            if reader is None:
                raise ProtocolError(f"{type(message).__name__} came before a handshake")
        except ProtocolError as error:
            self.num_rejected_messages += 1
            if connection not in self._readers:
                self.num_refused += 1
            logger.warning("rejected a message from a peer: %s", error.message)
            return
        reader.has_asked = True
        self._vain.discard(reader.worker_id)
        self._handler.on_source_request(reader, message)

    def _on_hello(self, connection: bytes, message: PeerHello) -> None:
        try:
            peer = handshake.check(message, self._compatibility_hash)
        except ProtocolError as error:
            self.num_rejected_messages += 1
            self.num_refused += 1
            logger.error("refused a peer: %s", error.message)
            self.send(connection, PeerRefused(error.message))
            return
        self._last_hello_s = time.monotonic()
        self._readers[connection] = Reader(connection, peer, self)
        level = logging.DEBUG if peer.worker_id in self._vain else logging.INFO
        logger.log(level, "reader connected", extra={"worker_id": peer.worker_id})
        fault = self._faults.take("welcome")
        if fault is None:
            self._welcome(connection)
            return
        end_process(fault)
        if fault.action == "refuse":
            self.send(connection, PeerRefused("refused on purpose"))
        elif fault.action == "delay":
            asyncio.get_running_loop().call_later(fault.seconds, self._welcome, connection)

    def _welcome(self, connection: bytes) -> None:
        self.send(connection, handshake.welcome(self._compatibility_hash, self._identity()))

    def _on_lost(self, connection: bytes) -> None:
        reader = self._readers.pop(connection, None)
        if reader is not None:
            reader.is_lost = True
            self._log_loss(reader)
            self._handler.on_reader_lost(reader)

    def _log_loss(self, reader: Reader) -> None:
        extra = {"worker_id": reader.worker_id}
        if reader.has_asked or time.monotonic() - reader.connected_s > HANDSHAKE_WINDOW_S:
            logger.warning("lost reader", extra=extra)
        elif reader.worker_id not in self._vain:
            if len(self._vain) >= MAX_VAIN_READERS:
                self._vain.clear()
            self._vain.add(reader.worker_id)
            logger.warning("a reader left within the handshake; its log says why", extra=extra)
