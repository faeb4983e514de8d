import asyncio
import math

import pytest
from art_server import guardian
from art_server.guardian import Guardian


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(guardian.time, "monotonic", lambda: self.now)


def test_idle_counts_from_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Guardian(60.0, busy=lambda: False, stop=lambda: None)
    clock.now += 40
    assert watched.remaining == 20
    watched.touch()
    clock.now += 59
    assert watched.remaining == 1
    clock.now += 2
    assert watched.remaining == 0


def test_what_is_at_work_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    busy = True
    watched = Guardian(60.0, busy=lambda: busy, stop=lambda: None)
    clock.now += 500
    assert watched.remaining == 60
    busy = False
    clock.now += 59
    assert watched.remaining == 1


def test_without_a_limit_it_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Guardian(math.inf, busy=lambda: False, stop=lambda: None)
    clock.now += 1e9
    assert watched.remaining == math.inf


async def test_it_stops_the_server_once() -> None:
    stopped: list[bool] = []
    watched = Guardian(0.01, busy=lambda: False, stop=lambda: stopped.append(True))
    async with asyncio.timeout(10):
        await watched.watch()
    assert stopped == [True]
