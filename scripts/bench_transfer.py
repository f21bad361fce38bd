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
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import torch
import uvloop
from rich.console import Console

from twopool.protocol.errors import TwopoolError
from twopool.scripts import bench_handover
from twopool.scripts.bench_link import load, pair, setup
from twopool.scripts.bench_link_flags import add_device_flags, add_link_flags, link_in_words, positive
from twopool.scripts.bench_pools import offer
from twopool.scripts.bench_rows import Row, make_table, plot
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
            console.print(link_in_words(args))
            rows = runner.run(_COMMANDS[args.command](args))
    except TwopoolError as error:
        print(f"bench_transfer: {error.message}", file=sys.stderr)
        return 1
    console.print(make_table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        try:
            plot(rows, args.plot)
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
        add_link_flags(command)
        if name != "handover":
            add_device_flags(command, starts_source=name not in ("source", "serve", "connect"))
        if name == "source":
            command.add_argument("--geometries", required=True)
            continue
        if name in ("serve", "connect"):
            command.add_argument("--address", required=True, metavar="HOST:PORT", help="where `serve` listens")
        if name == "pair":
            for side in ("local", "remote"):
                command.add_argument(f"--{side}", default="", metavar="FIELD=VALUE,...", help=f"{side} geometry")
            command.add_argument(
                "--layer-groups", type=positive, default=1, help="READs a block's layers are split into"
            )
        if name == "load":
            command.add_argument(
                "--requests", type=_counts, default=[1, 4, 16], metavar="K,...", help="requests at a time (1,4,16)"
            )
        if name == "handover":
            bench_handover.add_arguments(command)
        command.add_argument("--quick", action="store_true", help="fewer sizes and rounds, under 30 s")
        if name == "serve":
            continue
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows as PNG (needs matplotlib)")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def _counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


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
