"""What commands about a store have in common: their options, and how they find it."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ..store.base import Store
    from ..store.checkpoints import Checkpoints, Manifest

ModelArgument = Annotated[str, typer.Argument(metavar="PROJECT/MODEL")]
StoreOption = Annotated[
    str | None, typer.Option(help="URL or folder. Default: the store of local clusters.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--name", help="The store of this cluster instead.")
]
StepOption = Annotated[int | None, typer.Option(min=0, help="Default: the newest.")]
BestOption = Annotated[
    str | None, typer.Option(metavar="METRIC", help="The step where this is highest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]
ToOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Default: one named after what it holds.")
]


def open_for(url: str | None, cluster: str | None, *, create: bool = False) -> Store:
    """The store at `url`, or of a recorded cluster; the one of local clusters by default."""
    from ..clusters.registry import Registry, home, unknown
    from ..store.opening import open_store

    if cluster is None:
        return open_store(url or str(home() / "store"), create=create)
    if url is not None:
        raise ConfigError("Give --store or --name, not both: a cluster has its own store.")
    record = Registry().get(cluster)
    if record is None:
        raise unknown(cluster)
    spec = record.spec
    if spec.store.startswith("file:") and spec.provider != "local":
        raise ConfigError(
            f"The store of {cluster} is a folder on its machine ({spec.store}). Give the command "
            "there, with --store, or keep the steps in an S3 store."
        )
    return open_store(spec.store, create=create)


def steps_of(
    model: str, url: str | None, cluster: str | None, *, create: bool = False
) -> Checkpoints:
    from ..shared.names import ModelName
    from ..store.checkpoints import Checkpoints

    name = ModelName.parse(model)
    return Checkpoints(open_for(url, cluster, create=create), name)


def chosen(steps: Checkpoints, step: int | None, metric: str | None) -> Manifest:
    """The step that `--step` or `--best` names; the newest by default."""
    from ..store.checkpoints import best

    if step is not None and metric is not None:
        raise ConfigError("Give --step or --best, not both.")
    if metric is not None:
        step = best(steps.infos(), metric).step
    found = steps.newest() if step is None else steps.read(step)
    if found is None:
        raise NotFoundError(f"{steps.name} has no steps in {steps.store.url}.")
    return found


def count(things: Sized, what: str) -> str:
    number = len(things)
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(total: int) -> str:
    from rich.filesize import decimal

    return decimal(total)
