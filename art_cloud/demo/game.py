"""Tic-tac-toe. The agent plays X and begins; O moves at random, repeatably by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

LINES = (
    *((row, row + 1, row + 2) for row in (0, 3, 6)),
    *((column, column + 3, column + 6) for column in (0, 1, 2)),
    (0, 4, 8),
    (2, 4, 6),
)

Outcome = Literal["win", "draw", "loss", "illegal"]
REWARDS: dict[Outcome, float] = {"win": 1.0, "draw": 0.5, "loss": 0.0, "illegal": -0.5}


@dataclass
class Game:
    """`squares` holds "X", "O" or "" for each of the nine, numbered 1 to 9 for the players."""

    seed: int
    squares: list[str] = field(default_factory=lambda: [""] * 9)
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311

    def __str__(self) -> str:
        cells = [square or str(number) for number, square in enumerate(self.squares, 1)]
        return " | ".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def free(self) -> list[int]:
        return [number for number, square in enumerate(self.squares, 1) if not square]

    def play(self, move: str) -> None:
        """The agent's move, as it wrote it, and O's answer to it. Sets `outcome` at the end."""
        self.move(move)
        if self.outcome is None:
            self.answer()

    def move(self, move: str) -> None:
        """The agent's move alone."""
        if self._is_free(move):
            self._place("X", int(move.strip()), "win")
        else:
            self.outcome = "illegal"

    def answer(self, move: str = "") -> None:
        """Make O's move: the square `move`, or a random one if that is no free square."""
        square = int(move.strip()) if self._is_free(move) else self._random.choice(self.free())
        self._place("O", square, "loss")

    def _is_free(self, move: str) -> bool:
        return move.strip() in map(str, self.free())

    def _place(self, player: str, number: int, if_won: Outcome) -> None:
        self.squares[number - 1] = player
        if any(all(self.squares[n] == player for n in line) for line in LINES):
            self.outcome = if_won
        elif not self.free():
            self.outcome = "draw"
