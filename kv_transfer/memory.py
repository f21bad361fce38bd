"""Host memory for KV pools, so laid out that copying it is fast."""

import mmap

import torch

_HUGE_PAGE = 2 * 1024 * 1024


def allocate_host_pool(num_bytes: int) -> torch.Tensor:
    """``[num_bytes]`` uint8 zeros, page-aligned, in huge pages where the kernel grants them, every page touched.

    A READ on one host pins the source's pages one by one: with 4 KiB pages that takes as long as the copy itself.
    Pages that were never written cost the first READ that lands in them a fault each.
    """
    # Private: the kernel grants huge pages for shared memory by another setting, which is off by default.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, -(-num_bytes // _HUGE_PAGE)) * _HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).zero_()
