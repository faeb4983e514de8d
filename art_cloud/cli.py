"""`art-cloud`: start, watch and end clusters, look after checkpoints, run the demo.

Exit codes: 0 done, 1 an `ArtCloudError` (its message on standard error), 2 wrong usage,
130 interrupted. What a script reads (`--json`) is alone on standard output.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ._version import __version__
from .cli_checkpoints import AsJson, checkpoints, trajectories
from .cli_errors import complain
from .errors import ArtCloudError

if TYPE_CHECKING:
    from .fleet import ClusterStatus

T = TypeVar("T")

app = typer.Typer(
    help=__doc__.splitlines()[0].partition(": ")[2].capitalize(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help would take longer to import than all else together
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(trajectories, name="trajectories")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A cluster, as `status` shows it.")]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    provider: Annotated[str, typer.Argument(help="Where it runs.")] = "local",
    name: Annotated[str | None, typer.Option(help="Default: art-USER-PROVIDER.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model to load at the start.")] = None,
    store: Annotated[str | None, typer.Option(help="URL or folder where steps are kept.")] = None,
    engine: Annotated[str, typer.Option(help="What samples.")] = "transformers",
    idle: Annotated[str, typer.Option(help="End after so long without use: 90s, 15m, 2h.")] = "15m",
    show_token: Annotated[bool, typer.Option(help="Print the server's token.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a cluster and leave it running."""
    from . import cluster, fleet

    async def start() -> dict[str, str]:
        started = cluster.up(
            provider, name=name, store=store, base_model=model, engine=engine, idle=idle
        )
        await (await started).close()
        return await fleet.address(started.name)

    found = _run(start())
    if not show_token:
        del found["token"]
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"\n{found['name']} is ready at {found['url']}\n"
        f"It keeps its steps in {found['store']}\n"
        + (f"Its token is {found['token']}\n" if show_token else "")
        + "\nUse it from Python:\n\n"
        "    import art_cloud as art\n\n"
        f'    async with art.connect(name="{found["name"]}") as backend:\n'
        "        await model.register(backend)\n\n"
        f"End it: art-cloud down {found['name']}    (it ends by itself after {idle} without use)"
    )


@app.command()
def status(name: Annotated[str | None, typer.Argument()] = None, as_json: AsJson = False) -> None:
    """Show what runs, and what should."""
    from . import fleet, tables

    found = _run(fleet.status(name))
    if as_json:
        rows = [_status_json(one) for one in found]
        typer.echo(json.dumps(rows[0] if name else rows))
    elif found:
        tables.print_status(found)
    else:
        typer.echo("No clusters. Start one: art-cloud up local")


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
) -> None:
    """Print the log of a cluster's server, even of one that ended."""
    from . import fleet

    async def show() -> None:
        async for line in fleet.logs(name, follow=follow):
            typer.echo(line)

    _run(show())


@app.command()
def tunnel(
    name: Name,
    port: Annotated[int, typer.Option(help="Of this machine. Default: a free one.")] = 0,
) -> None:
    """Keep a port of this machine that leads to a cluster's server, for other programs."""
    import asyncio

    from . import fleet

    async def keep() -> None:
        opened = await fleet.tunnel(name, port)
        typer.echo(opened.url)
        typer.echo(f"{opened}. It is there until Ctrl-C.", err=True)
        try:
            await asyncio.Event().wait()
        finally:
            typer.echo(str(opened), err=True)
            await opened.close()

    _run(keep())


