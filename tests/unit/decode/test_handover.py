"""Every way a handover can go, with a scripted source and reads that end when the test says so."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from twopool.decode.handover import (
    HandedOver,
    Handover,
    SourceBusyError,
    SourceFailedError,
)
from twopool.engine.block_pool import BlockPool
from twopool.engine.incoming import KvMemory
from twopool.engine.requests import AttemptKey, EngineRequest
from twopool.engine.source_links import SourceLink
from twopool.kv_transfer.checksums import ChecksumRequest, Checksums, unit_checksums
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import FetchReport, FetchRequest, KvTransport
from twopool.protocol.errors import CorruptKvError, PeerLostError, StaleKvError, TicketError, TransferError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Attempt, BlockId, ChoiceIndex, Epoch, RequestId, RouterId, WorkerId
from twopool.protocol.messages import (
    ChoiceState,
    Confirm,
    Confirmed,
    ErrorInfo,
    FirstTokens,
    KvReady,
    KvVerify,
    PeerRef,
    Prefill,
    PrefillAccepted,
    PrefillBusy,
    PrefillFailed,
    ReleasePrefill,
    SamplingParams,
    Ticket,
    TokenDelta,
    pack_ids,
)
from twopool.protocol.token_hash import HashChain

BLOCK = 16
GEOMETRY = KvGeometry(
    num_blocks=9, block_size=BLOCK, num_layers=3, num_kv_heads=2, num_kv_heads_local=2, head_dim=8, dtype="bfloat16"
)
IDS = np.arange(3, 3 + 40, dtype=np.int32)  # two blocks and a half
KEY = AttemptKey(RequestId("r"), Attempt(1))
SOURCE = PeerRef(WorkerId("prefill-0"), Epoch(7))
FIRST = TokenDelta(KEY.request_id, KEY.attempt, ChoiceIndex(0), 0, (42,))


class FakeHandle:
    """A read that lands, fails or hangs when told to."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[FetchReport] = loop.create_future()
        self.cancelled = False

    async def wait(self) -> FetchReport:
        return await asyncio.shield(self.result)

    def land(self) -> None:
        self.settled.set_result(None)
        self.result.set_result(FetchReport(num_bytes=10, num_ranges=1, num_posts=1, transfer_s=0.001))

    def fail(self) -> None:
        self.result.set_exception(TransferError("the peer is lost"))

    def cancel(self) -> None:
        self.cancelled = True

    def release(self) -> None:
        self.cancel()


@dataclass
class FakeTransport:
    memory: torch.Tensor
    spread: int = 0
    handles: list[FakeHandle] = field(default_factory=list)
    requests: list[FetchRequest] = field(default_factory=list)

    def fetch(self, link: object, request: FetchRequest, *, timeout_s: float) -> FakeHandle:
        self.requests.append(request)
        self.handles.append(FakeHandle())
        return self.handles[-1]

    async def checksums(self, request: ChecksumRequest) -> Checksums:
        return unit_checksums(self.memory, GEOMETRY, request)


class FakeLink:
    def __init__(self) -> None:
        self.ref = SOURCE
        self.worker_id = SOURCE.worker_id
        self.kv_link: object | None = SimpleNamespace(peer=SimpleNamespace(ranks=[SimpleNamespace(geometry=GEOMETRY)]))
        self.block_size = BLOCK
        self.sent: list[msgspec.Struct] = []
        self.connected = True

    def send(self, message: msgspec.Struct) -> bool:
        self.sent.append(message)
        return self.connected

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


