"""Where the ranks of a worker meet to compute together, and joining them there."""

import os
import socket
from dataclasses import dataclass

import torch

from twopool.engine.model_runner import WARM_UP_ROWS
from twopool.engine.rank_messages import MeetingPlace, Rendezvous, SharedSegment
from twopool.kernels.collectives import Collective, SharedMemoryCollective, create_segment, distributed_group
from twopool.models.sharding import Shard, ShardPlan, segment_bytes
from twopool.protocol.config import WorkerConfig
from twopool.protocol.endpoints import resolved
from twopool.protocol.errors import CollectiveError


@dataclass(frozen=True)
class Meeting:
    """The place, and what rank 0's process holds of it: one of both, for ``join`` to use up."""

    place: MeetingPlace
    segment: int | None = None
    """a descriptor that the other ranks of this host inherit"""
    listener: socket.socket | None = None
    """where the others find each other"""

    def close(self) -> None:
        """Of a meeting that nobody joined."""
        if self.segment is not None:
            os.close(self.segment)
        if self.listener is not None:
            self.listener.close()


def choose(config: WorkerConfig, plan: ShardPlan, device: torch.device) -> Meeting:
    """The place for the ranks of a worker whose first one computes on ``device``.

    Shared memory where all of them are CPUs of this host and the native library was built; torch.distributed between
    GPUs, between nodes and without it. Raises ``CollectiveError`` where this host cannot listen.
    """
    if device.type == "cpu" and config.nnodes == 1:
        max_bytes = segment_bytes(plan, max(config.max_num_batched_tokens, *WARM_UP_ROWS))
        try:
            fd = create_segment(plan.size, max_bytes)
        except (OSError, RuntimeError):
            pass
        else:
            return Meeting(SharedSegment(fd=fd, max_bytes=max_bytes), segment=fd)
    host = resolved(config.master_addr, param="--master-addr") if config.nnodes > 1 else "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=plan.size)
    except OSError as error:
        raise CollectiveError(f"the ranks cannot meet at {host}: {error.strerror}") from error
    port = listener.getsockname()[1]
    return Meeting(
        Rendezvous(backend="gloo" if device.type == "cpu" else "nccl", host=host, port=port), listener=listener
    )


def join(
    place: MeetingPlace, shard: Shard, device: torch.device, *, listener: socket.socket | None = None
) -> Collective:
    """This rank's side. Blocks until all ranks are there, where the place is torch's. Raises ``CollectiveError``.

    ``listener``: rank 0's, of ``choose``.
    """
    if isinstance(place, SharedSegment):
        try:
            return SharedMemoryCollective(place.fd, shard.rank, shard.size, place.max_bytes)
        finally:
            os.close(place.fd)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return distributed_group(
        backend=place.backend,
        rank=shard.rank,
        size=shard.size,
        master_addr=place.host,
        master_port=place.port,
        listener=listener,
    )
