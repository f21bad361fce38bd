"""The transfer microbenchmark runs from end to end and writes what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["sweep", "setup"])
def test_rows(command: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", command, "--quick", "--json", str(file)]
    finished = subprocess.run(run, capture_output=True, text=True, timeout=110)
    assert finished.returncode == 0, finished.stderr
    assert "nixl" in finished.stdout
    rows = json.loads(file.read_text())
    if command == "sweep":
        assert {(row["block_bytes"], row["scattered"]) for row in rows} == {
            (size, scattered) for size in (4096, 65536, 1048576) for scattered in (False, True)
        }
        for row in rows:
            assert row["op"] == "read"
            num_bytes = row["block_bytes"] * row["num_blocks"]
            assert row["gb_per_s"] == pytest.approx(num_bytes / row["seconds"] / 1e9)
            assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
            assert row["call_seconds"] > 0
    else:
        assert {"create transport", "connect, canary included", "idle reader"} <= {row["op"] for row in rows}
        assert all(row["seconds"] > 0 for row in rows if "seconds" in row)
