"""`art-cloud trajectories`: straight from a store, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..shared.errors import NotFoundError
from .options import AsJson, ClusterOption, Model, StoreOption, To, count, group, steps_of

trajectories = group("Read what models were trained on and evaluated with, as Parquet.")


@trajectories.command("ls")
def list_trajectories(
    model: Model,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """List the files: one for each training step and each evaluation that was logged."""
    from ..store.trajectories import files
    from . import tables

    steps = steps_of(model, store, cluster)
    found = files(steps)
    if as_json:
        typer.echo(json.dumps([{"split": f.split, "step": f.step, "key": f.key} for f in found]))
    elif found:
        tables.print_trajectory_files(found)
    else:
        typer.echo(f"{model} has no trajectories in {steps.store.url}.")


@trajectories.command("pull")
def pull_trajectories(
    model: Model,
    to: To = None,
    split: Annotated[str | None, typer.Option(help="Only this split: train, val, ...")] = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Fetch the files into a folder; what is there already is not fetched again."""
    from ..store.trajectories import files
    from ..store.trajectories import pull as fetch

    steps = steps_of(model, store, cluster)
    folder = to or Path(f"{steps.name.model}-trajectories")
    wanted = [one for one in files(steps) if split in (None, one.split)]
    if not wanted:
        raise NotFoundError(
            f"{model} has no trajectories {f'of {split} ' if split else ''}in {steps.store.url}."
        )
    fetched = fetch(steps, wanted, folder)
    columns = "split, step, count(*) AS n, avg(reward) AS reward"
    sql = f"SELECT {columns} FROM '{folder}/*/*.parquet' GROUP BY ALL ORDER BY ALL"  # noqa: S608
    typer.echo(
        f"{count(wanted, 'file')} in {folder}, {fetched} of them new. Read them:\n\n"
        f'    duckdb -c "{sql}"\n'
        f"    python -c \"import pandas; print(pandas.read_parquet('{folder}'))\""
    )
