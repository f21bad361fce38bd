"""Where the ranks of a worker meet to compute together, and joining them there."""

import os
import socket

import torch

from twopool.engine.loading import rank_device
from twopool.engine.model_runner import WARM_UP_ROWS
from twopool.engine.rank_messages import MeetingPlace, Rendezvous, SharedSegment
from twopool.kernels.collectives import Collective, SharedMemoryCollective, create_segment, distributed_group
from twopool.models.sharding import Shard, ShardPlan, segment_bytes
from twopool.protocol.config import WorkerConfig


def choose(config: WorkerConfig, plan: ShardPlan) -> tuple[MeetingPlace, int | None]:
    """The place for ranks of this host, and the descriptor they inherit (the caller's to close), if there is one.

    Shared memory on the CPU, where the native library was built; torch.distributed between GPUs and without it.
    """
    if rank_device(config.device, 0).type == "cpu":
        max_bytes = segment_bytes(plan, max(config.max_num_batched_tokens, *WARM_UP_ROWS))
        try:
            fd = create_segment(plan.size, max_bytes)
        except (OSError, RuntimeError):
            return Rendezvous(backend="gloo", host="127.0.0.1", port=_free_port()), None
        return SharedSegment(fd=fd, max_bytes=max_bytes), fd
    return Rendezvous(backend="nccl", host="127.0.0.1", port=_free_port()), None


def join(place: MeetingPlace, shard: Shard, config: WorkerConfig) -> Collective:
    """This rank's side. Blocks until all ranks are there, where the place is torch's. Raises ``CollectiveError``."""
    if isinstance(place, SharedSegment):
        try:
            return SharedMemoryCollective(place.fd, shard.rank, shard.size, place.max_bytes)
        finally:
            os.close(place.fd)
    device = rank_device(config.device, shard.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return distributed_group(
        backend=place.backend, rank=shard.rank, size=shard.size, master_addr=place.host, master_port=place.port
    )


def _free_port() -> int:
    """One that was free a moment ago: whoever takes it first, the ranks find out when they join."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
