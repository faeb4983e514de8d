"""`art-cloud up`, `status`, `down` and what else starts, watches, pays for and ends clusters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ..clusters.command_line import complain, provider_options, run
from ..shared.errors import ArtCloudError
from .options import AsJson, Engine, MaybeName, Name, ProviderOptions, Yes, group

if TYPE_CHECKING:
    from ..clusters.fleet import ClusterStatus, Seen
    from ..clusters.registry import ClusterRecord
    from ..clusters.spec import Offer

T = TypeVar("T")

clusters = group()

WATCH_SECONDS = 1.0


@clusters.command()
def up(
    provider: Annotated[
        str, typer.Argument(help="local, ssh, modal, skypilot or your own.")
    ] = "local",
    name: Annotated[
        str | None, typer.Option(help="Of the cluster. Default: art-USER-PROVIDER.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Base model to load at the start.")] = None,
    store: Annotated[str | None, typer.Option(help="Bucket or folder that keeps steps.")] = None,
    engine: Engine = "transformers",
    durability: Annotated[
        Literal["sync", "async"],
        typer.Option(help="A step counts once it is stored (sync) or once it is served (async)."),
    ] = "sync",
    lease: Annotated[
        str | None, typer.Option(help="End after so long without a client. Default: 10m.")
    ] = None,
    idle: Annotated[
        str | None, typer.Option(help="End after so long without use: 90s, 15m (default), 2h.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="US dollars that the cluster may cost.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="End by then: 6h after the launch, or 2026-12-24T18:00.")
    ] = None,
    max_hourly: Annotated[
        float | None, typer.Option(help="US dollars that an hour may cost.")
    ] = None,
    serverless: Annotated[
        bool, typer.Option("--serverless", help="On Modal: scale to zero.")
    ] = False,
    options: ProviderOptions = None,
    show_token: Annotated[
        bool, typer.Option("--show-token", help="Print the server's token.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a cluster and leave it running."""
    from ..clusters import fleet
    from ..clusters import up as cluster

    async def start() -> dict[str, str]:
        started = cluster.up(
            provider,
            name=name,
            store=store,
            base_model=model,
            engine=engine,
            durability=durability,
            lease=lease,
            idle=idle,
            budget=budget,
            deadline=deadline,
            max_hourly=max_hourly,
            **provider_options(options) | ({"serverless": True} if serverless else {}),
        )
        await (await started).close()
        return await fleet.address(started.name)

    found = run(start())
    if not show_token:
        del found["token"]
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"\n{found['name']} is ready at {found['url']} of {found['host']}\n"
        f"It keeps its steps in {found['store']}\n"
        + (f"Its token is {found['token']}\n" if show_token else "")
        + "\nUse it from Python:\n\n"
        "    import art_cloud as art\n\n"
        f'    async with art.connect(name="{found["name"]}") as backend:\n'
        "        await model.register(backend)\n\n"
        f"End it: art-cloud down {found['name']}\n"
        f"It ends by itself after {lease or '10m'} without a client. "
        f"How long it has: art-cloud status {found['name']}"
    )


