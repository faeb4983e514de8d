"""`art-cloud`: start, watch and end clusters, look after checkpoints, run the demo.

Exit codes: 0 done, 1 an `ArtCloudError` (its message on standard error), 2 wrong usage,
130 interrupted. What a script reads (`--json`) is alone on standard output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..clusters.command_line import run
from ..shared.version import __version__
from .checkpoints import checkpoints
from .clusters import clusters
from .deploy import deploy
from .options import AsJson, Commands, Engine, group
from .trajectories import trajectories

app = group(__doc__.splitlines()[0].partition(": ")[2].capitalize(), Commands)
app.add_typer(clusters)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(trajectories, name="trajectories")
app.add_typer(deploy, name="deploy")


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
def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps of GRPO.")] = 40,
    control: Annotated[
        bool, typer.Option("--control", help="Train a copy on permuted rewards: it must not learn.")
    ] = False,
    engine: Engine = "transformers",
    plot: Annotated[Path, typer.Option(help="Write the picture there.")] = Path("tic-tac-toe.png"),
    as_json: AsJson = False,
) -> None:
    """Train an agent to play tic-tac-toe on this machine."""
    from rich.console import Console

    from .. import demo as demos
    from ..clusters.registry import home

    result = run(demos.run_demo(home() / "demo", steps=steps, control=control, engine=engine))
    console = Console(stderr=as_json)
    demos.print_table(result, console)
    picture = demos.plot(result, plot, "Tic-tac-toe against a random opponent")
    console.print(f"Win rate by step: {picture}")
    if as_json:
        typer.echo(json.dumps(result.summary()))


@app.command()
def auto(
    description: Annotated[str, typer.Argument(help="What the agent should do.")],
    base_model: Annotated[str, typer.Option(help="Name or folder of the model to train.")],
    judge: Annotated[str, typer.Option(help="A model at OPENAI_BASE_URL, with OPENAI_API_KEY.")],
    generator: Annotated[
        str | None, typer.Option(help="The model that writes the tasks. Default: the judge.")
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(help="A Python file whose functions are tools.")
    ] = None,
    mcp: Annotated[str | None, typer.Option(help="The URL or command of an MCP server.")] = None,
    scenarios: Annotated[
        Path | None, typer.Option(help="The file of tasks. Default: MODEL.jsonl.")
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="How many tasks to write.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="How many steps of GRPO, in all.")] = 10,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of every step.")] = 1e-5,
    max_turns: Annotated[
        int, typer.Option(min=1, help="How many answers an attempt may take.")
    ] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="How long each answer may be.")] = 1024,
    model: Annotated[
        str | None, typer.Option(metavar="PROJECT/MODEL", help="Default: by the description.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The cluster to train on. Default: a local one for this run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent from a description; other models write its tasks and judge it."""
    from rich.console import Console

    from ..clusters import up as cluster
    from ..rewards import auto_rl
    from ..shared.config import TrainConfig

    async def train() -> auto_rl.AutoResult:
        agent = auto_rl.make_model(model, description, base_model)
        toolkit = auto_rl.make_tools(tools, mcp)
        path = scenarios or Path(f"{agent.name}.jsonl")
        await auto_rl.prepare_scenarios(
            path, description, generator or judge, tools=toolkit, count=count
        )
        up = cluster.up("local", name=f"auto-{agent.name}"[:60], base_model=base_model)
        async with cluster.connect(name=name) if name else up as backend:
            return await auto_rl.auto(
                agent,
                backend,
                description,
                judge_model=judge,
                tools=toolkit,
                scenarios=path,
                steps=steps,
                config=TrainConfig(learning_rate=learning_rate),
                max_turns=max_turns,
                max_tokens=max_tokens,
            )

    result = run(train())
    if as_json:
        typer.echo(json.dumps(result.summary()))
    else:
        auto_rl.print_result(result, Console())


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option(help="A store to check as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check all that is set up here, and say how to cure what is wrong."""
    from ..clusters.doctor import examine

    colors = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "broken": typer.colors.RED}
    checks = run(examine(store))
    if as_json:
        typer.echo(json.dumps([check.model_dump() for check in checks]))
    for check in [] if as_json else checks:
        typer.secho(f"{check.state:8}", fg=colors[check.state], nl=False)
        typer.echo(f"{check.subject}: {check.message}")
        if check.cure:
            typer.echo(f"{'':8}{check.cure}")
    if any(check.state == "broken" for check in checks):
        raise typer.Exit(1)


def main() -> None:
    app()
