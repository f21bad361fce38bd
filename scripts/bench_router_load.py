"""The client of the router benchmark: a number of streams that each ask again as soon as they were answered."""

import asyncio
import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

_PROMPT = (
    "You are a careful engineer. Explain, step by step and with one example each, how a scheduler decides which of "
    "many waiting requests to run next, what it does when memory is short, and how it keeps everyone's latency bounded."
)
_END = b"0\r\n\r\n"


@dataclass
class LoadResult:
    """One round. ``ttft_s``: from sending a request to the first byte of its first event."""

    num_requests: int
    num_tokens: int
    num_events: int
    seconds: float
    ttft_s: list[float] = field(default_factory=list)


def run_load(port: int, *, num_streams: int, num_requests: int, max_tokens: int) -> LoadResult:
    """Answer ``num_requests`` in all, ``num_streams`` at a time. Raises ``RuntimeError`` when one is refused or cut."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(port, num_streams, num_requests, max_tokens))


def check_answer(port: int, texts: list[str], max_tokens: int) -> None:
    """Ask once and compare the whole text, so that nothing is measured that does not work."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body(max_tokens)), headers)
    reply = connection.getresponse()
    answer = reply.read().decode(errors="replace")
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {answer}")
    text = ""
    for line in answer.splitlines():
        if line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: "))["choices"]
            text += "".join(choice["delta"].get("content") or "" for choice in choices)
    expected = "".join(texts[index % len(texts)] for index in range(max_tokens))
    if text != expected:
        raise RuntimeError(f"the answer is wrong: {text[:200]!r} instead of {expected[:200]!r}")


def body(max_tokens: int) -> dict[str, Any]:
    """One chat request."""
    return {
        "model": "bench",
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }


async def _run(port: int, num_streams: int, num_requests: int, max_tokens: int) -> LoadResult:
    loop = asyncio.get_running_loop()
    data = json.dumps(body(max_tokens)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    result = LoadResult(num_requests, num_requests * max_tokens, 0, 0.0)
    left = _Left(min(num_streams, num_requests), num_requests, loop.create_future())
    streams = [
        (await loop.create_connection(lambda: _Stream(request, result, left), "127.0.0.1", port))[1]
        for _ in range(left.open)
    ]
    started_s = time.perf_counter()
    for stream in streams:
        stream.ask()
    try:
        await left.done
    finally:
        for stream in streams:
            stream.close()
    result.seconds = time.perf_counter() - started_s
    return result


@dataclass
class _Left:
    open: int
    requests: int
    done: "asyncio.Future[None]"


class _Stream(asyncio.Protocol):
    """One connection, kept alive from request to request."""

    def __init__(self, request: bytes, result: LoadResult, left: _Left) -> None:
        self._request = request
        self._result = result
        self._left = left
        self._transport: asyncio.Transport | None = None
        self._asked_s = 0.0
        self._has_first = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def ask(self) -> None:
        """Send the next request, or report that this stream has none any more."""
        if not self._left.requests:
            self._left.open -= 1
            if not self._left.open:
                self._left.done.set_result(None)
            return
        assert self._transport is not None
        self._left.requests -= 1
        self._has_first = False
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._has_first:
            if not data.startswith(b"HTTP/1.1 200") and not self._tail.startswith(b"HTTP/1.1 200"):
                self._fail(f"refused: {data[:300]!r}")
                return
            data = self._tail + data
            if b"data: " not in data:
                self._tail = data  # the headers alone
                return
            self._has_first = True
            self._result.ttft_s.append(time.perf_counter() - self._asked_s)
        self._result.num_events += data.count(b"\ndata: ")
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._tail = b""
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._left.done.done() and self._left.open:
            self._fail("the connection was closed")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        if not self._left.done.done():
            self._left.done.set_exception(RuntimeError(reason))
