"""The Parquet files of a model's trajectories: which there are, and copies of them in a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .checkpoints import Checkpoints, each

KEY = re.compile(r".*/trajectories/(?P<split>[^/]+)/(?P<step>\d+)-[^/]+\.parquet")


@dataclass(frozen=True, order=True)
class TrajectoryFile:
    split: str
    step: int
    key: str
    """In the store."""


def files(checkpoints: Checkpoints) -> list[TrajectoryFile]:
    """Those of the model, by split and step. The columns: docs/checkpoints.md."""
    keys = checkpoints.store.list(f"{checkpoints.name}/trajectories/")
    found = [match for key in keys if (match := KEY.fullmatch(key))]
    return sorted(TrajectoryFile(match["split"], int(match["step"]), match[0]) for match in found)


def pull(checkpoints: Checkpoints, wanted: Sequence[TrajectoryFile], folder: Path) -> int:
    """Copy files to `folder/{split}/`; one that is there already is kept.

    Returns:
        How many were copied.
    """

    def fetch(file: TrajectoryFile) -> bool:
        target = folder / file.split / file.key.rpartition("/")[2]
        if target.exists():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_bytes(checkpoints.store.read(file.key))
        partial.replace(target)
        return True

    return sum(each(fetch, wanted))
