"""Run rollouts together: with progress, a deadline for each, and a limit to how many may fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isawaitable
from sysconfig import get_path
from traceback import extract_tb
from typing import Any, Literal, TypeAlias, TypeVar, overload

from .errors import (
    ArtCloudError,
    ConfigError,
    RolloutError,
    RolloutTimeoutError,
    TooManyExceptionsError,
)
from .progress import Bar, progress
from .trajectory import Trajectory, TrajectoryGroup

T = TypeVar("T")
AfterEach: TypeAlias = Callable[
    [TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]
]

CANCEL_SECONDS = 2.0
"""How long a cancelled rollout may take to clean up before it is left behind."""
LIBRARIES = get_path("stdlib"), get_path("purelib")
LISTED = 5
"""Failures that a TooManyExceptionsError lists."""


@dataclass
class Gathering:
    """What one call of `gather_*` counts."""

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
    """With the line of the rollout's own code that a bug is in."""
    why = f"{type(error).__name__}: {error}"
    lines = extract_tb(error.__traceback__)
    own = [line for line in lines if not line.filename.startswith(LIBRARIES)]
    if isinstance(error, ArtCloudError) or not own:
        return why
    return f"{why} ({own[-1].filename}, line {own[-1].lineno})"


@dataclass
class _Watch:
    """One awaitable of `gather_trajectory_groups`; opaque until it runs a TrajectoryGroup."""

    gathering: Gathering
    opaque: bool = True


_watch: ContextVar[_Watch | None] = ContextVar("art_cloud_watch", default=None)


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
    timeout: float | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Run the rollouts of all groups at once and return the groups, in their order.

    Args:
        groups: TrajectoryGroups made from awaitables, or other awaitables of a group.
        pbar_desc: what the progress bar says; None: no bar.
        max_exceptions: how many rollouts may fail (or, between 0 and 1, which share of them).
            Those that do are in their group's `exceptions`.
        timeout: seconds that each rollout may take. One that takes longer is cancelled and fails
            with RolloutTimeoutError. An awaitable of a group that awaits no TrajectoryGroup in
            its turn counts as one rollout.
        after_each: awaited with each group as soon as it is complete, say to score it. The group
            (or groups) that it returns take its place; None drops it.

    Raises:
        TooManyExceptionsError: more failed; the rollouts still under way were cancelled.
    """
    with progress(pbar_desc) as bar:
        gathering = Gathering(bar, max_exceptions, timeout)
        given = list(groups)
        watches = [_Watch(gathering, not isinstance(group, TrajectoryGroup)) for group in given]
        gathering.expect(sum(watch.opaque for watch in watches))
        tasks = [_start(*pair) for pair in zip(given, watches, strict=True)]

        async def one(
            task: asyncio.Future[TrajectoryGroup], watch: _Watch
        ) -> list[TrajectoryGroup]:
            group = await _watched(task, watch)
            if group is None or after_each is None:
                return [] if group is None else [group]
            replaced = await after_each(group)
            if replaced is None:
                return []
            return replaced if isinstance(replaced, list) else [replaced]

        done = await _all(tasks, [one(*pair) for pair in zip(tasks, watches, strict=True)])
    return [group for several in done for group in several]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: Literal[0] = ...,
    timeout: float | None = ...,
) -> list[Trajectory]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: int | float,
    timeout: float | None = ...,
) -> list[Trajectory | Exception]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
    timeout: float | None = None,
) -> Sequence[Trajectory | Exception]:
    """Run rollouts that belong to no group. A failed one leaves its exception in its place.

    Arguments and errors are those of `gather_trajectory_groups`.
    """
    with progress(pbar_desc) as bar:
        gathering = Gathering(bar, max_exceptions, timeout)
        given = list(trajectories)
        gathering.expect(len(given))
        return await _run(given, gathering)


async def gather_one(
    group: Awaitable[TrajectoryGroup], gathering: Gathering
) -> TrajectoryGroup | None:
    """Run one group under the limits of `gathering`; None if it failed as a whole, and may."""
    watch = _Watch(gathering, not isinstance(group, TrajectoryGroup))
    gathering.expect(int(watch.opaque))
    task = _start(group, watch)
    try:
        return await _watched(task, watch)
    finally:
        await _cancel([task])


async def run_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """Run what is pending in `group`: within the gathering that goes on, if there is one."""
    watch = _watch.get() or _Watch(Gathering(Bar("", None), 0, None), opaque=False)
    if watch.opaque:
        watch.opaque = False
        watch.gathering.expect(-1)
    pending = group.take_pending()
    watch.gathering.expect(len(pending))
    results = await _run(pending, watch.gathering)
    return TrajectoryGroup(
        [*group.trajectories, *results],
        exceptions=group.exceptions,
        metadata=group.metadata,
        metrics=group.metrics,
        logs=group.logs,
    )


async def _run(
    rollouts: Sequence[Awaitable[Trajectory]], gathering: Gathering
) -> list[Trajectory | Exception]:
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]

    async def one(number: int, task: asyncio.Future[Trajectory]) -> Trajectory | Exception:
        try:
            trajectory = await _within(task, gathering.timeout)
            if not isinstance(trajectory, Trajectory):
                raise RolloutError(
                    f"Rollout {number} returned {type(trajectory).__name__}, not a Trajectory."
                )
        except Exception as error:
            gathering.failed(error)
            return error
        gathering.succeeded([trajectory])
        return trajectory

    return await _all(tasks, [one(*pair) for pair in enumerate(tasks)])


def _start(group: Awaitable[TrajectoryGroup], watch: _Watch) -> asyncio.Future[TrajectoryGroup]:
    if not isawaitable(group):
        raise ConfigError(
            f"A {type(group).__name__} is no group to await. Give TrajectoryGroup(rollout(...) for "
            "_ in range(8)), or a coroutine that returns a TrajectoryGroup."
        )
    token = _watch.set(watch)
    try:
        return asyncio.ensure_future(group)
    finally:
        _watch.reset(token)


async def _watched(task: asyncio.Future[TrajectoryGroup], watch: _Watch) -> TrajectoryGroup | None:
    """The group of `task`, or None where it failed as a whole, and may."""
    gathering = watch.gathering
    try:
        await asyncio.wait([task], timeout=gathering.timeout)
        group = await (_within(task, 0) if watch.opaque else task)
    except TooManyExceptionsError:
        raise
    except Exception as error:
        gathering.failed(error)
        return None
    if watch.opaque:
        gathering.expect(len(group) - 1)
        gathering.succeeded(group)
    return group


async def _within(task: asyncio.Future[T], timeout: float | None) -> T:
    await asyncio.wait([task], timeout=timeout)
    if not task.done():
        await _cancel([task])
        raise RolloutTimeoutError("The rollout passed its deadline and was cancelled.")
    return task.result()


async def _all(
    tasks: Sequence[asyncio.Future[Any]], watchers: list[Coroutine[Any, Any, T]]
) -> list[T]:
    """What `watchers` return. If one fails, or the caller is cancelled, all are cancelled."""
    watching = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        return await asyncio.gather(*watching)
    finally:
        await _cancel([*watching, *tasks])


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what is not done, and wait a little for it to clean up."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        done, _ = await asyncio.wait(running, timeout=CANCEL_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # seen: asyncio would else report it as never retrieved
