"""What a tracker is told of a model, and under which names it shows the metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from ..rollouts.trajectory import Trajectory
from ..shared.names import ModelName
from ..shared.protocol import Metrics, is_finite

TrackerName: TypeAlias = Literal["wandb", "langfuse"]
EVENTS = 10_000
"""How many steps and logs wait for a tracker that is slow or can't be reached."""
ROLLOUTS = 8
"""How many trajectories of a train call or a log a tracker gets, over all its groups."""
ERROR_LENGTH = 300
CLOSE_SECONDS = 15.0
GROUPS = {
    **dict.fromkeys(("loss", "loss_first", "loss_last", "grad_norm", "entropy"), "loss"),
    **dict.fromkeys(("kl_sampler", "kl_reference", "clip_fraction", "canary"), "loss"),
    **dict.fromkeys(("ratio_mean", "ratio_max"), "loss"),
    **dict.fromkeys(("groups", "groups_without_signal", "groups_too_small"), "data"),
    **dict.fromkeys(("trajectories", "samples", "samples_masked", "examples"), "data"),
    **dict.fromkeys(("tokens", "tokens_computed", "optimizer_steps"), "data"),
    **dict.fromkeys(("tokens_per_second", "trie_saved"), "throughput"),
    "seconds": "time",
    "reward": "train",
    "reward_std": "train",
}
"""The group under which each metric of a step is shown. `cost` has the metrics of the cluster."""


@dataclass(frozen=True)
class Run:
    """A model as a tracker hears of it, before anything else.

    `id` is a function of the model and of when it began: the same in every program that trains it
    on, and another one if it was deleted and begun anew.
    """

    id: str
    project: str
    name: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """The rows that `model.history()` returns."""


@dataclass(frozen=True)
class Event:
    """A step that was made, or something that was logged of one."""

    step: int
    split: str
    metrics: Metrics
    """The metrics, under the names that trackers show (`tracked_name`)."""
    trajectories: Sequence[Trajectory] = ()


class Tracker(Protocol):
    """A service such as W&B. Errors that these methods raise are printed once."""

    title: str

    def open(self, run: Run) -> None:
        """Connect, and send the rows of the history that the service lacks. Called again if it
        raised."""

    def send(self, event: Event) -> None: ...

    def close(self) -> None:
        """Wait until the service has all that was sent, CLOSE_SECONDS at most."""


def tracked_name(name: str) -> str:
    """The name under which a metric of the store's history is shown: `group/name`, or `split/name`
    if it was logged.

    `loss` and `train/loss`, its copy by a script that logs what a train call returned, are one:
    `loss/loss`. What trajectories measured (`trajectory/turns`) is of the split `train`.
    """
    split, slash, rest = name.partition("/")
    if not slash:
        return f"{GROUPS.get(name, 'train')}/{name}"
    if split in ("train", "trajectory"):
        return f"train/{rest}" if split == "trajectory" else tracked_name(rest)
    return name


def numbers(row: dict[str, Any]) -> Metrics:
    """The metrics of a row of the history, under the names that trackers show."""
    return {
        tracked_name(key): float(value)
        for key, value in row.items()
        if is_finite(value) and key != "step"
    }


def run_id(name: ModelName, history: Sequence[dict[str, Any]], store: str) -> str:
    """The id of a model's run: by when its history begins or, for a model without steps, by its
    store."""
    began = str(history[0]["created_at"]) if history else store
    return f"{name.model}-{hashlib.sha256(f'{name} {began}'.encode()).hexdigest()[:12]}"
