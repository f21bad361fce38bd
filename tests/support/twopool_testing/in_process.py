"""A router's dispatcher and any number of workers in one process, on a model whose answers depend on every KV byte.

Everything is real but the arithmetic and the HTTP server: sockets, roles, engines, block pools, transports. So a
thousand rounds of requests and faults take a minute, and each wrong, torn or stale block becomes a wrong token.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from twopool.decode.role import DecodeRole
from twopool.engine.kv_cache import allocate_kv_pool
from twopool.engine.loading import LoadedModel
from twopool.engine.worker import WorkerHost
from twopool.kv_transfer.local import LocalFabric
from twopool.models.batch import ForwardBatch
from twopool.prefill.role import PrefillRole
from twopool.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, WorkerConfig
from twopool.protocol.errors import OverloadedError, UnavailableError
from twopool.protocol.geometry import KvGeometry
from twopool.protocol.ids import RouterId, new_request_id
from twopool.protocol.messages import Generate, PeerRef, PrefixHint, SamplingParams
from twopool.protocol.security import Security
from twopool.protocol.sockets import ServerSocket
from twopool.router.admission import Breaker
from twopool.router.dispatcher import RequestDispatcher
from twopool.router.interface import RoutedRequest
from twopool.router.registry import Worker as RoutedWorker
from twopool_testing.mock_control import RecordingSink

VOCAB_SIZE = 211
BLOCK_SIZE = 16
NUM_LAYERS = 6
NUM_HEADS = 2
MAX_MODEL_LEN = 1024
_MODULUS = 2**31 - 1


def geometry(num_blocks: int, block_size: int = BLOCK_SIZE) -> KvGeometry:
    """Two float32 make one int64, the cell of one position, layer, head and K or V."""
    return KvGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        num_kv_heads_local=NUM_HEADS,
        head_dim=2,
        dtype="float32",
    )


def _cells(tokens: Any, positions: Any) -> Any:
    """``[n, heads, layers, 2]`` int64 of ``[n]`` tokens at ``[n]`` positions."""
    base = (np.asarray(tokens, dtype=np.int64) * 7919 + np.asarray(positions, dtype=np.int64) * 104729 + 1) % _MODULUS
    shape = (NUM_HEADS, NUM_LAYERS, 2)
    offsets = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) * 48271 + 13
    return (base[:, None, None, None] * (offsets % 97 + 1) + offsets) % _MODULUS


def _next_token(cells: Any) -> int:
    """From ``[n, heads, layers, 2]``, the cells of all positions."""
    weights = np.arange(1, len(cells) + 1, dtype=np.int64)
    return int((cells.sum(axis=(1, 2, 3)) % _MODULUS * weights % _MODULUS).sum() % _MODULUS % VOCAB_SIZE)


def expected(prompt_ids: list[int], num_tokens: int) -> list[int]:
    """What any number of workers must answer, computed from the ids alone."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(_next_token(_cells(ids, np.arange(len(ids)))))
    return ids[len(prompt_ids) :]


