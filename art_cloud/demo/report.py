"""What the demo shows at its end: a table and a picture."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .game import REWARDS, Outcome
from .run import Curve, DemoResult, win_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREEN, GRAY, INK = "#1a7f5a", "#8a8f98", "#22272e"
SMOOTHING = 5
"""Steps that the line through the training games is a mean over."""


def print_table(result: DemoResult, console: Console) -> None:
    columns = {"before": result.trained.before, "after GRPO": result.trained.after}
    if result.control is not None:
        columns["control (permuted rewards)"] = result.control.after
    table = Table("", *columns, box=SIMPLE, title=f"{result.trained.before.total()} held-out games")
    for outcome in REWARDS:
        shares = (f"{counts[outcome] / counts.total():.1%}" for counts in columns.values())
        table.add_row(outcome, *shares, style="bold" if outcome == "win" else None)
    console.print(table)
    console.print(f"{result.steps} steps of GRPO, {result.seconds:.0f} s in all")


def plot(result: DemoResult, path: Path) -> Path:
    """Win rate by step as a PNG, with the held-out games before and after (95 % intervals)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes: Axes = figure.add_subplot()
    if result.control is not None:
        _draw(axes, result.control, GRAY, "control: rewards permuted")
    _draw(axes, result.trained, GREEN, "GRPO")
    axes.set(
        title="Tic-tac-toe against a random opponent",
        xlabel="GRPO step",
        ylabel="games won",
        xlim=(-0.08 * result.steps, 1.08 * result.steps),
        ylim=(0, 1),
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)
    return path


def _draw(axes: Axes, curve: Curve, color: str, label: str) -> None:
    steps = range(len(curve.by_step))
    axes.scatter(steps, curve.by_step, s=9, color=color, alpha=0.35, linewidths=0)
    axes.plot(steps, _smooth(curve.by_step), color=color, label=label)
    ends = ((0, curve.before, (-10, "right")), (len(curve.by_step), curve.after, (10, "left")))
    for step, counts, (offset, align) in ends:
        rate, error = win_rate(counts), 1.96 * _standard_error(counts)
        axes.errorbar(step, rate, error, color=color, fmt="o", capsize=3, markersize=6)
        axes.annotate(
            f"{rate:.0%}",
            (step, rate),
            (offset, 0),
            textcoords="offset points",
            horizontalalignment=align,
            verticalalignment="center",
            color=INK,
        )


def _smooth(values: list[float]) -> list[float]:
    """Mean of each value and up to SMOOTHING - 1 before it."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - SMOOTHING) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def _standard_error(counts: Counter[Outcome]) -> float:
    rate = win_rate(counts)
    return math.sqrt(rate * (1 - rate) / counts.total())
