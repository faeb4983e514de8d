"""Ends the server when nobody needs it, or when its money or its time is up.

The machine goes when its server does (rule 1), so whatever ends here ends the bill.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from art_cloud.shared.limits import reserve, words
from art_cloud.shared.protocol import Clock

from .watchdog import STALL_SECONDS, Moves

log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""How long the running job may take to finish once the server has to end."""
RETURN_SECONDS = 60.0
"""A lease that lapsed under a step or a request holds for so long after it: whoever waited for the
answer may come back."""
WARN_AT = (0.2, 0.05)
"""Shares of a limit that are left when its end is announced."""
POLL_SECONDS = 1.0
"""How often the guardian asks what is at work."""


@dataclass(frozen=True)
class Limits:
    """Seconds and US dollars. Budget and deadline count from the launch of the machine."""

    lease: float = math.inf
    idle: float = math.inf
    budget: float = math.inf
    deadline: float = math.inf
    price_per_hour: float = 0.0

    @property
    def affordable(self) -> float:
        """Seconds that the budget pays for."""
        return self.budget / self.price_per_hour * 3600 if self.price_per_hour else math.inf

    @property
    def life(self) -> float:
        """Seconds from the launch to the very end of budget and deadline."""
        return min(self.affordable, self.deadline)

    def are_over(self, elapsed: float) -> bool:
        """Whether a server would only end, so long after the launch."""
        return elapsed >= self.life - reserve(self.life)


class _End(NamedTuple):
    """How far one limit is."""

    name: str
    whole: float
    """Seconds from its start to where the server begins to end."""
    left: float
    """Of them."""
    grace: float
    """Seconds that a job may still take from there on."""
    cause: str
    final: bool = False
    """Nothing that anybody does moves it away."""


class Guardian:
    """Four clocks: lease, idle, budget, deadline. The first that runs out ends the server.

    `lease` is renewed by any request of a client, and never cuts off what is at work: `work`, with
    a number for each that changes when it moves. What has not moved for `stall` seconds does not
    count. `idle` starts anew with any request and with whatever is at work. `budget` and `deadline`
    stop early enough that what the end takes fits into them: the running job gets half of the
    reserve.

    `launched_ago` is how long the machine has been paid for already, in seconds. `warn` is called
    with the announcement of an end, once for each share in `WARN_AT`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        work: Callable[[], Mapping[str, int]],
        warn: Callable[[str], None],
        name: str = "server",
        launched_ago: float = 0.0,
        stall: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._name = name
        self.warnings: list[str] = []
        """Announced ends that nobody can put off."""
        self._work = work
        self._moves = Moves()
        self._stall = stall
        self._warn = warn
        self._now = clock
        self._launched = clock() - launched_ago
        self._renewed = self._active = clock()
        self._announced: dict[str, float] = {}

    def touch(self) -> None:
        """A client asked for something, or can from now on."""
        self._renewed = self._active = self._now()

    @property
    def life_left(self) -> float:
        """Seconds to the very end of budget and deadline."""
        return max(0.0, self.limits.life - self._elapsed)

    def clocks(self) -> list[Clock]:
        """Those that are limited."""
        limits = self.limits
        spent = self._elapsed / 3600 * limits.price_per_hour
        left = {end.name: end.left for end in self._ends()}
        found = [
            Clock(name="lease", limit=limits.lease, remaining=left["lease"], unit="s"),
            Clock(name="idle", limit=limits.idle, remaining=left["idle"], unit="s"),
            Clock(
                name="budget",
                limit=limits.budget,
                remaining=max(0.0, limits.budget - spent),
                unit="USD",
            ),
            Clock(
                name="deadline",
                limit=limits.deadline,
                remaining=max(0.0, limits.deadline - self._elapsed),
                unit="s",
            ),
        ]
        return [clock for clock in found if math.isfinite(clock.limit)]

    async def watch(self) -> float:
        """Wait until the server has to end; the seconds that a running job may still take."""
        while (soonest := min(self._ends(), key=lambda end: end.left)).left > 0:
            self._announce()
            await asyncio.sleep(min(soonest.left, POLL_SECONDS))
        message = f"{self._name} ends (--{soonest.name}): {soonest.cause}"
        log.warning("%s", message)
        self._warn(message)
        return soonest.grace

    @property
    def _elapsed(self) -> float:
        return self._now() - self._launched

    def _ends(self) -> list[_End]:
        now, limits = self._now(), self.limits
        self._moves.see(self._work(), now)
        if any(still < self._stall for still in self._moves.still(now).values()):
            self._active = now
            self._renewed = max(self._renewed, now - limits.lease + RETURN_SECONDS)
            self._renewed = min(self._renewed, now)
        return [
            _End(
                "lease",
                limits.lease,
                max(0.0, self._renewed + limits.lease - now),
                GRACE_SECONDS,
                "no client asks for anything",
            ),
            _End(
                "idle",
                limits.idle,
                max(0.0, self._active + limits.idle - now),
                GRACE_SECONDS,
                "nothing happens",
            ),
            self._final("budget", limits.affordable, f"its budget of ${limits.budget:.2f}"),
            self._final(
                "deadline",
                limits.deadline,
                f"its deadline of {words(limits.deadline)}",
            ),
        ]

    def _final(self, name: str, whole: float, cause: str) -> _End:
        kept = reserve(whole)
        left = max(0.0, whole - kept - self._elapsed)
        return _End(name, whole - kept, left, kept / 2, cause, final=True)

    def _announce(self) -> None:
        for end in self._ends():
            passed = [share for share in WARN_AT if end.left <= share * end.whole]
            if not passed or not math.isfinite(end.whole):
                self._announced.pop(end.name, None)  # it was renewed
            elif passed[-1] != self._announced.get(end.name):
                self._announced[end.name] = passed[-1]
                message = f"{self._name} ends in {words(end.left)}: {end.cause}"
                log.warning("%s", message)
                if end.final:
                    self.warnings.append(message)
                    self._warn(message)
