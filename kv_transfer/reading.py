"""The thread that owns a rank's agent: it loads peers, posts READs, sees them through and answers readers.

Others hand it commands through a queue and hear from it through ``call_soon_threadsafe``. One post at a time, so that
a cancel or another peer's fetch never waits for more than a few milliseconds of copying.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from twopool.kv_transfer.agent import PreparedList, ReadAgent
from twopool.kv_transfer.converting import Converter
from twopool.kv_transfer.fetch import Fetch
from twopool.kv_transfer.layout import Runs, StridedList
from twopool.kv_transfer.remote import Batch, LocalList, OpenPost, Remote, RemoteKey, cut
from twopool.protocol.errors import KvConversionError, TransferError
from twopool.protocol.messages import PeerIdentity

logger = logging.getLogger(__name__)

Command = Callable[[], None]
LostCallback = Callable[[RemoteKey, TransferError], None]

MAX_OPEN_POSTS = 4
"""Posts under way for one rank of a peer: enough to keep a link busy; the rest can still be cancelled."""

IDLE_WAIT_S = 0.1
MIN_READERS_WAIT_S = 50e-6
MAX_READERS_WAIT_S = 0.004
MIN_POLL_WAIT_S = 50e-6
MAX_POLL_WAIT_S = 100e-6
BUSY_CALL_S = 20e-6
"""A poll or pump that took longer than this is thought to have moved data: go on at once. An idle pump takes 10 µs, but
60 to 90 after 4 ms of waiting, in a cold cache: then a few looks follow in vain. A reader that waited for the next one
would pay more.
"""


class ReadingThread:
    """Public methods may be called from the event loop only; everything private runs on the thread."""

    def __init__(
        self, agent: ReadAgent, *, pool: torch.Tensor, loop: asyncio.AbstractEventLoop, on_lost: LostCallback
    ) -> None:
        """``pool``, flat uint8, is where converted KV goes. ``on_lost(key, error)`` is called on ``loop`` when a peer's
        rank can be read no more.
        """
        self._agent = agent
        self._converter = Converter(agent, pool)
        self._loop = loop
        self._on_lost = on_lost
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._expects_readers = False
        self._remotes: dict[RemoteKey, Remote] = {}
        self._local_lists: dict[LocalList, PreparedList] = {}
        self._poll_wait_s = 0.0
        self._readers_wait_s = 0.0
        self._broken: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-{agent.name}", daemon=True)
        self._thread.start()

    # --- on the event loop

    def register(self, memory: torch.Tensor) -> asyncio.Future[None]:
        """Make ``memory``, flat uint8, a destination of READs."""
        return self._call(lambda: self._agent.register(memory))

    def open(self, peer: PeerIdentity, ranks: Sequence[int]) -> asyncio.Future[None]:
        """Load ``ranks`` of ``peer``; every success must be undone by ``close``."""
        return self._call(lambda: self._open(peer, ranks))

    def close(self, peer: PeerIdentity, ranks: Sequence[int]) -> None:
        self._commands.put(lambda: self._close(peer, ranks))

    def start(self, fetch: Fetch, peer: PeerIdentity, local_address: int, make_runs: Callable[[], list[Runs]]) -> None:
        """Read what ``make_runs`` (called on the thread) says, into memory that begins at ``local_address``."""
        self._commands.put(lambda: self._start(fetch, peer, local_address, make_runs))

    def abandon(self, fetch: Fetch) -> None:
        """The fetch is over for its owner: settle it as soon as none of its READs is under way."""
        self._commands.put(lambda: self._settle_if_quiet(fetch))

    def expect_readers(self, expected: bool) -> None:
        def command() -> None:
            self._expects_readers = expected
            self._readers_wait_s = 0.0

        self._commands.put(command)

    async def stop(self) -> None:
        """End the thread after the commands given so far. Idempotent."""

        def command() -> None:
            self._stopping = True

        self._commands.put(command)
        await asyncio.to_thread(self._thread.join)

    def _call(self, work: Command) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()

        def finish(error: TransferError | None) -> None:
            if not done.done() and error is None:
                done.set_result(None)
            elif not done.done() and error is not None:
                done.set_exception(error)

        def command() -> None:
            try:
                if self._broken is not None:
                    raise self._broken
                work()
            except TransferError as error:
                self._tell(finish, error)
            else:
                self._tell(finish, None)

        self._commands.put(command)
        return done

    # --- on the thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._run_commands(self._wait_s())
                if self._broken is None:
                    self._step()
            # A thread that dies in silence would leave every fetch to its deadline: whatever it was, say so.
            except Exception as error:
                logger.exception("the KV transfer thread of %s failed", self._agent.name)
                self._broken = TransferError(f"the KV transfer thread failed: {error!r}")
                for remote in self._remotes.values():
                    self._lose(remote, self._broken)

    def _run_commands(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` for a command, then run all there are."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _wait_s(self) -> float:
        if any(remote.pending and len(remote.open_posts) < MAX_OPEN_POSTS for remote in self._remotes.values()):
            return 0.0
        if any(remote.open_posts for remote in self._remotes.values()):
            return self._poll_wait_s
        if self._expects_readers:
            return self._readers_wait_s
        return IDLE_WAIT_S

    def _step(self) -> None:
        """One post for each peer's rank that has work, one look at each open post, one answer to readers."""
        moved = False
        for remote in list(self._remotes.values()):
            if len(remote.open_posts) < MAX_OPEN_POSTS:
                batch = remote.next_batch()
                if batch is not None:
                    self._post(remote, batch)
                    moved = True
            moved = self._poll(remote) or moved
        self._poll_wait_s = 0.0 if moved else _longer(self._poll_wait_s, MIN_POLL_WAIT_S, MAX_POLL_WAIT_S)
        started = time.perf_counter()
        self._agent.pump()
        moved = time.perf_counter() - started > BUSY_CALL_S
        self._readers_wait_s = 0.0 if moved else _longer(self._readers_wait_s, MIN_READERS_WAIT_S, MAX_READERS_WAIT_S)

    def _post(self, remote: Remote, batch: Batch) -> None:
        now = time.perf_counter()
        fetches = batch.fetches
        for piece in batch.pieces:
            piece.fetch.progress.num_unposted -= 1
        for fetch in fetches:
            fetch.progress.num_posts += 1
            fetch.progress.num_open_posts += 1
            if fetch.progress.started_at is None:
                fetch.progress.started_at = now
        first = batch.pieces[0]
        local_index, remote_index = batch.indices()
        try:
            source = self._remote_list(remote, first.remote)
            if first.conversion is None:
                local = self._local_list(first.local)
                post = self._agent.post(local=local, local_index=local_index, remote=source, remote_index=remote_index)
            else:
                post = self._converter.post(
                    local=first.local[1],
                    local_index=local_index,
                    remote=source,
                    remote_length=first.remote.length,
                    remote_index=remote_index,
                    conversion=first.conversion,
                )
        except TransferError as error:
            self._lose(remote, error, fetches)
            self._close_post(fetches)
        else:
            remote.open_posts.append(OpenPost(post, fetches))

    def _poll(self, remote: Remote) -> bool:
        """Whether anything moved."""
        moved = False
        for open_post in list(remote.open_posts):
            started = time.perf_counter()
            try:
                if not open_post.post.poll():
                    moved = moved or time.perf_counter() - started > BUSY_CALL_S
                    continue
            except KvConversionError as error:
                self._fail(open_post.fetches, error)
            except TransferError as error:
                self._lose(remote, error)
            moved = True
            remote.open_posts.remove(open_post)
            # What failed is over, and its handle is of no more use however its release goes.
            with suppress(TransferError):
                open_post.post.release()
            self._close_post(open_post.fetches)
        if moved:
            self._forget_if_unused(remote)
        return moved

    def _close_post(self, fetches: set[Fetch]) -> None:
        """A post is over; had it failed, its fetches would be abandoned by now."""
        now = time.perf_counter()
        for fetch in fetches:
            progress = fetch.progress
            progress.num_open_posts -= 1
            if progress.is_quiet and not progress.is_abandoned:
                self._tell(fetch.complete, progress.report(now))
            self._settle_if_quiet(fetch)

    def _settle_if_quiet(self, fetch: Fetch) -> None:
        if fetch.progress.is_quiet and not fetch.progress.is_settled:
            fetch.progress.is_settled = True
            self._tell(fetch.settle)

    def _lose(self, remote: Remote, error: TransferError, fetches: Iterable[Fetch] = ()) -> None:
        """Fail ``fetches`` and all others that read from ``remote``; what is under way is polled until it is over."""
        waiting = {piece.fetch for piece in remote.pending}
        remote.pending.clear()
        self._fail(waiting.union(fetches, *(post.fetches for post in remote.open_posts)), error)
        if remote.lost is None:
            remote.lost = error
            self._tell(self._on_lost, remote.key, error)

    def _fail(self, fetches: set[Fetch], error: TransferError) -> None:
        for fetch in fetches:
            fetch.progress.is_abandoned = True
            self._tell(fetch.fail, error)

    def _start(self, fetch: Fetch, peer: PeerIdentity, local_address: int, make_runs: Callable[[], list[Runs]]) -> None:
        if fetch.progress.is_abandoned:
            return
        if self._broken is not None:
            self._tell(fetch.fail, self._broken)
            return
        for runs in make_runs():
            remote = self._remotes.get(_key(peer, runs.rank))
            if remote is None or remote.lost is not None:
                error = remote.lost if remote is not None else None
                fetch.progress.is_abandoned = True
                self._tell(fetch.fail, error or TransferError(f"rank {runs.rank} of {peer.worker_id} is not loaded"))
                return
            fetch.progress.num_bytes += runs.num_bytes
            fetch.progress.num_converted_bytes += runs.num_bytes if runs.conversion else 0
            fetch.progress.num_ranges += runs.num_ranges
            pieces = list(cut(fetch, runs, local_address))
            fetch.progress.num_unposted += len(pieces)
            remote.pending.extend(pieces)

    def _open(self, peer: PeerIdentity, ranks: Sequence[int]) -> None:
        opened: list[int] = []
        try:
            for rank in ranks:
                self._open_rank(peer, rank)
                opened.append(rank)
        except TransferError:
            self._close(peer, opened)
            raise

    def _open_rank(self, peer: PeerIdentity, rank: int) -> None:
        key = _key(peer, rank)
        pool = peer.ranks[rank]
        remote = self._remotes.get(key)
        if remote is None:
            remote = self._remotes[key] = Remote(key, pool, self._agent.add_peer(pool, peer.epoch))
        elif remote.pool != pool:
            raise TransferError(f"rank {rank} of {peer.worker_id} describes its pool otherwise than before")
        elif remote.lost is not None:
            raise TransferError(f"READs from the lost rank {rank} of {peer.worker_id} are not over yet")
        remote.num_links += 1

    def _close(self, peer: PeerIdentity, ranks: Sequence[int]) -> None:
        for rank in ranks:
            remote = self._remotes[_key(peer, rank)]
            remote.num_links -= 1
            self._forget_if_unused(remote)

    def _forget_if_unused(self, remote: Remote) -> None:
        """Unload a rank no link uses, once no READ from it is under way: closing its endpoint would not end one."""
        if remote.num_links or remote.open_posts:
            return
        del self._remotes[remote.key]
        # A lost peer's lists and agent may be gone already.
        for prepared in remote.lists.values():
            with suppress(TransferError):
                prepared.release()
        with suppress(TransferError):
            self._agent.remove_peer(remote.agent_name)

    def _local_list(self, local: LocalList) -> PreparedList:
        prepared = self._local_lists.get(local)
        if prepared is None:
            prepared = self._local_lists[local] = self._agent.prepare_local(*local)
        return prepared

    def _remote_list(self, remote: Remote, runs: StridedList) -> PreparedList:
        prepared = remote.lists.get(runs)
        if prepared is None:
            prepared = remote.lists[runs] = self._agent.prepare_remote(remote.agent_name, remote.pool, runs)
        return prepared

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        # The loop may be closed already when the process ends in a hurry; then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def _key(peer: PeerIdentity, rank: int) -> RemoteKey:
    return (peer.worker_id, peer.epoch, rank)


def _longer(wait_s: float, least_s: float, most_s: float) -> float:
    return min(max(2 * wait_s, least_s), most_s)
