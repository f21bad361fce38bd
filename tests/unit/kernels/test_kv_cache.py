"""Writes land in their slot of their layer and nowhere else; copies take whole blocks."""

import torch

from twopool.kernels.kv_cache import copy_blocks, slot_rows, write_kv

BLOCKS, HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM = 7, 3, 4, 8, 6


def test_write_kv_touches_its_slots_only() -> None:
    torch.manual_seed(0)
    pool = torch.randn(BLOCKS, HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
    wanted = pool.clone()
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:19]
    fused = torch.randn(19, 2 * HEADS, HEAD_DIM)  # keys and values are views, as in the decoder
    keys, values = fused[:, :HEADS], fused[:, HEADS:]
    layer = 2
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        for head in range(HEADS):
            wanted[block, head, layer, 0, offset] = keys[row, head]
            wanted[block, head, layer, 1, offset] = values[row, head]
    write_kv(pool, layer, slot_rows(slots, pool), keys, values)
    assert torch.equal(pool, wanted)


def test_copy_blocks_reads_before_it_writes() -> None:
    torch.manual_seed(0)
    pool = torch.randn(BLOCKS, HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
    before = pool.clone()
    copy_blocks(pool, torch.tensor([1, 2, 1]), torch.tensor([2, 3, 6]))
    wanted = before.clone()
    wanted[2], wanted[3], wanted[6] = before[1], before[2], before[1]
    assert torch.equal(pool, wanted)
