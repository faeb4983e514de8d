"""How rollouts run side by side: what is counted, the deadline of each, and what is cancelled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from sysconfig import get_path
from traceback import extract_tb
from typing import Any, TypeVar

from ..shared.errors import (
    ArtCloudError,
    ConfigError,
    RolloutError,
    RolloutTimeoutError,
    TooManyExceptionsError,
)
from ..shared.progress import Bar
from .trajectory import Trajectory

T = TypeVar("T")


CANCEL_SECONDS = 2.0
"""How long a cancelled rollout may take to clean up before it is left behind."""
LIBRARIES = get_path("stdlib"), get_path("purelib")
LISTED = 5
"""How many failures a TooManyExceptionsError lists."""


@dataclass
class Gathering:
    """The counters and limits of one call of `gather_*`."""

    bar: Bar
    max_exceptions: int | float
    timeout: float | None
    total: int = 0
    rewards: list[float] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_exceptions < 0 or math.isnan(self.max_exceptions):
            raise ConfigError(
                f"max_exceptions is {self.max_exceptions}. Give a number of rollouts (0, 1, 2, "
                "...) or a fraction of them between 0 and 1."
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}. Give seconds above 0, or None.")

    def expect(self, more: int) -> None:
        self.total += more
        self._show()

    def succeeded(self, trajectories: Iterable[Trajectory]) -> None:
        self.rewards += [trajectory.reward for trajectory in trajectories]
        self._show()

    def failed(self, error: Exception) -> None:
        """Count a failure.

        Raises:
            TooManyExceptionsError: it is one more than `max_exceptions` allows.
        """
        self.failures.append(error)
        self._show()
        limit = self.max_exceptions
        allowed = limit * self.total if 0 < limit < 1 else limit
        if len(self.failures) > allowed:
            raise TooManyExceptionsError(self._too_many()) from error

    def _too_many(self) -> str:
        listed = [_where_and_why(error) for error in self.failures[:LISTED]]
        more = len(self.failures) - len(listed)
        return "\n  ".join(
            [
                f"{len(self.failures)} of {self.total} rollouts failed, more than "
                f"max_exceptions={self.max_exceptions} allows; the rest was cancelled.",
                *listed,
                *([f"and {more} more"] if more else []),
                "Mend the rollout, or allow some to fail: max_exceptions=0.1 allows one in ten.",
            ]
        )

    def _show(self) -> None:
        words = []
        if self.rewards:
            words.append(f"reward {sum(self.rewards) / len(self.rewards):.3f}")
        if self.failures:
            words.append(f"exceptions {len(self.failures)}")
        done = len(self.rewards) + len(self.failures)
        self.bar.update(done, max(self.total, done), ", ".join(words))


def _where_and_why(error: Exception) -> str:
    """The error as text, with the line of the rollout's own code at which it was raised."""
    why = f"{type(error).__name__}: {error}"
    lines = extract_tb(error.__traceback__)
    own = [line for line in lines if not line.filename.startswith(LIBRARIES)]
    if isinstance(error, ArtCloudError) or not own:
        return why
    return f"{why} ({own[-1].filename}, line {own[-1].lineno})"


@dataclass
class Watch:
    """One awaitable that was given to `gather_trajectory_groups`. What it runs is known once it
    awaits a TrajectoryGroup."""

    gathering: Gathering
    opaque: bool = True


current_watch: ContextVar[Watch | None] = ContextVar("art_cloud_watch", default=None)


async def run_pending(
    rollouts: Sequence[Awaitable[Trajectory]],
) -> list[Trajectory | Exception]:
    """Run the rollouts of one group, counted by the gathering that goes on, if there is one."""
    watch = current_watch.get() or Watch(Gathering(Bar("", None), 0, None), opaque=False)
    if watch.opaque:
        watch.opaque = False
        watch.gathering.expect(-1)
    watch.gathering.expect(len(rollouts))
    return await run_rollouts(rollouts, watch.gathering)


async def run_rollouts(
    rollouts: Sequence[Awaitable[Trajectory]], gathering: Gathering
) -> list[Trajectory | Exception]:
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]

    async def one(number: int, task: asyncio.Future[Trajectory]) -> Trajectory | Exception:
        try:
            trajectory = await within_deadline(task, gathering.timeout)
            if not isinstance(trajectory, Trajectory):
                raise RolloutError(
                    f"Rollout {number} returned {type(trajectory).__name__}, not a Trajectory."
                )
        except Exception as error:
            gathering.failed(error)
            return error
        gathering.succeeded([trajectory])
        return trajectory

    return await all_or_none(tasks, [one(*pair) for pair in enumerate(tasks)])


async def within_deadline(task: asyncio.Future[T], timeout: float | None) -> T:
    await asyncio.wait([task], timeout=timeout)
    if not task.done():
        await cancel([task])
        raise RolloutTimeoutError("The rollout passed its deadline and was cancelled.")
    return task.result()


async def all_or_none(
    tasks: Sequence[asyncio.Future[Any]], watchers: list[Coroutine[Any, Any, T]]
) -> list[T]:
    """Await all `watchers`. If one fails, or the caller is cancelled, all of them are cancelled."""
    watching = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        return await asyncio.gather(*watching)
    finally:
        await cancel([*watching, *tasks])


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that are not done, and give them CANCEL_SECONDS to clean up."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        done, _ = await asyncio.wait(running, timeout=CANCEL_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen: asyncio would else report it as never retrieved
