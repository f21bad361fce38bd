"""Pools of the transfer benchmarks: to read from, in a process of their own on this host, and to read into."""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from twopool.kv_transfer.factory import create_transport
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchRequest, KvTransport
from twopool.protocol.errors import TwopoolError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import Epoch, WorkerId, new_epoch
from twopool.protocol.messages import PeerIdentity
from twopool.scripts.bench_copies import make_pool
from twopool.scripts.bench_link_flags import link_config, link_flags, memory_device

TOKENS = 16
TIMEOUT_S = 60.0
_OFFER = "pools: "


async def offer(args: argparse.Namespace) -> None:
    """Offers one pool for each geometry; prints the identities, then does as told, a line at a time, until EOF."""
    identities: list[PeerIdentity] = []
    transports: list[KvTransport] = []
    epoch = new_epoch()  # one for all: pools offered together may be ranks of one worker
    for geometry in msgspec.json.decode(args.geometries, type=list[KvGeometry]):
        transport, identity = make_transport(args, geometry, f"source-{len(identities)}", epoch)
        transport.expect_readers(True)
        transports.append(transport)
        identities.append(identity)
    print(_OFFER + msgspec.msgpack.encode(identities).hex(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for transport in transports:
            transport.expect_readers(line.strip() == "expect readers")
    for transport in transports:
        await transport.close()


@asynccontextmanager
async def other_process(
    args: argparse.Namespace, geometries: list[KvGeometry]
) -> AsyncIterator[tuple[subprocess.Popen[str], list[PeerIdentity]]]:
    command = [sys.executable, "-m", "twopool.scripts.bench_transfer", "source"]
    command += [*link_flags(args), f"--device={args.source_device or args.device}"]
    command += ["--geometries", msgspec.json.encode(geometries).decode()]
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop yet
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    cpus = _share_cpus(process.pid)
    try:
        offer = await asyncio.wait_for(asyncio.to_thread(_read_offer, process), TIMEOUT_S)
        yield process, msgspec.msgpack.decode(bytes.fromhex(offer), type=list[PeerIdentity])
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
        os.sched_setaffinity(0, cpus)


def _read_offer(process: subprocess.Popen[str]) -> str:
    """What ``offer`` prints. UCX writes its warnings to standard output, too."""
    for line in process.stdout or ():
        if line.startswith(_OFFER):
            return line.removeprefix(_OFFER)
        print(line, end="", file=sys.stderr)
    raise TwopoolError("the source process did not start")


def _share_cpus(pid: int) -> set[int]:
    """Half of this process's CPUs for each of both, as workers of one host have CPUs of their own; all of them."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(pid, cpus[len(cpus) // 2 :])
        os.sched_setaffinity(0, cpus[: len(cpus) // 2])
    return set(cpus)


def tell(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()


def make_geometry(block_bytes: int, num_blocks: int) -> KvGeometry:
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


def make_transport(
    args: argparse.Namespace, geometry: KvGeometry, name: str, epoch: Epoch | None = None
) -> tuple[KvTransport, PeerIdentity]:
    epoch = new_epoch() if epoch is None else epoch
    device = memory_device(args.device, "--device")
    if device.type != "cpu":
        geometry = replace(geometry, memory="device", device_index=device.index or 0)
    config = link_config(args)
    transport = create_transport(
        "nixl",
        pool=make_pool(geometry.pool_bytes, device, shared=config.maps_same_host),
        geometry=geometry,
        epoch=epoch,
        agent_name=name,
        backend=config.nixl_backend,
        ucx=config.ucx_settings,
        map_same_host=config.maps_same_host,
        convert_dtype=True,
        loop=asyncio.get_running_loop(),
    )
    identity = PeerIdentity(
        worker_id=WorkerId(name), role="prefill", epoch=epoch, transport="nixl", ranks=transport.describe()
    )
    return transport, identity


def make_request(
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
