"""The command line that the examples share."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..backend import Backend
from ..clusters.command_line import provider_options, reported, run
from ..clusters.registry import home
from ..clusters.up import up
from .experiment import Experiment, run_experiment
from .report import plot, print_table
from .tiny import make_tiny_model

SMOKE_TASKS, SMOKE_GROUP = 1, 2
SMOKE_AUTO = {
    "count": 2,
    "steps": 1,
    "groups_per_step": 1,
    "rollouts_per_group": 2,
    "max_turns": 2,
    "max_tokens": 16,
}
HUB_MODEL = "Qwen/Qwen3-0.6B"


def run_example(
    experiment: Experiment[Any], title: str, options: argparse.Namespace | None = None
) -> None:
    """Run `experiment` as the command line says; print a table, draw a picture.

    Without `--base-model` on this machine, a model is made on the spot and warmed up.

    Args:
        options: what `experiment_parser` read, for a script that added some of its own.
    """
    options = options or experiment_parser(experiment.name, title, experiment.steps).parse_args()
    if options.smoke:
        experiment = _small(experiment)
    if options.steps is not None:
        experiment = replace(experiment, steps=options.steps)
    with reported():
        place = prepare(options)
    result = run(
        run_experiment(
            experiment,
            place.cluster,
            place.base_model,
            run=options.run,
            control=options.control,
            warm_up=place.tiny and bool(experiment.warm_up),
        )
    )
    console = Console(stderr=options.json)
    print_table(result, console)
    picture = plot(result, options.plot or Path(f"{experiment.name}.png"), title)
    console.print(f"{experiment.measure} by step: {picture}")
    if options.json:
        print(json.dumps(result.summary()))


def example_parser(name: str, title: str, steps: int) -> argparse.ArgumentParser:
    """The options of every example. `steps` is the default of the one with that name."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--provider", default="local", help="where the server runs: local, ssh, ..")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE",
                        help="of the provider, or of art.up: -o gpu=H100 -o budget=5")  # fmt: skip
    parser.add_argument("--store", help="where steps are kept: s3://bucket/prefix")
    parser.add_argument("--base-model", help="default: a tiny one made on the spot (local), "
                        f"or {HUB_MODEL}")  # fmt: skip
    parser.add_argument("--steps", type=int, help=f"of GRPO (default: {steps})")
    parser.add_argument("--run", help="name of this run; given again, it goes on",
                        default=time.strftime(f"{name}-%Y%m%d-%H%M%S"))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--smoke", action="store_true", help="one small step: does it work here?")
    return parser


def experiment_parser(name: str, title: str, steps: int) -> argparse.ArgumentParser:
    """The options of an example that is an `Experiment`."""
    parser = example_parser(name, f"{title}: warm-up, GRPO, held-out tasks.", steps)
    parser.add_argument("--control", action="store_true", help="train a copy on permuted rewards")
    parser.add_argument("--plot", type=Path, help=f"where the PNG goes ({name}.png)")
    return parser


@dataclass(frozen=True)
class Place:
    """Where an example runs, and from which weights."""

    base_model: str
    tiny: bool
    """Whether the base model was made on the spot, and knows nothing."""
    cluster: AbstractAsyncContextManager[Backend]


def prepare(options: argparse.Namespace) -> Place:
    """The base model and the cluster that the command line asks for. Nothing is started yet."""
    folder = home() / "examples"
    local = options.provider == "local"
    tiny = local and options.base_model is None
    base_model = options.base_model or HUB_MODEL
    if tiny:
        base_model = str(make_tiny_model(folder / "model"))
    store = options.store or (str(folder / "store") if local else None)
    given: dict[str, Any] = {"name": options.run, "base_model": base_model, "store": store}
    cluster = up(options.provider, **(given | provider_options(options.option)))
    return Place(base_model, tiny, cluster)


def auto_settings(options: argparse.Namespace, steps: int) -> dict[str, int]:
    """The arguments of `art.auto` from the command line. `steps` is the default."""
    return SMOKE_AUTO if options.smoke else {"steps": options.steps or steps}


def _small(experiment: Experiment[Any]) -> Experiment[Any]:
    tasks, watched = experiment.tasks, experiment.watched
    return replace(
        experiment,
        tasks=lambda number: tasks(number)[:SMOKE_TASKS],
        watched=watched and (lambda number: watched(number)[:SMOKE_TASKS]),
        held_out=experiment.held_out[:SMOKE_TASKS],
        warm_up=experiment.warm_up[:SMOKE_TASKS],
        steps=1,
        group_size=SMOKE_GROUP,
    )
