"""The memory of the paged KV cache: how much of it, and where."""

import os
from typing import Final

import torch
from torch import Tensor

from twopool.kv_transfer.dtypes import TORCH_DTYPES
from twopool.kv_transfer.memory import allocate_host_pool
from twopool.models.config import DecoderConfig
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import ConfigError
from twopool.protocol.geometry import KvGeometry

DEFAULT_CPU_BYTES = 1024**3

_pools: Final[list[Tensor]] = []
"""Every pool of this process. Peers read pools by address at any time; memory that vanished under such a read kills
this process (TCP) or the read, so a pool that was handed out is never unmapped."""


def allocate_kv_pool(geometry: KvGeometry, device: torch.device, *, shared: bool = False) -> Tensor:
    """The zeroed pool, ``geometry.shape`` of ``geometry.dtype``, contiguous, alive until the process ends.

    Host memory that is ``shared`` can be mapped by other processes of this host. Host memory has no pages yet: whoever
    serves settles it in the background (``kv_transfer/memory.py``), whoever measures does so at once. Raises
    ``ConfigError`` when there is not that much memory.
    """
    try:
        if device.type == "cpu":
            if geometry.pool_bytes > _physical_memory_bytes():  # memory that nobody touched is promised without end
                raise MemoryError
            memory = allocate_host_pool(geometry.pool_bytes, shared=shared, settled=False)
            pool = memory.view(TORCH_DTYPES[geometry.dtype]).view(geometry.shape)
        else:
            pool = torch.zeros(geometry.shape, dtype=TORCH_DTYPES[geometry.dtype], device=device)
    except (RuntimeError, OSError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"--kv-cache-memory: {geometry.pool_bytes} bytes cannot be had on {device}", param="--kv-cache-memory"
        ) from error
    _pools.append(pool)
    return pool


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_cache_blocks(
    config: WorkerConfig, model: DecoderConfig, dtype: torch.dtype, *, num_kv_heads: int, device: torch.device
) -> int:
    """Blocks of a rank's ``num_kv_heads`` that its budget pays for; raises ``ConfigError`` when that is not even one.

    The budget is ``--kv-cache-memory``, else on a GPU what ``--gpu-memory-utilization`` leaves beside the weights,
    which must be loaded by now, else 1 GiB.
    """
    block_bytes = 2 * config.block_size * num_kv_heads * model.head_dim * model.num_layers * dtype.itemsize
    budget = config.kv_cache_memory
    if budget is None:
        budget = DEFAULT_CPU_BYTES if device.type == "cpu" else _gpu_budget(config, device)
    if budget < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory {budget}: one block of {config.block_size} tokens takes {block_bytes} bytes",
            param="--kv-cache-memory",
        )
    return budget // block_bytes


def _gpu_budget(config: WorkerConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return max(int(total * config.gpu_memory_utilization) - used, 0)
