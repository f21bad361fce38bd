"""Microbenchmarks of KV transfer: what a link, a layout and a setting are worth before anything is built on them.

    bench_transfer.py sweep    READs of blocks of many sizes next to a memcpy of the same ranges, in turns
    bench_transfer.py setup    making a transport, connecting, the first READ, reconnecting, and the cost of idling
    bench_transfer.py pair     READs between two given geometries: unequal heads a rank, block sizes, layer groups
    bench_transfer.py load     K requests at a time, each of many blocks
    bench_transfer.py handover a real prefill handed over: time hidden and exposed, first token to second
    bench_transfer.py serve    offer pools to a `connect` on another host
    bench_transfer.py connect  `sweep` against the pools of a `serve`

The source is a second process on this host, but for `connect`. Every figure is a median. `seconds` runs from posting a
READ to its last completion; `call_seconds` is what the caller on the event loop sees, with both hops between loop and
transfer thread.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from twopool.protocol.errors import TwopoolError
from twopool.scripts import bench_handover
from twopool.scripts.bench_link import load, pair, setup
from twopool.scripts.bench_pools import KIB, Row, maps_same_host, offer
from twopool.scripts.bench_sweep import connect, serve, sweep


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if args.command in ("source", "serve"):
                runner.run(offer(args) if args.command == "source" else serve(args))
                return 0
            console = Console(width=None if sys.stdout.isatty() else 140)
            _print_settings(console, args)
            rows = runner.run(_COMMANDS[args.command](args))
    except TwopoolError as error:
        print(f"bench_transfer: {error.message}", file=sys.stderr)
        return 1
    console.print(_table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        try:
            _plot(rows, args.plot)
        except ImportError:
            print("bench_transfer: --plot needs matplotlib: pip install 'twopool[bench]'", file=sys.stderr)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_transfer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join((*_COMMANDS, "serve")))
    for name in (*_COMMANDS, "serve", "source"):
        command = commands.add_parser(name)
        command.add_argument("--nixl-backend", default="UCX", help="NIXL plugin (default: UCX)")
        command.add_argument("--ucx-tls", help="UCX_TLS of both processes (default: UCX chooses)")
        command.add_argument(
            "--kv-same-host",
            choices=("map", "nixl"),
            default="map",
            help="one host: copy from the mapped pool (map, not with --ucx-tls) or leave it to NIXL (default: map)",
        )
        if name == "source":
            command.add_argument("--geometries", required=True)
            continue
        command.add_argument("--device", default="cpu", help="memory of this process's pools: cpu, cuda, cuda:N")
        if name in ("serve", "connect"):
            command.add_argument("--address", required=True, metavar="HOST:PORT", help="where `serve` listens")
        if name == "pair":
            for side in ("local", "remote"):
                command.add_argument(f"--{side}", default="", metavar="FIELD=VALUE,...", help=f"{side} geometry")
            command.add_argument("--layer-groups", type=int, default=1, help="READs a block's layers are split into")
        if name == "load":
            command.add_argument("--requests", default="1,4,16", metavar="K,...", help="requests at a time")
        if name == "handover":
            bench_handover.add_arguments(command)
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows as PNG (needs matplotlib)")
        command.add_argument("--quick", action="store_true", help="fewer sizes and rounds, under 30 s")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def _print_settings(console: Console, args: argparse.Namespace) -> None:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("UCX_", "NIXL_"))}
    if args.ucx_tls is not None:
        settings["UCX_TLS"] = args.ucx_tls
    shown = " ".join(f"{name}={value}" for name, value in settings.items()) or "default UCX settings"
    same_host = "mapped" if maps_same_host(args) else "by NIXL"
    console.print(f"nixl {version('nixl')}, backend {args.nixl_backend}, {shown}; pools of this host: {same_host}")


def _table(rows: list[Row]) -> Table:
    table = Table()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name, justify="left" if name == "op" else "right")
    for row in rows:
        table.add_row(*(_shown(name, row.get(name)) for name in columns))
    return table


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("seconds"):
        return f"{value * 1e6:,.0f} µs"
    if name == "block_bytes":
        return f"{value / KIB:g} KiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- plot


def _plot(rows: list[Row], file: Path) -> None:
    """GB/s of every row that has it, next to memcpy's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [row for row in rows if "gb_per_s" in row]
    names = [_row_name(row) for row in drawn]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.35 * len(drawn)))
    places = np.arange(len(drawn))
    axes.barh(places, [row["gb_per_s"] for row in drawn], height=0.4, label="READ")
    copies = [row.get("memcpy_gb_per_s", 0.0) for row in drawn]
    if any(copies):
        axes.barh(places + 0.4, copies, height=0.4, label="memcpy, one thread")
    axes.set_yticks(places + 0.2, names)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)


def _row_name(row: Row) -> str:
    if row["op"] != "read":
        return str(row["op"])
    scattered = ", scattered" if row["scattered"] else ""
    return f"{row['num_blocks']} x {row['block_bytes'] / KIB:g} KiB{scattered}"


_COMMANDS: dict[str, Callable[[argparse.Namespace], Coroutine[None, None, list[Row]]]] = {
    "sweep": sweep,
    "setup": setup,
    "pair": pair,
    "load": load,
    "handover": bench_handover.measure,
    "connect": connect,
}


if __name__ == "__main__":
    sys.exit(main())
