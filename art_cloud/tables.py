"""Tables that the command line prints on standard output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .checkpoints import Manifest
from .fleet import ClusterStatus
from .protocol import CheckpointInfo, ServerInfo
from .trajectory_files import TrajectoryFile
from .upkeep import Damage


def print_status(found: Sequence[ClusterStatus]) -> None:
    rows: list[tuple[str, ...]] = []
    for one in found:
        server = one.server
        rows.append(
            (
                one.name,
                one.provider,
                one.state,
                (server.base_model or "none yet") if server else "",
                "\n".join(_newest(server.policies)) if server else "",
                _activity(server) if server else one.detail,
                _age(one.started_at),
            )
        )
    print_table(("name", "provider", "state", "base model", "steps", "now", "up for"), rows)


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
        Console().print(f"{len(names) - len(shown)} more metrics with --json")


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
        Console().print(f"{len(names) - len(shown)} more metrics with --json or --csv")


def print_models(newest: Sequence[Manifest]) -> None:
    rows = [(str(one.name), str(one.step), _when(one.created_at), one.base_model) for one in newest]
    print_table(("model", "newest step", "made at", "base model"), rows)


def print_damage(damage: Sequence[Damage]) -> None:
    rows = [(one.blob.sha256[:12], one.what, "\n".join(one.hurt)) for one in damage]
    print_table(("blob", "is", "hurts"), rows)


def print_trajectory_files(files: Sequence[TrajectoryFile]) -> None:
    counts = Counter((file.split, file.step) for file in files)
    rows = [(split, str(step), str(count)) for (split, step), count in counts.items()]
    print_table(("split", "step", "files"), rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, box=SIMPLE)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _when(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def _newest(policies: list[str]) -> list[str]:
    """The newest step of each model among `project/model@step`."""
    newest: dict[str, int] = {}
    for policy in policies:
        model, _, step = policy.rpartition("@")
        newest[model] = max(int(step), newest.get(model, 0))
    return [f"{model}@{step}" for model, step in sorted(newest.items())]


def _activity(server: ServerInfo) -> str:
    words = [
        server.training or "",
        f"{server.jobs_queued} jobs queued" if server.jobs_queued else "",
        f"{server.requests_running} requests running" if server.requests_running else "",
        f"{server.requests_waiting} waiting" if server.requests_waiting else "",
    ]
    return ", ".join(filter(None, words)) or "idle"


def _age(since: datetime | None) -> str:
    if since is None:
        return ""
    minutes, seconds = divmod(int((datetime.now(UTC) - since).total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours else f"{minutes} m {seconds} s"
