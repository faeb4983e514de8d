"""The screens of `art-cloud status`, `offers`, `receipts` and `sweep`, on standard output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..clusters.costs import Receipt
from ..clusters.fleet import ClusterStatus
from ..clusters.spec import Offer
from ..clusters.sweep import Finding
from ..shared.limits import words
from ..shared.protocol import Clock, ServerInfo
from .tables import make_table, output

BAR_WIDTH = 24
NEAR_THE_END = 0.2
"""Share of a limit that is left when the server announces its end."""


def print_status(found: Sequence[ClusterStatus]) -> None:
    output().print(_status(found))


async def watch(look: Callable[[], Awaitable[list[ClusterStatus]]], seconds: float) -> None:
    """Show the status as it changes, until cancelled."""
    console = output()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_status(await look()), refresh=True)
            if not console.is_terminal:
                console.print()
            await asyncio.sleep(seconds)


def _status(found: Sequence[ClusterStatus]) -> RenderableType:
    """One cluster in full, several as a table."""
    if len(found) == 1:
        return _in_full(found[0])
    rows = [
        (
            one.name,
            one.provider,
            one.state,
            "\n".join(_newest(one.server.policies)) if one.server else "",
            _activity(one.server) if one.server else one.detail,
            _since(one.started_at),
            f"${one.cost:.2f}" if one.price_per_hour else "",
            _next_end(one.server.clocks) if one.server else "",
        )
        for one in found
    ]
    columns = ("name", "provider", "state", "steps", "now", "up for", "cost", "ends in")
    return make_table(columns, rows)


def _in_full(one: ClusterStatus) -> RenderableType:
    server = one.server
    detail = f" ({one.detail})" if one.detail else ""
    lines: list[tuple[str, str]] = []
    if server:
        lines += [
            ("base model", server.base_model or "none yet"),
            ("steps", ", ".join(_newest(server.policies)) or "none yet"),
            ("now", _activity(server)),
            ("done", _done(server)),
            ("store", server.store),
        ]
    if one.started_at:
        lines.append(("up for", _since(one.started_at)))
    if one.price_per_hour:
        lines.append(("cost", f"${one.cost:.2f} at ${one.price_per_hour:.2f} an hour"))
    grid = Table.grid(padding=(0, 2))
    for label, text in lines:
        grid.add_row(Text(label, style="dim"), Text(text, overflow="fold"))
    title = Text.assemble((one.name, "bold"), f"  {one.state} on {one.provider}{detail}")
    parts: list[RenderableType] = [title, grid]
    if server and server.clocks:
        clocks = Table.grid(padding=(0, 2))
        for clock in server.clocks:
            share = clock.remaining / clock.limit
            color = "red" if share < NEAR_THE_END else "green"
            bar = ProgressBar(1.0, share, width=BAR_WIDTH, complete_style=color)
            clocks.add_row(Text(clock.name, style="dim"), bar, Text(_left(clock)))
        parts += [Text("\nends when one of these has run down:", style="dim"), clocks]
    return Group(*parts)


def print_timeline(one: ClusterStatus) -> None:
    if not one.phases:
        output().print(f"What starting {one.name} took is not recorded here.")
        return
    whole = sum(seconds for _, seconds in one.phases)
    grid = Table.grid(padding=(0, 2))
    for label, seconds in one.phases:
        bar = ProgressBar(whole, seconds, width=BAR_WIDTH)
        grid.add_row(label, bar, Text(f"{seconds:.1f} s", justify="right"))
    grid.add_row(Text("in all"), "", Text(f"{whole:.1f} s", justify="right"))
    output().print(grid)


def print_offers(found: Sequence[Offer], hours: float) -> None:
    rows = [
        (
            one.provider,
            one.region,
            one.machine,
            "spot" if one.spot else "",
            f"${one.price_per_hour:.2f}",
            f"${one.price_per_hour * hours:.2f}",
        )
        for one in found
    ]
    columns = ("provider", "region", "machine", "", "an hour", f"{hours:g} hours")
    output().print(make_table(columns, rows))


def print_receipts(found: Sequence[Receipt]) -> None:
    rows = []
    for one in found:
        least, most = one.cost
        rows.append(
            (
                one.name,
                one.provider,
                f"{one.launched_at.astimezone():%Y-%m-%d %H:%M}",
                f"{'' if one.seen_to_end else '< '}{words(one.seconds[1])}",
                f"${most:.2f}" if one.seen_to_end else f"${least:.2f} to ${most:.2f}",
                "?" if one.steps is None else f"{one.steps:,}",
                f"${one.cost_per_step:.3f}" if one.cost_per_step else "",
                "?" if one.tokens_sampled is None else f"{one.tokens_sampled:,}",
            )
        )
    columns = ("name", "provider", "launched", "for", "cost", "steps", "a step", "tokens")
    least, most = (sum(one.cost[end] for one in found) for end in (0, 1))
    console = output()
    console.print(make_table(columns, rows))
    whole = f"${most:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"${least:.2f} to ${most:.2f}"
    console.print(f"In all: {whole}", highlight=False)


def print_findings(found: Sequence[Finding]) -> None:
    rows = [
        (one.name, one.provider, one.what, f"stays: {one.kept}" if one.kept else "nobody leases it")
        for one in found
    ]
    if rows:
        output().print(make_table(("name", "provider", "what", ""), rows))


def _newest(policies: list[str]) -> list[str]:
    """The newest step of each model among `project/model@step`."""
    newest: dict[str, int] = {}
    for policy in policies:
        model, _, step = policy.rpartition("@")
        newest[model] = max(int(step), newest.get(model, 0))
    return [f"{model}@{step}" for model, step in sorted(newest.items())]


def _activity(server: ServerInfo) -> str:
    parts = [
        server.training or "",
        f"{server.jobs_queued} jobs queued" if server.jobs_queued else "",
        f"{server.requests_running} requests running" if server.requests_running else "",
        f"{server.requests_waiting} waiting" if server.requests_waiting else "",
        f"storing {', '.join(server.not_durable)}" if server.not_durable else "",
    ]
    return ", ".join(filter(None, parts)) or "idle"


def _done(server: ServerInfo) -> str:
    return (
        f"{server.steps_made:,} steps, {server.tokens_sampled:,} tokens sampled, "
        f"{server.tokens_trained:,} trained on"
    )


def _left(clock: Clock) -> str:
    if clock.unit == "USD":
        return f"${clock.remaining:.2f} of ${clock.limit:.2f}"
    return f"{words(clock.remaining)} of {words(clock.limit)}"


def _next_end(clocks: Sequence[Clock]) -> str:
    """The clock that will end the server first, among those that count seconds."""
    counting = [clock for clock in clocks if clock.unit == "s"]
    if not counting:
        return ""
    first = min(counting, key=lambda clock: clock.remaining)
    return f"{words(first.remaining)} ({first.name})"


def _since(start: datetime | None) -> str:
    return words((datetime.now(UTC) - start).total_seconds()) if start else ""
