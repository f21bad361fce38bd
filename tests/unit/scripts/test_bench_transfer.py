"""What the transfer benchmark tells the processes it starts, and the rows it shows and draws."""

import argparse
from pathlib import Path

import pytest

from twopool.kv_transfer.ucx import DEFAULTS
from twopool.protocol.config import DecodeConfig, PrefillConfig, WorkerConfig, from_namespace
from twopool.scripts import bench_handover, bench_rows
from twopool.scripts.bench_link_flags import add_link_flags, link_flags, link_in_words
from twopool.scripts.bench_rows import make_panels, make_row, make_table
from twopool.scripts.cli import build_parser
from twopool.scripts.up_plan import make_plan

COLUMNS = ["op", "block_bytes", "num_blocks", "scattered", "seconds", "gb_per_s", "memcpy_gb_per_s", "ratio"]
MIB = 1024 * 1024


def parse(argv: list[str], *, handover: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_link_flags(parser)
    if handover:
        bench_handover.add_arguments(parser)
    return parser.parse_args(argv)


def handover_workers(argv: list[str]) -> list[WorkerConfig]:
    """The configurations of the workers that `handover` with these flags would have."""
    arguments = build_parser().parse_args(bench_handover.up_command(parse(argv, handover=True), port=1234))
    plan = make_plan(arguments, cluster_key=None, cpus=[0, 1])
    assert plan.router.port == 1234 and plan.router.served_names == ("bench",)
    configs = {"prefill": PrefillConfig, "decode": DecodeConfig}
    return [
        from_namespace(configs[worker.role], build_parser().parse_args([worker.role, *worker.flags]))
        for worker in plan.workers
    ]


def test_handover_measures_the_link_it_was_told() -> None:
    argv = ["--ucx-tls", "tcp", "--nixl-backend", "LIBFABRIC", "--kv-same-host", "nixl", "--device", "cuda:1"]
    for config in handover_workers([*argv, "--ucx", "UCX_NET_DEVICES=a,b", "--ucx", "UCX_IB_SL=3"]):
        assert (config.nixl_backend, config.kv_same_host) == ("LIBFABRIC", "nixl")
        assert config.ucx_settings == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "a,b", "UCX_IB_SL": "3"}
        assert config.device == "cuda:1" and not config.maps_same_host


def test_handover_leaves_the_rest_to_the_workers() -> None:
    for config in handover_workers(["--worker-flag", "block-size=32", "--worker-flag", "device=cpu"]):
        assert config.maps_same_host and config.ucx_tls is None and config.nixl_backend == "UCX"
        assert (config.block_size, config.device) == (32, "cpu")


@pytest.mark.parametrize(
    "argv", [[], ["--ucx-tls=^shm", "--ucx=UCX_IB_SL=3"], ["--kv-same-host=nixl", "--nixl-backend=POSIX"]]
)
def test_another_process_gets_the_same_flags(argv: list[str]) -> None:
    args = parse(argv)
    assert parse(link_flags(args)) == args


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, "UCX_MODULES=^efa (the default of twopool)"),
        ([], {}, "pools of this host: mapped if in host memory, whatever UCX is told"),
        (["--ucx=UCX_IB_SL=3"], {"UCX_MODULES": "all"}, "UCX_IB_SL=3, UCX_MODULES=all, "),
        ([], {"UCX_TLS": "tcp"}, "UCX_TLS=tcp; pools of this host: by NIXL"),
        (["--nixl-backend=POSIX"], {}, "pools of this host: by NIXL"),
    ],
)
def test_all_settings_in_force_are_printed(
    argv: list[str], environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*DEFAULTS, "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert words in link_in_words(parse(argv))


def test_every_row_has_every_column() -> None:
    assert list(make_row("connect")) == COLUMNS
    row = make_row("read", block_bytes=MIB, num_blocks=2, seconds=2e-3, num_bytes=2 * MIB, copy_seconds=1e-3, posts=1)
    assert list(row) == [*COLUMNS, "posts"]
    assert row["gb_per_s"] == pytest.approx(2 * MIB / 2e-3 / 1e9)
    assert row["memcpy_gb_per_s"] == pytest.approx(2 * row["gb_per_s"]) and row["ratio"] == pytest.approx(0.5)
    assert make_row("connect", seconds=1.0)["gb_per_s"] is None


ROWS = [
    make_row(
        "read", block_bytes=MIB, num_blocks=1, scattered=True, seconds=1e-3, num_bytes=MIB, copy_seconds=1e-4,
        call_seconds=2e-3,
    ),
    make_row("connect", seconds=0.5),
    make_row("handover", seconds=2e-3, num_bytes=MIB, copy_seconds=1e-3, exposed_seconds=3e-3, hidden_seconds=None),
    make_row("idle reader", cpu_share=0.25),
]  # fmt: skip


def test_panels_show_every_row_once_by_its_unit() -> None:
    speeds, times, shares = make_panels(ROWS)
    assert (speeds.unit, speeds.names) == ("GB/s", ["1 x 1024 KiB, scattered", "handover"])
    assert speeds.copies == [pytest.approx(MIB / 1e-4 / 1e9), pytest.approx(MIB / 1e-3 / 1e9)]
    assert (times.unit, times.names) == ("ms", ["connect", "handover: exposed"])
    assert times.values == pytest.approx([500.0, 3.0])
    assert (shares.unit, shares.names, shares.values) == ("% of a core", ["idle reader"], [25.0])
    assert [panel.unit for panel in make_panels(ROWS[:1])] == ["GB/s"]


def test_plots_are_images(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, rows in enumerate((ROWS, ROWS[1:2], ROWS[3:])):
        file = tmp_path / f"{number}.png"
        bench_rows.plot(rows, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_the_table_leaves_empty_columns_out() -> None:
    table = make_table(ROWS[3:])
    assert [column.header for column in table.columns] == ["op", "cpu_share"]
