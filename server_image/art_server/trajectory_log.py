"""Evaluations kept as Parquet: one row a trajectory, readable by DuckDB and pandas."""

from __future__ import annotations

import hashlib
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from art_cloud.checkpoints import Checkpoints
from art_cloud.names import check_name
from art_cloud.protocol import LogRequest

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),
        ("group", pa.int64()),
        ("reward", pa.float64()),
        ("metrics", pa.string()),
        ("metadata", pa.string()),
        ("messages", pa.string()),
        ("logs", pa.list_(pa.string())),
    ]
)


def write_trajectories(checkpoints: Checkpoints, entry: LogRequest) -> None:
    """Write the entry's trajectories; `metrics`, `metadata` and `messages` are JSON texts."""
    if not entry.trajectories:
        return
    split = check_name(entry.split, "split")
    rows = [
        {
            "step": entry.step,
            "split": split,
            "group": row.get("group", 0),
            "reward": row.get("reward"),
            "metrics": json.dumps(row.get("metrics", {})),
            "metadata": json.dumps(row.get("metadata", {})),
            "messages": json.dumps(row.get("messages", [])),
            "logs": row.get("logs", []),
        }
        for row in entry.trajectories
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")
    content = file.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:32]  # a call that is sent twice writes one file
    key = f"{checkpoints.name}/trajectories/{split}/{entry.step:06d}-{digest}.parquet"
    checkpoints.store.create(key, content)
