"""Where a prompt's time went: the parts, their sum, and where answers say so."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.protocol.ids import WorkerId
from twopool.protocol.messages import HandoverReport, PrefillReport
from twopool.router.interface import RoutedRequest
from twopool.router.model_info import ModelInfo
from twopool.router.timings import PHASES, Arrival, Grant, Timeline
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import running_server, sse_events
from twopool_testing.mock_control import MockCluster

BEFORE_FIRST = PHASES[:7]
times = st.floats(0, 100, allow_nan=False)


def timeline(**stamps: Any) -> Timeline:
    fields: dict[str, Any] = {
        "grant": Grant(attempt=0, decode=WorkerId("d"), prefill=WorkerId("p"), queued_s=0.5, at_s=103.0),
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


@given(times, times, times, times, times, times, times)
def test_parts_before_the_first_token_sum_to_the_ttft(
    receive: float, tokenize: float, queue: float, route: float, wait: float, compute: float, claim: float
) -> None:
    """Whatever a worker claims its own share was: clocks of two processes are never compared."""
    arrival = Arrival(1000.0, 1000.0 + receive, 1000.0 + receive + tokenize)
    granted_s = arrival.prepared_s + queue + route
    grant = Grant(attempt=0, decode=WorkerId("d"), prefill=None, queued_s=queue, at_s=granted_s)
    report = PrefillReport(worker_id=WorkerId("d"), cached_tokens=0, queue_s=claim, compute_s=compute)
    line = Timeline(arrival, grant=grant, prefill=report, first_s=granted_s + wait, written_s=granted_s + wait)
    parts = line.seconds()
    assert line.ttft_s is not None
    assert sum(parts[name] for name in BEFORE_FIRST) == pytest.approx(line.ttft_s, abs=1e-6)
    assert all(value >= 0 for value in parts.values())


def test_a_later_attempt_changes_the_workers_and_not_the_first_token() -> None:
    line = timeline()
    again = Grant(attempt=1, decode=WorkerId("d2"), prefill=None, queued_s=0.0, at_s=106.0)
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
        assert sum(timings[f"{name}_ms"] for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
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
        assert sum(timings[f"{name}_ms"] for name in BEFORE_FIRST) == pytest.approx(timings["ttft_ms"], abs=1)
        assert "server-timing" in response.headers
        assert {event["system_fingerprint"] for event in events[:-1]} == {"fp_fake"}


async def test_several_prompts_each_have_their_own(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting()) as server:
        response = await server.complete(["a", "b"], max_tokens=2, timings=True)
        assert len(response.json()["timings"]) == 2


async def test_the_phases_feed_the_metrics(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, _granting()) as server:
        await server.complete(max_tokens=2)
        for phase in BEFORE_FIRST:
            assert server.metric("twopool_request_phase_seconds_count", phase=phase) == 1


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


def test_the_fingerprint_names_the_stack_of_both_sides() -> None:
    cluster = MockCluster()
    assert cluster.dispatcher.system_fingerprint is None
    cluster.pair()
    first = cluster.dispatcher.system_fingerprint
    assert first is not None and first.startswith("fp_")
    side = {"dtype": "float32", "kernels": "torch", "tensor_parallel_size": 1}
    stack = cluster.dispatcher.stack
    assert (stack["model_hash"], stack["prefill"], stack["decode"]) == (["abc"], [side], [side])
    other = MockCluster()
    other.pair(dtype="bfloat16")
    assert other.dispatcher.system_fingerprint != first
    json.dumps(stack)


class _GrantingDispatcher(FakeDispatcher):
    def submit(self, request: RoutedRequest, sink: Any) -> None:
        super().submit(request, sink)
        now = time.monotonic()
        sink.on_granted(Grant(attempt=0, decode=WorkerId("d9"), prefill=WorkerId("p9"), queued_s=0.0, at_s=now))


def _granting() -> FakeDispatcher:
    return _GrantingDispatcher(lambda request, choice: [60, 61, 62])