@clusters.command()
def status(
    name: MaybeName = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show how long each phase of its start took.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs, what it costs and when it ends. Looking renews no lease."""
    from ..clusters import fleet
    from . import screens

    if timeline and name is None:
        raise typer.BadParameter("--timeline is of one cluster: give its NAME.")
    found = run(fleet.status(name))
    if as_json:
        rows = [_status_json(one) for one in found]
        typer.echo(json.dumps(rows[0] if name else rows))
    elif timeline:
        screens.print_timeline(found[0])
    elif watch:
        run(screens.watch(lambda: fleet.status(name), WATCH_SECONDS))
    elif found:
        screens.print_status(found)
    else:
        typer.echo("No clusters. Start one: art-cloud up local")


@clusters.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
) -> None:
    """Print the log of a cluster's server, even of one that ended."""
    from ..clusters import fleet

    async def show() -> None:
        async for line in fleet.logs(name, follow=follow):
            typer.echo(line)

    run(show())


@clusters.command()
def tunnel(
    name: Name,
    port: Annotated[int, typer.Option(help="On this machine. 0: a free one.")] = 0,
) -> None:
    """Open a port of this machine that leads to a cluster's server."""
    from ..clusters import fleet

    async def keep() -> None:
        opened = await fleet.tunnel(name, port)
        typer.echo(opened.url)
        typer.echo(f"{opened.description}. It stays until Ctrl-C.", err=True)
        try:
            raise await opened.failed()
        finally:
            typer.echo(opened.description, err=True)
            await opened.close()

    run(keep())


@clusters.command(context_settings={"ignore_unknown_options": True})
def ssh(
    name: Name,
    command: Annotated[
        list[str] | None, typer.Argument(help="The command to run there. Default: a shell.")
    ] = None,
) -> None:
    """Log in to the machine of a cluster, or run a command there."""
    import os

    from ..clusters import fleet

    words = run(fleet.ssh_command(name))
    os.execvp(words[0], [*words, *(command or [])])  # noqa: S606


@clusters.command()
def down(
    name: MaybeName = None,
    everything: Annotated[
        bool, typer.Option("--all", help="End every cluster that was started from here.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Only delete its record: its machine is gone for good.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End a cluster and say what it cost; what is in its store stays."""
    import asyncio

    from ..clusters import fleet

    if (name is None) != everything:
        raise typer.BadParameter("Give the NAME of a cluster, or --all.")
    if forget and name is None:
        raise typer.BadParameter("--forget is of one cluster: give its NAME.")
    meant = _recorded(ask=not yes) if name is None else {name: _strangers(name, forget, yes)}
    names = list(meant)

    async def end() -> list[Any]:
        work = (
            fleet.forget(one) if forget else fleet.down(one, seen=seen)
            for one, seen in meant.items()
        )
        return await asyncio.gather(*work, return_exceptions=True)

    ended = run(end())
    failures = [failure for failure in map(_expected, ended) if failure]
    receipts = [one for one in ended if one is not None and not isinstance(one, BaseException)]
    for failure in failures:
        complain(failure)
    if as_json and not failures:
        rows = [receipt.model_dump(mode="json") for receipt in receipts]
        typer.echo(json.dumps({"ended": names, "receipts": rows}))
    elif not as_json:
        verb = "Forgot" if forget else "Ended"
        done = [one for one, how in zip(names, ended, strict=True) if not _expected(how)]
        if done or not failures:
            typer.echo(f"{verb} {', '.join(done)}." if done else "Nothing to end.")
        for receipt in receipts:
            typer.echo(receipt.summary)
    if failures:
        raise typer.Exit(1)


def _recorded(*, ask: bool) -> dict[str, Seen]:
    """The clusters that were started from here, once the user agrees. Others are named, and
    stay."""
    from ..clusters import fleet
    from ..clusters.registry import Registry

    async def look() -> tuple[list[ClusterRecord], list[ClusterStatus]]:
        return Registry().list(), await fleet.status()

    records, found = run(look())
    for one in found:
        if not one.recorded:
            typer.echo(
                f"{one.name} was not started from here, and stays: {one.provider}, {one.detail}. "
                f"To end it: art-cloud down {one.name}",
                err=True,
            )
    if records and ask:
        typer.confirm(f"End {', '.join(one.name for one in records)}?", abort=True, err=True)
    return {one.name: [one] for one in records}


def _strangers(name: str, forget: bool, yes: bool) -> Seen:
    """What others started under the name, once the user agrees to end it; nothing if the name is
    recorded here."""
    from ..clusters import fleet

    found = [] if forget else run(fleet.not_recorded(name))
    said = ", ".join(f"{one.provider}, {one.detail}" for one in found)
    if found and not yes:
        question = f"{name} was not started from here ({said}). End it?"
        typer.confirm(question, abort=True, err=True)
    return found


@clusters.command()
def sweep(yes: Yes = False, as_json: AsJson = False) -> None:
    """Find what runs at every provider, recorded or not, and end what has no lease."""
    from ..clusters import sweep as sweeping
    from . import screens

    found, failures = run(sweeping.look())
    ghosts = [one for one in found if one.kept is None]
    if not as_json:
        screens.print_findings(found)
    for failure in failures:
        complain(failure)
    if ghosts and not yes:
        names = ", ".join(one.name for one in ghosts)
        typer.confirm(f"End {names}?", abort=True, err=True)
    for one in ghosts:
        typer.echo(f"Ending {one.name} ({one.provider}): {one.what}.", err=True)
    judged, unended = run(sweeping.end(ghosts))
    for failure in unended:
        complain(failure)
    ended = [one.name for one in judged if one.kept is None]
    for one in judged:
        if one.kept is not None:
            typer.echo(f"{one.name} stays: {one.kept}.", err=True)
    if as_json:
        kept = [one.name for one in (*found, *judged) if one.kept is not None]
        typer.echo(json.dumps({"ended": ended, "kept": kept}))
    elif ended:
        typer.echo(f"Ended {', '.join(ended)}.")
    elif not found and not failures:
        typer.echo("Nothing of ours runs anywhere.")
    if failures or unended:
        raise typer.Exit(1)


@clusters.command()
def offers(
    provider: Annotated[str | None, typer.Argument(help="Default: all of them.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Machines with it: H100, A100:2, ...")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that may be taken away.")] = False,
    hours: Annotated[float, typer.Option(min=0, help="How long a run takes.")] = 1.0,
    options: ProviderOptions = None,
    as_json: AsJson = False,
) -> None:
    """List machines with their price by provider and region, the cheapest first."""
    from ..clusters.providers import get_provider, provider_names
    from ..clusters.spec import ClusterSpec
    from . import screens

    wanted = (
        provider_options(options) | ({"gpu": gpu} if gpu else {}) | ({"spot": True} if spot else {})
    )

    async def ask() -> tuple[list[Offer], dict[str, ArtCloudError]]:
        found: list[Offer] = []
        refused: dict[str, ArtCloudError] = {}
        for one in [provider] if provider else provider_names():
            try:
                spec = ClusterSpec(provider=one, store="", options=wanted)
                found += await get_provider(one).offers(spec)
            except ArtCloudError as error:
                refused[one] = error
        return sorted(found, key=lambda offer: offer.price_per_hour), refused

    found, refused = run(ask())
    if as_json:
        rows = [one.model_dump() | {"price": one.price_per_hour * hours} for one in found]
        typer.echo(json.dumps(rows))
    elif found:
        screens.print_offers(found, hours)
    for one, why in refused.items():
        typer.echo(f"{one}: {why}", err=True)
    if not found:
        raise typer.Exit(1)


@clusters.command()
def receipts(as_json: AsJson = False) -> None:
    """List the clusters that have ended, and what they cost."""
    from ..clusters.registry import Registry
    from . import screens

    async def read() -> list[Any]:
        return list(Registry().receipts())

    found = run(read())
    if as_json:
        typer.echo(json.dumps([receipt.model_dump(mode="json") for receipt in found]))
    elif found:
        screens.print_receipts(found)
    else:
        typer.echo("No cluster has ended yet.")


def _expected(ended: object) -> ArtCloudError | None:
    """The result if it is an ArtCloudError, which a user can do something about. Any other
    exception is a bug, and raised."""
    if isinstance(ended, BaseException) and not isinstance(ended, ArtCloudError):
        raise ended
    return ended if isinstance(ended, ArtCloudError) else None


def _status_json(one: ClusterStatus) -> dict[str, Any]:
    return {
        "name": one.name,
        "provider": one.provider,
        "state": one.state,
        "recorded": one.recorded,
        "detail": one.detail,
        "started_at": one.started_at and one.started_at.isoformat(),
        "launched_at": one.launched_at and one.launched_at.isoformat(),
        "price_per_hour": one.price_per_hour,
        "cost": one.cost,
        "timeline": [{"phase": label, "seconds": seconds} for label, seconds in one.phases],
        "server": one.server and one.server.model_dump(mode="json"),
    }
