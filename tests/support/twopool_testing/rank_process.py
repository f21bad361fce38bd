"""One rank of a group of processes: ``rank_process.py shared|gloo RANK SIZE FD-OR-PORT``.

Prints a digest of sums that every rank must share. A rank in shared memory then meets the others until they are lost,
and ends with status 3.
"""

import hashlib
import sys

import torch

from twopool.kernels.collectives import Collective, SharedMemoryCollective, distributed_group
from twopool.protocol.errors import CollectiveError

MAX_BYTES = 4096
_ROUNDS = 50


def check(collective: Collective) -> str:
    """Sums, meetings and a gathering on one rank, to be called on all -> a digest of the sums, the same on all."""
    rank, size = collective.rank, collective.size
    widths = [8 + other for other in range(size)]
    digest = hashlib.sha256()
    for number in range(_ROUNDS):
        rows = torch.full((1 + number, 96), 0.1) * (rank + 1)
        collective.all_reduce_(rows)
        torch.testing.assert_close(rows, torch.full_like(rows, 0.1 * size * (size + 1) / 2))
        digest.update(rows.numpy().tobytes())
        collective.barrier()
    gathered = collective.gather_columns(torch.full((3, widths[rank]), float(rank)), widths)
    assert (gathered is None) == (rank > 0)
    if gathered is not None:
        wanted = torch.cat([torch.full((3, width), float(other)) for other, width in enumerate(widths)], dim=1)
        assert torch.equal(gathered, wanted)
    return digest.hexdigest()


def main() -> int:
    """See the module."""
    kind, rank, size, place = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    if kind == "gloo":
        group = distributed_group(backend="gloo", rank=rank, size=size, master_addr="127.0.0.1", master_port=place)
        print(check(group), flush=True)
        group.close()
        return 0
    collective = SharedMemoryCollective(place, rank, size, MAX_BYTES, timeout_s=60)
    print(check(collective), flush=True)
    try:
        while True:
            collective.barrier()
    except CollectiveError:
        return 3


if __name__ == "__main__":
    sys.exit(main())
