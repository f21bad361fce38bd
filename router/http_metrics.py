"""What the HTTP half counts and times, in Prometheus terms.

Plain Python numbers behind one collector. Tokens are observed a few dozen at a time. Label values come from closed
sets, so no client can make a time series.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from twopool.protocol.errors import TwopoolError
from twopool.router.histogram import Histogram
from twopool.router.timings import PHASES

OUTCOMES = ("completed", "invalid", "overloaded", "unavailable", "timeout", "cancelled", "slow_reader", "failed")

_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOTAL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_PHASE_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class HttpMetrics(Collector):
    """Register with a ``CollectorRegistry``; all calls on the event loop.

    One observation of TTFT, end-to-end time, queue time and prompt tokens a prompt; ITL is the gap between a choice's
    consecutive deliveries.
    """

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.in_flight = 0
        self.ttft = Histogram(_TTFT_BUCKETS_S)
        self.itl = Histogram(_ITL_BUCKETS_S)
        self.end_to_end = Histogram(_TOTAL_BUCKETS_S)
        self.queue = Histogram(_QUEUE_BUCKETS_S)
        self.phases = {name: Histogram(_PHASE_BUCKETS_S) for name in PHASES}
        self.prompt_sizes = Histogram(_TOKEN_BUCKETS)
        self.generation_sizes = Histogram(_TOKEN_BUCKETS)

    def count_outcome(self, outcome: str) -> None:
        self.requests[outcome] += 1

    def observe_phases(self, seconds: dict[str, float]) -> None:
        """One prompt's time by phase (``timings.PHASES``)."""
        for name, value in seconds.items():
            self.phases[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("twopool_requests", "Generation requests by how they ended.", labels=["outcome"])
        for outcome, count in self.requests.items():
            requests.add_metric([outcome], count)
        yield requests
        yield GaugeMetricFamily(
            "twopool_router_requests_in_flight", "Generation requests being answered.", value=self.in_flight
        )
        yield CounterMetricFamily("twopool_prompt_tokens", "Prompt tokens of answered requests.", self.prompt_tokens)
        yield CounterMetricFamily(
            "twopool_prompt_cached_tokens", "Prompt tokens found in a prefix cache.", self.cached_tokens
        )
        yield CounterMetricFamily("twopool_generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self.ttft.family("twopool_time_to_first_token_seconds", "From the request's arrival to its first token.")
        yield self.itl.family("twopool_inter_token_latency_seconds", "Between deliveries of one choice.")
        yield self.end_to_end.family("twopool_request_seconds", "From the request's arrival to its last token.")
        yield self.queue.family(
            "twopool_queue_seconds",
            "Waiting for the first token that was not computation: in the router, on the wire and at the worker.",
        )
        phases = HistogramMetricFamily(
            "twopool_request_phase_seconds",
            "Where a prompt's time went; receive to first_token_delivery sum to its TTFT.",
            labels=["phase"],
        )
        for name, histogram in self.phases.items():
            phases.add_metric([name], *histogram.buckets())
        yield phases
        yield self.prompt_sizes.family("twopool_request_prompt_tokens", "Prompt tokens of a request.")
        yield self.generation_sizes.family("twopool_request_generation_tokens", "Tokens generated for a request.")


def outcome_of(error: TwopoolError) -> str:
    """The outcome label of a request that ended in ``error``."""
    by_status = {429: "overloaded", 503: "unavailable", 504: "timeout"}
    return by_status.get(error.http_status, "invalid" if error.http_status < 500 else "failed")
