from __future__ import annotations

import asyncio
import math

import pytest
from art_server.lifetime import GRACE_SECONDS, RETURN_SECONDS, Guardian, Limits
from art_server.watchdog import STALL_SECONDS
from hypothesis import given
from hypothesis import strategies as st


class World:
    """A clock that stands still, and a server that is busy when it is told to, and gets on with it
    unless it hangs."""

    def __init__(self, limits: Limits, launched_ago: float = 0.0) -> None:
        self.now = 1000.0
        self.busy = False
        self.hangs_since: float | None = None
        self.warned: list[str] = []
        self.guardian = Guardian(
            limits,
            work=lambda: {"a step": round(self.moved)} if self.busy else {},
            warn=self.warned.append,
            launched_ago=launched_ago,
            clock=lambda: self.now,
        )

    @property
    def moved(self) -> float:
        return self.now if self.hangs_since is None else self.hangs_since

    def left(self, name: str) -> float:
        return {clock.name: clock.remaining for clock in self.guardian.clocks()}[name]

    async def ended(self) -> float | None:
        """The grace, if the server has to end now."""
        watching = asyncio.create_task(self.guardian.watch())
        await asyncio.sleep(0)
        if watching.done():
            return watching.result()
        watching.cancel()
        return None


async def test_idle_counts_from_the_last_request() -> None:
    world = World(Limits(idle=60))
    world.now += 40
    assert world.left("idle") == 20
    world.guardian.touch()
    world.now += 59
    assert world.left("idle") == 1
    assert await world.ended() is None
    world.now += 1
    assert await world.ended() == GRACE_SECONDS


async def test_what_is_at_work_is_not_idle() -> None:
    world = World(Limits(idle=60))
    world.busy = True
    world.now += 500
    assert world.left("idle") == 60
    world.busy = False
    world.now += 59
    assert world.left("idle") == 1


async def test_a_step_longer_than_the_lease_is_not_cut_off_and_its_client_may_come_back() -> None:
    world = World(Limits(lease=600))
    world.busy = True
    for _ in range(10):
        world.now += 599
        assert await world.ended() is None
    assert world.left("lease") == RETURN_SECONDS
    world.busy = False
    world.now += RETURN_SECONDS - 1
    assert await world.ended() is None
    world.now += 1
    assert await world.ended() == GRACE_SECONDS


async def test_what_hangs_holds_neither_lease_nor_idle() -> None:
    world = World(Limits(lease=600, idle=900))
    world.busy = True
    world.hangs_since = world.now
    for _ in range(18):
        assert await world.ended() is None
        world.now += 99
    world.now = world.hangs_since + STALL_SECONDS + RETURN_SECONDS
    assert await world.ended() == GRACE_SECONDS


async def test_work_does_not_renew_a_lease_before_it_lapses() -> None:
    world = World(Limits(lease=600, idle=900))
    world.busy = True
    world.now += 500
    assert world.left("lease") == 100
    assert world.left("idle") == 900
    world.guardian.touch()
    assert world.left("lease") == 600


@given(
    budget=st.floats(0.001, 1000),
    price=st.floats(0.001, 100),
    launched_ago=st.floats(0, 1e7),
    elapsed=st.floats(0, 1e7),
)
def test_a_budget_is_never_overspent(
    budget: float, price: float, launched_ago: float, elapsed: float
) -> None:
    """At every moment either the server ends now, or there is money for the grace and more."""
    world = World(Limits(budget=budget, price_per_hour=price), launched_ago)
    world.now += elapsed
    per_second = price / 3600
    spent = (launched_ago + elapsed) * per_second
    end = min(world.guardian._ends(), key=lambda end: end.left)
    reserve = 2 * end.grace
    assert 0 < reserve <= 60
    assert world.left("budget") == pytest.approx(max(0.0, budget - spent), abs=1e-6 * budget)
    if end.left > 0:
        assert spent + (end.left + reserve) * per_second == pytest.approx(budget, rel=1e-6)
    else:
        assert spent + reserve * per_second >= budget * (1 - 1e-6)


async def test_budget_and_deadline_count_from_the_launch_and_keep_a_reserve() -> None:
    world = World(Limits(budget=2.0, price_per_hour=1.0, deadline=7000), launched_ago=600)
    assert world.left("budget") == pytest.approx(2.0 - 1 / 6)
    assert world.left("deadline") == 6400
    assert world.guardian.life_left == 6400
    world.now += 6400 - 60 - 1
    assert await world.ended() is None
    world.busy = True  # what is at work puts neither off
    world.guardian.touch()
    world.now += 1
    assert await world.ended() == 30
    assert world.warned[-1].startswith("server ends (--deadline): ")


async def test_an_end_is_announced_twice_and_only_what_is_final_to_clients() -> None:
    world = World(Limits(deadline=1000, idle=500))
    for _ in range(104):
        world.now += 9
        world.guardian.touch()
        assert await world.ended() is None
    assert world.warned == world.guardian.warnings
    assert [message.partition(":")[0] for message in world.warned] == [
        "server ends in 3 m 4 s",
        "server ends in 40 s",
    ]


async def test_a_server_that_starts_late_says_only_what_matters() -> None:
    world = World(Limits(deadline=1000), launched_ago=930)
    assert await world.ended() is None
    assert len(world.warned) == 1
    assert world.warned[0].startswith("server ends in 10 s: its deadline")


async def test_one_that_starts_too_late_ends_at_once() -> None:
    assert await World(Limits(deadline=1000), launched_ago=999).ended() == 30


async def test_without_a_limit_it_never_ends() -> None:
    world = World(Limits())
    world.now += 1e9
    assert world.guardian.clocks() == []
    assert world.guardian.life_left == math.inf
    assert await world.ended() is None
    assert world.warned == []


async def test_a_budget_without_a_price_is_no_limit_of_time() -> None:
    assert World(Limits(price_per_hour=2.0)).guardian.life_left == math.inf
    assert World(Limits(budget=3.0, price_per_hour=2.0)).guardian.life_left == 5400
