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
from twopool.engine.node_server import NodeServer
from twopool.engine.nodes import node_facts
from twopool.engine.rank_messages import ShardLoaded
from twopool.engine.rank_processes import LocalRanks, rank_setups
from twopool.engine.tp_group import TpGroup
from twopool.models.config import DecoderConfig
from twopool.models.fingerprint import model_fingerprint
from twopool.models.sharding import Shard, ShardPlan, plan_shards
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import TwopoolError
from twopool.protocol.ids import WorkerId, new_epoch
from twopool.protocol.messages import Role
from twopool.protocol.processes import cpu_shares

logger = logging.getLogger(__name__)


def load_worker(config: WorkerConfig, role: Role, folder: Path) -> LoadedModel:
    """The model of a whole worker, whatever its number of ranks and nodes; ``config`` must name the worker.

    The other ranks run when this returns: whoever gets the model closes its ``group``. Call it on the main thread.
    Raises ``ModelError``, ``ConfigError``, or ``CollectiveError`` when a rank was lost or a node did not come.
    """
    if config.tensor_parallel_size == 1:
        return load_model(config, folder)
    plan = plan_shards(DecoderConfig.from_folder(folder), config.tensor_parallel_size)
    for line in plan.report():
        logger.info("%s", line)
    rank_device(config.device, len(config.local_ranks) - 1)  # a GPU that is not there is better found now
    nodes = None if config.nnodes == 1 else _nodes(config, role, folder)
    try:
        group, place = _start(config, folder, plan, nodes)
    except BaseException as error:
        if nodes is not None:
            nodes.close(_words(error))
        raise
    try:
        return _load(config, folder, place, group)
    except BaseException as error:
        group.close(_words(error))
        raise


def _nodes(config: WorkerConfig, role: Role, folder: Path) -> NodeServer:
    device = rank_device(config.device, 0).type
    return NodeServer(config, node_facts(config, role, model=model_fingerprint(folder), device=device))


def _start(config: WorkerConfig, folder: Path, plan: ShardPlan, nodes: NodeServer | None) -> tuple[TpGroup, RankPlace]:
    """All other ranks, and this one's place among them."""
    if nodes is not None:
        nodes.meet(config.node_timeout_s)
    shard, device = Shard(0, plan.size), rank_device(config.device, 0)
    cpus = [tuple(share) for share in cpu_shares(os.sched_getaffinity(0), len(config.local_ranks))]
    meeting = tp_meeting.choose(config, plan, device)
    try:
        setups = rank_setups(config, folder, meeting.place, cpus)[1:]
        handles = LocalRanks.start(setups, inherit=() if meeting.segment is None else (meeting.segment,))
        try:
            if nodes is not None:
                handles += nodes.start_ranks(WorkerId(config.worker_id or ""), plan.size, meeting.place)
        except BaseException:
            LocalRanks.end(handles)
            raise
    except BaseException:
        meeting.close()
        raise
    group = TpGroup(handles, new_epoch(), nodes=nodes)
    try:
        group.collective = tp_meeting.join(meeting.place, shard, device, listener=meeting.listener)
    except BaseException as error:
        group.close(_words(error))
        raise
    return group, RankPlace(shard, group.collective, cpus[0])


def _load(config: WorkerConfig, folder: Path, place: RankPlace, group: TpGroup) -> LoadedModel:
    decoder = load_decoder(config, folder, place)
    own = ShardLoaded(
        num_blocks=pool_blocks(config, decoder),
        fingerprint=decoder.fingerprint(),
        kernel_backend=kernel_backend(decoder, deterministic_gemm=config.deterministic_gemm),
    )
    num_blocks = group.loaded(own)
    group.allocate(num_blocks)
    return replace(with_pool(config, folder, decoder, place, num_blocks=num_blocks), group=group)


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, TwopoolError) else repr(error)
