"""The router benchmark's figures of known rounds."""

import pytest

from twopool.scripts.bench_router import Case, costs_of, row_of
from twopool.scripts.bench_router_load import LoadResult

CASE = Case(num_streams=2, step_ms=10, max_tokens=8, num_requests=4)


def result(*ttft_ms: float, seconds: float = 2.0, max_tokens: int = 8) -> LoadResult:
    num_tokens = len(ttft_ms) * max_tokens
    return LoadResult(len(ttft_ms), num_tokens, num_tokens // 2, seconds, [time_ms / 1e3 for time_ms in ttft_ms])


def test_figures_of_known_rounds() -> None:
    rounds = [(result(4, 5, 6, 30), 0.032), (result(9, 8, 7, 40), 0.064), (result(1, 2, 3, 20), 0.032)]
    direct = [result(1, 1, 1, 1), result(2, 2, 2, 5), result(1, 1, 2, 2)]
    row = row_of("twopool", CASE, rounds, direct)
    assert (row.router, row.num_streams, row.step_ms, row.rounds) == ("twopool", 2, 10, 3)
    assert row.cpu_us_per_token == pytest.approx(1000)
    assert row.cpu_us_per_request == pytest.approx(8000)
    assert (row.tok_per_s, row.req_per_s, row.events_per_token) == (16, 2, 0.5)
    assert [row.ttft_p50_ms, row.ttft_p99_ms] == pytest.approx([6, 30])
    assert row.ttft_overhead_p50_ms == pytest.approx(5)  # of 5, 7 and 1
    assert row.ttft_overhead_p99_ms == pytest.approx(29)  # of 29, 35 and 18


def test_a_request_and_a_further_token_are_told_apart() -> None:
    """A request costs 100 µs and each token after its first 10 µs."""
    rows = []
    for max_tokens in (4, 16):
        rounds = [(result(1, 1, max_tokens=max_tokens), 2 * (100 + 10 * (max_tokens - 1)) / 1e6)]
        case = Case(num_streams=2, step_ms=10, max_tokens=max_tokens, num_requests=2)
        rows.append(row_of("twopool", case, rounds, [result(1, 1)]))
    [cost] = costs_of(rows)
    assert cost.cpu_us_per_request == pytest.approx(100)
    assert cost.cpu_us_per_further_token == pytest.approx(10)