class Scene:
    """One handover under test and everything around it."""

    def __init__(self, *, held_tokens: int = 0, num_blocks: int = 8, verify: KvVerify = "off") -> None:
        self.pool = BlockPool(num_blocks, BLOCK, epoch=Epoch(1))
        self.link = FakeLink()
        memory = torch.arange(GEOMETRY.pool_bytes // 2, dtype=torch.int16).view(GEOMETRY.shape)
        self.transport = FakeTransport(memory)
        self.verified: list[int] = []
        self.chain = HashChain(b"")
        self.chain.extend(IDS)
        held = self.pool.allocate(held_tokens // BLOCK)
        self.reservation = self.pool.reserve(4 - len(held))
        sampling = SamplingParams(seed=0, max_tokens=5)
        self.handover = Handover(
            request=EngineRequest(KEY, IDS, (ChoiceState(ChoiceIndex(0)),), sampling),
            router_id=RouterId("router-0"),
            token_ids=IDS,
            chain=self.chain,
            held=held,
            reservation=self.reservation,
            prefix=None,
            deadline_s=1e12,
            link=cast(SourceLink, self.link),
            worker=KvMemory(
                pool=self.pool,
                ranks=(GEOMETRY,),
                transport=cast(KvTransport, self.transport),
                faults=FaultPoints(None),
                verify=verify,
                on_fetched=lambda report: None,
                on_verified=self.verified.append,
                on_failed=lambda source, error: None,
            ),
        )
        self.task = asyncio.ensure_future(self.handover.run())

    def ticket(self, start: int, end: int, **changes: Any) -> Ticket:
        blocks = list(range(100 + start // BLOCK, 100 + -(-end // BLOCK)))
        fields: dict[str, Any] = {
            "request_id": KEY.request_id,
            "attempt": KEY.attempt,
            "source_epoch": SOURCE.epoch,
            "start_token": start,
            "end_token": end,
            "layer_start": 0,
            "layer_end": 3,
            "block_ids": pack_ids(blocks),
            "generations": np.zeros(len(blocks), dtype="<i8").tobytes(),
            "token_hash": self.chain.at(end, IDS),
        }
        return Ticket(**(fields | changes))

    async def say(self, *messages: Any) -> None:
        for message in messages:
            self.handover.on_reply(message)
        await self.turn()

    async def turn(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def to_accepted(self) -> None:
        await self.turn()
        await self.say(PrefillAccepted(request_id=KEY.request_id, attempt=KEY.attempt))

    async def to_fetching(self) -> None:
        await self.to_accepted()
        await self.say(KvReady(self.ticket(0, 32)))

    async def to_first_tokens(self) -> None:
        await self.to_fetching()
        await self.say(KvReady(self.ticket(32, 40)), first_tokens())

    async def to_confirming(self) -> None:
        await self.to_first_tokens()
        for handle in self.transport.handles:
            handle.land()
        await self.turn()

    def assert_all_free(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free == counts.total, counts
        assert self.pool.num_obtainable == counts.total


def first_tokens() -> FirstTokens:
    return FirstTokens(request_id=KEY.request_id, attempt=KEY.attempt, deltas=(FIRST,))


def confirmed(valid: bool) -> Confirmed:
    return Confirmed(request_id=KEY.request_id, attempt=KEY.attempt, valid=valid)


async def test_a_prompt_comes_over_in_two_parts() -> None:
    scene = Scene()
    await scene.to_confirming()
    assert scene.link.count(Confirm) == 1 and not scene.task.done()
    await scene.say(confirmed(True))
    done: HandedOver = await scene.task
    assert len(done.block_table) == 3 and done.deltas == (FIRST,)
    assert (done.report.num_bytes, done.report.num_posts) == (20, 2)
    assert [len(request.local_block_ids) for request in scene.transport.requests] == [2, 1]
    assert scene.link.count(ReleasePrefill) == 0
    scene.pool.release(done.block_table)
    done.reservation.release()
    scene.assert_all_free()


async def test_blocks_that_are_here_already_are_not_fetched() -> None:
    scene = Scene(held_tokens=32)
    await scene.to_accepted()
    asked = scene.link.sent[0]
    assert isinstance(asked, Prefill) and asked.skip_tokens == 32
    await scene.say(KvReady(scene.ticket(32, 40)), first_tokens())
    scene.transport.handles[0].land()
    await scene.turn()
    await scene.say(confirmed(True))
    done = await scene.task
    assert len(done.block_table) == 3
    scene.pool.release(done.block_table)
    done.reservation.release()
    scene.assert_all_free()


STATES: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "prefilling": lambda scene: scene.turn(),
    "accepted": Scene.to_accepted,
    "fetching": Scene.to_fetching,
    "first tokens": Scene.to_first_tokens,
    "confirming": Scene.to_confirming,
}
ENDINGS: dict[str, tuple[Callable[[Scene], object], type[BaseException]]] = {
    "cancelled": (lambda scene: scene.task.cancel(), asyncio.CancelledError),
    "source lost": (lambda scene: scene.handover.fail(PeerLostError("gone")), PeerLostError),
    "source failed": (
        lambda scene: scene.handover.on_reply(
            PrefillFailed(
                request_id=KEY.request_id, attempt=KEY.attempt, error=ErrorInfo(kind="internal", message="no")
            )
        ),
        SourceFailedError,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", STATES)
async def test_each_ending_in_each_state_gives_everything_back(state: str, ending: str) -> None:
    """PD-02: blocks a READ may still write stay out of use until it is over."""
    scene = Scene(held_tokens=0)
    await STATES[state](scene)
    act, expected = ENDINGS[ending]
    act(scene)
    with pytest.raises(expected):
        await scene.task
    assert scene.link.count(ReleasePrefill) == 1
    unsettled = [handle for handle in scene.transport.handles if not handle.settled.done()]
    assert scene.pool.counts().quarantined == (0, 2, 3)[len(unsettled)]
    assert all(handle.cancelled for handle in unsettled)
    for handle in unsettled:
        handle.settled.set_result(None)
    await scene.turn()
    scene.assert_all_free()


async def test_busy_leaves_nothing_behind() -> None:
    scene = Scene(held_tokens=16)
    await scene.turn()
    await scene.say(PrefillBusy(request_id=KEY.request_id, attempt=KEY.attempt))
    with pytest.raises(SourceBusyError):
        await scene.task
    scene.assert_all_free()


async def test_stale_tickets_end_the_attempt() -> None:
    """PD-04: what the source reused before it was read never becomes a token."""
    scene = Scene()
    await scene.to_confirming()
    await scene.say(confirmed(False))
    with pytest.raises(StaleKvError, match="reused"):
        await scene.task
    scene.assert_all_free()


async def test_a_failed_read_ends_the_attempt_at_once() -> None:
    """PD-11: nobody waits for first tokens when the KV cannot come."""
    scene = Scene()
    await scene.to_fetching()
    scene.transport.handles[0].fail()
    with pytest.raises(TransferError):
        await scene.task
    assert scene.pool.counts().quarantined == 2
    scene.transport.handles[0].settled.set_result(None)
    await scene.turn()
    scene.assert_all_free()


@pytest.mark.parametrize(
    ("start", "end", "changes", "message"),
    [
        (16, 32, {}, "does not continue"),
        (0, 32, {"source_epoch": 8}, "another life"),
        (0, 32, {"token_hash": b"x" * 16}, "other tokens"),
        (0, 32, {"end_token": 41}, "does not continue"),
        (0, 32, {"start_token": 32}, "does not continue"),
    ],
)
async def test_wrong_tickets_are_refused(start: int, end: int, changes: dict[str, Any], message: str) -> None:
    scene = Scene()
    await scene.to_accepted()
    await scene.say(KvReady(scene.ticket(start, end, **changes)))
    with pytest.raises(TransferError, match=message):
        await scene.task
    assert not scene.transport.handles
    scene.assert_all_free()


async def test_first_tokens_without_the_whole_prompt_are_refused() -> None:
    """PD-01: a source that skips KV gives an error, not tokens."""
    scene = Scene()
    await scene.to_fetching()
    await scene.say(first_tokens())
    scene.transport.handles[0].land()
    with pytest.raises(TransferError, match="whole prompt"):
        await scene.task
    scene.assert_all_free()


async def test_a_source_that_does_not_take_messages_is_lost() -> None:
    scene = Scene()
    scene.link.connected = False
    with pytest.raises(PeerLostError):
        await scene.task
    scene.assert_all_free()


def test_block_ids_are_plain_ints() -> None:
    """The pool's ids go into messages and index arrays alike."""
    assert BlockPool(2, BLOCK, epoch=Epoch(1)).allocate(1) == [BlockId(0)]


def layers(scene: Scene, start: int, end: int, first: int, last: int, **changes: Any) -> KvReady:
    return KvReady(scene.ticket(start, end, layer_start=first, layer_end=last, **changes))


async def test_the_last_chunk_comes_by_layer_groups() -> None:
    """One set of blocks for all groups; a repeated ticket is read once."""
    scene = Scene()
    await scene.to_accepted()
    await scene.say(KvReady(scene.ticket(0, 32)), layers(scene, 32, 40, 0, 2), layers(scene, 32, 40, 0, 2))
    assert scene.handover._kv.num_covered == 32
    await scene.say(layers(scene, 32, 40, 2, 3), first_tokens())
    requests = scene.transport.requests
    assert [(r.layer_start, r.layer_end) for r in requests] == [(0, 3), (0, 2), (2, 3)]
    assert requests[1].local_block_ids.tolist() == requests[2].local_block_ids.tolist()
    for handle in scene.transport.handles:
        handle.land()
    await scene.turn()
    await scene.say(confirmed(True))
    done = await scene.task
    assert len(done.block_table) == 3 and done.report.num_posts == 3
    scene.pool.release(done.block_table)
    done.reservation.release()
    scene.assert_all_free()


async def test_blocks_of_a_group_stay_out_of_use_until_every_read_into_them_is_over() -> None:
    """PD-02: two READs into the same blocks, the second of which settles late."""
    scene = Scene()
    await scene.to_accepted()
    await scene.say(layers(scene, 0, 32, 0, 1), layers(scene, 0, 32, 1, 3))
    scene.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scene.task
    first, second = scene.transport.handles
    first.settled.set_result(None)
    await scene.turn()
    assert scene.pool.counts().quarantined == 2
    second.settled.set_result(None)
    await scene.turn()
    scene.assert_all_free()


@pytest.mark.parametrize(
    "wrong", [(32, 40, 1, 3), (32, 40, 0, 4), (32, 40, 2, 2), (0, 32, 0, 3), (32, 33, 1, 3)], ids=str
)
async def test_layer_ranges_that_do_not_continue_are_refused(wrong: tuple[int, int, int, int]) -> None:
    scene = Scene()
    await scene.to_accepted()
    await scene.say(layers(scene, 0, 32, 0, 3))
    if wrong == (32, 33, 1, 3):  # another end than the group before it
        await scene.say(layers(scene, 32, 40, 0, 1))
    await scene.say(layers(scene, *wrong))
    if wrong == (0, 32, 0, 3):  # a repeat is no fault
        assert not scene.task.done()
        scene.task.cancel()
        return
    with pytest.raises(TicketError):
        await scene.task


async def test_a_prompt_with_layers_missing_is_refused() -> None:
    """PD-01."""
    scene = Scene()
    await scene.to_accepted()
    await scene.say(layers(scene, 0, 40, 0, 2), first_tokens())
    scene.transport.handles[0].land()
    with pytest.raises(TicketError, match="whole prompt"):
        await scene.task
    scene.assert_all_free()


async def test_checksums_are_compared() -> None:
    """PD-11: what the scripted source claims is not what the memory holds."""
    scene = Scene(verify="all")
    await scene.to_accepted()
    sums = np.zeros(2 * GEOMETRY.num_kv_heads, dtype="<u8").tobytes()
    await scene.say(layers(scene, 0, 32, 0, 3, checked=pack_ids([0, 1]), checksums=sums))
    scene.transport.handles[0].land()
    with pytest.raises(CorruptKvError, match="2 of 2"):
        await scene.task
    scene.assert_all_free()


@pytest.mark.parametrize("checked", [[], [0], [0, 1, 2]])
async def test_missing_checksums_are_no_checksums(checked: list[int]) -> None:
    scene = Scene(verify="all")
    await scene.to_accepted()
    await scene.say(layers(scene, 0, 32, 0, 3, checked=pack_ids(checked), checksums=b""))
    scene.transport.handles[0].land()
    with pytest.raises(TicketError, match="did not come"):
        await scene.task
    scene.assert_all_free()
