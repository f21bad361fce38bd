"""``twopool up``: a router with prefill and decode workers on this machine, started, watched and stopped together.

resolve the model → router and workers → its control address, told to them → all announced and /ready says 200 → watch
anything wrong, at any time: say which process and why, stop the rest, exit status 1
SIGINT or SIGTERM: the router drains with its workers still there, then the workers go; a second signal kills
"""

import argparse
import asyncio
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from twopool.protocol.config import RouterConfig
from twopool.protocol.endpoints import bracketed, is_loopback
from twopool.protocol.errors import TwopoolError
from twopool.protocol.security import generate_cluster_key
from twopool.scripts.child import Child, Listening, Ready
from twopool.scripts.placement import CpuShare
from twopool.scripts.status import Row, StatusView
from twopool.scripts.supervisor import StopRequestedError, Supervisor
from twopool.scripts.up_plan import UpPlan, WorkerPlan, make_plan, reachable, router_line

A = TypeVar("A", Listening, Ready)

_READY_POLL_S = 0.1
_READY_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 * 1024
_DRAIN_GRACE_S = 5.0
_FAILURE_STOP_S = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal or a failure; returns the exit status. Raises ``TwopoolError`` before anything is started."""
    from twopool.models.store import resolve_model

    with _cluster_key(arguments) as key:
        plan = make_plan(arguments, cluster_key=key)
        resolve_model(plan.router.model)  # once, with its progress to see; the children find it in the cache
        return asyncio.run(serve(plan, StatusView(log_format=plan.router.log_format)))


async def serve(plan: UpPlan, view: StatusView) -> int:
    """Start everything ``plan`` names, watch it, stop it; returns the exit status."""
    failures: list[str] = []
    async with Supervisor(view.log_line) as supervisor:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.stop_signal())
                await _bring_up(plan, view, supervisor, lambda child: group.create_task(child.watch()))
        except* StopRequestedError:
            pass
        except* TwopoolError as errors:
            failures = list(dict.fromkeys(_messages(errors)))  # a child's death may be seen in two places
        for failure in failures:
            view.error(failure)
        view.progress("stopping" if failures else "draining, then stopping; once more stops at once")
        if failures:  # clients cannot be served to the end any more
            unclean = await supervisor.stop(lambda children: [children], _FAILURE_STOP_S)
        else:
            unclean = await supervisor.stop(_router_first, plan.drain_timeout_s + _DRAIN_GRACE_S)
        for words in unclean:
            view.error(words)
    return 1 if failures or unclean else 0


async def _bring_up(plan: UpPlan, view: StatusView, supervisor: Supervisor, watch: Callable[[Child], object]) -> None:
    """Start everything; return when requests can be sent. ``watch`` is called for each child."""
    deadline_s = plan.up.startup_timeout_s
    try:
        async with asyncio.timeout(deadline_s):
            view.progress(f"starting the router, {_counts(plan)}")
            router = await supervisor.start(plan.router_spec)
            workers = [(worker, await supervisor.start(plan.worker_spec(worker))) for worker in plan.workers]
            listening = await _announced(router, Listening)
            watch(router)
            url = _client_url(listening.http)
            rows = [Row(child=router, address=listening.http, cpus="any", started_in_s=view.elapsed_s)]
            view.progress(f"router listening on {listening.http}")
            for _, child in workers:  # they have loaded their libraries meanwhile
                child.tell(router_line(listening.control))
            for _, child in workers:
                watch(child)
            rows += await asyncio.gather(*(_worker_row(worker, child, view) for worker, child in workers))
            await _until_ready(url, view)
    except TimeoutError as error:
        slow = [child.name for child in supervisor.children if child.announcement is None]
        what = f"{', '.join(slow)} not up" if slow else "the router not ready"
        raise TwopoolError(f"{what} within --startup-timeout-s {deadline_s:g}") from error
    view.serving(rows, url, plan.router.served_names[0])


async def _worker_row(worker: WorkerPlan, child: Child, view: StatusView) -> Row:
    ready = await _announced(child, Ready)
    view.progress(f"{child.name} ready")
    return Row(child=child, address=ready.peer_address, cpus=_cpus(worker.share), started_in_s=view.elapsed_s)


async def _announced(child: Child, kind: type[A]) -> A:
    announcement = await child.up()
    if not isinstance(announcement, kind):
        raise TwopoolError(f"{child.name} announced itself as {announcement.role}")
    return announcement


async def _until_ready(url: str, view: StatusView) -> None:
    """Poll the router's /ready until it says 200."""
    view.progress("waiting for the workers' handshakes")
    while True:
        if await _http_status(url, "/ready") == 200:
            return
        await asyncio.sleep(_READY_POLL_S)


async def _http_status(url: str, path: str) -> int | None:
    """The status of one GET, past any proxy the environment names; None when there is no answer."""
    parts = urlsplit(url)
    # Our own child on this machine: its certificate names the host that clients use, not the address asked here.
    tls = _unverified() if parts.scheme.startswith("https") else None
    writer = None
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            if parts.scheme.endswith("+unix"):
                reader, writer = await asyncio.open_unix_connection(parts.path, ssl=tls)
            else:
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read(_MAX_ANSWER_BYTES)
        return int(answer.split(b" ", 2)[1])
    except (OSError, TimeoutError, IndexError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextmanager
def _cluster_key(arguments: argparse.Namespace) -> Iterator[Path | None]:
    """The key to use: the one given, none on loopback, else a new one that lives as long as this deployment."""
    given: Path | None = getattr(arguments, "cluster_key", None)
    host = getattr(arguments, "host", None) or RouterConfig().host
    if given is not None or is_loopback(host):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="twopool-") as folder:  # readable by its owner alone
        path = Path(folder) / "cluster.key"
        generate_cluster_key(path)
        yield path


def _router_first(children: Sequence[Child]) -> list[list[Child]]:
    """The router needs its workers to finish its open requests."""
    routers = [child for child in children if child.name == "router"]
    return [routers, [child for child in children if child not in routers]]


def _client_url(http: str) -> str:
    parts = urlsplit(http)
    if parts.scheme.endswith("+unix"):
        return http
    host, _, port = reachable(f"{bracketed(parts.hostname or '')}:{parts.port}").rpartition(":")
    return f"{parts.scheme}://{host}:{port}"


def _counts(plan: UpPlan) -> str:
    counts = [sum(worker.role == role for worker in plan.workers) for role in ("prefill", "decode")]
    return f"{counts[0]} prefill and {counts[1]} decode"


def _cpus(share: CpuShare | None) -> str:
    return "any" if share is None or share.cpus is None else ",".join(map(str, share.cpus))


def _messages(group: BaseExceptionGroup[TwopoolError]) -> Iterator[str]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _messages(error)
        else:
            yield error.message
