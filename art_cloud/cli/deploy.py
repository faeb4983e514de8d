"""`art-cloud deploy`: a step of a model to where others serve it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .options import Best, ClusterOption, Model, Step, StoreOption, To, chosen, group, steps_of

deploy = group("Hand an adapter on: a repository for the Hugging Face hub, Together AI.")
BaseModel = Annotated[
    str | None,
    typer.Option(metavar="OWNER/NAME", help="The base model's name there, if it has another."),
]


@deploy.command()
def hub(
    model: Model,
    step: Step = None,
    best: Best = None,
    to: To = None,
    base_model: BaseModel = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Write a repository for the Hugging Face hub: the adapter and its model card."""
    from ..store.deploy import hub_folder

    steps = steps_of(model, store, cluster)
    manifest = chosen(steps, step, best)
    folder = to or Path(f"{manifest.model}-step-{manifest.step}-hub")
    hub_folder(steps, manifest, folder, base_model=base_model)
    typer.echo(f"{manifest.policy} is in {folder}, with a model card: look at {folder}/README.md.")
    typer.echo(f"Upload it: hf upload OWNER/{manifest.model} {shlex.quote(str(folder))}")


@deploy.command()
def together(
    model: Model,
    step: Step = None,
    best: Best = None,
    base_model: BaseModel = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A repository on the hub. Default: URLs of the S3 store."),
    ] = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Have Together AI fetch the adapter of a step. Needs TOGETHER_API_KEY."""
    from ..store.deploy import together as upload

    steps = steps_of(model, store, cluster)
    manifest = chosen(steps, step, best)
    job = upload(steps, manifest, base_model=base_model, source=source)
    typer.echo(f"Together fetches {manifest.policy} as {job.model_name}, by its job {job.job_id}.")
