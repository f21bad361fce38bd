"""A stream as a client's own clock sees it, at its socket: no word of the router's in it."""

import json
import socket
import time
from typing import Any

import pytest

from twopool.router.timings import BEFORE_FIRST
from twopool_testing.http_server import raw_request

NUM_TRIES = 20
PAUSE_S = 0.02


def check_ttft(host: str, port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask for streams of ``body`` (completions) and hold the router's figures against what was seen; returns them.

    A busy machine may add to what a client sees: the best of many tries is what the router's stamps are worth.
    """
    tries = [time_stream(host, port, body) for _ in range(NUM_TRIES)]
    for _, timings in tries:
        assert sum(timings.get(f"{name}_ms", 0) for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
        assert timings["receive_ms"] > 0.9e3 * PAUSE_S
    off_by_ms = [seen_ms - timings["ttft_ms"] for seen_ms, timings in tries]
    assert min(map(abs, off_by_ms)) < 1, off_by_ms
    return [timings for _, timings in tries]


def time_stream(host: str, port: int, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds from the first byte sent, a while before the rest, to the first event; and the router's figures."""
    request = raw_request(body | {"stream": True, "timings": True}, "/v1/completions", "connection: close\r\n")
    with socket.create_connection((host, port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.monotonic()
        client.sendall(request[:1])
        time.sleep(PAUSE_S)
        client.sendall(request[1:])
        data = b""
        while b"data:" not in data:
            part = client.recv(65536)
            assert part, data
            data += part
        seen_ms = (time.monotonic() - began_s) * 1e3
        while part := client.recv(65536):
            data += part
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: {")]
    [timings] = [event["timings"] for event in map(json.loads, events) if "timings" in event]
    return seen_ms, timings
