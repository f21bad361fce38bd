"""KV between workers of unequal degrees: what each pair of degrees moves, in how many runs, how fast.

    bench_tp_transfer.py [--model NAME] [--degrees 1 2 3 4] [--block-sizes 16 16] [--layer-groups 1]

For each pair (ranks of the source, ranks of the reader) all ranks of a reader read the same tokens from the ranks of a
source in another process, from blocks that lie anywhere in the pools. Next to it stands the equal-degree pair of the
same reader: the same bytes from as many ranks as there are readers. Rounds are interleaved; every figure is the median
of its rounds, and the ratio (equal-degree time over this pair's) the median of the rounds' ratios.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, KvTransport, PeerLink
from twopool.models.config import DecoderConfig
from twopool.models.sharding import plan_shards
from twopool.models.store import resolve_model
from twopool.protocol.config import PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.messages import PeerIdentity
from twopool.scripts.bench_link_flags import add_link_flags
from twopool.scripts.bench_pools import TIMEOUT_S, make_transport, other_process

Pair = tuple[int, int]


@dataclass(frozen=True)
class TransferFigure:
    """One pair of degrees. Bytes, runs (after merging) and posts are summed over the reader's ranks."""

    source_ranks: int
    reader_ranks: int
    num_bytes: int
    num_ranges: int
    num_posts: int
    milliseconds: float
    gb_per_s: float
    to_equal_degree: float


