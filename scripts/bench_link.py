"""`bench_transfer.py pair`, `load` and `setup`: what geometries, concurrency and connecting cost."""

import argparse
import asyncio
import itertools
import statistics
import subprocess
import time
from typing import Any

import msgspec
import numpy as np
import psutil

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, KvTransport
from twopool.models.sharding import MAX_RANKS
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry
from twopool.scripts.bench_copies import make_block_copy, make_ranges_copy
from twopool.scripts.bench_link_flags import memory_device
from twopool.scripts.bench_pools import (
    TIMEOUT_S,
    make_geometry,
    make_request,
    make_transport,
    other_process,
    tell,
)
from twopool.scripts.bench_ranks import Reader, as_one_worker, deal_heads
from twopool.scripts.bench_rows import KIB, Row, make_row

# --- pair

_PAIR_TOKENS = 2048
_RANK_FIELDS = {"num_kv_heads_local", "kv_head_start", "tp_rank"}


async def pair(args: argparse.Namespace) -> list[Row]:
    """2,048 tokens between two workers of SmolLM2's shape, each side's fields changed as asked."""
    readers, sources = (pools_of(getattr(args, side), f"--{side}") for side in ("local", "remote"))
    local, remote = readers[0], sources[0]
    num_tokens = min(
        _PAIR_TOKENS, *((pool.num_blocks - NUM_RESERVED_BLOCKS) * pool.block_size for pool in (local, remote))
    )
    if args.layer_groups > local.num_layers:
        raise ConfigError(
            f"--layer-groups {args.layer_groups}: the pools have {local.num_layers} layers", param="--layer-groups"
        )
    groups = [local.num_layers * g // args.layer_groups for g in range(args.layer_groups + 1)]
    requests = [_tokens_request(local, remote, num_tokens, layers) for layers in itertools.pairwise(groups)]
    async with other_process(args, sources) as (_, identities):
        reader = Reader.make(args, readers, "reader")
        link = await reader.transport.connect(as_one_worker(identities, "source"), timeout_s=TIMEOUT_S)
        copy = make_ranges_copy(
            readers, sources, requests, memory_device(args.device, "--device"), spread=reader.transport.spread
        )
        seconds: list[float] = []
        copies: list[float] = []
        reports: list[FetchReport] = []
        for round_number in range(8 if args.quick else 16):
            start = time.perf_counter()
            handles = [reader.transport.fetch(link, request, timeout_s=TIMEOUT_S) for request in requests]
            reports = [await handle.wait() for handle in handles]
            elapsed = time.perf_counter() - start
            start = time.perf_counter()
            copy()
            if round_number:
                seconds.append(elapsed)
                copies.append(time.perf_counter() - start)
        await reader.close()
    return [
        make_row(
            f"{num_tokens} tokens, {_shown(sources)} -> {_shown(readers)}, {args.layer_groups} groups",
            block_bytes=sum(pool.block_bytes for pool in readers),
            num_blocks=-(-num_tokens // local.block_size),
            scattered=False,
            seconds=statistics.median(seconds),
            num_bytes=sum(report.num_bytes for report in reports),
            copy_seconds=statistics.median(copies),
            num_ranges=sum(report.num_ranges for report in reports),
            num_posts=sum(report.num_posts for report in reports),
        )
    ]


def _shown(ranks: list[KvGeometry]) -> str:
    return f"TP{len(ranks)} {ranks[0].block_size} a block {ranks[0].dtype}"


def pools_of(text: str, flag: str) -> list[KvGeometry]:
    """The pools of a worker's ranks: SmolLM2's shape in blocks of 16 tokens with the ``FIELD=VALUE`` of ``text``.

    ``tp_size`` ranks share the heads, unless a field says which part of them a single rank has. Raises ``ConfigError``.
    """
    given = dict(item.partition("=")[::2] for item in text.split(",") if item)
    fields: dict[str, Any] = {"block_size": 16, "num_layers": 30, "num_kv_heads": 3, "head_dim": 64, **given}
    fields.setdefault("dtype", "bfloat16")
    fields.setdefault("num_kv_heads_local", fields["num_kv_heads"])
    try:
        block_size = max(1, int(fields["block_size"]))
        fields.setdefault("num_blocks", -(-_PAIR_TOKENS // block_size) + NUM_RESERVED_BLOCKS)
        pool = msgspec.convert(fields, KvGeometry, strict=False)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}", param=flag) from error
    if unknown := fields.keys() - set(KvGeometry.__struct_fields__):
        raise ConfigError(f"{flag} {text}: a geometry has no {', '.join(sorted(unknown))}", param=flag)
    if pool.tp_size > MAX_RANKS:
        raise ConfigError(f"{flag} {text}: tp_size must be at most {MAX_RANKS}", param=flag)
    if pool.num_blocks <= NUM_RESERVED_BLOCKS:
        raise ConfigError(f"{flag} {text}: num_blocks must be above {NUM_RESERVED_BLOCKS}", param=flag)
    return [pool] if _RANK_FIELDS & given.keys() else deal_heads(pool, pool.tp_size)


def _tokens_request(local: KvGeometry, remote: KvGeometry, num_tokens: int, layers: tuple[int, int]) -> FetchRequest:
    return FetchRequest(
        remote_block_ids=np.arange(-(-num_tokens // remote.block_size), dtype=np.int32),
        local_block_ids=np.arange(-(-num_tokens // local.block_size), dtype=np.int32),
        start_token=0,
        end_token=num_tokens,
        layer_start=layers[0],
        layer_end=layers[1],
    )


# --- load


async def load(args: argparse.Namespace) -> list[Row]:
    """K requests at a time of 64 blocks of 64 KiB each: what sharing posts and the link makes of it."""
    blocks = 64
    numbers: list[int] = args.requests
    geometry = make_geometry(64 * KIB, blocks * max(numbers))
    rows: list[Row] = []
    async with other_process(args, [geometry]) as (_, (peer,)):
        transport, _identity = make_transport(args, geometry, "reader")
        link = await transport.connect(peer, timeout_s=TIMEOUT_S)
        rng = np.random.default_rng(0)
        for number in numbers:
            ids = rng.permutation(blocks * number).astype(np.int32).reshape(number, blocks)
            copy = make_block_copy(
                geometry.block_bytes, blocks * number, memory_device(args.device, "--device"), ids.ravel()
            )
            walls: list[float] = []
            copies: list[float] = []
            slowest: list[float] = []
            posts: list[int] = []
            for round_number in range(8 if args.quick else 30):
                start = time.perf_counter()
                handles = [
                    transport.fetch(link, make_request(part, np.sort(part)), timeout_s=TIMEOUT_S) for part in ids
                ]
                reports = [await handle.wait() for handle in handles]
                wall = time.perf_counter() - start
                start = time.perf_counter()
                copy()
                if round_number:
                    walls.append(wall)
                    copies.append(time.perf_counter() - start)
                    slowest.append(max(report.transfer_s for report in reports))
                    posts.append(sum(report.num_posts for report in reports))
            wall, copied = statistics.median(walls), statistics.median(copies)
            num_bytes = number * blocks * geometry.block_bytes
            rows.append(
                make_row(
                    f"{number} requests",
                    block_bytes=geometry.block_bytes,
                    num_blocks=blocks,
                    scattered=True,
                    seconds=wall,
                    num_bytes=num_bytes,
                    copy_seconds=copied,
                    slowest_seconds=statistics.median(slowest),
                    posts_a_request=statistics.median(posts) / number,
                )
            )
        await transport.close()
    return rows


# --- setup

_SETUP_BLOCKS = 1024


async def setup(args: argparse.Namespace) -> list[Row]:
    """What connecting costs, what the first READ, and what a pair that does nothing."""
    geometry = make_geometry(64 * KIB, _SETUP_BLOCKS)
    rounds = 3 if args.quick else 9
    seconds: dict[str, list[float]] = {}
    reads = ("first READ of 64 MiB", "next READ of 64 MiB")

    def note(op: str, start: float) -> None:
        seconds.setdefault(op, []).append(time.perf_counter() - start)

    rows: list[Row] = []
    async with other_process(args, [geometry]) as (process, (peer,)):
        transport: KvTransport | None = None
        copy = make_block_copy(geometry.block_bytes, _SETUP_BLOCKS, memory_device(args.device, "--device"))
        num_bytes = _SETUP_BLOCKS * geometry.block_bytes
        for index in range(rounds):
            if transport is not None:
                await transport.close()
            start = time.perf_counter()
            transport, _ = make_transport(args, geometry, f"reader-{index}")
            note("create transport", start)
            start = time.perf_counter()
            link = await transport.connect(peer, timeout_s=TIMEOUT_S)
            note("connect, canary included", start)
            ids = np.arange(_SETUP_BLOCKS, dtype=np.int32)
            for op in reads:
                start = time.perf_counter()
                await transport.fetch(link, make_request(ids, ids), timeout_s=TIMEOUT_S).wait()
                note(op, start)
                start = time.perf_counter()
                copy()
                note(f"copy of the {op}", start)
            transport.disconnect(link)
            start = time.perf_counter()
            link = await transport.connect(peer, timeout_s=TIMEOUT_S)
            note("reconnect, canary included", start)
        medians = {op: statistics.median(values) for op, values in seconds.items()}
        for op in ("create transport", "connect, canary included", *reads, "reconnect, canary included"):
            if op in reads:
                copied = medians[f"copy of the {op}"]
                rows.append(
                    make_row(
                        op,
                        block_bytes=geometry.block_bytes,
                        num_blocks=_SETUP_BLOCKS,
                        scattered=False,
                        seconds=medians[op],
                        num_bytes=num_bytes,
                        copy_seconds=copied,
                    )
                )
            else:
                rows.append(make_row(op, seconds=medians[op]))
        rows += await _idle_rows(process, 2.0 if args.quick else 5.0)
        if transport is not None:
            await transport.close()
    return rows


async def _idle_rows(process: subprocess.Popen[str], duration_s: float) -> list[Row]:
    """CPU seconds a second that a connected pair costs while nothing moves."""
    rows: list[Row] = []
    source = psutil.Process(process.pid)
    for state in ("expect readers", "expect none"):
        tell(process, state)
        await asyncio.sleep(0.5)
        before, start = [_cpu_s(source), time.process_time()], time.perf_counter()
        await asyncio.sleep(duration_s)
        elapsed = time.perf_counter() - start
        source_s, reader_s = _cpu_s(source) - before[0], time.process_time() - before[1]
        rows.append(make_row(f"source, {state}", cpu_share=source_s / elapsed))
        if state == "expect none":
            rows.append(make_row("idle reader", cpu_share=reader_s / elapsed))
    return rows


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
