"""Bodies, headers, keep-alive, API keys, and the endpoints that generate nothing."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from twopool.protocol.errors import AuthenticationError, ConfigError
from twopool.router.auth import ApiKeys, load_api_keys
from twopool.router.http_protocol import ProtocolConfig
from twopool.router.model_info import ModelInfo
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import RunningServer, raw_request, running_server, sse_events

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
async def server(tiny_model: ModelInfo) -> AsyncIterator[RunningServer]:
    dispatcher = FakeDispatcher(lambda request, choice: [70, 71])
    async with running_server(tiny_model, dispatcher, max_body_bytes=200_000, max_header_bytes=4096) as running:
        yield running


async def exchange(server: RunningServer, *parts: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await server.connect()
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.02)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_large_bodies_are_tokenised_off_the_loop_and_answered(server: RunningServer) -> None:
    response = await server.complete([5] * 400, max_tokens=2, user="u" * 100_000)
    assert response.status_code == 200


async def test_a_body_over_the_limit(server: RunningServer) -> None:
    for content in (b"x" * 200_001, b"x" * 3_000_000):
        response = await server.client.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 10_000

    response = await server.client.post("/v1/completions", content=chunks())
    assert response.status_code == 413
    assert (await server.chat(max_tokens=2)).status_code == 200
    assert server.metric("twopool_requests_total", outcome="invalid") == 3


async def test_headers_over_the_limit(server: RunningServer) -> None:
    response = await server.client.get("/health", headers={"x-big": "y" * 5000})
    assert response.status_code == 431
    response = await server.client.get("/health", headers={f"x-{i}": "y" * 50 for i in range(100)})
    assert response.status_code == 431
    assert (await server.client.get("/health")).status_code == 200
    response = await server.client.get("/health?" + "q" * 5000)
    assert response.status_code == 431


async def test_a_header_that_never_ends_is_cut_off(server: RunningServer) -> None:
    """httptools itself has no limit: it would collect the header for ever."""
    answer = await exchange(server, b"GET /health HTTP/1.1\r\nx-big: ", *[b"y" * 3000] * 2)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"request_too_large"' in answer


async def test_large_bodies_do_not_count_as_headers(server: RunningServer) -> None:
    body = raw_request({**CHAT, "user": "u" * 60_000})
    pieces = [body[start : start + 9000] for start in range(0, len(body), 9000)]
    answer = await exchange(server, *pieces, raw_request(CHAT, extra="connection: close\r\n"))
    assert answer.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header: x\r\n\r\n",
    ],
)
async def test_malformed_http(server: RunningServer, request_bytes: bytes) -> None:
    answer = await exchange(server, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"type":"invalid_request_error"' in answer


async def test_a_request_that_trickles_in_is_cut_off(tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProtocolConfig, "request_read_timeout_s", 0.2)
    async with running_server(tiny_model, FakeDispatcher()) as server:
        assert (await exchange(server, b"POST /v1/comp")).startswith(b"HTTP/1.1 408 ")
        assert (await exchange(server, raw_request(CHAT)[:-3])).startswith(b"HTTP/1.1 408 ")
        assert server.dispatcher.requests == []


async def test_keep_alive_survives_errors(server: RunningServer) -> None:
    """RT-07: one connection, answers good and bad, lengths right."""
    reader, writer = await server.connect()
    statuses, params = [], []
    for body in (CHAT, {**CHAT, "temperature": 9}, {}, CHAT, {**CHAT, "model": "nope"}, CHAT):
        writer.write(raw_request(body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert ("content-length:" in head) != ("transfer-encoding:" in head)
        answer = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0])))
        statuses.append(int(head.split(" ")[1]))
        params.append(answer.get("error", {}).get("param"))
    assert statuses == [200, 400, 400, 200, 404, 200]
    assert params == [None, "temperature", "messages", None, "model", None]
    writer.write(raw_request({**CHAT, "stream": True}))
    assert (await reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 5
    writer.write(raw_request(CHAT, extra="connection: close\r\n"))
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("extra", ["", "connection: keep-alive\r\n"])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_clients_of_http_1_0_get_no_chunks(server: RunningServer, path: str, extra: str) -> None:
    """Proxies still speak it by default. There the end of the connection is the end of a stream."""
    for stream in (True, False):
        body = {**CHAT, "prompt": "x", "stream": stream, "stream_options": {"include_usage": True} if stream else None}
        request = raw_request(body, f"/v1/{path}", extra).replace(b"HTTP/1.1", b"HTTP/1.0")
        head, _, answer = (await exchange(server, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        if stream:
            assert b"content-length" not in head.lower()
            events = sse_events(answer.decode())
            assert events[-1] == "[DONE]"
            assert answer.endswith(b"data: [DONE]\n\n")
            assert events[-2]["usage"]["completion_tokens"] == 2
        else:
            assert len(json.loads(answer)["choices"]) == 1


async def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    requests = raw_request({**CHAT, "stream": True}) + raw_request({**CHAT, "n": 2}) + raw_request({})
    answer = await exchange(server, requests, raw_request(CHAT, extra="connection: close\r\n"))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400", b"200"]


async def test_request_ids(server: RunningServer) -> None:
    """RT-07, X-pd-dup-transfer-id: the client's id comes back, the inner one is ours."""
    for _ in range(2):
        response = await server.post("/v1/chat/completions", CHAT, **{"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
    inner = [fake.routed.request_id for fake in server.dispatcher.requests]
    assert len(set(inner)) == 2
    assert "mine-1" not in inner
    response = await server.client.get("/nope", headers={"x-request-id": "y" * 300})
    assert response.headers["x-request-id"].startswith("req-")


async def test_request_ids_are_logged_beside_those_inside(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has a client's log finds the request in the router's and, from there, in the workers'."""
    caplog.set_level("INFO", logger="twopool.router")
    await server.post("/v1/chat/completions", CHAT, **{"x-request-id": "mine-1"})
    await server.post("/v1/chat/completions", {**CHAT, "temperature": 9}, **{"x-request-id": "mine-2"})
    await server.client.get("/v1/models/nope", headers={"x-request-id": "mine-3"})
    [fake] = server.dispatcher.requests
    lines = {record.__dict__["http_id"]: record for record in caplog.records if "http_id" in record.__dict__}
    assert lines["mine-1"].__dict__["request_id"] == fake.routed.request_id
    assert "temperature" in lines["mine-2"].getMessage()
    assert "answered 404" in lines["mine-3"].getMessage()


@pytest.mark.parametrize(
    ("sent", "status", "expected"),
    [
        (b"GET / HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * 3000 + b"\r\n", 431, b"mine"),
        (b"GET / HTTP/1.1\r\nX-Request-ID: mine\r\nhost: test\r\nbad header\r\n\r\n", 400, b"mine"),
        (b"POST /v1/completions HTTP/1.1\r\nx-request-id: mine\r\ncontent-length: 9\r\n\r\n{", 408, b"mine"),
        (b"GET /health HTTP/1.1\r\nx-request-id: mine\r\n\r\n\x00\x00\x00", 400, b"req-"),
        (b"POST /v1/comp", 408, b"req-"),
        (b"\x16\x03\x01", 400, b"req-"),
    ],
)
async def test_refusals_below_the_application_have_an_id(
    tiny_model: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
    status: int,
    expected: bytes,
) -> None:
    """Also the id of the request at fault, not of the one before it on that connection."""
    caplog.set_level("INFO", logger="twopool.router")
    monkeypatch.setattr(ProtocolConfig, "request_read_timeout_s", 0.2)
    async with running_server(tiny_model, FakeDispatcher(), max_header_bytes=2048) as server:
        answer = (await exchange(server, sent[:20], sent[20:])).split(b"HTTP/1.1 ")[-1]
    assert answer.startswith(b"%d " % status)
    [http_id] = re.findall(rb"(?m)^x-request-id: (.*)\r$", answer)
    assert http_id.startswith(expected)
    assert http_id.decode() in [record.__dict__.get("http_id") for record in caplog.records]


async def test_api_keys(tiny_model: ModelInfo) -> None:
    dispatcher = FakeDispatcher(lambda request, choice: [70, 71])
    async with running_server(tiny_model, dispatcher, keys=["sk-one", "sk-two"]) as server:
        for path in ("/health", "/version", "/metrics", "/ready"):
            assert (await server.client.get(path)).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer nope"},
            {"authorization": "sk-one"},
            {"authorization": "Basic x"},
        ):
            for response in (
                await server.post("/v1/chat/completions", CHAT, **headers),
                await server.client.get("/v1/models", headers=headers),
                await server.client.get("/nope", headers=headers),
            ):
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("sk-one", "sk-two"):
            response = await server.post("/v1/chat/completions", CHAT, authorization=f"Bearer {key}")
            assert response.status_code == 200
        salts = [fake.routed.salt for fake in dispatcher.requests]
        assert len(set(salts)) == 2  # tenants do not share prefix cache
        assert all(b"sk-" not in salt for salt in salts)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team\nsk-one\n\n  sk-two \n")
    keys = load_api_keys(path)
    assert keys.tenant(b"Bearer sk-two") != keys.tenant(b"bearer  sk-one")
    with pytest.raises(AuthenticationError):
        keys.tenant(b"Bearer # team")
    assert load_api_keys(None).tenant(None) == ApiKeys([]).tenant(b"anything") == b""
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_api_keys(path)
    with pytest.raises(ConfigError, match="--api-key-file"):
        load_api_keys(tmp_path / "absent")


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_models(server: RunningServer, prefix: str) -> None:
    """RT-12, M-router-models-unhealthy: listed without any worker."""
    server.dispatcher.ready = False
    listed = (await server.client.get(f"{prefix}/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    card = (await server.client.get(f"{prefix}/models/alias")).json()
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "twopool", 512)
    server.dispatcher.max_model_len = 64
    assert (await server.client.get(f"{prefix}/models/tiny")).json()["max_model_len"] == 64
    response = await server.client.get(f"{prefix}/models/nope/x")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_workers_limits_hold(server: RunningServer) -> None:
    server.dispatcher.max_model_len = 64
    server.dispatcher.vocab_size = 100
    assert (await server.complete([5] * 60, max_tokens=8)).json()["error"]["code"] == "context_length_exceeded"
    assert (await server.complete([150])).status_code == 400
    assert (await server.complete([5] * 60)).status_code == 200


async def test_health_ready_version(server: RunningServer) -> None:
    """X-router-ready-no-workers, RT-10."""
    assert (await server.client.get("/health")).json() == {"status": "ok"}
    assert (await server.client.get("/ready")).json() == {"status": "ready", "reason": "one pair"}
    assert (await server.client.get("/version")).json()["version"]
    server.dispatcher.ready = False
    response = await server.client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode worker has registered"
    assert "retry-after" in response.headers
    assert (await server.client.get("/health")).status_code == 200


async def test_unknown_paths_and_methods(server: RunningServer) -> None:
    response = await server.client.get("/v1/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    response = await server.client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_metrics_count_and_time_requests(server: RunningServer) -> None:
    server.dispatcher.cached_tokens = 3
    await server.chat(max_tokens=2)
    await server.complete([5, 6, 7], n=2, max_tokens=5)
    text = (await server.client.get("/metrics")).text
    for line in (
        'twopool_requests_total{outcome="completed"} 2.0',
        "twopool_router_requests_in_flight 0.0",
        "twopool_generation_tokens_total 12.0",
        "twopool_prompt_cached_tokens_total 6.0",
        'twopool_time_to_first_token_seconds_bucket{le="+Inf"} 2.0',
        "twopool_time_to_first_token_seconds_count 2.0",
        "twopool_inter_token_latency_seconds_count 9.0",
        "twopool_queue_seconds_count 2.0",
        "twopool_request_seconds_count 2.0",
        'twopool_request_generation_tokens_bucket{le="2.0"} 1.0',
        'twopool_request_generation_tokens_bucket{le="10.0"} 2.0',
        "twopool_request_generation_tokens_sum 12.0",
    ):
        assert line in text.splitlines()


async def test_no_client_can_make_a_time_series(server: RunningServer) -> None:
    """MET-04."""

    async def num_series() -> int:
        return len((await server.client.get("/metrics")).text.splitlines())

    before = await num_series()
    for i in range(500):
        await server.chat(model=f"model-{i}" * 10)
        await server.client.get(f"/path-{i}")
        await server.client.get(f"/v1/models/name-{i}")
        await server.client.request(f"M{i}", "/health")
    for name in ("x" * 10_000, 'quote" and \\ and \n', "\U0001f600" * 2500):
        assert (await server.chat(model=name)).status_code == 404
        assert (await server.post("/v1/completions", {"model": name, "prompt": "a"})).status_code == 404
    assert await num_series() == before
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        await num_series()
        times_s.append(time.perf_counter() - began_s)
    assert min(times_s) < 0.1
