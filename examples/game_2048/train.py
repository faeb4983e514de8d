"""2048: slide the tiles, merge equal ones, reach the goal in a limited number of moves.

    python examples/game_2048/train.py --control          # 3 by 3 and a goal of 16: a tiny model
    python examples/game_2048/train.py --level full --provider ssh -o host=gpu-box \\
        --base-model Qwen/Qwen3-4B                        # 4 by 4 and a goal of 128

Each move is a conversation of its own: the board, the directions that it can slide in, and one of
them as the answer. Anything else ends the game.

Reward: 1 for the goal, and the points of all merges as a share of those that a goal tile takes;
0.5 less for an illegal move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count, islice
from math import log2
from typing import Any

import art_cloud as art
from art_cloud.demo import NO_THINKING, Experiment, experiment_parser, run_example

NAME, STEPS = "game-2048", 20
PENALTY = 0.5
WARM_UP_MOVES = 4500
GROUPS = 16

Board = list[list[int]]


@dataclass(frozen=True)
class Level:
    size: int
    tiles: int
    """On the board at the beginning."""
    goal: int
    moves: int
    """At most."""

    @property
    def goal_points(self) -> float:
        """What the merges up to the goal are worth, if every new tile is a 2."""
        return self.goal * (log2(self.goal) - 1)


LEVELS = {
    "tiny": Level(size=3, tiles=6, goal=16, moves=8),
    "full": Level(size=4, tiles=2, goal=128, moves=100),
}


def merge(row: list[int]) -> tuple[list[int], int]:
    """`row` slid to the left, and the points of its merges. Each tile merges at most once."""
    tiles = [tile for tile in row if tile]
    slid: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        slid.append(tile)
    return slid + [0] * (len(row) - len(slid)), points


def slide(board: Board, direction: str) -> tuple[Board, int]:
    """`board` after a move, before a new tile comes; and the points of the move."""
    rows = [list(row) for row in (zip(*board, strict=True) if direction in "UD" else board)]
    turn = -1 if direction in "RD" else 1
    merged = [merge(row[::turn]) for row in rows]
    rows = [row[::turn] for row, _ in merged]
    if direction in "UD":
        rows = [list(row) for row in zip(*rows, strict=True)]
    return rows, sum(points for _, points in merged)


@dataclass
class Game:
    """New tiles come repeatably by `seed`: 2, or 4 once in ten times."""

    level: Level
    seed: int
    board: Board = field(default_factory=list)
    points: int = 0
    moves: int = 0
    illegal: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        if not self.board:
            self.board = [[0] * self.level.size for _ in range(self.level.size)]
            for _ in range(self.level.tiles):
                self._new_tile()

    def __str__(self) -> str:
        rows = (" ".join(str(tile) for tile in row) for row in self.board)
        return f"2048: {' | '.join(rows)}. Answer one: {' '.join(self.legal())}"

    @property
    def largest(self) -> int:
        return max(map(max, self.board))

    @property
    def reached(self) -> bool:
        return self.largest >= self.level.goal

    @property
    def over(self) -> bool:
        return self.illegal or self.reached or self.moves == self.level.moves or not self.legal()

    @property
    def reward(self) -> float:
        return self.reached + self.points / self.level.goal_points - PENALTY * self.illegal

    def legal(self) -> list[str]:
        """Of Left, Right, Up and Down those that slide anything."""
        return [direction for direction in "LRUD" if slide(self.board, direction)[0] != self.board]

    def play(self, move: str) -> None:
        """The agent's move, as it wrote it, and the new tile after it."""
        move = move.strip()
        if move not in self.legal():
            self.illegal = True
            return
        self.board, points = slide(self.board, move)
        self.points += points
        self.moves += 1
        self._new_tile()

    def _new_tile(self) -> None:
        free = [
            (i, j) for i, row in enumerate(self.board) for j, tile in enumerate(row) if not tile
        ]
        row, column = self._random.choice(free)
        self.board[row][column] = 4 if self._random.random() < 0.1 else 2


def game_2048(level: Level) -> Experiment[int]:
    async def play(
        model: art.TrainableModel[Any], seed: int, /, *, step: int | None = None
    ) -> art.Trajectory:
        client, game = model.openai_client(), Game(level, seed)
        moves: list[art.History] = []
        while not game.over:
            prompt: art.Messages = [{"role": "user", "content": str(game)}]
            completion = await client.chat.completions.create(
                model=model.get_inference_name(step),
                messages=prompt,
                max_tokens=4,
                extra_body=NO_THINKING,
                seed=None if step is None else 1000 * seed + len(moves),
            )
            choice = completion.choices[0]
            moves.append(art.History(messages_and_choices=[*prompt, choice]))
            game.play(choice.message.content or "")
        return art.Trajectory(
            messages_and_choices=moves[0].messages_and_choices,
            additional_histories=moves[1:],
            reward=game.reward,
            metrics={
                "reached": game.reached,
                "points": game.points,
                "largest": game.largest,
                "moves": game.moves,
                "illegal": game.illegal,
            },
            metadata={"seed": seed},
        )

    warm_up = (move for seed in count(1) for move in random_moves(level, -seed))
    return Experiment(
        name=NAME,
        measure="reached",
        rollout=play,
        tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
        held_out=range(1_000_000, 1_000_300),
        warm_up=list(islice(warm_up, WARM_UP_MOVES)),
        warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=64),
        config=art.TrainConfig(learning_rate=1.2e-3),
        steps=STEPS,
    )


def random_moves(level: Level, seed: int) -> list[art.Messages]:
    """A game of legal moves at random, a conversation each: the format, not the skill."""
    game, moves = Game(level, seed), random.Random(~seed)  # noqa: S311
    conversations: list[art.Messages] = []
    while not game.over:
        move = moves.choice(game.legal())
        conversations.append(
            [{"role": "user", "content": str(game)}, {"role": "assistant", "content": move}]
        )
        game.play(move)
    return conversations


if __name__ == "__main__":
    parser = experiment_parser(NAME, "2048", STEPS)
    parser.add_argument("--level", choices=LEVELS, default="tiny", help="how large the board is")
    options = parser.parse_args()
    level = LEVELS[options.level]
    title = f"2048: {level.goal} in {level.moves} moves, {level.size} by {level.size}"
    run_example(game_2048(level), title, options)
