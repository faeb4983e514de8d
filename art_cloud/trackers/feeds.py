"""Where a model's metrics and rollouts are shown: W&B and Langfuse.

The store has all of it, whatever happens to them. So each tracker has a thread of its own, which
begins with what the store's history has and goes on with what comes. Nothing waits for it: a
tracker that can't be reached is said once and tried again, and what it missed is sent by the next
program that registers the model.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

from ..rollouts.group import TrajectoryGroup
from ..rollouts.trajectory import Trajectory
from ..shared.errors import ConfigError
from ..shared.names import ModelName
from ..shared.progress import say, say_once
from ..shared.protocol import Metrics
from .tracker import (
    CLOSE_SECONDS,
    ERROR_LENGTH,
    EVENTS,
    ROLLOUTS,
    Event,
    Run,
    Tracker,
    TrackerName,
    tracked_name,
)

RETRY_SECONDS = 60.0


def wanted(model: str, report_metrics: Sequence[TrackerName] | None) -> Sequence[TrackerName]:
    """The trackers that a model's `report_metrics` names; W&B if it is None and WANDB_API_KEY is
    set.

    Raises:
        ConfigError: what it names is not installed, or lacks its keys.
    """
    if report_metrics is None:
        if not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "disabled":
            return ()
        if find_spec("wandb") is None:
            say_once(
                "WANDB_API_KEY is set, and wandb is not installed: nothing is sent to W&B. pip "
                "install 'art-cloud[wandb]', or give the model report_metrics=[]."
            )
            return ()
        return ("wandb",)
    for name in report_metrics:
        if find_spec(name) is None:
            raise ConfigError(
                f"report_metrics of {model} has {name!r}, which is not installed: pip install "
                f"'art-cloud[{name}]'"
            )
    keys = [key for key in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY") if key not in os.environ]
    if "langfuse" in report_metrics and keys:
        raise ConfigError(
            f"report_metrics of {model} has 'langfuse', and {' and '.join(keys)} "
            f"{'is' if len(keys) == 1 else 'are'} not set. Langfuse gives both in the settings of "
            "a project; LANGFUSE_BASE_URL says where it runs."
        )
    return tuple(dict.fromkeys(report_metrics))


class Trackers:
    """The trackers of all models of one backend."""

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
        """Hand an event to the trackers of its model; returns at once, and never raises."""
        for feed in self._feeds.get(name, []):
            shown = {tracked_name(key): value for key, value in metrics.items()}
            feed.put(Event(step, split, shown, some_of(groups)))

    async def close(self) -> None:
        """Wait until the trackers have sent all events, CLOSE_SECONDS at most."""
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
    """At most ROLLOUTS trajectories: the first of each group, then the second of each, and so
    on."""
    rounds = range(max(map(len, groups), default=0))
    turns = (group.trajectories[n] for n in rounds for group in groups if n < len(group))
    return [trajectory for _, trajectory in zip(range(ROLLOUTS), turns, strict=False)]


def _wandb() -> Tracker:
    from .wandb import WandbTracker

    return WandbTracker()


def _langfuse() -> Tracker:
    from .langfuse import LangfuseTracker

    return LangfuseTracker()


_MAKERS: dict[TrackerName, Callable[[], Tracker]] = {"wandb": _wandb, "langfuse": _langfuse}
