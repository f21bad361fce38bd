"""Registration, heartbeats, readiness, losses: what the router believes about its workers."""

from typing import Any

import pytest

from twopool.protocol.errors import UnavailableError
from twopool.protocol.ids import Epoch, RouterId
from twopool.protocol.messages import Draining, Generate, Peers, Refused, Registered, ReRegister
from twopool_testing.mock_control import MockCluster

pytestmark = pytest.mark.usefixtures("no_defects")


@pytest.fixture
def cluster() -> MockCluster:
    return MockCluster()


def test_workers_are_introduced_to_each_other(cluster: MockCluster) -> None:
    decode = cluster.worker("d0", "decode").register()
    assert decode.take() == [Registered(router_id=RouterId("router-test"), peers=())]
    prefill = cluster.worker("p0", "prefill").register()
    [registered] = prefill.take_of(Registered)
    assert [(peer.worker_id, peer.epoch) for peer in registered.peers] == [("d0", 1)]
    [peers] = decode.take_of(Peers)
    assert [(peer.worker_id, peer.epoch) for peer in peers.peers] == [("p0", 1)]
    late = cluster.worker("d1", "decode").register()
    [registered] = late.take_of(Registered)
    assert [peer.worker_id for peer in registered.peers] == ["d0", "p0"]
    assert [[peer.worker_id for peer in told.peers] for told in prefill.take_of(Peers)] == [["d0", "d1"]]
    decode.take()
    prefill.die()
    [peers] = decode.take_of(Peers)
    assert [peer.worker_id for peer in peers.peers] == ["d1"]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("protocol_version", 99, "version"),
        ("model", "another", "model"),
        ("compatibility_hash", "def", "fingerprint"),
        ("vocab_size", 7, "vocabulary"),
    ],
)
def test_unfit_workers_are_refused_in_words(cluster: MockCluster, field: str, value: Any, word: str) -> None:
    cluster.worker("p0", "prefill").register()
    unfit = cluster.worker("d0", "decode", **{field: value}).register()
    [refused] = unfit.take_of(Refused)
    assert word in refused.reason and str(value) in refused.reason
    assert len(cluster.dispatcher.workers) == 1


def test_the_model_may_change_when_nobody_is_left(cluster: MockCluster) -> None:
    first = cluster.worker("p0", "prefill").register()
    first.die()
    second = cluster.worker("p0", "prefill", epoch=2, compatibility_hash="def", vocab_size=7).register()
    assert second.take_of(Registered)
    assert cluster.dispatcher.vocab_size == 7


@pytest.mark.parametrize("decode_first", [True, False])
def test_ready_needs_a_pair_that_has_shaken_hands(cluster: MockCluster, decode_first: bool) -> None:
    """RT-10, X-router-ready-no-workers: not ready alone, with P only, with D only, or before the handshake."""
    ready = cluster.dispatcher.is_ready
    prefill, decode = cluster.worker("p0", "prefill"), cluster.worker("d0", "decode")
    assert not ready()
    for worker in (decode, prefill) if decode_first else (prefill, decode):
        worker.register()
        assert not ready()
        with pytest.raises(UnavailableError) as raised:
            cluster.submit()
        assert raised.value.http_status == 503 and raised.value.retry_after_s >= 1
        assert raised.value.message == cluster.dispatcher.ready_reason()
    decode.heartbeat()
    assert not ready()
    decode.heartbeat(prefill)
    assert ready()
    cluster.submit()


def test_decode_that_prefills_for_itself_is_ready_alone(cluster: MockCluster) -> None:
    decode = cluster.worker("d0", "decode", local_prefill=True).register()
    assert cluster.dispatcher.is_ready()
    cluster.submit()
    assert decode.take_generate().prefill is None


def test_ready_waits_for_as_many_workers_as_it_was_told_to() -> None:
    """RT-10, X-router-ready-no-workers: a decode worker alone is no disaggregated pool until it was complete once."""
    cluster = MockCluster(min_prefill=1, min_decode=2)
    cluster.worker("decode-0", "decode", local_prefill=True).register()
    second = cluster.worker("decode-1", "decode", local_prefill=True).register()
    assert not cluster.dispatcher.is_ready()
    assert "0 of 1 prefill and 2 of 2 decode" in cluster.dispatcher.ready_reason()
    with pytest.raises(UnavailableError, match="waiting for workers"):
        cluster.submit()
    prefill = cluster.worker("prefill-0", "prefill").register()
    second.heartbeat(prefill)
    assert cluster.dispatcher.is_ready()
    prefill.die()
    assert cluster.dispatcher.is_ready()  # complete once: decode workers stand in for lost prefill workers


def test_a_starting_pool_waits_for_the_handshake_but_a_serving_one_stays_ready(cluster: MockCluster) -> None:
    prefill = cluster.worker("p0", "prefill").register()
    decode = cluster.worker("d0", "decode", local_prefill=True).register()
    assert not cluster.dispatcher.is_ready()
    decode.heartbeat(prefill)
    assert cluster.dispatcher.is_ready()
    prefill.die()
    assert cluster.dispatcher.is_ready()
    cluster.worker("p0", "prefill", epoch=2).register()
    assert cluster.dispatcher.is_ready()
    decode.take()
    cluster.submit()
    assert decode.take_generate().prefill is None


