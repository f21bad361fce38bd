"""A worker's connections to the routers: register, heartbeat, reconnect; messages out and in.

One ``RouterLink`` for each router address::

    CONNECTING ──connected──► REGISTERING ──Registered──► REGISTERED
        ▲                          │                         │
        └──────── lost, refused, deadline, ReRegister ◄──────┘

A link that is lost tells the worker at once, which drops that router's requests, and connects anew.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from twopool.protocol.codec import encode, router_to_worker_decoder
from twopool.protocol.endpoints import parse_tcp_address, tcp_address
from twopool.protocol.errors import ProtocolError
from twopool.protocol.ids import RouterId
from twopool.protocol.messages import (
    Cancel,
    CancelChoice,
    Drain,
    Generate,
    Heartbeat,
    PeerInfo,
    Peers,
    Refused,
    Register,
    Registered,
    ReRegister,
    ResendFrom,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ClientSocket

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
REGISTER_TIMEOUT_S = 5.0
RETRY_S = 0.3
REFUSED_RETRY_S = 5.0

RequestMessage = Generate | Cancel | CancelChoice | ResendFrom


class RouterHandler(Protocol):
    """The role behind the links; called on the event loop."""

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None: ...

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        """The workers this one may read from, as this router knows them now."""
        ...

    def on_router_lost(self, router_id: RouterId) -> None: ...


class RouterLinks:
    """All links of one worker. ``registration`` and ``heartbeat`` are asked each time one is sent."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        security: Security,
        registration: Callable[[], Register],
        heartbeat: Callable[[], Heartbeat],
        handler: RouterHandler,
        on_drain: Callable[[], None],
    ) -> None:
        self.num_rejected_messages = 0
        self.registered = asyncio.Event()
        self.security = security
        self.registration = registration
        self.heartbeat = heartbeat
        self.handler = handler
        self.on_drain = on_drain
        self._by_router: dict[RouterId, RouterLink] = {}
        self._links = [RouterLink(tcp_address(*parse_tcp_address(a, param="--router")), self) for a in addresses]

    async def run(self) -> None:
        """Keep every link alive until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self._links:
                    group.create_task(link.run())
        finally:
            for link in self._links:
                link.close()

    def send(self, router_id: RouterId, message: msgspec.Struct) -> None:
        """To one router; dropped when the link is down (its requests are dropped with it)."""
        link = self._by_router.get(router_id)
        if link is not None:
            link.send(message)

    def broadcast(self, message: msgspec.Struct) -> None:
        for link in self._by_router.values():
            link.send(message)

    def heartbeat_now(self) -> None:
        """Tell every router the current state without waiting for the next beat."""
        if self._by_router:
            self.broadcast(self.heartbeat())

    # --- called by the links ---

    def link_registered(self, link: "RouterLink", message: Registered) -> None:
        self._by_router[message.router_id] = link
        self.registered.set()
        self.handler.on_peers(message.router_id, message.peers)
        link.send(self.heartbeat())

    def link_lost(self, router_id: RouterId) -> None:
        self._by_router.pop(router_id, None)
        if not self._by_router:
            self.registered.clear()
        self.handler.on_router_lost(router_id)


class RouterLink:
    """The connection to one router address."""

    def __init__(self, address: str, owner: RouterLinks) -> None:
        self.address = address
        self._owner = owner
        self._decoder = router_to_worker_decoder()
        self._socket: ClientSocket | None = None
        self._router_id: RouterId | None = None
        self._connected = asyncio.Event()
        self._registered = asyncio.Event()
        self._ended = asyncio.Event()
        self._retry_s = RETRY_S

    async def run(self) -> None:
        while True:
            self._retry_s = RETRY_S
            try:
                await self._one_connection()
            finally:
                self._forget()
            await asyncio.sleep(self._retry_s)

    def send(self, message: msgspec.Struct) -> None:
        if self._socket is not None and not self._socket.send(encode(message)):
            logger.warning("router %s does not take messages: dropping the connection", self.address)
            self._ended.set()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms=300)

    async def _one_connection(self) -> None:
        for event in (self._connected, self._registered, self._ended):
            event.clear()
        self._socket = ClientSocket(
            security=self._owner.security,
            address=self.address,
            on_message=self._on_payload,
            on_connected=self._connected.set,
            on_lost=self._ended.set,
        )
        await _first(self._connected, self._ended)
        if self._ended.is_set():
            return
        self.send(self._owner.registration())
        await _first(self._registered, self._ended, timeout_s=REGISTER_TIMEOUT_S)
        while self._registered.is_set() and not self._ended.is_set():
            await _first(self._ended, timeout_s=HEARTBEAT_S)
            self.send(self._owner.heartbeat())

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._router_id is not None:
            router_id, self._router_id = self._router_id, None
            logger.warning("lost router %s at %s", router_id, self.address)
            self._owner.link_lost(router_id)

    def _on_payload(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            self._owner.num_rejected_messages += 1
            logger.warning("rejected a message from router %s: %s", self.address, error.message)
            return
        match message:
            case Registered():
                self._router_id = message.router_id
                self._registered.set()
                logger.info("registered with router %s at %s", message.router_id, self.address)
                self._owner.link_registered(self, message)
            case Refused():
                logger.error("router %s refuses this worker: %s", self.address, message.reason)
                self._retry_s = REFUSED_RETRY_S
                self._ended.set()
            case ReRegister():
                self._ended.set()
            case _ if self._router_id is None:
                logger.warning("router %s sent %s before registration", self.address, type(message).__name__)
            case Peers():
                self._owner.handler.on_peers(self._router_id, message.peers)
            case Drain():
                self._owner.on_drain()
            case Generate() | Cancel() | CancelChoice() | ResendFrom():
                self._owner.handler.on_request_message(self._router_id, message)


async def _first(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when any of the events is set, or after ``timeout_s``."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
