"""Waiting for what comes about by itself: the longer it takes, the less often it is looked at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.02
PATIENCE_SECONDS = 300.0


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    for pause in _pauses(condition, seconds):
        time.sleep(pause)


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    for pause in _pauses(condition, seconds):
        await asyncio.sleep(pause)


def _pauses(condition: Callable[[], bool], seconds: float) -> Iterator[float]:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"it did not come about in {seconds:g} s"
        yield min(max(SHORTEST_PAUSE, waited / 20), LONGEST_PAUSE)
