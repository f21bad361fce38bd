"""What the ranks of a tensor-parallel group compute together: sums, the logits' columns, meeting.

Sums are taken in float32 in the order of the ranks, so that every rank gets the same bits, and a row the same bits in
any batch. A ring, or a library that picks its algorithm by size, would sum a row in an order that depends on where it
lies; so `DistributedCollective` gathers and adds.

Every rank calls the same functions in the same order with equal shapes. A rank that cannot go on calls `abort`, or dies
and somebody calls it for the group: the others then raise `CollectiveError` at once instead of waiting.
"""

import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twopool.kernels.native_library import GROUP_LOST, native_library
from twopool.protocol.endpoints import bracketed, interface_towards
from twopool.protocol.errors import CollectiveError

DEFAULT_TIMEOUT_S: Final = 30.0
"""How long a rank waits for the others at one point: the longest layer of the longest step must be shorter."""
JOIN_TIMEOUT_S: Final = 120.0
"""How long the first of the ranks waits for the last one to come, whose libraries may load slowly."""


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


def create_segment(size: int, max_bytes: int) -> int:
    """-> the descriptor of anonymous shared memory for `size` ranks on this host, which the caller closes.

    max_bytes: what a rank hands to the others at once at most, see `twopool.models.sharding.segment_bytes`. The ranks'
    processes inherit the descriptor (``pass_fds``); when the last of them is gone, so is the memory.

    Raises OSError or RuntimeError without the native library, ValueError for sizes out of range.
    """
    library = native_library()
    fd = ctypes.c_int32(-1)
    if library.twopool_segment_create(size, max_bytes, ctypes.byref(fd)):
        raise ValueError(library.twopool_last_error().decode())
    return fd.value


class SharedMemoryCollective:
    """Over shared memory of one host: the ranks meet at a word, spin briefly, then sleep on it as a futex.

    Inside a native step the sums are taken by the step itself, over the same memory.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        max_bytes: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        spin_us: int | None = None,
    ) -> None:
        """fd, size, max_bytes: of `create_segment`; the descriptor may be closed afterwards.

        timeout_s: how long to wait for the others at one point. spin_us: how long to look before sleeping, 0 where a
        rank may have to wait for another one's CPU; default 200 from the second meeting on, where the CPUs that the
        ranks' processes may use are at least as many as the ranks.

        Raises ValueError for a segment of another group.
        """
        self._handle: ctypes.c_void_p | None = None
        self._lock = threading.Lock()  # abort and close may come from two threads
        self._library = native_library()
        self._rank = rank
        self._size = size
        handle = ctypes.c_void_p()
        timeout_ms = max(1, round(timeout_s * 1000))
        arguments = (fd, rank, size, max_bytes, -1 if spin_us is None else spin_us, timeout_ms)
        self._check(self._library.twopool_collective_open(*arguments, ctypes.byref(handle)))
        self._handle = handle

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def handle(self) -> ctypes.c_void_p:
        """What the native functions take; a native step that was given it goes on working after `close`."""
        if self._handle is None:
            raise CollectiveError(f"rank {self._rank}'s collective is closed")
        return self._handle

    @property
    def spin_us(self) -> int:
        """How long a wait looks before it sleeps."""
        return int(self._library.twopool_collective_spin_us(self.handle))

    def all_reduce_(self, tensor: Tensor) -> None:
        if tensor.shape[0] == 0:
            self.barrier()
            return
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError("ranks share contiguous tensors on the CPU")
        total = tensor if tensor.dtype == torch.float32 else tensor.float()
        columns = total.numel() // total.shape[0]
        self._check(self._library.twopool_collective_all_reduce(self.handle, total.data_ptr(), total.shape[0], columns))
        if total is not tensor:
            tensor.copy_(total)

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        num_rows = tensor.shape[0]
        if len(widths) != self._size or tensor.dtype != torch.float32 or tensor.shape[1] != widths[self._rank]:
            raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is not [rows, widths[{self._rank}]] of float32")
        tensor = tensor.contiguous()
        ends = torch.tensor((0, *widths), dtype=torch.int64).cumsum(0)
        out = torch.empty((num_rows if self._rank == 0 else 0, sum(widths)))
        if num_rows == 0:
            self.barrier()
        else:
            pointers = (ends.data_ptr(), out.data_ptr())
            self._check(self._library.twopool_collective_gather(self.handle, tensor.data_ptr(), num_rows, *pointers))
        return None if self._rank else out

    def barrier(self) -> None:
        self._check(self._library.twopool_collective_barrier(self.handle))

    def abort(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._library.twopool_collective_abort(self._handle)

    def close(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._library.twopool_collective_close(handle)

    def __del__(self) -> None:
        self.close()

    def _check(self, status: int) -> None:
        if status == GROUP_LOST:
            raise CollectiveError(f"rank {self._rank}: {self._library.twopool_last_error().decode()}")
        if status:
            raise ValueError(self._library.twopool_last_error().decode())


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
        """Also ends the process group: gloo's threads would take the process down were it left open at its end."""
        self._aborted = True
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

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
    *,
    backend: str,
    rank: int,
    size: int,
    master_addr: str,
    master_port: int,
    listener: socket.socket | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
) -> DistributedCollective:
    """Join the process group that rank 0 opens at master_addr:master_port, once a process.

    listener: rank 0's, listening there; without it rank 0 opens the place by itself, on all of its host's addresses.

    Raises CollectiveError when the others do not come within join_timeout_s.
    """
    address = f"{bracketed(master_addr)}:{master_port}"
    if backend == "gloo":
        # By itself gloo takes the address of the host's name, which often is loopback: other hosts would not find it.
        interface = interface_towards(master_addr)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            master_addr,
            master_port,
            size,
            is_master=rank == 0,
            timeout=timedelta(seconds=join_timeout_s),
            master_listen_fd=None if listener is None else listener.detach(),
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"rank {rank} cannot join its group at {address}: {error}") from error
    return DistributedCollective()
