"""Tables that the command line prints on standard output."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..shared.protocol import CheckpointInfo
from ..store.checkpoints import Manifest
from ..store.garbage import Damage
from ..store.trajectories import TrajectoryFile

WIDE = 2000
"""A width in columns that no line reaches."""


def print_checkpoints(found: Sequence[CheckpointInfo]) -> None:
    names = sorted({name for info in found for name in info.metrics})
    shown = [name for name in names if name in ("loss", "reward") or name.endswith("/reward")]
    rows: list[tuple[str, ...]] = [
        (
            str(info.step),
            info.kind,
            _when(info.created_at),
            f"{info.bytes / 2**20:.1f} MiB",
            *(f"{info.metrics[name]:.4g}" if name in info.metrics else "" for name in shown),
        )
        for info in found
    ]
    print_table(("step", "made by", "at", "size", *shown), rows)
    if len(names) > len(shown):
        output().print(f"{len(names) - len(shown)} more metrics with --json")


def print_history(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each step with its rewards and losses."""
    names = sorted({name for row in rows for name in row} - {"step", "kind", "created_at"})
    shown = [name for name in names if name in ("loss", "reward") or name.endswith("/reward")]
    print_table(
        ("step", "made by", *shown),
        [
            (
                str(row["step"]),
                row["kind"],
                *(f"{row[name]:.4g}" if name in row else "" for name in shown),
            )
            for row in rows
        ],
    )
    if len(names) > len(shown):
        output().print(f"{len(names) - len(shown)} more metrics with --json or --csv")


def print_models(newest: Sequence[Manifest]) -> None:
    rows = [(str(one.name), str(one.step), _when(one.created_at), one.base_model) for one in newest]
    print_table(("model", "newest step", "made at", "base model"), rows)


def print_damage(damage: Sequence[Damage]) -> None:
    rows = [
        (one.blob.sha256[:12] if one.blob else "", one.what, "\n".join(one.hurt)) for one in damage
    ]
    print_table(("blob", "is", "hurts"), rows)


def print_trajectory_files(files: Sequence[TrajectoryFile]) -> None:
    counts = Counter((file.split, file.step) for file in files)
    rows = [(split, str(step), str(count)) for (split, step), count in counts.items()]
    print_table(("split", "step", "files"), rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    output().print(make_table(columns, rows))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    return _Rows(columns, rows)


class _Rows:
    """A table or, where that is too wide, each row on lines of its own: nothing is cut, least of
    all the names that are typed next."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(*self._columns, box=SIMPLE)
        for row in self._rows:
            table.add_row(*map(Text, row))
        wide = options.update(max_width=WIDE)
        if Measurement.get(console, wide, table).maximum <= options.max_width:
            yield table
            return
        for first, *others in self._rows:
            yield Text(first, style="bold", overflow="fold")
            named = zip(self._columns[1:], others, strict=True)
            told = (" ".join(f"{column} {cell}".split()) for column, cell in named if cell)
            yield Padding(Text(", ".join(told), overflow="fold"), (0, 0, 0, 2))


def output() -> Console:
    """A console on standard output. In a file or a pipe, lines are as wide as they need to be."""
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDE if is_wide else None)


def _when(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"
