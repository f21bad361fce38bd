"""What a scrape shows of workers, attempts and the queue."""

from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from twopool.protocol.messages import BlockCounts, Draining, Heartbeat, WorkerStats
from twopool.router import worker_metrics
from twopool.router.process_metrics import SharedMetrics
from twopool.router.worker_metrics import ATTEMPT_OUTCOMES, DROP_REASONS, AttemptOutcome, DropReason
from twopool_testing.mock_control import MockCluster

STATS = WorkerStats(
    blocks=BlockCounts(free=10, cached=20, active=3, pinned=4, fetching=5, quarantined=6),
    num_running=2,
    num_steps=9,
    kv_transfer_bytes=4096,
    kv_transfers=8,
    kv_transfer_s=0.5,
    kv_ranges=24,
    preemptions=1,
    kv_failures={"corrupt": 2, "timeout": 1},
    kv_reclaimed={"lease": 3},
)


def test_block_states_sum_to_the_pool() -> None:
    cluster = MockCluster()
    _, decode = cluster.pair()
    decode.say(Heartbeat(epoch=decode.epoch, stats=STATS))
    states = ("free", "cached", "active", "pinned", "fetching", "quarantined")
    values = [cluster.metric("twopool_kv_blocks", role="decode", worker="d0", state=state) for state in states]
    assert values == [10, 20, 3, 4, 5, 6] and sum(value or 0 for value in values) == STATS.blocks.total
    assert cluster.metric("twopool_nixl_bytes_transferred_sum", role="decode", worker="d0") == 4096
    assert cluster.metric("twopool_nixl_xfer_time_seconds_sum", role="decode", worker="d0") == 0.5
    assert cluster.metric("twopool_worker_running", role="decode", worker="d0") == 2
    assert cluster.metric("twopool_worker_preemptions_total", role="decode", worker="d0") == 1
    who = {"role": "decode", "worker": "d0"}
    assert cluster.metric("twopool_nixl_num_failed_transfers_total", **who, kind="corrupt") == 2
    assert cluster.metric("twopool_kv_pins_ended_total", **who, reason="lease") == 3
    assert cluster.metric("twopool_kv_canary_age_seconds", **who) is None, "without links there is no age"


def test_every_figure_workers_send_is_exported() -> None:
    tables = (worker_metrics._GAUGES, worker_metrics._COUNTERS, worker_metrics._SUMMARIES, worker_metrics._TALLIES)
    exported = {"blocks", "kv_transfers", *(name for table in tables for name in table)}
    assert exported == set(WorkerStats.__struct_fields__)
    assert set(ATTEMPT_OUTCOMES) == set(get_args(AttemptOutcome)) and set(DROP_REASONS) == set(get_args(DropReason))


def test_transfers_have_the_names_that_vllm_gives_them() -> None:
    cluster = MockCluster()
    _, decode = cluster.pair()
    decode.say(Heartbeat(epoch=decode.epoch, stats=STATS))
    who = {"role": "decode", "worker": "d0"}
    for name, total in (("bytes_transferred", 4096), ("xfer_time_seconds", 0.5), ("num_descriptors", 24)):
        assert cluster.metric(f"twopool_nixl_{name}_sum", **who) == total
        assert cluster.metric(f"twopool_nixl_{name}_count", **who) == 8
    assert cluster.metric("twopool_nixl_num_failed_transfers_total", **who, kind="timeout") == 1
    assert cluster.metric("twopool_nixl_num_kv_expired_reqs_total", **who) == 3


def test_series_leave_with_their_worker() -> None:
    cluster = MockCluster()
    _, decode = cluster.pair()
    decode.say(Heartbeat(epoch=decode.epoch, stats=STATS))
    decode.die()
    assert cluster.metric("twopool_nixl_bytes_transferred_sum", role="decode", worker="d0") is None
    assert b'worker="d0"' not in generate_latest(cluster.metrics)
    assert cluster.metric("twopool_workers_lost_total") == 1
    reborn = cluster.worker("d0", "decode", epoch=2).register()
    reborn.heartbeat()
    assert cluster.metric("twopool_nixl_bytes_transferred_sum", role="decode", worker="d0") == 0


def test_the_routers_own_figures() -> None:
    cluster = MockCluster()
    prefill, decode = cluster.pair()
    assert cluster.metric("twopool_workers_ready", role="prefill") == 1
    cluster.submit()
    decode.busy(decode.take_generate())
    assert (cluster.metric("twopool_queue_length"), cluster.metric("twopool_attempts_in_flight")) == (1, 0)
    decode.heartbeat(prefill)
    assert (cluster.metric("twopool_queue_length"), cluster.metric("twopool_attempts_in_flight")) == (0, 1)
    decode.tokens(decode.take_generate(), 0, 16, finish="length")
    assert cluster.metric("twopool_attempts_total", outcome="busy") == 1
    assert cluster.metric("twopool_attempts_total", outcome="finished") == 1
    assert cluster.metric("twopool_attempts_total", outcome="failed") == 0
    assert cluster.metric("twopool_grant_wait_seconds_count") == 1
    decode.say(Draining(decode.epoch))
    assert cluster.metric("twopool_workers_ready", role="decode") == 0


@pytest.mark.parametrize("name", ['a "quoted" one', "back\\slash", "line\nbreak", '{role="x"} 1', "\u00e9 \U0001f600"])
async def test_label_values_are_escaped(name: str, tmp_path: Path) -> None:
    """MET-04: the one text that comes from outside is a worker's name; it also survives the way through a page that
    puts several processes together.
    """
    cluster = MockCluster()
    worker = cluster.worker(name, "decode").register()
    worker.say(Heartbeat(epoch=worker.epoch, stats=STATS))
    pages = [generate_latest(cluster.metrics)]
    pages.append(await SharedMetrics(cluster.metrics, tmp_path, 0, 1).page())
    for page in pages:
        named = {
            (sample.labels["worker"], sample.value)
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
            if sample.name == "twopool_worker_running"
        }
        assert named == {(name, STATS.num_running)}
