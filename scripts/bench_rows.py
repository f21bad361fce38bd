"""The rows of the transfer benchmarks: their columns, how they are shown, how they are drawn."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

Row = dict[str, Any]
KIB, MIB = 1024, 1024 * 1024


def make_row(
    op: str,
    *,
    block_bytes: int | None = None,
    num_blocks: int | None = None,
    scattered: bool | None = None,
    seconds: float | None = None,
    num_bytes: int | None = None,
    copy_seconds: float | None = None,
    **more: Any,
) -> Row:
    """A row with the columns that all have, and ``more``. ``None``: there is no such value.

    ``num_bytes`` were moved in ``seconds``, and copied by one thread of this process in ``copy_seconds``.
    """
    moved = None if num_bytes is None or not seconds else num_bytes / seconds / 1e9
    copied = None if num_bytes is None or not copy_seconds else num_bytes / copy_seconds / 1e9
    return {
        "op": op,
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "scattered": scattered,
        "seconds": seconds,
        "gb_per_s": moved,
        "memcpy_gb_per_s": copied,
        "ratio": None if moved is None or copied is None else moved / copied,
        **more,
    }


def make_table(rows: list[Row]) -> Table:
    """Columns in which no row has a value are left out."""
    table = Table()
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if _has_values(rows, name)]
    for name in columns:
        table.add_column(name, justify="left" if name == "op" else "right")
    for row in rows:
        table.add_row(*(_shown(name, row.get(name)) for name in columns))
    return table


def _has_values(rows: list[Row], name: str) -> bool:
    return any(row.get(name) is not None for row in rows)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("seconds"):
        return f"{value * 1e6:,.0f} µs"
    if name == "block_bytes":
        return f"{value / KIB:g} KiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- plot


@dataclass
class Panel:
    """One chart: a bar for each name, and beside it one of memcpy where ``copies`` has a value."""

    unit: str
    names: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    copies: list[float | None] = field(default_factory=list)

    def add(self, name: str, value: float, copied: float | None = None) -> None:
        self.names.append(name)
        self.values.append(value)
        self.copies.append(copied)


def make_panels(rows: list[Row]) -> list[Panel]:
    """Speeds, times that are not speeds, and shares of a core: the charts that have something to show."""
    speeds, times, shares = Panel("GB/s"), Panel("ms"), Panel("% of a core")
    for row in rows:
        name = _row_name(row)
        if row["gb_per_s"] is not None:
            speeds.add(name, row["gb_per_s"], row["memcpy_gb_per_s"])
        elif row["seconds"] is not None:
            times.add(name, 1e3 * row["seconds"])
        for column, value in row.items():
            if column.endswith("_seconds") and column != "call_seconds" and value is not None:
                times.add(f"{name}: {column.removesuffix('_seconds').replace('_', ' ')}", 1e3 * value)
        if row.get("cpu_share") is not None:
            shares.add(name, 100 * row["cpu_share"])
    return [panel for panel in (speeds, times, shares) if panel.names]


def plot(rows: list[Row], file: Path) -> None:
    """Draw the panels of ``rows`` below one another; raises ``ImportError`` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = make_panels(rows)
    heights = [1.5 + 0.35 * len(panel.names) for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(9, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        places = range(len(panel.names))
        axis.barh(places, panel.values, height=0.4, label="READ" if panel.unit == "GB/s" else None)
        copied = [(place + 0.4, speed) for place, speed in zip(places, panel.copies, strict=True) if speed is not None]
        if copied:
            axis.barh(*zip(*copied, strict=True), height=0.4, label="memcpy, one thread")
            axis.legend()
        axis.set_yticks([place + (0.2 if copied else 0) for place in places], panel.names)
        axis.invert_yaxis()
        axis.set_xlabel(panel.unit)
    figure.tight_layout()
    figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)


def _row_name(row: Row) -> str:
    if row["op"] != "read":
        return str(row["op"])
    scattered = ", scattered" if row["scattered"] else ""
    return f"{row['num_blocks']} x {row['block_bytes'] / KIB:g} KiB{scattered}"