class SummingModel:
    """A decoder whose next token is a sum over every KV cell of its context, as found through the block table."""

    device = torch.device("cpu")
    reports_layers = True

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        self.step_s = 0.0

    def fingerprint(self) -> str:
        return "summing"

    def forward(self, batch: ForwardBatch, kv_pool: Tensor, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        pool = kv_pool.view(torch.int64)[..., 0].numpy()  # [blocks, heads, layers, 2, block_size]
        block_size = pool.shape[-1]
        new = _cells(batch.token_ids.numpy(), batch.positions.numpy())
        slots = batch.slots.numpy()
        for layer in range(NUM_LAYERS):
            pool[slots // block_size, :, layer, :, slots % block_size] = new[:, :, layer]
            if self.step_s:
                time.sleep(self.step_s / NUM_LAYERS)
            if on_layer is not None:
                on_layer(layer + 1)
        sequence_of = np.repeat(np.arange(len(batch.query_lens_host)), batch.query_lens_host)
        logits = torch.zeros(len(batch.logit_rows), VOCAB_SIZE)
        for row, flat in enumerate(batch.logit_rows.tolist()):
            sequence = sequence_of[flat]
            where = np.arange(int(batch.context_lens_host[sequence]))
            blocks = batch.block_tables[sequence].numpy()[where // block_size]
            logits[row, _next_token(pool[blocks, :, :, :, where % block_size])] = 10.0
        return logits


@dataclass
class Worker:
    host: WorkerHost
    model: SummingModel
    faults_file: Path
    task: "asyncio.Task[None]"
    _count: "itertools.count[int]" = field(default_factory=itertools.count)

    def faults(self, *lines: str) -> None:
        """From now on just these happen, counted anew."""
        target = self.faults_file.with_suffix(".new")
        target.write_text("\n".join((*lines, f"# {next(self._count)}")))
        target.replace(self.faults_file)

    @property
    def is_balanced(self) -> bool:
        counts = self.host.pool.counts()
        return not (counts.active or counts.pinned or counts.fetching or counts.quarantined) and not len(
            self.host.role.jobs
        )


class InProcessCluster:
    """Make it with ``running``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._security = Security(None)
        self._fabric = LocalFabric()
        self.workers: dict[str, Worker] = {}
        self.fields: dict[str, Any] = {}
        """of the configuration of those that ``running`` started"""
        self._socket = ServerSocket(
            security=self._security,
            host="127.0.0.1",
            port=0,
            on_message=lambda peer, payload: self.dispatcher.on_message(peer, payload),
            on_lost=lambda peer: self.dispatcher.on_lost(peer),
        )
        config = RouterConfig(min_prefill=0, min_decode=0, max_attempts=6)
        self.dispatcher = RequestDispatcher(config, RouterId("router-test"), self._socket)
        self.dispatcher.start()
        self.hint: PrefixHint | None = None
        """rides with every ``Generate`` from now on"""
        send = self.dispatcher.control.send

        def send_with_hint(worker: RoutedWorker, message: msgspec.Struct) -> bool:
            if isinstance(message, Generate):
                message = msgspec.structs.replace(message, prefix=self.hint)
            return send(worker, message)

        cast(Any, self.dispatcher.control).send = send_with_hint

    def use_only(self, *names: str) -> None:
        """Pair requests with these workers alone."""
        for worker in self.dispatcher.workers.workers:
            worker.candidate.draining = worker.worker_id not in names

    def hint_at(self, name: str, num_tokens: int) -> None:
        host = self.workers[name].host
        self.hint = PrefixHint(PeerRef(host.worker_id, host.pool.epoch), num_tokens)

    def start_worker(self, name: str, *, num_blocks: int = 65, block_size: int = BLOCK_SIZE, **fields: Any) -> Worker:
        role = name.split("-", maxsplit=1)[0]
        config_type: type[WorkerConfig] = PrefillConfig if role == "prefill" else DecodeConfig
        faults_file = self._folder / f"{name}.faults"
        config = config_type(
            worker_id=name,
            router=(f"127.0.0.1:{self._socket.port}",),
            block_size=block_size,
            fault_points=faults_file,
            **({"max_num_batched_tokens": 64, "pin_lease_s": 3.0} | fields),
        )
        shape = geometry(num_blocks, block_size)
        model = SummingModel()
        memory = allocate_kv_pool(shape, torch.device("cpu"), shared=config.maps_same_host)
        loaded = LoadedModel(cast(Any, model), shape, memory, self._folder, num_valid_tokens=VOCAB_SIZE)
        make_role = PrefillRole if role == "prefill" else DecodeRole
        host = WorkerHost(config, cast(Any, role), loaded, make_role, fabric=self._fabric)
        self.workers[name] = Worker(host, model, faults_file, asyncio.create_task(host.run()))
        return self.workers[name]

    async def until(self, condition: Callable[[], object], what: str, within_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {within_s:g} s for {what}")
            for worker in self.workers.values():
                if worker.task.done():
                    worker.task.result()
            await asyncio.sleep(0.002)

    async def until_linked(self) -> None:
        """Every worker can read from every other, and the router knows."""
        others = len(self.workers) - 1

        def linked() -> bool:
            known = self.dispatcher.workers.workers
            if len(known) != others + 1 or any(len(worker.candidate.sources) != others for worker in known):
                return False
            # The router may not have heard yet of a link that broke.
            return all(len(worker.host.sources.ready()) == others for worker in self.workers.values())

        await self.until(linked, "all workers to know each other", 20)

    def forgive(self) -> None:
        """The router forgets earlier failures, so that the next request is paired like the first."""
        for worker in self.dispatcher.workers.workers:
            worker.candidate.breaker = Breaker()

    async def ask(
        self, prompt_ids: list[int], num_tokens: int, *, timeout_s: float = 5.0, request_timeout_s: float = 60.0
    ) -> list[int]:
        """The tokens of one greedy request; raises what the router would tell the client."""
        request = RoutedRequest(
            request_id=new_request_id(),
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            sampling=SamplingParams(seed=0, temperature=0.0, max_tokens=num_tokens),
            salt=b"",
            timeout_s=request_timeout_s,
            arrived_s=time.monotonic(),
        )
        sink = RecordingSink(1)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self.dispatcher.submit(request, sink)
                break
            except (OverloadedError, UnavailableError):
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.02)
        try:
            await self.until(lambda: sink.errors or 0 in sink.finish_reasons, "an answer", timeout_s)
        except BaseException:
            self.dispatcher.cancel(request.request_id)
            raise
        if sink.errors:
            raise sink.error
        return sink.output_ids[0]

    async def until_balanced(self, within_s: float = 2.0) -> None:
        """No worker holds a block for anybody, and every pool counts right."""
        await self.until(
            lambda: all(worker.is_balanced for worker in self.workers.values()),
            f"blocks to balance: { {name: one.host.pool.counts() for name, one in self.workers.items()} }",
            within_s,
        )
        for worker in self.workers.values():
            worker.host.pool.check()

    async def close(self) -> None:
        for worker in self.workers.values():
            worker.faults()
            worker.host.stop()
        await asyncio.gather(*(worker.task for worker in self.workers.values()), return_exceptions=True)
        await self.dispatcher.close()
        self._socket.close()
        self._security.close()


@contextlib.asynccontextmanager
async def running(folder: Path, names: tuple[str, ...], **fields: Any) -> AsyncIterator[InProcessCluster]:
    """Workers called ``names`` (``prefill-0``, ``decode-1`` ...), all linked; ``fields`` are of their configuration."""
    cluster = InProcessCluster(folder)
    cluster.fields = fields
    try:
        for name in names:
            cluster.start_worker(name, **fields)
        await cluster.until_linked()
        yield cluster
    finally:
        await cluster.close()
