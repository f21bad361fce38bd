"""The router's end of the control connections: registration, heartbeats, losses; everything else is passed on.

One ``_Connection`` for each ZeroMQ peer::

    NEW ──Register──► REGISTERED ──lost, stalled, superseded, cannot be sent to──► GONE
     └──Refused──► NEW                                     (must register anew)

A connection whose worker was declared lost stays open; whatever comes over it is answered with ``ReRegister``.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twopool.protocol.codec import encode, worker_to_router_decoder
from twopool.protocol.errors import ProtocolError
from twopool.protocol.ids import RouterId
from twopool.protocol.messages import (
    AttemptFailed,
    Busy,
    Draining,
    Heartbeat,
    Peers,
    Refused,
    Register,
    Registered,
    ReRegister,
    TokenDelta,
    Tokens,
)
from twopool.router.registry import Worker, WorkerRegistry

logger = logging.getLogger(__name__)

_REREGISTER_INTERVAL_S = 1.0
_MAX_LOGGED_REJECTS = 100


class ControlSocket(Protocol):
    """What is needed of ``protocol.sockets.ServerSocket``."""

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Queue a message without blocking; ``False`` when the peer is gone or does not read."""


class WorkerEvents(Protocol):
    """Who acts on what workers report."""

    def on_tokens(self, worker: Worker, deltas: tuple[TokenDelta, ...]) -> None: ...

    def on_busy(self, worker: Worker, message: Busy) -> None: ...

    def on_attempt_failed(self, worker: Worker, message: AttemptFailed) -> None: ...

    def on_worker_changed(self, worker: Worker) -> None:
        """It registered, sent a heartbeat or began to drain: it may have room now, or none any more."""

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """It is out of the registry; every attempt on it is over."""


@dataclass(slots=True)
class _Connection:
    peer: bytes
    worker: Worker | None = None
    stalled_at_steps: int | None = None
    asked_s: float | None = None


