"""Every way a prefill can end at its source, in each of its states: a real engine and pool, scripted peers."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from twopool.engine.block_pool import BlockPool
from twopool.engine.incoming import KvMemory
from twopool.engine.prefix_source import PrefixSource
from twopool.engine.requests import StepOutput
from twopool.engine.source_server import Reader
from twopool.engine.tickets import TicketWriter
from twopool.engine.worker import TransferStats, WorkerHost
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import FetchReport, FetchRequest, KvTransport
from twopool.prefill.job import PrefillJob, PrefillState
from twopool.prefill.role import PrefillRole
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import ChoiceIndex, Epoch, RouterId, WorkerId
from twopool.protocol.messages import (
    Confirm,
    Confirmed,
    FetchPrefix,
    FirstTokens,
    KvReady,
    PeerRef,
    Prefill,
    PrefillAccepted,
    PrefillFailed,
    PrefixHint,
    ReleasePrefill,
    Ticket,
    pack_ids,
)
from twopool.protocol.token_hash import HashChain
from twopool_testing.engine_harness import BLOCK_SIZE, Harness, new_key, params, prompt, request

LENGTH = 150  # three chunks
TIMEOUT_S = 10.0
LEASE_S = 30.0
ROUTER = RouterId("router-0")
PEER = PeerRef(WorkerId("decode-9"), Epoch(7))
GEOMETRY = KvGeometry(
    num_blocks=64,
    block_size=BLOCK_SIZE,
    num_layers=1,
    num_kv_heads=1,
    num_kv_heads_local=1,
    head_dim=4,
    dtype="float32",
)


@dataclass(eq=False)
class FakeReader:
    """A decode worker that listens."""

    connection: bytes = b"reader"
    worker_id: str = "decode-0"
    is_lost: bool = False
    identity: Any = field(default_factory=lambda: SimpleNamespace(ranks=[SimpleNamespace(geometry=GEOMETRY)]))
    heard: list[msgspec.Struct] = field(default_factory=list)

    def send(self, message: msgspec.Struct) -> None:
        if not self.is_lost:
            self.heard.append(message)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)


class FakeLink:
    """To a worker that has the prefix."""

    def __init__(self) -> None:
        self.ref = PEER
        self.worker_id = PEER.worker_id
        self.block_size = BLOCK_SIZE
        self.kv_link = object()
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> bool:
        self.sent.append(message)
        return True


class FakeHandle:
    """A READ that never lands."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._result: asyncio.Future[FetchReport] = loop.create_future()

    async def wait(self) -> FetchReport:
        return await asyncio.shield(self._result)

    def release(self) -> None:
        """It is over when the test says so."""


class FakeTransport:
    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []

    def fetch(self, link: object, request: FetchRequest, *, timeout_s: float) -> FakeHandle:
        self.handles.append(FakeHandle())
        return self.handles[-1]


