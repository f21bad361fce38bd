"""The transport of a rank that is not the leader's, at the leader's command."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np

from twopool.kv_transfer.checksums import ChecksumRequest
from twopool.kv_transfer.interface import FetchHandle, FetchRequest, KvTransport, PeerLink
from twopool.kv_transfer.rank_messages import (
    CancelFetch,
    CloseLink,
    ExpectReaders,
    Failure,
    FetchOver,
    FetchSettled,
    KvCommand,
    LinkLost,
    LinkOpened,
    OpenLink,
    StartFetch,
    SumUnits,
    UnitSums,
)
from twopool.protocol.errors import TransferError
from twopool.protocol.messages import unpack_ids


class RankServer:
    """Carries ``KvCommand`` out on ``transport`` and answers through ``send``. Lives on the event loop."""

    def __init__(
        self, transport: KvTransport, send: Callable[[msgspec.Struct], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        """``on_fault`` hears of what no answer can tell: the rank is of no more use, and has to end."""
        self._transport = transport
        self._send = send
        self._on_fault = on_fault
        self._links: dict[int, PeerLink] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._fetches: dict[int, FetchHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_command(self, command: KvCommand) -> None:
        match command:
            case OpenLink():
                self._opening[command.link] = self._start(self._open(command))
            case CloseLink():
                self._close(command.link)
            case StartFetch():
                self._fetch(command)
            case CancelFetch():
                handle = self._fetches.get(command.fetch)
                if handle is not None:
                    handle.cancel()
            case ExpectReaders():
                self._transport.expect_readers(command.expected)
            case SumUnits():
                self._start(self._sum(command))

    async def _open(self, command: OpenLink) -> None:
        failure = None
        try:
            link = await self._transport.connect(command.peer, timeout_s=command.timeout_s)
            self._links[command.link] = link
            link.closed.add_done_callback(lambda _: self._on_closed(command.link))
        except TransferError as error:
            failure = Failure.of(error)
        finally:
            self._opening.pop(command.link, None)
        self._send(LinkOpened(link=command.link, failure=failure))

    def _on_closed(self, number: int) -> None:
        """Tell of a link that was lost; one that was to be closed is not among ``_links`` any more."""
        if number in self._links:
            self._send(LinkLost(link=number))

    def _close(self, number: int) -> None:
        opening = self._opening.pop(number, None)
        if opening is not None:
            opening.cancel()
        link = self._links.pop(number, None)
        # Connecting again to what is connected gives the same link: the last one to close it does.
        if link is not None and link not in self._links.values():
            self._transport.disconnect(link)

    def _fetch(self, command: StartFetch) -> None:
        link = self._links.get(command.link)
        try:
            if link is None:
                raise TransferError(f"there is no link {command.link}")
            handle = self._transport.fetch(
                link,
                FetchRequest(
                    remote_block_ids=unpack_ids(command.remote_block_ids),
                    local_block_ids=unpack_ids(command.local_block_ids),
                    start_token=command.start_token,
                    end_token=command.end_token,
                    layer_start=command.layer_start,
                    layer_end=command.layer_end,
                ),
                timeout_s=command.timeout_s,
            )
        except TransferError as error:
            self._send(FetchOver(fetch=command.fetch, failure=Failure.of(error)))
            self._send(FetchSettled(fetch=command.fetch))
            return
        self._fetches[command.fetch] = handle
        self._start(self._follow(command, handle))

    async def _follow(self, command: StartFetch, handle: FetchHandle) -> None:
        try:
            report = await handle.wait()
        except TransferError as error:
            self._send(FetchOver(fetch=command.fetch, failure=Failure.of(error)))
        else:
            self._send(FetchOver(fetch=command.fetch, report=report))
        await asyncio.shield(handle.settled)
        del self._fetches[command.fetch]
        handle.release()
        self._send(FetchSettled(fetch=command.fetch))

    async def _sum(self, command: SumUnits) -> None:
        sums = await self._transport.checksums(
            ChecksumRequest(
                block_ids=unpack_ids(command.block_ids),
                start_token=command.start_token,
                unit_tokens=command.unit_tokens,
                layers=(command.layer_start, command.layer_end),
                units=unpack_ids(command.units),
                dtype=command.dtype,
            )
        )
        self._send(UnitSums(call=command.call, sums=np.ascontiguousarray(sums, dtype="<u8").tobytes()))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_fault(error)
