"""Least outstanding work, reservations, and how much is asked of a worker that refuses or fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twopool.protocol.ids import Epoch, RequestId, WorkerId
from twopool.protocol.messages import PeerRef
from twopool.router.admission import AdmissionWindow, Breaker
from twopool.router.pairing import Candidate, Load, Need, Pairing, Reservation, can_serve, choose

NOW = 50.0


def candidate(name: str, *sources: Candidate, local: bool = False, pool: int = 1000, seqs: int = 8) -> Candidate:
    return Candidate(
        ref=PeerRef(WorkerId(name), Epoch(1)),
        pool_tokens=pool,
        max_num_seqs=seqs,
        local_prefill=local,
        sources={source.ref for source in sources},
    )


def names(pairing: Pairing | None) -> tuple[str, str | None] | None:
    if pairing is None:
        return None
    return pairing.decode.ref.worker_id, pairing.prefill.ref.worker_id if pairing.prefill else None


def test_least_outstanding_work_wins_on_both_sides() -> None:
    p0, p1 = candidate("p0"), candidate("p1")
    d0, d1 = candidate("d0", p0, p1), candidate("d1", p0, p1)
    p0.load.prefill_tokens = 100
    d1.load.sequences = 1
    assert names(choose([d0, d1], [p0, p1], Need(10), NOW)) == ("d0", "p1")


def test_sequences_count_by_the_share_of_the_workers_batch() -> None:
    small, large = candidate("small", local=True, seqs=2), candidate("large", local=True, seqs=64)
    small.load.sequences, large.load.sequences = 1, 10
    assert names(choose([small, large], [], Need(10), NOW)) == ("large", None)


def test_ties_rotate() -> None:
    prefills = [candidate(f"p{i}") for i in range(3)]
    decodes = [candidate(f"d{i}", *prefills) for i in range(3)]
    picked = [names(choose(decodes, prefills, Need(10, turn=turn), NOW)) for turn in range(3)]
    assert picked == [("d0", "p0"), ("d1", "p1"), ("d2", "p2")]


def test_only_pairs_that_have_shaken_hands() -> None:
    p0, p1 = candidate("p0"), candidate("p1")
    stranger, friend = candidate("stranger"), candidate("friend", p1)
    friend.load.sequences = 7
    assert names(choose([stranger, friend], [p0, p1], Need(10), NOW)) == ("friend", "p1")
    assert choose([stranger], [p0, p1], Need(10), NOW) is None
    assert not can_serve([stranger], [p0, p1], Need(10), NOW)


def test_a_busy_prefill_pool_is_waited_for_and_a_lost_one_is_not() -> None:
    p0 = candidate("p0")
    d0 = candidate("d0", p0, local=True)
    p0.window.on_busy(0, NOW)
    assert choose([d0], [p0], Need(10), NOW) is None
    assert can_serve([d0], [p0], Need(10), NOW)
    assert names(choose([d0], [], Need(10), NOW)) == ("d0", None)
    p0.draining = True
    assert names(choose([d0], [p0], Need(10), NOW)) == ("d0", None)


def test_no_local_prefill_without_the_flag() -> None:
    d0 = candidate("d0")
    assert choose([d0], [], Need(10), NOW) is None
    assert not can_serve([d0], [], Need(10), NOW)
    # What several choices are resumed with is recomputed on decode whatever the flag says.
    assert names(choose([d0], [], Need(10, local_only=True), NOW)) == ("d0", None)


def test_avoided_workers_are_the_last_resort() -> None:
    p0, p1 = candidate("p0"), candidate("p1")
    d0 = candidate("d0", p0, p1)
    p1.load.prefill_tokens = 500
    avoid = frozenset({WorkerId("p0")})
    assert names(choose([d0], [p0, p1], Need(10, avoid=avoid), NOW)) == ("d0", "p1")
    assert names(choose([d0], [p0], Need(10, avoid=avoid), NOW)) == ("d0", "p0")
    d0.local_prefill = True
    assert names(choose([d0], [p0], Need(10, avoid=avoid), NOW)) == ("d0", None)


def test_a_prompt_goes_where_it_fits() -> None:
    p0 = candidate("p0")
    small, large = candidate("small", p0, pool=100), candidate("large", p0, pool=200)
    large.load.sequences = 5
    assert names(choose([small, large], [p0], Need(150), NOW)) == ("large", "p0")
    assert not can_serve([small, large], [p0], Need(201), NOW)


@given(st.lists(st.sampled_from(["done", "release"]), max_size=6), st.booleans())
def test_reservations_come_back_exactly_once(calls: list[str], remote: bool) -> None:
    """RT-04: a double cancel or a late completion never makes a count negative."""
    prefill, decode = candidate("p0"), candidate("d0")
    reservation = Reservation(Pairing(decode, prefill if remote else None), 30, 2)
    assert decode.load.sequences == 2
    assert (prefill if remote else decode).load.prefill_tokens == 30
    for call in calls:
        reservation.prefill_done() if call == "done" else reservation.release()
        for load in (prefill.load, decode.load):
            assert min(load.attempts, load.prefill_tokens, load.sequences, load.tokens) >= 0
    reservation.release()
    assert prefill.load == decode.load == Load()


def test_a_flood_of_grants_ends_with_the_first_refusals() -> None:
    window = AdmissionWindow()
    assert window.is_open(10_000, NOW)
    for kept in range(19, 3, -1):  # 20 grants met a worker with room for 4
        window.on_busy(kept, NOW)
    assert not window.is_open(4, NOW)
    assert window.is_open(3, NOW)


def test_a_full_worker_is_probed_more_and_more() -> None:
    window = AdmissionWindow()
    window.on_busy(4, NOW)
    allowed = [
        next(n for n in range(100) if not window.is_open(n, NOW + pause)) for pause in (0.0, 0.021, 0.041, 0.061)
    ]
    assert allowed == [4, 5, 6, 8]


def test_refused_probes_lengthen_the_pause_and_room_ends_it() -> None:
    window = AdmissionWindow()
    now = NOW
    for pause_s in (0.02, 0.04, 0.08, 0.1, 0.1):
        window.on_busy(4, now)
        assert not window.is_open(4, now + 0.9 * pause_s)
        now += 1.01 * pause_s
        assert window.is_open(4, now)
    window.on_busy(4, now)
    window.on_room(3)
    assert window.is_open(3, now)
    assert not window.is_open(4, now)


def test_breaker_opens_cools_down_and_probes() -> None:
    """RT-01: a failing worker is left alone, then probed, and comes back without anybody's help."""
    breaker = Breaker()
    for request in ("a", "b", "c"):
        assert breaker.allows(NOW)
        breaker.on_fault(RequestId(request), NOW)
    assert not breaker.allows(NOW + 0.9)
    assert breaker.allows(NOW + 1.1)
    breaker.on_grant(NOW + 1.1)
    assert not breaker.allows(NOW + 1.2)
    breaker.on_success()
    assert breaker.allows(NOW + 1.2)


@pytest.mark.parametrize("num_faults", [3, 50])
def test_one_poisonous_request_does_not_open_a_breaker(num_faults: int) -> None:
    breaker = Breaker()
    for _ in range(num_faults):
        breaker.on_fault(RequestId("a"), NOW)
    assert breaker.allows(NOW)
