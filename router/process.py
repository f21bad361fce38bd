"""The router process: the control endpoint, the dispatcher and the HTTP server on one event loop."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from twopool.protocol.config import RouterConfig
from twopool.protocol.endpoints import bracketed
from twopool.protocol.errors import ConfigError, TwopoolError
from twopool.protocol.ids import new_router_id
from twopool.protocol.logs import setup_logging
from twopool.protocol.security import Security
from twopool.protocol.sockets import ServerSocket
from twopool.router.app import RouterApp
from twopool.router.auth import load_api_keys
from twopool.router.dispatcher import RequestDispatcher
from twopool.router.model_info import ModelInfo, load_model_info
from twopool.router.process_metrics import SharedMetrics
from twopool.router.processes import Share, run_processes
from twopool.router.server import build_server

logger = logging.getLogger(__name__)

_REPLACEMENT_WAIT_S = 10.0
_REPLACEMENT_POLL_S = 0.02
_GC_THRESHOLD = 50_000
"""New container objects between collections, which take a millisecond or two each; 700 made it one a step."""


class _ControlEndpoint:
    """The bound control socket, handed to the dispatcher before the dispatcher's handlers exist."""

    def __init__(self, config: RouterConfig, security: Security) -> None:
        self._dispatcher: RequestDispatcher | None = None
        self._socket = ServerSocket(
            security=security,
            host=config.host,
            port=config.control_port,
            on_message=self._on_message,
            on_lost=self._on_lost,
            port_flag="--control-port",
        )
        self.port = self._socket.port
        self.close = self._socket.close

    def serve(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    def send(self, peer: bytes, payload: bytes) -> bool:
        return self._socket.send(peer, payload)

    def _on_message(self, peer: bytes, payload: bytes) -> None:
        if self._dispatcher is not None:
            self._dispatcher.on_message(peer, payload)

    def _on_lost(self, peer: bytes) -> None:
        if self._dispatcher is not None:
            self._dispatcher.on_lost(peer)


def run_router(config: RouterConfig, model_folder: Path) -> int:
    """Serve in the foreground until SIGTERM or SIGINT; returns the exit status."""
    if config.router_processes == 1:
        return _run(config, model_folder, None)
    setup_logging(process="router", level=config.log_level, style=config.log_format)
    try:
        return run_processes(config, lambda _, share: _run(config, model_folder, share))
    except TwopoolError as error:
        return _failed(error)


def _run(config: RouterConfig, model_folder: Path, share: Share | None) -> int:
    name = "router" if share is None else f"router-{share.index}"
    setup_logging(process=name, level=config.log_level, style=config.log_format)
    if share is not None:
        config = dataclasses.replace(config, control_port=share.control_port, router_processes=1)
    try:
        model = load_model_info(model_folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, model, share))
    except TwopoolError as error:
        return _failed(error)
    return 0


def _failed(error: TwopoolError) -> int:
    sys.stderr.write(f"twopool: error: {error.message}\n")
    return 2 if isinstance(error, ConfigError) else 1


async def _serve(config: RouterConfig, model: ModelInfo, share: Share | None) -> None:
    registry = CollectorRegistry()
    security = Security(config.cluster_key)
    metrics = None if share is None else SharedMetrics(registry, share.folder, share.index, share.count)
    try:
        control = _ControlEndpoint(config, security)
        queue_length = None if share is None else share.queue_length
        dispatcher = RequestDispatcher(config, new_router_id(), control, metrics=registry, queue_length=queue_length)
        control.serve(dispatcher)
        keys = load_api_keys(config.api_key_file)
        page = None if metrics is None else metrics.page
        app = RouterApp(config, dispatcher, model, registry=registry, api_keys=keys, metrics_page=page)
        server = build_server(config, app, None if share is None else share.listener)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        if share is not None:
            loop.add_reader(share.parent_fd, _parent_gone, share.parent_fd, server.stop)
        if metrics is not None:
            await metrics.start()
        dispatcher.start()
        _calm_collector()
        _announce(config, server.url, control.port, share)
        try:
            if share is not None and share.is_replacement:
                await _until_ready(dispatcher)
            await server.serve()
        finally:
            await dispatcher.close()
            control.close(linger_ms=300)
    finally:
        if metrics is not None:
            await metrics.close()
        security.close()
    logger.info("stopped")


async def _until_ready(dispatcher: RequestDispatcher) -> None:
    """The other processes take what comes until the workers have found this one; but not for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REPLACEMENT_WAIT_S):
            while not dispatcher.is_ready():  # noqa: ASYNC110 - it depends on clocks too, nothing tells of it
                await asyncio.sleep(_REPLACEMENT_POLL_S)


def _parent_gone(parent_fd: int, stop: Callable[[], None]) -> None:
    """Nothing is ever written there: it can be read when it has ended."""
    asyncio.get_running_loop().remove_reader(parent_fd)
    stop()


def _calm_collector() -> None:
    """What was loaded stays for good, so the collector need not look at it; and requests make little cyclic garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _announce(config: RouterConfig, url: str, control_port: int, share: Share | None) -> None:
    """The one line on stdout that says the ports are bound; of several processes the parent prints it."""
    host = bracketed(config.advertise_host or config.host)
    line = {
        "event": "listening",
        "role": "router",
        "http": url,
        "control": f"{host}:{control_port}",
    }
    if share is not None:
        share.announce(msgspec.json.encode(line))
        return
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
