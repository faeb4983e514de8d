"""Gathering: order, failures, deadlines, cancellation. Every wait has a deadline of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine

import pytest

import art_cloud as art


async def rollout(reward: float, started: list[float] | None = None) -> art.Trajectory:
    if started is not None:
        started.append(reward)
    await asyncio.sleep(0)
    return art.Trajectory(reward=reward)


async def failing(message: str = "boom") -> art.Trajectory:
    await asyncio.sleep(0)
    raise ValueError(message)


async def for_ever(cancelled: list[str] | None = None) -> art.Trajectory:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.append("yes")
        raise
    raise AssertionError("unreachable")


async def test_groups_come_back_in_their_order() -> None:
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup((rollout(10 * g + r) for r in range(3)), metadata={"g": g})
        for g in range(4)
    )
    assert [[t.reward for t in g] for g in groups] == [
        [10 * g + r for r in range(3)] for g in range(4)
    ]
    assert [g.metadata["g"] for g in groups] == [0, 1, 2, 3]


BUG = r"1 of 3 (?s:.*)ValueError: boom \(.*test_rollout\.py, line \d+\)"


async def test_a_failure_is_told_and_the_rest_cancelled() -> None:
    cancelled: list[str] = []
    with pytest.raises(art.TooManyExceptionsError, match=BUG) as info:
        await art.gather_trajectory_groups(
            [
                art.TrajectoryGroup([for_ever(cancelled), failing()]),
                art.TrajectoryGroup([rollout(1)]),
            ]
        )
    assert isinstance(info.value.__cause__, ValueError)
    assert cancelled == ["yes"]


async def test_failures_within_the_limit_are_kept_in_their_group() -> None:
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout(1), failing("a")]), art.TrajectoryGroup([rollout(2)])],
        max_exceptions=1,
    )
    assert [len(g) for g in groups] == [1, 1]
    assert [(e.type, e.message) for e in groups[0].exceptions] == [("ValueError", "a")]
    assert "failing" in groups[0].exceptions[0].traceback


async def test_a_fraction_counts_all_rollouts() -> None:
    def ten(failures: int) -> list[art.TrajectoryGroup]:
        return [
            art.TrajectoryGroup([failing() for _ in range(failures)]),
            art.TrajectoryGroup([rollout(1) for _ in range(10 - failures)]),
        ]

    await art.gather_trajectory_groups(ten(2), max_exceptions=0.2)
    with pytest.raises(art.TooManyExceptionsError, match="3 of 10"):
        await art.gather_trajectory_groups(ten(3), max_exceptions=0.2)


async def test_only_the_first_failures_are_listed() -> None:
    group = art.TrajectoryGroup([failing(f"number {i}") for i in range(9)])
    with pytest.raises(art.TooManyExceptionsError) as info:
        await art.gather_trajectory_groups([group], max_exceptions=7)
    assert str(info.value).count("ValueError") == 5
    assert "and 3 more" in str(info.value)


async def test_a_straggler_becomes_a_timeout_in_its_group() -> None:
    cancelled: list[str] = []
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout(1), for_ever(cancelled)])], timeout=0.05, max_exceptions=1
    )
    assert [t.reward for t in groups[0]] == [1]
    assert groups[0].exceptions[0].type == "RolloutTimeoutError"
    assert cancelled == ["yes"]


async def test_a_straggler_that_ignores_its_cancellation_does_not_hang_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("art_cloud.rollouts.running.CANCEL_SECONDS", 0.05)
    release = asyncio.Event()

    async def stubborn() -> art.Trajectory:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return art.Trajectory()

    async with asyncio.timeout(20):
        results = await art.gather_trajectories([stubborn()], timeout=0.05, max_exceptions=1)
    assert isinstance(results[0], art.RolloutTimeoutError)
    release.set()
    await asyncio.sleep(0)


async def test_a_timeout_inside_a_rollout_stays_its_own() -> None:
    async def slow_tool() -> art.Trajectory:
        raise TimeoutError("the tool was slow")

    results = await art.gather_trajectories([slow_tool()], timeout=60, max_exceptions=1)
    assert type(results[0]) is TimeoutError


async def test_after_each_replaces_multiplies_or_drops() -> None:
    async def after_each(
        group: art.TrajectoryGroup,
    ) -> art.TrajectoryGroup | list[art.TrajectoryGroup] | None:
        await asyncio.sleep(0)
        return {0: group, 1: [group, group], 2: None}[int(group.trajectories[0].reward)]

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup([rollout(i)]) for i in range(3)), after_each=after_each
    )
    assert [g.trajectories[0].reward for g in groups] == [0, 1, 1]


async def test_an_error_of_after_each_is_the_callers() -> None:
    async def after_each(group: art.TrajectoryGroup) -> None:
        raise LookupError("no judge")

    with pytest.raises(LookupError, match="no judge"):
        await art.gather_trajectory_groups(
            [art.TrajectoryGroup([rollout(1)]), art.TrajectoryGroup([for_ever()])],
            after_each=after_each,
            max_exceptions=99,
        )


async def test_a_group_made_by_a_function_of_ones_own_is_under_the_same_rules() -> None:
    async def scored(straggler: bool) -> art.TrajectoryGroup:
        rollouts = [rollout(1), for_ever() if straggler else rollout(2)]
        group = await art.TrajectoryGroup(rollouts)
        await asyncio.sleep(0.1)  # the judge: not under the rollouts' deadline
        group.metadata["judged"] = True
        return group

    groups = await art.gather_trajectory_groups(
        [scored(False), scored(True)], timeout=0.05, max_exceptions=1
    )
    assert [len(g) for g in groups] == [2, 1]
    assert all(g.metadata["judged"] for g in groups)


async def test_an_awaitable_that_makes_its_group_by_hand() -> None:
    async def by_hand(make: Callable[[], Awaitable[art.Trajectory]]) -> art.TrajectoryGroup:
        return art.TrajectoryGroup([await make()])

    groups = await art.gather_trajectory_groups(
        [by_hand(lambda: rollout(1)), by_hand(for_ever), by_hand(failing)],
        timeout=0.05,
        max_exceptions=2,
    )
    assert [g.trajectories[0].reward for g in groups] == [1]


async def test_a_group_awaited_alone_raises_on_the_first_failure() -> None:
    with pytest.raises(art.TooManyExceptionsError, match="boom"):
        await art.TrajectoryGroup([rollout(1), failing()])


async def test_a_bug_that_a_library_found_is_told_with_the_line_that_called_it() -> None:
    async def parse() -> art.Trajectory:
        return json.loads("{")

    with pytest.raises(art.TooManyExceptionsError, match=r"JSONDecodeError.*test_rollout\.py"):
        await art.gather_trajectories([parse()])


async def test_what_is_no_group_to_await() -> None:
    for odd in ([1], "group", None):
        with pytest.raises(art.ConfigError, match=rf"A {type(odd).__name__} is no group to await"):
            await art.gather_trajectory_groups([odd])  # type: ignore[list-item]


async def test_what_is_awaited_for_a_group_returns_one() -> None:
    async def rollout() -> art.Trajectory:
        return art.Trajectory(reward=1.0)

    with pytest.raises(art.ConfigError, match=r"returned a Trajectory.*gather_trajectories"):
        await art.gather_trajectory_groups([rollout()])  # type: ignore[list-item]


async def test_a_rollout_that_returns_something_else_is_a_failure() -> None:
    async def nothing() -> None:
        return None

    with pytest.raises(art.TooManyExceptionsError, match="returned NoneType, not a Trajectory"):
        await art.gather_trajectories([nothing()])  # type: ignore[list-item]


async def test_trajectories_alone_keep_failures_in_place() -> None:
    results = await art.gather_trajectories([rollout(1), failing(), rollout(3)], max_exceptions=0.5)
    assert isinstance(results[1], ValueError)
    assert [r.reward for r in results if isinstance(r, art.Trajectory)] == [1, 3]


async def test_cancelling_the_gathering_cancels_the_rollouts() -> None:
    cancelled: list[str] = []
    groups = [art.TrajectoryGroup([for_ever(cancelled) for _ in range(3)])]
    task = asyncio.create_task(art.gather_trajectory_groups(groups, max_exceptions=99))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["yes"] * 3


async def test_cancelling_before_the_start_leaves_no_coroutine_behind() -> None:
    waiting = rollout(1)
    task = asyncio.create_task(art.gather_trajectory_groups([art.TrajectoryGroup([waiting])]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inspect.getcoroutinestate(waiting) == inspect.CORO_CLOSED


def test_an_interrupt_is_no_rollout_failure() -> None:
    async def interrupted() -> art.Trajectory:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(art.gather_trajectories([interrupted(), for_ever()], max_exceptions=99))


@pytest.mark.parametrize("bad", [{"max_exceptions": -1}, {"timeout": 0}, {"timeout": -3}])
async def test_arguments_that_cannot_be_meant(bad: dict[str, float]) -> None:
    with pytest.raises(art.ConfigError):
        await art.gather_trajectory_groups([], **bad)  # type: ignore[arg-type]
    with pytest.raises(art.ConfigError):
        await art.gather_trajectories([], **bad)  # type: ignore[call-overload]


async def test_arguments_are_checked_before_any_rollout_is_made() -> None:
    made = []

    def one() -> Coroutine[None, None, art.Trajectory]:
        made.append(1)
        return rollout(1)

    with pytest.raises(art.ConfigError):
        await art.gather_trajectory_groups(
            (art.TrajectoryGroup([one()]) for _ in range(3)), max_exceptions=-1
        )
    with pytest.raises(art.ConfigError):
        await art.gather_trajectories((one() for _ in range(3)), max_exceptions=-1)
    assert made == []


async def test_progress_is_lines_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ART_PROGRESS", raising=False)
    await art.gather_trajectories([rollout(1) for _ in range(20)], pbar_desc="play")
    err = capfd.readouterr().err
    assert "play: 20/20" in err
    assert "reward 1.000" in err
    assert len(err.splitlines()) == 1
    monkeypatch.setenv("ART_PROGRESS", "0")
    await art.gather_trajectories([rollout(1)], pbar_desc="play")
    assert capfd.readouterr().err == ""
