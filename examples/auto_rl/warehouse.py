"""The agent's tools: the public functions of this file."""

from __future__ import annotations

from typing import Literal

Hall = Literal["north", "south"]

STOCK = {
    "tea": {"north": 12, "south": 40},
    "rice": {"north": 0, "south": 7},
    "salt": {"north": 31, "south": 3},
    "soap": {"north": 5, "south": 5},
}
ROOM = {"north": 60, "south": 60}


def items() -> list[str]:
    """What the warehouse keeps."""
    return sorted(STOCK)


def stock(item: str, hall: Hall) -> int:
    """How many boxes of an item are in a hall."""
    return STOCK[item][hall]


def room(hall: Hall) -> int:
    """How many more boxes a hall can take."""
    return ROOM[hall] - sum(halls[hall] for halls in STOCK.values())
