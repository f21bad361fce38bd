"""What the router costs: CPU time a streamed token and a request, throughput, and what it adds to the first token.

Mock workers answer known tokens at a set rate through the real protocol (``bench_router_workers``). The router has one
core to itself where there is more than one; the mock workers and the client share the others. CPU time is the router
process's own, all threads, read from /proc around each round. Rounds of all contestants are interleaved and every
figure is the median of its rounds: believe ratios, absolute figures move with the machine's mood.

In the same rounds the same load goes straight to a mock worker over HTTP, without any router. What a router's time to
the first token exceeds that by is its TTFT overhead: the client's own queueing is in neither.

With ``--peer sglang-router`` the same load goes to that router in PD mode in the same run. It is given HTTP workers
that send one event a token; it neither tokenises nor detokenises, twopool does both. ``events_per_token`` under 1 says
that chunks were merged, as happens to whoever falls behind, most of all where steps take no time.

``cpu_us_per_token`` of a row is all CPU time divided by all tokens: what the requests themselves cost is in it. So
each load is also run with answers a quarter as long, and the two together tell the costs apart: a request's own (with
its first token), and a further token's.
"""

import argparse
import contextlib
import http.client
import json
import operator
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from twopool.scripts import bench_router_peer as peer
from twopool.scripts.bench_router_control import set_step
from twopool.scripts.bench_router_load import LoadResult, check_answer, run_load
from twopool.scripts.bench_router_model import build_model, read_answer

NO_ROUTER = "no router"
_START_TIMEOUT_S = 60.0
_CACHE = Path.home() / ".cache" / "twopool" / "bench"


@dataclass(frozen=True)
class Case:
    """``num_streams`` at once, ``max_tokens`` an answer, a token each every ``step_ms``; ``num_requests`` a round."""

    num_streams: int
    step_ms: float
    max_tokens: int
    num_requests: int


@dataclass(frozen=True)
class Row:
    """Medians over the rounds of one case. ``cpu_us_per_token`` includes what the requests themselves cost.

    ``ttft_overhead_*``: what the percentile exceeds that of the same round without a router by.
    """

    router: str
    num_streams: int
    step_ms: float
    max_tokens: int
    cpu_us_per_token: float
    cpu_us_per_request: float
    tok_per_s: float
    req_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_overhead_p50_ms: float
    ttft_overhead_p99_ms: float
    events_per_token: float
    rounds: int


@dataclass(frozen=True)
class Cost:
    """CPU time of a request with its first token, and of each further one, told apart by two lengths of answers."""

    router: str
    num_streams: int
    step_ms: float
    cpu_us_per_request: float
    cpu_us_per_further_token: float


