"""The command line that the examples share."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..backend import Backend
from ..cli_clusters import provider_options, run
from ..cluster import up
from ..registry import home
from .experiment import Experiment, run_experiment
from .report import plot, print_table
from .tiny import make_tiny_model

SMOKE_TASKS, SMOKE_GROUP = 2, 2
HUB_MODEL = "Qwen/Qwen3-0.6B"


def run_example(experiment: Experiment[Any], title: str) -> None:
    """Run `experiment` as the command line says; print a table, draw a picture.

    Without `--base-model` on this machine, a model is made on the spot and warmed up.
    """
    options = _parse(experiment, title)
    if options.smoke:
        experiment = _small(experiment)
    if options.steps is not None:
        experiment = replace(experiment, steps=options.steps)
    folder = home() / "examples"
    tiny = options.base_model is None and options.provider == "local"
    if options.base_model:
        base_model = options.base_model
    else:
        base_model = str(make_tiny_model(folder / "model")) if tiny else HUB_MODEL
    result = run(
        run_experiment(
            experiment,
            _cluster(options, base_model, folder),
            base_model,
            run=options.run,
            control=options.control,
            warm_up=tiny and bool(experiment.warm_up),
        )
    )
    console = Console(stderr=options.json)
    print_table(result, console)
    picture = plot(result, options.plot or Path(f"{experiment.name}.png"), title)
    console.print(f"{experiment.measure} by step: {picture}")
    if options.json:
        print(json.dumps(result.summary()))


def _parse(experiment: Experiment[Any], title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{title}: warm-up, GRPO, held-out tasks.")
    parser.add_argument("--provider", default="local", help="where the server runs: local, ssh, ..")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE",
                        help="of the provider, or of art.up: -o gpu=H100 -o budget=5")  # fmt: skip
    parser.add_argument("--store", help="where steps are kept: s3://bucket/prefix")
    parser.add_argument("--base-model", help="default: a tiny one made on the spot (local), "
                        f"or {HUB_MODEL}")  # fmt: skip
    parser.add_argument("--steps", type=int, help=f"of GRPO (default: {experiment.steps})")
    parser.add_argument("--control", action="store_true", help="train a copy on permuted rewards")
    parser.add_argument("--run", help="name of this run; given again, it goes on",
                        default=time.strftime(f"{experiment.name}-%Y%m%d-%H%M%S"))  # fmt: skip
    parser.add_argument("--plot", type=Path, help=f"where the PNG goes ({experiment.name}.png)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--smoke", action="store_true", help="one small step: does it work here?")
    return parser.parse_args()


def _cluster(
    options: argparse.Namespace, base_model: str, folder: Path
) -> AbstractAsyncContextManager[Backend]:
    store = options.store or (str(folder / "store") if options.provider == "local" else None)
    given: dict[str, Any] = {"name": options.run, "base_model": base_model, "store": store}
    return up(options.provider, **(given | provider_options(options.option)))


def _small(experiment: Experiment[Any]) -> Experiment[Any]:
    tasks = experiment.tasks
    return replace(
        experiment,
        tasks=lambda number: tasks(number)[:SMOKE_TASKS],
        held_out=experiment.held_out[:SMOKE_TASKS],
        warm_up=experiment.warm_up[:SMOKE_TASKS],
        steps=1,
        group_size=SMOKE_GROUP,
    )
