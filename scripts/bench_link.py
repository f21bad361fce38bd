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
import torch

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, KvTransport
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry
from twopool.scripts.bench_pools import (
    TIMEOUT_S,
    make_copy,
    make_geometry,
    make_pool,
    make_request,
    make_transport,
    other_process,
    tell,
)
from twopool.scripts.bench_rows import KIB, Row, make_row

# --- pair


async def pair(args: argparse.Namespace) -> list[Row]:
    """2,048 tokens between two pools of SmolLM2's shape, each side's fields changed as asked."""
    local, remote = (_changed(getattr(args, side)) for side in ("local", "remote"))
    rows: list[Row] = []
    async with other_process(args, [remote]) as (_, (peer,)):
        transport, _identity = make_transport(args, local, "reader")
        link = await transport.connect(peer, timeout_s=TIMEOUT_S)
        num_tokens = min(2048, (local.num_blocks - 1) * local.block_size, (remote.num_blocks - 1) * remote.block_size)
        groups = [local.num_layers * g // args.layer_groups for g in range(args.layer_groups + 1)]
        source, target = (
            make_pool(max(local.pool_bytes, remote.pool_bytes), torch.device("cpu")).numpy() for _ in range(2)
        )
        seconds: list[float] = []
        copies: list[float] = []
        reports: list[FetchReport] = []
        for round_number in range(8 if args.quick else 16):
            start = time.perf_counter()
            handles = [
                transport.fetch(link, _tokens_request(local, remote, num_tokens, layers), timeout_s=TIMEOUT_S)
                for layers in itertools.pairwise(groups)
            ]
            reports = [await handle.wait() for handle in handles]
            elapsed = time.perf_counter() - start
            num_bytes = sum(report.num_bytes for report in reports)
            start = time.perf_counter()
            np.copyto(target[:num_bytes], source[:num_bytes])
            if round_number:
                seconds.append(elapsed)
                copies.append(time.perf_counter() - start)
        await transport.close()
    taken, copied = statistics.median(seconds), statistics.median(copies)
    rows.append(
        {
            "op": f"{num_tokens} tokens, {_shown(remote)} -> {_shown(local)}, {args.layer_groups} groups",
            "block_bytes": local.block_bytes,
            "num_blocks": -(-num_tokens // local.block_size),
            "scattered": False,
            "num_ranges": sum(report.num_ranges for report in reports),
            "num_posts": sum(report.num_posts for report in reports),
            "seconds": taken,
            "gb_per_s": num_bytes / taken / 1e9,
            "memcpy_gb_per_s": num_bytes / copied / 1e9,
            "ratio": copied / taken,
        }
    )
    return rows


def _shown(geometry: KvGeometry) -> str:
    return f"{geometry.block_size} a block {geometry.dtype}"


def _changed(text: str) -> KvGeometry:
    """SmolLM2's geometry in blocks of 16 tokens with the ``FIELD=VALUE`` of ``text``; raises ``ConfigError``."""
    fields: dict[str, Any] = {
        "num_blocks": 2048 // 16 + NUM_RESERVED_BLOCKS,
        "block_size": 16,
        "num_layers": 30,
        "num_kv_heads": 3,
        "num_kv_heads_local": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    try:
        fields |= dict(item.split("=", 1) for item in text.split(",") if item)
        return msgspec.convert(fields, KvGeometry, strict=False)
    except ValueError as error:
        raise ConfigError(f"geometry {text!r}: {error}", param="--local") from error


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
    numbers = [int(text) for text in args.requests.split(",")]
    geometry = make_geometry(64 * KIB, blocks * max(numbers))
    rows: list[Row] = []
    async with other_process(args, [geometry]) as (_, (peer,)):
        transport, _identity = make_transport(args, geometry, "reader")
        link = await transport.connect(peer, timeout_s=TIMEOUT_S)
        rng = np.random.default_rng(0)
        shape = (geometry.num_blocks, geometry.block_bytes)
        source, target = (make_pool(geometry.pool_bytes, torch.device("cpu")).numpy().reshape(shape) for _ in range(2))
        for number in numbers:
            ids = rng.permutation(blocks * number).astype(np.int32).reshape(number, blocks)
            copy = make_copy(source, target, ids.ravel(), blocks * number)
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
        source, target = (make_pool(geometry.pool_bytes, torch.device("cpu")).numpy() for _ in range(2))
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
                np.copyto(target[:num_bytes], source[:num_bytes])
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
