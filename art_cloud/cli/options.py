"""The arguments and options that several commands share, and how a command finds its store."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from ..clusters.command_line import reported
from ..shared.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ..store.base import Store
    from ..store.checkpoints import Checkpoints, Manifest

Name = Annotated[str, typer.Argument(metavar="NAME", help="A cluster, as `status` shows it.")]
MaybeName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A cluster, as `status` shows it.")
]
Model = Annotated[
    str, typer.Argument(metavar="PROJECT/MODEL", help="A model, as `checkpoints ls` shows it.")
]
MaybeModel = Annotated[
    str | None, typer.Argument(metavar="PROJECT/MODEL", help="Default: all models of the store.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="A bucket or a folder. Default: the folder of local clusters."
    ),
]
ClusterOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="The store of this cluster instead.")
]
Step = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Which step. Default: the newest.")
]
Best = Annotated[
    str | None, typer.Option(metavar="METRIC", help="The step where this metric is highest.")
]
To = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Default: one named after what it holds.")
]
Engine = Annotated[Literal["transformers", "vllm"], typer.Option(help="The engine that samples.")]
ProviderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="KEY=VALUE", help="An option of the provider; may be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


class Commands(TyperGroup):
    """The commands of `art-cloud`: an ArtCloudError of theirs becomes a message and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


def group(help: str | None = None, cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    return typer.Typer(
        cls=cls,
        help=help,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's help would take longer to import than all else together
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


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