class Reader:
    """The ranks of one reader, in this process, and their links to every source."""

    def __init__(self, transports: list[KvTransport]) -> None:
        self._transports = transports
        self._links: dict[int, list[PeerLink]] = {}

    async def connect(self, degree: int, source: PeerIdentity) -> None:
        self._links[degree] = [await transport.connect(source, timeout_s=TIMEOUT_S) for transport in self._transports]

    async def read(self, degree: int, requests: list[FetchRequest]) -> tuple[float, list[FetchReport]]:
        """Seconds that all ranks took for all requests, and what each reported."""
        started = time.perf_counter()
        handles = [
            transport.fetch(link, request, timeout_s=TIMEOUT_S)
            for transport, link in zip(self._transports, self._links[degree], strict=True)
            for request in requests
        ]
        reports = [await handle.wait() for handle in handles]
        return time.perf_counter() - started, reports

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        figures, setting = measure(args)
    except TwopoolError as error:
        print(f"bench_tp_transfer: {error.message}", file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 120).print(transfer_table(figures, setting))
    if args.json is not None:
        report = {"setting": setting, "pairs": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure_pairs(model: str, degrees: Sequence[int], rounds: int) -> tuple[list[TransferFigure], str]:
    """Every pair of ``degrees`` with this program's other flags as they are, and what was measured in words."""
    numbers = [str(degree) for degree in degrees]
    return measure(_parser().parse_args([f"--model={model}", "--degrees", *numbers, f"--rounds={rounds}"]))


def measure(args: argparse.Namespace) -> tuple[list[TransferFigure], str]:
    """The same for the flags of this program. Raises ``TwopoolError``."""
    torch.set_num_threads(1)
    config = DecoderConfig.from_folder(resolve_model(args.model))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_measure(args, config))
    blocks = " -> ".join(map(str, args.block_sizes))
    return figures, f"{args.model}, {args.tokens} tokens, {blocks} tokens a block, {args.layer_groups} layer groups"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PrefillConfig.model, help="the model whose shape the pools have")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 3, 4], help="ranks of either side")
    parser.add_argument("--block-sizes", type=int, nargs=2, default=[16, 16], metavar=("SOURCE", "READER"))
    parser.add_argument("--tokens", type=int, default=1024, help="tokens read at a time")
    parser.add_argument("--layer-groups", type=int, default=1, help="READs a prompt's layers are split into")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds")
    add_link_flags(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


async def _measure(args: argparse.Namespace, config: DecoderConfig) -> list[TransferFigure]:
    source_size, reader_size = args.block_sizes
    sources = {degree: _geometries(config, degree, source_size, args.tokens) for degree in args.degrees}
    flat = [geometry for geometries in sources.values() for geometry in geometries]
    readers: dict[int, Reader] = {}
    async with other_process(args, flat) as (_, identities):
        offered = iter(identities)
        peers = {degree: _worker([next(offered) for _ in ranks], degree) for degree, ranks in sources.items()}
        for degree in args.degrees:
            geometries = _geometries(config, degree, reader_size, args.tokens)
            transports = [
                make_transport(args, geometry, f"reader-{degree}.{rank}")[0] for rank, geometry in enumerate(geometries)
            ]
            readers[degree] = Reader(transports)
            for source_degree, peer in peers.items():
                await readers[degree].connect(source_degree, peer)
        try:
            return await _rounds(args, config, readers)
        finally:
            for reader in readers.values():
                await reader.close()


async def _rounds(args: argparse.Namespace, config: DecoderConfig, readers: dict[int, Reader]) -> list[TransferFigure]:
    requests = _requests(args, config.num_layers)
    pairs = [(source, reader) for reader in args.degrees for source in args.degrees]
    seconds: dict[Pair, list[float]] = defaultdict(list)
    reports: dict[Pair, list[FetchReport]] = {}
    for number in range(args.rounds + 1):
        for source, reader in pairs:
            taken, reports[source, reader] = await readers[reader].read(source, requests)
            if number:  # the first round prepares lists and touches pages
                seconds[source, reader].append(taken)
    return [_figure(pair, seconds, reports[pair]) for pair in pairs]


def _figure(pair: Pair, seconds: dict[Pair, list[float]], reports: list[FetchReport]) -> TransferFigure:
    source, reader = pair
    taken = statistics.median(seconds[pair])
    num_bytes = sum(report.num_bytes for report in reports)
    return TransferFigure(
        source_ranks=source,
        reader_ranks=reader,
        num_bytes=num_bytes,
        num_ranges=sum(report.num_ranges for report in reports),
        num_posts=sum(report.num_posts for report in reports),
        milliseconds=1e3 * taken,
        gb_per_s=num_bytes / taken / 1e9,
        to_equal_degree=statistics.median(
            equal / own for equal, own in zip(seconds[reader, reader], seconds[pair], strict=True)
        ),
    )


def _geometries(config: DecoderConfig, degree: int, block_size: int, tokens: int) -> list[KvGeometry]:
    """The pools of a worker's ranks, each with room for the tokens."""
    return [
        KvGeometry(
            num_blocks=-(-tokens // block_size) + NUM_RESERVED_BLOCKS,
            block_size=block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            kv_head_start=part.kv_head_start,
            num_kv_heads_local=part.num_kv_heads_local,
            head_dim=config.head_dim,
            dtype="bfloat16",
            tp_rank=rank,
            tp_size=degree,
        )
        for rank, part in enumerate(plan_shards(config, degree).parts)
    ]


def _worker(ranks: list[PeerIdentity], degree: int) -> PeerIdentity:
    """One worker of the ranks that were offered one by one."""
    pools = tuple(pool for rank in ranks for pool in rank.ranks)
    return replace(ranks[0], worker_id=f"source-of-{degree}", ranks=pools)


def _requests(args: argparse.Namespace, num_layers: int) -> list[FetchRequest]:
    """All tokens, a request for each layer group; blocks in an order that merges nothing."""
    rng = np.random.default_rng(0)
    remote, local = (rng.permutation(-(-args.tokens // size)).astype(np.int32) for size in args.block_sizes)
    bounds = [num_layers * group // args.layer_groups for group in range(args.layer_groups + 1)]
    return [
        FetchRequest(
            remote_block_ids=remote,
            local_block_ids=local,
            start_token=0,
            end_token=args.tokens,
            layer_start=first,
            layer_end=last,
        )
        for first, last in pairwise(bounds)
    ]


def transfer_table(figures: list[TransferFigure], setting: str) -> Table:
    table = Table(title=setting)
    for heading in ("source ranks", "reader ranks", "MB", "runs", "posts", "ms", "GB/s", "to equal degree"):
        table.add_column(heading, justify="right")
    for one in figures:
        table.add_row(
            str(one.source_ranks),
            str(one.reader_ranks),
            f"{one.num_bytes / 1e6:.1f}",
            str(one.num_ranges),
            str(one.num_posts),
            f"{one.milliseconds:.2f}",
            f"{one.gb_per_s:.2f}",
            f"{one.to_equal_degree:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