class ControlPlane:
    """Keeps the registry true and turns payloads into ``WorkerEvents``."""

    def __init__(
        self,
        router_id: RouterId,
        socket: ControlSocket,
        registry: WorkerRegistry,
        events: WorkerEvents,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_rejected_messages = 0
        self.num_workers_lost = 0
        self._router_id = router_id
        self._socket = socket
        self._registry = registry
        self._events = events
        self._clock = clock
        self._decoder = worker_to_router_decoder()
        self._connections: dict[bytes, _Connection] = {}

    def on_message(self, peer: bytes, payload: bytes) -> None:
        """One payload from a worker's connection. Never raises: the socket must go on reading."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            self._reject(connection, error.message)
            return
        try:
            self._dispatch(connection, message)
        except Exception:
            # A defect in the handling of one message must not keep the socket from reading the others.
            self.num_rejected_messages += 1
            logger.exception("handling %s failed", type(message).__name__, extra=_who(connection.worker))

    def on_lost(self, peer: bytes) -> None:
        """The connection is gone."""
        connection = self._connections.pop(peer, None)
        if connection is not None and connection.worker is not None:
            self.lose(connection.worker, "connection lost")

    def send(self, worker: Worker, message: msgspec.Struct) -> bool:
        """To a registered worker; one that cannot be sent to is lost. ``False`` when it did not go out."""
        if not worker.alive:
            return False
        if self._socket.send(worker.peer, encode(message)):
            return True
        self.lose(worker, "does not take messages")
        return False

    def lose(self, worker: Worker, reason: str) -> None:
        """Declare a worker lost. Idempotent."""
        if not worker.alive:
            return
        self._registry.remove(worker)
        connection = self._connections.get(worker.peer)
        if connection is not None and connection.worker is worker:
            connection.worker = None
        self.num_workers_lost += 1
        level = logging.INFO if worker.candidate.draining and not worker.requests else logging.WARNING
        logger.log(level, "lost %s worker %s: %s", worker.role, worker.worker_id, reason, extra=_who(worker))
        self._tell_peers()
        self._events.on_worker_lost(worker, reason)

    def lose_stalled(self, timeout_s: float) -> None:
        """Declare lost who is connected but has made no progress for ``timeout_s``."""
        now = self._clock()
        for worker in self._registry.workers:
            if worker.stalled_for_s(now) > timeout_s:
                connection = self._connections.get(worker.peer)
                if connection is not None and worker.stats is not None:
                    connection.stalled_at_steps = worker.stats.num_steps
                self.lose(worker, f"no progress for {timeout_s:.0f} s")

    def _dispatch(self, connection: _Connection, message: msgspec.Struct) -> None:
        worker = connection.worker
        if isinstance(message, Register):
            self._register(connection, message)
        elif worker is None:
            self._ask_to_register(connection, message)
        elif isinstance(message, Tokens):
            self._events.on_tokens(worker, message.deltas)
        elif isinstance(message, Heartbeat):
            if message.epoch != worker.epoch:
                self.lose(worker, f"heartbeat of another epoch ({message.epoch})")
                self._ask_to_register(connection, message)
                return
            worker.on_heartbeat(message, self._clock())
            self._events.on_worker_changed(worker)
        elif isinstance(message, Busy):
            self._events.on_busy(worker, message)
        elif isinstance(message, AttemptFailed):
            self._events.on_attempt_failed(worker, message)
        elif isinstance(message, Draining) and message.epoch == worker.epoch:
            worker.candidate.draining = True
            logger.info("%s worker %s drains", worker.role, worker.worker_id, extra=_who(worker))
            self._events.on_worker_changed(worker)

    def _register(self, connection: _Connection, info: Register) -> None:
        # A worker registers once a connection: whatever life of it, or of its name, was known before is over.
        if connection.worker is not None:
            self.lose(connection.worker, "registered anew")
        former = self._registry.get(info.worker_id)
        if former is not None:
            self.lose(former, "superseded by a new registration of that name")
        reason = self._registry.refusal(info)
        if reason is not None:
            logger.error("refused worker %s: %s", info.worker_id, reason, extra={"worker_id": info.worker_id})
            self._socket.send(connection.peer, encode(Refused(reason)))
            return
        worker = self._registry.add(connection.peer, info, self._clock())
        connection.worker = worker
        connection.stalled_at_steps = None
        logger.info("%s worker %s registered", worker.role, worker.worker_id, extra=_who(worker))
        peers = self._registry.peer_infos(worker)
        if not self.send(worker, Registered(router_id=self._router_id, peers=peers)):
            return
        self._tell_peers(but=worker)
        self._events.on_worker_changed(worker)

    def _ask_to_register(self, connection: _Connection, message: msgspec.Struct) -> None:
        """Answer a worker that is not registered, once a second at most."""
        if not isinstance(message, Heartbeat):
            return
        if connection.stalled_at_steps is not None:
            # A worker that was declared lost because it does not step is taken back when it does.
            if message.stats.num_steps == connection.stalled_at_steps:
                return
            connection.stalled_at_steps = None
        now = self._clock()
        if connection.asked_s is None or now - connection.asked_s >= _REREGISTER_INTERVAL_S:
            connection.asked_s = now
            self._socket.send(connection.peer, encode(ReRegister(self._router_id)))

    def _tell_peers(self, but: Worker | None = None) -> None:
        for worker in self._registry.workers:
            if worker is not but:
                self.send(worker, Peers(self._registry.peer_infos(worker)))

    def _reject(self, connection: _Connection, why: str) -> None:
        self.num_rejected_messages += 1
        if self.num_rejected_messages <= _MAX_LOGGED_REJECTS:
            logger.warning("rejected a message: %s", why, extra=_who(connection.worker))


def _who(worker: Worker | None) -> dict[str, str]:
    return {"worker_id": worker.worker_id} if worker is not None else {}