@dataclass
class Contestant:
    """A router that runs, and its mock workers."""

    name: str
    port: int
    pid: int
    workers: "subprocess.Popen[str]"

    def measure(self, case: Case) -> tuple[LoadResult, float]:
        """One round; also the CPU seconds the router took for it."""
        set_step(self.workers, case.step_ms)
        before_s = cpu_seconds(self.pid)
        result = run_load(
            self.port, num_streams=case.num_streams, num_requests=case.num_requests, max_tokens=case.max_tokens
        )
        return result, cpu_seconds(self.pid) - before_s


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        rows = _run(args)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench_router: {error}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(rows))
    costs = costs_of(rows)
    console.print(_cost_table(costs))
    if args.peer is not None:
        console.print(_ratios(rows))
    if args.json:
        report = {
            "setting": _setting(args),
            "rows": [asdict(row) for row in rows],
            "costs": [asdict(cost) for cost in costs],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("sglang-router",), help="also measure this router; installed when missing")
    parser.add_argument(
        "--peer-venv", type=Path, default=_CACHE / "sglang-router", help="virtual environment of the peer"
    )
    parser.add_argument(
        "--streams", type=_int_list, default=(1, 8, 64, 512), help="numbers of streams, comma separated"
    )
    parser.add_argument(
        "--step-ms", type=_float_list, default=(10.0, 0.0), help="times of a step; 0: as fast as it goes"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a round with steps takes")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds of 1 and 8 streams, to see that it works"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _float_list(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _run(args: argparse.Namespace) -> list[Row]:
    if args.quick:
        args.rounds, args.seconds, args.streams, args.max_tokens = 2, 0.5, (1, 8), 16
    cases = _cases(args)
    measured: defaultdict[tuple[str, Case], list[tuple[LoadResult, float]]] = defaultdict(list)
    router_cpus, other_cpus = _share_cpus()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twopool-bench-")))
        model = build_model(folder / "model")
        peer_python = peer.installed_python(args.peer_venv) if args.peer else None
        os.sched_setaffinity(0, other_cpus)
        contestants = [
            stack.enter_context(_no_router(model, folder)),
            stack.enter_context(_twopool(model, folder, router_cpus)),
        ]
        if peer_python is not None:
            contestants.append(stack.enter_context(_sglang(peer_python, model, folder, router_cpus)))
        _, texts = read_answer(model)
        for contestant in contestants:
            set_step(contestant.workers, 0)
            check_answer(contestant.port, texts, 200)
        progress = stack.enter_context(_progress())
        task = progress.add_task("rounds", total=args.rounds * len(cases) * len(contestants))
        for number in range(args.rounds):
            for case in cases:
                # Whoever goes first in one round goes last in the next.
                for contestant in contestants[:: 1 if number % 2 == 0 else -1]:
                    progress.update(task, description=f"{contestant.name}, {case.num_streams} streams")
                    measured[contestant.name, case].append(contestant.measure(case))
                    progress.advance(task)
    return [
        row_of(name, case, rounds, [result for result, _ in measured[NO_ROUTER, case]])
        for (name, case), rounds in measured.items()
        if name != NO_ROUTER
    ]


def _cases(args: argparse.Namespace) -> list[Case]:
    """Every number of streams at every step time with long and short answers, then requests of a single token."""
    cases = []
    for step_ms in args.step_ms:
        for num_streams in args.streams:
            for max_tokens in (args.max_tokens, max(2, args.max_tokens // 4)):
                answer_s = step_ms / 1e3 * max_tokens
                turns = max(1, round(args.seconds / answer_s)) if answer_s else 4
                least = 16 if not answer_s else 1
                cases.append(Case(num_streams, step_ms, max_tokens, max(least, num_streams * turns)))
    cases += [Case(num_streams, 0.0, 1, max(200, 2 * num_streams)) for num_streams in args.streams]
    return cases


def row_of(name: str, case: Case, rounds: list[tuple[LoadResult, float]], direct: list[LoadResult]) -> Row:
    """``rounds``: results and the router's CPU seconds; ``direct``: the results of the same rounds without a router."""
    results = [result for result, _ in rounds]
    p50s, p99s = ([_percentile_ms(result, percent) for result in results] for percent in (50, 99))
    direct_p50s, direct_p99s = ([_percentile_ms(result, percent) for result in direct] for percent in (50, 99))
    return Row(
        router=name,
        num_streams=case.num_streams,
        step_ms=case.step_ms,
        max_tokens=case.max_tokens,
        cpu_us_per_token=statistics.median(cpu_s / result.num_tokens for result, cpu_s in rounds) * 1e6,
        cpu_us_per_request=statistics.median(cpu_s / result.num_requests for result, cpu_s in rounds) * 1e6,
        tok_per_s=statistics.median(result.num_tokens / result.seconds for result in results),
        req_per_s=statistics.median(result.num_requests / result.seconds for result in results),
        ttft_p50_ms=statistics.median(p50s),
        ttft_p99_ms=statistics.median(p99s),
        ttft_overhead_p50_ms=statistics.median(map(operator.sub, p50s, direct_p50s)),
        ttft_overhead_p99_ms=statistics.median(map(operator.sub, p99s, direct_p99s)),
        events_per_token=statistics.median(result.num_events / result.num_tokens for result in results),
        rounds=len(rounds),
    )


def _percentile_ms(result: LoadResult, percent: int) -> float:
    times = sorted(result.ttft_s)
    return times[min(len(times) - 1, len(times) * percent // 100)] * 1e3


def costs_of(rows: list[Row]) -> list[Cost]:
    """From each pair of rows of one router and one load whose answers differ in length."""
    by_load: defaultdict[tuple[str, int, float], list[Row]] = defaultdict(list)
    for row in rows:
        if row.max_tokens > 1:
            by_load[row.router, row.num_streams, row.step_ms].append(row)
    costs = []
    for (router, num_streams, step_ms), group in by_load.items():
        if len(group) != 2:
            continue
        short, long = sorted(group, key=lambda row: row.max_tokens)
        more_us = long.cpu_us_per_request - short.cpu_us_per_request
        per_token_us = more_us / (long.max_tokens - short.max_tokens)
        own_us = short.cpu_us_per_request - per_token_us * (short.max_tokens - 1)
        costs.append(Cost(router, num_streams, step_ms, own_us, per_token_us))
    return costs


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads a process has now: in nanoseconds where the scheduler tells, else in clock ticks."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _no_router(model: Path, folder: Path) -> Iterator[Contestant]:
    """A mock worker that the client asks itself."""
    with _mock_servers(model, folder / "direct.log") as (servers, ports):
        yield Contestant(NO_ROUTER, ports[1], servers.pid, servers)


@contextlib.contextmanager
def _twopool(model: Path, folder: Path, cpus: frozenset[int]) -> Iterator[Contestant]:
    command = [sys.executable, "-P", "-m", "twopool.scripts.cli", "router", "--model", str(model)]
    command += ["--served-model-name", "bench", "--port", "0", "--control-port", "0", "--log-level", "warning"]
    command += ["--max-queue", "8192"]
    with _process([*command, "--cpus", ",".join(map(str, sorted(cpus)))], folder / "twopool.log") as router:
        announced = json.loads(_line(router))
        module = "twopool.scripts.bench_router_workers"
        workers = [sys.executable, "-P", "-m", module, "--model", str(model), "--router", announced["control"]]
        with _process(workers, folder / "workers.log") as process:
            port = int(announced["http"].rpartition(":")[2])
            _wait_ready(port, "/ready", router)
            yield Contestant("twopool", port, router.pid, process)


@contextlib.contextmanager
def _sglang(python: Path, model: Path, folder: Path, cpus: frozenset[int]) -> Iterator[Contestant]:
    with _mock_servers(model, folder / "servers.log") as (servers, ports):
        prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        port, metrics_port = _free_ports(2)
        command = peer.router_command(python, port, metrics_port, prefill, decode)
        with _process(command, folder / "sglang.log", cpus) as router:
            _wait_ready(port, "/readiness", router)
            yield Contestant("sglang-router", port, router.pid, servers)


@contextlib.contextmanager
def _mock_servers(model: Path, log: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """The HTTP workers, and the ports of the prefill and the decode one."""
    module = "twopool.scripts.bench_router_peer"
    with _process([sys.executable, "-P", "-m", module, "--model", str(model)], log) as servers:
        yield servers, json.loads(_line(servers))


@contextlib.contextmanager
def _process(command: list[str], log: Path, cpus: frozenset[int] | None = None) -> Iterator["subprocess.Popen[str]"]:
    """A child with pipes for stdin and stdout and its errors in ``log``, on ``cpus`` if given; killed at the end."""
    if cpus is not None:
        command = ["taskset", "-c", ",".join(map(str, sorted(cpus))), *command]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
    try:
        yield process
    except Exception:
        sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}\n")
        raise
    finally:
        process.kill()
        process.communicate()


def _line(process: "subprocess.Popen[str]") -> str:
    """The first line a child prints: it is up."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with status {process.wait(10)}")
    return line


def _wait_ready(port: int, path: str, process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{path} was not ready within {_START_TIMEOUT_S:g} s")


def _share_cpus() -> tuple[frozenset[int], frozenset[int]]:
    """A core for the router and the rest; the same for both where there is only one."""
    cpus = sorted(os.sched_getaffinity(0))
    return frozenset(cpus[:1]), frozenset(cpus[1:] or cpus)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, for a program that cannot pick its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"Router alone on one core, medians of {rows[0].rounds} interleaved rounds")
    for name in ("router", "streams", "step ms", "tokens"):
        table.add_column(name, justify="left" if name == "router" else "right")
    figures = ("CPU µs/token", "CPU µs/request", "tok/s", "req/s", "TTFT p50 ms", "p99 ms", "overhead p50", "p99 ms")
    for name in (*figures, "events/token"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (-row.max_tokens, -row.step_ms, row.num_streams)):
        cells = [
            row.router,
            str(row.num_streams),
            f"{row.step_ms:g}",
            str(row.max_tokens),
            f"{row.cpu_us_per_token:.1f}",
        ]
        cells += [f"{row.cpu_us_per_request:.0f}", f"{row.tok_per_s:.0f}", f"{row.req_per_s:.1f}"]
        times = (row.ttft_p50_ms, row.ttft_p99_ms, row.ttft_overhead_p50_ms, row.ttft_overhead_p99_ms)
        table.add_row(*cells, *(f"{time_ms:.2f}" for time_ms in times), f"{row.events_per_token:.2f}")
    return table


def _cost_table(costs: list[Cost]) -> Table:
    table = Table(title="A request's own CPU time, its first token included, and a further token's")
    for name in ("router", "streams", "step ms", "CPU µs/request", "CPU µs/further token"):
        table.add_column(name, justify="left" if name == "router" else "right")
    for cost in sorted(costs, key=lambda cost: (-cost.step_ms, cost.num_streams)):
        figures = (f"{cost.cpu_us_per_request:.0f}", f"{cost.cpu_us_per_further_token:.1f}")
        table.add_row(cost.router, str(cost.num_streams), f"{cost.step_ms:g}", *figures)
    return table


def _ratios(rows: list[Row]) -> Table:
    table = Table(title="twopool divided by its peer")
    for name in ("streams", "step ms", "tokens", "CPU/token", "tok/s", "TTFT p50", "TTFT p99"):
        table.add_column(name, justify="right")
    by_case: defaultdict[tuple[int, float, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_case[row.num_streams, row.step_ms, row.max_tokens][row.router] = row
    for (num_streams, step_ms, max_tokens), pair in by_case.items():
        ours, theirs = pair["twopool"], pair["sglang-router"]
        quotients = [getattr(ours, name) / getattr(theirs, name) for name in ("cpu_us_per_token", "tok_per_s")]
        quotients += [getattr(ours, name) / getattr(theirs, name) for name in ("ttft_p50_ms", "ttft_p99_ms")]
        table.add_row(str(num_streams), f"{step_ms:g}", str(max_tokens), *(f"{value:.2f}" for value in quotients))
    return table


def _setting(args: argparse.Namespace) -> dict[str, object]:
    return {
        "twopool": metadata.version("twopool"),
        "peer": peer.REQUIREMENT if args.peer else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "rounds": args.rounds,
    }


if __name__ == "__main__":
    sys.exit(main())
