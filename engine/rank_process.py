"""A rank of a tensor-parallel worker other than its first: ``python -m twopool.engine.rank_process``, started by it.

The main thread loads, then serves the transport's commands on an event loop; steps have a thread of their own. Whatever
cannot be answered ends the process, and with it the worker; so does the leader's end end the process.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from twopool.engine.rank_life import live_with_leader
from twopool.protocol.processes import die_with_parent, leave

if TYPE_CHECKING:
    from twopool.engine.loading import LoadedModel
    from twopool.engine.model_runner import ModelRunner
    from twopool.engine.rank_messages import ControlCommand, RankSetup, StepCommand
    from twopool.kernels.collectives import Collective
    from twopool.protocol.config import WorkerConfig
    from twopool.protocol.framing import FrameSocket
    from twopool.protocol.ids import Epoch

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="twopool.engine.rank_process")
    parser.add_argument("--parent", type=int, required=True)
    for name in ("life", "control", "steps"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    # A terminal or a service manager signals every process; it is for the leader to drain, and then to end this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    life, control, steps = (socket.socket(fileno=fd) for fd in (arguments.life, arguments.control, arguments.steps))
    live_with_leader(life, on_end=lambda: os._exit(1))
    try:
        status = _Rank(control, steps).run()
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)  # the thread that computes may be anywhere


class _Rank:
    """``run`` is the life of the process. Libraries are loaded in it, once the leader's end would be noticed."""

    def __init__(self, control: socket.socket, steps: socket.socket) -> None:
        self._control_socket = control
        self._steps_socket = steps

    def run(self) -> int:
        """Serve until the leader closes the connection; the exit status."""
        from twopool.engine.rank_messages import ControlCommand, LoadFailed, RankSetup, StepCommand
        from twopool.protocol.errors import ConfigError, TwopoolError
        from twopool.protocol.framing import FrameSocket, frame

        control: FrameSocket[ControlCommand] = FrameSocket(self._control_socket, ControlCommand)
        steps: FrameSocket[StepCommand] = FrameSocket(self._steps_socket, StepCommand)
        setup = control.receive(timeout_s=SETUP_TIMEOUT_S)
        if not isinstance(setup, RankSetup):
            raise RuntimeError(f"{type(setup).__name__} came instead of the set-up")
        config = _config(setup)
        try:
            model, epoch, collective = _load(setup, config, control)
        except ConnectionError:
            return 1
        except TwopoolError as error:
            message = LoadFailed(message=error.message[:8192], is_config=isinstance(error, ConfigError))
            control.send(frame(message), timeout_s=SETUP_TIMEOUT_S)
            _wait_for_end(control)
            return 1
        return asyncio.run(_serve(config, model, epoch, collective, control, steps))


def _config(setup: "RankSetup") -> "WorkerConfig":
    from twopool.protocol.config import WorkerConfig, add_flags, from_namespace
    from twopool.protocol.logs import setup_logging

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, WorkerConfig)
    config = from_namespace(WorkerConfig, parser.parse_args(setup.flags))
    setup_logging(process=f"{config.worker_id}.r{setup.rank}", level=config.log_level, style=config.log_format)
    return config


