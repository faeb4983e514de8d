"""What an experiment shows at its end: a table and a picture."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .experiment import Curve, Result, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREEN, GRAY, INK = "#1a7f5a", "#8a8f98", "#22272e"
SMOOTHING = 5
"""The line in the picture is the mean over so many steps."""


def print_table(result: Result, console: Console) -> None:
    columns = {"before": result.trained.before, "after GRPO": result.trained.after}
    if result.control is not None:
        columns["control (permuted rewards)"] = result.control.after
    tasks = len(result.trained.before[result.measure])
    table = Table("", *columns, box=SIMPLE, title=f"Means over {tasks} held-out tasks")
    for name in result.trained.before:
        cells = (f"{fmean(found[name]):.3f}" for found in columns.values())
        table.add_row(name, *cells, style="bold" if name == result.measure else None)
    console.print(table)
    console.print(f"{result.steps} steps of GRPO, {result.seconds:.0f} s in all")


def plot(result: Result, path: Path, title: str) -> Path:
    """The measure by step as a PNG, with the held-out tasks before and after (95 % intervals)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes: Axes = figure.add_subplot()
    if result.control is not None:
        _draw(axes, result.measure, result.control, GRAY, "control: rewards permuted")
    _draw(axes, result.measure, result.trained, GREEN, "GRPO")
    axes.set(
        title=title,
        xlabel="GRPO step",
        ylabel=result.measure.replace("_", " "),
        xlim=(-0.1 * result.steps, 1.1 * result.steps),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="upper left", frameon=False, reverse=True)
    figure.savefig(path)
    return path


def _draw(axes: Axes, measure: str, curve: Curve, color: str, label: str) -> None:
    steps = range(len(curve.by_step))
    axes.scatter(steps, curve.by_step, s=9, color=color, alpha=0.35, linewidths=0)
    axes.plot(steps, _smooth(curve.by_step), color=color, label=label)
    before, after = curve.before[measure], curve.after[measure]
    ends = ((0, before, (-10, "right")), (len(curve.by_step), after, (10, "left")))
    for step, values, (offset, align) in ends:
        mean = fmean(values)
        axes.errorbar(step, mean, interval(values), color=color, fmt="o", capsize=3, markersize=6)
        axes.annotate(
            f"{mean:.2f}",
            (step, mean),
            (offset, 0),
            textcoords="offset points",
            horizontalalignment=align,
            verticalalignment="center",
            color=INK,
        )


def _smooth(values: list[float]) -> list[float]:
    """The mean of each value with up to SMOOTHING - 1 values before it."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - SMOOTHING) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]
