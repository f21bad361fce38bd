"""What the router exports about its workers and about the work it gave them (Prometheus).

Workers' figures are read from their last heartbeat when a scrape comes. A worker's series exist while it is
registered: they vanish with it, and a restarted worker's counters start from zero, which Prometheus takes for the
counter reset it is. So there are never more series than registered workers times figures.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from twopool.protocol.messages import BlockCounts, HandoverReport, WorkerStats
from twopool.router.histogram import Histogram
from twopool.router.registry import WorkerRegistry

AttemptOutcome = Literal["finished", "busy", "failed", "worker_lost", "cancelled", "deadline"]
ATTEMPT_OUTCOMES: tuple[AttemptOutcome, ...] = ("finished", "busy", "failed", "worker_lost", "cancelled", "deadline")

DropReason = Literal["repeat", "stale", "gap", "invalid"]
DROP_REASONS: tuple[DropReason, ...] = ("repeat", "stale", "gap", "invalid")

_LABELS = ("role", "worker")
_TIME_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Field of WorkerStats → metric and help.
_GAUGES = {
    "num_running": ("twopool_worker_running", "Sequences in the worker's running batch"),
    "num_waiting": ("twopool_worker_waiting", "Sequences waiting for room on the worker"),
    "canary_age_s": ("twopool_kv_canary_age_seconds", "Seconds since the oldest link's canary was read"),
}
_COUNTERS = {
    "num_steps": ("twopool_worker_steps", "Engine steps"),
    "prefill_tokens": ("twopool_worker_prefill_tokens", "Prompt tokens computed"),
    "cached_tokens": ("twopool_worker_cached_tokens", "Prompt tokens served from the prefix cache"),
    "generated_tokens": ("twopool_worker_generated_tokens", "Tokens sampled"),
    "local_prefills": ("twopool_worker_local_prefills", "Prompts a decode worker prefilled for itself"),
    "preemptions": ("twopool_worker_preemptions", "Sequences preempted for lack of KV blocks"),
    "kv_posts": ("twopool_kv_transfer_posts", "READ operations posted; requests share them"),
    "kv_hidden_s": ("twopool_kv_transfer_hidden_seconds", "Seconds of KV reads that prefill computation hid"),
    "kv_exposed_s": ("twopool_kv_transfer_exposed_seconds", "Seconds requests waited for KV after their first token"),
    "kv_verified_bytes": ("twopool_kv_verified_bytes", "Bytes read whose checksums were compared and equal"),
    "kv_converted_bytes": ("twopool_kv_converted_bytes", "Bytes read in another dtype and converted"),
    "kv_prefix_tokens": ("twopool_kv_prefix_tokens", "Prompt tokens whose KV was read from a peer's prefix cache"),
    "handshakes_refused": ("twopool_kv_handshakes_refused", "Handshakes with peers that did not succeed"),
    "pairs_quarantined": ("twopool_kv_pairs_quarantined", "Times a peer was not read from because checksums differed"),
    "stale_tickets": ("twopool_kv_stale_tickets", "Tickets that did not hold when confirmed"),
    "rejected_messages": ("twopool_worker_rejected_messages", "Malformed or unexpected messages the worker dropped"),
}
# The same for sums over the transfers that ``kv_transfers`` counts. vLLM has histograms of these names.
_SUMMARIES = {
    "kv_transfer_bytes": ("twopool_nixl_bytes_transferred", "Bytes of KV cache read from peers, by transfer"),
    "kv_transfer_s": ("twopool_nixl_xfer_time_seconds", "Seconds from a transfer's first READ to its last completion"),
    "kv_ranges": ("twopool_nixl_num_descriptors", "Contiguous ranges of KV read from peers, by transfer"),
}
# The same for fields that count by a label of their own.
_TALLIES = {
    "kv_failures": ("twopool_nixl_num_failed_transfers", "KV transfers that failed, by kind", "kind"),
    "kv_reclaimed": ("twopool_kv_pins_ended", "Pins of KV kept for readers that ended, by reason", "reason"),
}


class WorkerCollector(Collector):
    """Every registered worker's ``WorkerStats``, and ``twopool_kv_blocks`` whose states sum to the pool's size."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily(
            "twopool_kv_blocks", "KV blocks by state; they sum to the pool's size", labels=(*_LABELS, "state")
        )
        gauges = {name: GaugeMetricFamily(*_GAUGES[name], labels=_LABELS) for name in _GAUGES}
        counters = {name: CounterMetricFamily(*_COUNTERS[name], labels=_LABELS) for name in _COUNTERS}
        summaries = {name: SummaryMetricFamily(*_SUMMARIES[name], labels=_LABELS) for name in _SUMMARIES}
        expired = CounterMetricFamily(
            "twopool_nixl_num_kv_expired_reqs", "Requests whose pins ended by their lease", labels=_LABELS
        )
        tallies = {
            name: CounterMetricFamily(metric, text, labels=(*_LABELS, label))
            for name, (metric, text, label) in _TALLIES.items()
        }
        ready = GaugeMetricFamily("twopool_workers_ready", "Registered workers that take requests", labels=("role",))
        num_ready = dict.fromkeys(("prefill", "decode"), 0)
        for worker in self._workers.workers:
            num_ready[worker.role] += not worker.candidate.draining
            if worker.stats is not None:
                labels = (worker.role, worker.worker_id)
                for state in BlockCounts.__struct_fields__:
                    blocks.add_metric((*labels, state), getattr(worker.stats.blocks, state))
                _add(gauges, labels, worker.stats)
                _add(counters, labels, worker.stats)
                for name, summary in summaries.items():
                    summary.add_metric(labels, worker.stats.kv_transfers, getattr(worker.stats, name))
                expired.add_metric(labels, worker.stats.kv_reclaimed.get("lease", 0))
                for name, family in tallies.items():
                    for label, count in getattr(worker.stats, name).items():
                        family.add_metric((*labels, label), count)
        for role, count in num_ready.items():
            ready.add_metric((role,), count)
        by_field = (gauges, counters, summaries, tallies)
        return [blocks, ready, expired, *(family for families in by_field for family in families.values())]


