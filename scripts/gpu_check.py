"""Check the kernels and the server on this machine's GPU and measure them: ``scripts/gpu_check [--json FILE]``.

Takes a few minutes, most of them compiling. Exits with 0 when every check passed, 1 when one failed, and 2 when there
is no GPU that torch can use.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from twopool.kernels.backend import INTERPRETED
from twopool.scripts.gpu_check_correctness import correctness
from twopool.scripts.gpu_check_model import ModelSizes, invariance, model_speed
from twopool.scripts.gpu_check_report import Result, table
from twopool.scripts.gpu_check_server import ServerSizes, server_speed
from twopool.scripts.gpu_check_speed import KernelSizes, kernel_speed

INVARIANCE_SIZES = ModelSizes(num_layers=4, vocab_size=32_000)

Section = Callable[[], Iterator[Result]]


def sections(device: torch.device) -> dict[str, Section]:
    """What there is to check, by the name ``--only`` takes."""
    return {
        "correctness": lambda: correctness(device),
        "invariance": lambda: invariance(device, INVARIANCE_SIZES),
        "kernels": lambda: kernel_speed(device, KernelSizes()),
        "model": lambda: model_speed(device, ModelSizes()),
        "server": lambda: server_speed(device, ServerSizes()),
    }


def run(chosen: dict[str, Section], report: Callable[[Result], None]) -> list[Result]:
    """Run the sections one after the other. One that breaks off is a failed check; the others still run."""
    results: list[Result] = []
    for name, section in chosen.items():
        try:
            for result in section():
                results.append(result)
                report(result)
        except Exception as error:  # a kernel that does not compile or run here must not hide the other results
            failure = Result(name, "broke off", passed=False, note=f"{type(error).__name__}: {error}"[:500])
            results.append(failure)
            report(failure)
    return results


def as_json(results: list[Result], device_name: str) -> str:
    """The results and what they were measured on."""
    return json.dumps(
        {
            "device": device_name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "python": platform.python_version(),
            "results": [asdict(result) | {"ratio": result.ratio} for result in results],
        },
        indent=2,
    )


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    names = tuple(sections(torch.device("cpu")))
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", action="append", choices=names, help="run this section (may be given again)")
    options = parser.parse_args(arguments)
    console = Console()
    if INTERPRETED or not torch.cuda.is_available():
        reason = "TRITON_INTERPRET is set" if INTERPRETED else f"torch {torch.__version__} sees none"
        console.print(f"gpu_check needs a GPU: {reason}. Nothing was checked.", highlight=False)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = {name: section for name, section in sections(device).items() if name in (options.only or names)}
    results = run(chosen, lambda result: console.print(f"{result.section}: {result.name}", highlight=False))
    console.print(table(results))
    if options.json:
        options.json.write_text(as_json(results, torch.cuda.get_device_name(device)), encoding="utf-8")
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
