"""A worker's links to routers: registered, lost, refused, asked to come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import msgspec
import pytest

from twopool.engine import router_link
from twopool.engine.router_link import RequestMessage, RouterLinks
from twopool.protocol.codec import encode, worker_to_router_decoder
from twopool.protocol.ids import Attempt, Epoch, RequestId, RouterId, WorkerId
from twopool.protocol.messages import (
    PROTOCOL_VERSION,
    AttemptFailed,
    BlockCounts,
    Cancel,
    Drain,
    ErrorInfo,
    Heartbeat,
    PeerInfo,
    Peers,
    Refused,
    Register,
    Registered,
    ReRegister,
    WorkerStats,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ServerSocket
from twopool_testing.waiting import until

EPOCH = Epoch(5)
PEER = PeerInfo(worker_id=WorkerId("prefill-0"), role="prefill", epoch=Epoch(1), address="tcp://127.0.0.1:1")
CANCEL = Cancel(request_id=RequestId("r"), attempt=Attempt(0))


class FakeRouter:
    """Answers each registration as told and keeps what it was sent."""

    def __init__(self, security: Security, name: str = "router-a") -> None:
        self.name = RouterId(name)
        self.answer: msgspec.Struct = Registered(router_id=self.name, peers=(PEER,))
        self.messages: list[Any] = []
        self.connection = b""
        self.lost = 0
        self._decoder = worker_to_router_decoder()
        self._socket = ServerSocket(
            security=security, host="127.0.0.1", port=0, on_message=self._on_message, on_lost=self._on_lost
        )
        self.address = f"127.0.0.1:{self._socket.port}"
        self.close = self._socket.close

    def send(self, message: msgspec.Struct | bytes) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        assert self._socket.send(self.connection, payload)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.messages)

    def _on_message(self, peer: bytes, payload: bytes) -> None:
        self.connection = peer
        message = self._decoder.decode(payload)
        self.messages.append(message)
        if isinstance(message, Register):
            self.send(self.answer)

    def _on_lost(self, peer: bytes) -> None:
        self.lost += 1


class Handler:
    def __init__(self) -> None:
        self.requests: list[RequestMessage] = []
        self.peers: list[tuple[PeerInfo, ...]] = []
        self.lost: list[RouterId] = []
        self.drains = 0

    def on_request_message(self, router_id: RouterId, message: RequestMessage) -> None:
        self.requests.append(message)

    def on_peers(self, router_id: RouterId, peers: tuple[PeerInfo, ...]) -> None:
        self.peers.append(peers)

    def on_router_lost(self, router_id: RouterId) -> None:
        self.lost.append(router_id)

    def on_drain(self) -> None:
        self.drains += 1


def registration() -> Register:
    return Register(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId("decode-0"),
        role="decode",
        epoch=EPOCH,
        model="m",
        compatibility_hash="h",
        peer_address="tcp://127.0.0.1:2",
        max_model_len=100,
        max_num_seqs=4,
        vocab_size=10,
        block_size=16,
        num_blocks=8,
        tp_size=1,
        dtype="float32",
        kernel_backend="torch",
        local_prefill=True,
    )


def heartbeat() -> Heartbeat:
    counts = BlockCounts(free=8, cached=0, active=0, pinned=0, fetching=0, quarantined=0)
    return Heartbeat(epoch=EPOCH, stats=WorkerStats(blocks=counts))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEARTBEAT_S", "RETRY_S", "REFUSED_RETRY_S"):
        monkeypatch.setattr(router_link, name, 0.05)
    monkeypatch.setattr(router_link, "REGISTER_TIMEOUT_S", 0.3)


@asynccontextmanager
async def linked(*routers: FakeRouter, security: Security) -> AsyncIterator[tuple[RouterLinks, Handler]]:
    handler = Handler()
    links = RouterLinks(
        tuple(router.address for router in routers),
        security=security,
        registration=registration,
        heartbeat=heartbeat,
        handler=cast(Any, handler),
        on_drain=handler.on_drain,
    )
    task = asyncio.ensure_future(links.run())
    try:
        yield links, handler
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def secured() -> AsyncIterator[Security]:
    security = Security(None)
    try:
        yield security
    finally:
        security.close()


async def test_a_worker_registers_beats_and_takes_messages() -> None:
    async with secured() as security:
        router = FakeRouter(security)
        async with linked(router, security=security) as (links, handler):
            await until(lambda: router.count(Heartbeat) >= 3)
            assert router.count(Register) == 1 and links.registered.is_set()
            assert handler.peers == [(PEER,)]
            for message in (CANCEL, Peers(()), Drain()):
                router.send(message)
            await until(lambda: handler.drains)
            assert handler.requests == [CANCEL] and handler.peers[-1] == ()
            error = ErrorInfo(kind="internal", message="no")
            failed = AttemptFailed(request_id=RequestId("r"), attempt=Attempt(0), error=error)
            links.send(router.name, failed)
            links.send(RouterId("another"), failed)
            await until(lambda: router.count(AttemptFailed) == 1)
        router.close()


async def test_garbage_is_counted_and_the_link_lives() -> None:
    async with secured() as security:
        router = FakeRouter(security)
        async with linked(router, security=security) as (links, handler):
            await until(lambda: router.connection)
            router.send(b"\xc1 garbage")
            router.send(CANCEL)
            await until(lambda: handler.requests)
            assert links.num_rejected_messages == 1 and handler.lost == []
        router.close()


async def test_a_lost_router_is_told_and_found_again() -> None:
    async with secured() as security:
        router = FakeRouter(security)
        async with linked(router, security=security) as (links, handler):
            await until(links.registered.is_set)
            router.close()
            await until(lambda: handler.lost == ["router-a"])
            assert not links.registered.is_set()
            links.send(router.name, CANCEL)  # nowhere to go, no harm


async def test_re_register_brings_a_new_connection() -> None:
    async with secured() as security:
        router = FakeRouter(security)
        async with linked(router, security=security) as (_, handler):
            await until(lambda: router.count(Register) == 1)
            first = router.connection
            router.send(ReRegister(router.name))
            await until(lambda: router.count(Register) == 2)
            assert router.connection != first and handler.lost == ["router-a"]
        router.close()


@pytest.mark.parametrize("answer", [Refused("other model"), CANCEL], ids=["refused", "no answer"])
async def test_a_refused_or_unanswered_registration_is_tried_again(answer: msgspec.Struct) -> None:
    async with secured() as security:
        router = FakeRouter(security)
        router.answer = answer
        async with linked(router, security=security) as (links, handler):
            await until(lambda: router.count(Register) >= 2)
            assert not links.registered.is_set()
            assert handler.requests == [] and handler.lost == []
            router.answer = Registered(router_id=router.name)
            await until(links.registered.is_set)
        router.close()


async def test_two_routers_are_served_apart() -> None:
    async with secured() as security:
        routers = [FakeRouter(security, "router-a"), FakeRouter(security, "router-b")]
        async with linked(*routers, security=security) as (links, handler):
            await until(lambda: all(router.count(Heartbeat) for router in routers))
            routers[0].close()
            await until(lambda: handler.lost == ["router-a"])
            assert links.registered.is_set()
            beats = routers[1].count(Heartbeat)
            links.heartbeat_now()
            await until(lambda: routers[1].count(Heartbeat) > beats)
        routers[1].close()
