"""Ids and seeds are drawn in advance: nobody may get one that somebody else got."""

import os
from concurrent.futures import ThreadPoolExecutor

from twopool.protocol.ids import new_request_id, new_seed


def test_ids_are_unique_across_threads_and_forks() -> None:
    new_request_id()
    reading_fd, writing_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing_fd, " ".join(new_request_id() for _ in range(100)).encode())
        os._exit(0)
    os.close(writing_fd)
    with os.fdopen(reading_fd) as reader:
        ids = reader.read().split()
    os.waitpid(pid, 0)
    with ThreadPoolExecutor(8) as pool:
        ids += pool.map(lambda _: new_request_id(), range(5000), chunksize=50)
    assert len(ids) == 5100
    assert len(set(ids)) == 5100
    assert all(len(name) == len("req-") + 24 for name in ids)


def test_seeds_fill_63_bits() -> None:
    seeds = {new_seed() for _ in range(300)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62
