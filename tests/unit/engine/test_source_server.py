"""A worker's connections from its readers: whom it refuses, and what the log says of those that come and go."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from twopool.engine import handshake
from twopool.engine.source_server import Reader, SourceRequest, SourceServer
from twopool.protocol.codec import MAX_MESSAGE_BYTES, encode, source_to_reader_decoder
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Attempt, Epoch, RequestId, WorkerId
from twopool.protocol.messages import (
    Confirm,
    PeerIdentity,
    PeerRefused,
    PeerWelcome,
    RankPool,
    ReleasePrefill,
    SourceToReader,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ClientSocket
from twopool_testing.waiting import until

HASH = "h"
GEOMETRY = KvGeometry(
    num_blocks=4, block_size=16, num_layers=1, num_kv_heads=1, num_kv_heads_local=1, head_dim=4, dtype="float32"
)


def identity(name: str) -> PeerIdentity:
    pool = RankPool(geometry=GEOMETRY, base_address=0, canary_block=3, agent_metadata=b"")
    return PeerIdentity(worker_id=WorkerId(name), role="decode", epoch=Epoch(1), transport="fake", ranks=(pool,))


class Handler:
    def __init__(self) -> None:
        self.lost: list[WorkerId] = []
        self.asked: list[WorkerId] = []

    def on_source_request(self, reader: Reader, message: SourceRequest) -> None:
        self.asked.append(reader.worker_id)

    def on_reader_lost(self, reader: Reader) -> None:
        self.lost.append(reader.worker_id)


@dataclass
class Visitor:
    socket: ClientSocket = field(init=False)
    heard: list[SourceToReader] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Setup:
    def __init__(self) -> None:
        self.security = Security(None)
        self.handler = Handler()
        self.server = SourceServer(
            security=self.security,
            host="127.0.0.1",
            port=0,
            advertise_host=None,
            compatibility_hash=HASH,
            identity=lambda: identity("prefill-0"),
            handler=cast(Any, self.handler),
        )

    async def connect(self) -> "Visitor":
        """Somebody who has not said hello."""
        visitor = Visitor()
        connected = asyncio.Event()
        visitor.socket = ClientSocket(
            security=self.security,
            address=self.server.address,
            on_message=lambda payload: visitor.heard.append(source_to_reader_decoder().decode(payload)),
            on_connected=connected.set,
            on_lost=visitor.lost.set,
        )
        await asyncio.wait_for(connected.wait(), 5)
        return visitor

    async def visit(self, *, asks: bool) -> None:
        """A reader that shakes hands, asks for something or nothing, and leaves."""
        connected, welcomed, lost = asyncio.Event(), asyncio.Event(), len(self.handler.lost)
        socket = ClientSocket(
            security=self.security,
            address=self.server.address,
            on_message=lambda _: welcomed.set(),
            on_connected=connected.set,
            on_lost=lambda: None,
        )
        await asyncio.wait_for(connected.wait(), 5)
        socket.send(encode(handshake.hello(HASH, identity("decode-0"))))
        await asyncio.wait_for(welcomed.wait(), 5)
        if asks:
            asked = len(self.handler.asked)
            socket.send(encode(ReleasePrefill(request_id=RequestId("r"), attempt=Attempt(0))))
            await until(lambda: len(self.handler.asked) > asked)
        socket.close()
        await until(lambda: len(self.handler.lost) > lost)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    made.server.close()
    made.security.close()


async def test_a_reader_that_comes_in_vain_again_and_again_is_logged_once(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        await setup.visit(asks=False)
    vain = ["reader connected", "a reader left within the handshake; its log says why"]
    assert [record.getMessage() for record in caplog.records] == vain
    await setup.visit(asks=True)
    await setup.visit(asks=True)
    used = ["lost reader", "reader connected", "lost reader"]
    assert [record.getMessage() for record in caplog.records] == [*vain, *used]
    assert setup.handler.lost == [WorkerId("decode-0")] * 5


HELLO = handshake.hello(HASH, identity("decode-0"))
RELEASE = ReleasePrefill(request_id=RequestId("r"), attempt=Attempt(0))
UNREADABLE = {
    "nothing": b"",
    "garbage": b"\xc1 is no msgpack",
    "half a hello": encode(HELLO)[: len(encode(HELLO)) // 2],
    "a hello and more": encode(HELLO) + b"\x00",
    "a message without a hello": encode(RELEASE),
    "a source's message": encode(handshake.welcome(HASH, identity("prefill-1"))),
    "oversized": bytes(MAX_MESSAGE_BYTES + 1),
}
INNER = encode(identity("decode-0"))
REFUSED = {
    "version": (replace(HELLO, protocol_version=HELLO.protocol_version + 1), "protocol version"),
    "hash": (replace(HELLO, compatibility_hash="other"), "compatibility hash other does not equal h"),
    "version, nothing inner decoded": (replace(HELLO, protocol_version=0, identity=b"?"), "protocol version 0"),
    "hash, nothing inner decoded": (replace(HELLO, compatibility_hash="other", identity=b"?"), "compatibility hash"),
    "garbage inside": (replace(HELLO, identity=b"\xc1"), "undecodable"),
    "truncated inside": (replace(HELLO, identity=INNER[:-3]), "undecodable"),
    "nothing inside": (replace(HELLO, identity=b""), "undecodable"),
}


async def expect_honest_reader_served(setup: Setup) -> None:
    """Whoever came before does no harm, and is not counted again."""
    refused, rejected = setup.server.num_refused, setup.server.num_rejected_messages
    honest = await setup.connect()
    honest.socket.send(encode(HELLO))
    await until(lambda: honest.heard)
    assert isinstance(honest.heard[0], PeerWelcome)
    asked = len(setup.handler.asked)
    honest.socket.send(encode(RELEASE))
    await until(lambda: len(setup.handler.asked) > asked)
    assert (setup.server.num_refused, setup.server.num_rejected_messages) == (refused, rejected)
    honest.socket.close()


@pytest.mark.parametrize("what", UNREADABLE)
async def test_what_is_no_hello_is_counted_and_not_answered(setup: Setup, what: str) -> None:
    visitor = await setup.connect()
    visitor.socket.send(UNREADABLE[what])
    await until(lambda: setup.server.num_refused)
    assert (setup.server.num_refused, setup.server.num_rejected_messages) == (1, 1)
    await expect_honest_reader_served(setup)
    assert not visitor.heard and not visitor.lost.is_set()
    visitor.socket.send(encode(HELLO))
    await until(lambda: visitor.heard)
    assert isinstance(visitor.heard[0], PeerWelcome), "it may still introduce itself"
    visitor.socket.close()


@pytest.mark.parametrize("what", REFUSED)
async def test_a_hello_that_does_not_fit_is_refused_in_words_and_counted(setup: Setup, what: str) -> None:
    hello, words = REFUSED[what]
    visitor = await setup.connect()
    visitor.socket.send(encode(hello))
    await until(lambda: visitor.heard)
    (refusal,) = visitor.heard
    assert isinstance(refusal, PeerRefused) and words in refusal.reason
    assert (setup.server.num_refused, setup.server.num_rejected_messages) == (1, 1)
    visitor.socket.send(encode(RELEASE))
    await until(lambda: setup.server.num_refused == 2)
    assert not setup.handler.asked, "a refused peer is no reader"
    await expect_honest_reader_served(setup)
    visitor.socket.close()


async def test_garbage_of_a_known_reader_is_rejected_and_is_no_refused_handshake(setup: Setup) -> None:
    visitor = await setup.connect()
    visitor.socket.send(encode(HELLO))
    confirm = encode(Confirm(request_id=RequestId("r"), attempt=Attempt(0), tickets=()))
    for payload in (b"\xc1", confirm[:-1], encode(HELLO)[:-1]):
        visitor.socket.send(payload)
    await until(lambda: setup.server.num_rejected_messages == 3)
    assert setup.server.num_refused == 0
    visitor.socket.send(confirm)
    await until(lambda: setup.handler.asked)
    visitor.socket.close()


async def test_far_too_much_costs_the_connection(setup: Setup) -> None:
    """libzmq drops it unread and says no more than that the connection is gone."""
    visitor = await setup.connect()
    visitor.socket.send(bytes(2 * MAX_MESSAGE_BYTES + 1))
    await asyncio.wait_for(visitor.lost.wait(), 10)
    await expect_honest_reader_served(setup)
