"""A worker's links to its sources: which failures are tried again soon, which rarely, and what the log says of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from msgspec.structs import replace

from twopool.engine import handshake, source_links
from twopool.engine.source_links import SourceLinks
from twopool.kv_transfer.layout import plan_layout
from twopool.protocol.codec import encode, reader_to_source_decoder
from twopool.protocol.errors import TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Attempt, Epoch, RequestId, RouterId, WorkerId
from twopool.protocol.messages import (
    PeerHello,
    PeerIdentity,
    PeerInfo,
    PeerRef,
    PeerRefused,
    RankPool,
    ReleasePrefill,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ServerSocket
from twopool_testing.waiting import until

GEOMETRY = KvGeometry(
    num_blocks=4, block_size=16, num_layers=1, num_kv_heads=1, num_kv_heads_local=1, head_dim=4, dtype="float32"
)
HASH = "h"
NEVER_S = 1000.0
RELEASE = ReleasePrefill(request_id=RequestId("r"), attempt=Attempt(0))


def identity(name: str, **geometry: Any) -> PeerIdentity:
    pool = RankPool(geometry=replace(GEOMETRY, **geometry), base_address=0, canary_block=3, agent_metadata=b"")
    return PeerIdentity(worker_id=WorkerId(name), role="prefill", epoch=Epoch(1), transport="fake", ranks=(pool,))


class FakeSource:
    """Answers every hello as told."""

    def __init__(self, security: Security) -> None:
        self.num_hellos = 0
        self.compatibility_hash = HASH
        self.refusal: str | None = None
        self.garbage: bytes | None = None
        self.identity = identity("prefill-0")
        self._decoder = reader_to_source_decoder()
        self._socket = ServerSocket(
            security=security, host="127.0.0.1", port=0, on_message=self._on_message, on_lost=lambda _: None
        )
        self.close = self._socket.close
        address = f"tcp://127.0.0.1:{self._socket.port}"
        self.info = PeerInfo(worker_id=WorkerId("prefill-0"), role="prefill", epoch=Epoch(1), address=address)

    def _on_message(self, connection: bytes, payload: bytes) -> None:
        assert isinstance(self._decoder.decode(payload), PeerHello)
        self.num_hellos += 1
        if self.garbage is not None:
            self._socket.send(connection, self.garbage)
        elif self.refusal is not None:
            self._socket.send(connection, encode(PeerRefused(self.refusal)))
        else:
            self._socket.send(connection, encode(handshake.welcome(self.compatibility_hash, self.identity)))


class FakeLink:
    def __init__(self, peer: PeerIdentity) -> None:
        self.peer = peer
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FakeTransport:
    """Plans as the real one does, and moves nothing."""

    def __init__(self) -> None:
        self.failure: TransferError | None = None
        self.links: list[FakeLink] = []
        self.num_canaries = 0

    async def connect(self, peer: PeerIdentity, *, timeout_s: float) -> FakeLink:
        open_links = [link for link in self.links if link.peer == peer and not link.closed.done()]
        if self.failure is not None:
            for link in open_links:
                self.disconnect(link)
            raise self.failure
        plan_layout(GEOMETRY, [pool.geometry for pool in peer.ranks])
        self.num_canaries += 1
        if open_links:
            return open_links[0]
        self.links.append(FakeLink(peer))
        return self.links[-1]

    def disconnect(self, link: FakeLink) -> None:
        if not link.closed.done():
            link.closed.set_result(None)


class Handler:
    def __init__(self) -> None:
        self.lost: list[PeerRef] = []

    def on_source_reply(self, source: PeerRef, message: object) -> None:
        raise AssertionError("no source replies here")

    def on_source_lost(self, source: PeerRef) -> None:
        self.lost.append(source)


class Setup:
    """One source and the links of one reader, not yet told of it."""

    def __init__(self, security: Security) -> None:
        self.source = FakeSource(security)
        self.transport = FakeTransport()
        self.handler = Handler()
        self.links = SourceLinks(
            security=security,
            transport=cast(Any, self.transport),
            compatibility_hash=HASH,
            identity=lambda: identity("decode-0"),
            handler=cast(Any, self.handler),
            on_ready_change=lambda: None,
        )

    def begin(self) -> None:
        self.links.listed(RouterId("router"), (self.source.info,))


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with running() as made:
        yield made


@asynccontextmanager
async def running() -> AsyncIterator[Setup]:
    security = Security(None)
    made = Setup(security)
    task = asyncio.create_task(made.links.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        made.source.close()
        security.close()


def other_dtype(setup: Setup) -> None:
    setup.source.identity = identity("prefill-0", dtype="float16")


def other_shape(setup: Setup) -> None:
    setup.source.identity = identity("prefill-0", head_dim=8)


def other_meaning(setup: Setup) -> None:
    setup.source.compatibility_hash = "another"


def refused_there(setup: Setup) -> None:
    setup.source.refusal = "other weights"


REFUSALS = [
    pytest.param(other_dtype, "dtype float32 here, float16 there", id="dtype"),
    pytest.param(other_shape, "head_dim 4 here, 8 there", id="layout"),
    pytest.param(other_meaning, "compatibility hash another does not equal h", id="hash"),
    pytest.param(refused_there, "refused by prefill-0: other weights", id="refused by the source"),
]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("refusal", "words"), REFUSALS)
async def test_a_refused_pair_waits_longer_and_is_logged_once_a_change(
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: Callable[[Setup], None],
    words: str,
) -> None:
    # Whoever waited for RETRY_S would not come again in this test.
    monkeypatch.setattr(source_links, "RETRY_S", NEVER_S)
    monkeypatch.setattr(source_links, "REFUSED_RETRY_S", 0.02)
    refusal(setup)
    setup.begin()
    await until(lambda: setup.links.num_refused >= 3)
    logged = warnings(caplog)
    assert len(logged) == 1 and logged[0].startswith("no link to source: ") and words in logged[0]
    setup.source.refusal = "yet another reason"
    await until(lambda: len(warnings(caplog)) > 1)
    num_hellos = setup.source.num_hellos
    await until(lambda: setup.source.num_hellos >= num_hellos + 2)
    assert warnings(caplog)[1:] == ["no link to source: refused by prefill-0: yet another reason"]
    assert not setup.links.ready()


async def test_what_may_go_well_next_time_is_tried_again_soon(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_links, "RETRY_S", 0.02)
    monkeypatch.setattr(source_links, "REFUSED_RETRY_S", NEVER_S)
    failure = TransferError("the canary is wrong")
    setup.transport.failure = failure
    setup.begin()
    await until(lambda: setup.links.num_refused >= 3)
    assert warnings(caplog) == ["no link to source: the canary is wrong"]
    setup.transport.failure = None
    await until(setup.links.ready)
    setup.transport.failure = failure
    setup.links.quarantine(setup.links.ready()[0], 0.02)
    await until(lambda: len(warnings(caplog)) == 3)
    assert warnings(caplog)[1:] == ["lost source", "no link to source: the canary is wrong"]


async def test_a_link_the_transport_finds_lost_is_made_anew_though_nothing_reads_from_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A READ of a request that is over already may be what fails."""
    monkeypatch.setattr(source_links, "RETRY_S", 0.02)
    setup.begin()
    await until(setup.links.ready)
    setup.transport.disconnect(setup.transport.links[0])
    await until(lambda: setup.handler.lost)
    assert setup.handler.lost == [PeerRef(WorkerId("prefill-0"), Epoch(1))]
    await until(setup.links.ready)
    assert len(setup.transport.links) == 2 and not setup.transport.links[1].closed.done()


