"""Microbenchmarks of KV transfer: what a link, a layout and a setting are worth before anything is built on them.

    bench_transfer.py sweep    READs of blocks of many sizes next to a memcpy of the same ranges, in turns
    bench_transfer.py setup    making a transport, connecting, the first READ, reconnecting, and the cost of idling

The source is a second process on this host. Every figure is a median. `seconds` runs from posting a READ to its last
completion; `call_seconds` is what the caller on the event loop sees, with both hops between loop and transfer thread.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from twopool.kv_transfer.factory import create_transport
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, KvTransport, PeerLink
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.protocol.errors import TwopoolError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import WorkerId, new_epoch
from twopool.protocol.messages import PeerIdentity

KIB, MIB = 1024, 1024 * 1024
TOKENS = 16
TIMEOUT_S = 60.0
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if args.command == "source":
                runner.run(_serve(args))
                return 0
            console = Console(width=None if sys.stdout.isatty() else 140)
            _print_settings(console, args)
            rows = runner.run(_sweep(args) if args.command == "sweep" else _setup(args))
    except TwopoolError as error:
        print(f"bench_transfer: {error.message}", file=sys.stderr)
        return 1
    console.print(_table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_transfer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="sweep|setup")
    for name in ("sweep", "setup", "source"):
        command = commands.add_parser(name)
        command.add_argument("--nixl-backend", default="UCX", help="NIXL plugin (default: UCX)")
        command.add_argument("--ucx-tls", help="UCX_TLS of both processes (default: UCX chooses)")
        if name == "source":
            command.add_argument("--geometries", required=True)
            continue
        command.add_argument("--quick", action="store_true", help="fewer sizes and rounds, under 30 s")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def _print_settings(console: Console, args: argparse.Namespace) -> None:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("UCX_", "NIXL_"))}
    if args.ucx_tls is not None:
        settings["UCX_TLS"] = args.ucx_tls
    shown = " ".join(f"{name}={value}" for name, value in settings.items()) or "default UCX settings"
    console.print(f"nixl {version('nixl')}, backend {args.nixl_backend}, {shown}")


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


# --- the other process


async def _serve(args: argparse.Namespace) -> None:
    """Offers one pool for each geometry; prints the identities, then does as told, a line at a time, until EOF."""
    identities: list[PeerIdentity] = []
    transports: list[KvTransport] = []
    for geometry in msgspec.json.decode(args.geometries, type=list[KvGeometry]):
        transport, identity = _transport(args, geometry, f"source-{len(identities)}")
        transport.expect_readers(True)
        transports.append(transport)
        identities.append(identity)
    print(msgspec.msgpack.encode(identities).hex(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for transport in transports:
            transport.expect_readers(line.strip() == "expect readers")
    for transport in transports:
        await transport.close()


@asynccontextmanager
async def _source(
    args: argparse.Namespace, geometries: list[KvGeometry]
) -> AsyncIterator[tuple[subprocess.Popen[str], list[PeerIdentity]]]:
    command = [sys.executable, "-m", "twopool.scripts.bench_transfer", "source"]
    command += ["--nixl-backend", args.nixl_backend, "--geometries", msgspec.json.encode(geometries).decode()]
    if args.ucx_tls is not None:
        command += ["--ucx-tls", args.ucx_tls]
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop yet
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        reading = asyncio.to_thread(process.stdout.readline) if process.stdout is not None else asyncio.sleep(0, "")
        line = await asyncio.wait_for(reading, TIMEOUT_S)
        if not line:
            raise TwopoolError("the source process did not start")
        yield process, msgspec.msgpack.decode(bytes.fromhex(line), type=list[PeerIdentity])
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _geometry(block_bytes: int, num_blocks: int) -> KvGeometry:
    """One layer, one head, bf16: a block is one run of ``block_bytes``."""
    return KvGeometry(
        num_blocks=num_blocks + NUM_RESERVED_BLOCKS,
        block_size=TOKENS,
        num_layers=1,
        num_kv_heads=1,
        num_kv_heads_local=1,
        head_dim=block_bytes // (2 * TOKENS * 2),
        dtype="bfloat16",
    )


def _transport(args: argparse.Namespace, geometry: KvGeometry, name: str) -> tuple[KvTransport, PeerIdentity]:
    epoch = new_epoch()
    transport = create_transport(
        "nixl",
        pool=allocate_host_pool(geometry.pool_bytes),
        geometry=geometry,
        epoch=epoch,
        agent_name=name,
        backend=args.nixl_backend,
        ucx_tls=args.ucx_tls,
        loop=asyncio.get_running_loop(),
    )
    identity = PeerIdentity(
        worker_id=WorkerId(name), role="prefill", epoch=epoch, transport="nixl", ranks=(transport.describe(),)
    )
    return transport, identity


# --- sweep


async def _sweep(args: argparse.Namespace) -> list[Row]:
    sizes = [4 * KIB, 64 * KIB, MIB] if args.quick else [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB]
    totals = [1, 64 * MIB] if args.quick else [1, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    rounds = 7 if args.quick else 15
    geometries = [_geometry(size, totals[-1] // size) for size in sizes]
    rows: list[Row] = []
    async with _source(args, geometries) as (_, identities):
        for size, geometry, identity in zip(sizes, geometries, identities, strict=True):
            counts = sorted({max(1, total // size) for total in totals})
            rows += await _sweep_size(args, geometry, identity, counts, rounds)
    return rows


async def _sweep_size(
    args: argparse.Namespace, geometry: KvGeometry, peer: PeerIdentity, counts: list[int], rounds: int
) -> list[Row]:
    transport, _ = _transport(args, geometry, f"reader-{geometry.block_bytes}")
    link = await transport.connect(peer, timeout_s=TIMEOUT_S)
    # Stands for the source's pool in the copies: another one of the same size, its pages touched.
    shape = (geometry.num_blocks, geometry.block_bytes)
    source, target = (allocate_host_pool(geometry.pool_bytes).numpy().reshape(shape) for _ in range(2))
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for count in counts:
        for scattered in (False, True) if count > 1 else (False,):
            local_ids = np.arange(count, dtype=np.int32)
            remote_ids = rng.permutation(count).astype(np.int32) if scattered else local_ids
            request = _request(remote_ids, local_ids)
            copy = _copy(source, target, remote_ids if scattered else None, count)
            reports, calls, copies = await _in_turns(transport, link, request, copy, rounds)
            seconds = statistics.median(report.transfer_s for report in reports)
            copy_seconds = statistics.median(copies)
            num_bytes = count * geometry.block_bytes
            rows.append(
                {
                    "op": "read",
                    "block_bytes": geometry.block_bytes,
                    "num_blocks": count,
                    "scattered": scattered,
                    "num_posts": reports[0].num_posts,
                    "seconds": seconds,
                    "call_seconds": statistics.median(calls),
                    "gb_per_s": num_bytes / seconds / 1e9,
                    "memcpy_gb_per_s": num_bytes / copy_seconds / 1e9,
                    "ratio": copy_seconds / seconds,
                }
            )
    await transport.close()
    return rows


async def _in_turns(
    transport: KvTransport, link: PeerLink, request: FetchRequest, copy: Callable[[], None], rounds: int
) -> tuple[list[FetchReport], list[float], list[float]]:
    """Reports of the READs, their seconds to the caller, and the copies' seconds; first a round that does not count."""
    reports: list[FetchReport] = []
    calls: list[float] = []
    copies: list[float] = []
    if len(request.local_block_ids) == 1:
        rounds *= 10
    for _ in range(rounds + 1):
        start = time.perf_counter()
        reports.append(await transport.fetch(link, request, timeout_s=TIMEOUT_S).wait())
        calls.append(time.perf_counter() - start)
        start = time.perf_counter()
        copy()
        copies.append(time.perf_counter() - start)
    return reports[1:], calls[1:], copies[1:]


