"""Run rollouts together: with progress, a deadline for each, and a limit to how many may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from typing import Literal, TypeAlias, TypeVar, overload

from ..shared.errors import ConfigError, TooManyExceptionsError
from ..shared.progress import progress
from .group import TrajectoryGroup
from .running import (
    Gathering,
    Watch,
    all_or_none,
    cancel,
    current_watch,
    run_rollouts,
    within_deadline,
)
from .trajectory import Trajectory

T = TypeVar("T")
AfterEach: TypeAlias = Callable[
    [TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]
]


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
        watches = [Watch(gathering, not isinstance(group, TrajectoryGroup)) for group in given]
        gathering.expect(sum(watch.opaque for watch in watches))
        tasks = [_start(*pair) for pair in zip(given, watches, strict=True)]

        async def one(task: asyncio.Future[TrajectoryGroup], watch: Watch) -> list[TrajectoryGroup]:
            group = await _watched(task, watch)
            if group is None or after_each is None:
                return [] if group is None else [group]
            replaced = await after_each(group)
            if replaced is None:
                return []
            return replaced if isinstance(replaced, list) else [replaced]

        done = await all_or_none(tasks, [one(*pair) for pair in zip(tasks, watches, strict=True)])
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
        return await run_rollouts(given, gathering)


async def gather_one(
    group: Awaitable[TrajectoryGroup], gathering: Gathering
) -> TrajectoryGroup | None:
    """Run one group under the limits of `gathering`; None if all of it failed and may."""
    watch = Watch(gathering, not isinstance(group, TrajectoryGroup))
    gathering.expect(int(watch.opaque))
    task = _start(group, watch)
    try:
        return await _watched(task, watch)
    finally:
        await cancel([task])


def _start(group: Awaitable[TrajectoryGroup], watch: Watch) -> asyncio.Future[TrajectoryGroup]:
    if not isawaitable(group):
        raise ConfigError(
            f"A {type(group).__name__} is no group to await. Give TrajectoryGroup(rollout(...) for "
            "_ in range(8)), or a coroutine that returns a TrajectoryGroup."
        )
    token = current_watch.set(watch)
    try:
        return asyncio.ensure_future(group)
    finally:
        current_watch.reset(token)


async def _watched(task: asyncio.Future[TrajectoryGroup], watch: Watch) -> TrajectoryGroup | None:
    """The group that `task` returns; None where the group failed as a whole, and is allowed to."""
    gathering = watch.gathering
    try:
        await asyncio.wait([task], timeout=gathering.timeout)
        group = await (within_deadline(task, 0) if watch.opaque else task)
    except TooManyExceptionsError:
        raise
    except Exception as error:
        gathering.failed(error)
        return None
    if not isinstance(group, TrajectoryGroup):
        raise ConfigError(
            f"What was awaited for a group returned a {type(group).__name__}. Give "
            "TrajectoryGroup(rollout(...) for _ in range(8)), or have it return one; single "
            "rollouts are for gather_trajectories."
        )
    if watch.opaque:
        gathering.expect(len(group) - 1)
        gathering.succeeded(group)
    return group
