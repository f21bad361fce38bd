"""A worker process: everything both roles share, around the role that is given.

Starting: load the model, allocate the pool, warm up, bind the peer address, register. One event loop holds all state
(pool, scheduler, jobs); compute has its thread, the transport has its own. SIGTERM drains; whatever raises ends the
process, and the others see a lost worker.
"""

import asyncio
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import msgspec
import uvloop

from twopool.engine.block_pool import BlockPool
from twopool.engine.core import Engine
from twopool.engine.grammar import GrammarEngine
from twopool.engine.group_runner import GroupRunner
from twopool.engine.incoming import KvMemory
from twopool.engine.loading import LoadedModel
from twopool.engine.node_process import run_node
from twopool.engine.prefix_source import PrefixSource
from twopool.engine.requests import LayerProgress, StepOutput
from twopool.engine.router_link import RouterHandler, RouterLinks
from twopool.engine.scheduler import SchedulerConfig
from twopool.engine.source_links import ReaderHandler, SourceLinks
from twopool.engine.source_server import Reader, SourceHandler, SourceServer
from twopool.engine.step import FollowUp, StepExecutor, StepPlan, StepResult, ThreadExecutor
from twopool.engine.tickets import TicketWriter
from twopool.engine.tp_group import TpGroup
from twopool.engine.tp_loading import load_worker
from twopool.kv_transfer.factory import create_transport
from twopool.kv_transfer.fault_points import FaultPoints
from twopool.kv_transfer.interface import NUM_RESERVED_BLOCKS, FetchReport, KvTransport
from twopool.kv_transfer.local import LocalFabric
from twopool.kv_transfer.memory import settle_pool_later
from twopool.protocol.config import WorkerConfig
from twopool.protocol.errors import CollectiveError, ConfigError, CorruptKvError, TransferError, TwopoolError
from twopool.protocol.ids import WorkerId, new_epoch, new_worker_id
from twopool.protocol.logs import setup_logging
from twopool.protocol.messages import (
    PROTOCOL_VERSION,
    Confirm,
    Confirmed,
    Draining,
    HandoverReport,
    Heartbeat,
    KvVerify,
    PeerIdentity,
    PeerRef,
    Register,
    Role,
    WorkerStats,
)
from twopool.protocol.processes import leave
from twopool.protocol.security import Security

logger = logging.getLogger(__name__)

TICK_S = 0.2


class OpenJobs(Protocol):
    def __len__(self) -> int: ...

    async def emptied(self) -> None: ...


class WorkerRole(RouterHandler, SourceHandler, ReaderHandler, Protocol):
    """What makes a worker a prefill or a decode worker."""

    @property
    def jobs(self) -> "OpenJobs":
        """What this worker holds anything for."""
        ...

    @property
    def expects_readers(self) -> bool:
        """Whether peers may be reading this worker's pool now."""
        ...

    def on_step(self, output: StepOutput) -> None: ...

    def on_layers(self, progress: LayerProgress) -> None:
        """Layers of a prompt's last chunk are complete."""
        ...

    def on_tick(self, now_s: float) -> None: ...

    def start_draining(self) -> None:
        """Finish what is open, take nothing new."""
        ...

    async def close(self) -> None:
        """Give back everything that is held."""
        ...


@dataclass
class TransferStats:
    """Monotonic counters the roles keep."""

    kv_transfers: int = 0
    kv_transfer_bytes: int = 0
    kv_transfer_s: float = 0.0
    kv_ranges: int = 0
    kv_posts: int = 0
    kv_hidden_s: float = 0.0
    kv_exposed_s: float = 0.0
    kv_verified_bytes: int = 0
    kv_converted_bytes: int = 0
    kv_prefix_tokens: int = 0
    kv_failures: Counter[str] = field(default_factory=Counter)
    kv_reclaimed: Counter[str] = field(default_factory=Counter)
    stale_tickets: int = 0
    local_prefills: int = 0


