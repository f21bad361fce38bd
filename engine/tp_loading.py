"""Loading the model of a worker with several ranks: all of them at once, the first one here."""

import logging
import os
from dataclasses import replace
from pathlib import Path

from twopool.engine import tp_meeting
from twopool.engine.loading import (
    LoadedModel,
    RankPlace,
    kernel_backend,
    load_decoder,
    load_model,
    pool_blocks,
    rank_device,
    with_pool,
)
from twopool.engine.rank_messages import RankSetup, ShardLoaded
from twopool.engine.tp_group import LocalRanks, TpGroup
from twopool.models.config import DecoderConfig
from twopool.models.sharding import Shard, plan_shards
from twopool.protocol.config import WorkerConfig, flags_of
from twopool.protocol.ids import new_epoch
from twopool.protocol.processes import cpu_shares

logger = logging.getLogger(__name__)


def load_worker(config: WorkerConfig, folder: Path) -> LoadedModel:
    """The model of a whole worker, whatever its number of ranks; ``config`` must name the worker.

    The other ranks run when this returns: whoever gets the model closes its ``group``. Call it on the main thread.
    Raises ``ModelError``, ``ConfigError``, or ``CollectiveError`` when a rank was lost.
    """
    if config.tensor_parallel_size == 1:
        return load_model(config, folder)
    plan = plan_shards(DecoderConfig.from_folder(folder), config.tensor_parallel_size)
    for line in plan.report():
        logger.info("%s", line)
    rank_device(config.device, plan.size - 1)  # a GPU that is not there is better found now
    cpus = [tuple(share) for share in cpu_shares(os.sched_getaffinity(0), plan.size)]
    meeting, segment = tp_meeting.choose(config, plan)
    flags = flags_of(type(config), _as_given(config))
    setups = [
        RankSetup(rank=rank, size=plan.size, flags=flags, folder=str(folder), meeting=meeting, cpus=cpus[rank])
        for rank in range(1, plan.size)
    ]
    group = TpGroup(LocalRanks.start(setups, inherit=() if segment is None else (segment,)), new_epoch())
    try:
        group.collective = tp_meeting.join(meeting, Shard(0, plan.size), config)
        place = RankPlace(Shard(0, plan.size), group.collective, cpus[0])
        decoder = load_decoder(config, folder, place)
        own = ShardLoaded(
            num_blocks=pool_blocks(config, decoder),
            fingerprint=decoder.fingerprint(),
            kernel_backend=kernel_backend(decoder, deterministic_gemm=config.deterministic_gemm),
        )
        num_blocks = group.loaded(own)
        group.allocate(num_blocks)
        return replace(with_pool(config, folder, decoder, place, num_blocks=num_blocks), group=group)
    except BaseException:
        group.close()
        raise


def _as_given(config: WorkerConfig) -> dict[str, object]:
    """Every field but those without a value, which no flag can give."""
    return {name: value for name, value in vars(config).items() if value is not None}