def _request(
    remote_ids: np.ndarray[Any, np.dtype[np.int32]], local_ids: np.ndarray[Any, np.dtype[np.int32]]
) -> FetchRequest:
    return FetchRequest(
        remote_block_ids=remote_ids,
        local_block_ids=local_ids,
        start_token=0,
        end_token=TOKENS * len(local_ids),
        layer_start=0,
        layer_end=1,
    )


def _copy(source: Any, target: Any, remote_ids: Any, count: int) -> Callable[[], None]:
    """One thread's copy of the same ranges into the same order: a memcpy a range, looped over in C."""
    if remote_ids is None:
        return lambda: np.copyto(target[:count], source[:count])
    indices = remote_ids.astype(np.intp)

    def gather() -> None:
        np.take(source, indices, axis=0, out=target[:count], mode="clip")

    return gather


# --- setup


async def _setup(args: argparse.Namespace) -> list[Row]:
    geometry = _geometry(64 * KIB, 1024)
    rounds = 3 if args.quick else 9
    seconds: dict[str, list[float]] = {}

    def note(op: str, start: float) -> None:
        seconds.setdefault(op, []).append(time.perf_counter() - start)

    rows: list[Row] = []
    async with _source(args, [geometry]) as (process, (peer,)):
        transport: KvTransport | None = None
        for index in range(rounds):
            if transport is not None:
                await transport.close()
            start = time.perf_counter()
            transport, _ = _transport(args, geometry, f"reader-{index}")
            note("create transport", start)
            start = time.perf_counter()
            link = await transport.connect(peer, timeout_s=TIMEOUT_S)
            note("connect, canary included", start)
            ids = np.arange(1024, dtype=np.int32)
            for op in ("first READ of 64 MiB", "next READ of 64 MiB"):
                start = time.perf_counter()
                await transport.fetch(link, _request(ids, ids), timeout_s=TIMEOUT_S).wait()
                note(op, start)
            transport.disconnect(link)
            start = time.perf_counter()
            link = await transport.connect(peer, timeout_s=TIMEOUT_S)
            note("reconnect, canary included", start)
        rows += [{"op": op, "seconds": statistics.median(values)} for op, values in seconds.items()]
        rows += await _idle_rows(process, 2.0 if args.quick else 5.0)
        if transport is not None:
            await transport.close()
    return rows


async def _idle_rows(process: subprocess.Popen[str], duration_s: float) -> list[Row]:
    """CPU seconds a second that a connected pair costs while nothing moves."""
    rows: list[Row] = []
    source = psutil.Process(process.pid)
    for state in ("expect readers", "expect none"):
        _tell(process, state)
        await asyncio.sleep(0.5)
        before, start = [_cpu_s(source), time.process_time()], time.perf_counter()
        await asyncio.sleep(duration_s)
        elapsed = time.perf_counter() - start
        source_s, reader_s = _cpu_s(source) - before[0], time.process_time() - before[1]
        rows.append({"op": f"source, {state}", "cpu_share": source_s / elapsed})
        if state == "expect none":
            rows.append({"op": "idle reader", "cpu_share": reader_s / elapsed})
    return rows


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
