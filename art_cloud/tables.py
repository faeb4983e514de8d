"""Tables that the command line prints on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .fleet import ClusterStatus
from .protocol import CheckpointInfo, ServerInfo


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
    _print_table(("name", "provider", "state", "base model", "steps", "now", "up for"), rows)


def print_checkpoints(found: Sequence[CheckpointInfo]) -> None:
    names = sorted({name for info in found for name in info.metrics})
    shown = [name for name in names if name in ("loss", "reward") or name.endswith("/reward")]
    rows: list[tuple[str, ...]] = [
        (
            str(info.step),
            info.kind,
            f"{info.created_at.astimezone():%Y-%m-%d %H:%M:%S}",
            f"{info.bytes / 2**20:.1f} MiB",
            *(f"{info.metrics[name]:.4g}" if name in info.metrics else "" for name in shown),
        )
        for info in found
    ]
    _print_table(("step", "made by", "at", "size", *shown), rows)
    if len(names) > len(shown):
        Console().print(f"{len(names) - len(shown)} more metrics with --json")


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, box=SIMPLE)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


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
