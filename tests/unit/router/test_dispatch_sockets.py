"""The dispatcher behind a real control socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import msgspec
import pytest

from twopool.protocol.codec import encode, router_to_worker_decoder
from twopool.protocol.config import RouterConfig
from twopool.protocol.endpoints import tcp_address
from twopool.protocol.errors import UnavailableError
from twopool.protocol.ids import ChoiceIndex, RouterId
from twopool.protocol.messages import (
    Cancel,
    FinishReason,
    Generate,
    Registered,
    RouterToWorker,
    TokenDelta,
    Tokens,
    WorkerToRouter,
)
from twopool.protocol.security import Security
from twopool.protocol.sockets import ClientSocket, ServerSocket
from twopool.router.dispatcher import RequestDispatcher
from twopool.router.interface import RoutedRequest
from twopool_testing.mock_control import MockCluster, RecordingSink, token_at

pytestmark = pytest.mark.usefixtures("no_defects")


@pytest.fixture
def security() -> Iterator[Security]:
    guard = Security(None)
    yield guard
    guard.close()


class WorkerSide:
    """A dispatcher, its control socket, and the ticking."""

    def __init__(self, security: Security) -> None:
        self.socket = ServerSocket(
            security=security,
            host="127.0.0.1",
            port=0,
            on_message=lambda peer, payload: self.dispatcher.on_message(peer, payload),
            on_lost=lambda peer: self.dispatcher.on_lost(peer),
        )
        self.port = self.socket.port
        self.dispatcher = RequestDispatcher(
            RouterConfig(min_prefill=0, min_decode=0), RouterId("router-test"), self.socket
        )
        self.dispatcher.start()


@pytest.fixture
async def side(security: Security) -> AsyncIterator[WorkerSide]:
    side = WorkerSide(security)
    yield side
    await side.dispatcher.close()
    side.socket.close()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - polls plain lists that callbacks fill
            await asyncio.sleep(0.005)


M = TypeVar("M")


def request_of_now() -> RoutedRequest:
    return msgspec.structs.replace(MockCluster().request(), arrived_s=time.monotonic())


class Worker:
    """A decode worker that prefills for itself, as far as its connection goes."""

    def __init__(self, security: Security, port: int) -> None:
        self.messages: list[RouterToWorker] = []
        decoder = router_to_worker_decoder()
        registration = MockCluster().worker("d0", "decode", local_prefill=True).registration()
        self.socket = ClientSocket(
            security=security,
            address=tcp_address("127.0.0.1", port),
            on_message=lambda payload: self.messages.append(decoder.decode(payload)),
            on_connected=lambda: self.send(registration),
            on_lost=lambda: None,
        )

    def send(self, message: WorkerToRouter) -> None:
        assert self.socket.send(encode(message))

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]


async def test_a_request_over_the_wire(security: Security, side: WorkerSide) -> None:
    worker = Worker(security, side.port)
    try:
        await until(lambda: worker.of(Registered))
        assert side.dispatcher.is_ready()
        sink = RecordingSink(1)
        side.dispatcher.submit(request_of_now(), sink)
        await until(lambda: worker.of(Generate))
        [granted] = worker.of(Generate)
        assert granted.prefill is None
        for index in range(3):
            ids = (token_at(granted.request_id, 0, index),)
            finish: FinishReason | None = "length" if index == 2 else None
            delta = TokenDelta(granted.request_id, granted.attempt, ChoiceIndex(0), index, ids, finish)
            worker.send(Tokens((delta,)))
        await until(lambda: sink.finish_reasons)
        assert sink.output_ids == [[token_at(granted.request_id, 0, i) for i in range(3)]]
    finally:
        worker.socket.close()


async def test_a_broken_connection_is_a_lost_worker(security: Security, side: WorkerSide) -> None:
    """RT-12, X-pd-decode-dispatch-fails: seen by itself, well before any timeout of the request."""
    worker = Worker(security, side.port)
    await until(side.dispatcher.is_ready)
    sink = RecordingSink(1)
    side.dispatcher.submit(request_of_now(), sink)
    await until(lambda: worker.of(Generate))
    worker.socket.close()
    await until(lambda: sink.errors)
    assert isinstance(sink.error, UnavailableError)
    assert not side.dispatcher.is_ready()


async def test_closing_cancels_on_the_workers(security: Security, side: WorkerSide) -> None:
    worker = Worker(security, side.port)
    try:
        await until(side.dispatcher.is_ready)
        sink = RecordingSink(1)
        side.dispatcher.submit(request_of_now(), sink)
        await until(lambda: worker.of(Generate))
        await side.dispatcher.close()
        await until(lambda: worker.of(Cancel))
        assert isinstance(sink.error, UnavailableError)
    finally:
        worker.socket.close()