@app.command()
def down(
    name: Annotated[str | None, typer.Argument()] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every cluster.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """End a cluster; what is in its store stays."""
    import asyncio

    from . import fleet

    if (name is None) != everything:
        raise typer.BadParameter("Give the NAME of a cluster, or --all.")
    names = [name] if name else [one.name for one in _run(fleet.status())]
    if everything and names and not yes:
        typer.confirm(f"End {', '.join(names)}?", abort=True, err=True)

    async def end() -> list[ArtCloudError]:
        ended = await asyncio.gather(*map(fleet.down, names), return_exceptions=True)
        return [failure for failure in map(_expected, ended) if failure]

    failures = _run(end())
    for failure in failures:
        complain(failure)
    if failures:
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps({"ended": names}))
    else:
        typer.echo(f"Ended {', '.join(names)}." if names else "Nothing to end.")


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Of GRPO.")] = 40,
    control: Annotated[
        bool, typer.Option(help="Train a second model on permuted rewards: it must not learn.")
    ] = False,
    engine: Annotated[str, typer.Option(help="What samples.")] = "transformers",
    plot: Annotated[Path, typer.Option(help="Where the PNG goes.")] = Path("tic-tac-toe.png"),
    as_json: AsJson = False,
) -> None:
    """Train an agent to play tic-tac-toe on this machine."""
    from rich.console import Console

    from . import demo as demos
    from .registry import home

    result = _run(demos.run_demo(home() / "demo", steps=steps, control=control, engine=engine))
    console = Console(stderr=as_json)
    demos.print_table(result, console)
    console.print(f"Win rate by step: {demos.plot(result, plot)}")
    if as_json:
        typer.echo(json.dumps(result.summary()))


@app.command()
def auto(
    description: Annotated[str, typer.Argument(help="What the agent should do.")],
    base_model: Annotated[str, typer.Option(help="Name or folder of the model to train.")],
    judge: Annotated[str, typer.Option(help="A model at OPENAI_BASE_URL, with OPENAI_API_KEY.")],
    generator: Annotated[str | None, typer.Option(help="Writes the tasks. Default: judge.")] = None,
    tools: Annotated[Path | None, typer.Option(help="Python file: its functions.")] = None,
    mcp: Annotated[str | None, typer.Option(help="URL or command of an MCP server.")] = None,
    scenarios: Annotated[Path | None, typer.Option(help="Default: MODEL.jsonl here.")] = None,
    count: Annotated[int, typer.Option(min=2, help="Tasks to write.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Of GRPO, in all.")] = 10,
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-5,
    max_turns: Annotated[int, typer.Option(min=1, help="Answers of one attempt.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 1024,
    model: Annotated[str | None, typer.Option(metavar="PROJECT/MODEL")] = None,
    provider: Annotated[str, typer.Option(help="Where it is trained.")] = "local",
    store: Annotated[str | None, typer.Option(help="URL or folder where steps are kept.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent from a description: tasks, rewards and evaluation by other models."""
    from rich.console import Console

    from . import auto_rl, cluster
    from .config import TrainConfig

    async def train() -> auto_rl.AutoResult:
        agent = auto_rl.make_model(model, description, base_model)
        toolkit = auto_rl.make_tools(tools, mcp)
        async with cluster.up(provider, base_model=base_model, store=store) as backend:
            return await auto_rl.auto(
                agent,
                backend,
                description,
                judge_model=judge,
                generator_model=generator,
                tools=toolkit,
                scenarios=scenarios or Path(f"{agent.name}.jsonl"),
                count=count,
                steps=steps,
                config=TrainConfig(learning_rate=learning_rate),
                max_turns=max_turns,
                max_tokens=max_tokens,
            )

    result = _run(train())
    if as_json:
        typer.echo(json.dumps(result.summary()))
    else:
        auto_rl.print_result(result, Console())


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work; what goes wrong on purpose becomes a message and an exit code."""
    import asyncio

    try:
        return asyncio.run(work)
    except ArtCloudError as error:
        complain(error)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _say_what_runs()
        raise typer.Exit(130) from None


def _say_what_runs() -> None:
    import asyncio

    from . import fleet

    names = [one.name for one in asyncio.run(fleet.status()) if one.state != "stopped"]
    if names:
        typer.echo(f"Still running: {', '.join(names)}. To end it: art-cloud down NAME", err=True)
    else:
        typer.echo("Nothing is left running.", err=True)


def _expected(ended: object) -> ArtCloudError | None:
    """The failures that a user can do something about; any other is a bug, and raised."""
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
        "server": one.server and one.server.model_dump(mode="json"),
    }


def main() -> None:
    app()