def test_a_restarted_source_is_used_only_after_a_new_handshake(cluster: MockCluster) -> None:
    """X-pd-prefill-death-recover: an entry of the former life does not pass for the new one."""
    prefill, decode = cluster.pair()
    prefill.die()
    reborn = cluster.worker("p0", "prefill", epoch=2).register()
    decode.heartbeat(prefill)
    assert not cluster.dispatcher.is_ready()
    decode.heartbeat(reborn)
    assert cluster.dispatcher.is_ready()
    decode.take()
    cluster.submit()
    assert decode.take_generate().prefill == reborn.ref


@pytest.mark.parametrize("same_epoch", [True, False])
def test_a_new_registration_ends_the_former_life(cluster: MockCluster, same_epoch: bool) -> None:
    """RT-05: nothing of the former life's load is lost or kept."""
    prefill, decode = cluster.pair()
    _, sink = cluster.submit()
    decode.take()
    again = cluster.worker("d0", "decode", epoch=1 if same_epoch else 2).register()
    again.take()
    assert [type(sink.error)] == [UnavailableError]  # nobody had shaken hands yet
    again.heartbeat(prefill)
    cluster.submit()
    assert again.take_generate().attempt == 0
    assert cluster.dispatcher.workers.decodes[0].load.sequences == 1
    # The former connection is nobody's any more.
    decode.die()
    assert cluster.dispatcher.is_ready()


def test_who_is_not_known_is_asked_to_register_now_and_then(cluster: MockCluster) -> None:
    stranger = cluster.worker("d0", "decode")
    stranger.heartbeat()
    stranger.heartbeat()
    assert stranger.take() == [ReRegister(RouterId("router-test"))]
    cluster.clock.now_s += 1.5
    stranger.heartbeat()
    assert stranger.take() == [ReRegister(RouterId("router-test"))]
    stranger.register()
    assert cluster.dispatcher.is_ready() is False and len(cluster.dispatcher.workers) == 1


def test_a_heartbeat_of_another_epoch_is_a_stranger(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    decode.epoch = Epoch(5)
    decode.heartbeat()
    assert decode.take_of(ReRegister)
    assert not cluster.dispatcher.is_ready()


def test_a_worker_that_does_not_step_is_lost_until_it_does(cluster: MockCluster) -> None:
    _, decode = cluster.pair()
    decode.heartbeat(num_running=1, num_steps=7)
    for _ in range(70):
        cluster.advance(1.0)
        decode.heartbeat(num_running=1, num_steps=7)
    assert not cluster.dispatcher.workers.decodes
    assert not decode.take_of(ReRegister)
    decode.heartbeat(num_running=1, num_steps=8)
    assert decode.take_of(ReRegister)


def test_idle_and_stepping_workers_are_not_lost(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    for _ in range(200):
        cluster.advance(1.0)
        decode.heartbeat(prefill, num_running=1)
        prefill.heartbeat(num_running=0, num_steps=3)
    assert cluster.dispatcher.is_ready()


def test_a_worker_that_falls_silent_is_lost(cluster: MockCluster) -> None:
    cluster.pair()
    for _ in range(70):
        cluster.advance(1.0)
    assert len(cluster.dispatcher.workers) == 0


def test_a_worker_that_cannot_be_sent_to_is_lost(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode").register()
    other.heartbeat(prefill)
    cluster.socket.deaf.add(decode.peer)
    sinks = [cluster.submit()[1] for _ in range(2)]
    assert len(other.take_of(Generate)) == 2
    assert not any(sink.errors for sink in sinks)
    assert [c.ref for c in cluster.dispatcher.workers.decodes] == [other.ref]


def test_draining_workers_take_nothing_new_and_leave_unnoticed(cluster: MockCluster) -> None:
    prefill, decode = cluster.pair()
    other = cluster.worker("d1", "decode").register()
    other.heartbeat(prefill)
    _, sink = cluster.submit()
    granted = decode.take_generate()
    decode.say(Draining(decode.epoch))
    for _ in range(3):
        cluster.submit()
    assert not decode.take() and len(other.take_of(Generate)) == 3
    decode.tokens(granted, 0, 16, finish="length")
    assert sink.finish_reasons == {0: "length"}
    decode.die()
    assert cluster.dispatcher.is_ready()


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\xc1" * 50, b"\x81\xa4type\xa6tokens"])
def test_malformed_messages_are_counted_and_the_connection_lives(cluster: MockCluster, payload: bytes) -> None:
    prefill, decode = cluster.pair()
    cluster.dispatcher.on_message(decode.peer, payload)
    assert cluster.metric("twopool_router_rejected_messages_total") == 1
    decode.heartbeat(prefill)
    assert cluster.dispatcher.is_ready()
