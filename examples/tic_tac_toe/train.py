"""Tic-tac-toe by self-play: the agent learns from games against an earlier version of itself.

    python examples/tic_tac_toe/train.py                    # a tiny model, on this machine
    python examples/tic_tac_toe/train.py --provider ssh -o host=gpu-box --base-model Qwen/Qwen3-0.6B

Every step has a name of its own, so the opponent is one more model to ask: `agent@12` while what
comes after `agent@16` learns. Held-out games are against an opponent that plays at random, which
training never meets, and against the agent's first version. The opponent begins every second game.

Reward: 1 for a win, 0.5 for a draw, 0 for a loss. An illegal move ends the game with -0.5. An
illegal move of the opponent is replaced by a random one: its blunders of form teach nothing.
"""

from __future__ import annotations

import random
from typing import Any, Literal, NamedTuple

import art_cloud as art
from art_cloud.demo import NO_THINKING, Experiment, run_example
from art_cloud.demo.game import REWARDS, Game

FIRST = 1
"""The version that later ones are measured by: what the warm-up made."""
LAG = 4
"""Steps that the opponent is behind in training."""
SYSTEM: art.Messages = [
    {"role": "system", "content": "You play X. Answer with the number of a free square."}
]
WARM_UP_GAMES = 1000
GROUPS, WATCHED = 16, 32
OTHER_SIDE = str.maketrans("XO", "OX")


class Task(NamedTuple):
    seed: int
    """Of the game. The opponent begins if it is odd."""
    opponent: Literal["earlier", "first", "random"]


async def play(
    model: art.TrainableModel[Any], task: Task, /, *, step: int | None = None
) -> art.Trajectory:
    """One game. Each move is a conversation of its own: the board, and the move."""
    game = Game(task.seed)
    opponent = await opponent_step(model, task, step)
    moves: list[art.History] = []

    async def move(board: str, version: int | None) -> tuple[art.History, str]:
        prompt: art.Messages = [*SYSTEM, {"role": "user", "content": board}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(version),
            messages=prompt,
            max_tokens=4,
            extra_body=NO_THINKING,
            seed=None if step is None else 10 * task.seed + len(game.free()),
        )
        choice = completion.choices[0]
        return art.History(messages_and_choices=[*prompt, choice]), choice.message.content or ""

    async def answer() -> None:
        if opponent is None:
            game.answer()
        else:
            _, square = await move(str(game).translate(OTHER_SIDE), opponent)
            game.answer(square)

    if task.seed % 2:
        await answer()
    while game.outcome is None:
        history, square = await move(str(game), step)
        moves.append(history)
        game.move(square)
        if game.outcome is None:
            await answer()
    against = "" if task.opponent == "random" else f"_against_{task.opponent}"
    return art.Trajectory(
        messages_and_choices=moves[0].messages_and_choices,
        additional_histories=moves[1:],
        reward=REWARDS[game.outcome],
        metrics={
            f"win_rate{against}": game.outcome == "win",
            f"loss_rate{against}": game.outcome == "loss",
            "illegal": game.outcome == "illegal",
        },
        metadata={"seed": task.seed, "opponent": task.opponent, "outcome": game.outcome},
    )


async def opponent_step(model: art.TrainableModel[Any], task: Task, step: int | None) -> int | None:
    """The version that plays the other side; None: nobody, its moves are random."""
    if task.opponent == "random":
        return None
    newest = await model.get_step() if step is None else step
    lag = LAG if task.opponent == "earlier" else newest
    return max(newest - lag, min(newest, FIRST))


def random_moves(seed: int) -> list[art.Messages]:
    """A game of legal moves at random, a conversation each: the format, not the skill."""
    game, moves = Game(seed), random.Random(~seed)  # noqa: S311
    conversations: list[art.Messages] = []
    if seed % 2:
        game.answer()
    while game.outcome is None:
        square = str(moves.choice(game.free()))
        conversations.append(
            [
                *SYSTEM,
                {"role": "user", "content": str(game)},
                {"role": "assistant", "content": square},
            ]
        )
        game.play(square)
    return conversations


def tasks(number: int) -> list[Task]:
    return [Task(seed, "earlier") for seed in range(number * GROUPS, (number + 1) * GROUPS)]


def watched(number: int) -> list[Task]:
    start = 500_000 + number * WATCHED
    return [Task(seed, "random") for seed in range(start, start + WATCHED)]


HELD_OUT = [
    Task(seed, opponent) for seed in range(1_000_000, 1_000_150) for opponent in ("random", "first")
]


if __name__ == "__main__":
    run_example(
        Experiment(
            name="tic-tac-toe",
            measure="win_rate",
            rollout=play,
            tasks=tasks,
            watched=watched,
            held_out=HELD_OUT,
            warm_up=[move for seed in range(WARM_UP_GAMES) for move in random_moves(-seed - 1)],
            warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=16),
            config=art.TrainConfig(learning_rate=1.2e-3),
            steps=18,
        ),
        title="Tic-tac-toe by self-play, measured against a random opponent",
    )
