"""Workers fail or are lost: requests go on elsewhere with the same tokens, or end in the right error."""

import pytest

from twopool.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    TwopoolError,
    UnavailableError,
    WorkerFailedError,
)
from twopool.protocol.ids import RequestId
from twopool.protocol.messages import Cancel, ErrorKind, Generate, unpack_ids
from twopool_testing.mock_control import MockCluster, MockWorker, token_at

pytestmark = pytest.mark.usefixtures("no_defects")


@pytest.fixture
def cluster() -> MockCluster:
    return MockCluster(max_queue_wait_s=5, resume_timeout_s=8, max_attempts=3)


def second_decode(cluster: MockCluster, *prefills: MockWorker, local_prefill: bool = False) -> MockWorker:
    worker = cluster.worker("d1", "decode", local_prefill=local_prefill).register()
    worker.heartbeat(*prefills)
    worker.take()
    return worker


def accepted(granted: Generate) -> list[list[int]]:
    return [unpack_ids(choice.output_ids).tolist() for choice in granted.choices]


def expected(request_id: RequestId, stop: int, choice: int = 0) -> list[int]:
    return [token_at(request_id, choice, i) for i in range(stop)]


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_decode_lost_goes_on_elsewhere(cluster: MockCluster, num_tokens: int) -> None:
    """RT-08, X-pd-decode-dispatch-fails: before the first token, after it, and mid-stream."""
    prefill, decode = cluster.pair()
    other = second_decode(cluster, prefill)
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    if num_tokens:
        prefill.tokens(granted, 0, 1)
    if num_tokens > 1:
        decode.tokens(granted, 0, num_tokens)
    decode.die()
    resumed = other.take_generate()
    assert (resumed.attempt, resumed.prefill) == (1, prefill.ref)
    assert accepted(resumed) == [expected(request_id, num_tokens)]
    # Prefill is told unless decode had taken over, which releases it.
    assert bool(prefill.take_of(Cancel)) == (num_tokens <= 1)
    prefill.tokens(resumed, num_tokens, num_tokens + 1)
    other.tokens(resumed, num_tokens, 16, finish="length")
    assert sink.output_ids == [expected(request_id, 16)] and sink.finish_reasons == {0: "length"}
    cluster.assert_idle()


@pytest.mark.parametrize("first_tokens", [False, True])
def test_several_choices_go_on_by_one_prefill_only_from_the_prompt(cluster: MockCluster, first_tokens: bool) -> None:
    prefill, decode = cluster.pair()
    other = second_decode(cluster, prefill)
    request_id, _ = cluster.submit(n=3)
    granted = decode.take_generate()
    decode.tokens(granted, 0, 2, choice=1, finish="stop")
    if first_tokens:
        decode.tokens(granted, 0, 3, choice=2)
    decode.die()
    resumed = other.take_generate()
    assert [choice.choice for choice in resumed.choices] == [0, 2]
    assert accepted(resumed) == [[], expected(request_id, 3, choice=2) if first_tokens else []]
    assert resumed.prefill == (None if first_tokens else prefill.ref)


@pytest.mark.parametrize("router_first", [True, False])
def test_prefill_lost_before_decode_took_over(cluster: MockCluster, router_first: bool) -> None:
    """X-pd-prefill-death-recover: the router's own knowledge and decode's report make one new attempt, not two."""
    prefill, decode = cluster.pair(local_prefill=True)
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    if router_first:
        prefill.die()
        decode.failed(granted, "peer_lost", blame=prefill)
    else:
        decode.failed(granted, "peer_lost", blame=prefill)
        prefill.die()
    resumed = decode.take_generate()
    assert (resumed.attempt, resumed.prefill) == (1, None)
    decode.tokens(resumed, 0, 16, finish="length")
    assert sink.output_ids == [expected(request_id, 16)]
    cluster.assert_idle()


def test_a_peer_lost_to_decode_is_not_paired_again_before_they_meet_again(cluster: MockCluster) -> None:
    """The router may see the loss later than decode does, and must not use up the attempts meanwhile."""
    prefill, decode = cluster.pair(local_prefill=True)
    cluster.submit()
    decode.failed(decode.take_generate(), "peer_lost", blame=prefill)
    assert decode.take_generate().prefill is None
    cluster.submit()
    assert decode.take_generate().prefill is None
    decode.heartbeat(prefill)
    cluster.submit()
    assert decode.take_generate().prefill == prefill.ref


def test_prefill_lost_after_decode_took_over_matters_to_nobody(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 1)
    prefill.die()
    assert not decode.take_of(Generate) and not decode.take_of(Cancel)
    decode.tokens(granted, 1, 16, finish="length")
    assert sink.output_ids == [expected(request_id, 16)]
    cluster.assert_idle()


def test_prefill_lost_with_no_other_is_503_where_decode_may_not_prefill(cluster: MockCluster) -> None:
    """RT-12, X-pd-prefill-fail-silent-hang: at once, not after a timeout; decode is told to stop."""
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit()
    granted = decode.take_generate()
    prefill.die()
    assert isinstance(sink.error, UnavailableError) and sink.error.retry_after_s >= 1
    assert Cancel(request_id=request_id, attempt=granted.attempt) in decode.take()
    with pytest.raises(UnavailableError):
        cluster.submit()
    cluster.assert_idle()


