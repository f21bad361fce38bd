"""Requests that wait: for room, at most so long and so many; deadlines, draining, closing."""

import asyncio
import gc
import os
import weakref

import pytest

from twopool.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    OverloadedError,
    TwopoolError,
    UnavailableError,
)
from twopool.protocol.ids import RequestId
from twopool.protocol.messages import (
    Cancel,
    Draining,
    Generate,
)
from twopool.router.queue_lengths import QueueLengths
from twopool_testing.mock_control import MockCluster, RecordingSink

pytestmark = pytest.mark.usefixtures("no_defects")


@pytest.fixture
def cluster() -> MockCluster:
    return MockCluster(max_queue=2, max_queue_wait_s=5, resume_timeout_s=8)


def test_busy_goes_back_to_its_place_and_is_tried_again(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    first, second = cluster.submit()[0], cluster.submit()[0]
    grants = decode.take_of(Generate)
    for granted in grants:
        decode.busy(granted)
    assert not decode.take()
    cluster.advance(0.03)
    assert [g.request_id for g in decode.take_of(Generate)] == [first]
    decode.heartbeat(prefill)
    assert [(g.request_id, g.attempt) for g in decode.take_of(Generate)] == [(second, 1)]


def test_busy_of_the_prefill_worker_moves_to_another(cluster: MockCluster) -> None:
    p0, decode = cluster.pair()
    p1 = cluster.worker("p1", "prefill").register()
    decode.heartbeat(p0, p1)
    decode.take()
    cluster.submit()
    granted = decode.take_generate()
    by_id = {p.worker_id: p for p in (p0, p1)}
    assert granted.prefill is not None
    full = by_id.pop(granted.prefill.worker_id)
    decode.busy(granted, full=full)
    [other] = by_id.values()
    assert decode.take_generate().prefill == other.ref


def test_a_new_failure_is_a_new_wait(cluster: MockCluster) -> None:
    """An attempt may run longer than a request may wait; when it fails, the wait begins anew."""
    _, decode = cluster.pair()
    _, sink = cluster.submit()
    running = decode.take_generate()
    cluster.advance(6)
    decode.failed(running)
    decode.busy(decode.take_generate())
    cluster.advance(0.001)
    assert not sink.errors
    for _ in range(55):
        cluster.advance(0.1)
        for granted in decode.take_of(Generate):
            decode.busy(granted)
    assert isinstance(sink.error, OverloadedError)


def test_an_open_stream_that_finds_no_room_waits_as_streams_do(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    granted = decode.take_generate()
    prefill.tokens(granted, 0, 1)
    cluster.advance(6)
    decode.busy(granted)
    cluster.advance(0.001)
    assert not sink.errors
    cluster.advance(0.1)
    assert len(decode.take_generate().choices[0].output_ids) == 4


def test_a_deadline_that_passed_on_the_way_here(cluster: MockCluster) -> None:
    """Nobody is asked to work for an answer that would come too late."""
    _, decode = cluster.pair()
    with pytest.raises(DeadlineError):
        cluster.submit(timeout_s=1.0, age_s=1.0)
    assert not decode.take_of(Generate)


def test_finished_requests_are_forgotten_before_their_deadline(cluster: MockCluster) -> None:
    cluster.pair()
    request = cluster.request()
    sink = RecordingSink(1)
    cluster.dispatcher.submit(request, sink)
    cluster.dispatcher.cancel(request.request_id)
    for _ in range(1100):
        cluster.dispatcher.cancel(cluster.submit()[0])
    cluster.advance(0.1)
    alive = weakref.ref(sink)
    del sink
    gc.collect()
    assert alive() is None


def test_whatever_ends_makes_room(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    cluster.submit()
    running = decode.take_generate()
    waiting, _ = cluster.submit()
    decode.busy(decode.take_generate())
    assert not decode.take()
    decode.tokens(running, 0, 16, finish="length")
    assert decode.take_generate().request_id == waiting


def test_the_queue_is_bounded_and_patience_too(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    sinks = [cluster.submit()[1] for _ in range(2)]
    for granted in decode.take_of(Generate):
        decode.busy(granted)
    cluster.clock.now_s += 3.5
    with pytest.raises(OverloadedError) as raised:
        cluster.submit()
    assert (raised.value.http_status, raised.value.retry_after_s) == (429, 4)
    for _ in range(60):
        cluster.advance(0.1)
        for granted in decode.take_of(Generate):
            decode.busy(granted)
    assert [type(sink.error) for sink in sinks] == [OverloadedError] * 2
    cluster.assert_idle()
    cluster.submit()


def test_attempts_in_vain_make_no_room(cluster: MockCluster) -> None:
    """While a request that was refused is tried again it still waits: nobody slips into its place."""
    _, decode = cluster.pair()
    sinks = [cluster.submit()[1] for _ in range(2)]
    for granted in decode.take_of(Generate):
        decode.busy(granted)
    for _ in range(20):
        cluster.advance(0.2)
        for granted in decode.take_of(Generate):
            with pytest.raises(OverloadedError):
                cluster.submit()
            decode.busy(granted)
    assert not any(sink.errors for sink in sinks)
    cluster.advance(0.2)
    decode.tokens(decode.take_of(Generate)[0], 0, 1)
    cluster.submit()


def test_of_those_that_were_refused_together_the_last_go(cluster: MockCluster) -> None:
    """None of them waited when it came, so none could be refused then."""
    _, decode = cluster.pair()
    sinks = [cluster.submit()[1] for _ in range(5)]
    for granted in reversed(decode.take_of(Generate)):
        decode.busy(granted)
    assert [len(sink.errors) for sink in sinks] == [0, 0, 1, 1, 1]
    assert all(isinstance(sink.error, OverloadedError) for sink in sinks[2:])
    assert cluster.metric("twopool_queue_length") == 2


def test_processes_of_one_router_share_the_bound() -> None:
    """It does not matter whose clients come: one may have all that wait, and then no other takes more."""
    lengths = QueueLengths(3)
    clusters = [MockCluster(max_queue=4, queue_length=lengths.of(index)) for index in range(3)]
    decodes = [cluster.pair()[1] for cluster in clusters]

    def wait_at(index: int) -> RequestId:
        request_id, _ = clusters[index].submit()
        for granted in decodes[index].take_of(Generate):
            decodes[index].busy(granted)
        return request_id

    waiting = [wait_at(0) for _ in range(3)] + [wait_at(1)]
    for cluster in clusters:
        with pytest.raises(OverloadedError, match="4 requests are waiting"):
            cluster.submit()
    clusters[0].dispatcher.cancel(waiting[0])
    wait_at(2)
    with pytest.raises(OverloadedError):
        clusters[0].submit()
    lengths.of(1).set(0)  # that process ended
    wait_at(0)
    with pytest.raises(OverloadedError):
        clusters[2].submit()


def test_a_granted_request_makes_room_for_the_other_processes() -> None:
    lengths = QueueLengths(2)
    clusters = [MockCluster(max_queue=1, queue_length=lengths.of(index)) for index in range(2)]
    (prefill, decode), (_, other) = (cluster.pair() for cluster in clusters)
    clusters[0].submit()
    decode.busy(decode.take_generate())
    with pytest.raises(OverloadedError):
        clusters[1].submit()
    decode.heartbeat(prefill)
    decode.tokens(decode.take_generate(), 0, 1)
    clusters[1].submit()
    other.take_generate()
    assert lengths.of(0).everywhere() == 0


def test_a_forked_process_has_the_same_figures() -> None:
    lengths = QueueLengths(2)
    pid = os.fork()
    if pid == 0:
        lengths.of(1).set(7)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    lengths.of(0).set(2)
    assert lengths.of(1).everywhere() == 9


@pytest.mark.parametrize("state", ["queued", "granted", "streaming"])
def test_every_state_has_the_deadline(cluster: MockCluster, state: str) -> None:
    prefill, decode = cluster.pair()
    request_id, sink = cluster.submit(timeout_s=3)
    granted = decode.take_generate()
    if state == "queued":
        decode.busy(granted)
        cluster.clock.now_s += 3.1
    elif state == "streaming":
        decode.tokens(granted, 0, 1)
    cluster.advance(3.1)
    assert isinstance(sink.error, DeadlineError)
    cancelled = [] if state == "queued" else [Cancel(request_id=request_id, attempt=granted.attempt)]
    assert decode.take_of(Cancel) == cancelled
    assert prefill.take() == (cancelled if state == "granted" else [])
    cluster.assert_idle()


def test_prompts_nobody_can_hold_are_refused_at_once(cluster: MockCluster) -> None:
    cluster.pair(num_blocks=4, max_model_len=200)
    with pytest.raises(ContextLengthError, match="200"):
        cluster.submit(num_prompt=200)
    with pytest.raises(ContextLengthError, match="64"):
        cluster.submit(num_prompt=64)
    cluster.submit(num_prompt=63)
    assert cluster.dispatcher.max_model_len == 200


async def test_drain_refuses_new_requests_and_waits_for_the_old() -> None:
    cluster = MockCluster()
    _, decode = cluster.pair()
    dispatcher = cluster.dispatcher
    assert await dispatcher.drained(0.01)
    _, sink = cluster.submit()
    granted = decode.take_generate()
    dispatcher.drain()
    assert not dispatcher.is_ready()
    with pytest.raises(UnavailableError):
        cluster.submit()
    assert not await dispatcher.drained(0.01)
    decode.tokens(granted, 0, 16, finish="length")
    assert await dispatcher.drained(0.01)
    assert sink.finish_reasons == {0: "length"}


async def test_the_dispatcher_ticks_by_itself_and_closes() -> None:
    cluster = MockCluster()
    _, decode = cluster.pair()
    cluster.dispatcher.start()
    ended = asyncio.Event()

    class Waiting(RecordingSink):
        def on_error(self, error: TwopoolError) -> None:
            super().on_error(error)
            ended.set()

    late = Waiting(1)
    cluster.dispatcher.submit(cluster.request(timeout_s=3), late)
    _, open_end = cluster.submit()
    cluster.clock.now_s += 4
    async with asyncio.timeout(5):
        await ended.wait()
    assert isinstance(late.error, DeadlineError) and not open_end.errors
    await cluster.dispatcher.close()
    await cluster.dispatcher.close()
    assert isinstance(open_end.error, UnavailableError)
    assert len(decode.take_of(Cancel)) == 2
    cluster.assert_idle()


def test_a_draining_pool_serves_nothing_new(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    decode.say(Draining(decode.epoch))
    assert not cluster.dispatcher.is_ready()
    with pytest.raises(UnavailableError):
        cluster.submit()
