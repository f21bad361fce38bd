"""One rank of `bench_tp`: a process that loads its part of the model and times what it is told to, a line at a time.

Reads JSON objects from standard input and answers each with one on standard output. Every rank of a group is told the
same; rank 0's times count.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from twopool.kernels.collectives import Collective, SharedMemoryCollective, distributed_group
from twopool.models.batch import ForwardBatch
from twopool.models.config import DecoderConfig
from twopool.models.decoder import Decoder
from twopool.models.native_decoder import NativeDecoder
from twopool.models.sharding import Shard, plan_shards, segment_bytes

BLOCK_SIZE = 16
CONTEXT_TOKENS = 256
MAX_TOKENS = 2048
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    rank = _Rank(args)
    _say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        _say({"ms": rank.steps(**command) if "phase" in command else rank.all_reduces(**command)})
    rank.close()
    return 0


def step_batch(phase: str, size: int, vocab_size: int) -> tuple[ForwardBatch, int]:
    """A prompt of ``size`` tokens, or ``size`` streams with `CONTEXT_TOKENS` each; and the blocks that takes."""
    random = np.random.default_rng(0)
    num_sequences, query_len = (1, size) if phase == "prefill" else (size, 1)
    context_len = query_len if phase == "prefill" else CONTEXT_TOKENS
    blocks_each = -(-context_len // BLOCK_SIZE)
    tables = np.arange(num_sequences * blocks_each, dtype=np.int32).reshape(num_sequences, blocks_each)
    positions = np.tile(np.arange(context_len - query_len, context_len), num_sequences)
    owners = np.repeat(np.arange(num_sequences), query_len)
    slots = tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    query_lens = np.full(num_sequences, query_len, dtype=np.int32)
    context_lens = np.full(num_sequences, context_len, dtype=np.int32)
    ends = np.cumsum(query_lens)
    batch = ForwardBatch(
        token_ids=torch.from_numpy(random.integers(0, vocab_size, len(positions))),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        context_lens=torch.from_numpy(context_lens),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.from_numpy(ends.astype(np.int64) - 1),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
    )
    return batch, tables.size


class _Rank:
    def __init__(self, args: argparse.Namespace) -> None:
        dtype, cpu = _DTYPES[args.dtype], torch.device("cpu")
        config = DecoderConfig.from_folder(args.folder)
        self._shared: SharedMemoryCollective | None = None
        self._gloo: Collective | None = None
        shard = None
        if args.size > 1:
            shard = Shard(args.rank, args.size)
            max_bytes = segment_bytes(plan_shards(config, args.size), MAX_TOKENS)
            self._shared = SharedMemoryCollective(args.segment, args.rank, args.size, max_bytes)
            self._gloo = distributed_group(
                backend="gloo", rank=args.rank, size=args.size, master_addr="127.0.0.1", master_port=args.port
            )
        self._decoder: Decoder | NativeDecoder
        if NativeDecoder.unavailable_reason(config, dtype=dtype, device=cpu) is None:
            cpus = json.loads(args.cpus)
            self._decoder = NativeDecoder.load(
                args.folder, dtype=dtype, device=cpu, cpus=cpus, shard=shard, collective=self._shared
            )
        else:
            self._decoder = Decoder.load(args.folder, dtype=dtype, device=cpu, shard=shard, collective=self._gloo)

    def steps(self, *, phase: str, size: int, count: int) -> list[float]:
        """-> milliseconds of each of ``count`` forward passes."""
        decoder, config = self._decoder, self._decoder.config
        batch, num_blocks = step_batch(phase, size, config.vocab_size)
        shape = (num_blocks, decoder.num_kv_heads_local, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(shape, dtype=decoder.dtype)
        return _timed(lambda: decoder.forward(batch, pool), count)

    def all_reduces(self, *, backend: str, rows: int, count: int) -> list[float]:
        """-> milliseconds of each of ``count`` sums of [rows, hidden_size] float32 over the ranks."""
        assert self._shared is not None and self._gloo is not None
        tensor = torch.zeros((rows, self._decoder.config.hidden_size))
        calls: dict[str, Callable[[Tensor], Any]] = {
            "shared": self._shared.all_reduce_,
            "gloo": dist.all_reduce,
            "gathered": self._gloo.all_reduce_,
        }
        call = calls[backend]
        return _timed(lambda: call(tensor), count)

    def close(self) -> None:
        if isinstance(self._decoder, NativeDecoder):
            self._decoder.close()
        for collective in (self._shared, self._gloo):
            if collective is not None:
                collective.close()


def _timed(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cpus", default="null", help="JSON list, one CPU for each thread, or null")
    parser.add_argument("--segment", type=int, default=-1, help="inherited descriptor of the ranks' shared memory")
    parser.add_argument("--port", type=int, default=0, help="where rank 0 opens the gloo group")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
