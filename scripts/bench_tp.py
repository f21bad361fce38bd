"""Step time of tensor-parallel groups next to one process with as many threads, and what their sums cost.

For each degree N: N ranks of one thread against one process of N threads, first the same batch through forward passes
alone, then whole steps of a worker's engine. Then one sum of a decode's and a prefill's residual rows over the ranks:
in shared memory, with gloo's all-reduce, and with gloo in the order of the ranks. Last, what KV costs between workers
of every pair of degrees, next to the equal one: see ``bench_tp_transfer``, which has more flags for it. Rounds are
interleaved and every figure is the median of its rounds: believe the ratio, absolute figures move with the machine's
mood.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from twopool.kernels.collectives import create_segment
from twopool.models.config import DecoderConfig
from twopool.models.sharding import plan_shards, segment_bytes
from twopool.models.store import resolve_model
from twopool.protocol.config import DTYPES, PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.scripts.bench_tp_rank import MAX_TOKENS
from twopool.scripts.bench_tp_transfer import TransferFigure, measure_pairs, transfer_table

CASES = (("prefill", 512), ("decode", 1), ("decode", 8), ("decode", 32))
REDUCED_ROWS = (1, 8, 32, 512)
BACKENDS = ("shared", "gloo", "gathered")
_STEPS = {"prefill": 3, "decode": 12}
_SUMS = 100


@dataclass(frozen=True)
class StepFigure:
    """Medians in milliseconds of a forward pass, or of an engine's step."""

    degree: int
    case: str
    one_process_ms: float
    ranks_ms: float
    ratio: float


@dataclass(frozen=True)
class SumFigure:
    """Medians in microseconds of one sum of [rows, hidden_size] float32."""

    degree: int
    rows: int
    shared_us: float
    gloo_us: float
    gathered_us: float
    factor: float
    """gloo's all-reduce over ours"""


