"""What a measurement found, as rows under facts, and how it is shown: Markdown, JSON, CSV, PNG; knows no measurement."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetero import __version__
from hetero.errors import BadOption

Row = dict[str, Any]
BUSY = 0.3                               # of a core that others may take before the result says so


@dataclass(frozen=True)
class Plot:
    """One picture: column `y` over column `x`, a line for each value of `by`; points where they are of samples."""

    x: str
    y: str
    by: str = ""


@dataclass
class Result:
    """`facts` hold for all rows; `notes` say how figures are to be read, noise first; `samples` are what rows sum up, for JSON and plots."""

    name: str
    facts: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    plots: Sequence[Plot] = ()
    samples: list[Row] = field(default_factory=list)

    def text(self) -> str:
        """Markdown: facts, table, notes."""
        lines = [f"# {self.name}", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        return "\n".join([*lines, markdown(self.rows), *([""] if self.notes else []), *self.notes])

    def json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if k != "plots"}, default=str, allow_nan=True)

    def csv(self) -> str:
        """The rows; facts stand in the other forms."""
        out = io.StringIO()
        writer = csv.DictWriter(out, columns(self.rows))
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()


def columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def cell(value: Any) -> str:
    """A figure with as many digits as it can carry."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    if size != size or size in (float("inf"),):
        return str(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def markdown(rows: Sequence[Row]) -> str:
    """A table whose source lines up too."""
    if not rows:
        return "(nothing measured)"
    heads = columns(rows)
    cells = [heads, *([cell(row.get(head)) for head in heads] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(heads))]
    right = [all(isinstance(row.get(head), (int, float, type(None))) for row in rows) for head in heads]

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)) + " |"
    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def machine_facts(threads: int | None = None) -> dict[str, Any]:
    """What figures of this machine stand under."""
    from cpu_kernels import cpu

    here = cpu.read()
    used = f"{threads} of {len(here.allowed)} CPUs" if threads else f"{len(here.allowed)} CPUs"
    return {"hetero": __version__, "machine": f"{here.name}, {cpu.isa()}, {used}", "load average before": round(os.getloadavg()[0], 2)}


def busy_note(facts: Mapping[str, Any], threads: int) -> list[str]:
    """One line when others used the machine before the measurement began."""
    load = float(facts.get("load average before", 0.0))
    if load <= BUSY:
        return []
    return [f"The machine was not quiet: its load average was {load:.2f} before the run used {threads} threads. Ratios and shares of one round "
            "mean more here than absolute times."]


def draw(result: Result, folder: Path) -> list[Path]:
    """A PNG for each plot of a result. Raises BadOption where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as missing:
        raise BadOption("--plot needs matplotlib, and it is not installed", "pip install 'hetero-moe[plot]'") from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for plot in result.plots:
        points = not any(plot.y in r for r in result.rows)
        rows = [r for r in (result.samples if points else result.rows) if r.get(plot.x) is not None and r.get(plot.y) is not None]
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        for key in dict.fromkeys(str(r.get(plot.by, "")) for r in rows):
            mine = [r for r in rows if str(r.get(plot.by, "")) == key]
            axes.plot([r[plot.x] for r in mine], [r[plot.y] for r in mine], marker="o", linestyle="none" if points else "-",
                      label=f"{plot.by} {key}" if plot.by else None)
        numeric = not points and all(isinstance(r[plot.x], (int, float)) and r[plot.x] > 0 for r in rows)
        if numeric and max(r[plot.x] for r in rows) >= 16 * min(r[plot.x] for r in rows):
            axes.set_xscale("log", base=2)
        axes.set(xlabel=plot.x, ylabel=plot.y, title=f"{result.name}: {plot.y}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if plot.by:
            axes.legend()
        name = "-".join(w for w in (result.name, plot.y, plot.x) if w)
        made.append(folder / ("".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") + ".png"))
        figure.savefig(made[-1], dpi=120)
        pyplot.close(figure)
    return made
