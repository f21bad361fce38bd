"""The part of `bench_transfer.py` that starts workers: a real prefill of N tokens handed over to a decode worker.

Every request has a fresh prompt. Hidden and exposed time are what the decode worker reports and the router exports:
`exposed_seconds` is all a request waited for after its first token was known, the confirmation included,
`exposed_read_seconds` (a mean) the READs' part of it. First and second token are stamped where they reach the client;
the tokens after the second give the decode step to compare with.
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
from typing import Any

import httpx

from twopool.protocol.errors import TwopoolError

Row = dict[str, Any]
START_TIMEOUT_S = 300.0
NUM_OUTPUT = 6
_WORKER_FIGURES = tuple(f"twopool_kv_transfer_{name}_total" for name in ("seconds", "hidden_seconds", "bytes", "posts"))
_ROUTER_FIGURES = ("twopool_handover_transfer_seconds_sum", "twopool_handover_exposed_seconds_sum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as in `twopool up`")
    parser.add_argument("--num-tokens", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--rounds", type=int, help="requests (default: 10, 4 with --quick)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time (default: 1)")
    parser.add_argument(
        "--worker-flag", action="append", default=[], metavar="FLAG=VALUE", help="passed to `twopool up`, repeatable"
    )


async def measure(args: argparse.Namespace) -> list[Row]:
    rounds = args.rounds or (4 if args.quick else 10)
    async with _server(args) as client:
        await _request(client, args.num_tokens)  # the first one warms page tables and caches up
        await asyncio.sleep(1.0)  # a heartbeat
        before = await _figures(client, _WORKER_FIGURES)
        streams: list[list[float]] = []
        reports: list[dict[str, float]] = []
        last = await _figures(client, _ROUTER_FIGURES)
        for _ in range(0, rounds, args.concurrency):
            asked = (_request(client, args.num_tokens) for _ in range(args.concurrency))
            streams += await asyncio.gather(*asked)
            now = await _figures(client, _ROUTER_FIGURES)
            reports.append({name: (now[name] - last[name]) / args.concurrency for name in now})
            last = now
        await asyncio.sleep(1.0)  # a heartbeat
        after = await _figures(client, _WORKER_FIGURES)
    count = len(streams)
    totals = {name: (after[name] - before[name]) / count for name in before}
    gaps = [later - earlier for stream in streams for earlier, later in itertools.pairwise(stream[2:])]
    transfer_s, exposed_s = (statistics.median(report[name] for report in reports) for name in _ROUTER_FIGURES)
    return [
        {
            "op": f"handover of {args.num_tokens} tokens",
            "requests": count,
            "bytes": round(totals["twopool_kv_transfer_bytes_total"]),
            "posts": round(totals["twopool_kv_transfer_posts_total"], 1),
            "transfer_seconds": transfer_s,
            "hidden_seconds": totals["twopool_kv_transfer_hidden_seconds_total"],
            "exposed_seconds": exposed_s,
            "exposed_read_seconds": totals["twopool_kv_transfer_seconds_total"]
            - totals["twopool_kv_transfer_hidden_seconds_total"],
            "first_token_seconds": statistics.median(stream[1] - stream[0] for stream in streams),
            "first_to_second_seconds": statistics.median(stream[2] - stream[1] for stream in streams),
            "decode_step_seconds": statistics.median(gaps),
        }
    ]


async def _request(client: httpx.AsyncClient, num_tokens: int) -> list[float]:
    """When the request was sent and when each of its tokens came (``time.perf_counter``)."""
    prompt = random.SystemRandom().choices(range(100, 20000), k=num_tokens)
    body = {"model": "bench", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    stamps = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise TwopoolError(f"the router answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise TwopoolError(f"the request failed: {event['error']}")
                stamps.append(time.perf_counter())
    return stamps


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
    command = [sys.executable, "-m", "twopool.scripts.cli", "up", "--prefill", "1", "--decode", "1"]
    command += ["--model", args.model, "--served-model-name", "bench", "--port", str(_free_port())]
    command += [f"--{flag}" for flag in args.worker_flag]
    port = command[command.index("--port") + 1]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            await _until_ready(client, process)
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


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