@dataclass
class DispatchFigures:
    """What the dispatcher counts as it goes: plain integers on the hot path, read when a scrape comes."""

    attempts: "Tally[AttemptOutcome]" = field(default_factory=Tally)
    dropped_deltas: "Tally[DropReason]" = field(default_factory=Tally)
    resends: int = 0


class DispatchCollector(Collector):
    """The router's own view of queue and attempts."""

    def __init__(
        self,
        figures: DispatchFigures,
        *,
        queue_length: Callable[[], int],
        num_in_flight: Callable[[], int],
        num_rejected_messages: Callable[[], int],
        num_workers_lost: Callable[[], int],
    ) -> None:
        self._figures = figures
        self._gauges = (
            ("twopool_queue_length", "Requests waiting for a worker", queue_length),
            ("twopool_attempts_in_flight", "Attempts granted and not over", num_in_flight),
        )
        self._counters = (
            ("twopool_resends", "Missing tokens asked for again", lambda: figures.resends),
            ("twopool_router_rejected_messages", "Messages from workers that were dropped", num_rejected_messages),
            ("twopool_workers_lost", "Workers declared lost", num_workers_lost),
        )

    def collect(self) -> Iterable[Metric]:
        attempts = CounterMetricFamily("twopool_attempts", "Attempts by how they ended", labels=("outcome",))
        for outcome in ATTEMPT_OUTCOMES:
            attempts.add_metric((outcome,), self._figures.attempts[outcome])
        dropped = CounterMetricFamily("twopool_dropped_deltas", "Token messages not accepted", labels=("reason",))
        for reason in DROP_REASONS:
            dropped.add_metric((reason,), self._figures.dropped_deltas[reason])
        yield attempts
        yield dropped
        for name, text, value in self._gauges:
            yield GaugeMetricFamily(name, text, value=value())
        for name, text, value in self._counters:
            yield CounterMetricFamily(name, text, value=value())


class DispatchHistograms(Collector):
    """Times observed once a request or once an attempt."""

    def __init__(self) -> None:
        self._queue = Histogram(_TIME_BUCKETS)
        self._transfer = Histogram(_TIME_BUCKETS)
        self._exposed = Histogram(_TIME_BUCKETS)

    def collect(self) -> Iterable[Metric]:
        yield self._queue.family("twopool_grant_wait_seconds", "Seconds from a request's arrival to its first grant")
        yield self._transfer.family(
            "twopool_handover_transfer_seconds", "Seconds a prompt's KV was under way to its decode worker"
        )
        yield self._exposed.family("twopool_handover_exposed_seconds", "Seconds of a hand-over that no computation hid")

    def granted(self, queued_s: float) -> None:
        self._queue.observe(queued_s)

    def handed_over(self, report: HandoverReport) -> None:
        self._transfer.observe(report.transfer_s)
        self._exposed.observe(report.exposed_s)


def export(
    registry: CollectorRegistry,
    workers: WorkerRegistry,
    figures: DispatchFigures,
    *,
    queue_length: Callable[[], int],
    num_in_flight: Callable[[], int],
    num_rejected_messages: Callable[[], int],
    num_workers_lost: Callable[[], int],
) -> DispatchHistograms:
    """Put everything of this module into ``registry``; returns the histograms to feed."""
    registry.register(WorkerCollector(workers))
    registry.register(
        DispatchCollector(
            figures,
            queue_length=queue_length,
            num_in_flight=num_in_flight,
            num_rejected_messages=num_rejected_messages,
            num_workers_lost=num_workers_lost,
        )
    )
    histograms = DispatchHistograms()
    registry.register(histograms)
    return histograms


def _add(
    families: "dict[str, GaugeMetricFamily] | dict[str, CounterMetricFamily]",
    labels: tuple[str, str],
    stats: WorkerStats,
) -> None:
    for name, family in families.items():
        value = getattr(stats, name)
        if value is not None:
            family.add_metric(labels, value)
