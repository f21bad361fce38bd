"""The transfer microbenchmark runs from end to end and writes what it measured."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twopool_testing.two_networks import two_networks

COLUMNS = {
    *("op", "block_bytes", "num_blocks", "scattered", "seconds"),
    *("gb_per_s", "memcpy_gb_per_s", "ratio"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["sweep", "setup"])
def test_rows(command: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", command, "--quick", "--json", str(file)]
    finished = quick(run)
    assert "nixl" in finished.stdout
    rows = json.loads(file.read_text())
    if command == "sweep":
        assert {(row["block_bytes"], row["scattered"]) for row in rows} == {
            (size, scattered) for size in (4096, 65536, 1048576) for scattered in (False, True)
        }
        for row in rows:
            assert set(row) >= COLUMNS and row["op"] == "read"
            num_bytes = row["block_bytes"] * row["num_blocks"]
            assert row["gb_per_s"] == pytest.approx(num_bytes / row["seconds"] / 1e9)
            assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
            assert row["call_seconds"] > 0
    else:
        assert {"create transport", "connect, canary included", "idle reader"} <= {row["op"] for row in rows}
        for row in rows:
            assert set(row) >= COLUMNS
            assert (row["gb_per_s"] is not None and row["ratio"] > 0) == ("READ" in row["op"])
            assert (row["seconds"] is None) == ("cpu_share" in row)


@pytest.mark.e2e
@pytest.mark.slow
def test_handover(tiny_model: Path, tmp_path: Path) -> None:
    """Real workers, over the path that the flags name."""
    file = tmp_path / "rows.json"
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", "handover", "--quick", "--json", str(file)]
    run += ["--model", str(tiny_model), "--num-tokens", "100", "--ucx-tls", "tcp", "--device", "cpu"]
    run += ["--worker-flag", "block-size=32", "--worker-flag", "kv-cache-memory=16777216"]
    quick(run)
    (row,) = json.loads(file.read_text())
    assert set(row) >= COLUMNS and row["num_blocks"] == 4 and row["scattered"] is None
    assert row["bytes"] == row["num_blocks"] * row["block_bytes"] > 0
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert row["num_posts"] >= 1 and row["exposed_seconds"] > 0 and row["first_to_second_seconds"] > 0


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "columns"),
    [
        (("pair", "--remote", "block_size=32", "--layer-groups", "2"), {"num_ranges", "num_posts"}),
        (("pair", "--local", "tp_size=1", "--remote", "tp_size=2,num_blocks=200"), {"num_ranges", "num_posts"}),
        (("pair", "--local", "tp_size=4,block_size=32", "--remote", "tp_size=3"), {"num_ranges", "num_posts"}),
        (("load", "--requests", "1,3"), {"slowest_seconds", "posts_a_request"}),
    ],
)
def test_other_commands(command: tuple[str, ...], columns: set[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "plot")}
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", *command, "--quick", "--json", str(files["json"])]
    if importlib.util.find_spec("matplotlib"):
        run += ["--plot", str(files["plot"])]
    quick(run)
    for row in json.loads(files["json"].read_text()):
        assert columns | COLUMNS <= set(row) and row["gb_per_s"] > 0
        if command[0] == "pair":
            num_bytes = row["gb_per_s"] * row["seconds"] * 1e9
            assert num_bytes == pytest.approx(row["block_bytes"] * row["num_blocks"])
    if "--plot" in run:
        assert files["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.slow
def test_serve_and_connect(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    check_serve_and_connect([], [], ["--address", address], tmp_path / "rows.json")


@pytest.mark.e2e
@pytest.mark.slow
def test_serve_and_connect_between_two_hosts(tmp_path: Path) -> None:
    with two_networks() as (here, there):
        flags = ["--ucx-tls", "tcp", "--address", f"{here.address}:9000"]
        check_serve_and_connect(here.command(), there.command(), flags, tmp_path / "rows.json")


def check_serve_and_connect(serve: list[str], connect: list[str], flags: list[str], file: Path) -> None:
    base = [sys.executable, "-m", "twopool.scripts.bench_transfer"]
    flags = ["--quick", *flags]
    with subprocess.Popen([*serve, *base, "serve", *flags], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and "serving 3 pools" in server.stdout.readline()
            command = [*connect, *base, "connect", *flags, "--json", str(file)]
            finished = subprocess.run(command, capture_output=True, text=True, timeout=110)
            assert finished.returncode == 0, finished.stderr
        finally:
            server.kill()
    rows = json.loads(file.read_text())
    assert {row["block_bytes"] for row in rows} == {4096, 65536, 1048576}
    assert all(set(row) >= COLUMNS for row in rows)


def quick(run: list[str]) -> "subprocess.CompletedProcess[str]":
    """What a command that was told to be quick says; it has 30 s."""
    start = time.monotonic()
    finished = subprocess.run(run, capture_output=True, text=True, timeout=110)
    assert finished.returncode == 0, finished.stderr
    assert time.monotonic() - start < 30
    return finished


@pytest.mark.e2e
@pytest.mark.slow
def test_pairs_of_degrees_have_a_program_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    run = [sys.executable, "-m", "twopool.scripts.bench_tp_transfer", "--model", str(tiny_model), "--json", str(file)]
    quick([*run, "--degrees", "1", "2", "--tokens", "100", "--rounds", "2"])
    pairs = json.loads(file.read_text())["pairs"]
    assert {(pair["source_ranks"], pair["reader_ranks"]) for pair in pairs} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert len({pair["num_bytes"] for pair in pairs}) == 1 and pairs[0]["num_bytes"] > 0
    assert all(pair["to_equal_degree"] > 0 for pair in pairs)


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (("pair", "--local", "block_size=17"), 1, "power of two, got 17"),
        (("pair", "--layer-groups", "31"), 1, "--layer-groups 31: the pools have 30 layers"),
        (("load", "--requests", "4,0"), 2, "--requests: 0 is not positive"),
        (("sweep", "--ucx", "UCX_TLS"), 1, "--ucx UCX_TLS: expected UCX_NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_refused_in_words(command: tuple[str, ...], status: int, message: str) -> None:
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", *command]
    finished = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert finished.returncode == status and message in finished.stderr


@pytest.mark.e2e
@pytest.mark.slow
def test_a_setting_that_ucx_warns_of_is_no_obstacle(tmp_path: Path) -> None:
    """UCX says on standard output that it has no use for a setting here; the source tells its pools after that."""
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", "pair", "--quick", "--kv-same-host", "nixl"]
    file = tmp_path / "rows.json"
    finished = quick([*run, "--ucx", "UCX_IB_SL=3", "--json", str(file)])
    assert "UCX_IB_SL=3" in finished.stdout
    assert json.loads(file.read_text())[0]["gb_per_s"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_setting_that_ucx_does_not_have_is_refused_in_words() -> None:
    run = [sys.executable, "-m", "twopool.scripts.bench_transfer", "sweep", "--ucx", "UCX_RNDV_TRESH=64k"]
    finished = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 1
    assert "--ucx UCX_RNDV_TRESH=64k: UCX knows no such setting on this machine, but UCX_RNDV_THRESH" in finished.stderr
