"""`bench_transfer.py sweep`, `serve`, `connect`: READs of many sizes and a memcpy of the same ranges, in turns."""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, KvTransport, PeerLink
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.protocol.endpoints import parse_tcp_address
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.messages import PeerIdentity
from twopool.scripts.bench_copies import make_block_copy
from twopool.scripts.bench_link_flags import link_config, link_in_words, memory_device
from twopool.scripts.bench_pools import (
    TIMEOUT_S,
    make_geometry,
    make_request,
    make_transport,
    other_process,
)
from twopool.scripts.bench_rows import KIB, MIB, Row, make_row
from twopool.scripts.bench_socket import socket_peer

Receive = Callable[[int], None]


def _sweep_geometries(args: argparse.Namespace) -> list[KvGeometry]:
    sizes = [4 * KIB, 64 * KIB, MIB] if args.quick else [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB]
    return [make_geometry(size, _totals(args)[-1] // size) for size in sizes]


def _totals(args: argparse.Namespace) -> list[int]:
    """Bytes of a READ; one block at the least."""
    return [1, 64 * MIB] if args.quick else [1, MIB, 16 * MIB, 64 * MIB, 256 * MIB]


async def sweep(args: argparse.Namespace) -> list[Row]:
    geometries = _sweep_geometries(args)
    rows: list[Row] = []
    async with other_process(args, geometries) as (process, identities):
        with contextlib.ExitStack() as stack:
            receive: Receive | None = None
            # Over TCP, what a plain socket reaches is the limit to compare with.
            if link_config(args).ucx_settings.get("UCX_TLS") == "tcp":
                landing = allocate_host_pool(_totals(args)[-1]).numpy()
                receive = stack.enter_context(socket_peer(landing, os.sched_getaffinity(process.pid)))
            for geometry, identity in zip(geometries, identities, strict=True):
                rows += await _sweep_size(args, geometry, identity, receive)
    return rows


async def _sweep_size(
    args: argparse.Namespace, geometry: KvGeometry, peer: PeerIdentity, receive: Receive | None = None
) -> list[Row]:
    available = geometry.num_blocks - NUM_RESERVED_BLOCKS
    counts = sorted({min(max(1, total // geometry.block_bytes), available) for total in _totals(args)})
    rounds = 7 if args.quick else 15
    transport, _ = make_transport(args, geometry, f"reader-{geometry.block_bytes}")
    link = await transport.connect(peer, timeout_s=TIMEOUT_S)
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for count in counts:
        for scattered in (False, True) if count > 1 else (False,):
            local_ids = np.arange(count, dtype=np.int32)
            remote_ids = rng.permutation(count).astype(np.int32) if scattered else local_ids
            request = make_request(remote_ids, local_ids)
            copy = make_block_copy(
                geometry.block_bytes, count, memory_device(args.device, "--device"), remote_ids if scattered else None
            )
            num_bytes = count * geometry.block_bytes
            others = [copy]
            if receive is not None:
                others.append(partial(receive, num_bytes))
            reports, calls, elapsed = await _in_turns(transport, link, request, others, rounds)
            seconds = statistics.median(report.transfer_s for report in reports)
            copy_seconds, *socket_seconds = map(statistics.median, elapsed)
            rows.append(
                make_row(
                    "read",
                    block_bytes=geometry.block_bytes,
                    num_blocks=count,
                    scattered=scattered,
                    seconds=seconds,
                    num_bytes=num_bytes,
                    copy_seconds=copy_seconds,
                    num_posts=reports[0].num_posts,
                    call_seconds=statistics.median(calls),
                )
            )
            if socket_seconds:
                rows[-1]["socket_gb_per_s"] = num_bytes / socket_seconds[0] / 1e9
    await transport.close()
    return rows


async def _in_turns(
    transport: KvTransport,
    link: PeerLink,
    request: FetchRequest,
    others: list[Callable[[], None]],
    rounds: int,
) -> tuple[list[FetchReport], list[float], list[list[float]]]:
    """Reports of the READs, their seconds to the caller, and the seconds of each of ``others``; first a round that does
    not count.
    """
    reports: list[FetchReport] = []
    calls: list[float] = []
    elapsed: list[list[float]] = [[] for _ in others]
    if len(request.local_block_ids) == 1:
        rounds *= 10
    for _ in range(rounds + 1):
        start = time.perf_counter()
        reports.append(await transport.fetch(link, request, timeout_s=TIMEOUT_S).wait())
        calls.append(time.perf_counter() - start)
        for other, seconds in zip(others, elapsed, strict=True):
            start = time.perf_counter()
            other()
            seconds.append(time.perf_counter() - start)
    return reports[1:], calls[1:], [seconds[1:] for seconds in elapsed]


async def serve(args: argparse.Namespace) -> None:
    """Offers the pools of a sweep at ``--address`` until interrupted: a line of hex to whoever connects."""
    transports: list[KvTransport] = []
    identities: list[PeerIdentity] = []
    for geometry in _sweep_geometries(args):
        transport, identity = make_transport(args, geometry, f"source-{len(identities)}")
        transport.expect_readers(True)
        transports.append(transport)
        identities.append(identity)
    payload = msgspec.msgpack.encode(identities).hex().encode() + b"\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(payload)
        await writer.drain()
        writer.close()

    host, port = parse_tcp_address(args.address, param="--address")
    async with await asyncio.start_server(answer, host, port) as server:
        print(f"serving {len(identities)} pools at {args.address}; stop with Ctrl-C", flush=True)
        print(link_in_words(args), flush=True)
        await server.serve_forever()


async def connect(args: argparse.Namespace) -> list[Row]:
    host, port = parse_tcp_address(args.address, param="--address")
    reader, writer = await asyncio.open_connection(host, port)
    line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
    writer.close()
    identities = msgspec.msgpack.decode(bytes.fromhex(line.decode()), type=list[PeerIdentity])
    rows: list[Row] = []
    for identity in identities:
        remote = identity.ranks[0].geometry
        rows += await _sweep_size(args, make_geometry(remote.block_bytes, remote.num_blocks - 1), identity)
    return rows
