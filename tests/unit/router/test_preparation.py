"""Large bodies and grammars: so many at once, so many waiting, and nobody waits who has left or is too late."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from twopool.protocol.errors import OverloadedError
from twopool.router import prepared_request
from twopool.router.model_info import ModelInfo
from twopool.router.prepared_request import PreparedRequest
from twopool.router.request_body import BodyRoom, RequestBody
from twopool.router.waiting import retry_after_s
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, raw_request, running_server
from twopool_testing.waiting import until

LARGE = "u" * 20_000
MAX_WAITING = 2


class Gate:
    """Holds what is prepared in a thread until it is opened; what is prepared on the event loop passes."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_begun = 0

    def prepare(self, *arguments: Any) -> PreparedRequest:
        if threading.current_thread() is not threading.main_thread():
            self.num_begun += 1
            assert self.opened.wait(20)
        return prepared_request.prepare_completion(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr("twopool.router.preparation._MAX_THREADS", 1)
    monkeypatch.setattr("twopool.router.generate_api.prepare_completion", gate.prepare)
    return gate


@pytest.fixture
async def server(tiny_model: ModelInfo, gate: Gate) -> AsyncIterator[RunningServer]:
    dispatcher = FakeDispatcher(lambda request, choice: [60, 61])
    async with running_server(tiny_model, dispatcher, max_queue=MAX_WAITING) as running:
        try:
            yield running
        finally:
            gate.opened.set()


def ask(server: RunningServer, **headers: str) -> "asyncio.Future[Any]":
    body = {"prompt": "hi", "max_tokens": 2, "user": LARGE}
    return asyncio.ensure_future(server.post("/v1/completions", body, **headers))


async def full(server: RunningServer, gate: Gate) -> "list[asyncio.Future[Any]]":
    """One in the only thread, and as many waiting for it as may."""
    asking = [ask(server)]
    await until(lambda: gate.num_begun)
    for number in range(MAX_WAITING):
        asking.append(ask(server))
        await until(functools.partial(is_waiting, server, number + 1))
    return asking


def is_waiting(server: RunningServer, number: int) -> bool:
    return waiting(server) == number


def waiting(server: RunningServer) -> int:
    return server.app._generate._preparation.num_waiting


async def test_the_queue_for_a_thread_is_bounded_and_others_are_served(server: RunningServer, gate: Gate) -> None:
    asking = await full(server, gate)
    await asyncio.sleep(1.1)
    refused = await ask(server)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 2
    assert (await server.complete(max_tokens=2)).status_code == 200
    gate.opened.set()
    assert [response.status_code for response in await asyncio.gather(*asking)] == [200] * (1 + MAX_WAITING)
    assert (await ask(server)).status_code == 200


async def test_who_leaves_while_waiting_leaves_at_once(server: RunningServer, gate: Gate) -> None:
    """Waiting or in its thread; the thread is free again only when its work is over."""
    _, writer = await server.connect()
    request = raw_request({"prompt": "hi", "user": LARGE}, "/v1/completions")
    writer.write(request)
    await until(lambda: gate.num_begun)
    _, other = await server.connect()
    other.write(request)
    await until(lambda: waiting(server) == 1)
    for leaving in (other, writer):
        leaving.close()
    await until(lambda: server.metric("twopool_requests_total", outcome="cancelled") == 2, 1.0)
    assert waiting(server) == 0
    assert server.app._body_room.num_held_bytes == 0
    last = ask(server)
    await until(lambda: waiting(server) == 1)
    gate.opened.set()
    assert (await last).status_code == 200
    assert gate.num_begun == 2, "who had left before its turn was worked for"
    assert len(server.dispatcher.requests) == 1


async def test_the_deadline_holds_while_waiting(server: RunningServer, gate: Gate) -> None:
    first = ask(server, **{"x-request-timeout": "0.3"})
    await until(lambda: gate.num_begun)
    second = ask(server, **{"x-request-timeout": "0.3"})
    for asking in (first, second):
        response = await asyncio.wait_for(asking, 5)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not gate.opened.is_set() and waiting(server) == 0


async def test_bodies_that_are_read_together_are_bounded(tiny_model: ModelInfo) -> None:
    """Many clients that each send most of a large body and then nothing."""
    dispatcher = FakeDispatcher(lambda request, choice: [60, 61])
    flags: dict[str, Any] = {"max_body_bytes": 150_000, "max_pending_body_bytes": 200_000}
    async with running_server(tiny_model, dispatcher, **flags) as server:
        room = server.app._body_room
        _, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 150000\r\n\r\n" + b"x" * 140_000)
        await until(lambda: room.num_held_bytes == 140_000)
        body = {"prompt": "hi", "max_tokens": 2, "user": "u" * 100_000}
        for path in ("/v1/completions", "/tokenize"):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await server.complete(max_tokens=2)).status_code == 200
        assert room.num_held_bytes == 140_000
        writer.close()
        await until(lambda: room.num_held_bytes == 0)
        assert (await server.post("/v1/completions", body)).status_code == 200
        assert room.num_held_bytes == 0


def test_room_is_given_back_once() -> None:
    room = BodyRoom(10, 15)
    body = RequestBody(room)
    room.take(15)
    with pytest.raises(OverloadedError):
        room.take(1)
    assert room.num_held_bytes == 15
    body.release()
    assert room.num_held_bytes == 15


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, 1), (0.9, 1), (1.1, 2), (12.0, 12), (1e9, 60)])
def test_retry_after_is_how_long_the_next_in_turn_has_waited(age_s: float, expected: int) -> None:
    assert retry_after_s(age_s) == expected