class Group:
    """Processes that hold a model together, or one that holds it alone, waiting to be told what to time."""

    def __init__(self, module: str, commands: Sequence[Sequence[str]], *, inherit: Sequence[int] = ()) -> None:
        """commands: the arguments of each process; inherit: descriptors they need, which the caller closes."""
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for arguments in commands:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"twopool.scripts.{module}", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=inherit,
                )
                self._processes.append(process)
            self._answers()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_ranks(cls, folder: Path, dtype: str, *, num_ranks: int, threads: int) -> "Group":
        """Forward passes alone, each thread on a CPU of its own where there are enough."""
        cpus = sorted(os.sched_getaffinity(0))
        pins = cpus[: num_ranks * threads] if num_ranks * threads <= len(cpus) else None
        common = [f"--folder={folder}", f"--dtype={dtype}", f"--size={num_ranks}", f"--threads={threads}"]
        segment = None
        if num_ranks > 1:
            plan = plan_shards(DecoderConfig.from_folder(folder), num_ranks)
            segment = create_segment(num_ranks, segment_bytes(plan, MAX_TOKENS))
            common += [f"--segment={segment}", f"--port={_free_port()}"]
        own = [None if pins is None else pins[rank * threads : (rank + 1) * threads] for rank in range(num_ranks)]
        commands = [[*common, f"--rank={rank}", f"--cpus={json.dumps(own[rank])}"] for rank in range(num_ranks)]
        try:
            return cls("bench_tp_rank", commands, inherit=() if segment is None else (segment,))
        finally:
            if segment is not None:
                os.close(segment)

    @classmethod
    def of_engine(cls, folder: Path, dtype: str, *, num_ranks: int, threads: int) -> "Group":
        """Whole steps; the process starts its other ranks itself."""
        command = [f"--folder={folder}", f"--dtype={dtype}", f"--size={num_ranks}", f"--threads={threads}"]
        return cls("bench_tp_engine", [command])

    def time_ms(self, **command: Any) -> float:
        """The median of what the first process measured."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        times: list[float] = self._answers()[0]["ms"]
        return statistics.median(times)

    def close(self) -> None:
        """End the processes, which end by themselves when nobody can tell them anything more."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise TwopoolError("a process of the benchmark ended early; what it said stands above")
            answers.append(json.loads(line))
        return answers


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        steps, sums = _run(args)
        transfers: list[TransferFigure] = []
        pairs_setting = ""
        if args.transfer_degrees:
            transfers, pairs_setting = measure_pairs(args.model, args.transfer_degrees, args.transfer_rounds)
    except TwopoolError as error:
        print(f"bench_tp: {error.message}", file=sys.stderr)
        return 1
    setting = f"{args.model}, {args.dtype}, {len(os.sched_getaffinity(0))} CPUs, {args.rounds} rounds"
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_step_table(steps, setting))
    console.print(_sum_table(sums))
    if transfers:
        console.print(transfer_table(transfers, pairs_setting))
    if args.json:
        report = {
            "setting": setting,
            "steps": [asdict(one) for one in steps],
            "sums": [asdict(one) for one in sums],
            "transfers": [asdict(one) for one in transfers],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PrefillConfig.model, help="model name, folder, GGUF file or hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES[1:])
    parser.add_argument("--degrees", type=int, nargs="+", default=[2], help="numbers of ranks, one thread each")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument(
        "--transfer-degrees",
        type=int,
        nargs="*",
        default=[1, 2, 3, 4],
        help="ranks of either side of a KV transfer; none: leave transfers out",
    )
    parser.add_argument("--transfer-rounds", type=int, default=11, help="interleaved rounds of the transfers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def _run(args: argparse.Namespace) -> tuple[list[StepFigure], list[SumFigure]]:
    folder = resolve_model(args.model)
    steps, sums = [], []
    for degree in args.degrees:
        for line in plan_shards(DecoderConfig.from_folder(folder), degree).report():
            print(line)
        for start, prefix in ((Group.of_ranks, ""), (Group.of_engine, "engine, ")):
            with (
                closing(start(folder, args.dtype, num_ranks=1, threads=degree)) as alone,
                closing(start(folder, args.dtype, num_ranks=degree, threads=1)) as ranks,
            ):
                steps += _steps(alone, ranks, degree, args.rounds, prefix)
                if start == Group.of_ranks:
                    sums += _sums(ranks, degree, args.rounds)
    return steps, sums


def _steps(alone: Group, ranks: Group, degree: int, rounds: int, prefix: str) -> list[StepFigure]:
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for phase, size in CASES:
            command = {"phase": phase, "size": size, "count": _STEPS[phase]}
            pair = (alone.time_ms(**command), ranks.time_ms(**command))
            if number:  # the first round warms up
                times[phase, size].append(pair)
    return [
        StepFigure(
            degree=degree,
            case=f"{prefix}{phase} {size}",
            one_process_ms=statistics.median(one for one, _ in pairs),
            ranks_ms=statistics.median(other for _, other in pairs),
            ratio=statistics.median(other / one for one, other in pairs),
        )
        for (phase, size), pairs in times.items()
    ]


def _sums(ranks: Group, degree: int, rounds: int) -> list[SumFigure]:
    figures = []
    for rows in REDUCED_ROWS:
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for backend in BACKENDS:
                times[backend].append(1e3 * ranks.time_ms(backend=backend, rows=rows, count=_SUMS))
        shared, gloo, gathered = (statistics.median(times[backend]) for backend in BACKENDS)
        figures.append(
            SumFigure(
                degree=degree, rows=rows, shared_us=shared, gloo_us=gloo, gathered_us=gathered, factor=gloo / shared
            )
        )
    return figures


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _step_table(figures: list[StepFigure], setting: str) -> Table:
    table = Table(title=setting)
    for heading in ("step", "ranks", "one process ms", "ranks ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for one in figures:
        row = (f"{one.one_process_ms:.2f}", f"{one.ranks_ms:.2f}", f"{one.ratio:.2f}")
        table.add_row(one.case, str(one.degree), *row)
    return table


def _sum_table(figures: list[SumFigure]) -> Table:
    table = Table(title="one sum over the ranks")
    for heading in ("rows", "ranks", "shared memory us", "gloo us", "gloo in order us", "gloo / shared memory"):
        table.add_column(heading, justify="right")
    for one in figures:
        times = (f"{one.shared_us:.1f}", f"{one.gloo_us:.1f}", f"{one.gathered_us:.1f}")
        table.add_row(str(one.rows), str(one.degree), *times, f"{one.factor:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
