"""`art-cloud checkpoints`: straight from a store, without a server."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shared.errors import ConfigError, ConflictError, NotFoundError, UnreadableError
from .options import (
    AsJson,
    Best,
    ClusterOption,
    DryRun,
    MaybeModel,
    Model,
    Step,
    StoreOption,
    To,
    Yes,
    chosen,
    count,
    group,
    open_for,
    size,
    steps_of,
)

if TYPE_CHECKING:
    from ..shared.config import Retention
    from ..store.checkpoints import Checkpoints, Manifest
    from ..store.transfer import Watch

checkpoints = group("Look after the steps of models: fetch, bring in, fork, thin out, check.")


@checkpoints.command("ls")
def list_checkpoints(
    model: MaybeModel = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a model with their metrics; without a model, the models."""
    from ..store.checkpoints import Checkpoints
    from ..store.garbage import models
    from . import tables

    if model is None:
        opened = open_for(store, cluster)
        there = []
        for name in models(opened):
            try:
                with suppress(ConflictError):  # it was deleted
                    if (newest := Checkpoints(opened, name).newest()) is not None:
                        there.append(newest)
            except UnreadableError as error:
                typer.echo(f"Not shown: {name}. {error}", err=True)
        if as_json:
            typer.echo(json.dumps([_model_json(manifest) for manifest in there]))
        elif there:
            tables.print_models(there)
        else:
            typer.echo(f"{opened.url} has no models yet.")
        return
    found = steps_of(model, store, cluster).infos()
    if as_json:
        typer.echo(json.dumps([info.model_dump(mode="json") for info in found]))
    elif found:
        tables.print_checkpoints(found)
    else:
        typer.echo(f"{model} has no steps there.")


@checkpoints.command()
def history(
    model: Model,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all metrics as CSV.")] = False,
) -> None:
    """Print the metrics of all steps that ever were, removed ones too."""
    from . import tables

    if as_json and as_csv:
        raise ConfigError("Give --json or --csv, not both.")
    rows = steps_of(model, store, cluster).history()
    if as_json:
        typer.echo(json.dumps(rows))
    elif as_csv:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        tables.print_history(rows)
    else:
        typer.echo(f"{model} has no steps there.")


@checkpoints.command()
def pull(
    model: Model,
    step: Step = None,
    best: Best = None,
    to: To = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Fetch its optimizer and manifest too.")
    ] = False,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Fetch the adapter of a step: a plain PEFT folder."""
    from ..store.adapters import pull as fetch

    steps = steps_of(model, store, cluster)
    manifest = chosen(steps, step, best)
    folder = to or Path(f"{manifest.model}-step-{manifest.step}")
    with _moving(f"pull {manifest.policy}") as watch:
        fetched = fetch(steps, manifest, folder, everything=everything, watch=watch)
    what = "with all that training goes on from" if everything else "a plain PEFT folder"
    typer.echo(f"{manifest.policy} is {'' if fetched else 'already '}in {folder}, {what}.")
    typer.echo(f"Serve it: {_vllm_command(manifest, folder / 'adapter' if everything else folder)}")


@checkpoints.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A plain PEFT folder.")],
    model: Model,
    base_model: Annotated[
        str | None, typer.Option(help="Default: the one that adapter_config.json names.")
    ] = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Begin a new model with a LoRA from elsewhere, and train it on."""
    from ..store.adapters import push as send

    steps = steps_of(model, store, cluster, create=True)
    with _moving(f"push {model}") as watch:
        made = send(steps, folder, base_model=base_model, watch=watch)
    lora = made.lora
    arguments = f"rank={lora.rank}, alpha={lora.alpha}, target_modules={lora.target_modules!r}"
    typer.echo(
        f"{model} begins with {folder} as its step 0. Train it on:\n\n"
        f"    model = art.TrainableModel(\n"
        f'        project="{made.project}",\n'
        f'        name="{made.model}",\n'
        f'        base_model="{made.base_model}",\n'
        f"        lora=art.LoRAConfig({arguments}),\n"
        f"    )"
    )


@checkpoints.command("rm")
def remove(
    model: Model,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="STEP...", help="Their numbers.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete the model: its name stays taken.")
    ] = False,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    yes: Yes = False,
) -> None:
    """Remove steps of a model for good. The newest stays; `gc` then frees the space."""
    if bool(steps) == everything:
        raise ConfigError("Give the numbers of steps, or --all.")
    kept = steps_of(model, store, cluster)
    what = "all steps" if everything else f"step {', '.join(map(str, steps or []))}"
    if not yes:
        typer.confirm(f"Remove {what} of {model} for good?", abort=True, err=True)
    if everything:
        kept.end()
    for step in steps or []:
        kept.delete(step)
    typer.echo(f"Removed {what} of {model}.")


@checkpoints.command()
def prune(
    model: Model,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Keep the step where it is highest.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep steps 0, N, 2N, ...")
    ] = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Remove the steps that no rule keeps. Default: the model's own retention."""
    from ..store.checkpoints import ranges
    from ..store.retention import prune as thin_out

    steps = steps_of(model, store, cluster)
    retention = _retention(steps, keep_last, keep_best, keep_every)
    going = thin_out(steps, retention, dry_run=True)
    if not going:
        typer.echo(f"Every step of {model} is kept.")
        return
    numbers = ranges([info.step for info in going])
    words = f"step {numbers} of {model} ({count(going, 'step')})"
    if dry_run:
        typer.echo(f"Would remove {words}.")
        return
    if not yes:
        typer.confirm(f"Remove {words}?", abort=True, err=True)
    thin_out(steps, retention)
    typer.echo(f"Removed {words}. `art-cloud checkpoints gc` frees the space.")


