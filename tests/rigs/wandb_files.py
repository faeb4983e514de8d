"""What wandb wrote to disk: its transaction log is LevelDB's log format, with protobuf records.

https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, HEADER = 32_768, 7, 7
FULL, LAST = 1, 4


@dataclass
class WandbRun:
    id: str = ""
    project: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[Any] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def records(path: Path) -> list[Any]:
    data, place = path.read_bytes(), FILE_HEADER
    assert data[:4] == b":W&B"
    found, parts = [], b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEADER])
        if kind == 0:  # what is left of a block
            place += left
            continue
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def read_run(path: Path) -> WandbRun:
    run = WandbRun()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.project = record.run.run_id, record.run.project
            run.name = record.run.display_name
            run.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "metric":
            run.metrics.append(record.metric)
        elif kind == "history":
            run.rows.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
        run.finished |= kind == "exit"
    return run


def runs(folder: Path) -> list[WandbRun]:
    """All runs in a folder of wandb's, the oldest first."""
    return [read_run(path) for path in sorted(folder.glob("wandb/*run-*/*.wandb"))]
