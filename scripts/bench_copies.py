"""What READs are compared with: copies of the same ranges within memory of the reader's kind.

In host memory one thread makes a memcpy for each range. In the memory of a GPU it is the device that copies, all
ranges at once, and a copy is over when the device says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twopool.kernels.copy_runs import RunArray, copy_runs
from twopool.kv_transfer.interface import FetchRequest
from twopool.kv_transfer.layout import Index, Runs, StridedList, plan_layout
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.protocol.geometry import KvGeometry

Copy = Callable[[], None]


def make_pool(num_bytes: int, device: torch.device, *, shared: bool = False) -> torch.Tensor:
    """``[num_bytes]`` uint8, every page of it there."""
    if device.type == "cpu":
        return allocate_host_pool(num_bytes, shared=shared)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def make_block_copy(
    block_bytes: int, count: int, device: torch.device, block_ids: npt.NDArray[np.int32] | None = None
) -> Copy:
    """Of ``count`` blocks into the order of ``block_ids``, ``[count]`` int32 and below ``count``; ``None``: in one
    piece, as they lie.
    """
    source, target = (make_pool(count * block_bytes, device).view(count, block_bytes) for _ in range(2))
    if device.type == "cpu":  # numpy's copies are memcpys, torch's are loops of its own
        rows, landed = source.numpy(), target.numpy()
        if block_ids is None:
            return lambda: np.copyto(landed, rows)
        indices = block_ids.astype(np.intp)
        return _finished(lambda: np.take(rows, indices, axis=0, out=landed, mode="clip"), device)
    if block_ids is None:
        return _finished(lambda: target.copy_(source), device)
    index = torch.from_numpy(block_ids.astype(np.int64)).to(device)
    return _finished(lambda: torch.index_select(source, 0, index, out=target), device)


def make_ranges_copy(
    readers: Sequence[KvGeometry],
    sources: Sequence[KvGeometry],
    requests: Sequence[FetchRequest],
    device: torch.device,
    *,
    spread: int,
) -> Copy:
    """Of the runs that all ranks of a reader read for ``requests`` from all ranks of a source, from pools to pools of
    their sizes. What a READ would convert is copied as it is, run beside run. ``spread``: see ``plan_layout``.
    """
    pools = [make_pool(source.pool_bytes, device) for source in sources]
    copies: list[RunsCopy] = []
    for reader in readers:
        plan = plan_layout(reader, sources, convert_dtype=True, spread=spread)
        all_runs = [_unconverted(runs) for request in requests for runs in plan.runs(request)]
        num_bytes = max(reader.pool_bytes, *(runs.num_bytes for runs in all_runs))
        landing = make_pool(num_bytes, device)
        copies += [RunsCopy.make(landing, pools[runs.rank], runs) for runs in all_runs]

    def copy_all() -> None:
        for copy in copies:
            copy()

    return _finished(copy_all, device)


def _unconverted(runs: Runs) -> Runs:
    if runs.conversion is None:
        return runs
    length, count = runs.remote.length, len(runs.remote_index)
    side_by_side = StridedList(0, length, length, count)
    return Runs(runs.rank, side_by_side, runs.remote, np.arange(count, dtype=np.int32), runs.remote_index)


@dataclass(frozen=True)
class RunsCopy:
    """``runs`` from ``source`` to ``target``, both flat uint8. ``device_index`` is where the runs are, if on a GPU."""

    target: torch.Tensor
    source: torch.Tensor
    runs: Runs
    device_index: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(cls, target: torch.Tensor, source: torch.Tensor, runs: Runs, *, by_torch: bool = False) -> "RunsCopy":
        """``by_torch``: copy as on a GPU, whatever the device."""
        if target.device.type == "cpu" and not by_torch:
            return cls(target, source, runs)
        return cls(target, source, runs, (_on(target.device, runs.local_index), _on(target.device, runs.remote_index)))

    def __call__(self) -> None:
        runs = self.runs
        if self.device_index is None:
            copy_runs(
                target=_run_array(self.target, runs.local),
                target_index=runs.local_index,
                source=_run_array(self.source, runs.remote),
                source_index=runs.remote_index,
            )
            return
        local, remote = self.device_index
        _rows(self.target, runs.local).index_copy_(0, local, _rows(self.source, runs.remote).index_select(0, remote))


def _run_array(memory: torch.Tensor, runs: StridedList) -> RunArray:
    return RunArray(memory.data_ptr() + runs.offset, runs.length, runs.stride, runs.count)


def _rows(memory: torch.Tensor, runs: StridedList) -> torch.Tensor:
    """``[runs.count, runs.length]`` uint8 view."""
    return memory.as_strided((runs.count, runs.length), (runs.stride, 1), runs.offset)


def _on(device: torch.device, index: Index) -> torch.Tensor:
    return torch.from_numpy(index.astype(np.int64)).to(device)


def _finished(copy: Callable[[], object], device: torch.device) -> Copy:
    """``copy`` and the wait until the device has done it."""

    def run() -> None:
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run
