"""The reader side of worker-to-worker connections: the sources this worker may read KV from.

The router names the sources; for each, one ``SourceLink`` connects, shakes hands, reads the canary, then is *ready*::

    CONNECTING ──connected──► HELLO ──welcome──► CANARY ──bytes right──► READY ──now and then: bytes right──► READY
        ▲                       │                  │                       │
        └──────────────── lost, refused, deadline, wrong bytes ◄───────────┘

A source that is lost is reported at once; the link is retried as long as a router lists that epoch of it, rarely where
one of both refused the pair (versions, meaning or shape of their KV): that does not change while both live.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from twopool.engine import handshake
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import KvTransport, PeerLink
from twopool.protocol.codec import encode, source_to_reader_decoder
from twopool.protocol.errors import PairRefusedError, ProtocolError, TransferError
from twopool.protocol.ids import RouterId, WorkerId
from twopool.protocol.messages import (
    Confirmed,
    FirstTokens,
    KvReady,
    PeerIdentity,
    PeerInfo,
    PeerRef,
    PeerRefused,
    PeerWelcome,
    PrefillAccepted,
    PrefillBusy,
    PrefillFailed,
    PrefixMissing,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ClientSocket

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
RETRY_S = 0.3
REFUSED_RETRY_S = 5.0
"""Until the next try after a refusal that will most likely be repeated."""
CANARY_EVERY_S = 60.0
"""A ready link's canary is read again so often: what the handshake proved may have ceased to be so."""
CANARY_FRESH_S = 2.0
"""When a worker joins, canaries that were read longer ago are read again. Many join at once where a cluster starts."""

SourceReply = PrefillAccepted | PrefillBusy | PrefillFailed | KvReady | FirstTokens | PrefixMissing | Confirmed


class ReaderHandler(Protocol):
    """The role behind the links; called on the event loop."""

    def on_source_reply(self, source: PeerRef, message: SourceReply) -> None: ...

    def on_source_lost(self, source: PeerRef) -> None: ...


