"""What scripts/gpu_check found: results, how they are timed, and how they are shown."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    section: str
    name: str
    passed: bool | None = None
    """None: a measurement, which has no right or wrong"""
    value: float | None = None
    unit: str = ""
    reference: float | None = None
    """the same unit, measured in the same run"""
    reference_name: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over reference."""
        return None if self.value is None or not self.reference else self.value / self.reference


def median_seconds(function: Callable[[], object], device: torch.device, *, repeats: int = 15) -> float:
    """Median time of a call on the device, by its own clock where it is a GPU, after two calls that do not count."""
    for _ in range(2):
        function()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def table(results: list[Result]) -> Table:
    """All results as rows."""
    shown = Table("section", "check", "result", "value", "reference", "ratio", "note")
    for result in results:
        verdict = "" if result.passed is None else "[green]ok[/]" if result.passed else "[red]FAILED[/]"
        shown.add_row(
            result.section,
            result.name,
            verdict,
            _number(result.value, result.unit),
            f"{_number(result.reference, result.unit)} {result.reference_name}".strip(),
            "" if result.ratio is None else f"{result.ratio:.2f}",
            result.note,
        )
    return shown


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()
