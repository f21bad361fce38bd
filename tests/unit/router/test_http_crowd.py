"""Clients that are many, large or rude: bounded time and memory, and the others are served meanwhile."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, running_server, sse_events

NUM_IDLE = 2000
HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    async with running_server(tiny_model, FakeDispatcher(lambda request, choice: [60, 61])) as running:
        yield running


async def served(server: RunningServer) -> None:
    """Somebody else gets a whole stream."""
    async with asyncio.timeout(10):
        events = sse_events((await server.complete(max_tokens=3, stream=True)).text)
    assert events[-1] == "[DONE]"


async def test_a_body_of_100_mb_is_refused_without_being_kept(server: RunningServer) -> None:
    """Announced or chunked, in full or not: 413, and memory stays where it was."""
    before = psutil.Process().memory_info().rss
    chunk = b"x" * (1 << 20)
    for head in (b"content-length: 104857600\r\n", b"transfer-encoding: chunked\r\n"):
        is_chunked = b"chunked" in head
        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n" + head + b"\r\n")
        async with asyncio.timeout(30):
            try:
                for _ in range(100):
                    writer.write(b"100000\r\n" + chunk + b"\r\n" if is_chunked else chunk)
                    await writer.drain()
            except ConnectionError:
                pass  # a server may close while it is sent what it has refused
            answer = await reader.read(4096)
        assert b"413" in answer.split(b"\r\n", 1)[0]
        assert b"request_too_large" in answer or b"exceeds" in answer
        writer.close()
        await served(server)
    assert psutil.Process().memory_info().rss - before < 80 * (1 << 20)


@pytest.mark.parametrize("form", ["ids", "text"])
async def test_a_prompt_of_a_million_tokens(server: RunningServer, form: str) -> None:
    """Refused with its length, off the event loop: streams go on meanwhile."""
    prompt = [60] * 1_000_000 if form == "ids" else "a " * 500_000
    async with asyncio.timeout(60):
        asking = asyncio.ensure_future(server.complete(prompt, max_tokens=1))
        await served(server)
        response = await asking
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1000000" in error["message"]


async def test_two_thousand_idle_connections(server: RunningServer) -> None:
    """Kept alive after an answer each; new clients are served all the same, and the old ones when they come back."""

    async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await server.connect()
        writer.write(HEALTH)
        await read_answer(reader)
        return reader, writer

    async with asyncio.timeout(60):
        idle = []
        for _ in range(NUM_IDLE // 100):
            idle += await asyncio.gather(*(open_one() for _ in range(100)))
        await served(server)
        for reader, writer in idle[:: NUM_IDLE // 50]:
            writer.write(HEALTH)
            assert b"200" in await read_answer(reader)
        for _, writer in idle:
            writer.close()
    await served(server)


async def test_a_slow_loris_crowd_does_not_keep_others_out(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and bodies that come a byte at a time are cut off; others are served meanwhile."""
    monkeypatch.setattr("twopool.router.http_protocol.ProtocolConfig.request_read_timeout_s", 0.4)
    begun = (
        b"POST /v1/completions HTTP/1.1\r\nhost: te",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99\r\n\r\n{",
    )
    async with running_server(tiny_model, FakeDispatcher(lambda request, choice: [60])) as server:

        async def trickle(start: bytes) -> int:
            """How many bytes were sent until the server hung up."""
            reader, writer = await server.connect()
            writer.write(start)
            for sent in range(200):
                try:
                    await asyncio.sleep(0.02)
                    if reader.at_eof() or writer.is_closing():
                        return sent
                    writer.write(b"a")
                    await writer.drain()
                except ConnectionError:
                    return sent
            writer.close()
            return 200

        async with asyncio.timeout(20):
            lorises = asyncio.gather(*(trickle(begun[number % 2]) for number in range(60)))
            await served(server)
            assert all(sent < 200 for sent in await lorises)


async def test_a_client_that_leaves_is_noticed_in_the_same_moment(tiny_model: ModelInfo) -> None:
    """Between two tokens, without waiting for the next one to be written. The best of several: machines are busy."""
    dispatcher = FakeDispatcher()
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    delays_s = []
    async with running_server(tiny_model, dispatcher) as server:
        for number in range(10):
            reader, writer = await server.connect()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            fake = await dispatcher.request(number)
            fake.send(0, [60])
            await reader.readuntil(b"data: ")
            left_s = time.monotonic()
            writer.close()
            async with asyncio.timeout(5):
                await dispatcher.until_cancelled(fake)
            delays_s.append(time.monotonic() - left_s)
    assert min(delays_s) < 0.01
    assert sorted(delays_s)[5] < 0.05


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_a_whole_answer_that_nobody_reads_does_not_stay(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    """After as long as an idle connection is kept it is dropped, also where the client has asked for more meanwhile."""
    monkeypatch.setattr("twopool.router.server._KEEP_ALIVE_S", 0.5)
    body = json.dumps({"prompt": "a " * 2_000_000}).encode()
    request = b"POST /tokenize HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with running_server(tiny_model, FakeDispatcher(lambda request, choice: [60])) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", server.server.port))
        await loop.sock_sendall(client, request)
        asking = asyncio.ensure_future(loop.sock_sendall(client, request * (num_requests - 1)))
        connections = server.server._server.server_state.connections
        async with asyncio.timeout(30):
            while not any(c.transport.get_write_buffer_size() for c in connections):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
            written_s = loop.time()
            await served(server)
            while any(c.transport.get_write_buffer_size() for c in connections):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert 0.3 < loop.time() - written_s < 10
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        client.close()


async def test_requests_at_the_moment_an_idle_connection_is_closed(
    tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-keepalive: 40 times around the limit. An answer comes whole or not at all; then once more on a new connection
    is enough, and nothing was begun for the first.
    """
    monkeypatch.setattr("twopool.router.server._KEEP_ALIVE_S", 0.5)
    dispatcher = FakeDispatcher(lambda request, choice: [60, 61])
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with running_server(tiny_model, dispatcher) as server:

        async def round_of(number: int) -> bool:
            """Whether the old connection answered."""
            reader, writer = await server.connect()
            writer.write(HEALTH)
            await read_answer(reader)
            await asyncio.sleep(0.45 + number * 0.1 / 40)
            answer = b""
            try:
                writer.write(ask)
                answer = await read_answer(reader)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                assert not getattr(error, "partial", b"")
            writer.close()
            if not answer:
                assert (await server.complete(max_tokens=2)).status_code == 200
            return bool(answer)

        async with asyncio.timeout(30):
            answered = await asyncio.gather(*(round_of(number) for number in range(40)))
        assert server.metric("twopool_requests_total", outcome="completed") == 40
    assert any(answered)
    assert not all(answered)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)