class SourceLinks:
    """All sources of one worker; a task for each, owned by ``run``."""

    def __init__(
        self,
        *,
        security: Security,
        transport: KvTransport,
        compatibility_hash: str,
        identity: Callable[[], PeerIdentity],
        handler: ReaderHandler,
        on_ready_change: Callable[[], None],
        faults: FaultPoints | None = None,
    ) -> None:
        self.faults = faults or FaultPoints(None)
        self.security = security
        self.transport = transport
        self.compatibility_hash = compatibility_hash
        self.identity = identity
        self.handler = handler
        self.on_ready_change = on_ready_change
        self.num_rejected_messages = 0
        self.num_refused = 0
        self.num_quarantined = 0
        self._listed: dict[RouterId, tuple[PeerInfo, ...]] = {}
        self._links: dict[PeerRef, SourceLink] = {}
        self._tasks: dict[PeerRef, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep links to all listed sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._reconcile()
            await asyncio.Event().wait()

    def listed(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        """The sources a router knows now; an empty list when the router is lost."""
        self._listed[router_id] = peers
        self._reconcile()

    def ready(self) -> tuple[PeerRef, ...]:
        """Sources this worker can read from now."""
        return tuple(ref for ref, link in self._links.items() if link.kv_link is not None)

    def get(self, source: PeerRef) -> "SourceLink | None":
        """The ready link to a source, if there is one."""
        link = self._links.get(source)
        return link if link is not None and link.kv_link is not None else None

    @property
    def canary_age_s(self) -> float | None:
        """Seconds since the oldest ready link's canary was read; ``None`` without one."""
        read = [link.canary_read_s for link in self._links.values() if link.kv_link is not None]
        return time.monotonic() - min(read) if read else None

    def quarantine(self, source: PeerRef, seconds: float) -> None:
        """Drop the link to a source whose bytes were wrong, and make no new one for ``seconds``."""
        link = self._links.get(source)
        if link is not None and link.kv_link is not None:
            self.num_quarantined += 1
            link.quarantine(seconds)

    def _reconcile(self) -> None:
        if self._group is None:
            return
        wanted = {PeerRef(p.worker_id, p.epoch): p for peers in self._listed.values() for p in peers}
        for ref in set(self._tasks) - set(wanted):
            self._tasks.pop(ref).cancel()
        new = set(wanted) - set(self._tasks)
        if new:
            for link in self._links.values():
                link.look_again()
        for ref in new:
            link = self._links[ref] = SourceLink(ref, wanted[ref].address, self)
            self._tasks[ref] = self._group.create_task(self._keep(link))

    async def _keep(self, link: "SourceLink") -> None:
        try:
            await link.run()
        finally:
            self._links.pop(link.ref, None)


class SourceLink:
    """The connection to one epoch of one source."""

    def __init__(self, ref: PeerRef, address: str, owner: SourceLinks) -> None:
        self.ref = ref
        self.kv_link: PeerLink | None = None
        self.block_size = 0
        self.canary_read_s = 0.0
        self._address = address
        self._owner = owner
        self._decoder = source_to_reader_decoder()
        self._socket: ClientSocket | None = None
        self._connected: asyncio.Future[None]
        self._welcome: asyncio.Future[PeerIdentity]
        self._lost: asyncio.Future[None]
        self._look_again = asyncio.Event()
        self._retry_s = RETRY_S
        self._reported = ""

    @property
    def worker_id(self) -> WorkerId:
        return self.ref.worker_id

    def send(self, message: msgspec.Struct) -> bool:
        return self._socket is not None and self._socket.send(encode(message))

    def quarantine(self, seconds: float) -> None:
        """Read nothing from this source for ``seconds``: what came from it was not what it has."""
        self._retry_s = seconds
        _resolve(self._lost, None)

    def look_again(self) -> None:
        """Read the canary anew soon, unless that was done just now."""
        if time.monotonic() - self.canary_read_s > CANARY_FRESH_S:
            self._look_again.set()

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        while True:
            self._retry_s = RETRY_S
            try:
                await self._one_connection()
            except (TransferError, ProtocolError, TimeoutError, ConnectionError) as error:
                self._owner.num_refused += isinstance(error, (TransferError, ProtocolError))
                if isinstance(error, (PairRefusedError, ProtocolError)):
                    self._retry_s = REFUSED_RETRY_S
                self._report(str(error))
            finally:
                self._forget()
            await asyncio.sleep(self._retry_s)

    async def _one_connection(self) -> None:
        loop = asyncio.get_running_loop()
        self._connected, self._welcome, self._lost = (loop.create_future() for _ in range(3))
        self._socket = ClientSocket(
            security=self._owner.security,
            address=self._address,
            on_message=self._on_payload,
            on_connected=lambda: _resolve(self._connected, None),
            on_lost=lambda: _resolve(self._lost, None),
        )
        await self._unless_lost(self._connected, CONNECT_TIMEOUT_S)
        if await self._owner.faults.reached("hello"):
            self.send(handshake.hello(self._owner.compatibility_hash, self._owner.identity()))
        identity = await self._unless_lost(self._welcome, HANDSHAKE_TIMEOUT_S)
        if PeerRef(identity.worker_id, identity.epoch) != self.ref:
            raise ProtocolError(f"{self._address} is {identity.worker_id} of another epoch, not {self.ref.worker_id}")
        kv_link = await self._read_canary(identity)
        self.block_size = identity.ranks[0].geometry.block_size
        self.kv_link = kv_link
        self._reported = ""
        logger.info("ready to read from source", extra={"worker_id": self.worker_id})
        self._owner.on_ready_change()
        while await self._is_time_to_look_again(kv_link):
            kv_link = self.kv_link = await self._read_canary(identity)

    async def _read_canary(self, identity: PeerIdentity) -> PeerLink:
        """Open the link, or look at the one that is open, and read the canary over it."""
        connecting = asyncio.ensure_future(self._owner.transport.connect(identity, timeout_s=HANDSHAKE_TIMEOUT_S))
        kv_link = await self._unless_lost(connecting, HANDSHAKE_TIMEOUT_S + 1)
        self.canary_read_s = time.monotonic()
        self._look_again.clear()
        return kv_link

    async def _is_time_to_look_again(self, kv_link: PeerLink) -> bool:
        """Waits until it is, or the link is over."""
        asked = asyncio.ensure_future(self._look_again.wait())
        try:
            # The transport may find the source lost, or a READ from it failed, although the control connection stands.
            over: list[asyncio.Future[Any]] = [self._lost, kv_link.closed]
            await asyncio.wait([*over, asked], timeout=CANARY_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            return not any(future.done() for future in over)
        finally:
            asked.cancel()

    async def _unless_lost(self, future: "asyncio.Future[T]", timeout_s: float) -> T:
        """The result of ``future``; raises ``ConnectionError`` when the connection goes first."""
        try:
            either: list[asyncio.Future[Any]] = [future, self._lost]
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            if self._lost.done():
                raise ConnectionError(f"connection to {self._address} is gone")
            raise TimeoutError(f"{self._address} did not answer in {timeout_s:g} s")
        finally:
            future.cancel()

    def _report(self, reason: str) -> None:
        """Log why there is no link, unless the last try said the same."""
        if reason != self._reported:
            self._reported = reason
            logger.warning("no link to source: %s", reason, extra={"worker_id": self.worker_id})

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.kv_link is not None:
            self._owner.transport.disconnect(self.kv_link)
            self.kv_link = None
            logger.warning("lost source", extra={"worker_id": self.worker_id})
            self._owner.handler.on_source_lost(self.ref)
            self._owner.on_ready_change()

    def _on_payload(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
            match message:
                case PeerWelcome():
                    _resolve(self._welcome, handshake.check(message, self._owner.compatibility_hash))
                case PeerRefused():
                    raise ProtocolError(f"refused by {self.worker_id}: {message.reason}")
                case _:
                    self._owner.handler.on_source_reply(self.ref, message)
        except ProtocolError as error:
            self._owner.num_rejected_messages += 1
            if not self._welcome.done():
                self._welcome.set_exception(error)  # ``run`` logs it
            else:
                logger.warning("from source: %s", error.message, extra={"worker_id": self.worker_id})


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)
