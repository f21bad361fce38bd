"""A worker's connections from its readers: what the log says of those that come and go."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from twopool.engine import handshake
from twopool.engine.source_server import Reader, SourceRequest, SourceServer
from twopool.protocol.codec import encode
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Attempt, Epoch, RequestId, WorkerId
from twopool.protocol.messages import PeerIdentity, RankPool, ReleasePrefill
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
