"""Puzzles of one crime, made on the spot: who did it, where, with what, and when.

Each suspect was in a place of their own, had a thing of their own, and was there at an hour of
their own; one of them did it. Clues are added until all that is still possible gives one answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from typing import Literal, NamedTuple, TypeAlias

NAMES = (
    ("Joe", "Lee", "Pat", "Zoe"),
    ("hall", "mill", "pool", "yard"),
    ("bat", "net", "oar", "saw"),
    ("1", "2", "3", "4"),
)
CRIME = ("{}", "in the {}", "with the {}", "at {}")
SUBJECT = ("{}", "whoever was in the {}", "whoever had the {}", "whoever came at {}")
PREDICATE = ("was {}", "was in the {}", "had the {}", "came at {}")
NOT = ("was not {}", "was not in the {}", "did not have the {}", "did not come at {}")
WHO, WHERE, WHAT, WHEN = range(4)

Kind: TypeAlias = Literal["direct", "crime", "link", "order"]


class Level(NamedTuple):
    suspects: int
    kinds: tuple[Kind, ...]


LEVELS = {
    "tiny": Level(2, ("direct",)),
    "small": Level(3, ("crime", "link")),
    "full": Level(4, ("crime", "link", "order")),
}
"""The tiny one says what happened; the others take thinking, and so a model that can."""


Cast: TypeAlias = tuple[tuple[str, ...], ...]
"""The suspects of a puzzle, and the places, things and hours that there are."""


class World(NamedTuple):
    """What may have happened. `rows[suspect]` has the suspect's own number, place, thing, hour.

    Numbers are places in a puzzle's cast.
    """

    rows: tuple[tuple[int, ...], ...]
    culprit: int

    @property
    def answer(self) -> tuple[int, ...]:
        return self.rows[self.culprit]


class Crime(NamedTuple):
    """The crime was (not) done by, in, with or at `value`."""

    column: int
    value: int
    true: bool

    def holds(self, world: World) -> bool:
        return (world.answer[self.column] == self.value) == self.true

    def say(self, cast: Cast) -> str:
        name = CRIME[self.column].format(cast[self.column][self.value])
        return f"It was {'' if self.true else 'not '}{name}."


class Link(NamedTuple):
    """Two names (do not) belong to the same suspect."""

    columns: tuple[int, int]
    values: tuple[int, int]
    true: bool

    def holds(self, world: World) -> bool:
        (one, other), (value, another) = self.columns, self.values
        return any(r[one] == value and r[other] == another for r in world.rows) == self.true

    def say(self, cast: Cast) -> str:
        (one, other), (value, another) = self.columns, self.values
        subject = SUBJECT[one].format(cast[one][value])
        predicate = (PREDICATE if self.true else NOT)[other].format(cast[other][another])
        return f"{_capital(subject)} {predicate}."


class Order(NamedTuple):
    """Of two names of one column, the first one's hour was before the second one's."""

    column: int
    values: tuple[int, int]

    def holds(self, world: World) -> bool:
        first, second = (
            next(row[WHEN] for row in world.rows if row[self.column] == value)
            for value in self.values
        )
        return first < second

    def say(self, cast: Cast) -> str:
        phrase, names = SUBJECT[self.column], cast[self.column]
        first, second = (phrase.format(names[value]) for value in self.values)
        return f"{_capital(first)} came before {second}."


Clue: TypeAlias = Crime | Link | Order


@dataclass(frozen=True)
class Puzzle:
    cast: Cast
    clues: tuple[Clue, ...]
    answer: tuple[str, ...]
    """Who, where, with what, when."""

    def __str__(self) -> str:
        cast = "; ".join(map(", ".join, self.cast))
        return " ".join([f"{cast}.", *(clue.say(self.cast) for clue in self.clues)])

    def right(self, answer: str) -> list[bool]:
        """Which of the four questions the last line of `answer` has right."""
        *_, last = ["", *answer.strip().lower().splitlines()]
        words = re.findall(r"\w+", last)
        if len(words) != len(self.answer):
            return [False] * len(self.answer)
        return [word == name.lower() for word, name in zip(words, self.answer, strict=True)]


@cache
def make_puzzle(level: Level, seed: int, *, held_out: bool = False) -> Puzzle:
    """The same puzzle for the same seed. Each clue rules out something that was possible.

    An answer is either one of puzzles that are held out, or of the others.
    """
    chance = random.Random(seed)  # noqa: S311
    possible: Sequence[World] = _worlds(level.suspects)
    while True:
        who, where, what, when = (chance.sample(names, level.suspects) for names in NAMES)
        cast = (tuple(who), tuple(where), tuple(what), tuple(sorted(when)))
        truth = chance.choice(possible)
        answer = _names(truth, cast)
        if (sum(map(tuple.index, NAMES, answer)) % 3 == 0) == held_out:
            break
    true = [clue for clue in _clues(level) if clue.holds(truth)]
    clues: list[Clue] = []
    for clue in chance.sample(true, len(true)):
        left = [world for world in possible if clue.holds(world)]
        if len(left) < len(possible):
            possible = left
            clues.append(clue)
        if len({world.answer for world in possible}) == 1:
            break
    return Puzzle(cast, tuple(sorted(clues, key=true.index)), answer)


def solve(puzzle: Puzzle) -> set[tuple[str, ...]]:
    """Every answer that the clues allow."""
    return {
        _names(world, puzzle.cast)
        for world in _worlds(len(puzzle.cast[WHO]))
        if all(clue.holds(world) for clue in puzzle.clues)
    }


def _names(world: World, cast: Cast) -> tuple[str, ...]:
    return tuple(names[value] for names, value in zip(cast, world.answer, strict=True))


@cache
def _worlds(suspects: int) -> tuple[World, ...]:
    orders = list(permutations(range(suspects)))
    return tuple(
        World(tuple(zip(range(suspects), *columns, strict=True)), culprit)
        for *columns, culprit in product(orders, orders, orders, range(suspects))
    )


def _clues(level: Level) -> Iterator[Clue]:
    numbers = range(level.suspects)
    if "direct" in level.kinds:
        yield from (Crime(column, value, True) for column, value in product(range(4), numbers))
    if "crime" in level.kinds:
        yield from (Crime(*parts) for parts in product(range(4), numbers, (True, False)))
    if "link" in level.kinds:
        for one, other in ((a, b) for a in range(4) for b in range(a + 1, 4)):
            for value, another, true in product(numbers, numbers, (True, False)):
                yield Link((one, other), (value, another), true)
    if "order" in level.kinds:
        for column, values in product((WHO, WHERE, WHAT), permutations(numbers, 2)):
            yield Order(column, values)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
