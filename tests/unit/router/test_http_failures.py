"""Errors before and after the first byte, clients that leave or do not read, shutdown."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from twopool.protocol.errors import (
    ConfigError,
    DeadlineError,
    OverloadedError,
    TwopoolError,
    UnavailableError,
    WorkerFailedError,
)
from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, raw_request, running_server, sse_events

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    """A dispatcher that holds still until the test moves it."""
    async with running_server(tiny_model, FakeDispatcher(), drain_timeout_s=0.5) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"),
    [
        (OverloadedError("queues are full", retry_after_s=3), 429, "overloaded", "overloaded"),
        (UnavailableError("no decode worker", retry_after_s=2), 503, "no_workers", "unavailable"),
    ],
)
async def test_a_dispatcher_that_refuses(
    server: RunningServer, stream: bool, error: UnavailableError, status: int, code: str, outcome: str
) -> None:
    """RT-12: at once, with Retry-After."""
    server.dispatcher.submit_error = error
    response = await server.chat(stream=stream)
    assert response.status_code == status
    assert response.headers["retry-after"] == str(error.retry_after_s)
    assert response.json()["error"]["code"] == code
    assert server.metric("twopool_requests_total", outcome=outcome) == 1
    assert server.metric("twopool_router_requests_in_flight") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_second_prompt_cancels_the_first(server: RunningServer, stream: bool) -> None:
    server.dispatcher.submit_error = OverloadedError("full")
    server.dispatcher.fail_submit_after = 1
    response = await server.complete(["a", "b"], stream=stream)
    assert response.status_code == 429
    assert server.dispatcher.cancelled == [server.dispatcher.requests[0].routed.request_id]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [(WorkerFailedError("lost"), 500, "failed"), (DeadlineError("too slow"), 504, "timeout")],
)
async def test_failures_before_the_first_token_have_their_status(
    server: RunningServer, stream: bool, error: TwopoolError, status: int, outcome: str
) -> None:
    """RT-08, X-pd-prefill-4xx-passthrough."""
    answering = asyncio.create_task(server.chat(stream=stream))
    (await server.dispatcher.request()).fail(error)
    response = await answering
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == error.message
    assert server.metric("twopool_requests_total", outcome=outcome) == 1


async def test_a_failure_after_the_first_token_is_no_success(server: RunningServer) -> None:
    """RT-08: one error event, no finish reason, no [DONE], and a body that does not end as a whole one does."""
    reader, writer = await server.connect()
    writer.write(raw_request({**CHAT, "stream": True}))
    fake = await server.dispatcher.request()
    fake.send(0, [70])
    await reader.readuntil(b'"content":"')
    fake.send(0, [71])
    fake.fail(WorkerFailedError("the decode worker was lost"))
    rest = await asyncio.wait_for(reader.read(), 10)
    assert b'data: {"error":{"message":"the decode worker was lost","type":"internal_error"' in rest
    assert b"[DONE]" not in rest
    assert b'"finish_reason":"' not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert server.metric("twopool_requests_total", outcome="failed") == 1
    writer.close()


async def test_one_failed_prompt_fails_the_answer_and_cancels_the_rest(server: RunningServer) -> None:
    answering = asyncio.create_task(server.complete(["a", "b", "c"]))
    await server.dispatcher.request(2)
    server.dispatcher.requests[0].send(0, [70], "length")
    server.dispatcher.requests[1].fail(WorkerFailedError("lost"))
    assert (await answering).status_code == 500
    assert server.dispatcher.requests[2].cancelled
    server.dispatcher.requests[2].send(0, [70], "length")  # too late: nobody listens, nothing breaks
    assert server.metric("twopool_requests_total", outcome="failed") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token(server: RunningServer, stream: bool) -> None:
    _, writer = await server.connect()
    writer.write(raw_request({**CHAT, "stream": stream}))
    fake = await server.dispatcher.request()
    writer.close()
    await server.dispatcher.until_cancelled(fake)
    assert server.metric("twopool_requests_total", outcome="cancelled") == 1
    assert server.metric("twopool_router_requests_in_flight") == 0
    fake.send(0, [70])


async def test_a_client_that_leaves_a_stream(server: RunningServer) -> None:
    reader, writer = await server.connect()
    writer.write(raw_request({**CHAT, "stream": True, "n": 2}))
    fake = await server.dispatcher.request()
    fake.send(1, [70])
    await reader.readuntil(b'"index":1')
    writer.close()
    await server.dispatcher.until_cancelled(fake)
    fake.send(0, [70])
    assert server.metric("twopool_requests_total", outcome="cancelled") == 1


async def test_a_client_that_leaves_after_a_large_body(server: RunningServer) -> None:
    """uvicorn stops reading when a body is large; a disconnect must be seen nevertheless."""
    _, writer = await server.connect()
    words = {"prompt": "x" * 400, "user": "u" * 300_000}
    writer.write(raw_request(words, "/v1/completions"))
    fake = await server.dispatcher.request()
    writer.close()
    await server.dispatcher.until_cancelled(fake)


async def test_a_half_closed_client_has_left(server: RunningServer) -> None:
    _, writer = await server.connect()
    writer.write(raw_request(CHAT))
    fake = await server.dispatcher.request()
    writer.write_eof()
    await server.dispatcher.until_cancelled(fake)
    writer.close()


async def test_a_client_that_leaves_while_sending(server: RunningServer) -> None:
    _, writer = await server.connect()
    writer.write(raw_request(CHAT)[:-5])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert server.dispatcher.requests == []
    assert server.metric("twopool_requests_total", outcome="cancelled") == 1


@pytest.mark.parametrize("num_tokens", [1, 5000])
async def test_a_reader_that_does_not_read_is_disconnected(tiny_model: ModelInfo, num_tokens: int) -> None:
    """Memory stays bounded by ``max_stream_buffer_bytes`` (and one step), whichever way tokens take."""
    async with running_server(tiny_model, FakeDispatcher(), max_stream_buffer_bytes=50_000) as server:
        with socket.create_connection(("127.0.0.1", server.server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(raw_request({**CHAT, "stream": True, "ignore_eos": True}))
            fake = await server.dispatcher.request()
            fake.send(0, [70])
            for _ in range(40_000):
                if fake.cancelled:
                    break
                fake.send(0, [70] * num_tokens)
                await asyncio.sleep(0)
            assert fake.cancelled
            assert server.metric("twopool_requests_total", outcome="slow_reader") == 1


async def test_a_reader_that_stops_before_the_end_is_disconnected(tiny_model: ModelInfo) -> None:
    """The answer is complete but its last bytes are not taken: the connection does not stay for ever."""
    step, num_steps = "a" * 20_000, 400
    [letter] = tiny_model.tokenizer.encode("a", add_special_tokens=False).tolist()
    loop = asyncio.get_running_loop()
    async with running_server(
        tiny_model, FakeDispatcher(), drain_timeout_s=0.2, max_stream_buffer_bytes=100_000_000
    ) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.server.port))
            await loop.sock_sendall(client, raw_request({**CHAT, "stream": True, "ignore_eos": True}))
            fake = await server.dispatcher.request()
            for _ in range(num_steps):
                fake.send(0, [letter] * len(step))
            fake.send(0, [], "length")
            await asyncio.sleep(0.6)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := await loop.sock_recv(client, 1 << 20):
                    received += data
    assert received.startswith(b"HTTP/1.1 200 ")
    assert len(received) < num_steps * len(step)
    assert not received.endswith(b"0\r\n\r\n")


async def test_shutdown_lets_streams_finish(server: RunningServer) -> None:
    reader, writer = await server.connect()
    writer.write(raw_request({**CHAT, "stream": True}))
    fake = await server.dispatcher.request()
    fake.send(0, [70])
    await reader.readuntil(b'"content":"')
    server.server.stop()
    await asyncio.sleep(0.3)
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await server.connect()
    fake.send(0, [71], "length")
    rest = await asyncio.wait_for(reader.read(), 10)
    assert b"data: [DONE]\n\n" in rest
    assert rest.endswith(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_shutdown_ends_what_does_not_finish(server: RunningServer, stream: bool) -> None:
    reader, writer = await server.connect()
    writer.write(raw_request({**CHAT, "stream": stream}))
    fake = await server.dispatcher.request()
    if stream:
        fake.send(0, [70])
    server.server.stop()
    answer = await asyncio.wait_for(reader.read(), 10)
    assert b"the server is shutting down" in answer
    assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert b"[DONE]" not in answer
    assert fake.cancelled
    writer.close()


async def test_a_taken_port_is_named(server: RunningServer, tiny_model: ModelInfo) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server.port}") as caught:
        async with running_server(tiny_model, FakeDispatcher(), port=server.server.port):
            pass
    assert caught.value.param == "--port"


async def test_a_host_that_is_none(tiny_model: ModelInfo, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="--host"):
        async with running_server(tiny_model, FakeDispatcher(), host="no-such-host.invalid", cluster_key=tmp_path):
            pass


async def test_ipv6(tiny_model: ModelInfo) -> None:
    """RT-13."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with running_server(tiny_model, FakeDispatcher(), host="::1") as server:
        reader, writer = await asyncio.open_connection("::1", server.server.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_defect_costs_one_request(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    server.dispatcher.ready_reason = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    response = await server.client.get("/ready")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal server error",
        "type": "internal_error",
        "param": None,
        "code": None,
    }
    assert "ZeroDivisionError" in caplog.text
    assert (await server.client.get("/health")).status_code == 200


async def test_streams_are_whole_for_many_clients_at_once(tiny_model: ModelInfo) -> None:
    ids = tiny_model.tokenizer.encode("Hello 🙂 world ", add_special_tokens=False).tolist()
    dispatcher = FakeDispatcher(lambda request, choice: ids)
    async with running_server(tiny_model, dispatcher) as server:
        answers = await asyncio.gather(*[server.chat(stream=True, max_tokens=20 + i) for i in range(40)])
    table = tiny_model.tokenizer.table
    for i, answer in enumerate(answers):
        events = sse_events(answer.text)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert text == table.decode((ids * 20)[: 20 + i], skip_special_tokens=True)
        assert events[-1] == "[DONE]"
    assert json.loads(answers[0].text.split("\n\n")[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