def test_all_decode_lost(cluster: MockCluster) -> None:
    """RT-08, RT-12: new requests get 503 at once, open streams wait for a worker to come back."""
    prefill, decode = cluster.pair()
    request_id, stream = cluster.submit()
    granted = decode.take_generate()
    decode.tokens(granted, 0, 3)
    _, unstarted = cluster.submit()
    decode.die()
    assert isinstance(unstarted.error, UnavailableError)
    with pytest.raises(UnavailableError):
        cluster.submit()
    cluster.advance(7)
    assert not stream.errors
    reborn = cluster.worker("d0", "decode", epoch=2).register()
    reborn.take()
    reborn.heartbeat(prefill)
    resumed = reborn.take_generate()
    assert accepted(resumed) == [expected(request_id, 3)]
    reborn.tokens(resumed, 3, 16, finish="length")
    assert stream.output_ids == [expected(request_id, 16)]
    cluster.assert_idle()


def test_an_open_stream_does_not_wait_for_ever(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    _, stream = cluster.submit()
    decode.tokens(decode.take_generate(), 0, 3)
    decode.die()
    cluster.advance(7.9)
    assert not stream.errors
    cluster.advance(0.2)
    assert isinstance(stream.error, UnavailableError)
    cluster.assert_idle()


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [
        ("invalid_request", InvalidRequestError),
        ("context_length", ContextLengthError),
        ("timeout", DeadlineError),
        ("bad_logits", WorkerFailedError),
        ("internal", WorkerFailedError),
    ],
)
def test_a_failure_for_good_is_passed_on(
    cluster: MockCluster, kind: ErrorKind, error_class: type[TwopoolError]
) -> None:
    """X-pd-prefill-4xx-passthrough: the same class and field, and no retry."""
    _, decode = cluster.pair()
    _, sink = cluster.submit()
    decode.failed(decode.take_generate(), kind, retryable=False, param="prompt")
    assert type(sink.error) is error_class and kind in sink.error.message
    if issubclass(error_class, InvalidRequestError):
        assert sink.error.param == "prompt"
    assert not decode.take_of(Generate)
    cluster.assert_idle()


def test_a_retry_avoids_who_is_to_blame(cluster: MockCluster) -> None:
    p0, decode = cluster.pair()
    p1 = cluster.worker("p1", "prefill").register()
    decode.heartbeat(p0, p1)
    decode.take()
    by_ref = {p.ref: p for p in (p0, p1)}
    for _ in range(4):
        cluster.submit()
        granted = decode.take_generate()
        assert granted.prefill is not None
        decode.failed(granted, "transfer", blame=by_ref[granted.prefill])
        retried = decode.take_generate()
        assert retried.attempt == 1 and retried.prefill != granted.prefill
        decode.tokens(retried, 0, 16, finish="length")


def test_attempts_are_bounded(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    _, sink = cluster.submit()
    for attempt in range(3):
        granted = decode.take_generate()
        assert granted.attempt == attempt
        decode.failed(granted, "internal")
    assert isinstance(sink.error, WorkerFailedError) and "mock internal" in sink.error.message
    assert not decode.take_of(Generate)
    cluster.assert_idle()


def test_a_prefill_worker_that_keeps_failing_is_left_alone_and_comes_back(cluster: MockCluster) -> None:
    """RT-01: while it is out, 503 at once and decode sees nothing; a probe after the cool-down brings it back."""
    prefill, decode = cluster.pair()
    for _ in range(3):
        _, sink = cluster.submit()
        while granted := decode.take_of(Generate):
            decode.failed(granted[0], "internal", blame=prefill)
        assert sink.errors
    with pytest.raises(UnavailableError):
        cluster.submit()
    assert not decode.take() and not cluster.dispatcher.is_ready()
    cluster.advance(1.1)
    _, probe = cluster.submit()
    with pytest.raises(UnavailableError):
        cluster.submit()
    granted_probe = decode.take_generate()
    prefill.tokens(granted_probe, 0, 1)
    assert cluster.dispatcher.is_ready()
    sinks = [cluster.submit()[1] for _ in range(5)]
    assert len(decode.take_of(Generate)) == 5
    assert not probe.errors and not any(sink.errors for sink in sinks)


def test_loads_are_equal_again_after_losses(cluster: MockCluster) -> None:
    """RT-04, RT-05: losing a worker with requests on it leaves no ghost load behind."""
    prefill, decode = cluster.pair()
    other = second_decode(cluster, prefill)
    for _ in range(6):
        cluster.submit()
    decode.die()
    granted = other.take_of(Generate)
    assert len(granted) == 6
    reborn = cluster.worker("d0", "decode", epoch=2).register()
    reborn.heartbeat(prefill)
    for grant in granted:
        other.tokens(grant, 0, 16, finish="length")
    cluster.assert_idle()
    for _ in range(6):
        cluster.submit()
    assert len(other.take_of(Generate)) == len(reborn.take_of(Generate)) == 3


def test_a_prompt_that_is_prefilled_no_longer_counts_as_prefill_work(cluster: MockCluster) -> None:
    p0, decode = cluster.pair()
    p1 = cluster.worker("p1", "prefill").register()
    decode.heartbeat(p0, p1)
    decode.take()
    cluster.submit(num_prompt=100)
    long = decode.take_generate()
    [first] = [p for p in (p0, p1) if p.ref == long.prefill]
    cluster.submit(num_prompt=20)
    assert decode.take_generate().prefill != long.prefill
    first.tokens(long, 0, 1)
    for _ in range(2):
        cluster.submit(num_prompt=5)
        assert decode.take_generate().prefill == long.prefill
