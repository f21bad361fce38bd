"""What the dispatcher does with a request while nobody fails: tokens, ends, cancels."""

from typing import Any

import pytest

from twopool.protocol.errors import (
    WorkerFailedError,
)
from twopool.protocol.ids import ChoiceIndex, RequestId, WorkerId
from twopool.protocol.messages import (
    Cancel,
    CancelChoice,
    FinishReason,
    Generate,
    HandoverReport,
    PrefillReport,
    ResendFrom,
    TokenDelta,
    TokenLogprobs,
    Tokens,
    unpack_ids,
)
from twopool_testing.mock_control import MockCluster, RecordingSink, defects_surface, token_at

pytestmark = pytest.mark.usefixtures("no_defects")


@pytest.fixture
def cluster() -> MockCluster:
    return MockCluster(max_queue=2, max_queue_wait_s=5, resume_timeout_s=8)


def expected(request_id: RequestId, stop: int, choice: int = 0) -> list[int]:
    return [token_at(request_id, choice, i) for i in range(stop)]


def test_a_grant_carries_the_request(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    request_id, _ = cluster.submit(num_prompt=5, n=2, timeout_s=40)
    granted = decode.take_generate()
    assert (granted.request_id, granted.attempt, granted.prefill) == (request_id, 0, prefill.ref)
    assert unpack_ids(granted.prompt_ids).tolist() == [0, 1, 2, 3, 4]
    assert [(c.choice, c.output_ids) for c in granted.choices] == [(0, b""), (1, b"")]
    assert granted.timeout_s == pytest.approx(40)
    assert not prefill.take()


@pytest.mark.parametrize("prefill_first", [True, False])
def test_the_first_token_comes_once_whoever_is_first(cluster: MockCluster, prefill_first: bool) -> None:
    """X-pd-first-token-nonstream: prefill and decode both send token 0; the client gets it once."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    if prefill_first:
        prefill.tokens(granted, 0, 1)
        decode.tokens(granted, 0, 2)
    else:
        decode.tokens(granted, 0, 2)
        prefill.tokens(granted, 0, 1)
    decode.tokens(granted, 2, 4, finish="length")
    assert sink.output_ids == [expected(request_id, 4)] and sink.finish_reasons == {0: "length"}
    cluster.assert_idle()


@pytest.mark.parametrize("prefill_first", [True, False])
def test_reports_reach_the_sink_once(cluster: MockCluster, prefill_first: bool) -> None:
    """X-pd-cached-tokens: prefill's own figure arrives although its token may be a repeat."""
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    granted = decode.take_generate()
    report = PrefillReport(worker_id=prefill.worker_id, cached_tokens=3, queue_s=0, compute_s=0.1)
    handover = HandoverReport(num_bytes=9, num_ranges=1, num_posts=1, transfer_s=0.1, exposed_s=0.01)
    if prefill_first:
        prefill.tokens(granted, 0, 1, prefill=report)
    decode.tokens(granted, 0, 1, handover=handover, prefill=report if prefill_first else None)
    if not prefill_first:
        prefill.tokens(granted, 0, 1, prefill=report)
    decode.tokens(granted, 1, 2, finish="length")
    assert [d.prefill for d in sink.deltas if d.prefill] == [report]
    assert [d.handover for d in sink.deltas if d.handover] == [handover]
    assert cluster.metric("twopool_handover_transfer_seconds_count") == 1


def test_logprobs_stay_with_their_tokens_when_a_repeat_is_cut(cluster: MockCluster) -> None:
    """X-pd-first-logprob: as many logprobs as tokens, in their order."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    prefill.tokens(granted, 0, 1)
    delta = TokenDelta(
        request_id=request_id,
        attempt=granted.attempt,
        choice=ChoiceIndex(0),
        index=0,
        token_ids=tuple(expected(request_id, 3)),
        finish_reason="stop",
        stop_token_id=2,
        logprobs=tuple(TokenLogprobs(-float(i)) for i in range(3)),
    )
    decode.say(Tokens((delta,)))
    assert sink.deltas[1].logprobs == (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    assert sink.deltas[1].stop_token_id == 2


def test_a_finish_by_prefill_ends_the_request_without_decode(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit(max_tokens=1)
    granted = decode.take_generate()
    prefill.tokens(granted, 0, 1, finish="length")
    assert sink.finish_reasons == {0: "length"}
    cluster.assert_idle()
    decode.tokens(granted, 0, 1, finish="length")
    decode.failed(granted)
    assert sink.output_ids == [expected(request_id, 1)] and not sink.errors


def test_a_finish_without_a_token(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    granted = decode.take_generate()
    prefill.tokens(granted, 0, 0, finish="stop")
    assert sink.output_ids == [[]] and sink.finish_reasons == {0: "stop"}
    cluster.assert_idle()


def test_a_finish_on_a_repeat_counts(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 2)
    decode.tokens(granted, 0, 1, finish="length")
    assert not sink.finish_reasons
    decode.tokens(granted, 0, 2, finish="length")
    assert sink.output_ids == [expected(request_id, 2)] and sink.finish_reasons == {0: "length"}


def test_single_tokens_take_the_short_way_in_order(cluster: MockCluster) -> None:
    """All that carries more than a token, the first and the last among them, goes the long one."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit(has_lanes=True)
    granted = decode.take_generate()
    prefill.tokens(
        granted, 0, 1, prefill=PrefillReport(worker_id=WorkerId("p0"), cached_tokens=0, queue_s=0, compute_s=0)
    )
    decode.tokens(
        granted, 0, 1, handover=HandoverReport(num_bytes=1, num_ranges=1, num_posts=1, transfer_s=0, exposed_s=0)
    )
    for start, stop in ((1, 2), (2, 3), (1, 3), (3, 5), (6, 7), (5, 6), (6, 7)):
        decode.tokens(granted, start, stop)
    decode.tokens(granted, 7, 8, finish="length")
    assert sink.output_ids == [expected(request_id, 8)]
    assert sink.short_way is not None and sink.short_way.num_taken == 3
    cluster.assert_idle()


def test_choices_end_by_themselves(cluster: MockCluster) -> None:
    """X-pd-n2-hang: the request is over with its last choice, not before."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit(n=2)
    granted = decode.take_generate()
    for choice in (1, 0):
        prefill.tokens(granted, 0, 1, choice=choice)
    decode.tokens(granted, 1, 3, choice=1, finish="stop")
    assert not sink.errors and cluster.metric("twopool_attempts_in_flight") == 1
    decode.tokens(granted, 1, 2, finish="length")
    assert sink.output_ids == [expected(request_id, 2), expected(request_id, 3, choice=1)]
    cluster.assert_idle()


def test_a_gap_is_asked_for_again_not_delivered(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 2)
    for _ in range(3):
        decode.tokens(granted, 3, 4)
    assert sink.output_ids == [expected(request_id, 2)]
    assert decode.take() == [ResendFrom(request_id=request_id, attempt=granted.attempt, choice=ChoiceIndex(0), index=2)]
    cluster.advance(0.3)
    assert len(decode.take_of(ResendFrom)) == 1
    decode.tokens(granted, 2, 5, finish="length")
    assert sink.output_ids == [expected(request_id, 5)]
    cluster.advance(0.3)
    assert not decode.take()


def test_a_gap_that_stays_ends_the_attempt(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode").register()
    other.heartbeat(prefill)
    request_id, _ = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 2)
    decode.tokens(granted, 3, 4)
    for _ in range(60):
        cluster.advance(0.1)
    resumed = other.take_generate()
    assert unpack_ids(resumed.choices[0].output_ids).tolist() == expected(request_id, 2)
    assert decode.take_of(Cancel)


def test_a_gap_before_decode_streams_is_nobodys_to_fill(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    granted = decode.take_generate()
    prefill.tokens(granted, 1, 2)
    assert not decode.take() and not prefill.take() and sink.output_ids == [[]]


def test_tokens_of_others_are_dropped(cluster: MockCluster) -> None:
    """Unknown requests, other attempts, and workers that are not part of the attempt."""
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode").register()
    _, sink = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 1, attempt=3)
    other.tokens(granted, 0, 1)
    other.busy(granted)
    other.failed(granted)
    cluster.dispatcher.cancel(RequestId("unknown"))
    assert sink.output_ids == [[]] and not sink.errors
    assert cluster.metric("twopool_dropped_deltas_total", reason="stale") == 2
    prefill.tokens(granted, 0, 1)
    assert len(sink.output_ids[0]) == 1


@pytest.mark.parametrize("bad", [{"choice": 5}, {"token_ids": (1, 10**12)}, {"token_ids": (1000,)}])
def test_tokens_that_cannot_be_end_the_attempt(cluster: MockCluster, bad: dict[str, Any]) -> None:
    _, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    fields: dict[str, Any] = {"choice": ChoiceIndex(0), "index": 0, "token_ids": (1,)} | bad
    decode.say(Tokens((TokenDelta(request_id=request_id, attempt=granted.attempt, **fields),)))
    assert sink.output_ids == [[]]
    assert decode.take_generate().attempt == 1


def test_cancel_reaches_everybody_once(cluster: MockCluster) -> None:
    """RT-04, X-pd-staged-kv-disconnect: the client leaves before the first token."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    cluster.dispatcher.cancel(request_id)
    cluster.dispatcher.cancel(request_id)
    cancel = Cancel(request_id=request_id, attempt=granted.attempt)
    assert decode.take() == [cancel] and prefill.take() == [cancel]
    decode.failed(granted)
    prefill.tokens(granted, 0, 1)
    assert not sink.deltas and not sink.errors
    cluster.assert_idle()


def test_cancel_while_streaming_is_decodes_alone(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    request_id, _ = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 1)
    cluster.dispatcher.cancel(request_id)
    assert decode.take_of(Cancel) and not prefill.take()
    cluster.assert_idle()


def test_a_choice_ended_by_a_stop_string(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    request_id, sink = cluster.submit(n=2)
    granted = decode.take_generate()
    decode.tokens(granted, 0, 1, choice=0)
    decode.tokens(granted, 0, 1, choice=1)
    for _ in range(2):
        cluster.dispatcher.finish_choice(request_id, ChoiceIndex(1))
    assert decode.take() == [CancelChoice(request_id=request_id, attempt=granted.attempt, choice=ChoiceIndex(1))]
    decode.tokens(granted, 1, 2, choice=1)
    decode.tokens(granted, 1, 2, choice=0)
    assert [len(ids) for ids in sink.output_ids] == [2, 1]
    cluster.dispatcher.finish_choice(request_id, ChoiceIndex(0))
    assert decode.take() == [Cancel(request_id=request_id, attempt=granted.attempt)]
    cluster.assert_idle()


@pytest.mark.parametrize("call", ["cancel", "finish_choice"])
def test_the_sink_may_call_back(cluster: MockCluster, call: str) -> None:
    """Inside ``on_tokens``, for a delta that goes on and for the last one."""

    class Stopper(RecordingSink):
        def on_tokens(self, delta: TokenDelta) -> None:
            super().on_tokens(delta)
            if call == "cancel":
                cluster.dispatcher.cancel(delta.request_id)
            else:
                cluster.dispatcher.finish_choice(delta.request_id, delta.choice)

    _, decode = cluster.pair()
    for finish in (None, "length"):
        request = cluster.request()
        sink = Stopper(1)
        cluster.dispatcher.submit(request, sink)
        granted = decode.take_generate()
        decode.tokens(granted, 0, 1, finish="length" if finish else None)
        decode.tokens(granted, 1, 2)
        assert len(sink.deltas) == 1
        assert len(decode.take_of(Cancel)) == (0 if finish else 1)
        cluster.assert_idle()


@pytest.mark.parametrize("finish", [None, "length"])
def test_a_failing_sink_hurts_nobody_else(cluster: MockCluster, finish: FinishReason | None) -> None:
    """Its request ends in an error, even if it failed on the last tokens."""

    class Broken(RecordingSink):
        def on_tokens(self, delta: TokenDelta) -> None:
            raise ZeroDivisionError

    _, decode = cluster.pair()
    broken, (_, healthy) = Broken(1), cluster.submit()
    cluster.dispatcher.submit(cluster.request(), broken)
    first, second = decode.take_of(Generate)
    deltas = tuple(
        TokenDelta(granted.request_id, granted.attempt, ChoiceIndex(0), 0, (1,), finish) for granted in (second, first)
    )
    with pytest.raises(ZeroDivisionError), defects_surface():
        decode.say(Tokens(deltas))
    assert isinstance(broken.error, WorkerFailedError)
    assert healthy.output_ids == [[1]] and not healthy.errors
