"""Open-loop load on any OpenAI endpoint: latency percentiles, throughput, and goodput under given SLOs.

  bench_serving run --base-url http://127.0.0.1:8000/v1 --model NAME --rate 4 --num-requests 200 --json a.json
  bench_serving run ... --trace mooncake.jsonl --speed 2 --slo ttft_ms=500 --slo itl_ms=50
  bench_serving compare a.json b.json --plot both.png

Requests come at a constant rate, as a Poisson process, or as a trace says (Mooncake's .jsonl, whose hash ids become
shared prefixes, or Azure's .csv). Prompts are common words, about one token each; what the server counted is what the
figures use. A request fails when it is refused, cut, without a token or late beyond --timeout-s; failed requests are in
no percentile, and never good. max_late_ms says how late this program itself was at worst.
"""

import argparse
import asyncio
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twopool.scripts import bench_serving_report as reports
from twopool.scripts.bench_serving_load import Outcome, Planned, Target, arrivals, read_trace, run_load


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when nothing was answered or a file is wrong."""
    args = _parser().parse_args(argv)
    try:
        return _run(args) if args.command == "run" else _compare(args)
    except (OSError, ValueError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure one server")
    run.add_argument("--base-url", required=True, help="as OpenAI clients take it: http://HOST:PORT/v1")
    run.add_argument("--model", required=True, help="the model's name there")
    run.add_argument("--completions", action="store_true", help="use /completions instead of /chat/completions")
    run.add_argument("--api-key", help="sent as a bearer token")
    run.add_argument("--rate", type=float, default=1.0, help="requests a second; inf sends all at once")
    run.add_argument("--arrival", choices=("poisson", "constant"), default="poisson", help="how they are spread")
    run.add_argument("--num-requests", type=int, help="how many (default: 100, or the whole trace)")
    run.add_argument("--input-tokens", type=int, default=256, help="length of a prompt, about")
    run.add_argument("--output-tokens", type=int, default=128, help="longest answer")
    run.add_argument("--shared-prefix-tokens", type=int, default=0, help="of the prompt, the same for a whole group")
    run.add_argument("--num-prefixes", type=int, default=1, help="groups of requests with a prefix in common")
    run.add_argument("--trace", type=Path, help="replay this file instead: .jsonl (Mooncake) or .csv (Azure)")
    run.add_argument("--speed", type=float, default=1.0, help="replay a trace this many times as fast")
    run.add_argument("--max-input-tokens", type=int, help="cut a trace's longer prompts")
    run.add_argument("--max-output-tokens", type=int, help="cut a trace's longer answers")
    run.add_argument("--slo", action="append", type=_slo, default=[], metavar="NAME=MS", help=", ".join(reports.SLOS))
    run.add_argument("--extra", type=json.loads, default={}, help="JSON object of further body fields")
    run.add_argument("--timeout-s", type=float, default=600.0, help="seconds after which a request has failed")
    run.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    run.add_argument("--json", type=Path, help="write figures and every request to this file")
    run.add_argument("--plot", type=Path, help="draw the distributions into this file")
    compare = commands.add_parser("compare", help="put several results side by side")
    compare.add_argument("results", type=Path, nargs="+", help="files that --json wrote")
    compare.add_argument("--plot", type=Path, help="draw them into one picture")
    return parser


def _run(args: argparse.Namespace) -> int:
    planned = _planned(args)
    target = Target(args.base_url, args.model, not args.completions, args.api_key, args.timeout_s, args.extra)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(planned))

        def on_done(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(task, advance=1, description=f"requests ({failed} failed)" if failed else "requests")

        began_s = time.perf_counter()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcomes = runner.run(run_load(target, planned, seed=args.seed, on_done=on_done))
        seconds = time.perf_counter() - began_s
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    setting = {name: value for name, value in setting.items() if name not in ("api_key", "json", "plot", "slo")}
    setting["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    result = reports.report(outcomes, seconds=seconds, slos=dict(args.slo), setting=setting)
    _show({args.json.stem if args.json else args.model: result}, args.plot)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    for text in list(dict.fromkeys(errors))[:5]:
        print(f"failed: {text}", file=sys.stderr)
    return 1 if len(errors) == len(outcomes) else 0


def _planned(args: argparse.Namespace) -> list[Planned]:
    """Raises ``ValueError`` for figures that make no load."""
    if not (args.rate > 0 and args.speed > 0 and args.num_prefixes > 0):
        raise ValueError("--rate, --speed and --num-prefixes must be positive")
    if args.trace is not None:
        planned = read_trace(args.trace, limit=args.num_requests, speed=args.speed)
        longest_in = args.max_input_tokens or max(item.num_input for item in planned)
        longest_out = args.max_output_tokens or max(item.num_output for item in planned)
        return [
            Planned(p.at_s, min(p.num_input, longest_in), min(p.num_output, longest_out), p.prefix_ids) for p in planned
        ]
    prefix = args.shared_prefix_tokens
    return [
        Planned(
            at_s,
            args.input_tokens,
            args.output_tokens,
            (index % args.num_prefixes,) if prefix else (),
            prefix_block=prefix,
        )
        for index, at_s in enumerate(arrivals(args.rate, args.num_requests or 100, args.arrival, args.seed))
    ]


def _compare(args: argparse.Namespace) -> int:
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in args.results}
    if len(results) < len(args.results):
        results = {str(path): json.loads(path.read_text(encoding="utf-8")) for path in args.results}
    _show(results, args.plot)
    return 0


def _show(results: dict[str, dict[str, Any]], plot: Path | None) -> None:
    Console(width=None if sys.stdout.isatty() else 120).print(reports.table(results))
    if plot is not None:
        reports.plot(results, plot)


def _slo(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in reports.SLOS:
        raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(reports.SLOS)}")
    return name, float(value)


if __name__ == "__main__":
    sys.exit(main())
