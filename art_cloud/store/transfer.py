"""How far a transfer is: bytes, rate and time left, told now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Watch = Callable[[int, int], None]
"""Called with the bytes that are done and all that there are."""

EVERY_SECONDS = 0.5


class Transfer:
    """Adds up what several threads move, and tells `watch` every so often and at the end."""

    def __init__(self, total: int, watch: Watch | None) -> None:
        self._total = total
        self._watch = watch
        self._done = 0
        self._told = time.monotonic()
        self._lock = threading.Lock()

    def moved(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._watch and (self._done == self._total or now - self._told >= EVERY_SECONDS):
                self._told = now
                self._watch(self._done, self._total)


class Rate:
    """Words for a `Watch` that started now."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def words(self, done: int, total: int) -> str:
        """As "120 of 200 MB, 90 MB/s, 1 s left"."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        rate = max(done, 1) / seconds
        left = (total - done) / rate
        return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
