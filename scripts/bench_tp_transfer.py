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
from rich.console import Console
from rich.table import Table

from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, FetchRequest, PeerLink
from twopool.models.config import DecoderConfig
from twopool.models.sharding import plan_shards
from twopool.models.store import resolve_model
from twopool.protocol.config import PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.protocol.geometry import KvGeometry
from twopool.scripts.bench_link_flags import add_device_flags, add_link_flags
from twopool.scripts.bench_pools import TIMEOUT_S, other_process
from twopool.scripts.bench_ranks import Reader, as_one_worker, deal_heads

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
    add_device_flags(parser, starts_source=True)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


async def _measure(args: argparse.Namespace, config: DecoderConfig) -> list[TransferFigure]:
    source_size, reader_size = args.block_sizes
    sources = {degree: _geometries(config, degree, source_size, args.tokens) for degree in args.degrees}
    flat = [geometry for geometries in sources.values() for geometry in geometries]
    links: dict[Pair, tuple[Reader, PeerLink]] = {}
    async with other_process(args, flat) as (_, identities):
        offered = iter(identities)
        peers = {
            degree: as_one_worker([next(offered) for _ in ranks], f"source-of-{degree}")
            for degree, ranks in sources.items()
        }
        readers: list[Reader] = []
        try:
            for degree in args.degrees:
                geometries = _geometries(config, degree, reader_size, args.tokens)
                readers.append(reader := Reader.make(args, geometries, f"reader-{degree}"))
                for source, peer in peers.items():
                    links[source, degree] = (reader, await reader.transport.connect(peer, timeout_s=TIMEOUT_S))
            return await _rounds(args, config, links)
        finally:
            for reader in readers:
                await reader.close()


async def _rounds(
    args: argparse.Namespace, config: DecoderConfig, links: dict[Pair, tuple[Reader, PeerLink]]
) -> list[TransferFigure]:
    requests = _requests(args, config.num_layers)
    pairs = [(source, reader) for reader in args.degrees for source in args.degrees]
    seconds: dict[Pair, list[float]] = defaultdict(list)
    reports: dict[Pair, list[FetchReport]] = {}
    for number in range(args.rounds + 1):
        for pair in pairs:
            reader, link = links[pair]
            started = time.perf_counter()
            handles = [reader.transport.fetch(link, request, timeout_s=TIMEOUT_S) for request in requests]
            reports[pair] = [await handle.wait() for handle in handles]
            if number:  # the first round prepares lists and touches pages
                seconds[pair].append(time.perf_counter() - started)
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
    plan_shards(config, degree)  # raises ConfigError for a degree that no worker has
    pool = KvGeometry(
        num_blocks=-(-tokens // block_size) + NUM_RESERVED_BLOCKS,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_kv_heads_local=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="bfloat16",
    )
    return deal_heads(pool, degree)


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
