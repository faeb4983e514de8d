"""Ends the server when nobody needs it. The machine goes when its server does (rule 1)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Guardian:
    """Calls `stop` once nothing has happened for `idle` seconds: no request of any client, no
    sampling, no training."""

    def __init__(self, idle: float, busy: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.idle = idle
        self._busy = busy
        self._stop = stop
        self._last = time.monotonic()

    def touch(self) -> None:
        self._last = time.monotonic()

    @property
    def remaining(self) -> float:
        """Seconds until the server ends if nothing happens."""
        if self._busy():
            self.touch()
        return max(0.0, self._last + self.idle - time.monotonic())

    async def watch(self) -> None:
        while (remaining := self.remaining) > 0:
            await asyncio.sleep(min(remaining, 1.0))  # what is busy is asked, it does not tell
        log.warning("nothing happened for %.0f s: the server ends (--idle)", self.idle)
        self._stop()