class WorkerHost:
    """The parts of one worker and their lives. Create it on the running loop."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        model: LoadedModel,
        make_role: "Callable[[WorkerHost], WorkerRole]",
        *,
        fabric: LocalFabric | None = None,
    ) -> None:
        self.config = config
        self.worker_id = new_worker_id(role) if config.worker_id is None else WorkerId(config.worker_id)
        self.geometry = model.geometry
        self.faults = FaultPoints(config.fault_points)
        self.transfer_stats = TransferStats()
        self.pool = BlockPool(
            model.geometry.num_blocks - NUM_RESERVED_BLOCKS,
            config.block_size,
            epoch=new_epoch() if model.group is None else model.group.epoch,
            prefix_caching=config.enable_prefix_caching,
        )
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._role_name = role
        self._stopping = asyncio.Event()
        self._security = Security(config.cluster_key)
        local = create_transport(
            config.kv_transport,
            pool=model.kv_pool,
            geometry=model.geometry,
            epoch=self.pool.epoch,
            agent_name=self.worker_id,
            backend=config.nixl_backend,
            ucx=config.ucx_settings,
            map_same_host=config.maps_same_host,
            convert_dtype=config.kv_convert_dtype,
            fabric=fabric,
            faults=self.faults,
            loop=self._loop,
        )
        self.transport: KvTransport = local if model.group is None else model.group.transport(local)
        self.executor: StepExecutor = _executor(model, config, self.faults, self._on_layers)
        self.engine = Engine(
            pool=self.pool,
            grammars=GrammarEngine(model.folder, model.decoder.config.vocab_size),
            scheduler_config=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                max_model_len=config.max_model_len or model.max_model_len,
                vocab_size=model.num_valid_tokens,
            ),
            executor=self.executor,
            on_step=self._on_step,
            layer_marks=layer_marks(model.geometry.num_layers, config.kv_layer_groups),
        )
        self.tickets = TicketWriter(self.pool, self.transport, num_layers=model.geometry.num_layers)
        self.prefixes = PrefixSource(
            self.tickets, lease_s=config.pin_lease_s, confirm=self.confirm, on_reclaimed=self.on_reclaimed
        )
        self.kv_memory = KvMemory(
            pool=self.pool,
            ranks=tuple(rank.geometry for rank in self.transport.describe()),
            transport=self.transport,
            faults=self.faults,
            verify=cast(KvVerify, config.kv_verify),
            on_fetched=self._on_fetched,
            on_verified=self._on_verified,
            on_failed=self.on_transfer_failed,
        )
        self.role = make_role(self)
        self._server = SourceServer(
            security=self._security,
            host=config.host,
            port=config.port,
            advertise_host=config.advertise_host,
            compatibility_hash=model.compatibility_hash,
            identity=self._identity,
            handler=self.role,
            faults=self.faults,
        )
        self.sources = SourceLinks(
            security=self._security,
            transport=self.transport,
            compatibility_hash=model.compatibility_hash,
            identity=self._identity,
            handler=self.role,
            on_ready_change=lambda: self.routers.heartbeat_now(),
            faults=self.faults,
        )
        self.routers = RouterLinks(
            config.router,
            security=self._security,
            registration=self._registration,
            heartbeat=self._heartbeat,
            handler=self.role,
            on_drain=self.stop,
        )

    async def serve(self) -> None:
        """Until SIGTERM, SIGINT or a router's ``Drain``; then drain and close."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.run(announce=True)

    async def run(self, *, announce: bool = False) -> None:
        """``serve`` without signals: until ``stop`` is called, or a rank is lost (``CollectiveError``)."""
        try:
            await self._run(announce)
        finally:
            await self._close()
        logger.info("stopped", extra={"worker_id": self.worker_id})

    async def _run(self, announce: bool) -> None:
        async with asyncio.TaskGroup() as group:
            parts = [self.engine.run(), self.routers.run(), self.sources.run(), self._tick()]
            if announce:
                parts.append(self._announce())
            if self._model.group is not None:
                parts.append(self._model.group.serve(self.stop))
            tasks = [group.create_task(part) for part in parts]
            await self._stopping.wait()
            await self._drain()
            await self.role.close()
            self.prefixes.close()
            for task in tasks:
                task.cancel()

    async def _close(self) -> None:
        self._server.close()
        self.executor.close()
        self.engine.close()
        await self.transport.close()
        self._security.close()

    def stop(self) -> None:
        """Begin to drain; a second call changes nothing."""
        self._stopping.set()

    def update_expected_readers(self) -> None:
        """Tell the transport how closely it has to listen to peers."""
        self.transport.expect_readers(self.role.expects_readers or self._server.in_handshake)

    def on_reclaimed(self, reason: str) -> None:
        """A pin ended."""
        self.transfer_stats.kv_reclaimed[reason] += 1
        self.update_expected_readers()

    def confirm(self, reader: Reader, message: Confirm, refused: bool = False) -> bool:
        """Tell a reader whether its tickets hold, which is also returned; those that do not are counted."""
        held = not refused and self.tickets.still_hold(message)
        if not held:
            self.transfer_stats.stale_tickets += 1
            extra = {"request_id": message.request_id, "attempt": message.attempt}
            logger.error("stale tickets of %s", reader.worker_id, extra=extra)
        reader.send(Confirmed(request_id=message.request_id, attempt=message.attempt, valid=held))
        return held

    def on_handed_over(self, report: HandoverReport) -> None:
        self.transfer_stats.kv_hidden_s += report.hidden_s
        self.transfer_stats.kv_exposed_s += report.exposed_s

    def on_transfer_failed(self, source: PeerRef | None, error: TransferError) -> None:
        """Count a failed transfer; a source whose bytes were wrong is not read from for a while."""
        self.count_failure(error.kind)
        logger.warning("KV transfer failed (%s): %s", error.kind, error.message)
        if isinstance(error, CorruptKvError) and source is not None:
            seconds = self.config.kv_quarantine_s
            logger.error("not reading from %s for %g s: its bytes arrived changed", source.worker_id, seconds)
            self.sources.quarantine(source, seconds)

    def count_failure(self, kind: str) -> None:
        """A transfer did not succeed: ``kind`` as in ``TransferError.kind``, or ``source`` where the source gave up."""
        self.transfer_stats.kv_failures[kind] += 1

    def _on_layers(self, layer_end: int) -> None:
        """Called on the compute thread; what it means is looked up on the loop, in order with the step's end."""
        self._loop.call_soon_threadsafe(self._pass_on_layers, layer_end)

    def _pass_on_layers(self, layer_end: int) -> None:
        for progress in self.engine.layers_done(layer_end):
            self.role.on_layers(progress)

    def _on_fetched(self, report: FetchReport) -> None:
        stats = self.transfer_stats
        stats.kv_transfers += 1
        stats.kv_transfer_bytes += report.num_bytes
        stats.kv_transfer_s += report.transfer_s
        stats.kv_ranges += report.num_ranges
        stats.kv_posts += report.num_posts
        stats.kv_converted_bytes += report.num_converted_bytes

    def _on_verified(self, num_bytes: int) -> None:
        self.transfer_stats.kv_verified_bytes += num_bytes

    def _on_step(self, output: StepOutput) -> None:
        self.role.on_step(output)

    async def _tick(self) -> None:
        while True:
            self.role.on_tick(time.monotonic())
            self.prefixes.on_tick(time.monotonic())
            self.update_expected_readers()
            await asyncio.sleep(TICK_S)

    async def _announce(self) -> None:
        """The one line on stdout that says this worker is up."""
        await self.routers.registered.wait()
        if self._model.group is not None:
            self._model.group.announce()
        line = {
            "event": "ready",
            "role": self._role_name,
            "worker_id": self.worker_id,
            "peer_address": self._server.address,
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        if self._model.kv_pool.device.type == "cpu":
            settle_pool_later(self._model.kv_pool)

    async def _drain(self) -> None:
        jobs = self.role.jobs
        logger.info("draining %d requests", len(jobs), extra={"worker_id": self.worker_id})
        self.role.start_draining()
        self.routers.broadcast(Draining(self.pool.epoch))
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await jobs.emptied()
        except TimeoutError:
            logger.warning("%d requests did not finish in time", len(jobs))

    def _identity(self) -> PeerIdentity:
        self.transport.expect_readers(True)
        return PeerIdentity(
            worker_id=self.worker_id,
            role=self._role_name,
            epoch=self.pool.epoch,
            transport=self.transport.name,
            ranks=self.transport.describe(),
        )

    def _registration(self) -> Register:
        return Register(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            role=self._role_name,
            epoch=self.pool.epoch,
            model=self.config.model,
            compatibility_hash=self._model.compatibility_hash,
            peer_address=self._server.address,
            max_model_len=self.engine.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=self._model.num_valid_tokens,
            block_size=self.config.block_size,
            num_blocks=self.pool.num_blocks,
            tp_size=self.config.tensor_parallel_size,
            dtype=self.geometry.dtype,
            kernel_backend=self._model.kernel_backend,
            local_prefill=self.config.local_prefill,
        )

    def _heartbeat(self) -> Heartbeat:
        engine, transfer = self.engine.stats, self.transfer_stats
        rejected = (self.routers, self._server, self.sources)
        return Heartbeat(
            epoch=self.pool.epoch,
            stats=WorkerStats(
                blocks=self.pool.counts(),
                num_running=engine.num_running,
                num_waiting=engine.num_waiting,
                num_steps=engine.num_steps,
                prefill_tokens=engine.prefill_tokens,
                cached_tokens=engine.cached_tokens,
                generated_tokens=engine.generated_tokens,
                preemptions=engine.preemptions,
                rejected_messages=sum(part.num_rejected_messages for part in rejected),
                local_prefills=transfer.local_prefills,
                kv_transfers=transfer.kv_transfers,
                kv_transfer_bytes=transfer.kv_transfer_bytes,
                kv_transfer_s=transfer.kv_transfer_s,
                stale_tickets=transfer.stale_tickets,
                kv_ranges=transfer.kv_ranges,
                kv_posts=transfer.kv_posts,
                kv_hidden_s=transfer.kv_hidden_s,
                kv_exposed_s=transfer.kv_exposed_s,
                kv_verified_bytes=transfer.kv_verified_bytes,
                kv_converted_bytes=transfer.kv_converted_bytes,
                kv_prefix_tokens=transfer.kv_prefix_tokens,
                kv_failures=dict(transfer.kv_failures),
                kv_reclaimed=dict(transfer.kv_reclaimed),
                handshakes_refused=self._server.num_refused + self.sources.num_refused,
                pairs_quarantined=self.sources.num_quarantined,
                canary_age_s=self.sources.canary_age_s,
            ),
            peers=self.sources.ready(),
        )


def run_worker(config: WorkerConfig, role: Role, folder: Path, make_role: Callable[[WorkerHost], WorkerRole]) -> int:
    """A whole worker process in the foreground, or a node of it; returns its exit status."""
    if config.node_rank:
        run_node(config, role, folder)
    setup_logging(process=config.worker_id or role, level=config.log_level, style=config.log_format)

    config = replace(config, worker_id=config.worker_id or new_worker_id(role))  # all ranks' name

    async def main(model: LoadedModel) -> None:
        await WorkerHost(config, role, model, make_role).serve()

    group: TpGroup | None = None
    try:
        model = load_worker(config, role, folder)
        group = model.group
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(model))
    except (TwopoolError, BaseExceptionGroup) as error:
        known = _known(error)
        if known is None:
            raise
        sys.stderr.write(f"twopool: error: {known.message}\n")
        if isinstance(known, CollectiveError):  # all nodes are to be gone in time
            if group is not None:
                group.close()
            leave(1)
        return 2 if isinstance(known, ConfigError) else 1
    finally:
        if group is not None:
            group.close()
    return 0


