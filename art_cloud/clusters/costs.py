"""What a machine may cost, and what it did cost: offers are chosen, receipts are written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import AwareDatetime, NonNegativeFloat, NonNegativeInt

from ..shared.config import Frozen
from ..shared.errors import ConfigError
from ..shared.limits import words
from .spec import ClusterSpec, Offer

SHORTEST_LIFE = 60.0
"""The shortest life in seconds that a budget must pay for: less is taken for a mistake."""


class Usage(NamedTuple):
    """What the servers of a cluster have done, as they said when they were last asked."""

    seen_at: datetime
    steps: int
    tokens_trained: int
    tokens_sampled: int


class Receipt(Frozen):
    """What a cluster cost, in US dollars, and what was done for it.

    Where its end was not seen (its server ended by itself), it came between `ended_after` and
    `ended_before`. Steps and tokens are None if its server was never asked.
    """

    name: str
    provider: str
    price_per_hour: NonNegativeFloat
    launched_at: AwareDatetime
    ended_after: AwareDatetime
    ended_before: AwareDatetime
    steps: NonNegativeInt | None = None
    tokens_trained: NonNegativeInt | None = None
    tokens_sampled: NonNegativeInt | None = None
    stays_on: bool = False
    """Whether the machine outlives its server, so that its rent goes on."""

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds that the cluster lived: at least, at most."""
        return (
            (self.ended_after - self.launched_at).total_seconds(),
            (self.ended_before - self.launched_at).total_seconds(),
        )

    @property
    def cost(self) -> tuple[float, float]:
        """US dollars that it cost: at least, at most."""
        least, most = self.seconds
        return least / 3600 * self.price_per_hour, most / 3600 * self.price_per_hour

    @property
    def seen_to_end(self) -> bool:
        return self.ended_after == self.ended_before

    @property
    def cost_per_step(self) -> float | None:
        """US dollars for each step, at most; None if no step was made, or the number is not
        known."""
        return self.cost[1] / self.steps if self.steps else None

    @property
    def summary(self) -> str:
        """One line: duration and cost, steps, tokens."""
        least, most = self.seconds
        parts = [f"{self.name}: {_between(words(least), words(most))}"]
        if self.price_per_hour:
            cost = _between(*(f"${dollars:.2f}" for dollars in self.cost))
            parts.append(f"{cost} at ${self.price_per_hour:.2f} an hour")
        if self.stays_on:
            parts.append("and its machine is not switched off")
        if self.steps is None:
            return ", ".join([*parts, "what it did is not known: its server was never asked"])
        each = f" (${self.cost_per_step:.3f} each)" if self.cost_per_step else ""
        return ", ".join(
            [
                *parts,
                f"{self.steps:,} steps{each}",
                f"{self.tokens_sampled:,} tokens sampled",
                f"{self.tokens_trained:,} trained on",
            ]
        )


def _between(least: str, most: str) -> str:
    return most if least == most else f"between {least} and {most}"


def choose(spec: ClusterSpec, offers: Sequence[Offer]) -> Offer:
    """The cheapest of `offers` that `spec` allows.

    Raises:
        ConfigError: There is none under `max_hourly`; a budget without a price, or one that pays
            for less than a minute.
    """
    if not offers:
        raise ConfigError(
            f"{spec.provider} has no machine for this. See what there is: art-cloud offers"
        )
    cheapest = min(offers, key=lambda offer: offer.price_per_hour)
    if spec.max_hourly is not None and cheapest.price_per_hour > spec.max_hourly:
        raise ConfigError(
            f"{spec.provider} has no machine under ${spec.max_hourly:.2f} an hour. The cheapest is "
            f"{described(cheapest)}. Raise --max-hourly, or ask for another machine: art-cloud "
            "offers"
        )
    if spec.budget is not None:
        if not cheapest.price_per_hour:
            raise ConfigError(
                f"A budget needs a price, and {spec.provider} knows none of this machine. Give "
                "what it costs (price_per_hour=, or -o price_per_hour= on the command line), or a "
                "deadline instead of the budget."
            )
        life = spec.model_copy(update={"offer": cheapest}).life_seconds
        if life < SHORTEST_LIFE:
            raise ConfigError(
                f"A budget of ${spec.budget:.2f} pays for {words(life)} of {described(cheapest)}: "
                "too little to start it. Raise it."
            )
    return cheapest


def described(offer: Offer) -> str:
    parts = [offer.machine, f"in {offer.region}", "(spot)" if offer.spot else ""]
    return f"{' '.join(filter(None, parts))} at ${offer.price_per_hour:.2f} an hour"


def make_receipt(
    name: str, spec: ClusterSpec, usage: Usage | None, now: datetime, *, seen_to_end: bool
) -> Receipt:
    """The receipt of a cluster that ended by `now`. With `seen_to_end` it was there until now."""
    assert spec.launched_at is not None
    last_seen = max(usage.seen_at if usage else spec.launched_at, spec.launched_at)
    now = max(now, last_seen)  # also where this machine's clock was set back
    life = (now - spec.launched_at).total_seconds()
    return Receipt(
        name=name,
        provider=spec.provider,
        price_per_hour=spec.price_per_hour,
        launched_at=spec.launched_at,
        ended_after=now if seen_to_end else last_seen,
        ended_before=now
        if seen_to_end or life < spec.life_seconds
        else spec.launched_at + timedelta(seconds=spec.life_seconds),
        steps=usage.steps if usage else None,
        tokens_trained=usage.tokens_trained if usage else None,
        tokens_sampled=usage.tokens_sampled if usage else None,
        stays_on=spec.provider == "ssh" and spec.options.get("on_end") != "poweroff",
    )
