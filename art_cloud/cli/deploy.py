"""`art-cloud deploy`: a step of a model to where others serve it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..clusters.command_line import reported
from .options import (
    BestOption,
    ClusterOption,
    ModelArgument,
    StepOption,
    StoreOption,
    ToOption,
    chosen,
    steps_of,
)

deploy = typer.Typer(
    help="Hand an adapter on: a repository for the Hugging Face hub, Together AI.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BaseModelOption = Annotated[
    str | None, typer.Option(metavar="OWNER/NAME", help="Its name there, if it has another.")
]


@deploy.command()
def hub(
    model: ModelArgument,
    step: StepOption = None,
    best: BestOption = None,
    to: ToOption = None,
    base_model: BaseModelOption = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Write a repository for the Hugging Face hub: the adapter and its model card."""
    from ..store.deploy import hub_folder

    with reported():
        steps = steps_of(model, store, cluster)
        manifest = chosen(steps, step, best)
        folder = to or Path(f"{manifest.model}-step-{manifest.step}-hub")
        hub_folder(steps, manifest, folder, base_model=base_model)
    typer.echo(f"{manifest.policy} is in {folder}, with a model card: look at {folder}/README.md.")
    typer.echo(f"Upload it: hf upload OWNER/{manifest.model} {shlex.quote(str(folder))}")


@deploy.command()
def together(
    model: ModelArgument,
    step: StepOption = None,
    best: BestOption = None,
    base_model: BaseModelOption = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A repository on the hub. Default: from the S3 store."),
    ] = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Have Together AI fetch the adapter of a step. Needs TOGETHER_API_KEY."""
    from ..store.deploy import together as upload

    with reported():
        steps = steps_of(model, store, cluster)
        manifest = chosen(steps, step, best)
        job = upload(steps, manifest, base_model=base_model, source=source)
    typer.echo(f"Together fetches {manifest.policy} as {job.model_name}, by its job {job.job_id}.")
