"""The peers' benchmark as a table and as a picture."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """Medians of one engine's rounds of one case."""

    engine: str
    phase: str
    num_tokens: int
    num_streams: int
    tok_per_s: float
    slowest: float
    fastest: float
    ours_to_this: float | None
    """median over rounds of twopool's speed by this engine's in the same round"""

    @property
    def case(self) -> str:
        return f"prefill {self.num_tokens}" if self.phase == "prefill" else f"decode {self.num_streams}"


def make_table(rows: list[Row], missing: dict[str, str], title: str) -> Table:
    """One line an engine: tokens a second and, in brackets, how many times as fast twopool was."""
    cases = list(dict.fromkeys(row.case for row in rows))
    table = Table(title=title, caption="tokens a second; in brackets: twopool / this engine, median over the rounds")
    table.add_column("engine")
    for case in cases:
        table.add_column(case, justify="right")
    for engine in dict.fromkeys(row.engine for row in rows):
        found = {row.case: row for row in rows if row.engine == engine}
        table.add_row(engine, *(_cell(found.get(case)) for case in cases))
    for engine, words in missing.items():
        table.add_row(engine, words, *([""] * (len(cases) - 1)))
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = f" ({row.ours_to_this:.2f})" if row.ours_to_this is not None and row.engine != "twopool" else ""
    return f"{row.tok_per_s:.0f}{ratio}"


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Bars by case and engine, with the range of the rounds, into one picture. Needs ``twopool[bench]``."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in rows))
    engines = list(dict.fromkeys(row.engine for row in rows))
    figure = Figure(figsize=(2.6 * len(cases), 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False).flat, cases, strict=True):
        found = {row.engine: row for row in rows if row.case == case}
        for place, engine in enumerate(engines):
            row = found.get(engine)
            if row is not None:
                spread = [[row.tok_per_s - row.slowest], [row.fastest - row.tok_per_s]]
                axes.bar(place, row.tok_per_s, yerr=spread, capsize=3, color=f"C{place}", label=engine)
        axes.set(title=case, xticks=[])
        axes.grid(alpha=0.3, axis="y")
    figure.axes[0].set_ylabel("tokens a second")
    figure.suptitle(title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(engines))
    figure.savefig(path, dpi=120)