@checkpoints.command()
def fork(
    model: Model,
    to: Annotated[
        str, typer.Argument(metavar="NEW_PROJECT/NEW_MODEL", help="A name that is free.")
    ],
    step: Step = None,
    best: Best = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Begin a new model at a step of another. Nothing is copied."""
    from ..shared.names import ModelName

    steps = steps_of(model, store, cluster)
    begun = steps.fork(ModelName.parse(to), chosen(steps, step, best).step)
    typer.echo(f"{to} begins at step {begun.step} of {model}.")


@checkpoints.command()
def gc(
    older_than: Annotated[
        str, typer.Option(help="Unused for so long. Less than 24h only while nobody trains.")
    ] = "24h",
    store: StoreOption = None,
    cluster: ClusterOption = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Free the space of what no step needs any more, in the whole store."""
    from datetime import timedelta

    from ..shared.limits import parse_duration
    from ..store.garbage import collect_garbage, find_garbage, in_bytes

    opened = open_for(store, cluster)
    age = timedelta(seconds=parse_duration(older_than))
    garbage = find_garbage(opened, age)
    if not garbage.blobs:
        typer.echo(f"Nothing in {opened.url} has been unused for {older_than}.")
        return
    words = f"{count(garbage.blobs, 'blob')}, {size(in_bytes(garbage.blobs))}"
    if dry_run:
        typer.echo(f"Would remove {words} that no step needs from {opened.url}.")
        return
    if not yes:
        typer.confirm(f"Remove {words} that no step needs from {opened.url}?", abort=True, err=True)
    removed = collect_garbage(opened, garbage)
    typer.echo(f"Removed {count(removed, 'blob')}, {size(in_bytes(removed))}.")


@checkpoints.command()
def verify(
    model: MaybeModel = None,
    store: StoreOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Read all that steps consist of and compare it with its hashes. Exit code 1: damage."""
    from ..shared.names import ModelName
    from ..store import garbage as upkeep
    from . import tables

    chosen_name = [ModelName.parse(model)] if model else None
    opened = open_for(store, cluster)
    names = chosen_name or upkeep.models(opened)
    with _moving(f"verify {model or opened.url}") as watch:
        read, damage = upkeep.verify(opened, names, watch)
    if model and not read and not damage:
        raise NotFoundError(f"{model} has no steps in {opened.url}.")
    if as_json:
        found = [
            {
                "sha256": one.blob.sha256 if one.blob else None,
                "what": one.what,
                "hurt": list(one.hurt),
            }
            for one in damage
        ]
        typer.echo(json.dumps({"blobs": read, "damaged": found}))
    elif damage:
        tables.print_damage(damage)
        lost = sum(one.blob is None for one in damage)
        skipped = f", and {count(range(lost), 'manifest')} can't be read" if lost else ""
        typer.echo(
            f"{len(damage) - lost} of {read} blobs are damaged{skipped}. Nothing loads them. "
            "Restore them from a copy of the store, or go on from a step that is whole: art-cloud "
            "checkpoints fork"
        )
    else:
        typer.echo(f"All {count(range(read), 'blob')} are whole.")
    if damage:
        raise typer.Exit(1)


@checkpoints.command()
def presign(
    model: Model,
    step: Step = None,
    best: Best = None,
    expires: Annotated[str, typer.Option(help="How long the URLs hold.")] = "1h",
    store: StoreOption = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Make URLs at which anyone can fetch the adapter of a step for a while."""
    from ..shared.limits import parse_duration
    from ..store.adapters import ADAPTER

    steps = steps_of(model, store, cluster)
    manifest = chosen(steps, step, best)
    seconds = int(parse_duration(expires))
    urls = {
        path.removeprefix(ADAPTER): steps.store.presign(blob, seconds)
        for path, blob in manifest.files.items()
        if path.startswith(ADAPTER)
    }
    if as_json:
        typer.echo(json.dumps(urls))
        return
    folder = f"{manifest.model}-step-{manifest.step}"
    typer.echo(f"# The adapter of {manifest.policy}, for {expires}. Whoever has a URL can read it.")
    for name, url in urls.items():
        typer.echo(f"curl -f --create-dirs -o {folder}/{name} '{url}'")


def _retention(
    steps: Checkpoints, keep_last: int | None, keep_best: str | None, keep_every: int | None
) -> Retention:
    from ..shared.config import Retention

    if keep_last or keep_best or keep_every:
        return Retention(keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
    own = chosen(steps, None, None).retention
    if own is None:
        raise ConfigError(
            f"{steps.name} was registered without retention. Say what to keep: --keep-last, "
            "--keep-best or --keep-every."
        )
    return own


@contextmanager
def _moving(description: str) -> Iterator[Watch]:
    """Show a progress bar of the bytes that are transferred in the block."""
    from ..shared.progress import progress

    with progress(description, in_bytes=True) as bar:
        yield bar.update


def _vllm_command(manifest: Manifest, folder: Path) -> str:
    """The command that serves the adapter by vLLM, which takes certain ranks only, and 16 unless
    told."""
    rank = next((r for r in (16, 32, 64, 128, 256, 320, 512) if r >= manifest.lora.rank), 512)
    more = f" --max-lora-rank {rank}" if rank > 16 else ""
    return (
        f"vllm serve {manifest.base_model} --enable-lora{more} "
        f"--lora-modules {manifest.model}={folder}"
    )


def _model_json(newest: Manifest) -> dict[str, Any]:
    return newest.model_dump(
        mode="json", include={"project", "model", "step", "kind", "base_model", "created_at"}
    )