def _known(error: BaseException) -> TwopoolError | None:
    """What went wrong, where all of it is an error that has words for the user."""
    if isinstance(error, BaseExceptionGroup):
        known, unknown = error.split(TwopoolError)
        return None if known is None or unknown is not None else _known(known.exceptions[0])
    return error if isinstance(error, TwopoolError) else None


def layer_marks(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """The numbers of layers after which a group of them is complete; none where there is one group."""
    groups = min(num_groups, num_layers)
    return tuple(num_layers * (group + 1) // groups for group in range(groups)) if groups > 1 else ()


def _executor(
    model: LoadedModel, config: WorkerConfig, faults: FaultPoints, on_layers: Callable[[int], None]
) -> StepExecutor:
    """The warmed-up executor of all ranks."""
    own = model.runner(config, on_layers=on_layers)
    runner = own if model.group is None else GroupRunner(own, model.group)
    runner.warm_up()
    executor = ThreadExecutor(runner.run)
    return _HoldingExecutor(executor, faults) if faults.is_active else executor


class _HoldingExecutor:
    """Tests only: steps start late while RUNNING is held."""

    def __init__(self, executor: StepExecutor, faults: FaultPoints) -> None:
        self._executor = executor
        self._faults = faults

    async def execute(self, plan: StepPlan) -> StepResult:
        await self._faults.reached("running")
        return await self._executor.execute(plan)

    def follow(self, follow_up: FollowUp) -> None:
        """Every step passes by the fault point."""

    def close(self) -> None:
        self._executor.close()
