"""What the ranks of a tensor-parallel group compute together: sums, the logits' columns, meeting.

Sums are taken in float32 in the order of the ranks, so that every rank gets the same bits, and a row the same bits in
any batch. A ring, or a library that picks its algorithm by size, would sum a row in an order that depends on where it
lies; so `DistributedCollective` gathers and adds.

Every rank calls the same functions in the same order with equal shapes. A rank that cannot go on calls `abort`, or dies
and somebody calls it for the group: the others then raise `CollectiveError` at once instead of waiting.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twopool.protocol.errors import CollectiveError

DEFAULT_TIMEOUT_S: Final = 30.0
"""How long a rank waits for the others at one point: the longest layer of the longest step must be shorter."""


class Collective(Protocol):
    """One rank's side of its group. One thread at a time may call it, but `abort` comes from any."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace tensor [rows, columns], contiguous, of float32, bfloat16 or float16, by its sum over the ranks.

        The sum is rounded to the tensor's dtype once. Without rows it is a `barrier`. Raises CollectiveError.
        """
        ...

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: [rows, sum(widths)] float32, the ranks' columns side by side; the others: None.

        tensor: [rows, widths[rank]] float32. Raises CollectiveError.
        """
        ...

    def barrier(self) -> None:
        """Wait until every rank is here. Raises CollectiveError."""
        ...

    def abort(self) -> None:
        """Make every rank that waits, or will, raise CollectiveError. From any thread; harmless when repeated."""
        ...

    def close(self) -> None:
        """Let go of what is held; harmless when repeated. The other ranks are not told."""
        ...


class DistributedCollective:
    """Over a torch.distributed process group: NCCL between GPUs, gloo between CPUs and hosts.

    ``abort`` reaches the other ranks as the loss of a connection, or, where the backend has no such thing, as their
    time-out.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: default the world; its time-out is the longest wait for the others."""
        self._group = group if group is not None else dist.distributed_c10d._get_default_group()
        self._rank = dist.get_rank(self._group)
        self._size = dist.get_world_size(self._group)
        self._aborted = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce_(self, tensor: Tensor) -> None:
        if tensor.shape[0] == 0:
            self.barrier()
            return
        parts = self._gather(tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total)

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        if tensor.shape[0] == 0:
            self.barrier()
            return tensor.new_empty((0, sum(widths))) if self._rank == 0 else None
        # Backends gather equal shapes only.
        padded = tensor.new_zeros((tensor.shape[0], max(widths)))
        padded[:, : tensor.shape[1]] = tensor
        parts = self._gather(padded)
        if self._rank:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def barrier(self) -> None:
        self._run(lambda: dist.barrier(self._group))

    def abort(self) -> None:
        self._aborted = True
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            try:
                abort()
            except RuntimeError:  # a group that failed already
                return

    def close(self) -> None:
        self._aborted = True

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._run(lambda: dist.all_gather(parts, tensor, self._group))
        return parts

    def _run(self, call: Any) -> None:
        if self._aborted:
            raise CollectiveError(f"rank {self._rank}'s tensor-parallel group has ended")
        try:
            call()
        except RuntimeError as error:  # what torch.distributed raises for lost peers and time-outs
            self._aborted = True
            raise CollectiveError(f"rank {self._rank} lost its tensor-parallel group: {error}") from error


def distributed_group(
    *, backend: str, rank: int, size: int, master_addr: str, master_port: int, timeout_s: float = DEFAULT_TIMEOUT_S
) -> DistributedCollective:
    """Join the process group that rank 0 opens at master_addr:master_port, once a process.

    Raises CollectiveError when the others do not come within timeout_s.
    """
    address = f"[{master_addr}]" if ":" in master_addr else master_addr
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{master_port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"rank {rank} cannot join its group at {address}:{master_port}: {error}") from error
    return DistributedCollective()
