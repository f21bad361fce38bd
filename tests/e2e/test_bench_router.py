"""A short run of the router benchmark: the router and its mock workers as real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_the_command(tmp_path: Path) -> None:
    """Real processes, few requests: the answers are whole, and every figure is there."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-P", "-m", "twopool.scripts.bench_router", "--streams", "1,4", "--step-ms", "5,0"]
    command += ["--rounds", "2", "--seconds", "0.2", "--max-tokens", "8", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "overhead" in done.stdout
    report = json.loads(file.read_text())
    rows = {(row["num_streams"], row["step_ms"], row["max_tokens"]): row for row in report["rows"]}
    assert set(rows) == {(n, s, m) for n in (1, 4) for s, m in ((5.0, 8), (5.0, 2), (0.0, 8), (0.0, 2), (0.0, 1))}
    assert {row["router"] for row in report["rows"]} == {"twopool"}
    for row in rows.values():
        assert row["cpu_us_per_token"] > 0 and row["cpu_us_per_request"] > row["cpu_us_per_token"] * 0.99
        assert row["ttft_overhead_p50_ms"] < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["events_per_token"] <= 4  # the role, the end and [DONE] are events too
    assert rows[4, 5.0, 8]["tok_per_s"] < 2 * 4 / 0.005  # bound by the steps
    assert {(cost["num_streams"], cost["step_ms"]) for cost in report["costs"]} == {(1, 5), (1, 0), (4, 5), (4, 0)}