def _load(
    setup: "RankSetup", config: "WorkerConfig", control: "FrameSocket[ControlCommand]"
) -> "tuple[LoadedModel, Epoch, Collective]":
    from twopool.engine.loading import RankPlace, kernel_backend, load_decoder, pool_blocks, rank_device, with_pool
    from twopool.engine.rank_messages import AllocatePool, ShardLoaded
    from twopool.engine.tp_meeting import join
    from twopool.models.sharding import Shard
    from twopool.protocol.framing import frame

    if setup.cpus is not None:
        os.sched_setaffinity(0, setup.cpus)
    folder, shard = Path(setup.folder), Shard(setup.rank, setup.size)
    collective = join(setup.meeting, shard, rank_device(config.device, setup.local_rank))
    place = RankPlace(shard, collective, local_rank=setup.local_rank)
    decoder = load_decoder(config, folder, place)
    loaded = ShardLoaded(
        num_blocks=pool_blocks(config, decoder),
        fingerprint=decoder.fingerprint(),
        kernel_backend=kernel_backend(decoder, deterministic_gemm=config.deterministic_gemm),
    )
    control.send(frame(loaded), timeout_s=SETUP_TIMEOUT_S)
    command = control.receive(timeout_s=None)
    if not isinstance(command, AllocatePool):
        raise RuntimeError(f"{type(command).__name__} came before the pool was allocated")
    model = with_pool(config, folder, decoder, place, num_blocks=command.num_blocks)
    return model, command.epoch, collective


def _wait_for_end(control: "FrameSocket[ControlCommand]") -> None:
    """Until the leader has read what was said last and closes the connection."""
    from twopool.protocol.errors import ProtocolError

    try:
        while True:
            control.receive(timeout_s=SETUP_TIMEOUT_S)
    except (OSError, ProtocolError):
        return


async def _serve(
    config: "WorkerConfig",
    model: "LoadedModel",
    epoch: "Epoch",
    collective: "Collective",
    control: "FrameSocket[ControlCommand]",
    steps: "FrameSocket[StepCommand]",
) -> int:
    from twopool.engine.rank_messages import PoolReady
    from twopool.kv_transfer.factory import create_transport
    from twopool.kv_transfer.fault_points import FaultPoints
    from twopool.kv_transfer.memory import settle_pool_later
    from twopool.kv_transfer.rank_messages import KvCommand
    from twopool.kv_transfer.rank_server import RankServer
    from twopool.protocol.framing import FrameConnection

    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(error: BaseException | None) -> None:
        if error is not None:
            logger.error("this rank ends", exc_info=error)
        if not ended.done():
            ended.set_result(0 if error is None else 1)

    transport = create_transport(
        config.kv_transport,
        pool=model.kv_pool,
        geometry=model.geometry,
        epoch=epoch,
        agent_name=config.worker_id or "worker",
        backend=config.nixl_backend,
        ucx=config.ucx_settings,
        map_same_host=config.maps_same_host,
        convert_dtype=config.kv_convert_dtype,
        faults=FaultPoints(config.fault_points),
        loop=asyncio.get_running_loop(),
    )
    connection: FrameConnection[KvCommand] = FrameConnection(
        KvCommand, on_message=lambda command: server.on_command(command), on_lost=end
    )
    server = RankServer(transport, connection.send, on_fault=end)
    await connection.open(control.socket)
    runner = model.runner(config)
    thread = threading.Thread(target=_run_steps, args=(runner, collective, steps), name="rank-steps", daemon=True)
    thread.start()
    connection.send(PoolReady(pool=transport.rank_pool))
    if model.kv_pool.device.type == "cpu":
        settle_pool_later(model.kv_pool)
    return await ended


def _run_steps(runner: "ModelRunner", collective: "Collective", steps: "FrameSocket[StepCommand]") -> None:
    """Compute what the leader says, until it says no more."""
    from twopool.engine.rank_messages import StepDone
    from twopool.protocol.errors import ProtocolError
    from twopool.protocol.framing import frame

    try:
        while True:
            command = steps.receive(timeout_s=None)
            try:
                runner.compute(command.plan())
                runner.wait_written()
                done = StepDone(command.number)
            except Exception as error:  # whatever it is, the leader has to hear that the ranks are no longer one
                logger.exception("step %d failed", command.number)
                collective.abort()
                done = StepDone(command.number, repr(error)[:8192])
            steps.send(frame(done), timeout_s=None)
    except (OSError, ProtocolError) as error:
        logger.debug("no more steps: %s", error)  # the end of the leader, or of its trust, is seen elsewhere


if __name__ == "__main__":
    main()