class Scene:
    """A prefill role with everything around it; ``job`` is the one that ends."""

    def __init__(self) -> None:
        self.harness = Harness()
        self.pool = self.harness.pool
        self.reader = FakeReader()
        self.link = FakeLink()
        self.transport = FakeTransport()
        self.reclaimed: list[str] = []
        self.key = new_key()
        self.ids = np.array(prompt(LENGTH), dtype=np.int32)
        transport = cast(KvTransport, self.transport)
        tickets = TicketWriter(self.pool, transport, num_layers=1)
        self.host = SimpleNamespace(
            engine=self.harness.engine,
            pool=self.pool,
            faults=FaultPoints(None),
            transfer_stats=TransferStats(),
            tickets=tickets,
            routers=SimpleNamespace(send=lambda router_id, message: None),
            sources=SimpleNamespace(get=lambda ref: self.link, listed=lambda router_id, peers: None),
            kv_memory=KvMemory(
                pool=self.pool,
                ranks=(GEOMETRY,),
                transport=transport,
                faults=FaultPoints(None),
                verify="off",
                on_fetched=lambda report: None,
                on_verified=lambda num_bytes: None,
                on_failed=lambda source, error: None,
            ),
            config=SimpleNamespace(pin_lease_s=LEASE_S),
            worker_id=WorkerId("prefill-0"),
            update_expected_readers=lambda: None,
            on_reclaimed=self.reclaimed.append,
        )
        confirm = functools.partial(WorkerHost.confirm, cast(WorkerHost, self.host))
        self.host.confirm = confirm
        self.host.prefixes = PrefixSource(tickets, lease_s=LEASE_S, confirm=confirm, on_reclaimed=self.reclaimed.append)
        self.role = PrefillRole(cast(WorkerHost, self.host))
        self.harness.on_step = self.on_step
        self.shut_after_progress = False

    def on_step(self, output: StepOutput) -> None:
        if self.shut_after_progress and output.progress:
            self.harness.gate.shut()
        self.role.on_step(output)

    @property
    def job(self) -> PrefillJob:
        job = self.role.jobs.get(self.key)
        assert job is not None
        return job

    def say(self, message: Any) -> None:
        self.role.on_source_request(cast(Reader, self.reader), message)

    def ask(self, *, hint: PrefixHint | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.say(
            Prefill(
                request_id=self.key.request_id,
                attempt=self.key.attempt,
                source_epoch=self.pool.epoch,
                router_id=ROUTER,
                token_ids=pack_ids(self.ids),
                num_prompt_tokens=LENGTH,
                choices=(ChoiceIndex(0),),
                sampling=params(),
                salt=b"",
                skip_tokens=0,
                prefix=hint,
                verify="off",
                timeout_s=timeout_s,
            )
        )
        assert self.reader.count(PrefillAccepted) == 1

    # --- states

    async def to_fetching(self) -> None:
        self.ask(hint=PrefixHint(PEER, LENGTH))
        await self.harness.until(lambda: bool(self.link.sent))
        assert isinstance(self.link.sent[0], FetchPrefix)

    async def to_reading(self) -> None:
        """READs of the prefix are under way."""
        await self.to_fetching()
        peer = BlockPool(16, BLOCK_SIZE, epoch=PEER.epoch)
        chain = HashChain(b"")
        chain.extend(self.ids)
        num_tokens = LENGTH // BLOCK_SIZE * BLOCK_SIZE
        ticket: Ticket = TicketWriter(peer, cast(KvTransport, self.transport), num_layers=1).write(
            self.key,
            block_table=peer.allocate(num_tokens // BLOCK_SIZE),
            token_ids=self.ids,
            chain=chain,
            tokens=(0, num_tokens),
            layers=(0, 1),
        )
        self.role.on_source_reply(PEER, KvReady(ticket))
        await self.harness.until(lambda: bool(self.transport.handles))
        assert self.pool.counts().fetching == num_tokens // BLOCK_SIZE

    async def to_queued(self) -> None:
        self.harness.gate.shut()
        self.harness.engine.submit(request(prompt(20, seed=1)))
        await asyncio.wait_for(self.harness.gate.entered.wait(), 5)
        self.ask()

    async def to_running(self) -> None:
        """Between a first step and a second that is computing."""
        self.shut_after_progress = True
        self.ask()
        await self.harness.until(lambda: self.reader.count(KvReady) == 1)
        await asyncio.wait_for(self.harness.gate.entered.wait(), 5)

    async def to_pinned(self, timeout_s: float = TIMEOUT_S) -> None:
        self.ask(timeout_s=timeout_s)
        await self.harness.until(lambda: self.reader.count(FirstTokens) == 1)
        assert self.pool.counts().pinned == -(-LENGTH // BLOCK_SIZE)

    # --- endings

    def confirm(self) -> None:
        tickets = tuple(message.ticket for message in self.reader.heard if isinstance(message, KvReady))
        self.say(Confirm(request_id=self.key.request_id, attempt=self.key.attempt, tickets=tickets))

    def release(self) -> None:
        self.say(ReleasePrefill(request_id=self.key.request_id, attempt=self.key.attempt))

    def lose_reader(self) -> None:
        self.reader.is_lost = True
        self.role.on_reader_lost(cast(Reader, self.reader))


@asynccontextmanager
async def running() -> AsyncIterator[Scene]:
    """At the end nothing but cached blocks is left, whatever happened."""
    scene = Scene()
    async with scene.harness.running():
        yield scene


STATES: dict[str, tuple[PrefillState, Callable[[Scene], Awaitable[None]]]] = {
    "fetching": (PrefillState.FETCHING, Scene.to_fetching),
    "fetching, reading": (PrefillState.FETCHING, Scene.to_reading),
    "queued": (PrefillState.QUEUED, Scene.to_queued),
    "running": (PrefillState.RUNNING, Scene.to_running),
    "pinned": (PrefillState.PINNED, Scene.to_pinned),
}


async def lose_router(scene: Scene) -> None:
    scene.role.on_router_lost(RouterId("another"))
    assert scene.key in scene.role.jobs
    scene.role.on_router_lost(ROUTER)


async def pass_deadline(scene: Scene) -> None:
    scene.role.on_tick(time.monotonic() + TIMEOUT_S - 1)
    assert scene.key in scene.role.jobs
    scene.role.on_tick(time.monotonic() + TIMEOUT_S + 1)


async def release(scene: Scene) -> None:
    stranger = FakeReader(connection=b"stranger")
    message = ReleasePrefill(request_id=scene.key.request_id, attempt=scene.key.attempt)
    scene.role.on_source_request(cast(Reader, stranger), message)
    assert scene.key in scene.role.jobs, "a reader ends its own jobs only"
    scene.release()


async def lose_reader(scene: Scene) -> None:
    scene.lose_reader()


async def close(scene: Scene) -> None:
    await scene.role.close()


ENDINGS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "released": release,
    "reader_lost": lose_reader,
    "router_lost": lose_router,
    "deadline": pass_deadline,
    "closed": close,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", STATES)
async def test_each_ending_in_each_state_gives_everything_back(state: str, ending: str) -> None:
    """PD-03: pins end once and say why, READs that may still write keep their blocks, the engine computes no more."""
    wanted, go_to = STATES[state]
    async with running() as scene:
        await go_to(scene)
        job = scene.job
        assert job.state is wanted
        steps = len(scene.harness.gate.plans)
        await ENDINGS[ending](scene)
        assert len(scene.role.jobs) == 0
        assert scene.pool.counts().pinned == 0
        ends = [ending] if state == "pinned" else []
        assert scene.reclaimed == ends
        assert scene.reader.count(PrefillFailed) == (ending == "deadline")
        heard = len(scene.reader.heard)
        scene.release()
        scene.lose_reader()
        scene.role.on_tick(time.monotonic() + 10 * LEASE_S)
        scene.harness.gate.open()
        await scene.harness.until(lambda: scene.harness.engine.idle)
        if wanted is PrefillState.FETCHING:
            await scene.harness.until(lambda: isinstance(scene.link.sent[-1], ReleasePrefill))
        if state == "fetching, reading":
            await scene.harness.until(lambda: scene.pool.counts().quarantined == LENGTH // BLOCK_SIZE)
            assert scene.pool.counts().fetching == 0
            scene.transport.handles[0].settled.set_result(None)
            await scene.harness.until(lambda: scene.pool.counts().quarantined == 0)
        assert scene.reclaimed == ends and len(scene.reader.heard) == heard, "it ended once"
        if state in ("fetching", "fetching, reading", "pinned"):
            assert len(scene.harness.gate.plans) == steps, "nothing is computed for nobody"
        scene.harness.assert_balanced()


async def test_a_lease_ends_pins_and_tells_the_reader() -> None:
    async with running() as scene:
        await scene.to_pinned(timeout_s=10 * LEASE_S)
        scene.role.on_tick(time.monotonic() + LEASE_S - 1)
        assert scene.job.state is PrefillState.PINNED
        scene.role.on_tick(time.monotonic() + LEASE_S + 1)
        assert scene.reclaimed == ["lease"] and scene.reader.count(PrefillFailed) == 1
        assert len(scene.role.jobs) == 0


async def test_a_confirmation_ends_pins_and_may_be_asked_for_again() -> None:
    """The second answer is no, which is safe: the block that is not full, and so not cached, was given up meanwhile."""
    async with running() as scene:
        await scene.to_pinned()
        scene.confirm()
        assert scene.reclaimed == ["confirmed"] and len(scene.role.jobs) == 0
        scene.confirm()
        assert [message.valid for message in scene.reader.heard if isinstance(message, Confirmed)] == [True, False]


async def test_tickets_that_do_not_hold_end_pins_as_stale() -> None:
    async with running() as scene:
        await scene.to_pinned()
        scene.say(Confirm(request_id=scene.key.request_id, attempt=scene.key.attempt, tickets=()))
        assert scene.reclaimed == ["stale"] and scene.host.transfer_stats.stale_tickets == 1
        assert len(scene.role.jobs) == 0