async def test_the_canary_is_read_again_now_and_then(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_links, "CANARY_EVERY_S", 0.05)
    assert setup.links.canary_age_s is None
    setup.begin()
    await until(setup.links.ready)
    first = setup.transport.links[0]
    await until(lambda: setup.transport.num_canaries >= 3)
    age_s = setup.links.canary_age_s
    assert age_s is not None and 0 <= age_s < 5
    assert setup.transport.links == [first] and not setup.handler.lost


async def test_the_canary_is_read_again_when_a_worker_joins(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_links, "CANARY_FRESH_S", 0.05)
    setup.begin()
    await until(setup.links.ready)
    await asyncio.sleep(0.1)
    age_s = setup.links.canary_age_s
    assert age_s is not None and age_s >= 0.1 and setup.transport.num_canaries == 1
    nobody = PeerInfo(worker_id=WorkerId("prefill-1"), role="prefill", epoch=Epoch(2), address="tcp://127.0.0.1:1")
    setup.links.listed(RouterId("router"), (setup.source.info, nobody))
    await until(lambda: setup.transport.num_canaries == 2)
    age_s = setup.links.canary_age_s
    assert age_s is not None and age_s < 0.1
    setup.links.listed(RouterId("router"), (setup.source.info,))
    await asyncio.sleep(0.1)
    assert setup.transport.num_canaries == 2, "who leaves changes nothing"


async def test_of_many_that_join_at_once_the_first_has_canaries_read(setup: Setup) -> None:
    setup.begin()
    await until(setup.links.ready)
    joined = replace(setup.source.info, worker_id=WorkerId("prefill-1"), address="tcp://127.0.0.1:1")
    setup.links.listed(RouterId("router"), (setup.source.info, joined))
    await asyncio.sleep(0.05)
    assert setup.transport.num_canaries == 1


async def test_a_canary_that_became_wrong_ends_the_link(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_links, "RETRY_S", 0.02)
    monkeypatch.setattr(source_links, "CANARY_EVERY_S", 0.05)
    setup.begin()
    await until(setup.links.ready)
    setup.transport.failure = TransferError("the canary is wrong")
    await until(lambda: setup.handler.lost)
    assert not setup.links.ready() and setup.links.canary_age_s is None
    await until(lambda: setup.links.num_refused)
    setup.transport.failure = None
    await until(setup.links.ready)
    assert len(setup.transport.links) == 2
    assert sorted(warnings(caplog)[:2]) == ["lost source", "no link to source: the canary is wrong"]


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode(PeerRefused("why"))[:-1], encode(RELEASE)], ids=repr)
async def test_a_source_that_answers_garbage_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, payload: bytes
) -> None:
    monkeypatch.setattr(source_links, "REFUSED_RETRY_S", 0.02)
    setup.source.garbage = payload
    setup.begin()
    await until(lambda: setup.links.num_refused >= 2)
    assert setup.links.num_rejected_messages >= 2 and not setup.links.ready()
    setup.source.garbage = None
    await until(setup.links.ready)
