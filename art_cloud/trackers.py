"""Where a model's metrics and rollouts are shown: W&B and Langfuse.

The store has all of it, whatever happens to them. So each tracker has a thread of its own, which
begins with what the store's history has and goes on with what comes. Nothing waits for it: a
tracker that can't be reached is said once and tried again, and what it missed is sent by the next
program that registers the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from .errors import ConfigError
from .names import ModelName
from .progress import say, say_once
from .protocol import Metrics, is_finite
from .trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from .model import Model

TrackerName: TypeAlias = Literal["wandb", "langfuse"]

EVENTS = 10_000
"""How many steps and logs wait for a tracker that is slow or can't be reached."""
ROLLOUTS = 8
"""Of a train call or a log: how many of its trajectories a tracker gets, over all its groups."""
RETRY_SECONDS = 60.0
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
"""The group of each metric of a step. `cost` has those of the cluster."""


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a model before anything else.

    `id` is a function of the model and of when it began: the same in every program that trains it
    on, and another one if it was deleted and begun anew.
    """

    id: str
    project: str
    name: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """As `model.history()` gives it."""


@dataclass(frozen=True)
class Event:
    """A step that was made, or something that was logged of one."""

    step: int
    split: str
    metrics: Metrics
    """Under the names that trackers show (`tracked_name`)."""
    trajectories: Sequence[Trajectory] = ()


class Tracker(Protocol):
    """A service, as its thread sees it. Whatever these raise is said once."""

    title: str

    def open(self, run: Run) -> None:
        """Connect, and send what of the history is not there. Called again if it raised."""

    def send(self, event: Event) -> None: ...

    def close(self) -> None:
        """Wait until all that was sent is there, CLOSE_SECONDS at most."""


def tracked_name(name: str) -> str:
    """Where a metric of the store's history is shown: `group/name`, or `split/name` if logged.

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
    """Of the model that began when its history does; of one without steps, by its store."""
    began = str(history[0]["created_at"]) if history else store
    return f"{name.model}-{hashlib.sha256(f'{name} {began}'.encode()).hexdigest()[:12]}"


def wanted(model: Model[Any]) -> Sequence[TrackerName]:
    """What `model.report_metrics` names; W&B, if it is None and WANDB_API_KEY is set.

    Raises:
        ConfigError: what it names is not installed, or lacks its keys.
    """
    if model.report_metrics is None:
        if not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "disabled":
            return ()
        if find_spec("wandb") is None:
            say_once(
                "WANDB_API_KEY is set, and wandb is not installed: nothing is sent to W&B. pip "
                "install 'art-cloud[wandb]', or give the model report_metrics=[]."
            )
            return ()
        return ("wandb",)
    for name in model.report_metrics:
        if find_spec(name) is None:
            raise ConfigError(
                f"report_metrics of {model.name} has {name!r}, which is not installed: pip install "
                f"'art-cloud[{name}]'"
            )
    keys = [key for key in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY") if key not in os.environ]
    if "langfuse" in model.report_metrics and keys:
        raise ConfigError(
            f"report_metrics of {model.name} has 'langfuse', and {' and '.join(keys)} "
            f"{'is' if len(keys) == 1 else 'are'} not set. Langfuse gives both in the settings of "
            "a project; LANGFUSE_BASE_URL says where it runs."
        )
    return tuple(dict.fromkeys(model.report_metrics))


class Trackers:
    """Those of all models of one backend."""

    def __init__(self) -> None:
        self._feeds: dict[ModelName, list[_Feed]] = {}

    def has(self, name: ModelName) -> bool:
        return name in self._feeds

    def open(self, name: ModelName, run: Run, trackers: Iterable[TrackerName]) -> None:
        self._feeds[name] = [_Feed(_MAKERS[tracker](), run) for tracker in trackers]

    def tell(
        self,
        name: ModelName,
        step: int,
        split: str,
        metrics: Metrics,
        groups: Sequence[TrajectoryGroup] = (),
    ) -> None:
        """Hand on what was made or logged; returns at once, and never raises."""
        for feed in self._feeds.get(name, []):
            shown = {tracked_name(key): value for key, value in metrics.items()}
            feed.put(Event(step, split, shown, some_of(groups)))

    async def close(self) -> None:
        """Wait for what was handed on, CLOSE_SECONDS at most."""
        feeds = [feed for feeds in self._feeds.values() for feed in feeds]
        self._feeds.clear()
        await asyncio.gather(*(asyncio.to_thread(feed.close) for feed in feeds))


@dataclass
class _Feed:
    """A tracker with its thread, and the queue between them."""

    tracker: Tracker
    run: Run
    _events: queue.Queue[Event | None] = field(default_factory=lambda: queue.Queue(EVENTS))
    _closing: threading.Event = field(default_factory=threading.Event)
    _behind: bool = False
    _complained: bool = False

    def __post_init__(self) -> None:
        # A daemon: what a tracker does not take must not keep the program alive.
        self._thread = threading.Thread(target=self._work, name=self.tracker.title, daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        try:
            if not self._behind:  # else there would be a gap that nobody fills
                self._events.put_nowait(event)
        except queue.Full:
            self._behind = True

    def close(self) -> None:
        self._closing.set()
        with suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or not self._events.empty():
            say(
                f"{self.tracker.title} has not got all of {self.run.name} yet. The store has; the "
                "next program that registers the model sends the metrics that are missing."
            )

    def _work(self) -> None:
        while not self._try(partial(self.tracker.open, self.run)):
            if self._closing.wait(RETRY_SECONDS):
                return
        while (event := self._events.get()) is not None:
            self._try(partial(self.tracker.send, event))
        self._try(self.tracker.close)

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # of another's code, about another's service: never training's
            if not self._complained:
                self._complained = True
                what = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_LENGTH]
                say(f"{self.tracker.title}: {what}. Training goes on; the store has it all.")
            return False
        return True


def some_of(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """Up to ROLLOUTS trajectories: the first of each group, then the second, and so on."""
    rounds = range(max(map(len, groups), default=0))
    turns = (group.trajectories[n] for n in rounds for group in groups if n < len(group))
    return [trajectory for _, trajectory in zip(range(ROLLOUTS), turns, strict=False)]


def _wandb() -> Tracker:
    from .wandb_tracker import WandbTracker

    return WandbTracker()


def _langfuse() -> Tracker:
    from .langfuse_tracker import LangfuseTracker

    return LangfuseTracker()


_MAKERS: dict[TrackerName, Callable[[], Tracker]] = {"wandb": _wandb, "langfuse": _langfuse}
