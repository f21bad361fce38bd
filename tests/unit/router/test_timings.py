"""Where a prompt's time went: the parts, their sum, and where answers say so."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import Generate, HandoverReport, PrefillReport
from twopool.router.interface import RoutedRequest
from twopool.router.model_info import ModelInfo
from twopool.router.timings import BEFORE_FIRST, Arrival, Grant, Timeline
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import running_server, sse_events
from twopool_testing.mock_control import MockCluster
from twopool_testing.socket_timing import check_ttft

STACK = frozenset({"fp_fake"})

times = st.floats(0, 100, allow_nan=False)


def timeline(**stamps: Any) -> Timeline:
    fields: dict[str, Any] = {
        "grant": Grant(
            attempt=0,
            decode=WorkerId("d"),
            prefill=WorkerId("p"),
            queued_s=0.5,
            retried_s=0.0,
            at_s=103.0,
            fingerprints=STACK,
        ),
        "prefill": PrefillReport(worker_id=WorkerId("p"), cached_tokens=3, peer_tokens=2, queue_s=0.25, compute_s=1.0),
        "handover": HandoverReport(
            num_bytes=7, num_ranges=5, num_posts=2, transfer_s=0.3, exposed_s=0.1, hidden_s=0.2, held_tokens=16
        ),
        "first_s": 105.0,
        "written_s": 105.5,
        "taken_over_s": 105.75,
        "last_s": 107.0,
    }
    made = Timeline(Arrival(100.0, 101.0, 102.0), **(fields | stamps))
    made.last_grant = made.grant
    return made


def test_parts_of_a_remote_prefill() -> None:
    assert timeline().seconds() == {
        "receive": 1.0,
        "tokenize": 1.0,
        "queue": 0.5,
        "route": 0.5,
        "prefill_queue": 0.25,
        "prefill": 1.0,
        "first_token_delivery": 1.25,
        "transfer_hidden": 0.2,
        "transfer_exposed": 0.1,
        "handover": 0.75,
        "decode": 2.0,
    }


@given(times, times, times, times, times, times, times, times)
def test_parts_before_the_first_token_sum_to_the_ttft(
    receive: float,
    tokenize: float,
    queue: float,
    retry: float,
    route: float,
    wait: float,
    compute: float,
    claim: float,
) -> None:
    """Whatever a worker claims its own share was: clocks of two processes are never compared."""
    arrival = Arrival(1000.0, 1000.0 + receive, 1000.0 + receive + tokenize)
    granted_s = arrival.prepared_s + queue + retry + route
    grant = Grant(
        attempt=1,
        decode=WorkerId("d"),
        prefill=None,
        queued_s=queue,
        retried_s=retry,
        at_s=granted_s,
        fingerprints=STACK,
    )
    report = PrefillReport(worker_id=WorkerId("d"), cached_tokens=0, queue_s=claim, compute_s=compute)
    line = Timeline(arrival, grant=grant, prefill=report, first_s=granted_s + wait, written_s=granted_s + wait)
    parts = line.seconds()
    assert line.ttft_s is not None
    assert sum(parts[name] for name in BEFORE_FIRST) == pytest.approx(line.ttft_s, abs=1e-6)
    assert parts["route"] == pytest.approx(route, abs=1e-6)
    assert all(value >= 0 for value in parts.values())


def test_a_later_attempt_changes_the_workers_and_not_the_first_token() -> None:
    line = timeline()
    again = Grant(
        attempt=1, decode=WorkerId("d2"), prefill=None, queued_s=0.0, retried_s=0.0, at_s=106.0, fingerprints=STACK
    )
    line.granted(again)
    figures = line.to_json()
    assert (figures["attempts"], figures["decode_worker"], figures["prefill_worker"]) == (2, "d2", "d2")
    assert figures["prefill_ms"] == 1000.0
    assert figures["ttft_ms"] == 5500.0
    assert (figures["kv_ranges"], figures["kv_posts"]) == (5, 2)
    assert (figures["kv_bytes_moved"], figures["cached_tokens"]) == (7, {"prefill": 1, "peer": 2, "decode": 16})


async def test_answers_say_where_their_time_went(tiny_model: ModelInfo) -> None:
    """In headers always, in the body on request, by field or by header; the parts sum to the TTFT within 1 ms."""
    async with running_server(tiny_model, _granting()) as server:
        began_s = time.monotonic()
        response = await server.complete(max_tokens=3, timings=True)
        took_ms = (time.monotonic() - began_s) * 1e3
        timings = response.json()["timings"]
        assert sum(timings.get(f"{name}_ms", 0) for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
        assert 0 < timings["ttft_ms"] <= timings["total_ms"] <= took_ms
        assert timings["prefill_worker"] == "p9"
        assert "tokenize;dur=" in response.headers["server-timing"]
        assert (response.headers["x-prefill-worker"], response.headers["x-decode-worker"]) == ("p9", "d9")
        assert response.json()["system_fingerprint"] == "fp_fake"
        plain = await server.complete(max_tokens=3)
        assert "timings" not in plain.json()
        assert "ttft;dur=" in plain.headers["server-timing"]
        by_header = await server.post("/v1/completions", {"prompt": "hi"}, **{"x-timings": "1"})
        assert by_header.json()["timings"]["attempts"] == 1


@pytest.mark.parametrize("usage", [False, True])
async def test_streams_say_it_in_their_last_event(tiny_model: ModelInfo, usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    async with running_server(tiny_model, _granting()) as server:
        response = await server.chat(max_tokens=3, stream=True, timings=True, **options)
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        timings = events[-2]["timings"]
        assert events[-2]["choices"] == []
        assert ("usage" in events[-2]) is usage
        assert sum(timings.get(f"{name}_ms", 0) for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
        assert "server-timing" in response.headers
        assert {event["system_fingerprint"] for event in events[:-1]} == {"fp_fake"}


async def test_the_ttft_is_what_a_client_sees_at_its_socket(tiny_model: ModelInfo) -> None:
    dispatcher = _granting()
    dispatcher.step_s = 0.02
    body = {"prompt": "where does the time go? " * 8, "max_tokens": 3}
    async with running_server(tiny_model, dispatcher) as server:
        tries = await asyncio.to_thread(check_ttft, "127.0.0.1", server.server.port, body)
    assert all(timings["first_token_delivery_ms"] > 18 for timings in tries)


async def test_several_prompts_each_have_their_own(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting()) as server:
        response = await server.complete(["a", "b"], max_tokens=2, timings=True)
        assert len(response.json()["timings"]) == 2


async def test_the_phases_feed_the_metrics(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting()) as server:
        await server.complete(max_tokens=2)
        for phase in BEFORE_FIRST:
            expected = 0 if phase == "retry" else 1
            assert server.metric("twopool_request_phase_seconds_count", phase=phase) == expected


def test_the_dispatcher_tells_of_each_grant_once() -> None:
    cluster = MockCluster()
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    generate = decode.take_generate()
    assert [(grant.attempt, grant.decode, grant.prefill) for grant in sink.grants] == [(0, "d0", "p0")]
    decode.busy(generate)
    decode.heartbeat(prefill)
    cluster.advance(5)
    decode.take_generate()
    assert [grant.attempt for grant in sink.grants] == [0, 1]


def test_every_wait_is_waiting_and_refused_attempts_are_told_apart() -> None:
    """Two refusals: what passed between them was neither pairing nor sending."""
    cluster = MockCluster()
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    for under_way_s, waiting_s in ((0.25, 2.0), (0.5, 3.0)):
        refused = decode.take_generate()
        cluster.clock.now_s += under_way_s
        decode.busy(refused)
        assert not decode.take()
        cluster.clock.now_s += waiting_s
        decode.heartbeat(prefill)
    decode.take_generate()
    assert [(grant.queued_s, grant.retried_s) for grant in sink.grants] == [(0.0, 0.0), (2.0, 0.25), (5.0, 0.75)]
    received_s = sink.grants[0].at_s
    line = Timeline(Arrival(received_s, received_s, received_s))
    for grant in sink.grants:
        line.granted(grant)
    line.first_s = received_s + 6.0
    parts = line.seconds()
    assert (parts["route"], parts["queue"], parts["retry"]) == (0.0, 5.0, 0.75)
    assert parts["first_token_delivery"] == 0.25


def test_an_attempt_that_was_lost_is_no_waiting() -> None:
    cluster = MockCluster()
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode").register()
    other.heartbeat(prefill)
    _, sink = cluster.submit()
    first = next(worker for worker in (decode, other) if worker.take_of(Generate))
    cluster.clock.now_s += 4.0
    first.die()
    assert [(grant.attempt, grant.queued_s, grant.retried_s) for grant in sink.grants] == [(0, 0.0, 0.0), (1, 0.0, 4.0)]


HANDOVER = HandoverReport(
    num_bytes=4096, num_ranges=1, num_posts=1, transfer_s=0.3, exposed_s=0.1, hidden_s=0.2, held_tokens=32
)


async def test_plain_answers_carry_the_figures_in_headers(tiny_model: ModelInfo) -> None:
    """The same as the body: by its numbers nobody can tell which of the two was read."""
    async with running_server(tiny_model, _granting(HANDOVER), cors_allow_origins=("*",)) as server:
        response = await server.post(
            "/v1/completions", {"prompt": "hi", "max_tokens": 3, "timings": True}, origin="http://page.example"
        )
        timings, headers = response.json()["timings"], response.headers
        entries = dict(entry.split(";dur=") for entry in headers["server-timing"].split(", "))
        in_body = {name.removesuffix("_ms"): value for name, value in timings.items() if name.endswith("_ms")}
        assert {name: float(value) for name, value in entries.items()} == in_body
        assert {"transfer", "transfer_hidden", "transfer_exposed", "ttft", "total"} <= entries.keys()
        assert headers["x-kv-bytes-moved"] == str(timings["kv_bytes_moved"]) == "4096"
        assert headers["x-cached-tokens"] == "prefill=0;peer=0;decode=32"
        assert timings["cached_tokens"] == {"prefill": 0, "peer": 0, "decode": 32}
        assert headers["x-system-fingerprint"] == response.json()["system_fingerprint"] == "fp_fake"
        assert headers["x-attempts"] == str(timings["attempts"]) == "1"
        exposed = {name.strip().lower() for name in headers["access-control-expose-headers"].split(",")}
        assert {name for name in headers if name.startswith("x-")} | {"server-timing"} <= exposed


async def test_headers_name_the_first_prompts_in_order(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting(HANDOVER)) as server:
        headers = (await server.complete(["a", "b"], max_tokens=3)).headers
        assert (headers["x-decode-worker"], headers["x-kv-bytes-moved"]) == ("d9, d9", "4096, 4096")
        for prompt in ("prompt-0", "prompt-1"):
            assert headers["server-timing"].count(f";desc={prompt}") == headers["server-timing"].count("dur=") / 2 > 0
        many = (await server.complete(["a"] * 100, max_tokens=1)).headers
        assert many["x-prefill-worker"] == "p9, p9, p9, p9"
        assert sum(len(name) + len(value) + 4 for name, value in many.items()) < 4096


async def test_headers_of_a_stream_do_not_claim_what_is_not_over(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting(HANDOVER)) as server:
        headers = (await server.complete(max_tokens=3, stream=True)).headers
        assert headers["x-decode-worker"] == "d9"
        assert not {"x-kv-bytes-moved", "x-cached-tokens"} & set(headers)
        assert "total;" not in headers["server-timing"]


class _GrantingDispatcher(FakeDispatcher):
    """Grants what it is asked for at once."""

    def submit(self, request: RoutedRequest, sink: Any) -> None:
        super().submit(request, sink)
        now = time.monotonic()
        grant = Grant(
            attempt=0,
            decode=WorkerId("d9"),
            prefill=WorkerId("p9"),
            queued_s=0.0,
            retried_s=0.0,
            at_s=now,
            fingerprints=STACK,
        )
        sink.on_granted(grant)


def _granting(handover: HandoverReport | None = None) -> FakeDispatcher:
    """Three tokens; the second comes with ``handover``."""
    dispatcher = _GrantingDispatcher(lambda request, choice: [60, 61, 62])
    dispatcher.handover = handover
    return dispatcher
