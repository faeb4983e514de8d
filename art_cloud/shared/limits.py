"""Durations and points in time as people write them, and as they like to read them."""

from __future__ import annotations

import itertools
import math
import re
from datetime import UTC, datetime

from .errors import ConfigError

RESERVE_SECONDS = 60.0
RESERVE_SHARE = 0.1
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(value: str | float) -> float:
    """Seconds in "90s", "15m", "2h", "1.5d" or a plain number of seconds, always above 0."""
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{value!r} is not a duration. Write it like '90s', '15m', '2h' or '1d', or as a "
            "number of seconds above 0."
        )
    return seconds


def parse_deadline(value: str | float | datetime) -> float | datetime:
    """A duration in seconds, or a point in time ("2026-12-24T18:00"; local without an offset).

    Raises:
        ConfigError: It is neither, or a time that has passed, or that no calendar has.
    """
    if isinstance(value, int | float):
        return parse_duration(value)
    try:
        point = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except ValueError:
        return parse_duration(str(value))
    try:
        point = point.astimezone(UTC)
    except (OverflowError, ValueError):
        raise ConfigError(f"The deadline {value} is beyond what a calendar has.") from None
    if point <= datetime.now(UTC):
        raise ConfigError(f"The deadline {value} has passed already.")
    return point


def reserve(allowed: float) -> float:
    """Seconds of an allowed time that a server keeps for finishing or leaving its step and for
    ending: a minute, or a tenth of the time where that is less."""
    return min(RESERVE_SECONDS, RESERVE_SHARE * allowed)


def words(seconds: float) -> str:
    """Seconds in words, by the two largest units: "2 d 3 h", "14 m 5 s", "0.5 s"; "ever" for
    infinity."""
    if not math.isfinite(seconds):
        return "ever"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    units = list(reversed(UNITS.items()))
    for (large, size), (small, part) in itertools.pairwise(units):
        if whole >= size:
            count, rest = divmod(whole, size)
            return f"{count} {large}" + (f" {rest // part} {small}" if rest >= part else "")
    return f"{whole} s"
