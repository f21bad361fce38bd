"""Figures of a serving benchmark: percentiles, goodput, a table, a picture of one or several results."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from twopool.scripts.bench_serving_load import Outcome

PERCENTILES = (50, 90, 95, 99)
SLOS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
_TITLES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "tpot_ms": "time per output token",
    "e2e_ms": "end to end",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between ranks; ``nan`` of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def report(
    outcomes: list[Outcome], *, seconds: float, slos: dict[str, float], setting: dict[str, Any]
) -> dict[str, Any]:
    """The JSON of one run. A request is good when it has ended without an error and within every SLO given."""
    whole = [outcome for outcome in outcomes if outcome.error is None]
    samples = {name: [value for outcome in whole for value in _values(outcome, name)] for name in SLOS}
    good = [outcome for outcome in whole if _is_good(outcome, slos)]
    return {
        "setting": setting,
        "slos": slos,
        "seconds": seconds,
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(whole),
        "num_good": len(good),
        "goodput_per_s": len(good) / seconds,
        "requests_per_s": len(whole) / seconds,
        "input_tokens_per_s": sum(outcome.num_input for outcome in whole) / seconds,
        "output_tokens_per_s": sum(outcome.num_output for outcome in whole) / seconds,
        "max_late_ms": max((outcome.late_s for outcome in outcomes), default=0.0) * 1e3,
        "percentiles": {
            name: {
                "mean": sum(values) / len(values) if values else None,
                **{f"p{percent}": percentile(values, percent) if values else None for percent in PERCENTILES},
            }
            for name, values in samples.items()
        },
        "requests": [asdict(outcome) for outcome in outcomes],
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One column a result."""
    shown = Table(title="Serving benchmark")
    shown.add_column("figure")
    for name in results:
        shown.add_column(name, justify="right")
    for key in ("num_requests", "num_failed", "requests_per_s", "goodput_per_s", "output_tokens_per_s", "max_late_ms"):
        shown.add_row(key.replace("_", " "), *(f"{result[key]:.4g}" for result in results.values()))
    for metric in SLOS:
        for figure in ("mean", *(f"p{percent}" for percent in PERCENTILES)):
            cells = [result["percentiles"][metric][figure] for result in results.values()]
            shown.add_row(f"{metric} {figure}", *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    return shown


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Cumulative distributions of all four times, one line a result, into one picture. Needs ``twopool[bench]``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'twopool[bench]'") from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, metric in zip(figure.subplots(2, 2).flat, SLOS, strict=True):
        for name, result in results.items():
            outcomes = [Outcome(**request) for request in result["requests"] if request["error"] is None]
            values = sorted(value for outcome in outcomes for value in _values(outcome, metric))
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step(values, shares, where="post", label=name)
            limit = result["slos"].get(metric)
            if limit is not None:
                axes.axvline(limit, linestyle=":", color="grey")
        axes.set(title=_TITLES[metric], xlabel="ms", ylabel="share", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def _values(outcome: Outcome, metric: str) -> list[float]:
    """Milliseconds."""
    single = {"ttft_ms": outcome.ttft_s, "tpot_ms": outcome.tpot_s, "e2e_ms": outcome.e2e_s}
    values = outcome.itl_s if metric == "itl_ms" else [single[metric]]
    return [value * 1e3 for value in values if value is not None]


def _is_good(outcome: Outcome, slos: dict[str, float]) -> bool:
    """Times that a short answer does not have keep no SLO from holding, but without text there was no first token."""
    if "ttft_ms" in slos and outcome.ttft_s is None:
        return False
    return all(value <= limit for metric, limit in slos.items() for value in _worst(outcome, metric))


def _worst(outcome: Outcome, metric: str) -> list[float]:
    """What a request is held to: the 99th percentile of its gaps, the time itself otherwise."""
    values = _values(outcome, metric)
    return [percentile(values, 99)] if values and metric == "itl_ms" else values
