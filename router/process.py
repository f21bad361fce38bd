"""The router process: the control endpoint, the dispatcher and the HTTP server on one event loop."""

import asyncio
import gc
import logging
import signal
import sys
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
from twopool.router.server import build_server

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 10_000
"""New container objects between collections: at most about half a millisecond each, where 700 made it one a step."""


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
    setup_logging(process="router", level=config.log_level, style=config.log_format)
    try:
        model = load_model_info(model_folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, model))
    except TwopoolError as error:
        sys.stderr.write(f"twopool: error: {error.message}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _serve(config: RouterConfig, model: ModelInfo) -> None:
    registry = CollectorRegistry()
    security = Security(config.cluster_key)
    try:
        control = _ControlEndpoint(config, security)
        dispatcher = RequestDispatcher(config, new_router_id(), control, metrics=registry)
        control.serve(dispatcher)
        app = RouterApp(config, dispatcher, model, registry=registry, api_keys=load_api_keys(config.api_key_file))
        server = build_server(config, app)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            dispatcher.drain()
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        dispatcher.start()
        _calm_collector()
        _announce(config, server.port, control.port)
        try:
            await server.serve()
        finally:
            await dispatcher.close()
            control.close(linger_ms=300)
    finally:
        security.close()
    logger.info("stopped")


def _calm_collector() -> None:
    """What was loaded stays for good, so the collector need not look at it; and requests make little cyclic garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def _announce(config: RouterConfig, http_port: int, control_port: int) -> None:
    """The one line on stdout that says the ports are bound."""
    host = bracketed(config.advertise_host or config.host)
    line = {
        "event": "listening",
        "role": "router",
        "http": f"http://{host}:{http_port}",
        "control": f"{host}:{control_port}",
    }
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
