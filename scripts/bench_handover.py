"""The part of `bench_transfer.py` that starts workers: a real prefill of N tokens handed over to a decode worker.

Every request has a fresh prompt. Hidden and exposed time are what the decode worker reports and the router exports:
`exposed_seconds` is all a request waited for after its first token was known, the confirmation included,
`exposed_read_seconds` (a mean) the READs' part of it. First and second token are stamped where they reach the client;
the tokens after the second give the decode step to compare with. ``seconds`` is all of a request's READs, summed; the
copy next to them is one of as many bytes, made by this process while the workers have nothing to do. Which blocks a
worker takes is its own affair: there is no telling whether they were scattered.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from twopool.models.config import DecoderConfig
from twopool.models.store import resolve_model
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import TwopoolError
from twopool.scripts.bench_copies import make_block_copy
from twopool.scripts.bench_link_flags import link_flags, memory_device, positive
from twopool.scripts.bench_rows import Row, make_row

START_TIMEOUT_S = 300.0
NUM_OUTPUT = 6
_READ_SECONDS = "twopool_nixl_xfer_time_seconds_sum"
_HIDDEN_SECONDS = "twopool_kv_transfer_hidden_seconds_total"
_POSTS = "twopool_kv_transfer_posts_total"
_WORKER_FIGURES = (_READ_SECONDS, _HIDDEN_SECONDS, _POSTS)
_ROUTER_FIGURES = ("twopool_handover_transfer_seconds_sum", "twopool_handover_exposed_seconds_sum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as in `twopool up`")
    parser.add_argument("--num-tokens", type=positive, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--rounds", type=positive, help="requests (default: 10, 4 with --quick)")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at a time (default: 1)")
    parser.add_argument("--device", help="where the workers compute, as in `twopool up` (default: auto)")
    parser.add_argument(
        "--worker-flag",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="passed to `twopool up` after all others, repeatable",
    )


async def measure(args: argparse.Namespace) -> list[Row]:
    rounds = args.rounds or (4 if args.quick else 10)
    ids = range(100, min(20000, DecoderConfig.from_folder(resolve_model(args.model)).vocab_size))
    async with _server(args) as client:
        first = await _request(client, ids, args.num_tokens)  # it warms page tables and caches up
        num_bytes: int = first.timings["kv_bytes_moved"]
        copy = make_block_copy(num_bytes, 1, _memory(args))  # as many bytes in one piece
        await asyncio.sleep(1.0)  # a heartbeat
        before = await _figures(client, _WORKER_FIGURES)
        answers: list[_Answer] = []
        reports: list[dict[str, float]] = []
        copies: list[float] = []
        last = await _figures(client, _ROUTER_FIGURES)
        for _ in range(0, rounds, args.concurrency):
            asked = (_request(client, ids, args.num_tokens) for _ in range(args.concurrency))
            answers += await asyncio.gather(*asked)
            now = await _figures(client, _ROUTER_FIGURES)
            reports.append({name: (now[name] - last[name]) / args.concurrency for name in now})
            last = now
            start = time.perf_counter()
            copy()
            copies.append(time.perf_counter() - start)
        await asyncio.sleep(1.0)  # a heartbeat
        after = await _figures(client, _WORKER_FIGURES)
    count = len(answers)
    totals = {name: (after[name] - before[name]) / count for name in before}
    streams = [answer.stamps for answer in answers]
    gaps = [later - earlier for stamps in streams for earlier, later in itertools.pairwise(stamps[2:])]
    transfer_s, exposed_s = (statistics.median(report[name] for report in reports) for name in _ROUTER_FIGURES)
    num_blocks = -(-args.num_tokens // _block_size(args))
    return [
        make_row(
            f"handover of {args.num_tokens} tokens",
            block_bytes=num_bytes // num_blocks,  # whole blocks move, so that this is what one has on all ranks
            num_blocks=num_blocks,
            seconds=transfer_s,
            num_bytes=num_bytes,
            copy_seconds=statistics.median(copies),
            requests=count,
            bytes=num_bytes,
            num_ranges=_median_ranges(answers),
            num_posts=round(totals[_POSTS], 1),
            hidden_seconds=totals[_HIDDEN_SECONDS],
            exposed_seconds=exposed_s,
            exposed_read_seconds=totals[_READ_SECONDS] - totals[_HIDDEN_SECONDS],
            first_token_seconds=statistics.median(stamps[1] - stamps[0] for stamps in streams),
            first_to_second_seconds=statistics.median(stamps[2] - stamps[1] for stamps in streams),
            decode_step_seconds=statistics.median(gaps),
        )
    ]


@dataclass(frozen=True)
class _Answer:
    """When the request was sent and each of its tokens came (``time.perf_counter``), and what the router says of it."""

    stamps: list[float]
    timings: dict[str, Any]


async def _request(client: httpx.AsyncClient, ids: range, num_tokens: int) -> _Answer:
    prompt = random.SystemRandom().choices(ids, k=num_tokens)
    body = {"model": "bench", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    timings: dict[str, Any] = {}
    stamps = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "timings": True}) as response:
        if response.status_code != 200:
            raise TwopoolError(f"the router answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise TwopoolError(f"the request failed: {event['error']}")
                if event["choices"]:
                    stamps.append(time.perf_counter())
                timings = event.get("timings", timings)
    return _Answer(stamps, timings)


def _median_ranges(answers: list[_Answer]) -> float | None:
    """Contiguous ranges of KV that a request's READs were made of; ``None`` where the router does not tell."""
    ranges = [answer.timings["kv_ranges"] for answer in answers if answer.timings.get("kv_ranges") is not None]
    return statistics.median(ranges) if ranges else None


def _memory(args: argparse.Namespace) -> torch.device:
    """Of the kind that the workers' pools are in."""
    return memory_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"), "--device")


def _block_size(args: argparse.Namespace) -> int:
    """Tokens in a block of the workers."""
    given = [flag.partition("=")[2] for flag in args.worker_flag if flag.startswith("block-size=")]
    return int(given[-1]) if given else WorkerConfig.block_size


async def _figures(client: httpx.AsyncClient, names: tuple[str, ...]) -> dict[str, float]:
    """Each metric, summed over its labels."""
    sums = dict.fromkeys(names, 0.0)
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", (await client.get("/metrics")).text, re.MULTILINE):
        if name in sums:
            sums[name] += float(value)
    return sums


@asynccontextmanager
async def _server(args: argparse.Namespace) -> AsyncIterator[httpx.AsyncClient]:
    """One prefill and one decode worker behind a router on a free port."""
    port = _free_port()
    program = [sys.executable, "-m", "twopool.scripts.cli"]
    process = await asyncio.create_subprocess_exec(*program, *up_command(args, port), stdout=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            await _until_ready(client, process)
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def up_command(args: argparse.Namespace, port: int) -> list[str]:
    """What ``twopool`` is called with: the flags of the benchmark are the workers' own."""
    command = ["up", "--prefill=1", "--decode=1", f"--model={args.model}", "--served-model-name=bench"]
    command += [f"--port={port}", *link_flags(args)]
    if args.device is not None:
        command.append(f"--device={args.device}")
    return command + [f"--{flag}" for flag in args.worker_flag]


async def _until_ready(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            if process.returncode is not None:
                raise TwopoolError(f"`twopool up` ended with status {process.returncode}")
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            await asyncio.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
