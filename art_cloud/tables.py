"""Tables that the command line prints on standard output."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .checkpoints import Manifest
from .protocol import CheckpointInfo
from .trajectory_files import TrajectoryFile
from .upkeep import Damage

WIDE = 2000
"""Columns: more than any line has."""


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
    """A few of the metrics: rewards and losses."""
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


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is shown whole, however narrow the terminal is: it has the name
    that is typed next."""
    first = [columns[0], *(row[0] for row in rows)]
    table = Table(box=SIMPLE)
    for place, column in enumerate(columns):
        whole = max(map(cell_len, first)) if place == 0 else None
        table.add_column(column, min_width=whole, no_wrap=place == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def output() -> Console:
    """Standard output; what goes to a file or another program is as wide as it needs to be."""
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDE if is_wide else None)


def _when(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"
